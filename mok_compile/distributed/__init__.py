"""Expert parallelism: the experts of a block spread over the ranks of a device mesh.

from torch.distributed.tensor.parallel import parallelize_module
from mok_compile.distributed import ExpertParallel, plan

parallelize_module(model, mesh["ep"], plan(model))
"""

from typing import TYPE_CHECKING

from mok_compile._lazy import lazy

if TYPE_CHECKING:
    from mok_compile.distributed.binding import Binding, find_experts
    from mok_compile.distributed.style import ExpertParallel, plan

__getattr__, __dir__ = lazy(
    __name__, {"Binding": "binding", "find_experts": "binding", "ExpertParallel": "style", "plan": "style"}
)

__all__ = ["Binding", "ExpertParallel", "find_experts", "plan"]
