"""Rules for masks of experts that are computed one at a time: which slots go to which expert.

Nothing is sorted there, in a loop over the experts that Dynamo has unrolled for instance. For each expert a mask says
which slots are its own: `Hits`, whatever the mask's shape, and as long as its numbers are 0 and 1, whatever its dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mok_compile.passes.facts.kinds import BOTH, CHOICE, EXPERT, NONE, TOKEN, Counts, Hits, Iota, Share
from mok_compile.passes.facts.rules import COUNT_DTYPES, dim_of, is_integer, root_of, rule, same, unsliced
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


def distinct(ids: Value) -> bool:
    """Whether no token has the same expert twice: its experts are the places of its largest scores."""
    return ids.op is aten.topk.default and ids.index == 1 and dim_of(ids, (*ids.args, -1)[2]) == len(ids.meta.shape) - 1


# What a mask says


@rule(aten.eq.Scalar)
def _is_expert(facts, value, a, number):
    fact = facts.of(a)
    if isinstance(fact, Hits):
        plain = number in (0, 1) and fact.reduced != "sum"
        return replace(fact, negated=fact.negated != (number == 0)) if plain else None
    if fact is not None or not isinstance(number, int) or isinstance(number, bool) or not is_integer(a):
        return None
    return replace(_hits(a), expert=number)


@rule(aten.eq.Tensor)
def _is_each_expert(facts, value, a, b):
    for ids, experts in ((a, b), (b, a)):
        if facts.of(ids) is None and is_integer(ids) and isinstance(facts.of(_unshaped(experts)), Iota):
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
        inner, dim = _hits(ids.args[0]), dim_of(ids, ids.args[1])
        return replace(inner, axes=(*inner.axes[:dim], NONE, *inner.axes[dim:]))
    rank, root = len(ids.meta.shape), root_of(ids)
    if rank > 1:
        return Hits(root, (TOKEN,) * (rank - 1) + (CHOICE,), ids.meta.shape[-1])
    if ids.op is aten.select.int and len(ids.args[0].meta.shape) > 1 and dim_of(ids.args[0], ids.args[1]) == 1:
        return Hits(root_of(unsliced(ids.args[0])), (TOKEN,), ids.args[0].meta.shape[-1], choice=ids.args[2])
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
    if not isinstance(hits, Hits) or hits.negated or (hits.reduced and isinstance(fact, Share)):
        return None
    dims = (
        range(len(hits.axes)) if dim is None else sorted(dim_of(a, d) for d in ([dim] if isinstance(dim, int) else dim))
    )
    axes = [hits.axes[d] for d in dims]
    left = tuple(axis for d, axis in enumerate(hits.axes) if d not in dims)
    summed = value.op is aten.sum.dim_IntList
    if summed and fact is hits and left == (EXPERT,) and not keepdim and NONE not in axes:
        whole = CHOICE in axes or BOTH in axes or distinct(hits.ids)
        whole = whole and hits.choice is None and value.meta.dtype in COUNT_DTYPES
        return Counts(hits.ids, value.meta.shape[0]) if whole else None
    if axes != [CHOICE] or hits.reduced or (isinstance(fact, Share) and not summed):
        return None
    axes = tuple(NONE if d in dims else axis for d, axis in enumerate(hits.axes)) if keepdim else left
    return _about(fact, replace(hits, axes=axes, reduced="sum" if summed else "any"))


def _about(fact: Hits | Share, hits: Hits) -> Hits | Share:
    return replace(fact, hits=hits) if isinstance(fact, Share) else hits


@rule(aten._to_copy.default)
def _cast_hits(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    if not isinstance(fact, Hits):
        return None
    return replace(fact, reduced=fact.reduced and "any") if value.meta.dtype == torch.bool else fact


@rule(aten.detach.default)
def _detach_hits(facts, value, a):
    fact = facts.of(a)
    return fact if isinstance(fact, Hits) else None


# Its shapes


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
    axes = viewed(hits.axes, value, a, hits.k)
    return None if axes is None else replace(hits, axes=axes)


def viewed(axes: tuple[str, ...], value: Value, a: Value, k: int | None = None) -> tuple[str, ...] | None:
    """`axes` of `a` as those of `value`, its numbers in another shape; `k`: of a token's slots, where that is known."""
    old = [(axis, n) for axis, n in zip(axes, a.meta.shape, strict=True) if axis != NONE]
    if any(axis == NONE and not same(n, 1) for axis, n in zip(axes, a.meta.shape, strict=True)):
        return None
    found = _viewed(value, old, k)
    if found is None:  # dimensions of one token stand anywhere
        solid = [(axis, n) for axis, n in old if axis != TOKEN or not same(n, 1)]
        found = _viewed(value, solid, k) if TOKEN in [axis for axis, _ in solid] else None
    return found


