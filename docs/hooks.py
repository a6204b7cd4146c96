"""Pages that stand elsewhere in the repository are taken from there when the documentation is built."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown, **kwargs):
    markdown = markdown.replace("{{ coverage }}", coverage())
    return re.sub(r"\{\{ include (\S+) \}\}", lambda m: included(m[1]), markdown)


def coverage():
    """The tables that benchmarks/coverage.py writes, without their title."""
    page = (ROOT / "benchmarks" / "results" / "coverage.md").read_text(encoding="utf-8")
    return page.partition("\n")[2].strip()


def included(name):
    """A page of the repository's top level, its relative links pointing at the names alone."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
