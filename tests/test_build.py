"""Building the libraries: the cache, several processes, what goes wrong, and what a library imports."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok_compile import build, engines

ROOT = Path(__file__).resolve().parent.parent
HERE = {**os.environ, "PYTHONPATH": str(ROOT)}

# A target that builds in a moment, so that tests of the machinery do not wait for kernels.
TINY = """
import dataclasses, sys, torch
from pathlib import Path
from mok_compile import build
build.csrc = lambda: Path(sys.argv[1])
real = build._cpu()
build.TARGETS = {"cpu": lambda: dataclasses.replace(
    real, folders=("cpu",), sources=(build.Source("cpu/tiny.cpp"),), flags=("-fPIC", *sys.argv[2:]))}
"""

needs_compiler = pytest.mark.skipif(build.unavailable("cpu") is not None, reason="no compiler")


@pytest.fixture
def tiny(tmp_path):
    """Runs code with the tiny target in a process of its own, the cache below tmp_path."""
    source = tmp_path / "csrc" / "cpu" / "tiny.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int answer() { return 42; }\n")

    def start(code: str, *flags: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", TINY + code, str(tmp_path / "csrc"), *flags],
            env={**HERE, "MOK_CACHE_DIR": str(tmp_path / "cache"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )

    def run(code: str, *flags: str, **env: str) -> tuple[str, str]:
        process = start(code, *flags, **env)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.strip(), err.strip()

    run.start, run.source, run.cache = start, source, tmp_path / "cache"
    return run


LOAD = "print(build.load('cpu'))"


def built(cache: Path) -> list[Path]:
    return sorted(cache.glob("cpu-*/libmok_cpu.so"))


@needs_compiler
def test_build_once_with_one_message(tiny):
    out, err = tiny(LOAD)
    assert err.startswith("mok-compile: building the cpu kernels (once, about ") and "\n" not in err
    assert [Path(out)] == built(tiny.cache)
    assert tiny(LOAD) == (out, "")
    assert not list(tiny.cache.glob("*.tmp"))


@needs_compiler
def test_what_a_build_depends_on(tiny):
    first, _ = tiny(LOAD)
    assert tiny(LOAD, "-DOTHER")[0] != first
    assert tiny("torch.__version__ = '9.9'\n" + LOAD)[0] != first
    (tiny.source.parent / "unused.h").write_text("")
    changed, _ = tiny(LOAD)
    assert changed != first
    tiny.source.write_text("int answer() { return 43; }\n")
    assert tiny(LOAD)[0] not in (first, changed)


@needs_compiler
def test_several_processes_build_once(tiny):
    processes = [tiny.start(LOAD) for _ in range(4)]
    results = [p.communicate(timeout=120) for p in processes]
    assert {p.returncode for p in processes} == {0}, results
    assert len({out for out, _ in results}) == 1
    assert sum("building" in err for _, err in results) == 1


@needs_compiler
@pytest.mark.parametrize("how", (signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
def test_interrupted_build_leaves_nothing_half_written(tiny, tmp_path, how):
    slow = tmp_path / "slow-compiler"
    slow.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) sleep 5;; esac\nexec c++ "$@"\n')
    slow.chmod(0o755)
    process = tiny.start(LOAD, CXX=str(slow))
    deadline = time.time() + 60
    while not list(tiny.cache.glob("cpu-*.tmp/.ninja_log")) and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0 and not built(tiny.cache)
    assert [Path(tiny(LOAD, CXX=str(slow))[0])] == built(tiny.cache)


def test_no_compiler(tiny):
    out, _ = tiny("print(build.unavailable('cpu'))", CXX="nothing", PATH="/nonexistent")
    assert out.startswith("building it needs a C++ compiler") and out.endswith("none was found")


@needs_compiler
def test_compiler_error(tiny):
    tiny.source.write_text("int answer() { return fortytwo; }\n")
    out, err = tiny("print(build.build_all())")
    assert "building the cpu kernels failed:" in out and "fortytwo" in out
    assert "the compiler's output" in err
    assert not list(tiny.cache.glob("cpu-*/")) and not built(tiny.cache)


@needs_compiler
def test_cache_that_cannot_be_written(tiny):
    tiny.cache.write_text("a file where the folder should be")
    assert "MOK_CACHE_DIR names another folder" in tiny("print(build.build_all())")[0]


def refused(tiny, into: Path) -> str:
    """Why there is no wheel."""
    out, _ = tiny(f"""
try:
    build.prebuild({str(into)!r})
except build.BuildError as error:
    print(error)
""")
    return out


@needs_compiler
def test_prebuild(tiny, tmp_path):
    out, _ = tiny(f"print(build.prebuild({str(tmp_path / 'lib')!r})[0].name)")
    assert re.fullmatch(r"libmok_cpu-[0-9a-f]{16}\.so", out) and (tmp_path / "lib" / out).exists()


@needs_compiler
def test_a_wheel_has_no_library_that_cannot_be_loaded(tiny, tmp_path):
    tiny.source.write_text("int missing(); int answer() { return missing(); }\n")
    out = refused(tiny, tmp_path / "lib")
    assert "undefined symbol" in out and "missing" in out
    assert not list((tmp_path / "lib").iterdir())


@needs_compiler
def test_slow_kernels_warn_a_user_and_stop_a_wheel(tiny, tmp_path):
    tiny.source.write_text('#pragma message("C7510: wgmma is serialized")\n' + tiny.source.read_text())
    out, err = tiny(LOAD)
    assert Path(out).exists() and "slow kernels" in err and "C7510" in err
    out = refused(tiny, tmp_path / "lib")
    assert "slow" in out and "C7510" in out


def test_what_counts_as_slow_code():
    quiet = """
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    spilling = quiet.replace("good", "evil").replace("0 bytes spill loads", "48 bytes spill loads")
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert build.slow_code(quiet + spilling.replace("48", "8")) == []
    assert build.slow_code(quiet + spilling + warning) == [
        "_Z4evilv: 0 bytes spill stores, 48 bytes spill loads",
        warning,
    ]


def test_failing_build_means_one_warning_and_the_portable_engine(monkeypatch, caplog):
    def fail(name):
        raise build.BuildError("no luck today")

    monkeypatch.setattr(build, "load", fail)
    monkeypatch.setattr(engines, "ENGINES", ("cpu", "portable"))
    engines.warn_once.cache_clear()
    import torch

    from mok_compile.spec import ExpertsSpec

    spec = ExpertsSpec("silu(gate) * up", "concat", "float32")
    problem = engines.Problem(8, 8, 2, 1, torch.float32, torch.float32, torch.device("cpu"), True)
    with caplog.at_level(logging.WARNING, "mok_compile"):
        choices = {engines.choose(spec, problem).name for _ in range(3)}
    assert choices == {"portable"}
    assert [r.message for r in caplog.records] == [
        "mok-compile: no cpu kernels, the portable engine runs instead: no luck today"
    ]


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_library_imports_only_stable_symbols():
    """From torch only the C shims; nothing of c10, at or torch in C++."""
    path = build.load("cpu")
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1].split("@")[0] for line in lines.splitlines()]
    assert any(s.startswith("torch_") for s in symbols) and any(s.startswith("aoti_torch_") for s in symbols)
    assert not [s for s in symbols if re.match(r"_ZN?K?(\d+|St)?.*(c10|2at|5torch)", s)]
    # Newer shims than 2.10's would make the library unloadable there.
    newer = {"torch_exception_get_what", "torch_exception_get_what_without_backtrace", "torch_new_stable_ivalue"}
    assert not newer & set(symbols)
