"""Rules for routing weights under masks: by slot, or in a table of all experts [T, E] with zeros where a token does not
go.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mok_compile.passes.facts.kinds import (
    BOTH,
    CHOICE,
    EXPERT,
    NONE,
    TOKEN,
    Fact,
    Fenced,
    FromTable,
    Full,
    Hits,
    Iota,
    RowWeight,
    Share,
    Slotted,
)
from mok_compile.passes.facts.masks import distinct, permuted
from mok_compile.passes.facts.rules import Facts, as_number, dim_of, is_integer, pinned, root_of, rule, same, unsliced
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


def is_table(hits: Hits) -> bool:
    """Whether `hits` are a table, of tokens and all experts, that is true at the experts of each token."""
    tokens = [axis for axis in hits.axes if axis != EXPERT]
    both = len(tokens) == len(hits.axes) - 1 and set(tokens) == {TOKEN}
    return both and bool(hits.reduced) and not hits.negated


def _table(value: Value, axes: tuple[str, ...]) -> FromTable:
    return FromTable(value, axes.index(EXPERT) - len(axes))


def tabulated(fact: Share, value: Value) -> Share | None:
    """`fact` of a table of which each number was changed, and zeros remained what they are."""
    hits = fact.hits
    if not is_table(hits) or len(hits.axes) != len(value.meta.shape) or not value.meta.dtype.is_floating_point:
        return None
    table = _table(value, hits.axes)
    return Share(hits, table) if of_all_experts(value, hits.ids, table.dim) else None


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
        last = same_slot and dim_of(of.args[0], of.args[1]) == len(of.args[0].meta.shape) - 1
        wanted = (n if axis == TOKEN else 1 for n, axis in zip(value.meta.shape, axes, strict=True))
        fits = last and all(map(same, sizes, wanted))
        return Share(hits, unsliced(of.args[0])) if fits else None
    slots = [axis for axis in axes if axis in (TOKEN, CHOICE, BOTH)]
    in_order = slots == [BOTH] or (slots[-1:] == [CHOICE] and set(slots[:-1]) == {TOKEN})
    spread = all(
        same(n, m) if axis in (TOKEN, CHOICE, BOTH) else same(n, 1)
        for n, m, axis in zip(sizes, value.meta.shape, axes, strict=True)
    )
    return Share(hits, weights) if in_order and spread else None


def of_all_experts(table: Value, ids: Value, dim: int = -1) -> bool:
    """Whether `table` has a place along `dim` for each expert that `ids` can name."""
    return distinct(ids) and same(table.meta.shape[dim], ids.args[0].meta.shape[-1])


def from_column(a: Value, hits: Hits) -> RowWeight | None:
    """The weights of one expert's tokens, from its column of a table [T, E] or, with one slot a token, from [T]."""
    table = _table_of(a, hits.expert)
    if table is not None and hits.choice is None and of_all_experts(table, hits.ids):
        return RowWeight(FromTable(table), hits.ids, hits)
    if hits.k in (None, 1):
        return RowWeight(a, hits.ids, hits)
    if hits.choice is not None and a.op is aten.select.int and a.args[2] == hits.choice and not a.detached:
        slots = a.args[0]
        last = dim_of(slots, a.args[1]) == len(slots.meta.shape) - 1 and same(slots.meta.shape[-1], hits.k)
        return RowWeight(slots, hits.ids, hits) if last else None
    return None


def _table_of(a: Value, expert: int | None) -> Value | None:
    """The table of which `a` is the column of `expert`; None if it is no column, or of another."""
    table, number = column(a) or (None, None)
    return table if number == expert else None


def column(a: Value) -> tuple[Value, int] | None:
    """The table of which `a` is one column, and which one."""
    while a.op in (aten.unsqueeze.default, aten.view.default) and not a.detached:
        inner = a.args[0]
        if len(inner.meta.shape) > 1 and not same(inner.meta.shape[-1], 1):
            break
        a = inner
    if a.detached or a.op not in (aten.select.int, aten.slice.Tensor):
        return None
    table, dim, number = unsliced(a.args[0]), dim_of(a.args[0], a.args[1]), a.args[2]
    last = dim == len(table.meta.shape) - 1 > 0 and isinstance(number, int)
    one = a.op is aten.select.int or same(a.meta.shape[-1], 1)
    if last and number < 0:
        size = table.meta.shape[-1]
        last, number = isinstance(size, int), number + size
    return (table, number) if last and one else None


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
        return Share(hits, unsliced(source))
    return Fenced(hits.ids, hits.axes) if fact == Full(-math.inf) and value.op is aten.scatter.src else None


