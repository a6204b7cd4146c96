"""How a ``mok::`` op is defined: with a twin that has no derivative.

Graphs that AOTAutograd has cut apart need none any more, but a Python derivative is asked at every call: a third of an
op's own time on the host. So the pass that runs after partitioning puts the twins there
(`mok_compile.passes.fusing.infer`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import register_flop_formula

# Each op to its twin, ``mok::<name>_no_grad``.
no_grad: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}


def define(library: torch.library.Library, schema: str, kernel: Callable, fake: Callable) -> None:
    """Defines the op of that schema, ``"name(arguments) -> results"``, and its twin, for every device."""
    name, _, rest = schema.partition("(")
    for each in (name, f"{name}_no_grad"):
        library.define(f"{each}({rest}")
        library.impl(each, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mok::{each}", fake, lib=library)
    ops = torch.ops.mok
    no_grad[getattr(ops, name).default] = getattr(ops, f"{name}_no_grad").default


def count_flops(formula: Callable, *ops: torch._ops.OpOverloadPacket) -> None:
    """Tells torch's counter the formula of these ops, and so of their twins."""
    register_flop_formula([each for op in ops for each in (op, no_grad[op.default].overloadpacket)])(formula)
