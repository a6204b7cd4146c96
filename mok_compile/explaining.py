"""`mok_compile.explain(model)(**inputs)`: what the backend would do, without compiling anything."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mok_compile import dump
from mok_compile.integrations import transformers, watch
from mok_compile.integrations.breaks import GraphBreak
from mok_compile.integrations.capture import trace_again_if_open
from mok_compile.integrations.counts import trace_again_if_for_nothing
from mok_compile.integrations.loops import trace_again_if_wrong
from mok_compile.integrations.missed import DATA_DEPENDENT, LOOP, Loop, by_their_ends, refused, why_cut
from mok_compile.integrations.places import name_places
from mok_compile.options import Options, split
from mok_compile.passes.blocks.unclaimed import CAPACITY, buffers
from mok_compile.passes.fusing.fuse import fuse
from mok_compile.passes.graph.source import INSIDE, lines_of, said_at, short
from mok_compile.passes.graph.view import name_of
from mok_compile.report import Report, Site
from mok_compile.spec import ExpertsSpec
from mok_compile.table import NOWHERE, parts

_CHOICES = {"topk", "sort", "argsort", "max", "argmax", "kthvalue", "multinomial"}
_MASKS = {
    "eq", "ne", "gt", "ge", "lt", "le", "where", "one_hot", "nonzero", "masked_fill", "scatter", "scatter_", "gather",
    "index_select",
}  # fmt: skip
_SCORES = {"softmax", "sigmoid"}
_BREAK = "graph break:"
_UNSEEN = (
    "no graph holds these experts: the graph breaks in code that calls them, for the reasons in the notes, or they "
    "were not called"
)
_CHECKPOINTED = (
    "these experts are in a checkpointed layer whose graph breaks, for the reasons in the notes: torch runs all of the "
    "layer in eager mode"
)
_SOFT = "every token goes through all of these experts: no graph makes a choice among them, as top-k does"
_NO_TRACE = (
    "torch itself cannot trace this grouped matmul, so that torch.compile ends in an error under any backend (in "
    "bfloat16 it can; else gather the weights, or write a loop)"
)
_DIRECT = "the model calls the op itself, outside of any graph"
_UNPROVEN = (
    "a graph holds these experts, but nothing in it is known as a choice of experts for each token and as the weighted "
    "sum of their outputs"
)


def explain(model: Callable, options: dict[str, Any] | None = None) -> Callable[..., Report]:
    """Returns a function that runs `model` once on the arguments it is given and returns the `Report`.

    `model` is a function or a module, compiled or not, or a method that calls a module several times, such as
    ``model.generate``; it runs in eager mode, its compiled state is left alone. `options` are the backend's;
    ``mok.strict`` is not applied. Errors are those of the model, and of torch where it cannot trace it.
    """
    mine, rest = split(options)
    torch._TorchCompileInductorWrapper(None, rest, None)  # says which of them Inductor does not know
    watch()

    def run(*args: Any, **kwargs: Any) -> Report:
        caller = _caller(model)
        module = _module(model) if caller is None else caller
        collector = Collector(mine, module)
        refused.clear()
        with broken_graphs(collector, model), _untraceable(collector.report):
            if caller is not None:
                with _compiled(module, collector):
                    model(*args, **kwargs)
            else:
                torch.compile(_plain(model), backend=collector)(*args, **kwargs)
        collector.add_unseen()
        return collector.report

    return run


class Collector:
    """A backend that analyses a copy of each graph and runs the graph as it is. It goes by the name of the real one:
    bridges to other libraries act for that name only."""

    compiler_name = "mok"

    def __init__(self, options: Options, model: torch.nn.Module | None) -> None:
        self.options, self.model, self.report = options, model, Report()
        self._paths = {} if model is None else {module: path for path, module in model.named_modules()}
        self._loops: dict[torch.nn.Module, Loop] = {}
        self.breaks: list[GraphBreak] = []
        self._buffers: dict[int, str] = {}  # by the number of experts: what is said of them
        self._calls: dict[tuple[str, int], set[str]] = defaultdict(set)  # by source line: what is called there

    def __call__(self, gm: fx.GraphModule, inputs: list) -> Callable:
        before = dump.code(gm)
        twin = fx.GraphModule(gm, _copy(gm))
        trace_again_if_wrong(twin, inputs, self.options)
        sites = by_their_ends(fuse(twin, inputs, self.options, watched=True))
        name_places(sites, self._paths)
        trace_again_if_open(twin)
        trace_again_if_for_nothing(sum(site.status == "fused" for site in sites))
        for node in gm.graph.nodes:  # of no graph that is traced again
            for line in lines_of(node):
                self._calls[line].add(name_of(node))
        for node, experts in buffers(gm.graph):
            self._buffers.setdefault(experts, said_at(node, CAPACITY.format(experts=experts)))
        found = Report(sites, [dump.graph(before, dump.code(twin))])
        if self.options.dump:
            dump.publish(found, self.options)
        self.report.add(found)
        return gm.forward

    def tell(self, loop: Loop, options: Options) -> None:
        """Called for a loop over experts at which the graph breaks."""
        self._loops.setdefault(loop.owner, loop)

    def broke(self, end: GraphBreak) -> None:
        """Called where a graph breaks, and where a frame is given up."""
        self.breaks.append(end)

    def has_seen(self, code: types.CodeType) -> bool:
        """Whether a graph holds something of `code`."""
        return bool(self._called_by(code))

    def _called_by(self, code: types.CodeType) -> set[str]:
        """The names of what graphs call on the way from the lines of `code`."""
        lines = {(code.co_filename, line) for _, _, line in code.co_lines()}
        return set().union(*(self._calls[line] for line in lines & self._calls.keys()))

    def _is_soft(self, code: types.CodeType) -> bool:
        """Whether there are scores, and nothing chooses by them among the experts that `code` runs: neither it nor what
        hands it weights."""
        called = set().union(*self._calls.values())
        return not called & _CHOICES and bool(called & _SCORES) and self._called_by(code).isdisjoint(_MASKS)

    def add_unseen(self, surely: bool = False) -> None:
        """Names the experts, of the model where there is one, that ran without leaving a block in any graph: a loop in
        Python cut them. `surely`: only those that something is known of."""
        model, paths = self.model, self._paths
        cut = [site for site in self.report.sites if site.cut_off]
        located = [parts(site.location) for site in self.report.sites if site not in cut]
        places, classes = {path for path, _, _ in located}, {cls for _, cls, _ in located}

        def holds_site(path: str) -> bool:
            return any(f"{place}.".startswith(path and f"{path}.") for place in places)

        def is_located(path: str, owner: torch.nn.Module) -> bool:
            # Layers that share their compiled code are one site, which goes by the name of the first: the class tells.
            return type(owner).__name__ in classes or holds_site(path)

        loops = {owner: loop for owner, loop in self._loops.items() if owner not in paths}
        for owner, path in paths.items():
            alike = next((loop for other, loop in self._loops.items() if type(other) is type(owner)), None)
            if owner in self._loops or (alike is not None and not is_located(path, owner)):
                loops[owner] = self._loops.get(owner) or alike.of(owner)
        dumped = bool(self.options.dump)
        found = [loop.site(paths.get(owner, ""), dumped) for owner, loop in loops.items()]
        for site in found if dumped else ():
            dump.publish(Report([site]), self.options)
        broke = bool(self.breaks) or any(note.startswith(_BREAK) for note in self.report.notes)
        experts = {} if model is None else _experts(model)
        for path, owner in experts.items():
            around = {parent for parent, name in paths.items() if f"{path}.".startswith(name and f"{name}.")}
            code = _code(owner)
            if code is None or is_located(path, owner) or not around.isdisjoint(loops):
                continue
            seen = self.has_seen(code)
            if seen or (broke and not surely):  # Dynamo gives a function up altogether if its graph breaks in a loop
                found.append(self._unseen(model, path, owner, code, seen, broke))
        # The same blocks, each under its own name.
        routers = [site for site in cut if found or any(map(holds_site, _nearest(site, experts)))]
        self.report.sites = [site for site in self.report.sites if site not in routers] + found

    def _unseen(
        self, model: torch.nn.Module, path: str, owner: torch.nn.Module, code: types.CodeType, seen: bool, broke: bool
    ) -> Site:
        """The experts `owner` of `model`. `seen`: whether a graph holds any of them; `broke`: whether one broke."""
        place = path or NOWHERE  # the model itself is one block
        file = short(code.co_filename)
        where = f"{place} [{type(owner).__name__}] {file}:{code.co_firstlineno}"
        if owner in refused:  # the loop was looked at
            reason, why = refused[owner]
            return Site("missed", reason, f"{LOOP}: {why}", where)
        if call := transformers.call_without_graph(owner):
            spec, engine = call
            return Site("fused", None, _DIRECT, where, ExpertsSpec.from_json(spec), engine)
        if not broke:
            return Site("missed", *(("soft", _SOFT) if self._is_soft(code) else ("no-match", _UNPROVEN)), where)
        if not seen and _checkpointed(model, path):
            return Site("missed", "split", _CHECKPOINTED, where)
        if not seen:
            return Site("missed", DATA_DEPENDENT, _UNSEEN, where)
        buffer = next((said for experts, said in self._buffers.items() if experts in _numbers(owner)), None)
        if buffer is not None:
            return Site("missed", "routing", buffer, where)
        if not self.breaks:
            return Site("missed", DATA_DEPENDENT, LOOP, where)
        inside = [mine for end in self.breaks if (mine := end.within(code)) is not None]
        end = next((end for end in inside if end.in_loop), (inside or self.breaks)[0])
        return Site("missed", *why_cut(end, bool(inside) and end.in_loop), where)


def _numbers(owner: torch.nn.Module) -> set[int]:
    """How many experts `owner` may hold: so many as a list of it has modules, or a stack of it matrices."""
    lists = (m for m in owner.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.ModuleDict)))
    return {len(m) for m in lists} | {p.shape[0] for p in owner.parameters() if p.dim() > 2}


def _code(model: Callable) -> types.CodeType | None:
    """The code of a function or method, or of a module's forward method."""
    module = _module(model) if isinstance(model, (torch.nn.Module, torch._dynamo.OptimizedModule)) else None
    function = model if module is None else type(module).forward
    return getattr(inspect.unwrap(function), "__code__", None)


