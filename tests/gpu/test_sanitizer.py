"""compute-sanitizer on small blocks: accesses outside of memory, races in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mok_compile.engines import get

pytestmark = pytest.mark.cuda

if reason := get("sm90").usable():
    pytest.skip(f"the sm90 engine does not run here: {reason}", allow_module_level=True)

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_reported(tool):
    # Without torch's caching every tensor has memory of its own, so that one past its end is seen.
    path = [ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        str(ROOT / "tests/gpu/small_blocks.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout, done.stdout[
        -4000:
    ]
