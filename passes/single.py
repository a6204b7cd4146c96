"""Rules for experts that are computed one at a time: a loop over the experts that Dynamo has unrolled.

Nothing is sorted there. For each expert a mask says which slots are its own; its rows are picked by the mask, or every
token is computed and the mask puts zeros where the token does not go. Facts speak of the mask (`Hits`); what each
expert adds to the result is collected (`Partial`, `Filled`) until all have been seen, and `merge` then states the block
as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import torch

from mok_compile import activation as act
from mok_compile.passes.facts import (
    BOTH,
    CHOICE,
    EXPERT,
    FEATURE,
    NONE,
    SLOT,
    SORTED,
    TOKEN,
    Column,
    Combined,
    Counts,
    Fact,
    Fenced,
    Filled,
    FromTable,
    Full,
    Grid,
    Hits,
    Iota,
    Matrix,
    Onto,
    Output,
    Outputs,
    Partial,
    Place,
    Places,
    Pointwise,
    Projection,
    Rows,
    RowWeight,
    Share,
    Token,
    Weight,
)
from mok_compile.passes.rules import (
    Break,
    Facts,
    _combined,
    _dim,
    _integer,
    _number,
    _projected,
    _root,
    _weight,
    _weighted,
    rule,
    same,
)
from mok_compile.passes.view import Value

aten = torch.ops.aten
_ROWS = (Rows, Pointwise)
_WIDE = (torch.int32, torch.int64)


def distinct(ids: Value) -> bool:
    """Whether no token has the same expert twice: its experts are the places of its largest scores."""
    return ids.op is aten.topk.default and ids.index == 1 and _dim(ids, (*ids.args, -1)[2]) == len(ids.meta.shape) - 1


# Masks


@rule(aten.eq.Scalar)
def _is_expert(facts, value, a, number):
    fact = facts.of(a)
    if isinstance(fact, Hits):
        plain = number in (0, 1) and fact.reduced != "sum"
        return replace(fact, negated=fact.negated != (number == 0)) if plain else None
    if fact is not None or not isinstance(number, int) or isinstance(number, bool) or not _integer(a):
        return None
    return replace(_hits(a), expert=number)


@rule(aten.eq.Tensor)
def _is_each_expert(facts, value, a, b):
    for ids, experts in ((a, b), (b, a)):
        if facts.of(ids) is None and _integer(ids) and isinstance(facts.of(_unshaped(experts)), Iota):
            rank = len(value.meta.shape)
            hits = _hits(ids)
            axes = (NONE,) * (rank - len(hits.axes)) + hits.axes
            sizes = (1,) * (rank - len(experts.meta.shape)) + tuple(experts.meta.shape)
            along = [d for d in range(rank) if not same(sizes[d], 1)]
            if len(along) == 1 and axes[along[0]] == NONE:
                return replace(hits, axes=(*axes[: along[0]], EXPERT, *axes[along[0] + 1 :]))
    return None


def _unshaped(a: Value) -> Value:
    while a.op in (aten.view.default, aten.unsqueeze.default):
        a = a.args[0]
    return a


def _hits(ids: Value) -> Hits:
    """What `ids` say of each entry, the expert left open."""
    if ids.op is aten.unsqueeze.default:
        inner, dim = _hits(ids.args[0]), _dim(ids, ids.args[1])
        return replace(inner, axes=(*inner.axes[:dim], NONE, *inner.axes[dim:]))
    rank, root = len(ids.meta.shape), _root(ids)
    if rank > 1:
        return Hits(root, (TOKEN,) * (rank - 1) + (CHOICE,), ids.meta.shape[-1])
    if ids.op is aten.select.int and len(ids.args[0].meta.shape) > 1 and _dim(ids.args[0], ids.args[1]) == 1:
        return Hits(_root(ids.args[0]), (TOKEN,), ids.args[0].meta.shape[-1], choice=ids.args[2])
    return Hits(root, (BOTH,), root.meta.shape[-1] if len(root.meta.shape) > 1 else None)


@rule(aten.ne.Scalar, aten.gt.Scalar)
def _is_hit(facts, value, a, number):
    fact = facts.of(a)
    return replace(fact, reduced=fact.reduced and "any") if isinstance(fact, Hits) and number == 0 else None


@rule(aten.bitwise_not.default, aten.logical_not.default)
def _other_hits(facts, value, a):
    fact = facts.of(a)
    return (
        replace(fact, negated=not fact.negated) if isinstance(fact, Hits) and value.meta.dtype == torch.bool else None
    )


@rule(aten.any.dim, aten.any.dims, aten.sum.dim_IntList)
def _reduce(facts, value, a, dim=None, keepdim=False, **kwargs):
    fact = facts.of(a)
    hits = fact.hits if isinstance(fact, Share) else fact
    if isinstance(fact, Outputs):
        return _sum_of_outputs(facts, fact, a, dim, keepdim)
    if not isinstance(hits, Hits) or hits.negated or (hits.reduced and isinstance(fact, Share)):
        return None
    dims = (
        range(len(hits.axes)) if dim is None else sorted(_dim(a, d) for d in ([dim] if isinstance(dim, int) else dim))
    )
    axes = [hits.axes[d] for d in dims]
    left = tuple(axis for d, axis in enumerate(hits.axes) if d not in dims)
    summed = value.op is aten.sum.dim_IntList
    if summed and fact is hits and left == (EXPERT,) and not keepdim and NONE not in axes:
        whole = CHOICE in axes or BOTH in axes or distinct(hits.ids)
        return Counts(hits.ids, value.meta.shape[0]) if whole and hits.choice is None else None
    if axes != [CHOICE] or hits.reduced or (isinstance(fact, Share) and not summed):
        return None
    axes = tuple(NONE if d in dims else axis for d, axis in enumerate(hits.axes)) if keepdim else left
    return _about(fact, replace(hits, axes=axes, reduced="sum" if summed else "any"))


def _about(fact: Hits | Share, hits: Hits) -> Hits | Share:
    return replace(fact, hits=hits) if isinstance(fact, Share) else hits


# Shapes of masks


def _shaped(function):
    """A rule for a change of shape of `Hits` and `Share`, given and giving axes; more than axes as another `Hits`."""

    def apply(facts, value, a, *args, **kwargs):
        fact = facts.of(a)
        hits = fact.hits if isinstance(fact, Share) else fact
        if not isinstance(hits, Hits):
            return None
        changed = function(value, a, hits, *args, **kwargs)
        return None if changed is None else _about(fact, changed)

    return apply


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
@_shaped
def _view_hits(value, a, hits, shape):
    old = [(axis, n) for axis, n in zip(hits.axes, a.meta.shape, strict=True) if axis != NONE]
    if any(axis == NONE and not same(n, 1) for axis, n in zip(hits.axes, a.meta.shape, strict=True)):
        return None
    axes, new = [], list(value.meta.shape)
    while new:
        if same(new[0], 1) and not (old and same(old[0][1], 1)):
            axes.append(NONE)
            new.pop(0)
            continue
        if not old:
            return None
        (label, size), dims = old.pop(0), [new.pop(0)]
        labels = [label]
        while not same(size, math.prod(dims)):
            if label == TOKEN and old and not (new and same(size, math.prod(dims) * new[0])):
                label, n = old.pop(0)
                labels.append(label)
                size = size * n
            elif new:
                dims.append(new.pop(0))
            else:
                return None
        joined = _regroup(labels, dims, hits.k)
        if joined is None:
            return None
        axes += joined
    return replace(hits, axes=tuple(axes)) if not old else None


def _regroup(labels: list[str], sizes: list, k) -> list[str] | None:
    """The axes of `sizes` that take the place of `labels`."""
    if len(labels) == len(sizes) == 1:
        return labels
    if set(labels) == {TOKEN}:
        return [TOKEN] * len(sizes)
    if labels[-1] == CHOICE and set(labels[:-1]) == {TOKEN} and len(sizes) == 1:
        return [BOTH]
    return [TOKEN] * (len(sizes) - 1) + [CHOICE] if labels == [BOTH] and k is not None and same(sizes[-1], k) else None


@rule(aten.unsqueeze.default)
@_shaped
def _unsqueeze_hits(value, a, hits, dim):
    dim %= len(value.meta.shape)
    return replace(hits, axes=(*hits.axes[:dim], NONE, *hits.axes[dim:]))


@rule(aten.squeeze.dim, aten.squeeze.dims)
@_shaped
def _squeeze_hits(value, a, hits, dims):
    dims = {_dim(a, d) for d in ([dims] if isinstance(dims, int) else dims)}
    dims = {d for d in dims if same(a.meta.shape[d], 1)}
    if any(hits.axes[d] not in (NONE, CHOICE) for d in dims) or len(a.meta.shape) - len(dims) != len(value.meta.shape):
        return None
    alone = any(hits.axes[d] == CHOICE for d in dims)  # of one slot: its sum
    axes = tuple(axis for d, axis in enumerate(hits.axes) if d not in dims)
    return replace(hits, axes=axes, reduced="sum" if alone else hits.reduced)


@rule(aten.select.int)
@_shaped
def _select_hits(value, a, hits, dim, index):
    dim, axes = _dim(a, dim), hits.axes
    size = a.meta.shape[dim]
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        return None
    hits = replace(hits, axes=axes[:dim] + axes[dim + 1 :])
    return _at(hits, axes[dim], index + size if index < 0 else index)


def _at(hits: Hits, axis: str, index: int) -> Hits | None:
    if axis == EXPERT:
        return replace(hits, expert=index)
    if axis == CHOICE:
        return replace(hits, choice=index)
    return hits if axis == NONE else None


@rule(aten.unbind.int)
def _unbind_hits(facts, value, a, dim=0):
    fact = facts.of(a)
    if isinstance(fact, Places):
        return _place(fact, value.index) if _dim(a, dim) == 1 else None
    return _select_hits(facts, value, a, dim, value.index)


@rule(aten.slice.Tensor)
@_shaped
def _slice_hits(value, a, hits, dim=0, start=None, end=None, step=1):
    dim = _dim(a, dim)
    start = 0 if start is None else start
    if same(value.meta.shape[dim], a.meta.shape[dim]):
        return hits
    if not same(value.meta.shape[dim], 1) or not isinstance(start, int) or start < 0:
        return None
    axes = (*hits.axes[:dim], NONE, *hits.axes[dim + 1 :])
    return _at(replace(hits, axes=axes), hits.axes[dim], start) if hits.axes[dim] in (EXPERT, CHOICE) else None


@rule(aten.permute.default)
@_shaped
def _permute_hits(value, a, hits, dims):
    return replace(hits, axes=tuple(hits.axes[_dim(a, d)] for d in dims))


@rule(aten.transpose.int, aten.t.default)
@_shaped
def _transpose_hits(value, a, hits, first=0, second=1):
    axes = list(hits.axes)
    first, second = _dim(a, first), _dim(a, second)
    axes[first], axes[second] = axes[second], axes[first]
    return replace(hits, axes=tuple(axes)) if len(axes) > 1 else None


@rule(aten.expand.default, aten.clone.default, aten.alias.default, aten.contiguous.default)
@_shaped
def _repeat_hits(value, a, hits, *args, **kwargs):
    return hits if len(value.meta.shape) == len(hits.axes) else None


@rule(aten.detach.default)
def _detach_hits(facts, value, a):
    fact = facts.of(a)
    return fact if isinstance(fact, Hits) else None


@rule(aten._to_copy.default)
def _cast_hits(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    if isinstance(fact, Hits):
        return replace(fact, reduced=fact.reduced and "any") if value.meta.dtype == torch.bool else fact
    if isinstance(fact, (Place, Places)):
        return fact if value.meta.dtype in _WIDE else None
    if isinstance(fact, Fenced):
        return fact if value.meta.dtype.is_floating_point else None
    if isinstance(fact, Share):
        wider = value.meta.dtype.is_floating_point and value.meta.dtype.itemsize >= a.meta.dtype.itemsize
        return fact if wider else _tabulated(fact, value)
    if isinstance(fact, Output) and value.meta.dtype.is_floating_point:
        return Output(replace(fact.rows, dtypes=fact.rows.dtypes | {value.meta.dtype}))
    return None


# Routing weights: by slot, or in a table of all experts


def _is_table(hits: Hits) -> bool:
    return hits.axes[-1] == EXPERT and set(hits.axes[:-1]) == {TOKEN} and bool(hits.reduced) and not hits.negated


def _tabulated(fact: Share, value: Value) -> Share | None:
    """`fact` of a table of which each number was changed, and zeros remained what they are."""
    table = _is_table(fact.hits) and _of_all_experts(value, fact.hits.ids) and value.meta.dtype.is_floating_point
    return Share(fact.hits, FromTable(value)) if table else None


def _shared_out(hits: Hits, weights: Value, value: Value) -> Share | None:
    """`weights` where `hits` is true and zero elsewhere, as [.., ..] like `value`."""
    if not isinstance(weights, Value) or not weights.meta.dtype.is_floating_point or hits.negated:
        return None
    rank = len(value.meta.shape)
    axes = (NONE,) * (rank - len(hits.axes)) + hits.axes
    sizes = (1,) * (rank - len(weights.meta.shape)) + tuple(weights.meta.shape)
    if hits.reduced:
        full = all(map(same, sizes, value.meta.shape)) and len(axes) == len(hits.axes)
        return _tabulated(Share(hits, FromTable(value)), value) if full else None
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
    return _tabulated(fact, value) if whole and all(map(same, value.meta.shape, a.meta.shape)) else None


# Which rows are an expert's


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
    return _place(fact, index) if isinstance(fact, Places) and _dim(a, dim) == 1 else None


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
    return Place(replace(fact.hits, k=k), axis) if known and _integer(value) else None


def _chosen(facts: Facts, indices: tuple) -> tuple[Hits, list[str]] | None:
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


@rule(aten.index.Tensor)
def _pick(facts, value, a, indices):
    if indices[:1] == (None,) and a.op is aten.unsqueeze.default and _dim(value, a.args[1]) == 0:
        a, indices = a.args[0], indices[1:]  # x[None, rows]
    chosen = _chosen(facts, indices) if None not in indices else None
    return None if chosen is None else _picked(facts, a, *chosen)


@rule(aten.index_select.default)
def _pick_rows(facts, value, a, dim, index):
    chosen = _chosen(facts, (index,))
    return None if chosen is None or _dim(a, dim) != 0 else _picked(facts, a, *chosen)


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
            return _from_column(a, hits)
        plain = fact is None or isinstance(fact, (Full, Partial, Combined))
        if plain and floating and rank == len(axes) + 1:
            return Rows(a, hits.k or 1, hits.ids, hits, dtypes=frozenset([a.meta.dtype]))
    in_order = axes[-1] == CHOICE and set(axes[:-1]) == {TOKEN}
    return RowWeight(a, hits.ids, hits) if fact is None and floating and narrow and in_order else None


def _from_column(a: Value, hits: Hits) -> RowWeight | None:
    """The weights of one expert's tokens, from its column of a table [T, E] or, with one slot a token, from [T]."""
    table = _table_of(a, hits.expert)
    if table is not None and hits.choice is None and _of_all_experts(table, hits.ids):
        return RowWeight(FromTable(table), hits.ids, hits)
    if hits.k in (None, 1):
        return RowWeight(a, hits.ids, hits)
    if hits.choice is not None and a.op is aten.select.int and a.args[2] == hits.choice and not a.detached:
        slots = a.args[0]
        last = _dim(slots, a.args[1]) == len(slots.meta.shape) - 1 and same(slots.meta.shape[-1], hits.k)
        return RowWeight(slots, hits.ids, hits) if last else None
    return None


