"""`python -m mok_compile`: info, build, bench. tune: test_tuned.py."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mok_compile import bench, build, cli
from mok_compile.engines import ENGINES


def test_info_says_what_is_here(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and all(f"\n  {name} " in text for name in ENGINES)
    assert str(build.cache_dir()) in text
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engines"]["portable"] == "usable" and set(found["kernels"]) == set(build.TARGETS)


def test_info_says_why_not(capsys, monkeypatch):
    monkeypatch.setattr(build, "unavailable", lambda name: "building it needs a compiler, and none was found")
    assert cli.main(["info"]) == 0
    assert "building it needs a compiler, and none was found" in capsys.readouterr().out


def test_info_says_what_is_wrong_with_a_variable(capsys, monkeypatch):
    monkeypatch.setenv("MOK_CPU_ISA", "mmx")
    assert cli.main(["info"]) == 0
    assert "  cpu           MOK_CPU_ISA='mmx' is not one of scalar, avx2" in capsys.readouterr().out


def test_build_reports_each_library(capsys, monkeypatch):
    for results, status in (
        ([("cpu", Path("libmok_cpu.so")), ("sm90", "no compiler")], 0),
        ([("cpu", "no compiler")], 1),
    ):
        monkeypatch.setattr(build, "build_all", lambda results=results: results)
        assert cli.main(["build"]) == status
        assert all(f"{name}: {result}\n" in capsys.readouterr().out for name, result in results[:1])


def test_bench_compares_three_ways(capsys, monkeypatch):
    """Uncompiled, to be quick: the documentation's test runs the real one."""
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    monkeypatch.setattr(bench, "ON_CPU", bench.Shape("tiny", 32, 16, 4, 2, (5,), torch.bfloat16))
    assert cli.main(["bench", "--device", "cpu", "--repetitions", "2"]) == 0
    head, columns, forward, both, _ = capsys.readouterr().out.splitlines()
    assert "tiny" in head and columns.split()[1:4] == ["eager", "inductor", "mok"]
    assert forward.split()[:2] == ["5", "forward"] and both.split()[1] == "forward+backward"
    assert all(float(line.split()[-1]) < 0.05 for line in (forward, both))


def test_the_bar_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        cli._bar(1, 4, "half of it")
        cli._bar(4, 4, "")
        assert bool(stream.getvalue()) is shown


def test_help_and_wrong_commands():
    done = subprocess.run([sys.executable, "-m", "mok_compile", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and all(name in done.stdout for name in ("doctor", "info", "bench", "build", "tune"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["cure"])
    assert stop.value.code == 2


def test_a_device_that_is_none(capsys):
    for command in (["doctor", "mixtral", "--device", "gpu"], ["bench", "--device", "gpu"]):
        with pytest.raises(SystemExit):
            cli.main(command)
        assert "'gpu' is not a device, such as cpu" in capsys.readouterr().err
