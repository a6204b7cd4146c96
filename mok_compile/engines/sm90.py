"""The H100/H200 engine: persistent grouped products on Hopper's tensor cores (csrc/cuda/sm90, docs/kernels/sm90.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from mok_compile import build, engines, routing
from mok_compile.activation import GatedForm, gated_form
from mok_compile.engines import Problem, get, sm90_router, warn_once
from mok_compile.grouped import Bank
from mok_compile.reference import Experts
from mok_compile.router import RouterSpec
from mok_compile.spec import ExpertsSpec

# In the order of `Layout` and `Activation::Kind` in csrc/cuda/sm90/arguments.h.
LAYOUTS = ("concat", "separate", "single", "interleaved")
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity", "swish")
DTYPES = (torch.bfloat16, torch.float16)
NUMBERS = {dtype: number for number, dtype in enumerate(sm90_router.DTYPES)}  # Dtype there
CHOOSES_ONLY = -2  # kChoosesOnly there
MAX_EXPERTS, MAX_TOP_K = 1023, 32
MAX_SLOTS = 1 << 22  # tiles, tickets and rows of panels are counted in 32 bits
FEW: bool | None = None  # whether inference takes the kernel for few tokens; None: where it pays. The bits are the same


class Sm90:
    name = "sm90"

    def usable(self) -> str | None:
        if not torch.cuda.is_available():
            return "it needs an NVIDIA GPU"
        if not any(_is_hopper(i) for i in range(torch.cuda.device_count())):
            found = ", ".join(
                sorted({f"{torch.cuda.get_device_capability(i)}" for i in range(torch.cuda.device_count())})
            )
            return f"it needs a GPU of compute capability (9, 0), and there are only {found}"
        return build.unavailable("sm90")

    def supports(self, spec: ExpertsSpec, problem: Problem) -> str | None:
        reason = _unsupported(spec, problem)
        if reason is None:
            reason = build.failure("sm90")
            if reason is not None:
                warn_once(f"mok-compile: no sm90 kernels, the portable engine runs instead: {reason}")
        return reason

    def forward(self, x, ids, weights, up, down, up_bias, down_bias, spec, *, save):
        experts = Experts.of(up, down, up_bias, down_bias, spec)
        where = _ready(x, ids, weights, down, experts, spec)
        if where is None:
            return get("portable").forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=save)
        ids, weights, inner = ids_of(ids), weights.contiguous(), down[0].shape[-1]
        if spec.weight_on == "input":
            x, weights = _weighted(x, ids, weights, len(experts)), torch.ones_like(weights)
        x = aligned(x)
        if ids.numel() == 0:
            h = x.new_empty(0, 2 * inner if spec.gated else inner) if save else None
            return x.new_empty(x.shape, dtype=spec.dtype), h, int32(x, 0), int32(x, len(experts)).zero_()
        _tell(spec)
        block, out = _block(x, ids, weights, experts, where, spec), NUMBERS[spec.dtype]
        with torch.cuda.device(x.device):
            if save:
                return launched(torch.ops.mok_sm90.forward, *block, out, stream_of(x))
            (y,) = launched(torch.ops.mok_sm90.infer, *block, out, FEW, stream_of(x))
        return y, None, None, None

    def backward(self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs):
        experts = Experts.of(up, down, up_bias, down_bias, spec)
        where = _ready(x, ids, weights, down, experts, spec)
        if where is None or ids.numel() == 0:
            return get("portable").backward(
                dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs
            )
        need_x, need_weights, *need_experts = needs
        ids, h, dy, weights = ids_of(ids), aligned(h), aligned(dy.to(x.dtype)), weights.contiguous()
        routed, on_input = (x, weights), spec.weight_on == "input"
        if on_input:
            x, weights = _weighted(x, ids, weights, len(experts)), torch.ones_like(weights)
        x = aligned(x)
        wanted = [need_x or need_weights, False, *need_experts] if on_input else needs
        block = _block(x, ids, weights, experts, where, spec)
        with torch.cuda.device(x.device):
            made = iter(launched(torch.ops.mok_sm90.backward, dy, *block, h, order, offsets, wanted, stream_of(x)))
        dx, dweights = (next(made) if wanted[i] else None for i in range(2))
        of_experts = list(made)
        if on_input:
            dx, dweights = _unweighted(dx, *routed, ids, len(experts), need_x, need_weights)
        if isinstance(experts.down, list):
            of_experts = [part for grad in of_experts for part in _parts(grad)]
        return [*(g for g in (dx, dweights) if g is not None), *of_experts]

    def supports_router(self, router: RouterSpec, weight: torch.Tensor) -> str | None:
        experts = weight.shape[0]
        if not isinstance(experts, int):
            return "it must know the number of experts"
        return _unrouted(weight.device, weight.dtype, experts, router)

    def route(self, x, weight, bias, correction, router) -> routing.Routed:
        program = sm90_router.program(router, x.dtype, None if correction is None else correction.dtype, weighs=False)
        if program is None or build.failure("sm90"):
            return routing.route(x, weight, bias, correction, router)
        _tell_router(router, x.dtype, None if correction is None else correction.dtype, None, weighs=False)
        logits = torch.nn.functional.linear(x, weight, bias).contiguous()
        correction = None if correction is None else correction.contiguous()
        with torch.cuda.device(x.device):
            values, ids = sm90_router.choose(logits, correction, router, program, stream_of(x))
        return routing.Routed(logits, values, ids)

    def router_tokens(self, router: RouterSpec, weight: torch.Tensor) -> float:
        return math.inf if self.supports_router(router, weight) is None else 0

    def route_few(self, x, weight, bias, correction, expert_scale, router) -> routing.Routing:
        operands = (x, weight, bias, correction, expert_scale)
        dtypes = [None if v is None else v.dtype for v in (correction, expert_scale)]
        program = sm90_router.program(router, x.dtype, *dtypes)
        if program is None or build.failure("sm90"):
            return routing.route_and_weigh(*operands, router)
        _tell_router(router, x.dtype, *dtypes, weighs=True)
        bias, *vectors = [None if v is None else v.contiguous() for v in operands[2:]]
        with torch.cuda.device(x.device):
            if x.shape[0] <= sm90_router.MAX_TOKENS and _multiplies(weight):
                rest = (bias, *vectors, router, program, stream_of(x))
                logits, _, weights, ids = sm90_router.launch(aligned(x), weight, *rest)
            else:
                logits = torch.nn.functional.linear(x, weight, bias).contiguous()
                weights, ids = sm90_router.choose_and_weigh(logits, *vectors, router, program, stream_of(x))
        return routing.Routing(logits, weights, ids)


def _multiplies(weight: torch.Tensor) -> bool:
    """Whether the kernel for few tokens can read a router's weight."""
    return (
        weight.dtype in DTYPES and weight.is_contiguous() and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    )


