"""Where in the user's program a node comes from."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import traceback
import types
from dataclasses import dataclass

import torch
from torch import fx

import mok_compile
from mok_compile._layout import folder

_FRAME = re.compile(r'File "(?P<file>.*?)", line (?P<line>\d+), in (?P<function>.*)')
# Torch's own lines, and ours, tell nothing about the model.
INSIDE = tuple(
    path + os.sep for path in (os.path.dirname(torch.__file__), os.path.dirname(mok_compile.__file__), folder("passes"))
)


def short(file: str) -> str:
    """`file`, relative to site-packages where it lies there."""
    return file.rpartition(f"site-packages{os.sep}")[2]


@dataclass(frozen=True)
class Source:
    """A source line; `file` is relative to site-packages where it lies there."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def source_of(node: fx.Node) -> Source | None:
    """The innermost line that `node` was traced from, outside of torch and of this package; None if it is not known."""
    return _innermost(node.meta.get("stack_trace") or "")


def said_at(node: fx.Node, sentence: str) -> str:
    """`sentence` with the node, and the source line, that it is about."""
    source = source_of(node)
    code = f": {source.code}" if source is not None and source.code else ""
    return f"{sentence} (at {node.name}{code})"


@functools.lru_cache(maxsize=4096)
def _innermost(trace: str) -> Source | None:
    lines = trace.splitlines()
    frames = [(i, match) for i, line in enumerate(lines) if (match := _FRAME.search(line))]
    if not frames:
        return None
    i, match = next((f for f in reversed(frames) if not f[1]["file"].startswith(INSIDE)), frames[-1])
    code = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.search(lines[i + 1]) else ""
    return Source(short(match["file"]), int(match["line"]), match["function"], code)


def trace_of_caller() -> str:
    """The line outside of torch and of this package that runs now, as the ``stack_trace`` of a node has it."""
    frame = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else _trace(frame.f_code, frame.f_lineno)


def line_of_error(error: BaseException) -> Source | None:
    """The innermost line outside of torch and of this package that `error` went through."""
    steps = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__) if not _is_inside(f.f_code)]
    return _innermost(_trace(*steps[-1])) if steps else None


def _is_inside(code: types.CodeType) -> bool:
    return code.co_filename.startswith(INSIDE)


def _trace(code: types.CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f'File "{code.co_filename}", line {line}, in {code.co_name}\n  {text}\n'


def lines_of(node: fx.Node) -> frozenset[tuple[str, int]]:
    """All source lines, as (file, line), on the way to `node`: those of its callers too."""
    return _lines(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _lines(trace: str) -> frozenset[tuple[str, int]]:
    return frozenset((match["file"], int(match["line"])) for match in _FRAME.finditer(trace))
