"""Expert parallelism over several GPUs; or over one, which ranks can share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mok_compile.engines import get

pytestmark = pytest.mark.cuda

if reason := get("sm90").usable():
    pytest.skip(f"the sm90 engine does not run here: {reason}", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def spread(script: str, *arguments: str, ranks: int = 2) -> str:
    """What a program says that runs on that many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # Else torch refuses ranks that share a GPU, which is how it is tested on fewer GPUs than ranks.
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    env = {**os.environ, **shared, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(ROOT / script), *arguments], capture_output=True, text=True, env=env, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one rank on each")
@pytest.mark.parametrize("flags", [[], ["--compile"]], ids=["eager", "compiled"])
def test_example(flags):
    """Gradients over NCCL are those of one process, and the model learns."""
    assert spread("examples/expert_parallel.py", "--steps", "10", *flags).count("ok ") == 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_peer_memory(ranks):
    cases = ["values", "rings", "graphs", "faults"]
    if ranks <= max(2, torch.cuda.device_count()):  # takes long where ranks share a GPU
        cases += ["repeats", "streams"]
    said = spread("tests/gpu/ep_ranks.py", *cases, ranks=ranks)
    assert all(f"ok   {case} (" in said for case in cases), said