@functools.lru_cache(maxsize=256)
def _unrouted(device: torch.device, dtype: torch.dtype, experts: int, router: RouterSpec) -> str | None:
    """Why the kernels for routers do not run, None if they do."""
    if device.type != "cuda" or not _is_hopper(device.index):
        return "it runs on GPUs of compute capability (9, 0)"
    return sm90_router.unsupported(dtype, experts, router)


@functools.cache  # the library keeps them all as well
def _tell(spec: ExpertsSpec) -> None:
    """From now on the library runs most calls with this spec by itself (csrc/cuda/direct.cpp)."""
    if spec.weight_on == "output":
        torch.ops.mok_sm90.tell(spec.to_json(), *numbers_of(spec), NUMBERS[spec.dtype])
    for op in ("experts", "experts_infer", "experts_backward"):
        engines.direct["sm90", op] = getattr(torch.ops.mok_sm90, op).default


@functools.cache
def _tell_router(
    router: RouterSpec, x: torch.dtype, correction: torch.dtype | None, scale: torch.dtype | None, *, weighs: bool
) -> None:
    """The same for calls with this router and operands of these dtypes, of ``mok::route_infer`` if it `weighs`, else of
    ``mok::route``."""
    program = sm90_router.program(router, x, correction, scale, weighs=weighs)
    known = [-1 if dtype is None else NUMBERS[dtype] for dtype in (x, correction, scale)]
    if not weighs:
        known[-1] = CHOOSES_ONLY
    out = program.weights if weighs else program.values
    torch.ops.mok_sm90.tell_router(router.to_json(), program.numbers, *known, NUMBERS[out])
    engines.direct["sm90", "route_infer"] = torch.ops.mok_sm90.route_infer.default
    engines.direct["sm90", "route"] = torch.ops.mok_sm90.route_train.default