def _of_all_experts(table: Value, ids: Value) -> bool:
    """Whether `table` has a column for each expert that `ids` can name."""
    return distinct(ids) and same(table.meta.shape[-1], ids.args[0].meta.shape[-1])


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


# The projections of one expert


def _alone(fact: Fact | None) -> bool:
    return isinstance(fact, _ROWS) and isinstance(fact.order, Hits)


@rule(aten.mm.default)
def _mm(facts, value, a, b):
    fact = facts.of(a)
    return _one_projection(facts, value, fact, b, None) if _alone(fact) else None


@rule(aten.addmm.default)
def _addmm(facts, value, bias, a, b, *, beta=1, alpha=1):
    fact = facts.of(a)
    if not _alone(fact):
        return None
    plain = beta == alpha == 1 and len(bias.meta.shape) == 1 and facts.of(bias) is None
    return _one_projection(facts, value, fact, b, bias) if plain else None


def _one_projection(facts: Facts, value: Value, rows: Rows | Pointwise, b: Value, bias: Value | None) -> Pointwise:
    if facts.of(b) is not None:
        raise Break("no-match", "an expert's weight depends on the routing")
    swapped = b.op is aten.t.default or (b.op is aten.transpose.int and {_dim(b, d) for d in b.args[1:3]} == {0, 1})
    matrix = Matrix(b.args[0], False) if swapped and not b.detached else Matrix(b, True)
    fact = _projected(value, rows, matrix, rows.order.ids)
    return fact if bias is None else _with_bias(fact, bias)


