"""Masks that a loop over experts gets ready-made: zeros and ones, and for each slot at most one expert.

The loop itself cannot tell; the graph that Dynamo has traced up to there can: a one-hot of expert numbers, from which
others are struck out for want of capacity, say. It can tell too that no two of a token's expert numbers are alike.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from mok_compile.passes.facts.kinds import Iota
from mok_compile.passes.facts.rules import Facts, same
from mok_compile.passes.graph.view import Value, name_of, view_of, writes_unseen

aten = torch.ops.aten


def is_one_hot(node: fx.Node) -> bool:
    """Whether the tensor of `node`, integers or booleans, is known to hold zeros, and at most one 1 in each row of its
    last dimension."""
    if not _is_number(node) or len(_example(node).shape) < 2:
        return False
    nodes = _behind(node)
    if node not in nodes:  # one of several results
        return False
    if _written(nodes):  # only what leads here is looked at
        return False
    view, env = view_of(node, nodes)
    return _single(view.value(env[node]), Facts(view.values))


def is_distinct(node: fx.Node) -> bool:
    """Whether no two integers in a row of the last dimension are known to be alike: the places of top-k."""
    while name_of(node) in _KEEPS_ROWS and _is_number(node) and not _written({node}):
        before, width = node.args[0], _example(node).shape[-1:]
        if not isinstance(before, fx.Node) or _example(before) is None or not width:
            return False
        if not _example(before).dim() or not same(_example(before).shape[-1], width[0]):
            return False
        node = before
    if not _is_number(node) or node.target is not operator.getitem or node.args[1] != 1 or _written({node}):
        return False
    choice = node.args[0]
    dim = choice.args[2] if len(choice.args) > 2 else choice.kwargs.get("dim", -1)
    return name_of(choice) == "topk" and dim in (-1, len(_example(node).shape) - 1)


def is_blank(node: fx.Node) -> bool:
    """Whether the tensor of `node` holds zeros, or nothing yet, and nobody has read it or written into it."""
    names = ("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros")
    made = node.op in ("call_function", "call_method") and "out" not in node.kwargs
    return made and name_of(node) in names and not node.users


def _written(nodes: set[fx.Node]) -> bool:
    """Whether something may have been written in place into the memory of `nodes`."""
    memory = {_memory(n) for n in nodes}
    graph = next(iter(nodes)).graph
    sharing = (n for n in graph.nodes if _is_number(n) and _memory(n) in memory)
    return any(_example(n).is_inference() or _example(n)._version or any(map(writes_unseen, n.users)) for n in sharing)


def _example(node: fx.Node) -> torch.Tensor | None:
    example = node.meta.get("example_value")
    return example if isinstance(example, torch.Tensor) else None


def _memory(node: fx.Node) -> int:
    return _example(node).untyped_storage()._cdata


def _is_number(node: fx.Node) -> bool:
    example = _example(node)
    plain = node.op in ("call_function", "call_method") and type(example) is FakeTensor
    return plain and not example.dtype.is_floating_point and not example.dtype.is_complex


def _behind(node: fx.Node) -> set[fx.Node]:
    """The nodes that `node` is computed from, as far as these are integers and booleans."""
    found, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node not in found and _is_number(node) and all(_example(a) is not None for a in node.all_input_nodes):
            found.add(node)
            pending += node.all_input_nodes
    return found


def _single(value: Value | None, facts: Facts) -> bool:
    """Zeros, and at most one 1 in each row of the last dimension."""
    if not isinstance(value, Value) or isinstance(value.op, str):
        return False
    args, shape = value.args, value.meta.shape
    if value.op is aten.eq.Tensor:
        ids, experts = args
        counted = isinstance(facts.of(experts), Iota) and len(experts.meta.shape) == 1
        return counted and same(ids.meta.shape[-1], 1) and same(experts.meta.shape[0], shape[-1])
    if value.op in (aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default):
        return any(
            _single(a, facts)
            and _binary(b, facts)
            and len(a.meta.shape) == len(shape)
            and same(a.meta.shape[-1], shape[-1])
            for a, b in (args, args[::-1])
        )
    if value.op in _SHAPES:
        return same(shape[-1], args[0].meta.shape[-1]) and _single(args[0], facts)
    return value.op in _COPIES and _single(args[0], facts)


def _binary(value: Value, facts: Facts) -> bool:
    """Zeros and ones."""
    if not isinstance(value, Value):
        return False
    if value.meta.dtype == torch.bool:
        return True
    if value.op is aten.mul.Tensor:
        return all(_binary(a, facts) for a in value.args)
    return (value.op in (*_COPIES, *_SHAPES) and _binary(value.args[0], facts)) or _single(value, facts)


_KEEPS_ROWS = ("reshape", "view", "contiguous", "flatten")
_COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)
_SHAPES = (aten.view.default, aten._unsafe_view.default)
