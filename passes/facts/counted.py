"""What counts add up to that a loop over experts gets ready-made.

A loop that goes through sorted rows by counts reaches the last row, and no further, only if they count all rows. It
cannot tell itself; the graph that Dynamo has traced up to there can: it holds what was counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mok_compile.passes.facts.kinds import EXPERT, Full, Hits
from mok_compile.passes.facts.masks import distinct
from mok_compile.passes.facts.rules import COUNT_DTYPES, Facts, counted_experts, dim_of, is_choice, root_of, same
from mok_compile.passes.graph.view import Cell, Value, view_of, writes_unseen

aten = torch.ops.aten


def added_up(node: fx.Node) -> int | torch.SymInt | None:
    """What the numbers in the tensor of `node` add up to, if they are whole and none is negative: as many as there are
    expert numbers of which each was counted once. None if that is not known."""
    nodes = _behind(node)
    # What a higher-order op writes into is not seen from here.
    if node not in nodes or any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in nodes):
        return None
    view, env = view_of(node, nodes)
    cell = view.cells.get(env[node])
    if not isinstance(cell, Cell):
        return None
    facts = Facts(view.values)
    one_hots = [view.value(env[n]) for n in nodes if n.target is F.one_hot]
    checked = {facts.of(v).ids: v.meta.shape[-1] for v in one_hots if isinstance(facts.of(v), Hits)}
    return _Sums(facts, checked).of(cell.value)


def _behind(node: fx.Node) -> set[fx.Node]:
    """The nodes that `node` is computed from, as far as these are whole numbers, and all that may write into them."""
    whole = _whole_numbers(node.graph)
    touching: dict[int, list[fx.Node]] = {}
    written = set()
    for other in node.graph.nodes:
        for tensor in _tensors(other):
            memory = tensor.untyped_storage()._cdata
            touching.setdefault(memory, []).extend((other, *other.users))
            if tensor.is_inference() or tensor._version or any(map(writes_unseen, other.users)):
                written.add(memory)
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if node in found or node.op not in ("call_function", "call_method"):
            continue
        found.add(node)
        pending += [n for n in node.all_input_nodes if n in whole]
        for memory in {tensor.untyped_storage()._cdata for tensor in _tensors(node)} & written:
            pending += touching[memory]
    return found


def _whole_numbers(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that hold integers or booleans, or floats that are computed from nothing else."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tensors = list(_tensors(node))
        if node.op not in ("call_function", "call_method") or not tensors:
            continue
        inputs = [n for n in node.all_input_nodes if list(_tensors(n))]
        floating = all(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)
        if not floating or all(n in found for n in inputs):
            found.add(node)
    return found


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(node.meta.get("example_value"))
    return (leaf for leaf in leaves if type(leaf) is FakeTensor and leaf.layout is torch.strided)


class _Sums:
    """Sums of all entries of a tensor. `checked`: expert numbers that are below a number, or eager fails."""

    def __init__(self, facts: Facts, checked: dict[Value, int | torch.SymInt]) -> None:
        self._facts, self._checked = facts, checked

    def of(self, value: Value) -> int | torch.SymInt | None:
        counted = self._entries(value)
        if counted is not None:
            return counted
        exact = value.meta.dtype in COUNT_DTYPES
        return self.of(value.args[0]) if exact and (value.op in _SUMS or value.op in _MOVES) else None

    def _entries(self, value: Value) -> int | torch.SymInt | None:
        """The number of entries that `value` counts, or marks with ones."""
        hits = self._facts.of(value)
        if isinstance(hits, Hits) and not (hits.negated or hits.reduced) and hits.axes.count(EXPERT) == 1:
            sizes = list(value.meta.shape)
            experts = sizes.pop(hits.axes.index(EXPERT))
            return math.prod(sizes) if self._of_experts(hits.ids, experts) else None
        if value.kwargs:
            return None
        if value.op is aten.bincount.default:
            counted, weights, *_ = (*value.args, None)
            return _numel(counted) if weights is None else None
        if value.op is aten.histc.default:
            counted, bins, low, high = (*value.args, *(100, 0, 0)[len(value.args) - 1 :])
            ids = counted_experts(self._facts, counted)
            whole = low == 0 and high in (bins - 1, bins) and ids is not None and self._of_experts(ids, bins)
            return _numel(counted) if whole else None
        if value.op in (aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.index_add.default):
            base, dim, index, ones = value.args
            adds = value.op in (aten.scatter_add.default, aten.index_add.default)
            each_once = value.meta.dtype in COUNT_DTYPES if adds else _distinct(index, dim)
            one = ones == 1 if isinstance(ones, (int, float)) else self._facts.of(ones) == Full(1.0)
            flat = value.op is not aten.index_add.default or len(base.meta.shape) == 1
            marked = self._facts.of(base) == Full(0.0) and one and each_once and flat
            return _numel(index) if marked else None
        return None

    def _of_experts(self, ids: Value, experts: int | torch.SymInt) -> bool:
        return same(self._checked.get(ids), experts) or is_choice(ids, experts)


def _distinct(ids: Value, dim: int) -> bool:
    """Whether no two numbers along `dim` are alike: top-k's own, or a single one."""
    shape, dim, root = ids.meta.shape, dim_of(ids, dim), root_of(ids)
    in_rows = dim == len(shape) - 1 and same(shape[-1], root.meta.shape[-1])
    return same(shape[dim], 1) or (in_rows and distinct(root))


def _numel(value: Value) -> int | torch.SymInt:
    return math.prod(value.meta.shape)


_SUMS = (aten.sum.default, aten.sum.dim_IntList)
# What keeps all entries, in any order.
_MOVES = (
    *(aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default),
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.squeeze.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.flip.default),
    aten.roll.default,
)  # fmt: skip
