"""Where reports go besides the log: the dump folder and, for tlparse, torch's structured trace.

A folder for each process and graph, or loop that no graph holds: ``<pid>[_rank<r>]_<number>``. docs/dumps.md describes
the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx
from torch._logging import trace_structured

from mok_compile.dump.listing import Listing, listing
from mok_compile.options import Options
from mok_compile.report import Graph, Report

log = logging.getLogger("mok_compile")
_numbers = itertools.count()
_trace = logging.getLogger("torch.__trace")


def wanted(options: Options) -> bool:
    """Whether anybody will look at the code before and after."""
    return bool(options.dump) or bool(_trace.handlers)


def code(gm: fx.GraphModule) -> Listing:
    """The readable code of a graph as it is now."""
    return listing(gm)


def graph(before: Listing | None = None, after: Listing | None = None) -> Graph:
    """The report's record of one graph; without listings where nobody watches."""
    if before is None or after is None:
        return Graph("", "")
    return Graph(before.text, after.text, (before, after))


def rank() -> int | None:
    """This process's rank, where torch.distributed is in use."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else None


def publish(report: Report, options: Options) -> None:
    """Writes the files of the last graph of `report`, or of its loops if it has no graphs, and the same as trace
    artifacts. Never raises: a picture of the compile must not end the compile."""
    try:
        from mok_compile.dump.files import files  # the page and the scripts are needed by those who look only

        made = files(report, options)
        for name, text in made.items():
            if name != "index.html":  # the trace's own viewer has no pages
                _emit(name, text)
        if options.dump:
            _write(Path(options.dump), made)
    except Exception:
        log.warning("mok-compile: the dump could not be written", exc_info=True)


def _emit(name: str, text: str) -> None:
    stem, _, ending = name.replace("/", "_").rpartition(".")
    encoding = "json" if ending == "json" else "string"
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": f"mok_{stem}", "encoding": encoding}, payload_fn=lambda: text
    )


def _write(root: Path, made: dict[str, str]) -> None:
    from mok_compile.dump.page import overview

    number = "" if rank() is None else f"_rank{rank()}"
    root.mkdir(parents=True, exist_ok=True)
    for i in _numbers:  # a folder that another process of the same id left is not touched
        folder = root / f"{os.getpid()}{number}_{i:03d}"
        try:
            folder.mkdir()
            break
        except FileExistsError:
            continue
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with _one_at_a_time(root):  # so that the last one to write has seen them all
        reports = {}
        for path in sorted(root.glob("*/report.json")):
            with contextlib.suppress(ValueError, OSError):  # another process is just writing it
                reports[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
        partial = root / f".index.{folder.name}"
        partial.write_text(overview(reports), encoding="utf-8")
        partial.replace(root / "index.html")
    log.debug("mok-compile: wrote %s", folder)


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Held by one process at a time, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(root / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