def _checkpointed(model: torch.nn.Module, path: str) -> bool:
    """Whether a layer of transformers around `path` is checkpointed: it says so itself."""
    names = path.split(".")
    around = (model.get_submodule(".".join(names[:n])) for n in range(len(names) + 1))
    return torch.is_grad_enabled() and any(m.training and getattr(m, "gradient_checkpointing", False) for m in around)


def _experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that look like the experts of a block, by path; for a mere container of experts, the module around it."""
    found = {}
    for path, module in model.named_modules():
        container = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
        if container and path.endswith("experts") and type(module).forward is torch.nn.Module.forward:
            owner = path.rpartition(".")[0]
            found[owner] = model.get_submodule(owner)
        elif type(module).__name__.endswith("Experts") or path.rpartition(".")[2] == "experts":
            found[path] = module
    # Every token passes through shared experts: they are no part of a block. A wrapper around experts is none besides.
    own = {path: module for path, module in found.items() if "shared" not in path.lower()}
    return {path: m for path, m in own.items() if not any(other.startswith(f"{path}.") for other in own)}


def _nearest(router: Site, experts: dict[str, torch.nn.Module]) -> list[str]:
    """Of the paths of `experts`, those in the smallest module that holds one and the router."""
    names = parts(router.location)[0].split(".")
    both = {path: zip(names, path.split("."), strict=False) for path in experts}
    shared = {path: len([*itertools.takewhile(lambda pair: pair[0] == pair[1], both[path])]) for path in experts}
    return [path for path, count in shared.items() if count == max(shared.values())]


@contextlib.contextmanager
def broken_graphs(collector: Collector, model: Callable) -> Iterator[None]:
    """Notes why the graph of `model` broke meanwhile, if it did: a block that is cut is no block any more."""
    counters = torch._dynamo.utils.counters
    before = {kind: dict(counters[kind]) for kind in ("graph_break", "unimplemented")}
    yield
    broke, failed = (
        [reason for reason, count in counters[kind].items() if count > known.get(reason, 0)]
        for kind, known in before.items()
    )
    # Where a loop breaks the graph Dynamo gives the whole function up, which it counts as no break; there may be graphs
    # of what the function calls.
    report, code = collector.report, _code(model)
    given_up = not report.graphs or (code is not None and not collector.has_seen(code))
    for reason in broke or (failed if given_up else []):
        said = " ".join(line.strip() for line in reason.split("Developer debug context")[0].splitlines())
        note = f"{_BREAK} {said.replace('Explanation:', '-').strip()}"
        if note not in report.notes:
            report.notes.append(note)
    if not any(note.startswith(_BREAK) for note in report.notes):  # numbers that only the data tells are not counted
        report.notes += dict.fromkeys(f"{_BREAK} {end.why}, at {end}" for end in collector.breaks)


@contextlib.contextmanager
def _untraceable(report: Report) -> Iterator[None]:
    """Makes a miss of a grouped matmul that torch itself ends the compile at, as it does with those in float32."""
    try:
        yield
    except torch._dynamo.exc.TorchRuntimeError as error:
        said = re.search(r"grouped_mm.*? got RuntimeError\((['\"])(.*?)\1\)", str(error), re.S)
        if said is None:
            raise
        frames = [f for f in getattr(error, "real_stack", None) or () if not f.filename.startswith(INSIDE)]
        line = f" {short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        report.sites.append(Site("missed", "dtype", f"{_NO_TRACE}: {said[2]}", f"{NOWHERE}{line}"))


@contextlib.contextmanager
def _compiled(module: torch.nn.Module, backend: Callable) -> Iterator[None]:
    """While this lasts, calls of `module` are compiled with `backend`."""
    before = module.__dict__.get("_compiled_call_impl")
    module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)
    try:
        yield
    finally:
        module._compiled_call_impl = before


def _caller(model: Callable) -> torch.nn.Module | None:
    """The module that `model` is a method of, if that method is another than its forward."""
    owner = getattr(model, "__self__", None) if isinstance(model, types.MethodType) else None
    if isinstance(owner, torch._dynamo.OptimizedModule):
        owner = owner._orig_mod
    own = isinstance(owner, torch.nn.Module) and model.__name__ not in ("forward", "__call__", "_call_impl")
    return owner if own else None


def _copy(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, env), type_expr=None)
    return graph


def _module(model: Callable) -> torch.nn.Module | None:
    """`model` as a module; None if it is none."""
    if isinstance(model, types.MethodType):
        model = model.__self__
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    return model if isinstance(model, torch.nn.Module) else None


def _plain(model: Callable) -> Callable:
    """`model` without the compiled calls that it carries."""
    module = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
    if isinstance(module, torch.nn.Module):
        # Of torch's own modules, such as Sequential, Dynamo looks at no frame: torch.compile puts one around them.
        own = torch._dynamo.trace_rules.check(module.forward)
        return (lambda *args, **kwargs: module._call_impl(*args, **kwargs)) if own else module._call_impl
    return torch._dynamo.eval_frame.innermost_fn(module)
