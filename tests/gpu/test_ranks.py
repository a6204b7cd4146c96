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


def spread(script: str, *arguments: str) -> str:
    """What a program says that runs on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(ROOT / script), *arguments], capture_output=True, text=True, env=env, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("flags", [[], ["--compile"]], ids=["eager", "compiled"])
def test_example(flags):
    """Gradients over NCCL are those of one process, and the model learns."""
    assert spread("examples/expert_parallel.py", "--steps", "10", *flags).count("ok ") == 2


@pytest.mark.parametrize("case", ["values", "repeats", "streams", "graphs", "faults"])
def test_peer_memory(case):
    said = spread("tests/gpu/ep_ranks.py", case)
    assert f"ok   {case} (" in said, said
