"""The ``mok::`` ops: schema, fake, autograd, FLOP formulas.

``mok::experts`` is the fused block as autograd sees it, ``mok::experts_backward`` its gradient, ``mok::experts_infer``
the form that saves nothing; ``mok::moe`` (`mok_compile.moe`) adds the router. All are functional: fresh outputs, inputs
never written. `torch.library.Library` rather than `custom_op`: a call costs 4 us instead of 12 to 22.

Shapes (legend in `mok_compile.spec`): x [T, H]; ids [T, K] integer; weights [T, K]; up one [E, 2I, H] (or gate and up
[E, I, H] each, or single [E, I, H]) or as many matrices per expert; down [E, H, I] or E of [H, I]; biases the same
without the last dimension, or empty lists. x, up and down share one dtype. Saved for backward: h [S, N] (N = 2I, or I
ungated), order [S] and offsets [E] int32: shapes that do not depend on the routing.

Autocast does not cast here, and not inside: the op stands for a graph whose casts are explicit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from mok_compile import engines, forward_mode, moe  # registers mok::moe and mok::route
from mok_compile.define import count_flops, define
from mok_compile.grouped import empty_as
from mok_compile.spec import ExpertsSpec

IDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

lib = torch.library.Library("mok", "DEF")
_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor[] down, Tensor[] up_bias, Tensor[] down_bias, "
_HOW = "str spec, str engine"


def check(x, ids, weights, up, down, up_bias, down_bias, spec: ExpertsSpec) -> None:
    """Raises ValueError or TypeError, naming the argument, unless the arguments fit together."""

    def expect(what: str, tensors: list[torch.Tensor], count: int, shape: tuple[int, ...]) -> None:
        if len(tensors) != count or [t.shape for t in tensors].count(shape) != count:
            found = [tuple(t.shape) for t in tensors[:3]]
            raise ValueError(f"mok::experts: {what} must be {count} of shape {shape}, got {len(tensors)}: {found}")

    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape:
        shapes = f"x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}"
        raise ValueError(f"mok::experts: expected x [T, H], ids [T, K] and weights [T, K], got {shapes}")
    if ids.dtype not in IDS or not weights.dtype.is_floating_point:
        raise TypeError(f"mok::experts: ids must be integer and weights floating, got {ids.dtype} and {weights.dtype}")
    if not x.dtype.is_floating_point or {t.dtype for ts in (up, down, up_bias, down_bias) for t in ts} - {x.dtype}:
        raise TypeError(f"mok::experts: x, the experts' weights and biases must share one dtype; x is {x.dtype}")
    moe.check_devices("mok::experts", x, ids, weights, *up, *down, *up_bias, *down_bias)
    stacked = bool(down) and down[0].dim() == 3
    num_experts = (down[0].shape[0] if stacked else len(down)) if down else 0
    if num_experts == 0 or ids.shape[1] == 0:
        raise ValueError("mok::experts: needs at least one expert and one slot per token")
    lead = (num_experts,) if stacked else ()
    count = 1 if stacked else num_experts
    hidden, inner = x.shape[1], down[0].shape[-1]
    parts, columns = {"separate": (2, inner), "single": (1, inner)}.get(spec.layout, (1, 2 * inner))
    expect("down", down, count, (*lead, hidden, inner))
    expect("up", up, parts * count, (*lead, columns, hidden))
    if up_bias:
        expect("up_bias", up_bias, parts * count, (*lead, columns))
    if down_bias:
        expect("down_bias", down_bias, count, (*lead, hidden))


def _experts(x, ids, weights, up, down, up_bias, down_bias, spec, engine):
    if made := engines.directly(engine, "experts", x, ids, weights, up, down, up_bias, down_bias, spec, engine):
        return tuple(made)
    spec = ExpertsSpec.from_json(spec)
    check(x, ids, weights, up, down, up_bias, down_bias, spec)
    with torch._C._DisableAutocast():
        return tuple(engines.get(engine).forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=True))


def _experts_infer(x, ids, weights, up, down, up_bias, down_bias, spec, engine):
    if made := engines.directly(engine, "experts_infer", x, ids, weights, up, down, up_bias, down_bias, spec, engine):
        return made[0]
    spec = ExpertsSpec.from_json(spec)
    check(x, ids, weights, up, down, up_bias, down_bias, spec)
    with torch._C._DisableAutocast():
        return engines.get(engine).forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=False)[0]


def _experts_backward(dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, engine, needs):
    operands = (dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets)
    if made := engines.directly(engine, "experts_backward", *operands, spec, engine, needs):
        return made
    with torch._C._DisableAutocast():
        return engines.get(engine).backward(*operands, ExpertsSpec.from_json(spec), needs)


def _experts_fake(x, ids, weights, up, down, up_bias, down_bias, spec, engine):
    spec = ExpertsSpec.from_json(spec)
    check(x, ids, weights, up, down, up_bias, down_bias, spec)
    slots = ids.shape[0] * ids.shape[1]
    inner = down[0].shape[-1]
    num_experts = down[0].shape[0] if down[0].dim() == 3 else len(down)
    y = x.new_empty(x.shape, dtype=spec.dtype)
    h = x.new_empty(slots, 2 * inner if spec.gated else inner)
    return y, h, ids.new_empty(slots, dtype=torch.int32), ids.new_empty(num_experts, dtype=torch.int32)


def _experts_infer_fake(*args):
    return _experts_fake(*args)[0]


def _experts_backward_fake(dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, engine, needs):
    wanted = (([x], [weights], up, down, up_bias, down_bias)[i] for i, need in enumerate(needs) if need)
    row_major = (x, weights)
    return [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if any(t is r for r in row_major) else empty_as(t)
        for group in wanted
        for t in group
    ]


define(
    lib,
    f"experts({_OPERANDS}{_HOW}) -> (Tensor y, Tensor h, Tensor order, Tensor offsets)",
    _experts,
    _experts_fake,
)
define(lib, f"experts_infer({_OPERANDS}{_HOW}) -> Tensor", _experts_infer, _experts_infer_fake)
define(
    lib,
    f"experts_backward(Tensor dy, {_OPERANDS}Tensor h, Tensor order, Tensor offsets, {_HOW}, bool[] needs) -> Tensor[]",
    _experts_backward,
    _experts_backward_fake,
)


_TENSORS = 7  # arguments before those that say how


def register_gradient(name: str, library: torch.library.Library) -> None:
    """The derivative of ``mok::<name>`` is ``mok::<name>_backward``.

    The first takes the tensors of ``mok::experts`` and what says how; the second dy, the same tensors, what the first
    returned beside y, what says how, and the needs. Not `torch.library.register_autograd`, which makes trees of the
    arguments and takes them apart: two fifths of what a call with `save` costs the host.
    """
    op, gradient = getattr(torch.ops.mok, name).default, getattr(torch.ops.mok, f"{name}_backward").default

    def below(keyset, args):
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Gradient(torch.autograd.Function):
        """Takes the tensors one by one: an autograd function sees none in a list."""

        @staticmethod
        def forward(ctx, keyset, how, sizes, x, ids, weights, *flat):
            output = below(keyset, (x, ids, weights, *_lists(flat, sizes), *how))
            ctx.how, ctx.sizes = how, sizes
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[1:])
            ctx.save_for_backward(x, ids, weights, *flat, *output[1:])
            return output

        @staticmethod
        def backward(ctx, dy, *unused):
            _, _, _, need_x, _, need_weights, *need_flat = ctx.needs_input_grad
            needs = [need_x, need_weights, *map(any, _lists(need_flat, ctx.sizes))]
            if dy is None or not any(needs):
                return (None,) * len(ctx.needs_input_grad)
            x, ids, weights, *saved = ctx.saved_tensors
            count = sum(ctx.sizes)
            lists, rest = _lists(saved, ctx.sizes), saved[count:]
            grads = iter(gradient(dy, x, ids, weights, *lists, *rest, *ctx.how, needs))
            dx = next(grads) if need_x else None
            dweights = next(grads) if need_weights else None
            listed = (n for need, size in zip(needs[2:], ctx.sizes, strict=True) for n in [need] * size)
            return (None, None, None, dx, None, dweights, *(next(grads) if n else None for n in listed))

    shown = type(f"mok_{name}", (Gradient,), {})  # with a name for profilers and for y.grad_fn

    def autograd(keyset, *args):
        forward_mode.refuse(f"mok::{name}", args[:_TENSORS])
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(keyset, args)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"mok::{name} has no derivative in torch.func's transforms (grad, vjp, jacrev, ...), only in "
                "torch.autograd. Compile with options={'mok.enabled': False} where you need one."
            )
        x, ids, weights, *lists = args[:_TENSORS]
        flat = [t for tensors in lists for t in tensors]
        return shown.apply(keyset, args[_TENSORS:], list(map(len, lists)), x, ids, weights, *flat)

    library.impl(name, autograd, "Autograd", with_keyset=True)


def _lists(flat: Sequence, sizes: list[int]) -> list[list]:
    """Consecutive pieces of `flat`, of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [list(flat[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def no_double_backward(ctx, *grads):
    """The derivative of a backward op."""
    raise RuntimeError(
        "mok::experts has no second derivative: backward(create_graph=True) through a fused MoE block is not "
        "supported. Compile with options={'mok.enabled': False} where you need it."
    )


def nothing_saved(ctx, *grads):
    """The derivative of an op that saves nothing."""
    raise RuntimeError(
        "mok::experts_infer saves nothing for a backward pass; call mok::experts where you need gradients "
        "(mok::experts_parallel instead of mok::experts_parallel_infer)."
    )


register_gradient("experts", lib)
torch.library.register_autograd("mok::experts_infer", nothing_saved, lib=lib)
torch.library.register_autograd("mok::experts_backward", no_double_backward, lib=lib)


def flops(x_shape, ids_shape, up_shapes, down_shapes, passes: int) -> int:
    """Multiply-adds of `passes` forward passes: each slot meets the up and the down matrices of one expert."""
    stacked = len(down_shapes[0]) == 3
    columns = sum(s[-2] for s in up_shapes[:: 1 if stacked else len(down_shapes)])
    slots = ids_shape[0] * ids_shape[1]
    return passes * 2 * slots * x_shape[1] * (columns + down_shapes[0][-1])


def _experts_flops(x, ids, weights, up, down, *args, out_shape=None, **kwargs) -> int:
    return flops(x, ids, up, down, 1)


def _experts_backward_flops(dy, x, ids, weights, up, down, *args, out_shape=None, **kwargs) -> int:
    return flops(x, ids, up, down, 2)


count_flops(_experts_flops, torch.ops.mok.experts, torch.ops.mok.experts_infer)
count_flops(_experts_backward_flops, torch.ops.mok.experts_backward)


_BLOCKS = ("mok::moe", "mok::experts", "mok::experts_infer", "mok::experts_parallel", "mok::experts_parallel_infer")


def is_ours(target) -> bool:
    """Whether the target of a graph node is a ``mok::`` op, as an overload or as the packet that user code calls."""
    return _name(target).startswith("mok::")


def is_block(target, router: bool = False) -> bool:
    """Whether the target of a graph node stands for a whole block; with `router`, for one with its router."""
    return _name(target) in (("mok::moe",) if router else _BLOCKS)


def is_parallel(target) -> bool:
    """Whether the target of a graph node is a block whose experts are spread over ranks."""
    return _name(target).startswith("mok::experts_parallel")


def _name(target) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target._qualified_op_name if isinstance(target, torch._ops.OpOverloadPacket) else ""
