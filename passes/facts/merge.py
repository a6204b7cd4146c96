"""The outputs of experts that were computed one at a time, each with its own matrices, as one fact of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import torch

from mok_compile import activation as act
from mok_compile.passes.facts.kinds import SLOT, Column, Pointwise, Projection, Rows, Weight
from mok_compile.passes.facts.rules import Break, dim_of, same, weight_of
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


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
    return merge_in_order(parts, first.ids, SLOT)


def merge_in_order(parts: Sequence[Pointwise], ids: Value, order: str) -> Pointwise:
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
        weight = weight_of(stack)
        weight = replace(weight, transposed=weight.transposed != transposed)
    bias = None
    if biases[0] is not None:
        bias = _stack_of(biases)
        bias = tuple(biases) if bias is None else bias
    return Projection(source, weight, ids, bias)


def _joined_source(sources: list[Rows | Pointwise], ids: Value, order: str) -> Rows | Pointwise:
    if not isinstance(sources[0], Rows):
        return merge_in_order(sources, ids, order)
    alike = {replace(s, order=order, ids=ids) if isinstance(s, Rows) else None for s in sources}
    if len(alike) != 1:
        raise Break("no-match", "the experts take different rows")
    return alike.pop()


def _stack_of(parts: list[Value]) -> Value | None:
    """The tensor of which `parts` are all entries along the first dimension, in order."""
    for e, part in enumerate(parts):
        index = part.index if part.op is aten.unbind.int else part.args[2] if part.op is aten.select.int else None
        along = index == e and dim_of(part.args[0], (*part.args, 0)[1]) == 0
        if not along or part.detached or part.args[0] is not parts[0].args[0]:
            return None
    whole = same(parts[0].args[0].meta.shape[0], len(parts))
    return parts[0].args[0] if whole else None
