"""Rules for how the experts' rows come together, one expert after the other: added onto their tokens, written to their
slots, or put one behind the other. `Partial` and `Filled` collect the parts until all experts have been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mok_compile.passes.facts.kinds import (
    BOTH,
    CHOICE,
    SLOT,
    SORTED,
    TOKEN,
    Fact,
    Filled,
    Full,
    Grid,
    Hits,
    Onto,
    Partial,
    Perm,
    Pointwise,
    Rows,
    Stretched,
)
from mok_compile.passes.facts.masks import distinct
from mok_compile.passes.facts.merge import merge, merge_in_order
from mok_compile.passes.facts.picked import alone, hits_of_index, range_of
from mok_compile.passes.facts.rules import Break, Facts, combination, dim_of, rule, same
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


@rule(aten.index_add.default)
def _add_rows(facts, value, base, dim, index, source, *, alpha=1):
    return _added(facts, base, (index,), source) if dim_of(base, dim) == 0 and alpha == 1 else None


@rule(aten.scatter_add.default)
def _scatter_add_rows(facts, value, base, dim, index, source):
    whole = index.op is aten.expand.default and len(index.meta.shape) == 2 == len(source.meta.shape)
    whole = whole and same(index.meta.shape[1], source.meta.shape[1])
    return _added(facts, base, (index,), source) if dim_of(base, dim) == 0 and whole else None


@rule(aten.add.Tensor)
def _add_onto(facts, value, a, b, alpha=1):
    for fact, other in ((facts.of(a), facts.of(b)), (facts.of(b), facts.of(a))):
        if isinstance(fact, Rows) and alone(fact) and isinstance(other, Pointwise) and other.order == fact.order:
            return Onto(other, fact.x) if fact.weight is None and alpha == 1 else None
    return None


@rule(aten.index_put.default)
def _put_rows(facts, value, base, indices, source, accumulate=False):
    if accumulate:
        return _added(facts, base, indices, source)
    chosen, fact = hits_of_index(facts, indices) if None not in indices else None, facts.of(source)
    if chosen is None:
        return None
    hits, axes = chosen
    rows = fact.rows if isinstance(fact, Onto) else fact
    if not alone(rows) or not isinstance(rows, Pointwise):
        return None
    if rows.order != hits:
        raise Break("no-match", "an expert's rows are written to the places of other rows")
    combination(None, rows, None)
    if isinstance(fact, Onto):
        if fact.base is not base or not _tokens(hits, axes):
            raise Break("no-match", "rows are added onto the rows of another tensor or of other tokens")
        if not (hits.reduced or hits.choice is not None or hits.k == 1 or hits.axes == (BOTH,) or distinct(hits.ids)):
            raise Break("no-match", "a token may go to one expert twice, and one of the two would be lost")
        return extend(facts, base, rows)
    if axes == [BOTH] or (axes[-1] == CHOICE and set(axes[:-1]) == {TOKEN}):
        return _fill(facts, value, base, rows)
    return None


def _tokens(hits: Hits, axes: list[str]) -> bool:
    return set(axes) == {TOKEN} or (axes == [BOTH] and hits.k in (None, 1))


def _added(facts: Facts, base: Value, indices: tuple, source: Value) -> Fact | None:
    rows = facts.of(source)
    if not alone(rows) or not isinstance(rows, Pointwise):
        return None
    chosen = hits_of_index(facts, indices) if None not in indices else None
    if chosen is None:
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    if chosen[0] != rows.order or not _tokens(*chosen):
        raise Break("no-match", "an expert's rows are added to other tokens than their own")
    combination(None, rows, None)
    return extend(facts, base, rows)


def extend(facts: Facts, base: Value, *rows: Pointwise) -> Partial:
    """`rows`, each of one expert, added onto their tokens' rows of `base`."""
    fact = facts.of(base)
    if isinstance(fact, Partial) and fact.parts[0].ids is rows[0].ids:
        facts.extended.add(base)
        return Partial((*fact.parts, *rows), fact.base)
    return Partial(rows, None if fact == Full(0.0) else base)


