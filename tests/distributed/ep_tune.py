"""Cases of the sweep behind `python -m mok_compile tune`, run on each rank of a group."""

import sys
from types import ModuleType

import torch.distributed as dist

from mok_compile.distributed import sweep, transports
from mok_compile.distributed.collectives import Collectives


class Crooked(Collectives):
    """Collectives whose results depend on their option: from 8 SMs on, of the last rank, by one bit."""

    def supports(self, call, problem):
        return None

    def _bent(self, call):
        return int(call.options.partition("=")[2]) >= 8 and dist.get_rank() == dist.get_world_size() - 1

    def forward(self, operands, call, *, save):
        y, saved = super().forward(operands, call, save=save)
        if self._bent(call):
            y[-1, -1] *= 1 + 2**-7
        return y, saved

    def backward(self, dy, operands, saved, call, needs):
        x, weights, up, down = super().backward(dy, operands, saved, call, needs)
        if self._bent(call):
            down[-1, -1, -1] *= 1 + 2**-7
        return [x, weights, up, down]


def register():
    module = ModuleType("mok_compile.distributed.crooked")
    module.transport = Crooked()
    sys.modules[module.__name__] = module
    transports.TRANSPORTS = ("crooked", "collectives")


def swept(job):
    """The times, and what the bar was told."""
    told = []
    return sweep.sweep(job, lambda *now: told.append(now)), told


def crooked(job):
    """What the sweep over a transport that changes bits says."""
    known = transports.TRANSPORTS
    register()
    try:
        sweep.sweep(job)
    except sweep.Differs as error:
        return str(error)
    finally:
        transports.TRANSPORTS = known
        transports.get.cache_clear()
