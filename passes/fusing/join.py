"""Takes a proven router into its block's op: ``mok::experts`` becomes ``mok::moe``.

The op runs where the block ends. Whoever reads logits, ids or routing weights after that gets them from the op; where
somebody reads them before, or something on the way between them, the router stays outside.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from mok_compile import routing
from mok_compile.passes.blocks.router import Router, bare, forms
from mok_compile.passes.blocks.site import Block, tensors_of
from mok_compile.passes.facts.rules import Break
from mok_compile.passes.fusing.substitute import Insertion, Substitution, erase_block
from mok_compile.passes.graph.view import Cell, Value, View
from mok_compile.spec import dtype_name


@dataclass(frozen=True, eq=False)
class Joined(Insertion):
    """``mok::moe`` beside the block and the router that it stands for; `region` are the router's nodes."""

    region: frozenset[fx.Node] = frozenset()


def join(substitution: Substitution, insertion: Insertion, router: Router) -> Joined:
    """`insertion` with the router in its op. Break("router" or "mutation") if that cannot be; it is then as before."""
    block, view = insertion.block, substitution.view
    for value in router.operands:
        if value.op is torch.ops.aten._to_copy.default and view.holder(value, block.final) is None:
            dtype = dtype_name(value.meta.dtype)
            raise Break("router", f"what it multiplies is cast to {dtype} inside its product, as autocast does")
    region = region_of(block, router, view)
    read = _read_outside(substitution, insertion, region)
    shapes = {node: _shape(value) for node, value in read.items()}
    outputs = {node: _output(router, value, node) for node, value in read.items()}
    recomputed = any(isinstance(output, int) and output > 0 for output in outputs.values())
    if recomputed and any(n.target is torch.amp.autocast_mode._enter_autocast for n in substitution.graph.nodes):
        raise Break("router", "its scores are read, and the graph switches autocast on or off")
    call = next(n for n in insertion.nodes if n.target is torch.ops.mok.experts.default)
    y = next(iter(call.users))
    with substitution.adding() as new, substitution.graph.inserting_before(y):
        moe, quiet = _call(substitution, block, router, region, call)
        handed = {}
        for node, output in outputs.items():
            given = _emit_output(substitution, block, router, moe, output)
            if shapes[node] is not None:
                given = substitution._emit(block, torch.reshape, given, shapes[node])
            handed[node] = given
    y.replace_input_with(call, moe)
    for node in reversed(insertion.nodes):  # the op for the experts alone, and what made ids and weights fit it
        if not node.users and node is not insertion.result:
            substitution.graph.erase_node(node)
    for node in new:
        substitution._end[node] = view.positions[block.final]
    rest = {*new, *(node for node in insertion.nodes if not node._erased)}
    nodes = tuple(node for node in substitution.graph.nodes if node in rest)
    return Joined(block, nodes, insertion.choice, insertion.problem, handed, quiet, region)


def hand_over(substitution: Substitution, joined: Joined) -> None:
    """Once the block is committed: outsiders read the op's outputs."""
    end, own = substitution.view.positions[joined.block.final], joined.region | joined.block.region
    for old, new in joined.handed.items():
        for user in list(old.users):
            if user not in own and substitution._end[user] > end:
                user.replace_input_with(old, new)


def erase(substitution: Substitution, joined: Joined) -> None:
    """Removes the router's nodes that nobody reads any more, once the block's own are gone."""
    erase_block(substitution.graph, replace(joined.block, region=joined.region), substitution.view)


def region_of(block: Block, router: Router, view: View) -> frozenset[fx.Node]:
    """The nodes between the router's operands and the block."""
    roots = {value for operand in router.operands for value in forms(operand)}
    wanted = (block.ids, *tensors_of(block.weights))
    region: set[fx.Node] = set()
    pending = [
        (arg, view.positions[node])
        for node in block.region
        for arg in node.all_input_nodes
        if arg not in block.region and _held(arg, view, view.positions[node]) in wanted
    ]
    while pending:
        node, position = pending.pop()
        if node in region or node in block.region or node.op in ("placeholder", "get_attr"):
            continue
        if _held(node, view, position) in roots:
            continue
        region.add(node)
        pending += [(arg, view.positions[node]) for arg in node.all_input_nodes]
        for storage in view.storages(node):
            pending += [(w, position) for w in storage.writers if view.positions[w] < position]
    picked = {u for node in region if not isinstance(view.cells.get(node), Cell) for u in node.users}
    return frozenset(region | {node for node in picked if node.target is operator.getitem})


