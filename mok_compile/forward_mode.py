"""Forward-mode derivatives, which the ``mok::`` ops do not have: an error where torch would lose the tangent."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad


def refuse(name: str, arguments: Iterable) -> None:
    """Raises RuntimeError if a tensor, which may be in a list, has a tangent (`torch.func.jvp`, dual tensors).

    To be asked above autograd: below it tensors do not show theirs."""
    if forward_ad._current_level < 0:  # no public question costs as little
        return
    for argument in arguments:
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeError(
                f"{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad). Compile with "
                "options={'mok.enabled': False} where you need it."
            )
