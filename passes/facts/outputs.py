"""Experts whose outputs go elsewhere than straight into the weighted sum, through a norm for one: the values that hold
the rows of all experts, one for each slot, as blocks with one expert a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from mok_compile import activation as act
from mok_compile.passes.facts.kinds import SLOT, SORTED, Column, Combined, Fact, Perm, Pointwise, Projection, Rows, Slim
from mok_compile.passes.facts.rules import Facts
from mok_compile.passes.graph.view import Value, View


@dataclass(frozen=True)
class Outputs:
    """`node` holds the experts' rows. `rows` says the same of them as of tokens with one expert each, in the order of
    the ids; they are in that order after `perm`, where there is one."""

    node: fx.Node
    rows: Combined
    perm: Value | None


def outputs_of(anchors: Sequence[fx.Node], view: View, facts: Facts) -> Iterator[Outputs]:
    """The nodes that hold the rows of experts whose matmuls are among `anchors`, the last ones first."""
    products = {}
    for anchor in anchors:
        for value in view.made[anchor]:
            rows = _flat(facts.of(value))
            if isinstance(rows, Pointwise) and rows.bare is not None:
                products.setdefault(rows.bare, value)
    for node in sorted(view.cells, key=view.positions.__getitem__, reverse=True):
        value = view.value(node)
        rows = facts.of(value)
        if not _is_output(rows) or len(value.meta.shape) != 2:
            continue
        product = products.get(_unbiased(rows.bare))
        source = rows.bare.source
        operands = {_operand(products.get(_unbiased(c.projection)), facts) for c in source.columns}
        if product is None or value.meta.dtype != product.meta.dtype or len(operands) != 1 or operands == {None}:
            continue
        orders = {c.projection.source.order for c in source.columns}
        perm = _held_perm(rows.ids, node, view, facts) if rows.order == SORTED else None
        if orders == {rows.order} and (rows.order == SLOT or perm is not None):
            yield Outputs(node, Combined(_row_by_row(rows, operands.pop()), None), perm)


def _flat(fact: Fact | None) -> Fact | None:
    return fact.rows if isinstance(fact, Slim) else fact


def _unbiased(projection: Projection) -> Projection:
    return replace(projection, bias=None)


def _is_output(fact: Fact | None) -> bool:
    """Whether `fact` is that of the experts' rows, with nothing done to them yet. Two products with nothing between
    them are no experts: LoRA has them."""
    if not isinstance(fact, Pointwise) or fact.order not in (SLOT, SORTED) or fact.bare is None or fact.level != 2:
        return False
    source = fact.bare.source
    if source.bare is not None:
        return False
    return fact.weight is None and source.weight is None and not (fact.stray or fact.fenced or source.fenced)


def _operand(product: Value | None, facts: Facts) -> Value | None:
    """The rows [S, H] that an up projection multiplies."""
    found = [v for v in product.inputs if isinstance(_flat(facts.of(v)), Rows)] if product is not None else []
    if len(found) != 1:
        return None
    (value,) = found
    while isinstance(facts.of(value), Slim):
        value = value.args[0]
    return value if isinstance(facts.of(value), Rows) else None


def _held_perm(ids: Value, before: fx.Node, view: View, facts: Facts) -> Value | None:
    """A permutation that sorts by `ids`. They all agree on which expert a row has."""
    perms = (v for v in view.values if facts.of(v) == Perm(ids) and len(v.meta.shape) == 1)
    return next((perm for perm in perms if view.holder(perm, before) is not None), None)


def _row_by_row(rows: Pointwise, operand: Value) -> Pointwise:
    """`rows` as a function of the rows of `operand`, each taken for a token."""
    start = Rows(operand, 1, rows.ids, SLOT, dtypes=frozenset([operand.meta.dtype]))
    down = rows.bare
    leaves = {
        _leaf(column): _leaf(Column(replace(column.projection, source=start), column.part))
        for column in down.source.columns
    }
    inner = replace(down.source, expr=act.substitute(down.source.expr, leaves), k=1, order=SLOT)
    return replace(rows, expr=_leaf(Column(replace(down, source=inner), "all")), k=1, order=SLOT)


def _leaf(column: Column) -> act.Expr:
    return act.Expr("column", (column,))
