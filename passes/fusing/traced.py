"""Blocks that are the op already when the graph arrives, because Dynamo traced a Python loop over experts as one call.

Nothing of their experts is left to prove. Their router is, as that of any block.
"""

from __future__ import annotations

import operator

from torch import fx

from mok_compile.passes.blocks.site import Block
from mok_compile.passes.facts.kinds import Weight
from mok_compile.passes.graph.view import Value, View
from mok_compile.spec import ExpertsSpec

# In the `meta` of a call of ``mok::experts`` that stands for a loop.
MARK = "mok_loop"
# There too, of a call that gives the rows of each slot, for more than a sum to become of them: what that is.
OPEN = "mok_open"
# There too: the largest error that ``mok.verify`` found beside the loop.
VERIFIED = "mok_verified"


def is_traced(node: fx.Node) -> bool:
    """Whether `node` is the call of ``mok::experts`` that a loop was traced as."""
    return MARK in node.meta


def block_of(call: fx.Node, view: View) -> Block | None:
    """The block that `call` is; None if its result is not used, or its operands are not plain tensors."""
    result = next((user for user in call.users if user.target is operator.getitem and user.args[1] == 0), None)
    x, ids, weights, *lists, spec, _ = call.args
    values = [view.value(node) for node in (x, ids, weights, *(node for nodes in lists for node in nodes))]
    if result is None or any(value is None for value in values):
        return None
    operands, banks = values[:3], values[3:]
    up, down, up_bias, down_bias = (tuple(banks.pop(0) for _ in nodes) for nodes in lists)
    spec = ExpertsSpec.from_json(spec)
    parts = 2 if spec.layout == "separate" else 1
    return Block(
        final=result,
        anchors=(call,),
        region=frozenset({call, *call.users}),
        spec=spec,
        k=call.args[1].meta["example_value"].shape[1],
        x=operands[0],
        ids=operands[1],
        weights=operands[2],
        up=tuple(Weight(matrices, False) for matrices in _split(up, parts)),
        down=Weight(_split(down, 1)[0], False),
        up_bias=_split(up_bias, parts) if up_bias else (),
        down_bias=_split(down_bias, 1)[0] if down_bias else None,
        base=None,
    )


def _split(tensors: tuple[Value, ...], parts: int) -> tuple[Value | tuple[Value, ...], ...]:
    """`tensors` in as many parts: one for all experts, or one for each expert."""
    count = len(tensors) // parts
    found = [tensors[i * count : (i + 1) * count] for i in range(parts)]
    stacked = count == 1 and len(tensors[0].meta.shape) == 3
    return tuple(part[0] if stacked else part for part in found)
