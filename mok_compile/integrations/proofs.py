"""One proof for all blocks of one make, while one compile lasts.

Nothing but Dynamo runs meanwhile, so that code, which no description holds, stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.loops.likeness import describe
from mok_compile.passes.loops.reach import Reach

_KEPT = 4  # makes of blocks with one loop: a model hardly has more in a row


@dataclass(frozen=True, eq=False)
class _Known:
    reach: Reach
    told: list
    outcome: Any  # what was proven, or the Break


_known: dict[Any, list[_Known]] = {}


def watch() -> None:
    """Forgets all proofs at the end of each compile."""
    from torch._dynamo.callback import callback_handler

    if _forget not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_forget)


def _forget(*_) -> None:
    _known.clear()


def proven(cut: Any, owner: torch.nn.Module, live: tuple, prove: Callable[[Reach], Any]) -> tuple[Any, Reach]:
    """What `prove(reach)` returns for the loop of `cut` in `owner`, or has returned for another module that is alike;
    and what that depends on. Break as `prove` raises it. `live`: what else the proof depends on."""
    found = _known.setdefault(cut, [])
    known = next((k for k in reversed(found) if describe(owner, k.reach, live) == k.told), None)
    if known is None:
        reach = Reach(owner, cut.probe)
        told = describe(owner, reach, live)
        try:
            outcome = prove(reach)
        except Break as stop:
            outcome = stop
        known = _Known(reach, told, outcome)
        found.append(known)
        del found[:-_KEPT]
    if isinstance(known.outcome, Break):
        raise Break(known.outcome.reason, known.outcome.detail)
    return known.outcome, known.reach