def _viewed(value: Value, old: list[tuple], k: int | None) -> tuple[str, ...] | None:
    axes, new, old = [], list(value.meta.shape), list(old)
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
        joined = _regroup(labels, dims, k)
        if joined is None:
            return None
        axes += joined
    return tuple(axes) if not old else None


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
    dims = {dim_of(a, d) for d in ([dims] if isinstance(dims, int) else dims)}
    dims = {d for d in dims if same(a.meta.shape[d], 1)}
    if any(hits.axes[d] not in (NONE, CHOICE) for d in dims) or len(a.meta.shape) - len(dims) != len(value.meta.shape):
        return None
    alone = any(hits.axes[d] == CHOICE for d in dims)  # of one slot: its sum
    axes = tuple(axis for d, axis in enumerate(hits.axes) if d not in dims)
    return replace(hits, axes=axes, reduced="sum" if alone else hits.reduced)


@rule(aten.select.int)
@_shaped
def _select_hits(value, a, hits, dim, index):
    dim, axes = dim_of(a, dim), hits.axes
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
    return _select_hits(facts, value, a, dim, value.index)


@rule(aten.slice.Tensor)
@_shaped
def _slice_hits(value, a, hits, dim=0, start=None, end=None, step=1):
    dim = dim_of(a, dim)
    start = 0 if start is None else start
    if same(value.meta.shape[dim], a.meta.shape[dim]):
        return hits
    if not same(value.meta.shape[dim], 1) or not isinstance(start, int) or start < 0:
        return None
    axes = (*hits.axes[:dim], NONE, *hits.axes[dim + 1 :])
    return _at(replace(hits, axes=axes), hits.axes[dim], start) if hits.axes[dim] in (EXPERT, CHOICE) else None


def tokens_in_order(axes: tuple[str, ...], a: Value, order: list[int]) -> bool:
    """Whether the dimensions of `a` that count tokens keep their order where `order` puts them: they count together, so
    that another order names other tokens, and their axes do not tell them apart."""
    tokens = [d for d in order if axes[d] in (TOKEN, BOTH) and not same(a.meta.shape[d], 1)]
    return tokens == sorted(tokens)


def permuted(axes: tuple[str, ...], value: Value, a: Value, *dims) -> tuple[str, ...] | None:
    """`axes` of `a` as those of `value`, its dimensions in another order; None where tokens would change theirs."""
    order = list(range(len(axes)))
    if value.op is aten.permute.default:
        order = [dim_of(a, d) for d in dims[0]]
    elif len(order) > 1:
        first, second = (dim_of(a, d) for d in dims or (0, 1))
        order[first], order[second] = second, first
    return tuple(axes[d] for d in order) if tokens_in_order(axes, a, order) else None


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
@_shaped
def _permute_hits(value, a, hits, *dims):
    axes = permuted(hits.axes, value, a, *dims)
    return None if axes is None else replace(hits, axes=axes)


@rule(aten.expand.default, aten.clone.default, aten.alias.default, aten.contiguous.default)
@_shaped
def _repeat_hits(value, a, hits, *args, **kwargs):
    return hits if len(value.meta.shape) == len(hits.axes) else None