def _with_bias(fact: Pointwise, bias: Value) -> Pointwise:
    leaf = act.Expr("column", (Column(replace(fact.bare, bias=bias), "all"),))
    return replace(fact, expr=leaf)


@rule(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)
def _reshape_rows(facts, value, a, *args, **kwargs):
    """Rows stay rows under any number of leading dimensions."""
    fact = facts.of(a)
    if not _alone(fact) or not value.meta.shape or not same(value.meta.shape[-1], a.meta.shape[-1]):
        return None
    grown = value.op is aten.expand.default and not all(map(same, value.meta.shape, a.meta.shape))
    column = value.op is aten.unsqueeze.default and _dim(value, args[0]) == len(value.meta.shape) - 1
    return None if grown or column else fact


# What one expert adds to the result


@rule(aten.index_add.default)
def _add_rows(facts, value, base, dim, index, source, *, alpha=1):
    return _added(facts, base, (index,), source) if _dim(base, dim) == 0 and alpha == 1 else None


@rule(aten.scatter_add.default)
def _scatter_add_rows(facts, value, base, dim, index, source):
    whole = index.op is aten.expand.default and len(index.meta.shape) == 2 == len(source.meta.shape)
    whole = whole and same(index.meta.shape[1], source.meta.shape[1])
    return _added(facts, base, (index,), source) if _dim(base, dim) == 0 and whole else None


