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
LAYOUTS = ("concat", "separate", "single")
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
        ops = _ops(x, ids, weights, up, down, spec)
        if ops is None:
            return get("portable").forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=save)
        x, ids, weights = _aligned(x), _ids(ids), weights.contiguous()
        up_bias, down_bias = [_aligned(b) for b in up_bias], [_aligned(b) for b in down_bias]
        (tokens, hidden), slots = x.shape, ids.numel()
        num_experts, _, inner = down[0].shape
        y = x.new_empty(x.shape, dtype=spec.dtype)
        h = x.new_empty(slots, 2 * inner if spec.gated else inner) if save else None
        order, offsets = _int32(x, slots), _int32(x, num_experts)
        if slots == 0:
            return y, h, order, offsets.zero_()
        plan = _int32(x, ops.plan_scratch(tokens, num_experts, ids.shape[1]))
        counts = _int32(x, ops.sort_scratch(tokens, num_experts, ids.shape[1]))
        a, rows = x.new_empty(slots, inner), x.new_empty(slots, hidden)
        operands = (x, ids, weights, up, down[0], up_bias, down_bias[0] if down_bias else None)
        with torch.cuda.device(x.device):
            ops.forward(*operands, *_how(spec), y, h, order, offsets, plan, counts, a, rows, _stream(x))
        return y, h, order, offsets

    def backward(self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs):
        ops = _ops(x, ids, weights, up, down, spec)
        if ops is None or ids.numel() == 0:
            return get("portable").backward(
                dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs
            )
        need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needs
        ids, top_k, slots = _ids(ids), ids.shape[1], ids.numel()
        x, h, dy, weights = _aligned(x), _aligned(h), _aligned(dy.to(x.dtype)), weights.contiguous()
        num_experts, hidden, inner = down[0].shape
        layout, activation = _how(spec)
        stream = _stream(x)
        with torch.cuda.device(x.device):
            plan = _int32(x, ops.plan_scratch(x.shape[0], num_experts, top_k))
            dh, a = torch.empty_like(h), x.new_empty(slots, inner)
            score = x.new_empty(ops.score_rows(inner), slots, dtype=torch.float32)
            grad = (dy, ids, weights, down[0], layout, activation, h, order, offsets)
            ops.down_grad(*grad, plan, dh, a, score, stream)

            def outer(ticket, left, right, like, *, left_gathered, first=0):
                out = empty_as(like)
                ops.weight_grad(left, right, left_gathered, first, ids, order, offsets, plan, out, ticket, stream)
                return out

            # The order matters for memory: `a` is gone before the rows of dx come.
            down_grads = [outer(3, dy, a, down[0], left_gathered=True)] if need_down else []
            del a
            dx = torch.empty_like(x) if need_x else None
            dweights = torch.empty_like(weights) if need_weights else None
            if need_x or need_weights:
                rows = x.new_empty(slots, hidden) if need_x else None
                ops.up_grad(dh, ids, up, down[0], layout, order, offsets, plan, score, rows, dx, dweights, stream)
                del rows
            up_grads = []
            if need_up:
                up_grads = [outer(4 + i, dh, x, w, left_gathered=False, first=i * inner) for i, w in enumerate(up)]
            bias_grads = []
            if need_up_bias:
                for b, part in zip(up_bias, dh.chunk(len(up_bias), 1), strict=True):
                    bias_grads += grouped_sum(part, offsets, b)
            if need_down_bias:
                slot = order.long()
                dout = dy[slot // top_k] * weights.reshape(-1)[slot][:, None].float()
                bias_grads += grouped_sum(dout.to(x.dtype), offsets, down_bias[0])
            if need_weights and down_bias:
                dweights += _bias_score(dy, ids, down_bias[0]).to(dweights.dtype)
        grads = [g for g in (dx, dweights) if g is not None]
        return [*grads, *up_grads, *down_grads, *bias_grads]


def _bias_score(dy, ids, bias):
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
    if spec.weight_on != "output":
        return "it has no kernels for routing weights on the input yet"
    if not problem.stacked:
        return "it needs the experts' weights stacked in one tensor"
    if not problem.row_major:
        return "it needs the weights stored as [experts, out, in]"
    if problem.hidden % 8 or problem.intermediate % 8:
        return f"hidden and expert size must be multiples of 8, not {problem.hidden} and {problem.intermediate}"
    if problem.num_experts > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"it takes at most {MAX_EXPERTS} experts and {MAX_TOP_K} slots per token"
    form = gated_form(spec.expr)
    if form is None or form.gated != spec.gated:
        return f"it has no kernel for the activation {spec.activation}"
    return None


def _ops(x, ids, weights, up, down, spec):
    """The library's ops, or None where they cannot run: a graph compiled elsewhere may be run here, and the layout of
    the weights in memory and the number of tokens are known only now."""
    problem = Problem.of(x, ids, weights, down)
    reason = _unsupported(spec, problem)
    if reason is None and not all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in (*up, *down)):
        reason = "it needs the weights stored as [experts, out, in], without gaps"
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
    return torch.ops.mok_sm90


@functools.cache
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


@functools.lru_cache(maxsize=256)
def _how(spec: ExpertsSpec) -> tuple[int, list[float]]:
    form = gated_form(spec.expr)
    return LAYOUTS.index(spec.layout), _numbers(form)


def _numbers(form: GatedForm) -> list[float]:
    swapped = form.gated and form.gate_leaf == "up"
    limits = (form.gate_min, form.gate_max, form.up_min, form.up_max, form.up_offset)
    assert not any(math.isnan(v) for v in limits)
    return [KINDS.index(form.kind), float(swapped), form.alpha, *limits]


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """`t` as the kernels read it: without gaps, rows at multiples of 16 bytes."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _ids(ids: torch.Tensor) -> torch.Tensor:
    ids = ids if ids.dtype in (torch.int32, torch.int64) else ids.int()
    return ids.contiguous()


def _int32(like: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device=like.device)


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


engine = Sm90()