@rule(aten.scatter.src, aten.scatter_add.default)
def _scatter_slot(facts, value, base, dim, index, source):
    alike = len(source.meta.shape) == len(index.meta.shape) and all(map(same, source.meta.shape, index.meta.shape))
    if not alike or _scattered(facts, base, dim, index) is None:
        return None
    return _with_slot(facts, value, facts.of(base), _slot(facts, index, source, len(base.meta.shape)))


@rule(aten.index_put.default)
def _put_slot(facts, value, base, indices, source, accumulate=False):
    """``table[arange(T), ids[:, k]] = weights[:, k]``"""
    if len(indices) != 2 or None in indices or len(base.meta.shape) != 2:
        return None
    shapes = [v.meta.shape for v in (*indices, source)]
    flat = all(len(shape) < 2 and same(math.prod(shape), base.meta.shape[0]) for shape in shapes)
    if not flat or not isinstance(facts.of(indices[0]), Iota):
        return None
    return _with_slot(facts, value, facts.of(base), _slot(facts, indices[1], source, 2))


@rule(aten.add.Tensor)
def _add_slot(facts, value, a, b, alpha=1):
    for new, onto in ((a, b), (b, a)):
        fact = facts.of(new)
        base = Full(0.0) if as_number(onto) == 0 else facts.of(onto)
        tables = [v for v in (new, onto) if isinstance(v, Value) and facts.of(v) != Full(0.0)]
        rank = len(value.meta.shape)
        whole = all(len(v.meta.shape) == rank and all(map(same, v.meta.shape, value.meta.shape)) for v in tables)
        found = _with_slot(facts, value, base, fact) if isinstance(fact, Share) and whole and alpha == 1 else None
        if found is not None:
            return found
    return None


def _slot(facts: Facts, index: Value, source: Value, rank: int) -> Share | None:
    """A table of so many dimensions with the weights `source` of one slot at its experts `index`."""
    ids, weights = column(index), column(source)
    if ids is None or weights is None or ids[1] != weights[1] or not is_integer(ids[0]) or facts.of(ids[0]) is not None:
        return None
    axes = (TOKEN,) * (rank - 1) + (EXPERT,)
    return Share(Hits(root_of(ids[0]), axes, ids[0].meta.shape[-1], choice=ids[1]), weights[0])


def _with_slot(facts: Facts, value: Value, base: Fact | None, new: Share | None) -> Share | Slotted | None:
    """Of the table `value`: `new`, the weights of one slot, onto what `base` says of others of the same table. All of
    its weights, once no slot is left."""
    slot, weights = (None, None) if new is None else (new.hits.choice, new.weights)
    if slot is None or not isinstance(weights, Value) or weights.meta.dtype != value.meta.dtype:
        return None
    hits, ids = replace(new.hits, choice=None, reduced="sum"), new.hits.ids
    alike = len(ids.meta.shape) == len(weights.meta.shape) and all(map(same, ids.meta.shape, weights.meta.shape))
    known = alike and same(hits.k, ids.meta.shape[-1]) and facts.of(weights) is None and is_table(hits)
    if not known or not distinct(ids) or not value.meta.dtype.is_floating_point:
        return None
    if isinstance(base, Share):  # the first slot, which was added onto nothing
        base = _with_slot(facts, value, Full(0.0), base)
    done = base.done if isinstance(base, Slotted) and (base.hits, base.weights) == (hits, weights) else frozenset()
    if slot in done or not (done or base == Full(0.0)):
        return None
    done |= {slot}
    return Share(hits, weights) if len(done) == pinned(hits.k) else Slotted(hits, weights, done)


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
    if not rows or dim_of(base, dim) != rank - 1 or facts.of(index) is not None or not is_integer(index):
        return None
    return Hits(root_of(unsliced(index)), (TOKEN,) * (rank - 1) + (EXPERT,), index.meta.shape[-1], reduced="sum")


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(facts, value, *args, **kwargs):
    return Full(1.0)


@rule(aten._softmax.default, aten.sigmoid.default, aten.exp.default)
def _from_fenced(facts, value, a, *args):
    """Where a logit is minus infinity there is an exact zero, with an exact zero for a gradient."""
    fact = facts.of(a)
    if not isinstance(fact, Fenced) or (args and fact.axes[dim_of(a, args[0])] != EXPERT):
        return None
    hits = Hits(fact.ids, fact.axes, fact.ids.meta.shape[-1], reduced="any")
    return Share(hits, _table(value, fact.axes))


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute_fenced(facts, value, a, *dims):
    fact = facts.of(a)
    axes = permuted(fact.axes, value, a, *dims) if isinstance(fact, Fenced) else None
    return None if axes is None else replace(fact, axes=axes)


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
