"""Two grouped matrix products in plain PyTorch: the building blocks of the portable engine.

Rows are sorted by expert; ``offsets`` [E] (int32) holds the end of each expert's rows, as for ``torch._grouped_mm``.
Rows at or past ``offsets[-1]`` belong to no expert: products leave them at zero. A *bank* is one weight of all experts:
a tensor [E, N, M] with any strides, or a list of E tensors [N, M].

On the CPU a loop over the experts reads the offsets; reading them is free there. On other devices nothing waits for
the device: bfloat16 goes to ``torch._grouped_mm``, everything else through tiles of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Bank = torch.Tensor | list[torch.Tensor]

# Rows per tile and tiles per step of the loop below: enough rows to be worth the copy of an expert's weight, few enough
# tiles to bound that copy.
TILE_ROWS, TILES_PER_STEP = 64, 16


def grouped_mm(rows: torch.Tensor, bank: Bank, offsets: torch.Tensor) -> torch.Tensor:
    """[S, M] x bank [E, N, M] -> [S, N]: row r times the transposed weight of its expert, in the dtype of `rows`."""
    if rows.device.type == "cpu":
        out, end = rows.new_empty(rows.shape[0], _columns(bank)), 0
        for e, lo, hi in _segments(offsets):
            end = hi
            if hi > lo:
                torch.mm(rows[lo:hi], bank[e].t(), out=out[lo:hi])
        out[end:].zero_()
        return out
    out = rows.new_zeros(rows.shape[0], _columns(bank))
    bank = torch.stack(bank) if isinstance(bank, list) else bank
    if _has_grouped_mm(rows, bank.transpose(1, 2)):
        product = torch._grouped_mm(rows, bank.transpose(1, 2), offs=offsets)
        return product.masked_fill(_past_end(offsets, rows.shape[0])[:, None], 0)
    for tile in _tiles(offsets, rows.shape[0]):
        weight = bank[tile.experts].transpose(1, 2)
        _scatter(out, tile, torch.bmm(_gather(rows, tile), weight))
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, like: Bank) -> list[torch.Tensor]:
    """[S, N] x [S, M] -> sum over each expert's rows of a[r] outer b[r]: the gradient of a bank.

    Returns tensors shaped and strided as the tensors of `like` (one [E, N, M] or E of [N, M]); experts without rows get
    exact zeros.
    """
    stacked = isinstance(like, torch.Tensor)
    grads = [empty_as(w) for w in ([like] if stacked else like)]
    slots = grads[0] if stacked else grads
    if a.device.type == "cpu":
        for e, lo, hi in _segments(offsets):
            if hi > lo:
                torch.mm(a[lo:hi].t(), b[lo:hi], out=slots[e])
            else:
                slots[e].zero_()
        return grads
    num_experts = offsets.shape[0]
    if _has_grouped_mm(a.t(), b):
        total = torch._grouped_mm(a.t(), b, offs=offsets)
        # An empty group is left unwritten on some cards: https://github.com/pytorch/pytorch/issues/172439
        total = total.masked_fill((_counts(offsets) == 0)[:, None, None], 0)
    else:
        wide = torch.promote_types(a.dtype, torch.float32)
        total = torch.zeros(num_experts + 1, a.shape[1], b.shape[1], dtype=wide, device=a.device)
        for tile in _tiles(offsets, a.shape[0]):
            # One tile at a time: two tiles of one expert must not add in an order that the device chooses.
            for i in range(tile.experts.shape[0]):
                one = tile.narrow(i)
                part = torch.bmm(_gather(a, one).to(wide).transpose(1, 2), _gather(b, one).to(wide))
                index = torch.where(one.valid.any(1), one.experts, num_experts)
                total.index_copy_(0, index, total[index] + part)
        total = total[:num_experts]
    for g, t in zip(grads, [total] if stacked else total.unbind(0), strict=True):
        g.copy_(t)
    return grads


def grouped_sum(rows: torch.Tensor, offsets: torch.Tensor, like: Bank) -> list[torch.Tensor]:
    """[S, N] -> the sum of each expert's rows [E, N]: the gradient of a bias, in the shapes of `like`."""
    if isinstance(like, list):
        sums = grouped_outer(rows, _ones(rows), offsets, [b[:, None].expand(-1, 8) for b in like])
        return [s[:, 0].contiguous() for s in sums]
    return [grouped_outer(rows, _ones(rows), offsets, like[:, :, None].expand(-1, -1, 8))[0][:, :, 0].contiguous()]


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor with the shape of `tensor`, and its strides where these leave no gaps: the layout in
    which autograd takes a gradient over without a copy."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def _ones(rows: torch.Tensor) -> torch.Tensor:
    # Eight columns, not one: torch._grouped_mm wants rows of 16 bytes.
    return rows.new_ones(rows.shape[0], 8)


