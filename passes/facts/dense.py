"""Rules for experts that compute every token, one expert at a time: the mask puts zeros where a token does not go."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from mok_compile.passes.facts.kinds import (
    BOTH,
    EXPERT,
    FEATURE,
    NONE,
    TOKEN,
    Combined,
    Fact,
    Fenced,
    FromTable,
    Full,
    Hits,
    Output,
    Outputs,
    Partial,
    Pointwise,
    Rows,
    RowWeight,
    Share,
)
from mok_compile.passes.facts.masks import distinct, permuted, viewed
from mok_compile.passes.facts.parts import extend
from mok_compile.passes.facts.rules import Break, Facts, as_number, dim_of, pinned, rule, same, with_weight
from mok_compile.passes.facts.shares import from_column, is_table, shared_out, tabulated
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


# One expert on every token


@rule(aten.mul.Tensor)
def _mul_masked(facts, value, a, b):
    for left, right in ((a, b), (b, a)):
        fact, other = facts.of(left), facts.of(right)
        if isinstance(fact, Hits) and other is None:
            shared = shared_out(fact, right, value)
            return shared if shared is not None else _output(facts, value, right, fact, None)
        if isinstance(fact, Share):
            if isinstance(other, Hits):
                own = replace(other, reduced="") == replace(fact.hits, reduced="")
                return fact if own and (other.reduced == "any" or distinct(other.ids)) else None
            if isinstance(other, Outputs):
                return _share_of_outputs(other, fact.hits, fact)
            if other is None and isinstance(right, Value) and len(right.meta.shape) == len(value.meta.shape):
                out = _output(facts, value, right, fact.hits, fact.weights)
                return out if out is not None else tabulated(fact, value)
            if other is None or isinstance(other, Full):
                return tabulated(fact, value)
        if isinstance(fact, Output):
            return _weigh_output(fact, right, other, value)
    return None


def _weigh_output(fact: Output, by: Value, other: Fact | None, value: Value) -> Fact | None:
    rows, hits = fact.rows, fact.rows.order
    if isinstance(other, Hits) and _column_of(other, hits, value):
        return fact
    if isinstance(other, Share) and _column_of(other.hits, hits, value):
        return Output(with_weight(rows, RowWeight(other.weights, hits.ids, hits)))
    alike = isinstance(by, Value) and len(by.meta.shape) == len(value.meta.shape)
    if other is None and alike and by.meta.dtype.is_floating_point and same(by.meta.shape[-1], 1):
        weight = from_column(by, hits)
        if weight is not None:
            return Output(with_weight(rows, weight))
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
        rows = with_weight(rows, RowWeight(weights, own.ids, own))
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
                weight = from_column(by, hits)
            elif isinstance(fact, Share) and _column_of(fact.hits, hits, outputs):
                weight = RowWeight(fact.weights, hits.ids, hits)
            if weight is not None:
                outputs = inner
                break
    cone, x = _expert_cone(facts, outputs)
    if x is None:
        return None
    start = Rows(x, pinned(hits.k) or 1, hits.ids, hits, dtypes=frozenset([x.meta.dtype]))
    inside = Facts(cone, {x: start})
    rows = inside.of(outputs)
    stop = inside.broken.get(outputs)
    if stop is not None:
        raise Break(stop.reason, stop.detail)
    if not isinstance(rows, Pointwise) or rows.bare is None or rows.level != 2:
        return None
    facts.included |= {v: inside.of(v) for v in cone if inside.of(v) is not None}
    return rows if weight is None else with_weight(rows, weight)


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
        elif (level == 0 and value.op not in _PASSED) or isinstance(value.op, str):
            return [], None
        else:
            pending += [(v, level) for v in value.inputs if len(v.meta.shape) > 1]
    if len(sources) != 1:
        return [], None
    return sorted(set(cone), key=lambda v: v.number), sources.pop()


@rule(aten.where.self, aten.where.ScalarOther)
def _where_hits(facts, value, mask, a, b):
    hits, other = facts.of(mask), facts.of(b)
    number = other.number if isinstance(other, Full) else as_number(b)
    return _kept(facts, value, hits, a, number) if isinstance(hits, Hits) else None


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _fill_hits(facts, value, a, mask, number):
    hits, full = facts.of(mask), facts.of(number)
    number = full.number if isinstance(full, Full) else as_number(number)
    return _kept(facts, value, replace(hits, negated=not hits.negated), a, number) if isinstance(hits, Hits) else None


def _kept(facts: Facts, value: Value, hits: Hits, a: Value, number: float | None) -> Fact | None:
    """`a` where `hits`, `number` elsewhere."""
    fact = facts.of(a)
    if hits.negated or number is None or not isinstance(a, Value):
        return None
    if number == -math.inf and fact is None:
        fenced = is_table(hits) and distinct(hits.ids) and len(a.meta.shape) == len(hits.axes)
        return Fenced(hits.ids, hits.axes) if fenced and all(map(same, a.meta.shape, value.meta.shape)) else None
    if number != 0:
        return None
    if isinstance(fact, Output):
        return fact if _column_of(hits, fact.rows.order, value) else None
    if isinstance(fact, Share):
        return fact if replace(fact.hits, reduced="") == replace(hits, reduced="") else None
    if fact is not None:
        return None
    shared = shared_out(hits, a, value)
    return shared if shared is not None else _output(facts, value, a, hits, None)


@rule(aten.add.Tensor, aten.add.Scalar)
def _add_output(facts, value, a, b, alpha=1):
    if alpha != 1:
        return None
    left, right = facts.of(a), facts.of(b)
    for fact, operand in ((left, b), (right, a)):
        if isinstance(fact, Output) and as_number(operand) == 0:
            return fact
    if isinstance(right, Output) and isinstance(left, Output):
        return _extend_with(None, left, right)
    for fact, base in ((right, a), (left, b)):
        if isinstance(fact, Output) and isinstance(base, Value):
            return extend(facts, base, fact.rows) if all(map(same, base.meta.shape, value.meta.shape)) else None
    return None


@rule(aten._to_copy.default)
def _cast_output(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact, floating = facts.of(a), value.meta.dtype.is_floating_point
    if not isinstance(fact, Output) or not floating:
        return None
    return Output(replace(fact.rows, dtypes=fact.rows.dtypes | {value.meta.dtype}))


# All experts in one tensor


def _extend_with(base: Value | None, *outputs: Output) -> Partial | None:
    return Partial(tuple(o.rows for o in outputs), base) if len({o.rows.ids for o in outputs}) == 1 else None


@rule(aten.stack.default)
def _stack(facts, value, tensors, dim=0):
    plain = all(facts.of(t) is None and t.meta.dtype.is_floating_point for t in tensors)
    if not plain or len(tensors) < 2 or value.detached or len(value.meta.shape) < 3:
        return None
    axes = [TOKEN] * (len(value.meta.shape) - 2) + [FEATURE]
    axes.insert(dim_of(value, dim), EXPERT)
    return Outputs(tensors, tuple(axes))


@rule(aten.cat.default)
def _cat_as_stack(facts, value, tensors, dim=0):
    """Outputs that got a dimension for the experts one by one."""
    dim = dim_of(value, dim)
    apart = all(t.op is aten.unsqueeze.default and dim_of(t, t.args[1]) == dim and not t.detached for t in tensors)
    return _stack(facts, value, tuple(t.args[0] for t in tensors), dim) if apart else None


def _share_of_outputs(fact: Outputs, hits: Hits, share: Share) -> Outputs | None:
    wanted = tuple(NONE if axis == FEATURE else axis for axis in fact.axes)
    return replace(fact, share=share) if fact.share is None and hits.axes == wanted and hits.reduced else None


@rule(aten.sum.dim_IntList)
def _sum_of_outputs(facts, value, a, dim=None, keepdim=False, **kwargs):
    fact = facts.of(a)
    if not isinstance(fact, Outputs) or fact.share is None or keepdim or dim is None:
        return None
    summed = [fact.axes[dim_of(a, d)] for d in dim] == [EXPERT]
    last = [axis for axis in fact.axes if axis != EXPERT][-1:] == [FEATURE]
    return all_outputs(facts, fact.rows, fact.share) if summed and last else None


def all_outputs(facts: Facts, outputs: tuple[Value, ...], share: Share) -> Partial | None:
    parts = []
    for expert, value in enumerate(outputs):
        own = replace(share.hits, axes=(TOKEN,), expert=expert, reduced="any")
        rows = _every_token(facts, value, own)
        if rows is None:
            return None
        parts.append(with_weight(rows, RowWeight(share.weights, own.ids, own)))
    return Partial(tuple(parts), None)


@rule(aten.bmm.default)
def _bmm_outputs(facts, value, a, b):
    """[T, 1, E] @ [T, E, H] or [T, H, E] @ [T, E, 1]: the sum over the experts as a product."""
    left, right = facts.of(a), facts.of(b)
    if isinstance(left, Share) and isinstance(right, Outputs):
        share, fact, by, axes = left, right, (TOKEN, NONE, EXPERT), (TOKEN, EXPERT, FEATURE)
    elif isinstance(left, Outputs) and isinstance(right, Share):
        share, fact, by, axes = right, left, (TOKEN, EXPERT, NONE), (TOKEN, FEATURE, EXPERT)
    else:
        return None
    fits = _of_tokens(share.hits.axes) == by and _of_tokens(fact.axes) == axes
    plain = fact.share is None and fact.ids is None and share.hits.reduced
    return all_outputs(facts, fact.rows, share) if fits and plain else None


def _of_tokens(axes: tuple[str, ...]) -> tuple[str, ...]:
    """`axes` that begin with the tokens, also where there is but one, which no dimension stands for any more."""
    return (TOKEN, *axes[1:]) if axes[0] == NONE and TOKEN not in axes else axes


@rule(aten.expand.default, aten.clone.default, aten.alias.default)
def _same_outputs(facts, value, a, *args, **kwargs):
    fact = facts.of(a)
    alike = isinstance(fact, Outputs) and len(value.meta.shape) == len(fact.axes)
    return fact if alike and all(map(same, a.meta.shape, value.meta.shape)) else None


_TURNS = (aten.permute.default, aten.transpose.int)


@rule(aten.view.default, aten._unsafe_view.default, aten.squeeze.dim, aten.unsqueeze.default, *_TURNS)
def _shape_outputs(facts, value, a, *args):
    """Dimensions of one entry come and go, and those of the tokens are one or several."""
    fact = facts.of(a)
    if isinstance(fact, Outputs):
        if value.op in _TURNS:
            axes = permuted(fact.axes, value, a, *args)
        else:
            axes = _with_ones(fact.axes, a, value) or viewed(fact.axes, value, a)
        return None if axes is None else replace(fact, axes=axes)
    if not isinstance(fact, (Partial, Combined)) or value.op in (aten.unsqueeze.default, aten.transpose.int):
        return None
    old, new = ([n for n in v.meta.shape if not same(n, 1)] for v in (a, value))
    if value.op is aten.permute.default:
        solid = [d for d in (dim_of(a, d) for d in args[0]) if not same(a.meta.shape[d], 1)]
        return fact if solid == sorted(solid) else None
    kept = len(old) == len(new) and all(map(same, old, new))
    # The last of them are the rows' own numbers; those before it are tokens, in row-major order.
    return fact if kept or (len(old) > 1 < len(new) and same(old[-1], new[-1])) else None


def _with_ones(axes: tuple[str, ...], a: Value, value: Value) -> tuple[str, ...] | None:
    """`axes` of `a` as those of `value`, which has the same dimensions but for some of one entry."""
    if len(a.meta.shape) == len(value.meta.shape) and all(map(same, a.meta.shape, value.meta.shape)):
        return axes
    solid = [(axis, n) for axis, n in zip(axes, a.meta.shape, strict=True) if not same(n, 1)]
    left = [n for n in value.meta.shape if not same(n, 1)]
    if len(solid) != len(left) or not all(same(n, m) for (_, n), m in zip(solid, left, strict=True)):
        return None
    names = iter(axis for axis, _ in solid)
    return tuple(NONE if same(n, 1) else next(names) for n in value.meta.shape)
