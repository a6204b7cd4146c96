"""Products with a matrix that was cut into pieces, as one product with all of it.

``cat([x @ w[a:b].T, x @ w[b:c].T], -1)`` is ``x @ w.T``, and ``h[:, a:b] @ w[:, a:b].T + h[:, b:c] @ w[:, b:c].T`` is
``h @ w.T`` up to rounding: the pieces of tensor parallelism that models compute one after the other on one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """``whole[start:end]``, or ``whole[:, start:end]``, of a tensor of two dimensions: those along `dim`."""

    whole: Value
    dim: int
    start: int
    end: int


def product_of_pieces(op: Any, args: tuple, detached: bool) -> tuple[Value, Value] | None:
    """``(x, w)`` where `op` of `args` is ``x @ w.T`` computed in pieces, with gradients throughout or without them
    throughout; None if it is not that."""
    if op is aten.cat.default:
        return _side_by_side(*args, detached=detached)
    return _added_up(args, detached) if op is aten.add.Tensor else None


def _side_by_side(tensors: tuple, dim: int = 0, *, detached: bool) -> tuple[Value, Value] | None:
    if len(tensors) < 2 or len(tensors[0].meta.shape) != 2 or dim not in (1, -1):
        return None
    factors = [_factors(t, detached) for t in tensors]
    if None in factors or len({x for x, _ in factors}) > 1:
        return None
    whole = _whole([_piece(w, detached) for _, w in factors], 0)
    return None if whole is None else (factors[0][0], whole)


def _added_up(args: tuple, detached: bool) -> tuple[Value, Value] | None:
    found, pending = [], list(args)
    while pending:
        term = pending.pop()  # the last one first: most sums end with something else, before their long beginning
        if isinstance(term, (int, float)) and term == 0:  # what `sum` begins with
            continue
        if getattr(term, "op", None) is aten.add.Tensor and not term.kwargs and term.detached == detached:
            pending += term.args
            continue
        factors = _factors(term, detached)
        pieces = None if factors is None else tuple(_piece(value, detached) for value in factors)
        if pieces is None or None in pieces:
            return None
        found.insert(0, pieces)
    if len(found) < 2:
        return None
    rows, matrices = ([*side] for side in zip(*found, strict=True))
    x, w = _whole(rows, 1), _whole(matrices, 1)
    return (x, w) if x is not None and w is not None and _bounds(rows) == _bounds(matrices) else None


def _bounds(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in pieces]


def _whole(pieces: list[Piece | None], dim: int) -> Value | None:
    """The tensor of which `pieces` are all those along `dim`, one after the other."""
    if None in pieces or any(piece.dim != dim or piece.whole is not pieces[0].whole for piece in pieces):
        return None
    ends = [0, *(piece.end for piece in pieces)]
    follow = all(piece.start == end for piece, end in zip(pieces, ends, strict=False))
    whole = pieces[0].whole
    return whole if follow and ends[-1] == whole.meta.shape[dim] and not whole.meta.subclass else None


def _factors(value: Any, detached: bool) -> tuple[Value, Value] | None:
    """``(x, w)`` of ``x @ w.T``."""
    if getattr(value, "op", None) is not aten.mm.default or value.detached != detached:
        return None
    x, turned = value.args
    return (x, turned.args[0]) if turns(turned.op, turned.args) and turned.detached == detached else None


def turns(op: Any, args: tuple) -> bool:
    """Whether `op` of `args` is the transpose of a matrix, by any of its names; ``w.transpose(0, 0)`` is none."""
    if op not in (aten.t.default, aten.transpose.int, aten.permute.default) or len(args[0].meta.shape) != 2:
        return False
    if op is aten.permute.default:
        return [d % 2 for d in args[1]] == [1, 0]
    return op is aten.t.default or {d % 2 for d in args[1:]} == {0, 1}


def _piece(value: Value, detached: bool) -> Piece | None:
    whole = value.args[0] if value.op in _CUTS and value.detached == detached else None
    if whole is None or len(whole.meta.shape) != 2:
        return None
    dim, start, end = _CUTS[value.op](value, *value.args[1:])
    size = whole.meta.shape[dim % 2]
    if not all(isinstance(n, int) for n in (start, end, size)) or not 0 <= start < end:
        return None
    return Piece(whole, dim % 2, start, min(end, size))


def _split(value: Value, size: int, dim: int = 0) -> tuple:
    return dim, value.index * size, (value.index + 1) * size


def _split_with_sizes(value: Value, sizes: tuple, dim: int = 0) -> tuple:
    return dim, sum(sizes[: value.index]), sum(sizes[: value.index + 1])


def _slice(value: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> tuple:
    whole = value.args[0].meta.shape[dim % 2]
    if step != 1 or not all(isinstance(n, int | None) for n in (whole, start, end)):
        return dim, None, None
    return dim, *slice(start, end).indices(whole)[:2]


_CUTS = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice.Tensor: _slice,
}
