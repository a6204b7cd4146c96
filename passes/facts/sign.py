"""Whether expert numbers can be negative.

The op takes every number outside [0, E) for "no expert". A block that sorts its rows does so for numbers of E and more,
whose rows come last; negative ones would come first and push all other rows to the wrong experts. Numbers that a graph
is given, or that top-k counts, are taken to be none; what arithmetic makes of them is looked at here.
"""

from __future__ import annotations

import math

import torch

from mok_compile.passes.graph.view import Value

aten = torch.ops.aten

_SUBTRACT = {aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor, aten.neg.default,
             aten.bitwise_not.default}  # fmt: skip
_GROW = {aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.mul.Scalar}
_FILL = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.full.default,
         aten.full_like.default, aten.new_full.default}  # fmt: skip
# Ops with a number as operand: where it is negative, so may be the result.
_WITH_NUMBER = {*_GROW, *_FILL, aten.floor_divide.default, aten.div.Tensor_mode, aten.fmod.Scalar, aten.arange.start}
_ROUND = {aten._to_copy.default, aten.floor.default, aten.round.default, aten.trunc.default, aten.ceil.default}
_REMAINDER = {aten.remainder.Scalar, aten.remainder.Tensor}
_CLAMP = {aten.clamp.default, aten.clamp_min.default}
_PICK = {aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.embedding.default}
_NEVER = {aten.abs.default, aten.bincount.default, aten.histc.default}


def may_be_negative(value: Value, num_experts: int) -> bool:
    """Whether one of the whole numbers `value` can be negative though none was that it is computed from.

    With a single expert also whether one can have grown: `histc` over the range [0, 0] counts any number.
    """
    seen: set[Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        op, numbers = value.op, [a for a in (*value.args, *value.kwargs.values()) if isinstance(a, (int, float))]
        narrow = value.meta.dtype == torch.int8 and num_experts > torch.iinfo(torch.int8).max
        if op == "written" or op in _SUBTRACT or narrow or (op in _WITH_NUMBER and any(n < 0 for n in numbers)):
            return True
        if num_experts == 1 and (op in _GROW or (op in _CLAMP | _FILL and any(n > 0 for n in numbers))):
            return True
        folded = op in _REMAINDER and bool(numbers) and numbers[0] > 0
        settled = folded or op in _NEVER or (op in _CLAMP and _low(value) >= 0)
        if value.meta.dtype == torch.bool or (settled and num_experts > 1) or (folded and numbers[0] == 1):
            continue
        # Scores are compared and sorted, not computed with: what top-k makes of them are places.
        computed = op in _ROUND or op in _WITH_NUMBER
        inputs = value.args[:1] if op in _PICK else value.inputs
        pending += [v for v in inputs if computed or not v.meta.dtype.is_floating_point]
    return False


def _low(value: Value) -> float:
    low = value.args[1] if len(value.args) > 1 else value.kwargs.get("min")
    return low if isinstance(low, (int, float)) else -math.inf
