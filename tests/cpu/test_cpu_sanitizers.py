"""The grid with AddressSanitizer and UndefinedBehaviorSanitizer, at every instruction set, AMX emulated."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mok_compile import build

HERE = Path(__file__).parent
FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -DMOK_EMULATE_AMX -DMOK_FIRST_LEVEL=65536"


def runtime(name: str) -> str:
    """Path of one of the compiler's own libraries."""
    command = [build.target("cpu").compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", ["small", "full"])
def test_sanitizers(grid):
    """The small grid takes two minutes with the build; the full one ten: by hand, with -m exhaustive."""
    if reason := build.unavailable("cpu"):
        pytest.skip(reason)
    libraries = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if not all(map(os.path.exists, libraries)):
        pytest.skip("the compiler has no sanitizers")
    env = {**os.environ, "MOK_CXXFLAGS": FLAGS, "PYTHONPATH": str(HERE.parent.parent)}
    env.pop("MOK_CPU_ISA", None)
    # Without the preloaded runtime first: a compiler under a sanitizer is slow.
    make = "from mok_compile import build; build._found('cpu') or build._build('cpu')"
    made = subprocess.run([sys.executable, "-c", make], env=env)
    assert made.returncode == 0
    env |= {"LD_PRELOAD": shlex.join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, str(HERE / "cpu_cases.py"), grid], env=env, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "amx" in done.stdout
