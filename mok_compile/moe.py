"""``mok::moe``: an MoE block with its router; and ``mok::route``, the choice of experts on its own.

``mok::moe`` is what the graph shows and what is called; it consists of the router and of ``mok::experts``, into which
autograd, AOTAutograd and every mode of torch take it apart. In float32 and float64 the choice of experts is the op
``mok::route``, out of every compiler's reach: eager's own kernels run, or such as choose the same experts. In 16 bits,
where that is not promised, the router's functions stay visible to the compiler, which fuses them: an opaque op would
launch one kernel for each of them. An engine with kernels for a router takes ``mok::route`` in every dtype; one with
kernels for all of it takes ``mok::route_infer``, the whole router without anything for a gradient, where none is asked
for and, if they are for few tokens only, their number is known when the graph is made.

Shapes (legend in `mok_compile.spec`): x [T, H], router_x [T, R] (the same tensor in most models), router_weight [E, R],
router_bias [E]; correction, E numbers of any shape, takes part in the choice alone and gets no gradient; expert_scale
[E]; the experts' weights as for ``mok::experts``. Results: y [T, H]; logits [T, E], weights [T, K] and ids [T, K] int64
for whoever reads them, the first two with gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from mok_compile import engines, forward_mode, routing
from mok_compile.define import count_flops, define
from mok_compile.router import RouterSpec
from mok_compile.routing import Routed

EXACT = (torch.float32, torch.float64)

lib = torch.library.Library("mok", "FRAGMENT")
lib.define(
    "moe(Tensor x, Tensor router_x, Tensor router_weight, Tensor? router_bias, Tensor? correction, "
    "Tensor? expert_scale, Tensor[] up, Tensor[] down, Tensor[] up_bias, Tensor[] down_bias, "
    "str router, str spec, str engine) -> (Tensor y, Tensor logits, Tensor weights, Tensor ids)"
)


def check(x, weight, bias, correction, router: RouterSpec) -> None:
    """Raises ValueError or TypeError, naming the argument, unless the router's arguments fit together."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"mok::route: expected x [T, H] and weight [E, H], got {shapes}")
    experts = weight.shape[0]
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ValueError(f"mok::route: bias must have shape {(experts,)}, got {tuple(bias.shape)}")
    if any(t.dtype != x.dtype or not x.dtype.is_floating_point for t in (weight, bias) if t is not None):
        raise TypeError(f"mok::route: x, weight and bias must share one floating dtype; x is {x.dtype}")
    if (correction is not None) != router.corrected or (correction is not None and correction.numel() != experts):
        found = None if correction is None else tuple(correction.shape)
        raise ValueError(f"mok::route: correction must be {experts if router.corrected else 'no'} numbers, got {found}")
    if not 0 < router.top_k <= experts:
        raise ValueError(f"mok::route: cannot choose {router.top_k} of {experts} experts")
    if router.groups is not None and experts % router.groups.count:
        raise ValueError(f"mok::route: {experts} experts are not {router.groups.count} groups of one size")
    check_devices("mok::route", x, weight, bias, correction)


def check_scale(x, weight, scale, router: RouterSpec) -> None:
    """Raises ValueError unless the router has the scale [E] that it multiplies its experts' weights with."""
    shape = None if scale is None else tuple(scale.shape)
    if router.scaled and shape != (weight.shape[0],):
        raise ValueError(f"mok::moe: expert_scale must be {weight.shape[0]} numbers, got {shape}")
    check_devices("mok::route", x, scale)


def check_devices(op: str, x, *others) -> None:
    """Raises ValueError, naming `op`, unless all tensors, of which some may be None, are on one device."""
    elsewhere = {t.device for t in others if t is not None} - {x.device}
    if elsewhere:
        found = ", ".join(sorted(map(str, elsewhere)))
        raise ValueError(f"{op}: all arguments must be on one device; x is on {x.device}, others on {found}")


def _route(x, weight, bias, correction, router, engine):
    operands = (x, weight, bias, correction)
    with torch._C._DisableAutocast():
        if made := engines.directly(engine, "route", *operands, router, engine):
            return tuple(made)
        spec = RouterSpec.from_json(router)
        check(*operands, spec)
        routed = engines.router(engine, spec, weight).route(*operands, spec)
    return routed.logits, routed.values, routed.ids


def _route_fake(x, weight, bias, correction, router, engine):
    spec = RouterSpec.from_json(router)
    check(x, weight, bias, correction, spec)
    shape = (x.shape[0], spec.top_k)
    values = x.new_empty(shape, dtype=spec.scores_dtype(x.dtype))
    return x.new_empty(x.shape[0], weight.shape[0]), values, x.new_empty(shape, dtype=torch.int64)


def _route_infer(x, weight, bias, correction, expert_scale, router, engine):
    operands = (x, weight, bias, correction, expert_scale)
    with torch._C._DisableAutocast():
        if made := engines.directly(engine, "route_infer", *operands, router, engine):
            return tuple(made)
        spec = RouterSpec.from_json(router)
        check(x, weight, bias, correction, spec)
        check_scale(x, weight, expert_scale, spec)
        few = engines.router_tokens(engine, spec, weight) > 0
        made = engines.get(engine).route_few(*operands, spec) if few else routing.route_and_weigh(*operands, spec)
    return made.logits, made.weights, made.ids


