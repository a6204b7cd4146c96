"""Models of Hugging Face on a GPU: from the backend's name down to the kernels."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import hf
import pytest
import torch
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

import mok_compile
from mok_compile import coverage
from mok_compile.engines import get

pytestmark = pytest.mark.cuda

if reason := get("sm90").usable():
    pytest.skip(f"the sm90 engine does not run here: {reason}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
# Sizes that the kernels take: multiples of 8, heads that attention kernels take too.
SIZES = {"hidden_size": 128, "head_dim": 64, "initializer_range": 0.05}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


# docs/releases.md; https://github.com/pytorch/pytorch/pull/179635
SLICES_BREAK = pytest.mark.xfail(
    torch.__version__ < TorchVersion("2.12"), reason="this release breaks the graph at slices of counts", strict=True
)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "llama4"),
        pytest.param("aria", marks=SLICES_BREAK),
    ],
)
def test_every_setting_is_fused(family):
    """The graphs that a GPU's kernels give rise to, with every fused block compared with what it replaces."""
    row = coverage.measure([family], "cuda")[family]
    assert coverage.complete(row), {name: (str(cell), cell.why) for name, cell in row.items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_training_step(family):
    model, ids = hf.make(family, torch.bfloat16, **SIZES)
    model, ids = model.cuda(), ids.cuda()
    exact, eager = copy.deepcopy(model).cpu().float(), copy.deepcopy(model)
    report = mok_compile.explain(model)(input_ids=ids)
    assert [(site.status, site.engine) for site in report.sites] == [("fused", "sm90")] * 2
    wanted_loss, wanted = hf.step(exact, ids.cpu())
    eager_loss, plain = hf.step(eager, ids)
    loss, found = hf.step(model, ids, torch.compile(model, backend="mok"))
    assert abs(loss.cpu() - wanted_loss) <= 2 * abs(eager_loss.cpu() - wanted_loss) + 1e-2
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        exactly = wanted[name]
        error, theirs = (
            (g.cpu().float() - exactly).norm() / exactly.norm().clamp_min(1e-9) for g in (grad, plain[name])
        )
        assert error <= 2 * theirs + 1e-2, f"{name}: {error:.1e}, eager mode {theirs:.1e}"


def test_generate_under_cuda_graphs():
    folders = [ROOT, ROOT / "tests", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-X", "faulthandler", str(ROOT / "tests/gpu/generate.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_no_memory_is_lost():
    """Steps after the second take what the second took."""
    model, ids = hf.make("qwen3_moe", torch.bfloat16, **SIZES)
    model, ids = model.cuda(), ids.cuda()
    run = torch.compile(model, backend="mok")
    taken = []
    for _ in range(6):
        hf.step(model, ids, run)
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert len(set(taken[1:])) == 1, taken