@rule(aten.index_put.default)
def _put_rows(facts, value, base, indices, source, accumulate=False):
    if accumulate:
        return _added(facts, base, indices, source)
    chosen, fact = _chosen(facts, indices) if None not in indices else None, facts.of(source)
    if chosen is None:
        return None
    hits, axes = chosen
    rows = fact.rows if isinstance(fact, Onto) else fact
    if not _alone(rows) or not isinstance(rows, Pointwise):
        return None
    if rows.order != hits:
        raise Break("no-match", "an expert's rows are written to the places of other rows")
    _combined(None, rows, None)
    if isinstance(fact, Onto):
        if fact.base is not base or not _tokens(hits, axes):
            raise Break("no-match", "rows are added onto the rows of another tensor or of other tokens")
        if not (hits.reduced or hits.choice is not None or hits.k == 1 or hits.axes == (BOTH,) or distinct(hits.ids)):
            raise Break("no-match", "a token may go to one expert twice, and one of the two would be lost")
        return _extend(facts, base, rows)
    if axes == [BOTH] or (axes[-1] == CHOICE and set(axes[:-1]) == {TOKEN}):
        return _fill(facts, value, base, rows)
    return None


def _tokens(hits: Hits, axes: list[str]) -> bool:
    return set(axes) == {TOKEN} or (axes == [BOTH] and hits.k in (None, 1))


