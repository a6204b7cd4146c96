"""Experts that no rule gets hold of, found by what they cannot do without, so that they are named at least.

A product with E rows of a parameter gives logits, top-k (or the largest) picks among these E, and between this choice
and the next one E parameters of one shape, or a stack of E, meet activations in nodes that the choice does not depend
on; somewhere choice and products come together. What a block or a miss has to do with is theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from mok_compile import ops
from mok_compile.passes.view import name_of

_CHOICES = ("topk", "argmax", "max")
_LAYS_OUT = ("_add_batch_dim",)  # torch.func.vmap: the first dimension is still there, but no longer to be seen
_JOINS = ("add", "iadd", "add_", "sub", "isub", "sub_", "cat", "concat")
DETAIL = (
    "one of {experts} experts is chosen here, and {experts} matrices of one shape follow, but no matmul by expert is "
    "proven: the loop over them, its masks or a transform such as torch.func.vmap is spelled in an unknown way"
)


def unclaimed(graph: fx.Graph, claimed: set[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """The choice of each block of experts in `graph` of which no node is `claimed`, and a sentence about it."""
    nodes = list(graph.nodes)
    choices = [(i, node, n) for i, node in enumerate(nodes) if (n := _chosen_from(node)) is not None]
    if not choices:
        return
    weights = _Weights(nodes)
    products = weights.products
    choices = [(i, node, n) for i, node, n in choices if _logits(node, n, products)]
    starts = [0, *(i for i, _, _ in choices)]
    ends = [*(i for i, _, _ in choices[1:]), len(nodes)]
    for (_, choice, experts), start, end in zip(choices, starts, ends, strict=False):
        before = _related(choice, lambda node: node.all_input_nodes)
        near = [n for n in nodes[start:end] if n in products and n not in before]
        found = [node for node in near if any(weights.stack.get(w) == experts for w in products[node])]
        found += _lists(near, products, experts)
        # What a site has to do with: ``w[ids]`` of a product that it begins with is its own too.
        own = [node for node in nodes[start:end] if node in claimed or ops.is_block(node.target)]
        own += [n for node in own for n in _related(node, lambda n: n.all_input_nodes)]
        if not found or not set(own).isdisjoint(near):
            continue
        after = _related(choice, lambda node: node.users)
        if any(_meet(after | {choice}, _related(node, lambda n: n.users) | {node}) for node in found[:1]):
            yield choice, DETAIL.format(experts=experts)


def _meet(after: set[fx.Node], products: set[fx.Node]) -> bool:
    """Whether the nodes that depend on a choice and those that depend on products come together otherwise than as two
    branches, which are added up."""
    both = after & products
    first = [node for node in both if both.isdisjoint(node.all_input_nodes)]
    return any(name_of(node) not in _JOINS for node in first)


class _Weights:
    """What depends on parameters alone: `stack` says of how many matrices such a node is one, `products` which of these
    nodes meet activations at a node."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.stack: dict[fx.Node, int | None] = {}
        self.products: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            shape = _shape(node)
            if node.op in ("placeholder", "get_attr"):
                if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
                    self.stack[node] = shape[0] if len(shape) > 2 else None
                continue
            given = node.all_input_nodes
            mine = [n for n in given if n in self.stack]
            if mine and len(mine) == len(given):
                laid_out = name_of(node) in _LAYS_OUT
                first = _shape(mine[0])[0] if laid_out and _shape(mine[0]) else None
                several = shape is not None and len(shape) > 2  # several tensors have no shape
                self.stack[node] = first if laid_out else shape[0] if several else self.stack[mine[0]]
            elif mine and node.op != "output":
                self.products[node] = mine


def _chosen_from(node: fx.Node) -> int | None:
    """Among how many the indices choose that `node` returns; None if it returns none."""
    if node.op not in ("call_function", "call_method") or name_of(node) not in _CHOICES or not node.args:
        return None
    shape = _shape(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    dims = [*node.args[2 if name_of(node) == "topk" else 1 :], *(v for k, v in node.kwargs.items() if k == "dim")]
    last = (not dims and name_of(node) == "topk") or any(
        d in (-1, len(shape or ()) - 1) for d in dims[:1] if d is not None
    )
    return shape[-1] if shape and last and isinstance(shape[-1], int) and shape[-1] > 1 else None


def _logits(choice: fx.Node, experts: int, products: dict) -> bool:
    """Whether `choice` is among the numbers that a product with a parameter of `experts` rows or columns gives."""
    pending, seen = [choice.args[0]], set()
    while pending:
        node = pending.pop()
        shape = _shape(node)
        if node in seen or not shape or shape[-1] != experts:
            continue
        seen.add(node)
        if any(len(_shape(w) or ()) == 2 and experts in _shape(w) for w in products.get(node, ())):
            return True
        pending += node.all_input_nodes
    return False


def _lists(near: list[fx.Node], products: dict, experts: int) -> list[fx.Node]:
    """The nodes that multiply by one of so many matrices of one shape."""
    by_shape: dict[tuple, dict[fx.Node, fx.Node]] = defaultdict(dict)
    for node in near:
        for weight in products[node]:
            shape = _shape(weight)
            if shape is not None and len(shape) == 2:
                by_shape[tuple(shape)][weight] = node
    return [node for users in by_shape.values() if len(users) >= experts for node in users.values()]


def _related(node: fx.Node, step) -> set[fx.Node]:
    found, pending = set(), [node]
    while pending:
        for other in step(pending.pop()):
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def _shape(node: fx.Node) -> torch.Size | None:
    example = node.meta.get("example_value")
    return example.shape if isinstance(example, torch.Tensor) else None