def _route_infer_fake(x, weight, bias, correction, expert_scale, router, engine):
    spec = RouterSpec.from_json(router)
    check_scale(x, weight, expert_scale, spec)
    logits, values, ids = _route_fake(x, weight, bias, correction, router, engine)
    scale = None if expert_scale is None else expert_scale.dtype
    return logits, values.new_empty(values.shape, dtype=spec.weights_dtype(values.dtype, scale)), ids


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _, _, ctx.router, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, weight, *output)


def _backward(ctx, dlogits, dvalues, _):
    x, weight, *routed = ctx.saved_tensors
    if dvalues is not None:
        through = routing.logits_gradient(Routed(*routed), dvalues, RouterSpec.from_json(ctx.router))
        dlogits = through if dlogits is None else dlogits + through
    if dlogits is None:
        return (None,) * 6
    need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
    return (
        dlogits @ weight if need_x else None,
        dlogits.t() @ x if need_weight else None,
        dlogits.sum(0) if need_bias else None,
        *(None, None, None),
    )


def _nothing_saved(ctx, *grads):
    raise RuntimeError(
        "mok::route_infer saves nothing for a backward pass; call mok::moe or mok::route where you need gradients."
    )


define(
    lib,
    "route(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, str router, str engine)"
    " -> (Tensor logits, Tensor values, Tensor ids)",
    _route,
    _route_fake,
)
define(
    lib,
    "route_infer(Tensor x, Tensor weight, Tensor? bias, Tensor? correction, Tensor? expert_scale, str router, "
    "str engine) -> (Tensor logits, Tensor weights, Tensor ids)",
    _route_infer,
    _route_infer_fake,
)
torch.library.register_autograd("mok::route", _backward, setup_context=_setup_context, lib=lib)
torch.library.register_autograd("mok::route_infer", _nothing_saved, lib=lib)


_eager_choice: ContextVar[bool] = ContextVar("eager_choice", default=False)


@contextmanager
def eager_choice() -> Iterator[None]:
    """Within, eager's kernels choose the experts in ``mok::moe``: an engine's own may resolve a near tie otherwise."""
    token = _eager_choice.set(True)
    try:
        yield
    finally:
        _eager_choice.reset(token)


def _whole(x, weight, bias, correction, expert_scale, router: RouterSpec, engine: str) -> bool:
    """Whether the engine's kernels for a whole router run, which save nothing for a gradient. If they are for few
    tokens, these must be known to be so few, without a guard on a symbolic number."""
    if _eager_choice.get() or x.dtype in EXACT:
        return False
    learns = any(t is not None and t.requires_grad for t in (x, weight, bias, expert_scale))
    if learns and torch.is_grad_enabled():
        return False
    tokens, limit = x.shape[0], engines.router_tokens(engine, router, weight)
    if limit in (0, math.inf):
        return limit > 0
    if isinstance(tokens, int):
        return tokens <= limit
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import, and loaded by then

    return statically_known_true(tokens <= limit)


def _own(weight, router: RouterSpec, engine: str) -> bool:
    """Whether the engine has kernels of its own for the choice."""
    return not _eager_choice.get() and engines.router(engine, router, weight).name != engines.PORTABLE


def _moe(
    x,
    router_x,
    router_weight,
    router_bias,
    correction,
    expert_scale,
    up,
    down,
    up_bias,
    down_bias,
    router,
    spec,
    engine,
):
    forward_mode.refuse(
        "mok::moe", (x, router_x, router_weight, router_bias, expert_scale, up, down, up_bias, down_bias)
    )
    if correction is not None:  # which may be a parameter
        correction = correction.detach()
    described = RouterSpec.from_json(router)
    operands = (router_x, router_weight, router_bias, correction)
    check(*operands, described)
    check_scale(router_x, router_weight, expert_scale, described)
    if _whole(*operands, expert_scale, described, engine):
        logits, weights, ids = torch.ops.mok.route_infer(*operands, expert_scale, router, engine)
    else:
        with torch._C._DisableAutocast():
            if x.dtype in EXACT or _own(router_weight, described, engine):
                logits, values, ids = torch.ops.mok.route(*operands, router, engine)
            else:
                routed = routing.route(*operands, described)
                logits, values, ids = routed.logits, routed.values, routed.ids
            weights = routing.weigh(values, ids, expert_scale, described)
    y, *_ = torch.ops.mok.experts(x, ids, weights, up, down, up_bias, down_bias, spec, engine)
    return y, logits, weights, ids


lib.impl("moe", _moe, "CompositeImplicitAutograd")


def _route_flops(x, weight, *args, out_shape=None, **kwargs) -> int:
    return 2 * x[0] * x[1] * weight[0]


count_flops(_route_flops, torch.ops.mok.route, torch.ops.mok.route_infer)
