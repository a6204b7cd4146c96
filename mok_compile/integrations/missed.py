"""Loops over experts at which the graph breaks: misses of which no graph knows.

The rule for `explain`, the counters, the log and ``mok.strict`` alike: where Dynamo ends a frame at a line of such a
loop, the loop is a miss, with the reason why it stayed a loop. It is told with the frame of the method that has it, so
once, whatever frames that method was a part of before; a graph that ends at the loop does not count its router besides.
"""

from __future__ import annotations

import inspect
import logging
import traceback
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mok_compile._version import __version__
from mok_compile.integrations.breaks import GraphBreak, end_of
from mok_compile.integrations.tracing import backend_of
from mok_compile.passes.graph.source import short
from mok_compile.passes.loops.cut import Cut, Uncut
from mok_compile.report import Site
from mok_compile.table import NOWHERE

if TYPE_CHECKING:
    from mok_compile.options import Options
    from mok_compile.passes.loops.cut import Place

log = logging.getLogger("mok_compile")
DATA_DEPENDENT = "data-dependent"
LOOP = "these experts run one by one in a Python loop, which breaks the graph"
_CUT = "the graph breaks between the choice of the experts and the weighted sum of their outputs"
# Why the loop of a module was left alone: reason code and sentence.
refused: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
# Of the compile that is under way: modules whose loop stays one, and how to find out why another of the class has one.
met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
provers: weakref.WeakKeyDictionary[torch.nn.Module, Callable] = weakref.WeakKeyDictionary()
_told: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # what has a loop that was told
_loops: dict[str, list[Cut | Uncut]] = defaultdict(list)  # by file


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop over experts of `owner` at which the graph breaks: where it is, reason code and sentence."""

    owner: torch.nn.Module
    place: Place
    reason: str
    detail: str
    prove: Callable[[torch.nn.Module], tuple[str, str] | None] | None = None

    def of(self, other: torch.nn.Module) -> Loop:
        """The same loop of another module of the class, for which nothing was traced: it runs what was compiled for
        this one."""
        shared = DATA_DEPENDENT, f"it is in code that was compiled for another module, where {self.detail}"
        reason, detail = (self.reason, self.detail) if self.prove is None else self.prove(other) or shared
        return Loop(other, self.place, reason, detail)

    def site(self, path: str = "", watched: bool = False) -> Site:
        """`path`: of the owner in its model, where that is known; `watched`: whether somebody will look at the code."""
        file = short(self.place.file)
        where = f"{path or NOWHERE} [{type(self.owner).__name__}] {file}:{self.place.lines.start}"
        detail = f"the Python loop over these experts breaks the graph: {self.detail}"
        return Site("missed", self.reason, detail, where, loop=self if watched else None)

    def text(self, site: Site) -> str:
        """What there is to read of the loop, whose `site` this is: why it is one, its module, and the code of that and
        of all modules in it."""
        return "\n".join((*self._lines(site), ""))

    def _lines(self, site: Site) -> Iterator[str]:
        yield f"# {site.status}: {site.location}"
        yield f"# {site.reason}: {site.detail}"
        yield f"# what to do: {site.cure}"
        yield f"# mok-compile {__version__}, torch {torch.__version__}"
        yield from ("", repr(self.owner))
        for cls in dict.fromkeys(type(module) for module in self.owner.modules()):
            if cls.__module__.partition(".")[0] == "torch":
                continue
            try:
                lines, first = inspect.getsourcelines(cls)
            except (OSError, TypeError):  # made where no source is kept
                yield from ("", f"# {cls.__qualname__}: no source")
                continue
            file = short(inspect.getsourcefile(cls) or "")
            yield from ("", f"# {cls.__qualname__}, {file}:{first}", "".join(lines).rstrip())


def watch() -> None:
    """Forgets at the end of each compile what holds its tensors."""
    from torch._dynamo.callback import callback_handler

    if _forget not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_forget)


def _forget(*_) -> None:
    met.clear()
    provers.clear()


def register(loop: Cut | Uncut) -> None:
    """Makes a loop known, by its lines."""
    _loops[loop.place.file].append(loop)


def by_their_ends(sites: list[Site]) -> list[Site]:
    """`sites` of the graph that Dynamo hands over, where those of routers have the reason that their experts are not in
    it: where the graph breaks. Without the router of a loop that is told for itself."""
    from torch._dynamo import symbolic_convert

    routers = [site for site in sites if site.cut_off]
    translator = getattr(symbolic_convert.tls, "current_tx", None) if routers else None
    if translator is None:
        return sites
    if any(frame.f_code in _told for frame, _ in traceback.walk_stack(None)):
        return [site for site in sites if site not in routers]
    found, end = backend_of(translator.output.compiler_fn), end_of(translator)
    if end is None or found is None or not hasattr(found[0], "tell"):
        return sites
    loops = ((line, loop) for file, line in end.lines for loop in _loops.get(file, ()))
    if any(line in loop.place.around and (isinstance(loop, Cut) or _named(loop)) for line, loop in loops):
        return [site for site in sites if site not in routers]
    for site in routers:
        if site.reason == DATA_DEPENDENT:
            site.reason, site.detail = why_cut(end, end.in_loop)
    return sites


def why_cut(end: GraphBreak, in_loop: bool) -> tuple[str, str]:
    """Reason code and sentence of experts that the graph's `end` cuts from their choice, `in_loop` over them or not."""
    return (DATA_DEPENDENT, f"{LOOP}, at {end}") if in_loop else ("split", f"{_CUT}, at {end}")