def _block(x, ids, weights, experts: Experts, where: Storage, spec: ExpertsSpec) -> tuple:
    """A block as the ops take it. Of each bank of up, and of down, that is the tensor of all experts or the first
    one's, beside all addresses: a list of tensors costs a call seven times as much as one of numbers."""
    *up, down = [bank if isinstance(bank, torch.Tensor) else bank[0] for bank in (*experts.up, experts.down)]
    up_bias = [_stacked(bias) for bias in experts.up_bias]
    down_bias = None if experts.down_bias is None else _stacked(experts.down_bias)
    layout, activation = numbers_of(spec)
    return x, ids, weights, up, down, where.addresses, up_bias, down_bias, layout, where.transposed, activation


def _stacked(bias: Bank) -> torch.Tensor:
    """A bias, one tensor for all experts. Those of lists are copied, which is little."""
    return aligned(bias) if isinstance(bias, torch.Tensor) else torch.stack(bias)


def launched(op, *arguments) -> list[torch.Tensor]:
    """What an op makes. Where memory does not suffice it makes nothing; then the allocator is asked for as much from
    here, since its error does not come through the interface that the library was built for."""
    if (made := op(*arguments)) or not (missing := torch.ops.mok_sm90.bytes_missing()):
        return made  # perhaps nothing was wanted
    torch.empty(missing, dtype=torch.uint8, device="cuda")
    if made := op(*arguments):  # it was there: somebody has freed some
        return made
    raise torch.OutOfMemoryError(f"CUDA out of memory. The experts of a block need {missing / 2**20:.2f} MiB at once.")


def _parts(grad: torch.Tensor) -> list[torch.Tensor]:
    """A gradient's part for each expert. Autograd does not take them for views: a change of one would count as a change
    of all."""
    if grad.is_contiguous():
        return list(torch.unsafe_split(grad.flatten(0, 1), grad.shape[1]))
    return [part.mT for part in _parts(grad.mT)]


def _weight_rows(ids, weights, num_experts):
    """[T, 1] float32: the weight of each token's only slot, zero where it has no expert."""
    return torch.where((ids >= 0) & (ids < num_experts), weights.float(), 0)


def _weighted(x, ids, weights, num_experts):
    """x as the experts see it where the routing weight multiplies the input of a token's only expert."""
    return (x * _weight_rows(ids, weights, num_experts)).to(x.dtype)


def _unweighted(dx, x, weights, ids, num_experts, need_x, need_weights):
    """The gradients of x and weights from that of the weighted x."""
    valid = (ids >= 0) & (ids < num_experts)
    dweights = torch.where(valid, (dx.float() * x.float()).sum(1, keepdim=True), 0).to(weights.dtype)
    dx = (dx * _weight_rows(ids, weights, num_experts)).to(x.dtype)
    return dx if need_x else None, dweights if need_weights else None


