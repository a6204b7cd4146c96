"""The meaning of an `ExpertsSpec` in plain PyTorch: test oracle in float64, portable engine in the model's dtype.

Deterministic: every sum runs in a fixed order. Nothing here waits for the device (reading a CPU tensor does not).
Gradient formulas: with out[s] = a[s] @ down.T and y[t] = sum_k w[t, k] out[s], the routing weight's gradient is
<dy[t], out[s]> = <dy[t] @ down, a[s]>, so one product serves it and the gradient of a, and `out` is never needed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mok_compile import activation
from mok_compile.grouped import Bank, grouped_mm, grouped_outer, grouped_sum
from mok_compile.spec import ExpertsSpec


@dataclass(frozen=True)
class Schedule:
    """The slots sorted by expert, stably. ``order`` [S] int32: slot at each sorted position; ``offsets`` [E] int32."""

    order: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class Experts:
    """The op's tensor lists sorted out: one bank for each projection (two where gate and up are kept apart)."""

    up: list[Bank]
    down: Bank
    up_bias: list[Bank]
    down_bias: Bank | None

    @staticmethod
    def of(
        up: list[torch.Tensor],
        down: list[torch.Tensor],
        up_bias: list[torch.Tensor],
        down_bias: list[torch.Tensor],
        spec: ExpertsSpec,
    ) -> Experts:
        stacked = down[0].dim() == 3

        def banks(tensors: list[torch.Tensor], parts: int) -> list[Bank]:
            if stacked or not tensors:
                return list(tensors)
            size = len(tensors) // parts
            return [list(tensors[i : i + size]) for i in range(0, len(tensors), size)]

        parts = 2 if spec.layout == "separate" else 1
        down_banks, bias_banks = banks(down, 1), banks(down_bias, 1)
        return Experts(banks(up, parts), down_banks[0], banks(up_bias, parts), bias_banks[0] if bias_banks else None)

    def __len__(self) -> int:
        return len(self.down)


def schedule(ids: torch.Tensor, num_experts: int) -> Schedule:
    """Sorts the slots of ids [T, K] by expert; ids outside [0, E) go last and belong to no expert."""
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts).int()
    by_expert, order = torch.sort(flat, stable=True)
    experts = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    return Schedule(order.int(), torch.searchsorted(by_expert, experts, right=True, out_int32=True))


