"""Experts that no rule gets hold of, found by what they cannot do without, so that they are named at least.

A product with E rows of a parameter gives logits, top-k (or the largest) picks among these E, and between this choice
and the next one E parameters of one shape, or a stack of E, meet activations in nodes that the choice does not depend
on; somewhere choice and products come together. What a block or a miss has to do with is theirs.

Two ways of sharing tokens out that are no K experts for every token have a reason of their own: experts that choose
their tokens, and places in a buffer for each expert, which a running sum over the tokens gives them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from mok_compile import ops
from mok_compile.passes.blocks.loops import CHOICES
from mok_compile.passes.graph.view import name_of
from mok_compile.spec import dtype_name

_LAYS_OUT = ("_add_batch_dim",)  # torch.func.vmap: the first dimension is still there, but no longer to be seen
_WRITES = ("setitem",)
_MATMULS = ("mm", "matmul", "linear", "einsum")
_JOINS = ("add", "iadd", "add_", "sub", "isub", "sub_", "cat", "concat")
DETAIL = (
    "one of {experts} experts is chosen here, and {experts} matrices of one shape follow, but no matmul by expert is "
    "proven: the loop over them, its masks or a transform such as torch.func.vmap is spelled in an unknown way"
)
REST = (
    "one of {experts} experts is chosen here, of which some alone are proven and fused: what becomes of the others' "
    "outputs is spelled in an unknown way"
)
APART = (
    "one of {experts} experts is chosen here, and this graph ends before the choice and what the experts compute have "
    "come together: the weighted sum is not in it"
)
NARROW = "the products with the matrices of {experts} experts are rounded to {narrow} here, the matrices are {wide}"
EXPERT_CHOICE = (
    "each of {experts} experts chooses its tokens here, where in a block each token chooses its experts: a token may "
    "go to any number of experts, or to none"
)
CAPACITY = (
    "a running sum over the tokens gives each of them a place in the buffer of one of {experts} experts here: with "
    "such a capacity, tokens are left out where a buffer is full"
)


@dataclass(frozen=True)
class Unclaimed:
    """Experts that are named at least: the node to name, a reason code and a sentence; their products with weights."""

    at: fx.Node
    reason: str
    detail: str
    products: tuple[fx.Node, ...] = ()


def unclaimed(graph: fx.Graph, missed: set[fx.Node], fused: set[fx.Node]) -> Iterator[Unclaimed]:
    """The choice of each block of experts in `graph` of which no node is among those of a site that is `missed` or
    `fused`, or of which some experts alone are fused."""
    nodes = list(graph.nodes)
    if all(_chosen(node) is None for node in nodes):
        return
    weights = _Weights(nodes)
    products, readers = weights.products, _readers(nodes)
    choices = [(i, node, made) for i, node in enumerate(nodes) if (made := _choice(node, products)) is not None]
    starts = [0, *(i for i, _, _ in choices)]
    ends = [*(i for i, _, _ in choices[1:]), len(nodes)]
    for (_, choice, (experts, of_tokens)), start, end in zip(choices, starts, ends, strict=False):
        before = _related(choice, lambda node: node.all_input_nodes)
        near = [n for n in nodes[start:end] if n in products and n not in before]
        found = [node for node in near if any(weights.stack.get(w) == experts for w in products[node])]
        found += _lists(near, products, experts)
        unknown = DETAIL
        # What a site has to do with: ``w[ids]`` of a product that it begins with is its own too.
        own = [node for node in nodes[start:end] if node in missed or node in fused or ops.is_block(node.target)]
        if not {n for node in own for n in (node, *_related(node, lambda n: n.all_input_nodes))}.isdisjoint(near):
            found, unknown = _left_over(found, set(own), products, experts) if missed.isdisjoint(own) else [], REST
        if not found:
            continue
        after = _related(choice, readers.__getitem__)
        behind = {one for node in found for one in (node, *_related(node, readers.__getitem__))}
        met = _meeting(after | {choice}, behind)
        if met:
            placed = _placed(nodes[start:end], after, experts)
            reason, detail = ("routing", EXPERT_CHOICE) if of_tokens else ("no-match", unknown)
            rounded = next(_rounded(found, products, set(nodes[start:end])), None)
            if placed is not None:
                reason, detail = "routing", CAPACITY
            elif reason == "no-match" and all(node.op == "output" for node in met):
                reason, detail = "split", APART
            elif reason == "no-match" and rounded is not None:
                narrow, wide = (dtype_name(n.meta["example_value"].dtype) for n in rounded)
                detail = NARROW.format(experts=experts, narrow=narrow, wide=wide)
                yield Unclaimed(rounded[0], "dtype", detail, tuple(found))
                continue
            yield Unclaimed(placed or choice, reason, detail.format(experts=experts), tuple(found))


def placed_behind(choice: fx.Node) -> Unclaimed | None:
    """A running sum that gives tokens places in the buffers of the experts of `choice`, whatever follows."""
    nodes, experts = list(choice.graph.nodes), (_shape(choice.args[0]) or (0,))[-1]
    after = _related(choice, _readers(nodes).__getitem__)
    placed = _placed(nodes, after, experts)
    return None if placed is None else Unclaimed(placed, "routing", CAPACITY.format(experts=experts))


def buffers(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """The running sums of `graph` that give tokens places in the buffers of experts, if experts are what their columns
    stand for: with how many columns."""
    for node in graph.nodes:
        columns = (_shape(node) or (0,))[-1]
        if isinstance(columns, int) and columns > 1 and _places(node, columns):
            yield node, columns


def _placed(nodes: list[fx.Node], after: set[fx.Node], experts: int) -> fx.Node | None:
    return next((node for node in nodes if node in after and _places(node, experts)), None)


def _places(node: fx.Node, experts: int) -> bool:
    """Whether `node` is a running sum of something with as many columns as experts, along the rows."""
    shape = _shape(node)
    if name_of(node) != "cumsum" or shape is None or len(shape) < 2 or not any(_is(n, experts) for n in shape):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return isinstance(dim, int) and not _is(shape[dim], experts)


def _is(size: int | torch.SymInt, number: int | torch.SymInt) -> bool:
    """Whether both are numbers, and the same: to compare a symbol would have Dynamo guard it."""
    return isinstance(size, int) and isinstance(number, int) and size == number


def _readers(nodes: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Who depends on each node at once: its users, and those of a tensor that it has written into before."""
    position = {node: i for i, node in enumerate(nodes)}
    readers = {node: set(node.users) for node in nodes}
    for node in nodes:
        name = name_of(node)
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if node.op in ("call_method", "call_function") and writes and node.args and isinstance(node.args[0], fx.Node):
            readers[node] |= {user for user in node.args[0].users if position[user] > position[node]}
    return readers