@functools.lru_cache(maxsize=256)
def _unsupported(spec: ExpertsSpec, problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return f"it runs on CUDA devices, not on {problem.device.type}"
    if not _is_hopper(problem.device.index):
        return f"it needs compute capability (9, 0), not {torch.cuda.get_device_capability(problem.device)}"
    if problem.dtype not in DTYPES:
        return f"it has no kernels for {problem.dtype}"
    if problem.weights_dtype not in (*DTYPES, torch.float32):
        return f"routing weights must be bfloat16, float16 or float32, not {problem.weights_dtype}"
    if spec.dtype not in (problem.dtype, torch.float32):
        return f"it cannot write {spec.out_dtype} from {problem.dtype}"
    if spec.layout not in LAYOUTS:
        return f"it has no kernels for the {spec.layout} layout yet"
    if spec.weight_on != "output" and problem.top_k != 1:
        return f"with routing weights on the input it takes one expert per token, not {problem.top_k}"
    if problem.hidden % 8 or problem.intermediate % 8:
        return f"hidden and expert size must be multiples of 8, not {problem.hidden} and {problem.intermediate}"
    if problem.num_experts > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"it takes at most {MAX_EXPERTS} experts and {MAX_TOP_K} slots per token"
    form = gated_form(spec.expr)
    if form is None or form.gated != spec.gated:
        return f"it has no kernel for the activation {spec.activation}"
    return None


@dataclass(frozen=True)
class Storage:
    """How a block's weights lie in memory. ``transposed``: as [E, in, out] instead of [E, out, in]; ``addresses``: of
    lists, those of the experts' matrices, up (gate, then up) before down."""

    transposed: bool
    addresses: list[int]


def _ready(x, ids, weights, down, experts, spec) -> Storage | None:
    """How the weights lie in memory; None where the kernels cannot run: that depends on it and on the number of tokens,
    and the graph may come from elsewhere."""
    reason = _unsupported(spec, Problem.of(x, ids, weights, down))
    found = None
    if reason is None:
        found = storage(experts.up, experts.down)
        reason = found if isinstance(found, str) else None
    if reason is None and ids.numel() > MAX_SLOTS:
        reason = f"it takes at most {MAX_SLOTS} slots"
    if reason is None:
        reason = build.failure("sm90")
    if reason is not None:
        warn_once(f"mok-compile: the portable engine runs in place of sm90: {reason}")
        return None
    return found


def storage(up: list[Bank], down: Bank) -> Storage | str:
    """How the weights lie in memory, or why the kernels cannot read them."""
    orders, of_lists = set(), []
    for bank in (*up, down):
        tensors = [bank] if isinstance(bank, torch.Tensor) else bank
        orders.add(_order(tensors))
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if math.gcd(*addresses) % 16:
            return "it needs weights that start at a multiple of 16 bytes"
        # The distance of two experts is at most a number of 31 bits times one of 40 bits, that divides all distances:
        # `Weight` in csrc/cuda/sm90/arguments.h.
        low, far = min(addresses), max(addresses) - min(addresses)
        if far >= 16 << 31 and far >= min(math.gcd(*(a - low for a in addresses)) << 31, 1 << 40):
            return "it needs weights that lie closer together in memory"
        if tensors is bank:
            of_lists += addresses
    if None in orders or len(orders) > 1:
        return "it needs all weights stored as [experts, out, in], or all as [experts, in, out], in rows of 16 bytes"
    return Storage(orders.pop(), of_lists)


def _order(bank: list[torch.Tensor]) -> bool | None:
    """Whether matrices are stored as [in, out] instead of [out, in]; None where the kernels cannot read them: matrices
    may lie anywhere, but their rows must have one distance, in multiples of 16 bytes."""
    if all(map(torch.Tensor.is_contiguous, bank)):
        return False
    first = bank[0]
    strides = {*map(torch.Tensor.stride, bank)}
    if len(strides) > 1:
        return None
    *between, pitch, step = strides.pop()
    (rows, columns), transposed = first.shape[-2:], step != 1
    if transposed:
        pitch, step, rows, columns = step, pitch, columns, rows
    if step != 1 or pitch % 8 or pitch < columns:
        return None
    # The experts of a stack must not lie inside of each other: in a gradient with such strides they would as well.
    if first.dim() == 3 and first.shape[0] > 1 and (between[0] % 8 or between[0] < rows * pitch):
        return None
    return transposed


@functools.cache
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


@functools.lru_cache(maxsize=256)
def numbers_of(spec: ExpertsSpec) -> tuple[int, list[float]]:
    form = gated_form(spec.expr)
    return LAYOUTS.index(spec.layout), _numbers(form)


def _numbers(form: GatedForm) -> list[float]:
    swapped = form.gated and form.gate_leaf == "up"
    limits = (form.gate_min, form.gate_max, form.up_min, form.up_max, form.up_offset)
    assert not any(math.isnan(v) for v in limits)
    return [KINDS.index(form.kind), float(swapped), form.alpha, *limits]


def aligned(t: torch.Tensor) -> torch.Tensor:
    """`t` as the kernels read it: without gaps, rows at multiples of 16 bytes."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def ids_of(ids: torch.Tensor) -> torch.Tensor:
    ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.int()
    return ids.contiguous()


def int32(like: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=like.device)


def stream_of(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


engine = Sm90()