def _added(facts: Facts, base: Value, indices: tuple, source: Value) -> Fact | None:
    rows = facts.of(source)
    if not _alone(rows) or not isinstance(rows, Pointwise):
        return None
    chosen = _chosen(facts, indices) if None not in indices else None
    if chosen is None:
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    if chosen[0] != rows.order or not _tokens(*chosen):
        raise Break("no-match", "an expert's rows are added to other tokens than their own")
    _combined(None, rows, None)
    return _extend(facts, base, rows)


def _extend(facts: Facts, base: Value, *rows: Pointwise) -> Partial:
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
    merged = merge(new.parts)
    return merged if len(value.meta.shape) == 2 else Grid(merged)


_EMPTY = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default)


# Rows in sorted order, split by the counts of the experts and put together again


@rule(aten.split_with_sizes.default)
def _split_by_expert(facts, value, a, sizes, dim=0):
    fact = facts.of(a)
    if not isinstance(fact, (*_ROWS, RowWeight)) or fact.order != SORTED or _dim(a, dim) != 0:
        return None
    for e, size in enumerate(sizes):
        read = facts.read_from(size)
        counts = facts.of(read.value) if read is not None else None
        counted = isinstance(counts, Counts) and counts.ids is fact.ids and counts.num_experts == len(sizes)
        if not counted or read.index != e:
            return None
    facts.parts[fact.ids] = len(sizes)
    return replace(fact, order=Hits(fact.ids, (SORTED,), expert=value.index))


@rule(aten.cat.default)
def _cat_experts(facts, value, tensors, dim=0):
    rows = [facts.of(t) for t in tensors]
    if not all(_alone(r) and isinstance(r, Pointwise) and r.order.axes == (SORTED,) for r in rows):
        return None
    ids = rows[0].ids
    if [r.order.expert for r in rows] != list(range(facts.parts[ids])) or any(r.ids is not ids for r in rows):
        raise Break("no-match", "the experts' rows are put together in another order, or not all of them")
    return _merged(rows, ids, SORTED) if _dim(value, dim) == 0 else None


# Every expert on every token


@rule(aten.mul.Tensor)
def _mul_single(facts, value, a, b):
    for left, right in ((a, b), (b, a)):
        fact, other = facts.of(left), facts.of(right)
        if isinstance(fact, Hits) and other is None:
            shared = _shared_out(fact, right, value)
            return shared if shared is not None else _output(facts, value, right, fact, None)
        if isinstance(fact, Share):
            if isinstance(other, Hits):
                own = replace(other, reduced="") == replace(fact.hits, reduced="")
                return fact if own and (other.reduced == "any" or distinct(other.ids)) else None
            if isinstance(other, Outputs):
                return _share_of_outputs(other, fact.hits, fact)
            if other is None and isinstance(right, Value) and len(right.meta.shape) == len(value.meta.shape):
                out = _output(facts, value, right, fact.hits, fact.weights)
                return out if out is not None else _tabulated(fact, value)
            if other is None or isinstance(other, Full):
                return _tabulated(fact, value)
        if isinstance(fact, Output):
            return _weigh_output(fact, right, other, value)
    return None


def _weigh_output(fact: Output, by: Value, other: Fact | None, value: Value) -> Fact | None:
    rows, hits = fact.rows, fact.rows.order
    if isinstance(other, Hits) and _column_of(other, hits, value):
        return fact
    if isinstance(other, Share) and _column_of(other.hits, hits, value):
        return Output(_weighted(rows, RowWeight(other.weights, hits.ids, hits)))
    alike = isinstance(by, Value) and len(by.meta.shape) == len(value.meta.shape)
    if other is None and alike and by.meta.dtype.is_floating_point and same(by.meta.shape[-1], 1):
        weight = _from_column(by, hits)
        if weight is not None:
            return Output(_weighted(rows, weight))
    raise Break("no-match", "what an expert adds is multiplied by something else than its routing weights")


def _column_of(hits: Hits, own: Hits, value: Value) -> bool:
    """Whether `hits` are those of the same expert, one a row of `value`."""
    tokens = hits.axes == (TOKEN,) * (len(value.meta.shape) - 1) + (NONE,)
    return tokens and replace(hits, axes=(), reduced="") == replace(own, axes=(), reduced="")


