"""The H100/H200 engine: persistent grouped products on Hopper's tensor cores (csrc/cuda/sm90, docs/kernels/sm90.md)."""

from __future__ import annotations

import functools
import math

import torch

from mok_compile import build
from mok_compile.activation import GatedForm, gated_form
from mok_compile.engines import Problem, get, warn_once
from mok_compile.grouped import empty_as, grouped_sum
from mok_compile.spec import ExpertsSpec

# In the order of `Layout` and `Activation::Kind` in csrc/cuda/sm90/arguments.h.
LAYOUTS = ("concat", "separate", "single", "interleaved")
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity", "swish")
DTYPES = (torch.bfloat16, torch.float16)
MAX_EXPERTS, MAX_TOP_K = 1023, 32
MAX_SLOTS = 1 << 22  # kRagged in csrc/cuda/sm90/persistent.cuh


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
            try:
                build.load("sm90")
            except build.BuildError as error:
                warn_once(f"mok-compile: no sm90 kernels, the portable engine runs instead: {error}")
                return str(error)
        return reason

    def forward(self, x, ids, weights, up, down, up_bias, down_bias, spec, *, save):
        transposed = _ready(x, ids, weights, up, down, spec)
        if transposed is None:
            return get("portable").forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=save)
        ops = torch.ops.mok_sm90
        ids, weights = ids_of(ids), weights.contiguous()
        if spec.weight_on == "input":
            x, weights = _weighted(x, ids, weights, down[0].shape[0]), torch.ones_like(weights)
        x, up_bias, down_bias = aligned(x), [aligned(b) for b in up_bias], [aligned(b) for b in down_bias]
        (tokens, hidden), slots = x.shape, ids.numel()
        num_experts, _, inner = down[0].shape
        y = x.new_empty(x.shape, dtype=spec.dtype)
        h = x.new_empty(slots, 2 * inner if spec.gated else inner) if save else None
        order, offsets = int32(x, slots), int32(x, num_experts)
        if slots == 0:
            return y, h, order, offsets.zero_()
        a, rows = x.new_empty(slots, inner), x.new_empty(slots + 1, hidden)
        operands = (x, ids, weights, up, down[0], up_bias, down_bias[0] if down_bias else None)
        layout, activation = numbers_of(spec)
        with torch.cuda.device(x.device):
            if not save and not transposed and _few(*ids.shape, num_experts):
                ops.decode(*operands, layout, activation, y, order, offsets, a, rows, stream_of(x))
                return y, h, order, offsets
            plan = int32(x, ops.plan_scratch(tokens, num_experts, ids.shape[1]))
            counts = int32(x, ops.sort_scratch(tokens, num_experts, ids.shape[1]))
            scratch = (plan, counts, a, rows)
            ops.forward(*operands, layout, transposed, activation, y, h, order, offsets, *scratch, stream_of(x))
        return y, h, order, offsets

    def backward(self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs):
        transposed = _ready(x, ids, weights, up, down, spec)
        if transposed is None or ids.numel() == 0:
            return get("portable").backward(
                dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs
            )
        ops = torch.ops.mok_sm90
        need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needs
        ids, h, dy, weights = ids_of(ids), aligned(h), aligned(dy.to(x.dtype)), weights.contiguous()
        routed, on_input = (x, weights), spec.weight_on == "input"
        if on_input:
            x, weights = _weighted(x, ids, weights, down[0].shape[0]), torch.ones_like(weights)
        x = aligned(x)
        num_experts, hidden, inner = down[0].shape
        slots, top_k = ids.numel(), ids.shape[1]
        plan = int32(x, ops.plan_scratch(x.shape[0], num_experts, top_k))
        dh = torch.empty_like(h)
        score = x.new_empty(ops.score_rows(inner), slots, dtype=torch.float32)
        dx = torch.empty_like(x) if need_x or (need_weights and on_input) else None
        dweights = torch.empty_like(weights) if need_weights and not on_input else None
        down_grads = [empty_as(w) for w in down] if need_down else []
        up_grads = [empty_as(w) for w in up] if need_up else []
        # The first gradient of up is written last: until then its memory serves as scratch, if there is enough.
        room = slots * max(hidden, inner)
        scratch = up_grads[0] if up_grads and up_grads[0].numel() >= room else x.new_empty(room)
        layout, activation = numbers_of(spec)
        with torch.cuda.device(x.device):
            how = (layout, transposed, activation)
            grads = (dx, dweights, up_grads, down_grads[0] if need_down else None)
            saved = (h, order, offsets)
            ops.backward(dy, x, ids, weights, up, down[0], *how, *saved, plan, dh, scratch, score, *grads, stream_of(x))
        del scratch
        bias_grads = []
        if need_up_bias:
            for b, part in zip(up_bias, dh.chunk(len(up_bias), 1), strict=True):
                bias_grads += grouped_sum(part, offsets, b)
        if need_down_bias:
            slot = order.long()
            dout = dy[slot // top_k] * weights.reshape(-1)[slot][:, None].float()
            bias_grads += grouped_sum(dout.to(x.dtype), offsets, down_bias[0])
        if dweights is not None and down_bias:
            dweights += bias_score(dy, ids, down_bias[0]).to(dweights.dtype)
        if on_input:
            dx, dweights = _unweighted(dx, *routed, ids, num_experts, need_x, need_weights)
        return [*(g for g in (dx, dweights) if g is not None), *up_grads, *down_grads, *bias_grads]


def _few(tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether the kernel for few tokens runs. Both paths give the same bits; this one reads an expert's weights once
    for every 8 of its rows: once, for up to 8 tokens, and seldom twice where experts have 4 rows on average. With more
    slots the other path was as fast or faster on an H200 (docs/kernels/sm90.md)."""
    return tokens * top_k <= (64 if tokens <= 8 else min(32, 4 * num_experts))


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


def bias_score(dy, ids, bias):
    """[T, K]: <dy[t], bias of the slot's expert>, what the down bias adds to the routing weight's gradient."""
    valid = (ids >= 0) & (ids < bias.shape[0])
    score = (dy.float() @ bias.float().t()).gather(1, torch.where(valid, ids, 0).long())
    return torch.where(valid, score, 0)


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
    if not problem.stacked:
        return "it needs the experts' weights stacked in one tensor"
    if problem.hidden % 8 or problem.intermediate % 8:
        return f"hidden and expert size must be multiples of 8, not {problem.hidden} and {problem.intermediate}"
    if problem.num_experts > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"it takes at most {MAX_EXPERTS} experts and {MAX_TOP_K} slots per token"
    form = gated_form(spec.expr)
    if form is None or form.gated != spec.gated:
        return f"it has no kernel for the activation {spec.activation}"
    return None


def _ready(x, ids, weights, up, down, spec) -> bool | None:
    """Whether the weights are stored as [E, in, out] instead of [E, out, in]; None where the kernels cannot run: that
    depends on how the weights lie in memory and on the number of tokens, and the graph may come from elsewhere."""
    reason = _unsupported(spec, Problem.of(x, ids, weights, down))
    transposed = False
    if reason is None:
        found = storage(up, down)
        reason, transposed = (found, False) if isinstance(found, str) else (None, found)
    if reason is None and ids.numel() > MAX_SLOTS:
        reason = f"it takes at most {MAX_SLOTS} slots"
    if reason is None:
        try:
            build.load("sm90")
        except build.BuildError as error:
            reason = str(error)
    if reason is not None:
        warn_once(f"mok-compile: the portable engine runs in place of sm90: {reason}")
        return None
    return transposed


def storage(up, down) -> bool | str:
    """Whether the weights are stored as [E, in, out] instead of [E, out, in], or why the kernels cannot read them."""
    tensors, transposed = (*up, *down), False
    if not all(w.is_contiguous() for w in tensors):
        transposed = all(w.mT.is_contiguous() for w in tensors)
        if not transposed:
            return "it needs all weights stored as [experts, out, in], or all as [experts, in, out], without gaps"
    if any(w.data_ptr() % 16 for w in tensors):
        return "it needs weights that start at a multiple of 16 bytes"
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