def _columns(bank: Bank) -> int:
    return bank.shape[1] if isinstance(bank, torch.Tensor) else bank[0].shape[0]


def _segments(offsets: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end of rows) of every expert, idle ones included."""
    lo = 0
    for e, hi in enumerate(offsets.tolist()):
        yield e, lo, hi
        lo = hi


def _counts(offsets: torch.Tensor) -> torch.Tensor:
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def _past_end(offsets: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows, device=offsets.device) >= offsets[-1]


def _has_grouped_mm(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``torch._grouped_mm(a, b)`` runs: bfloat16 on CUDA, 16-byte aligned, each with a unit-stride side."""

    def fits(t: torch.Tensor) -> bool:
        rows, columns = t.stride(-2), t.stride(-1)
        lead = rows if columns == 1 else columns
        outer_ok = t.dim() == 2 or t.stride(0) % 8 == 0
        return 1 in (rows, columns) and lead % 8 == 0 and outer_ok and t.data_ptr() % 16 == 0

    return (
        a.device.type == "cuda"
        and a.dtype == b.dtype == torch.bfloat16
        and a.numel() > 0
        and b.numel() > 0
        and fits(a)
        and fits(b)
    )


class _Tile:
    """Some tiles of `TILE_ROWS` rows, each within one expert: its expert, row numbers and which of them exist."""

    def __init__(self, experts: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
        self.experts, self.rows, self.valid = experts, rows, valid

    def narrow(self, i: int) -> _Tile:
        return _Tile(self.experts[i : i + 1], self.rows[i : i + 1], self.valid[i : i + 1])


def _tiles(offsets: torch.Tensor, num_rows: int) -> Iterator[_Tile]:
    """All tiles that `num_rows` rows can need, whatever the routing: their number does not depend on the data."""
    num_experts = offsets.shape[0]
    if num_rows == 0:
        return
    counts = _counts(offsets).long()
    per_expert = (counts + TILE_ROWS - 1) // TILE_ROWS
    ends = per_expert.cumsum(0)
    number = torch.arange(num_rows // TILE_ROWS + min(num_experts, num_rows), device=offsets.device)
    experts = torch.searchsorted(ends, number, right=True)
    exists = experts < num_experts
    experts = experts.clamp(max=num_experts - 1)
    first = offsets[experts] - counts[experts] + (number - ends[experts] + per_expert[experts]) * TILE_ROWS
    rows = first[:, None] + torch.arange(TILE_ROWS, device=offsets.device)
    valid = exists[:, None] & (rows < offsets[experts][:, None])
    rows = torch.where(valid, rows, num_rows)
    for step in range(0, number.shape[0], TILES_PER_STEP):
        part = slice(step, step + TILES_PER_STEP)
        yield _Tile(experts[part], rows[part], valid[part])


def _gather(rows: torch.Tensor, tile: _Tile) -> torch.Tensor:
    safe = tile.rows.clamp(max=rows.shape[0] - 1)
    return rows[safe].masked_fill(~tile.valid[:, :, None], 0)


def _scatter(out: torch.Tensor, tile: _Tile, values: torch.Tensor) -> None:
    """Writes each existing row once; rows that do not exist all add an exact zero to row 0, which changes no bit."""
    index = torch.where(tile.valid, tile.rows, 0).reshape(-1)
    flat = values.masked_fill(~tile.valid[:, :, None], 0).reshape(-1, out.shape[1])
    out.index_add_(0, index, flat)