def _fill(facts: Facts, value: Value, base: Value, rows: Pointwise) -> Fact:
    fact = facts.of(base)
    new = Filled((*fact.parts, rows), fact.base) if isinstance(fact, Filled) else Filled((rows,), base)
    if value in facts.overwritten:
        return new
    blank = new.base
    while blank.op in (aten.detach.default, aten.alias.default, aten.view.default):
        blank = blank.args[0]
    if facts.of(blank) != Full(0.0) and blank.op not in _EMPTY:
        raise Break("no-match", "experts' rows are written over others that are not theirs")
    if rows.order.axes == (SORTED,):
        return _all_ranges(facts, new.parts)
    merged = merge(new.parts)
    return merged if len(value.meta.shape) == 2 else Grid(merged)


_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)


@rule(aten.cat.default)
def _cat_experts(facts, value, tensors, dim=0):
    rows = [facts.of(t) for t in tensors]
    if not all(alone(r) and isinstance(r, Pointwise) and r.order.axes == (SORTED,) for r in rows):
        return None
    return _all_ranges(facts, rows) if dim_of(value, dim) == 0 else None


def _all_ranges(facts: Facts, rows: Sequence[Pointwise]) -> Pointwise:
    ids = rows[0].ids
    if [r.order.expert for r in rows] != list(range(facts.parts[ids])) or any(r.ids is not ids for r in rows):
        raise Break("no-match", "the experts' rows are put together in another order, or not all of them")
    return merge_in_order(rows, ids, SORTED)


# Written to their range of the sorted rows


@rule(aten.expand.default)
def _stretch(facts, value, a, shape, **kwargs):
    """As in ``rows[start:end] = a``: that the place has as many rows is not known yet."""
    fact, rank = facts.of(a), len(value.meta.shape)
    ranged = alone(fact) and isinstance(fact, Pointwise) and fact.order.axes == (SORTED,)
    alike = ranged and rank == len(a.meta.shape) == 2 and same(value.meta.shape[1], a.meta.shape[1])
    return Stretched(fact) if alike and not same(value.meta.shape[0], a.meta.shape[0]) else None


@rule(aten.copy.default)
def _copy_to_range(facts, value, place, a, *args):
    fact = facts.of(a)
    rows = fact.rows if isinstance(fact, Stretched) else fact
    if not alone(rows) or not isinstance(rows, Pointwise) or rows.order.axes != (SORTED,):
        return None
    if place.op is not aten.slice.Tensor or range_of(facts, rows.ids, place.args[1:]) != rows.order:
        raise Break("no-match", "an expert's rows are written to the places of other rows")
    whole = all(map(same, place.args[0].meta.shape[1:], value.meta.shape[1:]))
    return replace(rows, dtypes=rows.dtypes | {value.meta.dtype}) if whole else None


@rule(aten.slice_scatter.default)
def _fill_range(facts, value, base, a, *place):
    rows = facts.of(a)
    if not alone(rows) or not isinstance(rows, Pointwise) or a.op is not aten.copy.default:
        return None
    if range_of(facts, rows.ids, place) != rows.order:
        raise Break("no-match", "an expert's rows are written to the places of other rows")
    return _fill(facts, value, base, rows)


@rule(aten.index_copy.default)
def _put_back(facts, value, base, dim, index, source):
    """All rows in sorted order, each written to its slot."""
    rows, by = facts.of(source), facts.of(index)
    if not isinstance(rows, Pointwise) or not isinstance(by, Perm) or rows.order != SORTED or dim_of(base, dim) != 0:
        return None
    whole = all(map(same, value.meta.shape, source.meta.shape))
    return replace(rows, order=SLOT) if whole and rows.ids is by.ids else None
