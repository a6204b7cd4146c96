"""Low-rank paths beside a projection, as LoRA has them: looked for so that a miss can say so, not to prove anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mok_compile.passes.facts.rules import is_random, same
from mok_compile.passes.graph import record  # noqa: F401  registers the ops
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten
ADAPTER = (
    "beside one projection of the experts there is a path of two, added to it: an adapter, such as LoRA, that is not "
    "merged into the weights"
)
# What may stand before or behind the projections of such a path: nothing that would make an MLP of them.
_SAME = (
    *(aten._to_copy.default, aten.clone.default, torch.ops.mok_loop.dropout.default),
    *(aten.view.default, aten._unsafe_view.default, aten.squeeze.dim, aten.unsqueeze.default, aten.expand.default),
    *(aten.permute.default, aten.transpose.int),
)
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def adapters_in(values: Iterable[Value]) -> Iterator[tuple[Value, Value]]:
    """Sums of one projection of some rows and of two projections of the same rows, one after the other; each with that
    one projection."""
    for value in values:
        if value.op is not aten.add.Tensor:
            continue
        for beside, path in (value.args[:2], value.args[1::-1]):
            one, last = _product(beside), _product(path)
            first = _product(_rows(last))
            if one is None or first is None or same(_width(first), _width(one)):
                continue
            if _bare(_rows(first)) is _bare(_rows(one)):
                yield value, one


def _product(value: Any) -> Value | None:
    """The product that `value` is, but for its scale."""
    value = _bare(value)
    return value if value is not None and (value.op in PRODUCTS or "grouped_mm" in str(value.op)) else None


def _rows(product: Value | None) -> Value | None:
    """What a product is of, besides a weight."""
    return None if product is None else product.args[1 if product.op is aten.addmm.default else 0]


def _bare(value: Any) -> Value | None:
    """`value` without its scale and shape; None for a number."""
    while isinstance(value, Value) and value.op in (*_SAME, *_SCALES):
        by = value.args[1] if value.op in _SCALES else None
        if isinstance(by, Value) and by.meta.shape and not is_random(by):
            break
        value = value.args[0]
    return value if isinstance(value, Value) else None


def _width(product: Value) -> Any:
    return product.meta.shape[-1]
