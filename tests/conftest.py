"""Every test starts with an empty Dynamo, fixed seeds and zeroed counters."""

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
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
