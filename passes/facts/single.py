"""Rules for what one expert computes of its rows: a projection with a matrix and a bias of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from mok_compile import activation as act
from mok_compile.passes.facts.kinds import Column, Matrix, Pointwise, Rows
from mok_compile.passes.facts.picked import alone
from mok_compile.passes.facts.rules import Break, Facts, dim_of, projection_of, rule, same
from mok_compile.passes.graph.pieces import turns
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten


@rule(aten.mm.default)
def _mm(facts, value, a, b):
    fact = facts.of(a)
    return _one_projection(facts, value, fact, b, None) if alone(fact) else None


@rule(aten.addmm.default)
def _addmm(facts, value, bias, a, b, *, beta=1, alpha=1):
    fact = facts.of(a)
    if not alone(fact):
        return None
    plain = beta == alpha == 1 and len(bias.meta.shape) == 1 and facts.of(bias) is None
    return _one_projection(facts, value, fact, b, bias) if plain else None


def _one_projection(facts: Facts, value: Value, rows: Rows | Pointwise, b: Value, bias: Value | None) -> Pointwise:
    if facts.of(b) is not None:
        raise Break("no-match", "an expert's weight depends on the routing")
    matrix = Matrix(b.args[0], False) if turns(b.op, b.args) and not b.detached else Matrix(b, True)
    fact = projection_of(value, rows, matrix, rows.order.ids)
    return fact if bias is None else _with_bias(fact, bias)


def _with_bias(fact: Pointwise, bias: Value) -> Pointwise:
    leaf = act.Expr("column", (Column(replace(fact.bare, bias=bias), "all"),))
    return replace(fact, expr=leaf)


@rule(aten.add.Tensor)
def _add_bias(facts, value, a, b, alpha=1):
    for rows, bias in ((a, b), (b, a)):
        fact = facts.of(rows)
        if not isinstance(fact, Pointwise) or not alone(fact) or facts.of(bias) is not None or alpha != 1:
            continue
        fits = isinstance(bias, Value) and len(bias.meta.shape) == 1
        plain = fits and fact.bare is not None and fact.bare.bias is None and fact.weight is None
        return _with_bias(fact, bias) if plain else None
    return None


@rule(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)
def _reshape_rows(facts, value, a, *args, **kwargs):
    """Rows stay rows under any number of leading dimensions."""
    fact = facts.of(a)
    if not alone(fact) or not value.meta.shape or not same(value.meta.shape[-1], a.meta.shape[-1]):
        return None
    grown = value.op is aten.expand.default and not all(map(same, value.meta.shape, a.meta.shape))
    column = value.op is aten.unsqueeze.default and dim_of(value, args[0]) == len(value.meta.shape) - 1
    return None if grown or column else fact