def _output(facts: Facts, value: Value, outputs: Value, hits: Hits, weights: Value | FromTable | None) -> Fact | None:
    """What the expert of `hits` makes of every token, times its routing weight or just where it is asked for."""
    flat = hits.axes == (BOTH, *hits.axes[1:]) and hits.k in (None, 1)
    axes = (TOKEN, *hits.axes[1:]) if flat else hits.axes
    column = axes == (TOKEN,) * (len(value.meta.shape) - 1) + (NONE,)
    alone = hits.reduced or hits.choice is not None or flat
    if not column or hits.expert is None or not alone or hits.negated or not isinstance(outputs, Value):
        return None
    if weights is None and hits.reduced == "any" and not distinct(hits.ids):
        return None
    own = replace(hits, axes=(TOKEN,), reduced="any" if hits.reduced else "", k=1 if flat else hits.k)
    rows = _every_token(facts, outputs, own)
    if rows is None:
        return None
    if weights is not None:
        rows = _weighted(rows, RowWeight(weights, own.ids, own))
    return Output(rows)


def _every_token(facts: Facts, outputs: Value, hits: Hits) -> Pointwise | None:
    """`outputs` as the expert MLP of every token, `hits` being those that count."""
    weight = None
    if outputs.op is aten.mul.Tensor:  # the routing weights are inside of the mask
        for inner, by in (outputs.args[:2], outputs.args[1::-1]):
            column = (
                isinstance(by, Value) and len(by.meta.shape) == len(outputs.meta.shape) and same(by.meta.shape[-1], 1)
            )
            fact = facts.of(by) if column else None
            if column and fact is None and by.meta.dtype.is_floating_point:
                weight = _from_column(by, hits)
            elif isinstance(fact, Share) and _column_of(fact.hits, hits, outputs):
                weight = RowWeight(fact.weights, hits.ids, hits)
            if weight is not None:
                outputs = inner
                break
    cone, x = _expert_cone(facts, outputs)
    if x is None:
        return None
    start = Rows(x, hits.k or 1, hits.ids, hits, dtypes=frozenset([x.meta.dtype]))
    inside = Facts(cone, {x: start})
    rows = inside.of(outputs)
    stop = inside.broken.get(outputs)
    if stop is not None:
        raise Break(stop.reason, stop.detail)
    if not isinstance(rows, Pointwise) or rows.bare is None or rows.level != 2:
        return None
    facts.included |= {v: inside.of(v) for v in cone if inside.of(v) is not None}
    return rows if weight is None else _weighted(rows, weight)


_PASSED = (
    *(aten.view.default, aten._unsafe_view.default, aten._to_copy.default, aten.clone.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.alias.default, aten.add.Tensor),
)


def _expert_cone(facts: Facts, outputs: Value) -> tuple[list[Value], Value | None]:
    """The values between two levels of matrix products and `outputs`, and the one tensor that both start from."""
    cone, sources, pending, seen = [], set(), [(outputs, 0)], set()
    while pending:
        value, level = pending.pop()
        if (value, level) in seen:
            continue
        seen.add((value, level))
        if len(cone) > 64:
            return [], None
        if level == 2:
            # A linear of more than two dimensions flattens them first.
            flattened = len(outputs.meta.shape) > 2 and value.op is aten.view.default and not value.detached
            sources.add(value.args[0] if flattened else value)
            cone += [value] if flattened else []
            continue
        cone.append(value)
        if value.op in (aten.mm.default, aten.addmm.default):
            pending.append((value.args[-2], level + 1))
        elif (level == 0 and value.op not in _PASSED) or value.op in ("input", "opaque"):
            return [], None
        else:
            pending += [(v, level) for v in value.inputs if len(v.meta.shape) > 1]
    if len(sources) != 1:
        return [], None
    return sorted(set(cone), key=lambda v: v.number), sources.pop()


@rule(aten.where.self, aten.where.ScalarOther)
def _where_hits(facts, value, mask, a, b):
    hits, other = facts.of(mask), facts.of(b)
    number = other.number if isinstance(other, Full) else _number(b)
    return _kept(facts, value, hits, a, number) if isinstance(hits, Hits) else None


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _fill_hits(facts, value, a, mask, number):
    hits, full = facts.of(mask), facts.of(number)
    number = full.number if isinstance(full, Full) else _number(number)
    return _kept(facts, value, replace(hits, negated=not hits.negated), a, number) if isinstance(hits, Hits) else None


def _kept(facts: Facts, value: Value, hits: Hits, a: Value, number: float | None) -> Fact | None:
    """`a` where `hits`, `number` elsewhere."""
    fact = facts.of(a)
    if hits.negated or number is None or not isinstance(a, Value):
        return None
    if number == -math.inf and fact is None:
        fenced = _is_table(hits) and distinct(hits.ids) and len(a.meta.shape) == len(hits.axes)
        return Fenced(hits.ids) if fenced and all(map(same, a.meta.shape, value.meta.shape)) else None
    if number != 0:
        return None
    if isinstance(fact, Output):
        return fact if _column_of(hits, fact.rows.order, value) else None
    if isinstance(fact, Share):
        return fact if replace(fact.hits, reduced="") == replace(hits, reduced="") else None
    if fact is not None:
        return None
    shared = _shared_out(hits, a, value)
    return shared if shared is not None else _output(facts, value, a, hits, None)