def _held(node: fx.Node, view: View, position: int) -> Value | None:
    cell = view.cells.get(node)
    return cell.value_at(position) if isinstance(cell, Cell) else None


def _read_outside(substitution: Substitution, insertion: Insertion, region: frozenset[fx.Node]) -> dict[fx.Node, Value]:
    """The router's nodes that somebody else reads, and the value that each has then."""
    view, end = substitution.view, substitution.view.positions[insertion.block.final]
    own = region | insertion.block.region | set(insertion.nodes)
    found: dict[fx.Node, Value] = {}
    for node in region:
        for user in node.users:
            if user in own:
                continue
            if "hook" in str(user.target):
                raise Break("router", f"a hook sits on {node.name}, a value inside the router")
            if substitution._end[user] <= end:
                raise Break("router", f"{node.name} is read by {user.name}, before the block ends")
            value = _held(node, view, substitution._end[user])
            if value is None or found.setdefault(node, value) is not value:
                raise Break("router", f"{node.name}, a value inside the router, is read outside of it")
        if node in found and any(view.positions[w] > end for s in view.storages(node) for w in s.writers):
            raise Break("router", f"{node.name}, a value inside the router, is written later")
    return found


def _output(router: Router, value: Value, node: fx.Node) -> str | int:
    """Which output of the op `value` is: "ids", "weights", or the logits after so many steps."""
    flat = bare(value)
    if flat is router.ids:
        return "ids"
    if flat is router.weights:
        return "weights"
    if flat in router.scores:
        return router.scores.index(flat)
    raise Break("router", f"{node.name}, a value inside the router, is read outside of it")


def _shape(value: Value) -> tuple[int, ...] | None:
    """The shape to give an output [rows, n] so that it looks like `value`; None if it does already."""
    shape = value.meta.shape
    if len(shape) == 2 and value is bare(value):
        return None
    if sum(not isinstance(n, int) for n in shape) > 1:
        raise Break("router", "a value inside the router is read in a shape with two symbolic sizes")
    return tuple(n if isinstance(n, int) else -1 for n in shape)


def _call(
    substitution: Substitution, block: Block, router: Router, region: frozenset[fx.Node], experts: fx.Node
) -> tuple[fx.Node, frozenset[fx.Node]]:
    """The call of ``mok::moe`` that takes the place of `experts`, and the old nodes that the router alone reads."""
    emit = substitution._emit
    router_x, held = _operand(substitution, block, router.x, region)
    own = [router_x]
    router_x = substitution._kept(block, router_x)
    if len(held.meta.shape) != 2 or held is not router.x:
        router_x = emit(block, torch.reshape, router_x, (-1, router.x.meta.shape[-1]))
    others = []
    for value in (router.weight, router.bias, router.correction, router.expert_scale):
        node = None if value is None else _operand(substitution, block, value, region)[0]
        own += [] if node is None else [node]
        others.append(None if node is None else substitution._kept(block, node))
    weight, bias, correction, scale = others
    if router.transposed:
        weight = emit(block, torch.transpose, weight, 0, 1)
    hidden, _, _, *lists, spec, engine = experts.args
    operands = (hidden, router_x, weight, bias, correction, scale)
    moe = emit(block, torch.ops.mok.moe.default, *operands, *lists, router.spec.to_json(), spec, engine)
    return moe, frozenset(own) - set(experts.all_input_nodes)


def _operand(
    substitution: Substitution, block: Block, value: Value, region: frozenset[fx.Node]
) -> tuple[fx.Node, Value]:
    """The node to read `value` from, if need be in another shape, and what it holds: the one that the router itself
    reads, if that still holds it when the block ends."""
    view, wanted = substitution.view, forms(value)
    position = view.positions[block.final]
    read = {arg for node in region for arg in node.all_input_nodes if arg not in region}
    for node in sorted(read, key=view.positions.__getitem__):
        held = _held(node, view, position)
        if held in wanted:
            return node, held
    for held in wanted:
        if view.holder(held, block.final) is not None:
            return substitution._operand(block, held), held
    raise Break("mutation", "an input of the router is overwritten in place before the block ends")


def _emit_output(substitution: Substitution, block: Block, router: Router, moe: fx.Node, which: str | int) -> fx.Node:
    """One of the op's outputs; the logits go on through as many steps as are wanted."""
    index = {"weights": 2, "ids": 3}.get(which, 1)
    node = substitution._emit(block, operator.getitem, moe, index)
    for step in router.spec.scores[: which if isinstance(which, int) else 0]:
        function, args, kwargs = routing.call_of(step)
        node = substitution._emit(block, function, node, *args, **kwargs)
    return node
