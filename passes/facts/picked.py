"""Rules for the rows of one expert: which of them its mask picks, or its part of the sorted rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mok_compile.passes.facts.kinds import (
    BOTH,
    CHOICE,
    EXPERT,
    NONE,
    SLOT,
    SORTED,
    TOKEN,
    Bounds,
    Combined,
    Counts,
    Fact,
    Full,
    Hits,
    Iota,
    Offsets,
    Partial,
    Place,
    Places,
    Pointwise,
    Rows,
    RowWeight,
    Share,
    Token,
)
from mok_compile.passes.facts.masks import distinct
from mok_compile.passes.facts.rules import Break, Facts, dim_of, is_integer, pinned, rule, same
from mok_compile.passes.facts.shares import from_column
from mok_compile.passes.facts.sign import may_be_negative
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten
_WIDE = (torch.int32, torch.int64)


# Where a mask is true


@rule(aten.nonzero.default)
def _nonzero(facts, value, a):
    fact = facts.of(a)
    listed = isinstance(fact, Hits) and not fact.negated and fact.expert is not None
    return Places(fact) if listed and not {NONE, EXPERT} & set(fact.axes) else None


def _place(fact: Places, number: int) -> Place | None:
    return Place(fact.hits, fact.hits.axes[number]) if fact.hits.axes.count(TOKEN) < 2 else None


@rule(aten.select.int)
def _select_place(facts, value, a, dim, index):
    fact = facts.of(a)
    return _place(fact, index) if isinstance(fact, Places) and dim_of(a, dim) == 1 else None


@rule(aten.unbind.int)
def _unbind_places(facts, value, a, dim=0):
    fact = facts.of(a)
    return _place(fact, value.index) if isinstance(fact, Places) and dim_of(a, dim) == 1 else None


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten.unsqueeze.default, aten.expand.default)
def _shape_place(facts, value, a, *args, **kwargs):
    fact, rank = facts.of(a), len(value.meta.shape)
    if isinstance(fact, Places):
        return _place(fact, 0) if len(fact.hits.axes) == 1 and rank == 1 else None
    repeats = isinstance(fact, Place) and rank in (1, 2) and same(value.meta.shape[0], a.meta.shape[0])
    if not repeats or (rank == 2 and value.op is aten.expand.default and len(a.meta.shape) != 2):
        return None
    return fact


@rule(aten.floor_divide.default, aten.div.Tensor_mode, aten.remainder.Scalar)
def _divide_place(facts, value, a, k, rounding_mode="floor"):
    fact = facts.of(a)
    if not isinstance(fact, Place) or fact.axis != BOTH or not isinstance(k, int) or rounding_mode is None:
        return None
    known = fact.hits.k is None or same(fact.hits.k, k)
    axis = CHOICE if value.op is aten.remainder.Scalar else TOKEN
    return Place(replace(fact.hits, k=k), axis) if known and is_integer(value) else None


@rule(aten._to_copy.default)
def _cast_place(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    return fact if isinstance(fact, (Place, Places)) and value.meta.dtype in _WIDE else None


def hits_of_index(facts: Facts, indices: tuple) -> tuple[Hits, list[str]] | None:
    """The hits that an index lists, and which of their axes it runs along."""
    found = [facts.of(i) for i in indices]
    if len(found) == 1 and isinstance(found[0], Hits):
        hits = found[0]
        mask = indices[0].meta.dtype == torch.bool and not hits.negated and hits.expert is not None
        if not mask or {NONE, EXPERT} & set(hits.axes):
            return None
        tokens = hits.axes.count(TOKEN)  # one after the other, whatever their number of dimensions
        return replace(hits, axes=(TOKEN, *hits.axes[tokens:]) if tokens else hits.axes), list(hits.axes)
    if not found or not all(isinstance(f, Place) for f in found) or len({f.hits for f in found}) != 1:
        return None
    return found[0].hits, [f.axis for f in found]


# The rows there


def alone(fact: Fact | None) -> bool:
    """Whether `fact` is about rows of one expert."""
    return isinstance(fact, (Rows, Pointwise)) and isinstance(fact.order, Hits)


@rule(aten.index.Tensor)
def _pick(facts, value, a, indices):
    if indices[:1] == (None,) and a.op is aten.unsqueeze.default and dim_of(value, a.args[1]) == 0:
        a, indices = a.args[0], indices[1:]  # x[None, rows]
    chosen = hits_of_index(facts, indices) if None not in indices else None
    return None if chosen is None else _picked(facts, a, *chosen)


@rule(aten.index_select.default)
def _pick_rows(facts, value, a, dim, index):
    chosen = hits_of_index(facts, (index,))
    return None if chosen is None or dim_of(a, dim) != 0 else _picked(facts, a, *chosen)


def _picked(facts: Facts, a: Value, hits: Hits, axes: list[str]) -> Fact | None:
    fact, rank, floating = facts.of(a), len(a.meta.shape), a.meta.dtype.is_floating_point
    last_is_one = rank > len(axes) and all(same(n, 1) for n in a.meta.shape[len(axes) :])
    narrow = rank == len(axes) or last_is_one
    if axes == [BOTH]:
        if isinstance(fact, (Rows, RowWeight)) and fact.order == SLOT and hits.k in (None, getattr(fact, "k", hits.k)):
            return replace(fact, ids=hits.ids, order=hits)
        if isinstance(fact, Token) and fact.order == SLOT and hits.k in (None, fact.k):
            return Place(hits, TOKEN)
        if isinstance(fact, Iota):
            return Place(hits, BOTH)
        if fact is None and floating and narrow:
            return RowWeight(a, hits.ids, hits)
        axes = [TOKEN] if hits.k in (None, 1) else axes  # with one expert a token, slots are tokens
    if set(axes) == {TOKEN}:
        if isinstance(fact, Share):
            own = replace(fact.hits, axes=(), reduced="") == replace(hits, axes=(), reduced="")
            once = hits.reduced or distinct(hits.ids) or hits.choice is not None
            return RowWeight(fact.weights, hits.ids, hits) if own and narrow and once and fact.hits.reduced else None
        if fact is None and floating and narrow:
            return from_column(a, hits)
        plain = fact is None or isinstance(fact, (Full, Partial, Combined))
        if plain and floating and rank == len(axes) + 1:
            return Rows(a, pinned(hits.k) or 1, hits.ids, hits, dtypes=frozenset([a.meta.dtype]))
    in_order = axes[-1] == CHOICE and set(axes[:-1]) == {TOKEN}
    return RowWeight(a, hits.ids, hits) if fact is None and floating and narrow and in_order else None


@rule(aten.split_with_sizes.default)
def _split_by_expert(facts, value, a, sizes, dim=0):
    fact = facts.of(a)
    if not isinstance(fact, (Rows, Pointwise, RowWeight)) or fact.order != SORTED or dim_of(a, dim) != 0:
        return None
    for e, size in enumerate(sizes):
        read = facts.read_from(size)
        counts = facts.of(read.value) if read is not None else None
        counted = isinstance(counts, Counts) and counts.ids is fact.ids and counts.num_experts == len(sizes)
        if not counted or read.index != e:
            return None
    facts.parts[fact.ids] = len(sizes)
    return replace(fact, order=Hits(fact.ids, (SORTED,), expert=value.index))


# A range of sorted rows


@rule(aten.cat.default)
def _bounds(facts, value, tensors, dim=0):
    """A zero, then the ends."""
    if len(tensors) != 2 or facts.of(tensors[0]) != Full(0.0) or not isinstance(facts.of(tensors[1]), Offsets):
        return None
    first, ends = tensors[0], facts.of(tensors[1])
    return Bounds(ends.ids, ends.num_experts) if len(first.meta.shape) == 1 and same(first.meta.shape[0], 1) else None


def _bound(facts: Facts, place: Any, ids: Value) -> tuple[int, int] | None:
    """Which expert's rows begin at `place` in the sorted rows of `ids`, and the number of experts."""
    read = facts.read_from(place)
    fact = facts.of(read.value) if read is not None else None
    if not isinstance(fact, (Bounds, Offsets)) or fact.ids is not ids or read.index < 0:
        return None
    return read.index + isinstance(fact, Offsets), fact.num_experts


def range_of(facts: Facts, ids: Value, place: tuple) -> Hits | None:
    """The rows of one expert, where `place` (dimension, start, end and step of a slice) is its range of sorted rows."""
    dim, start, end, step = (*place, *(0, None, None, 1)[len(place) :])
    last = _bound(facts, end, ids)
    if dim != 0 or step != 1 or last is None:
        return None
    expert, experts = last[0] - 1, last[1]
    zero = start is None or (isinstance(start, int) and start == 0)
    first = (0, experts) if zero else _bound(facts, start, ids)
    if first != (expert, experts) or facts.parts.setdefault(ids, experts) != experts:
        return None
    if may_be_negative(ids, experts):
        raise Break("no-match", "the expert numbers are computed so that they may be negative")
    return Hits(ids, (SORTED,), expert=expert)


@rule(aten.slice.Tensor)
def _range(facts, value, a, *place):
    fact = facts.of(a)
    if not isinstance(fact, (Rows, Pointwise, RowWeight)) or fact.order != SORTED:
        return None
    hits = range_of(facts, fact.ids, place)
    return None if hits is None else replace(fact, order=hits)
