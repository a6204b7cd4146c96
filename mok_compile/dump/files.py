"""The files of one compiled graph: name -> text."""

from __future__ import annotations

import difflib
import json
import os
import platform
import sys
from typing import Any

import torch

from mok_compile._version import __version__
from mok_compile.dump.page import page
from mok_compile.dump.repro import script
from mok_compile.options import Options
from mok_compile.report import Graph, Report, Site

SCHEMA = 1  # of report.json; docs/dumps.md


def files(report: Report, options: Options) -> dict[str, str]:
    """All files for the last graph of `report`, or for its loops if it has no graphs; those of a site lie in
    ``site_<number>/``."""
    graph = report.graphs[-1] if report.graphs else Graph("", "")
    sites = [site for site in report.sites if site.graph == max(0, len(report.graphs) - 1)]
    summary = report_json(report, sites, options)
    made = {"report.json": json.dumps(summary, indent=2)}
    if report.graphs:
        lines = (text.splitlines(keepends=True) for text in (graph.before, graph.after))
        diff = difflib.unified_diff(*lines, "before.py", "after.py", n=3)
        made |= {"before.py": graph.before, "after.py": graph.after, "diff.txt": "".join(diff)}
    scripts, texts = {}, {}
    for i, site in enumerate(sites):
        if site.loop is not None:
            texts[i] = made[f"site_{i:02d}/loop.txt"] = site.loop.text(site)
        if site.slice is None:
            continue
        made[f"site_{i:02d}/slice.txt"] = slice_text(site)
        if site.cut_off:  # the graph holds nothing of the block
            continue
        scripts[i] = made[f"site_{i:02d}/repro.py"] = script(site, options.engine, "repro.py")
    made["index.html"] = page(graph, sites, summary, scripts, texts)
    return made


def report_json(report: Report, sites: list[Site], options: Options) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "summary": Report(sites, report.graphs[-1:]).summary(),
        "fused": sum(site.status == "fused" for site in sites),
        "missed": sum(site.status == "missed" for site in sites),
        "sites": [{**site.to_dict(), **proven(site)} for site in sites],
        "options": options.to_dict(),
        "versions": {
            "mok_compile": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MOK_")},
        "process": {"pid": os.getpid(), "argv": sys.argv},
    }


def proven(site: Site) -> dict[str, Any]:
    """What the slice of a site says, as JSON."""
    if site.slice is None:
        return {}
    arguments = [
        {"argument": name, "known": known, "expected": expected} for name, known, expected in site.slice.arguments
    ]
    return {
        "roles": site.slice.roles,
        "facts": site.slice.facts,
        "broke": {"node": site.slice.broke, "op": site.slice.obstacle, "arguments": arguments}
        if site.slice.broke
        else None,
    }


def slice_text(site: Site) -> str:
    """The nodes of a site, each with its role and the fact that was proven of it."""
    from mok_compile.dump.listing import listing

    lines = [f"# {site.status}: {site.location}"]
    if site.reason:
        lines += [f"# {site.reason}: {site.combine_detail or site.detail}", f"# what to do: {site.cure}"]
    lines += ["# each node, below it its role in the block and what was proven of it", ""]
    for entry in listing(site.slice.module).functions[0].entries:
        role, fact = site.slice.roles.get(entry.node, "input"), site.slice.facts.get(entry.node, "")
        if entry.op == "output":
            continue
        lines.append(entry.code)
        lines.append(f"    # {role}: {fact or 'nothing is known'}" if role != "input" or fact else "    # input")
        if entry.node == site.slice.broke:
            lines.append(f"    # >>> the proof breaks here: {site.detail}")
            if site.slice.obstacle:
                lines.append(f"    # >>> at {site.slice.obstacle}")
            for name, known, expected in site.slice.arguments:
                lines.append(f"    # >>>   {name}: {known}" + (f"; expected: {expected}" if expected else ""))
    return "\n".join(lines) + "\n"
