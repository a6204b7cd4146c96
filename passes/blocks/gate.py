"""The activation of an experts module, found by running its gate function through the same facts as a whole graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mok_compile import activation as act
from mok_compile.passes.blocks.site import layout_of
from mok_compile.passes.facts.kinds import SORTED, Column, Pointwise, Projection, Rows, Weight
from mok_compile.passes.facts.rules import Break, Facts
from mok_compile.passes.graph.view import View


def gate_of(function: Callable, columns: int, dtype: torch.dtype) -> tuple[str, act.Expr] | None:
    """(layout, activation) of `function`, which maps the up projection [S, columns] to [S, I].

    None if it is not a pointwise function of the two halves, or of the whole where the expert is ungated.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            # A lambda, because make_fx counts the arguments of a bound method wrongly.
            graph = make_fx(lambda h: function(h))(torch.empty(3, columns, dtype=dtype)).graph
    except Exception:  # whatever a foreign gate function raises: then it is not one we understand
        return None
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    view = View(graph)
    start, end = next(iter(graph.nodes)), graph.output_node()
    h, result = view.value(start), view.value(end.args[0])
    projection = Projection(Rows(h, 1, h, SORTED), Weight(h, False), h)
    whole = Pointwise(act.Expr("column", (Column(projection, "all"),)), h, 1, SORTED)
    fact = Facts(view.values, {h: whole}).of(result) if result is not None else None
    if not isinstance(fact, Pointwise):
        return None
    try:
        layout, _, expr = layout_of(fact)
    except Break:
        return None
    return layout, expr
