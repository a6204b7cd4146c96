"""Without its kernels the engine passes blocks on to the portable one, and comparing the two would show nothing."""

import pytest

from mok_compile import build
from mok_compile.engines import get


@pytest.fixture(scope="session", autouse=True)
def kernels():
    if get("sm90").usable() is None:
        reason = build.failure("sm90")
        assert reason is None, reason
