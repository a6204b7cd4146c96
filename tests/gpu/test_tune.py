"""`python -m mok_compile tune` on GPUs."""

import pytest
import torch

from mok_compile import cli
from mok_compile.distributed import tuned

pytestmark = pytest.mark.cuda

if torch.cuda.device_count() < 2:
    pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}", allow_module_level=True)


def test_tune(tmp_path, monkeypatch, capsys):
    """The kernels stay where they are: only the file is another one."""
    monkeypatch.setattr(tuned, "path", lambda: tmp_path / "tuned.json")
    arguments = ["256", "128", "8", "2", "--ranks", "2", "--tokens", "64", "1000", "--budget", "2"]
    assert cli.main(["tune", *arguments]) == 0, capsys.readouterr().err
    ((key, best),) = tuned.read().items()
    assert (key.gpu, key.ranks, key.hidden) == (torch.cuda.get_device_name(), 2, 256) and best.tokens == (64, 1000)
    chosen = tuned.best_for(torch.device("cuda", 0), 2, 256, 128, 8, 2, torch.bfloat16)
    assert chosen == best and f"sms={best.sms} backward_sms={best.backward_sms}" in capsys.readouterr().out
    tuned.best_for.cache_clear()
