"""Expert parallelism over several GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
if torch.cuda.device_count() < 2:
    pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}", allow_module_level=True)


@pytest.mark.parametrize("flags", [[], ["--compile"]], ids=["eager", "compiled"])
def test_example(flags):
    """Gradients over NCCL are those of one process, and the model learns."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "expert_parallel.py"), "--steps", "10", *flags]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *example], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 2, done.stdout
