"""Rules for experts that compute every token, of which those that were chosen are picked: by their numbers, with
`gather` or an index, or by a product with the slots' one-hot masks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mok_compile.passes.facts.batched import AGAIN, at_slots, named_roles, routing_weights, unfold
from mok_compile.passes.facts.dense import all_outputs
from mok_compile.passes.facts.kinds import (
    CHOICE,
    EVERY,
    EXPERT,
    FEATURE,
    NONE,
    TOKEN,
    Fact,
    Hits,
    Iota,
    Laid,
    Outputs,
    Pointwise,
    Share,
)
from mok_compile.passes.facts.masks import distinct
from mok_compile.passes.facts.rules import Facts, dim_of, is_integer, pinned, root_of, rule, same
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


def _every(fact: Fact | None) -> tuple[str, ...] | None:
    """What each dimension of all experts' plain outputs for every token runs over; None for anything else."""
    if isinstance(fact, Outputs):
        return fact.axes if fact.share is None and fact.ids is None else None
    if not isinstance(fact, Laid) or not isinstance(fact.rows, Pointwise) or any(len(dim) != 1 for dim in fact.roles):
        return None
    rows = fact.rows
    plain = rows.order == EVERY and rows.bare is not None and rows.level == 2
    plain = plain and rows.ids is None and rows.weight is None and not rows.fenced
    source = rows.bare.source if plain else None
    start = source.columns[0].projection.source if isinstance(source, Pointwise) and source.weight is None else None
    untouched = start is not None and start.ids is None and start.weight is None and not start.fenced
    return tuple(role for (role,) in fact.roles) if untouched else None


def _picked(fact: Laid | Outputs, axes: tuple[str, ...], ids: Value, k: int) -> Laid | Outputs:
    """The outputs of each slot's expert; `axes` have CHOICE where there was EXPERT."""
    if isinstance(fact, Outputs):
        return replace(fact, axes=axes, ids=ids, k=k)
    return Laid(at_slots(fact.rows, ids, k), tuple((axis,) for axis in axes))


def _experts(a: Value, axes: tuple[str, ...]) -> int:
    return a.meta.shape[axes.index(EXPERT)]


def _numbers(index: Value, experts: int) -> Value:
    """`index` without a remainder that leaves the numbers of top-k among `experts` what they are."""
    if index.op is aten.remainder.Scalar and same(index.args[1], experts):
        ids = root_of(unfold(index.args[0]).base)
        if distinct(ids) and same(ids.args[0].meta.shape[-1], experts):
            return index.args[0]
    return index


def _slots(index: Value, facts: Facts) -> tuple[tuple, Value, int] | None:
    """What each dimension of `index` runs over, the ids [.., K] that it repeats, and K."""
    shape = unfold(index)
    base = shape.base
    last = len(base.meta.shape) - 1
    if last < 1 or not is_integer(base) or facts.of(base) is not None:
        return None
    names = dict.fromkeys(range(last), TOKEN) | {last: CHOICE, -1: AGAIN}
    roles, k = named_roles(shape.dims, names), pinned(base.meta.shape[-1])
    return None if roles is None or k is None else (roles, root_of(base), k)


@rule(aten.gather.default)
def _gather(facts, value, a, dim, index, **kwargs):
    fact = facts.of(a)
    axes = _every(fact)
    if axes is None or axes[dim_of(a, dim)] != EXPERT:
        return None
    found = _slots(_numbers(index, _experts(a, axes)), facts)
    if found is None:
        return None
    roles, ids, k = found
    new = tuple(CHOICE if axis == EXPERT else axis for axis in axes)
    wanted = tuple((AGAIN,) if axis == FEATURE else (axis,) for axis in new)
    sizes = zip(axes, a.meta.shape, index.meta.shape, strict=True)
    whole = all(axis == EXPERT or same(n, m) for axis, n, m in sizes)
    return _picked(fact, new, ids, k) if roles == wanted and whole else None


@rule(aten.index.Tensor)
def _index(facts, value, a, indices):
    """``y[arange(T)[:, None], ids]``, or with the experts first."""
    fact = facts.of(a)
    axes = _every(fact)
    if axes not in ((TOKEN, EXPERT, FEATURE), (EXPERT, TOKEN, FEATURE)) or len(indices) != 2 or None in indices:
        return None
    tokens, experts = indices if axes[0] == TOKEN else indices[::-1]
    count = unfold(tokens)
    every = isinstance(facts.of(count.base), Iota) and len(count.dims) == 2 and not count.dims[1]
    found = (
        _slots(experts, facts) if every and same(count.base.meta.shape[0], a.meta.shape[axes.index(TOKEN)]) else None
    )
    if found is None or found[0] != ((TOKEN,), (CHOICE,)):
        return None
    _, ids, k = found
    # A negative number counts from the end, which only top-k's cannot be.
    return _picked(fact, (TOKEN, CHOICE, FEATURE), ids, k) if distinct(ids) else None