def forward(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts, spec: ExpertsSpec
) -> tuple[torch.Tensor, torch.Tensor, Schedule]:
    """Output y [T, H], pre-activations h [S, N] in sorted order, and the schedule. Arguments: ``mok::experts``."""
    plan = schedule(ids, len(experts))
    slots, weights = plan.order.long(), routed(weights, ids, len(experts))
    rows = x.index_select(0, slots // ids.shape[1])
    if spec.weight_on == "input":
        rows = (rows * weights.reshape(-1)[slots][:, None]).to(x.dtype)
    h = _cat([grouped_mm(rows, bank, plan.offsets) for bank in experts.up])
    if experts.up_bias:
        h = (_wide(h) + _cat([_bias_rows(b, ids, slots) for b in experts.up_bias])).to(x.dtype)
    a = h.new_empty(h.shape[0], h.shape[1] // 2 if spec.gated else h.shape[1])
    for part in _chunks(h):
        a[part] = activation.evaluate(spec.expr, *_halves(_wide(h[part]), spec))
    out = grouped_mm(a, experts.down, plan.offsets)
    if experts.down_bias is not None:
        out = (_wide(out) + _bias_rows(experts.down_bias, ids, slots)).to(x.dtype)
    y = combine(out, weights if spec.weight_on == "output" else None, ids.shape, slots, spec.dtype)
    return y, h, plan


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    h: torch.Tensor,
    plan: Schedule,
    spec: ExpertsSpec,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of x, weights, up, down, up_bias and down_bias, in this order and only those that `needs` asks for."""
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needs
    on_output = spec.weight_on == "output"
    slots, offsets = plan.order.long(), plan.offsets
    tokens = slots // ids.shape[1]
    weight = routed(weights, ids, len(experts)).reshape(-1)[slots][:, None]
    dout = dy.index_select(0, tokens).to(x.dtype)

    da = grouped_mm(dout, _transposed(experts.down), offsets)
    a, dh, dweight = torch.empty_like(da), torch.empty_like(h), weight.new_empty(slots.shape)
    for part in _chunks(h):
        value, *slopes = activation.derivatives(spec.expr, *_halves(_wide(h[part]), spec))
        da_part = _wide(da[part])
        dweight[part] = (da_part * value).sum(1)
        if on_output:
            da_part, value = da_part * weight[part], value * weight[part]
        a[part] = value
        dh[part] = _join(*(torch.zeros_like(da_part) if d is None else da_part * d for d in slopes), spec)
    if experts.down_bias is not None and need_weights:
        dweight = dweight + (_wide(dout) * _bias_rows(experts.down_bias, ids, slots)).sum(1)

    dx_rows = None
    if need_x or (need_weights and not on_output):
        dx_rows = [grouped_mm(part, _transposed(bank), offsets) for bank, part in _parts(dh, experts.up)]
        dx_rows = dx_rows[0] if len(dx_rows) == 1 else _wide(dx_rows[0]) + _wide(dx_rows[1])
        if not on_output:
            dweight = (_wide(dx_rows) * _wide(x[tokens])).sum(1)
            dx_rows = _wide(dx_rows) * weight

    grads = []
    if need_x:
        grads.append(combine(dx_rows, None, ids.shape, slots, x.dtype))
    if need_weights:
        valid = _valid(ids.reshape(-1)[slots], len(experts))
        dweight = torch.where(valid, dweight, 0)
        grads.append(torch.empty_like(dweight).index_copy_(0, slots, dweight).to(weights.dtype).view(weights.shape))
    if need_up:
        rows = x.index_select(0, tokens)
        rows = rows if on_output else (_wide(rows) * weight).to(x.dtype)
        for bank, part in _parts(dh, experts.up):
            grads += grouped_outer(part, rows, offsets, bank)
    if need_down:
        grads += grouped_outer(dout, a, offsets, experts.down)
    if need_up_bias:
        for bank, part in _parts(dh, experts.up_bias):
            grads += grouped_sum(part, offsets, bank)
    if need_down_bias:
        grads += grouped_sum((_wide(dout) * weight).to(x.dtype) if on_output else dout, offsets, experts.down_bias)
    return grads


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _valid(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return (ids >= 0) & (ids < num_experts)


def routed(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The routing weights, zero where the slot has no expert. Rows without expert are zero too: no mask is needed."""
    return torch.where(_valid(ids, num_experts), _wide(weights), 0)


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Rows to work on at a time: on the CPU as many as stay in cache from one pointwise op to the next."""
    step = 256 if rows.device.type == "cpu" else max(1, rows.shape[0])
    return (slice(lo, lo + step) for lo in range(0, rows.shape[0], step))


def _transposed(bank: Bank) -> Bank:
    return bank.transpose(1, 2) if isinstance(bank, torch.Tensor) else [w.t() for w in bank]


def _parts(rows: torch.Tensor, banks: list[Bank]):
    """Each bank with its share of the columns of `rows`."""
    return zip(banks, rows.chunk(len(banks), 1), strict=True)


def _bias_rows(bank: Bank, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[S, N]: the bias of each sorted row's expert, zero where it has none."""
    stacked = bank if isinstance(bank, torch.Tensor) else torch.stack(bank)
    experts = ids.reshape(-1)[slots].long()  # a narrow one would be a mask, or no index at all
    rows = _wide(stacked)[experts.clamp(0, stacked.shape[0] - 1)]
    return rows.masked_fill_(~_valid(experts, stacked.shape[0])[:, None], 0)


def _halves(h: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor | None, torch.Tensor]:
    if spec.layout == "single":
        return None, h
    if spec.layout == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    gate, up = h.chunk(2, 1)
    return gate, up


def _join(dgate: torch.Tensor, dup: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    if spec.layout == "single":
        return dup
    if spec.layout == "interleaved":
        return torch.stack([dgate, dup], 2).flatten(1)
    return torch.cat([dgate, dup], 1)


def combine(
    rows: torch.Tensor, weights: torch.Tensor | None, shape: torch.Size, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[S, H] in sorted order -> [T, H] in `dtype`: each token's slots summed in slot order. `shape` is (T, K), `slots`
    [S] int64 the slot at each sorted position, `weights` [T, K] what to multiply the rows with, if anything."""
    position = torch.empty_like(slots).index_copy_(0, slots, torch.arange(slots.shape[0], device=slots.device))
    position = position.view(shape)
    y = rows.new_empty(shape[0], rows.shape[1], dtype=dtype)
    for tokens in _chunks(y):
        total = None
        for i in range(shape[1]):
            part = _wide(rows.index_select(0, position[tokens, i]))
            if weights is not None:
                part = part * weights[tokens, i, None]
            total = part if total is None else total + part
        y[tokens] = total
    return y