@rule(aten.add.Tensor, aten.add.Scalar)
def _add_output(facts, value, a, b, alpha=1):
    if alpha != 1:
        return None
    left, right = facts.of(a), facts.of(b)
    for fact, other, operand in ((left, right, b), (right, left, a)):
        if isinstance(fact, Rows) and _alone(fact) and isinstance(other, Pointwise) and other.order == fact.order:
            return Onto(other, fact.x) if fact.weight is None else None
        if isinstance(fact, Pointwise) and _alone(fact) and other is None and isinstance(operand, Value):
            bias = len(operand.meta.shape) == 1 and fact.bare is not None and fact.bare.bias is None
            return _with_bias(fact, operand) if bias and fact.weight is None else None
        if isinstance(fact, Output) and _number(operand) == 0:
            return fact
    if isinstance(right, Output) and isinstance(left, Output):
        return _extend_with(None, left, right)
    for fact, base in ((right, a), (left, b)):
        if isinstance(fact, Output) and isinstance(base, Value):
            return _extend(facts, base, fact.rows) if all(map(same, base.meta.shape, value.meta.shape)) else None
    return None


def _extend_with(base: Value | None, *outputs: Output) -> Partial | None:
    return Partial(tuple(o.rows for o in outputs), base) if len({o.rows.ids for o in outputs}) == 1 else None


@rule(aten.stack.default)
def _stack(facts, value, tensors, dim=0):
    plain = all(facts.of(t) is None and t.meta.dtype.is_floating_point for t in tensors)
    if not plain or len(tensors) < 2 or value.detached or len(value.meta.shape) < 3:
        return None
    axes = [TOKEN] * (len(value.meta.shape) - 2) + [FEATURE]
    axes.insert(_dim(value, dim), EXPERT)
    return Outputs(tensors, tuple(axes))


def _share_of_outputs(fact: Outputs, hits: Hits, share: Share) -> Outputs | None:
    wanted = tuple(NONE if axis == FEATURE else axis for axis in fact.axes)
    return replace(fact, share=share) if fact.share is None and hits.axes == wanted and hits.reduced else None


def _sum_of_outputs(facts: Facts, fact: Outputs, a: Value, dim, keepdim: bool) -> Partial | None:
    if fact.share is None or keepdim or dim is None or [fact.axes[_dim(a, d)] for d in dim] != [EXPERT]:
        return None
    return _all_outputs(facts, fact.rows, fact.share) if fact.axes[-1] == FEATURE else None


def _all_outputs(facts: Facts, outputs: tuple[Value, ...], share: Share) -> Partial | None:
    parts = []
    for expert, value in enumerate(outputs):
        own = replace(share.hits, axes=(TOKEN,), expert=expert, reduced="any")
        rows = _every_token(facts, value, own)
        if rows is None:
            return None
        parts.append(_weighted(rows, RowWeight(share.weights, own.ids, own)))
    return Partial(tuple(parts), None)


@rule(aten.bmm.default)
def _bmm_outputs(facts, value, a, b):
    """[T, 1, E] @ [T, E, H]: the sum over the experts as a product."""
    share, fact = facts.of(a), facts.of(b)
    if not isinstance(share, Share) or not isinstance(fact, Outputs) or fact.share is not None:
        return None
    fits = share.hits.axes == (TOKEN, NONE, EXPERT) and fact.axes == (TOKEN, EXPERT, FEATURE) and share.hits.reduced
    return _all_outputs(facts, fact.rows, share) if fits else None


@rule(aten.view.default, aten.squeeze.dim, aten.permute.default)
def _shape_outputs(facts, value, a, *args):
    """Dimensions of one entry come and go."""
    fact = facts.of(a)
    old, new = ([n for n in v.meta.shape if not same(n, 1)] for v in (a, value))
    kept = len(old) == len(new) and all(map(same, old, new))
    if value.op is aten.permute.default:
        dims = [_dim(a, d) for d in args[0]]
        if isinstance(fact, Outputs):
            return replace(fact, axes=tuple(fact.axes[d] for d in dims))
        solid = [d for d in dims if not same(a.meta.shape[d], 1)]
        kept = solid == sorted(solid)
    if isinstance(fact, Outputs):
        alike = len(a.meta.shape) == len(value.meta.shape) and all(map(same, a.meta.shape, value.meta.shape))
        return fact if alike else None
    kept = kept and len(value.meta.shape) <= len(a.meta.shape)
    return fact if isinstance(fact, (Partial, Combined)) and kept else None


# The block as a whole


