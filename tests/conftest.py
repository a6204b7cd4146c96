"""Every test starts with an empty Dynamo, fixed seeds and zeroed counters, and leaves torch's modes as they were."""

from pathlib import Path

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def fresh(request):
    """Tests in this folder itself run tiny models, for which a second thread is a loss."""
    threads = torch.get_num_threads()
    if request.path.parent == Path(__file__).parent:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = modes()
    yield
    after = modes()
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    assert after == before, "the test, or what it tested, left a mode of torch switched"
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def modes() -> dict[str, object]:
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
