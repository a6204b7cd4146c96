"""Where Dynamo ended a graph though its function goes on: what is named where no graph holds a block."""

from __future__ import annotations

import ast
import functools
import linecache
import logging
import types
from dataclasses import dataclass
from typing import Any

from mok_compile.integrations.tracing import backend_of
from mok_compile.passes.graph.source import INSIDE, short

log = logging.getLogger("mok_compile")
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class GraphBreak:
    """The lines, as (file, line), that Dynamo was at, those of the callers first and none of torch's own, and what it
    says of it."""

    lines: tuple[tuple[str, int], ...]
    why: str

    def within(self, code: types.CodeType) -> GraphBreak | None:
        """The same from the first line in `code` on; None if it is not there that the graph broke."""
        mine = {(code.co_filename, line) for _, _, line in code.co_lines()}
        start = next((i for i, line in enumerate(self.lines) if line in mine), None)
        return None if start is None else GraphBreak(self.lines[start:], self.why)

    @property
    def in_loop(self) -> bool:
        """Whether one of the lines is in a loop, or in a comprehension."""
        return any(line in _lines_in_loops(file) for file, line in self.lines)

    def __str__(self) -> str:
        file, line = self.lines[-1]
        code = linecache.getline(file, line).strip()
        return f"{short(file)}:{line}" + (f": {code}" if code else "")


def tell(translator: Any, error: Exception | None) -> None:
    """Tells the backend that a frame was for, if it asks, where its graph broke, or where the frame was given up."""
    try:
        found = backend_of(translator.output.compiler_fn)
        if found is not None and hasattr(found[0], "broke") and (end := end_of(translator, error)) is not None:
            found[0].broke(end)
    except Exception:  # of Dynamo's own classes, which another release of torch may have changed
        log.warning("mok-compile: this release of torch keeps its frames otherwise; please report", exc_info=True)


def end_of(translator: Any, error: Exception | None = None) -> GraphBreak | None:
    """Where the graph of `translator` broke, or where that was given up with `error`; None if it came to its end."""
    reason = getattr(translator.output, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        stack, why = reason.user_stack, reason.reason
    elif error is not None:
        stack, why = getattr(error, "real_stack", None) or (), str(error)
    else:
        return None
    lines = [(frame.filename, frame.lineno) for frame in stack if not frame.filename.startswith(INSIDE)]
    lines = lines or [(translator.f_code.co_filename, translator.lineno)]
    return GraphBreak(tuple(lines), why.strip().partition("\n")[0])


@functools.lru_cache(maxsize=256)
def _lines_in_loops(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    loops = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    return frozenset().union(*(range(loop.lineno, loop.end_lineno + 1) for loop in loops))