def merge(parts: tuple[Pointwise, ...]) -> Pointwise:
    """The outputs of all experts as one fact in slot order. Break unless every expert has its part, once."""
    choices = {part.order.choice for part in parts}
    if choices == {None}:
        return _merge(parts)
    if choices != set(range(parts[0].k)):
        raise Break("no-match", f"of {parts[0].k} slots of a token only {sorted(map(str, choices))} are computed")
    merged = {_merge(tuple(part for part in parts if part.order.choice == choice)) for choice in choices}
    if len(merged) != 1:
        raise Break("no-match", "the slots of a token are computed by different experts")
    return merged.pop()


def _merge(parts: tuple[Pointwise, ...]) -> Pointwise:
    first = parts[0]
    by_expert: dict[int, Pointwise] = {}
    for part in parts:
        if part.ids is not first.ids or part.k != first.k or part.weight != first.weight:
            raise Break("no-match", "the experts' rows have different routings or routing weights")
        if part.order.expert in by_expert:
            raise Break("no-match", f"expert {part.order.expert} is computed twice")
        by_expert[part.order.expert] = part
    missing = [e for e in range(len(parts)) if e not in by_expert]
    if missing:
        raise Break("no-match", f"of the experts up to {max(by_expert)}, number {missing[0]} is not computed")
    parts = tuple(by_expert[e] for e in range(len(parts)))
    return _merged(parts, first.ids, SLOT)


def _merged(parts: Sequence[Pointwise], ids: Value, order: str) -> Pointwise:
    """Rows of all experts in `order`, from those of each expert."""
    model = parts[0]
    if not all(isinstance(part, Pointwise) and part.weight == model.weight for part in parts):
        raise Break("no-match", "the experts take different rows")
    columns = [_aligned(part, model) for part in parts]
    leaves = {}
    for i, column in enumerate(model.columns):
        joined = _joined([own[i].projection for own in columns], ids, order)
        leaves[_leaf(column)] = _leaf(Column(joined, column.part))
    dtypes = frozenset().union(*(part.dtypes for part in parts))
    return replace(model, expr=act.substitute(model.expr, leaves), order=order, dtypes=dtypes)


def _leaf(column: Column) -> act.Expr:
    return act.Expr("column", (column,))


def _aligned(source: Pointwise, model: Pointwise) -> tuple[Column, ...]:
    """The columns of `source` in the order in which they stand for those of `model`."""
    wanted = act.substitute(model.expr, {_leaf(c): _leaf(c) for c in model.columns})
    for order in permutations(source.columns):
        pairs = list(zip(order, model.columns, strict=False))
        alike = len(source.columns) == len(model.columns) and all(a.part == b.part for a, b in pairs)
        kept = len({(a.projection, b.projection) for a, b in pairs}) == len({b.projection for _, b in pairs})
        if alike and kept and act.substitute(source.expr, {_leaf(a): _leaf(b) for a, b in pairs}) == wanted:
            return order
    raise Break("activation", "the experts have different activations")


def _joined(projections: list[Projection], ids: Value, order: str) -> Projection:
    """One projection of all experts from one of each."""
    if isinstance(projections[0].weight, Weight):  # of all experts already
        if len(set(projections)) != 1:
            raise Break("no-match", "the experts take different rows")
        return projections[0]
    source = _joined_source([p.source for p in projections], ids, order)
    matrices, biases = [p.weight for p in projections], [p.bias for p in projections]
    transposed = matrices[0].transposed
    if any(m.transposed != transposed or m.stored.meta.shape != matrices[0].stored.meta.shape for m in matrices):
        raise Break("layout", "the experts' weights have different shapes or layouts")
    if len({b is None for b in biases}) != 1:
        raise Break("layout", "some experts have a bias, others have none")
    stack = _stack_of([m.stored for m in matrices])
    if stack is None:
        weight = Weight(tuple(m.stored for m in matrices), transposed)
    else:
        weight = _weight(stack)
        weight = replace(weight, transposed=weight.transposed != transposed)
    bias = None
    if biases[0] is not None:
        bias = _stack_of(biases)
        bias = tuple(biases) if bias is None else bias
    return Projection(source, weight, ids, bias)


def _joined_source(sources: list[Rows | Pointwise], ids: Value, order: str) -> Rows | Pointwise:
    if not isinstance(sources[0], Rows):
        return _merged(sources, ids, order)
    alike = {replace(s, order=order, ids=ids) if isinstance(s, Rows) else None for s in sources}
    if len(alike) != 1:
        raise Break("no-match", "the experts take different rows")
    return alike.pop()


def _stack_of(parts: list[Value]) -> Value | None:
    """The tensor of which `parts` are all entries along the first dimension, in order."""
    for e, part in enumerate(parts):
        index = part.index if part.op is aten.unbind.int else part.args[2] if part.op is aten.select.int else None
        along = index == e and _dim(part.args[0], (*part.args, 0)[1]) == 0
        if not along or part.detached or part.args[0] is not parts[0].args[0]:
            return None
    whole = same(parts[0].args[0].meta.shape[0], len(parts))
    return parts[0].args[0] if whole else None
