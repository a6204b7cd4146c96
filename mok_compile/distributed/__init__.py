"""Expert parallelism: the experts of a block spread over the ranks of a device mesh.

from torch.distributed.tensor.parallel import parallelize_module
from mok_compile.distributed import ExpertParallel, plan

parallelize_module(model, mesh["ep"], plan(model))
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok_compile.distributed.binding import Binding, find_experts
    from mok_compile.distributed.style import ExpertParallel, plan

_LAZY = {"Binding": "binding", "find_experts": "binding", "ExpertParallel": "style", "plan": "style"}

__all__ = ["Binding", "ExpertParallel", "find_experts", "plan"]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_LAZY})
