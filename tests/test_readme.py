"""The README: its Python blocks run, its table of families is what the script finds, its lists are complete."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from mok_compile.engines import ENGINES
from mok_compile.options import Options
from mok_compile.report import REASONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def coverage():
    spec = importlib.util.spec_from_file_location("coverage_of_families", ROOT / "benchmarks" / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_python_blocks_run():
    blocks = re.findall(r"<!-- test: runs -->\n```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    assert README.count("```python") == len(blocks)
    torch._dynamo.reset()  # a reader starts from a fresh process
    torch._dynamo.utils.counters.clear()
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md block {number + 1}", "exec"), names)


def test_every_option_reason_and_engine_is_listed():
    for field in dataclasses.fields(Options):
        default = f'"{field.default}"' if isinstance(field.default, str) else field.default
        assert f"| `mok.{field.name}` | `{default}` |" in README
    assert all(f"| `{name}` |" in README for name in ENGINES)
    assert all(f"`{reason}`" in README for reason in REASONS)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target


def test_families_are_not_taken_for_releases(coverage, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--transformers", "5.17.0", "mixtral"])
    with pytest.raises(SystemExit):
        coverage.main()
    assert "'mixtral' is no release" in capsys.readouterr().err


def test_coverage_tables_are_those_of_the_results(coverage):
    """Written by `python benchmarks/coverage.py --write`, or `--render` from the stored results."""
    section = README.partition(f"{coverage.BEGIN}\n")[2].partition(f"\n{coverage.END}")[0]
    assert section == coverage.section(coverage.stored())
    assert (coverage.RESULTS / "coverage.md").read_text(encoding="utf-8") == coverage.page(coverage.stored())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_coverage_is_up_to_date(coverage, family):
    transformers = pytest.importorskip("transformers")
    rows = coverage.coverage.measure([family])
    assert coverage.coverage.complete(rows[family])
    if transformers.__version__ in coverage.stored():
        assert rows[family] == coverage.coverage.from_dict(coverage.stored()[transformers.__version__])[family]