def _meeting(after: set[fx.Node], products: set[fx.Node]) -> list[fx.Node]:
    """Where the nodes that depend on a choice and those that depend on products come together, otherwise than as two
    branches, which are added up."""
    both = after & products
    return [node for node in both if both.isdisjoint(node.all_input_nodes) and name_of(node) not in _JOINS]


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


def _chosen(node: fx.Node) -> int | None:
    """The dimension along which `node` chooses by returning indices; None if it does not."""
    if node.op not in ("call_function", "call_method") or name_of(node) not in CHOICES or not node.args:
        return None
    shape = _shape(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    dims = [*node.args[2 if name_of(node) == "topk" else 1 :], *(v for k, v in node.kwargs.items() if k == "dim")]
    dim = dims[0] if dims else -1 if name_of(node) == "topk" else None
    return dim % len(shape) if shape and type(dim) is int else None


def _choice(node: fx.Node, products: dict) -> tuple[int, bool] | None:
    """Among how many experts `node` chooses, or how many there are that choose among tokens, and whether it is that."""
    dim = _chosen(node)
    if dim is None:
        return None
    shape = _shape(node.args[0])
    last = dim == len(shape) - 1
    sizes = [(shape[dim], False)] if last else []
    sizes += [(n, True) for i, n in enumerate(shape) if i != dim and name_of(node) == "topk"]
    several = ((n, tokens) for n, tokens in sizes if isinstance(n, int) and n > 1)
    return next((made for made in several if _logits(node, made[0], products)), None)


def _logits(choice: fx.Node, experts: int, products: dict) -> bool:
    """Whether `choice` is among the numbers that a product with a parameter of `experts` rows or columns gives."""
    pending, seen = [choice.args[0]], set()
    while pending:
        node = pending.pop()
        shape = _shape(node)
        if node in seen or not shape or not any(_is(n, experts) for n in shape[-2:]):
            continue
        seen.add(node)
        if any(len(s := _shape(w) or ()) == 2 and any(_is(n, experts) for n in s) for w in products.get(node, ())):
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


def _left_over(found: list[fx.Node], own: set[fx.Node], products: dict, experts: int) -> list[fx.Node]:
    """Of the products with one matrix for each expert those that are none of a site's `own`, where these are fewer than
    there are experts: the first ones alone, say."""
    left = [node for node in found if node not in own]
    taken = defaultdict(set)
    for node in found:
        for weight in products[node] if node in own else ():
            taken[_shape(weight)].add(weight)
    some = any(0 < len(taken[_shape(weight)]) < experts for node in left for weight in products[node])
    return left if some else []


def _rounded(found: list[fx.Node], products: dict, among: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Of the nodes in `found`, and of the products `among` all of what these have picked out of a stack, those whose
    values are narrower than the matrix that they begin with, as autocast has them; with that matrix."""
    for node in found:
        matrix = products[node][0]
        if _is_narrow(node, matrix):
            yield node, matrix
        pending, seen = [] if _multiplies(node) else [node], {node}
        while pending:
            for user in pending.pop().users:
                if _multiplies(user):
                    yield from [(user, matrix)] if _is_narrow(user, matrix) else []
                elif user not in seen and user in among and not _is_narrow(user, matrix):
                    seen.add(user)
                    pending.append(user)


def _multiplies(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and any(part in name_of(node) for part in _MATMULS)


def _is_narrow(node: fx.Node, matrix: fx.Node) -> bool:
    """Whether the values of `node` are narrower than those of `matrix`."""
    both = [n.meta.get("example_value") for n in (node, matrix)]
    alike = all(isinstance(t, torch.Tensor) and t.dtype.is_floating_point for t in both)
    return alike and both[0].dtype.itemsize < both[1].dtype.itemsize


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
