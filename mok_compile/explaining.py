"""`mok_compile.explain(model)(**inputs)`: what the backend would do, without compiling anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mok_compile import dump
from mok_compile.options import split
from mok_compile.passes.fuse import fuse
from mok_compile.report import Graph, Report


def explain(model: Callable, options: dict[str, Any] | None = None) -> Callable[..., Report]:
    """Returns a function that runs `model` once on the arguments it is given and returns the `Report`.

    `model` is a function or a module, compiled or not; it runs in eager mode, its compiled state is left alone.
    `options` are the backend's; ``mok.strict`` is not applied.
    """
    mine, _ = split(options)
    report = Report()

    def collect(gm: fx.GraphModule, inputs: list) -> Callable:
        before = dump.code(gm)
        twin = fx.GraphModule(gm, _copy(gm))
        sites = fuse(twin, inputs, mine)
        report.add(Report(sites, [Graph(before, dump.code(twin))]))
        return gm.forward

    def run(*args: Any, **kwargs: Any) -> Report:
        report.sites.clear()
        report.graphs.clear()
        torch.compile(_plain(model), backend=collect)(*args, **kwargs)
        return report

    return run


def _copy(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, env), type_expr=None)
    return graph


def _plain(model: Callable) -> Callable:
    """`model` without the compiled calls that it carries."""
    model = torch._dynamo.eval_frame.innermost_fn(model) if not isinstance(model, torch.nn.Module) else model
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    return model._call_impl if isinstance(model, torch.nn.Module) else model
