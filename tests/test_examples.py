"""Each example in a short form, as a user starts it: it checks itself and must exit with status 0."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mok_compile

ROOT = Path(__file__).parent.parent

EXAMPLES = {
    "quickstart.py": ("--steps", "4"),
    "train_char_lm.py": ("--steps", "8", "--layers", "1", "--experts", "4", "--top-k", "2", "--context", "32"),
    "generate.py": ("--tokens", "6"),
    "hf_trainer.py": ("--steps", "6"),
    "expert_parallel.py": ("--steps", "4"),
}


def start(script, arguments, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launcher = several if script == "expert_parallel.py" else ()
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_all_examples_are_tried():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_example_checks_itself(script, tmp_path):
    done = start(script, EXAMPLES[script], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NO  " not in done.stdout
    if script == "train_char_lm.py":
        assert (tmp_path / "char_lm.png").stat().st_size > 10_000


def test_quickstart_fails_where_nothing_is_fused(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    monkeypatch.setattr(mok_compile, "explain", lambda *args: lambda **inputs: mok_compile.Report())
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--steps", "2"])
    assert quickstart.main() == 1
    said = capsys.readouterr()
    assert "quickstart FAILED: all 2 MoE blocks are fused" in said.err
    assert "no MoE block found" in said.out