def tell(translator: Any, error: Exception | None) -> None:
    """Tells the backend that the frame was for of the loop that the frame of `translator` ended at, if it did, or was
    given up at with `error`. BackendCompilerFailed if the backend has an error to raise, as ``mok.strict`` asks for."""
    try:
        loop, (backend, options) = _broken(translator, error) or (None, (None, None))
    except (
        Exception
    ):  # of Dynamo's own classes, which another release of torch may have changed: no compile ends for it
        log.warning("mok-compile: this release of torch keeps its frames otherwise; please report", exc_info=True)
        return
    if loop is None:
        return
    _told.add(translator.f_code)
    try:
        backend.tell(loop, options)
    except Exception as raised:
        compiler = translator.output.compiler_fn
        failed = torch._dynamo.exc.BackendCompilerFailed(compiler, raised, inspect.currentframe())
        raise failed.with_traceback(raised.__traceback__) from None


def _broken(translator: Any, error: Exception | None) -> tuple[Loop, tuple[Any, Options]] | None:
    """The loop that is to be told, and to which backend."""
    loop, output = _ended_at(translator), translator.output
    found = None if loop is None or translator.one_graph else backend_of(output.compiler_fn)
    owner = None if found is None else translator.f_locals.get(loop.place.owner)
    if not isinstance(owner, torch.nn.Module) or not hasattr(found[0], "tell"):
        return None
    if isinstance(loop, Uncut):
        return (Loop(owner, loop.place, loop.reason, loop.detail), found) if _has_experts(owner, loop) else None
    if owner not in met:  # an earlier frame has met it, whose rest this is
        return None
    said = str(error) if error is not None else _reason(output).reason
    reason, detail = refused.get(owner, (DATA_DEPENDENT, said.strip().partition("\n")[0]))
    return Loop(owner, loop.place, reason, detail, provers.get(owner)), found


def _ended_at(translator: Any) -> Cut | Uncut | None:
    """The loop that the frame of `translator` ended at, or at what prepares it, unless it was traced to its end."""
    reason = _reason(translator.output)
    if reason is not None and not reason.graph_break:
        return None
    loops = _loops.get(translator.f_code.co_filename, ())
    return next((loop for loop in loops if translator.lineno in loop.place.around), None)


def _reason(output: Any) -> Any:
    """Why Dynamo has ended a graph; None if it has not, but given the frame up."""
    return getattr(output, "compile_subgraph_reason", None)


def _named(loop: Cut | Uncut) -> bool:
    return any("expert" in name for name in loop.reads)


def _has_experts(owner: torch.nn.Module, loop: Cut | Uncut) -> bool:
    """Whether `loop` names experts, or what it reads of `owner` is several of something: modules, or matrices."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, list, tuple, dict)
    values = [getattr(owner, name, None) for name in loop.reads]
    several = (v for v in values if isinstance(v, lists) or (isinstance(v, torch.Tensor) and v.dim() > 1))
    return _named(loop) or any(len(v) > 1 for v in several)
