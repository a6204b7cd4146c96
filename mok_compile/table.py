"""A report as a table: for a terminal (columns that fit 100 characters) and for a notebook."""

from __future__ import annotations

import html as _html
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok_compile.report import Report, Site

WIDTH = 100
_BLOCK, _ENGINE = 45, 10  # widths of the columns
_COLOURS = {"fused": "\033[32m", "missed": "\033[31m", "head": "\033[1m", "dim": "\033[2m"}
NOWHERE = "(no module)"  # instead of a path: the module that was compiled itself, or none
_NUMBER = re.compile(r"(?<![^.\s])\d+(?![^.\s])")  # a part of a module path that is a number


@dataclass(frozen=True)
class Row:
    """Sites that differ in nothing but the number of their layer."""

    site: Site
    block: str
    cls: str
    source: str
    count: int

    @property
    def title(self) -> str:
        block = self.cls if self.block == NOWHERE and self.cls else self.block
        return f"{block} (x{self.count})" if self.count > 1 else block

    @property
    def computes(self) -> str:
        """What the block computes, in one line."""
        spec = self.site.spec
        return str(spec) if spec is not None else ""

    @property
    def about(self) -> Iterator[tuple[str, str]]:
        """Everything else there is to say, as (label, sentence)."""
        where = ", ".join(filter(None, (self.cls, self.source)))
        if where:
            yield "where", where
        if self.site.status == "missed":
            yield "why", self.site.detail
            yield "to do", self.site.cure
        else:
            if self.site.combine_detail:
                yield "combine", f"not fused: {self.site.combine_detail}"
            if self.site.about_router:
                yield "router", self.site.about_router
            if self.site.spread is not None:
                yield "experts", f"{self.site.spread} (mok::experts_parallel)"
            if self.site.verify_error is not None:
                yield "verified", f"largest relative error of a row {self.site.verify_error:.1e}"
            if self.site.detail:
                if self.site.problem is None:  # it was the op already
                    yield "how", self.site.detail
                else:
                    yield "engine", f"{self.site.engine}; passed over: {self.site.detail}"


def rows(report: Report) -> list[Row]:
    """The report's sites, alike ones together, in the order of their first one."""
    groups: dict[tuple, list[tuple[Site, str, str, str]]] = {}
    for site in report.sites:
        path, cls, source = parts(site.location)
        detail = site.detail.replace(site.node, "*") if site.node else site.detail
        what = (site.spec, site.engine, site.router, site.router_detail, site.spread)
        key = (_NUMBER.sub("*", path), cls, source, site.status, site.reason, detail, *what)
        groups.setdefault((*key, site.verify_error is None), []).append((site, path, cls, source))
    found = []
    for group in groups.values():
        worst = max((s for s, *_ in group), key=lambda s: s.verify_error or 0.0)
        _, _, cls, source = group[0]
        found.append(Row(worst, _joined([path for _, path, *_ in group]), cls, source, len(group)))
    return found


def parts(location: str) -> tuple[str, str, str]:
    """Module path, class and source line of a `Site.location`."""
    match = re.fullmatch(r"(\(no module\)|\S*)(?: \[(.*?)\])?(?: (.*))?", location)
    return (match[1], match[2] or "", match[3] or "") if match else (location, "", "")


def _joined(paths: list[str]) -> str:
    """``a.0.b``, ``a.1.b``, ``a.3.b`` -> ``a.0-1,3.b``; the first one where more than one number differs."""
    numbers = [[int(n) for n in _NUMBER.findall(path)] for path in paths]
    differing = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    if len(differing) != 1:
        return paths[0]
    which, seen = differing[0], iter(range(len(numbers[0])))
    text = ranges(sorted({n[which] for n in numbers}))
    return _NUMBER.sub(lambda m: text if next(seen) == which else m[0], paths[0])


def ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def text(report: Report, colour: bool = False) -> str:
    """The table for a terminal."""

    def paint(name: str, what: str) -> str:
        return f"{_COLOURS[name]}{what}\033[0m" if colour else what

    lines = [paint("head", report.summary())]
    if report.sites:
        lines += ["", paint("dim", f"{'status':8}{'block':{_BLOCK}}{'engine':{_ENGINE}}computes")]
    for row in rows(report):
        fused = row.site.status == "fused"
        status = paint(row.site.status, f"{'fused' if fused else 'MISSED':8}")
        engine = row.site.engine if fused else row.site.reason
        title = _middle(row.title, _BLOCK - 2)
        rest = textwrap.wrap(row.computes, WIDTH - 8 - _BLOCK - _ENGINE) or [""]
        lines.append(f"{status}{title:{_BLOCK}}{engine:{_ENGINE}}{rest[0]}".rstrip())
        lines += [" " * (8 + _BLOCK + _ENGINE) + more for more in rest[1:]]
        for label, sentence in row.about:
            lines += _paragraph(label, sentence, paint)
    for note in report.notes:
        lines += ["", *_paragraph("note", note, paint, indent=0)]
    return "\n".join(lines)


def _paragraph(label: str, sentence: str, paint, indent: int = 8) -> list[str]:
    wrapped = textwrap.wrap(sentence, WIDTH - indent - 10, break_long_words=False) or [""]
    first = " " * indent + paint("dim", f"{label:10}") + wrapped[0]
    return [first, *(" " * (indent + 10) + more for more in wrapped[1:])]


def _middle(what: str, width: int) -> str:
    """`what`, shortened in its middle."""
    if len(what) <= width:
        return what
    left = (width - 3) // 2
    return f"{what[:left]}...{what[-(width - 3 - left) :]}"


def is_terminal(file) -> bool:
    """Whether to write colours to `file`."""
    return bool(getattr(file, "isatty", lambda: False)()) and "NO_COLOR" not in os.environ


def show(report: Report, file=None) -> None:
    file = sys.stdout if file is None else file
    file.write(text(report, is_terminal(file)) + "\n")


def html(report: Report) -> str:
    """The table for a notebook; light and dark themes keep their own colours."""
    escape = _html.escape
    body = []
    for row in rows(report):
        fused = row.site.status == "fused"
        colour = "#1a7f37" if fused else "#cf222e"
        more = "<br>".join(f"<i>{escape(label)}</i>: {escape(sentence)}" for label, sentence in row.about)
        body.append(
            f"<tr><td style='color:{colour};font-weight:bold'>{'fused' if fused else 'missed'}</td>"
            f"<td style='text-align:left'><code>{escape(row.title)}</code></td>"
            f"<td>{escape((row.site.engine if fused else row.site.reason) or '')}</td>"
            f"<td style='text-align:left'>{escape(row.computes)}{'<br>' if row.computes and more else ''}"
            f"<small>{more}</small></td></tr>"
        )
    head = "<tr><th>status</th><th>block</th><th>engine or reason</th><th>what</th></tr>" if body else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return f"<b>{escape(report.summary())}</b><table>{head}{''.join(body)}</table>{notes}"
