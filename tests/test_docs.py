"""The documentation: every code block runs, tables agree with the code, and the site builds without a warning."""

import importlib.util
import linecache
import re
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mok_compile import bench, build, cli, engines
from mok_compile.distributed import peer_memory
from mok_compile.options import Options
from mok_compile.passes.facts.rules import RULES
from mok_compile.report import IN_TRANSFORMERS, REASONS

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Shown, not run: they install, or run a program of the reader's.
ELSEWHERE = ("pip ", "make ", "TORCH_TRACE=trace python train.py", "tlparse ")


def blocks(page):
    return [(m[1], m[2], m[3]) for m in FENCE.finditer((DOCS / page).read_text(encoding="utf-8"))]


@pytest.fixture
def restored(monkeypatch):
    """Undoes what the tutorials add; keeps the benchmark small."""
    rules, modules, known = dict(RULES), set(sys.modules), engines.ENGINES
    tiny = bench.Shape("tiny", 32, 16, 4, 2, (3,), torch.bfloat16)
    monkeypatch.setattr(bench, "ON_CPU", tiny)
    monkeypatch.setattr(build, "build_all", lambda: [("cpu", Path("libmok_cpu.so"))])
    yield
    RULES.clear()
    RULES.update(rules)
    engines.ENGINES = known
    engines.get.cache_clear()
    for name in set(sys.modules) - modules:
        if name in ("scaled", "mymodel", "hard", "mymoe", "stacked", "mok_compile.engines.looped"):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_code_runs(page, restored, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType("page")  # Dynamo looks functions up in their module
    monkeypatch.setitem(sys.modules, "page", module)
    for number, (language, title, code) in enumerate(blocks(page)):
        if language == "python" and title:
            (tmp_path / Path(title).name).write_text(code)
            if title.startswith("mok_compile/"):
                load(title.removesuffix(".py").replace("/", "."), tmp_path / Path(title).name)
        elif language == "python":
            name = f"<docs/{page} block {number}>"  # its source can be read, as in a notebook
            linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
            exec(compile(code, name, "exec"), vars(module))
        elif language == "sh":
            for line in code.splitlines():
                command(line)
        else:
            assert language in ("text", "json"), f"{page}: a block of {language or 'no language'}"


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def command(line):
    if line.startswith(ELSEWHERE):
        return
    prefix = "python -m mok_compile "
    assert line.startswith(prefix), line
    arguments = line.removeprefix(prefix).split()
    assert cli.main([*arguments, "--repetitions", "1"] if arguments[0] == "bench" else arguments) == 0


def test_every_reason_has_its_section():
    page = (DOCS / "reasons.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(.*?)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(REASONS)
    for code, (meaning, cure) in REASONS.items():
        assert meaning.lower() in sections[code].lower() and f"**What to do:** {cure}." in sections[code]
        assert (f"**In transformers:** {IN_TRANSFORMERS.get(code)}." in sections[code]) == (code in IN_TRANSFORMERS)


def test_every_option_is_documented():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    for field in fields(Options):
        default = str(field.default)
        row = next(row for row in page.splitlines() if row.startswith(f"| `mok.{field.name}`"))
        assert f"`MOK_{field.name.upper()}`" in row and (f"`{default}`" in row if default else True)


def test_every_control_of_peer_memory_is_documented():
    page = (DOCS / "distributed.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert all(f"`{field.name}`" in rows for field in fields(peer_memory.Options))


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f": {page}\n" in menu for page in PAGES)


def test_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs-material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path, "-f", "mkdocs.yml"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no-match" in (tmp_path / "reasons.html").read_text(encoding="utf-8")
    assert (tmp_path / "pipeline.svg").exists()


def test_fences_are_closed():
    for page in PAGES:
        assert (DOCS / page).read_text(encoding="utf-8").count("\n```") % 2 == 0, page