@rule(aten.bmm.default)
def _one_hot(facts, value, a, b):
    for mask, rows, swapped in ((a, b, False), (b, a, True)):
        hits, fact = facts.of(mask), facts.of(rows)
        axes = _every(fact)
        if not isinstance(hits, Hits) or axes is None or not isinstance(fact, Laid):
            continue
        wanted = [(TOKEN, CHOICE, EXPERT), (TOKEN, EXPERT, FEATURE), (TOKEN, CHOICE, FEATURE)]
        masked, every, new = [(t, y, x) for t, x, y in wanted] if swapped else wanted
        plain = not hits.negated and not hits.reduced and hits.expert is None and hits.choice is None
        k = pinned(hits.k)
        if plain and hits.axes == masked and axes == every and k is not None:
            return _picked(fact, new, hits.ids, k)
    return None


@rule(aten.bmm.default)
def _table(facts, value, a, b):
    """[T, 1, K] @ [T, K, E]: a table of weights, from those of each token's slots and their one-hot masks."""
    for left, mask, swapped in ((a, b, False), (b, a, True)):
        hits, weights = facts.of(mask), None
        if isinstance(hits, Hits) and not hits.negated and not hits.reduced and hits.expert is None:
            weights = routing_weights(left, facts)
        if weights is None or not isinstance(weights.what, Value) or hits.choice is not None:
            continue
        roles = [(TOKEN,), (), (CHOICE,)]
        axes = (TOKEN, EXPERT, CHOICE) if swapped else (TOKEN, CHOICE, EXPERT)
        if swapped:
            roles[1:] = roles[:0:-1]
        if weights.roles == tuple(roles) and hits.axes == axes and same(weights.what.meta.shape[-1], hits.k):
            kept = (TOKEN, EXPERT, NONE) if swapped else (TOKEN, NONE, EXPERT)
            return Share(replace(hits, axes=kept, reduced="sum"), weights.what)
    return None


# Of a list of experts' outputs: their weights and the sum


def _shared(fact: Fact | None, weights: Value, facts: Facts, roles: tuple) -> Share | None:
    """`weights` as those of the slots that were picked, if their dimensions are `roles`."""
    by = (
        routing_weights(weights, facts)
        if isinstance(fact, Outputs) and fact.ids is not None and fact.share is None
        else None
    )
    if by is None or not isinstance(by.what, Value) or by.roles != roles:
        return None
    return Share(Hits(fact.ids, (TOKEN,), fact.k, reduced="sum"), by.what)


@rule(aten.mul.Tensor)
def _weigh(facts, value, a, b):
    for left, right in ((a, b), (b, a)):
        fact = facts.of(left)
        if isinstance(fact, Outputs) and fact.ids is not None and isinstance(right, Value):
            roles = tuple(() if axis in (FEATURE, NONE) else (axis,) for axis in fact.axes)
            share = _shared(fact, right, facts, roles)
            return None if share is None else replace(fact, share=share)
    return None


@rule(aten.sum.dim_IntList)
def _sum(facts, value, a, dim=None, keepdim=False, **kwargs):
    fact = facts.of(a)
    if not isinstance(fact, Outputs) or fact.ids is None or fact.share is None or keepdim or dim is None:
        return None
    summed = [fact.axes[dim_of(a, d)] for d in dim] == [CHOICE]
    return all_outputs(facts, fact.rows, fact.share) if summed and fact.axes[-1] == FEATURE else None


@rule(aten.bmm.default)
def _product(facts, value, a, b):
    for left, right, axes, roles in (
        (a, b, (TOKEN, CHOICE, FEATURE), ((TOKEN,), (), (CHOICE,))),
        (b, a, (TOKEN, FEATURE, CHOICE), ((TOKEN,), (CHOICE,), ())),
    ):
        fact = facts.of(right)
        if isinstance(fact, Outputs) and fact.axes == axes:
            share = _shared(fact, left, facts, roles)
            if share is not None:
                return all_outputs(facts, fact.rows, share)
    return None
