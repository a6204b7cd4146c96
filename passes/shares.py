"""Rules for routing weights under masks: by slot, or in a table of all experts [T, E] with zeros where a token does not
go.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mok_compile.passes.facts import BOTH, CHOICE, EXPERT, NONE, TOKEN, Fenced, FromTable, Full, Hits, RowWeight, Share
from mok_compile.passes.masks import distinct
from mok_compile.passes.rules import Facts, _dim, _integer, _root, rule, same
from mok_compile.passes.view import Value

aten = torch.ops.aten


def is_table(hits: Hits) -> bool:
    """Whether `hits` are a table [.., E] that is true at the experts of each token."""
    return hits.axes[-1] == EXPERT and set(hits.axes[:-1]) == {TOKEN} and bool(hits.reduced) and not hits.negated


def tabulated(fact: Share, value: Value) -> Share | None:
    """`fact` of a table of which each number was changed, and zeros remained what they are."""
    table = is_table(fact.hits) and of_all_experts(value, fact.hits.ids) and value.meta.dtype.is_floating_point
    return Share(fact.hits, FromTable(value)) if table else None


def shared_out(hits: Hits, weights: Value, value: Value) -> Share | None:
    """`weights` where `hits` is true and zero elsewhere, as [.., ..] like `value`."""
    if not isinstance(weights, Value) or not weights.meta.dtype.is_floating_point or hits.negated:
        return None
    rank = len(value.meta.shape)
    axes = (NONE,) * (rank - len(hits.axes)) + hits.axes
    sizes = (1,) * (rank - len(weights.meta.shape)) + tuple(weights.meta.shape)
    if hits.reduced:
        full = all(map(same, sizes, value.meta.shape)) and len(axes) == len(hits.axes)
        return tabulated(Share(hits, FromTable(value)), value) if full else None
    if hits.choice is not None:
        of = weights
        while of.op in (aten.unsqueeze.default, aten.view.default) and not of.detached:
            of = of.args[0]
        same_slot = of.op is aten.select.int and of.args[2] == hits.choice and not of.detached
        last = same_slot and _dim(of.args[0], of.args[1]) == len(of.args[0].meta.shape) - 1
        fits = last and all(same(n, 1) == (axis != TOKEN) for n, axis in zip(sizes, axes, strict=True))
        return Share(hits, of.args[0]) if fits else None
    slots = [axis for axis in axes if axis in (TOKEN, CHOICE, BOTH)]
    in_order = slots == [BOTH] or (slots[-1:] == [CHOICE] and set(slots[:-1]) == {TOKEN})
    spread = all(
        same(n, m) if axis in (TOKEN, CHOICE, BOTH) else same(n, 1)
        for n, m, axis in zip(sizes, value.meta.shape, axes, strict=True)
    )
    return Share(hits, weights) if in_order and spread else None


def of_all_experts(table: Value, ids: Value) -> bool:
    """Whether `table` has a column for each expert that `ids` can name."""
    return distinct(ids) and same(table.meta.shape[-1], ids.args[0].meta.shape[-1])


def from_column(a: Value, hits: Hits) -> RowWeight | None:
    """The weights of one expert's tokens, from its column of a table [T, E] or, with one slot a token, from [T]."""
    table = _table_of(a, hits.expert)
    if table is not None and hits.choice is None and of_all_experts(table, hits.ids):
        return RowWeight(FromTable(table), hits.ids, hits)
    if hits.k in (None, 1):
        return RowWeight(a, hits.ids, hits)
    if hits.choice is not None and a.op is aten.select.int and a.args[2] == hits.choice and not a.detached:
        slots = a.args[0]
        last = _dim(slots, a.args[1]) == len(slots.meta.shape) - 1 and same(slots.meta.shape[-1], hits.k)
        return RowWeight(slots, hits.ids, hits) if last else None
    return None


def _table_of(a: Value, expert: int | None) -> Value | None:
    """The table of which `a` is the column of `expert`; None if it is no column, or of another."""
    while a.op in (aten.unsqueeze.default, aten.view.default) and not a.detached:
        inner = a.args[0]
        if len(inner.meta.shape) > 1 and not same(inner.meta.shape[-1], 1):
            break
        a = inner
    if a.detached or a.op not in (aten.select.int, aten.slice.Tensor):
        return None
    table, dim, start = a.args[0], _dim(a.args[0], a.args[1]), a.args[2]
    column = dim == len(table.meta.shape) - 1 > 0 and start == expert
    return table if column and (a.op is aten.select.int or same(a.meta.shape[-1], 1)) else None


@rule(aten.scatter.src, aten.scatter_add.default)
def _scatter_table(facts, value, base, dim, index, source):
    fact, hits = facts.of(base), _scattered(facts, base, dim, index)
    if hits is None or facts.of(source) is not None or not source.meta.dtype.is_floating_point:
        return None
    once = value.op is aten.scatter_add.default or distinct(hits.ids)
    if not once or len(source.meta.shape) != len(index.meta.shape):
        return None
    if not all(map(same, source.meta.shape, index.meta.shape)):
        return None
    if fact == Full(0.0):
        return Share(hits, source)
    return Fenced(hits.ids) if fact == Full(-math.inf) and value.op is aten.scatter.src else None


@rule(aten.scatter.value)
def _scatter_mask(facts, value, base, dim, index, number):
    fact, hits = facts.of(base), _scattered(facts, base, dim, index)
    if hits is None or not isinstance(fact, Full) or {float(number), fact.number} != {0.0, 1.0}:
        return None
    return replace(hits, reduced="any", negated=fact.number == 1.0)


def _scattered(facts: Facts, base: Value, dim: int, index: Value) -> Hits | None:
    """A table [.., E] into which something was written at the experts of each token."""
    rank = len(base.meta.shape)
    rows = len(index.meta.shape) == rank > 1 and all(map(same, index.meta.shape[:-1], base.meta.shape[:-1]))
    if not rows or _dim(base, dim) != rank - 1 or facts.of(index) is not None or not _integer(index):
        return None
    return Hits(_root(index), (TOKEN,) * (rank - 1) + (EXPERT,), index.meta.shape[-1], reduced="sum")


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(facts, value, *args, **kwargs):
    return Full(1.0)


@rule(aten._softmax.default, aten.sigmoid.default, aten.exp.default)
def _from_fenced(facts, value, a, *args):
    """Where a logit is minus infinity there is an exact zero, with an exact zero for a gradient."""
    fact = facts.of(a)
    if not isinstance(fact, Fenced) or (args and _dim(a, args[0]) != len(a.meta.shape) - 1):
        return None
    rank = len(a.meta.shape)
    hits = Hits(fact.ids, (TOKEN,) * (rank - 1) + (EXPERT,), fact.ids.meta.shape[-1], reduced="any")
    return Share(hits, FromTable(value))


@rule(aten.div.Tensor, aten.div.Scalar)
def _divide_table(facts, value, a, b):
    fact = facts.of(a)
    whole = isinstance(fact, Share) and len(value.meta.shape) == len(fact.hits.axes)
    return tabulated(fact, value) if whole and all(map(same, value.meta.shape, a.meta.shape)) else None


@rule(aten._to_copy.default)
def _cast_share(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact, floating = facts.of(a), value.meta.dtype.is_floating_point
    if isinstance(fact, Fenced):
        return fact if floating else None
    if not isinstance(fact, Share):
        return None
    return fact if floating and value.meta.dtype.itemsize >= a.meta.dtype.itemsize else tabulated(fact, value)
