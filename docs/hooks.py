"""Pages that stand elsewhere in the repository are taken from there when the documentation is built."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown, **kwargs):
    markdown = markdown.replace("{{ coverage }}", coverage())
    return re.sub(r"\{\{ include (\S+) \}\}", lambda m: included(m[1]), markdown)


def coverage():
    """The table that benchmarks/coverage.py writes into the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- coverage: begin.*?-->\n(.*?)<!-- coverage: end -->", readme, re.DOTALL)
    table = found[1].strip() if found else ""
    return table or "*No table here yet: `python benchmarks/coverage.py --write` makes it.*"


def included(name):
    """A page of the repository's top level, its relative links pointing at the names alone."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)
