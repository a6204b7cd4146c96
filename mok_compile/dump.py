"""Where reports go besides the log: the dump folder and, for tlparse, torch's structured trace."""

from __future__ import annotations

import itertools
import json
import logging
import os
from pathlib import Path

from torch import fx
from torch._logging import trace_structured

from mok_compile.options import Options
from mok_compile.report import Report

_numbers = itertools.count()
_trace = logging.getLogger("torch.__trace")


def wanted(options: Options) -> bool:
    """Whether anybody will look at the code before and after."""
    return bool(options.dump) or bool(_trace.handlers)


def code(gm: fx.GraphModule) -> str:
    """The readable code of a graph, with shapes."""
    return gm.print_readable(print_output=False, include_stride=False, include_device=False)


def publish(report: Report, options: Options) -> None:
    """Writes before.py, after.py and report.json, numbered by process and graph, and the same as trace artifacts."""
    graph = report.graphs[-1]
    files = {"before.py": graph.before, "after.py": graph.after, "report.json": json.dumps(report.to_dict(), indent=2)}
    for name, text in files.items():
        stem, _, ending = name.partition(".")
        trace_structured(
            "artifact",
            metadata_fn=lambda stem=stem, ending=ending: {
                "name": f"mok_{stem}",
                "encoding": "json" if ending == "json" else "string",
            },
            payload_fn=lambda text=text: text,
        )
    if options.dump:
        folder = Path(options.dump) / f"{os.getpid()}_{next(_numbers):03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
