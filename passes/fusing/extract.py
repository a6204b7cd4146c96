"""The part of a graph that one site consists of, as a graph of its own with what is known of its values.

For dumps only: nothing here runs unless somebody watches.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from mok_compile.passes.blocks.describe import Words, obstacle, role_of, roles, router_words
from mok_compile.passes.blocks.router import find
from mok_compile.passes.blocks.site import Analysis, Block, Miss, module_of
from mok_compile.passes.facts.kinds import Full, Iota
from mok_compile.passes.facts.rules import Break, Facts
from mok_compile.passes.fusing.join import region_of
from mok_compile.passes.graph.view import Cell, Value, View

aten = torch.ops.aten
# Through these a slice looks for the ids that the routing stems from.
_SHAPE_OPS = (
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int),
    *(aten.permute.default, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default),
)


@dataclass(frozen=True, eq=False)
class Slice:
    """One site: a runnable `module`, and by the name of the node its role in the block and its fact in words.

    Where the proof stopped, `broke` names the node, `obstacle` the op there, and `arguments` say of each of its
    arguments: name, what is known, what was expected. `experts` is the number of experts, for random ids.
    """

    module: fx.GraphModule
    roles: dict[str, str]
    facts: dict[str, str]
    experts: int
    broke: str = ""
    obstacle: str = ""
    arguments: tuple[tuple[str, str, str], ...] = ()


class Extraction:
    """Takes the sites of one analysed graph out, before the graph is changed."""

    def __init__(self, gm: fx.GraphModule, found: Analysis) -> None:
        self.gm, self.view, self.facts = gm, found.view, found.facts
        self.words = Words(found.view) if found.view is not None else None
        self._all = {}
        for node in gm.graph.nodes if found.view is not None else ():
            fact = self.words.fact(found.facts.of(found.view.value(node)))
            if fact:
                self._all[node] = fact

    def slice_of(self, site: Block | Miss) -> Slice:
        stop = site if isinstance(site, Miss) else site.open
        region = site.region if stop is None else _around(stop, self.view, self.facts)
        region -= _entries(region, self.view)
        part = roles(region, self.view, self.facts)
        proven = dict(self._all)
        if stop is None:
            part |= dict.fromkeys(self._router(site, proven) - region, "router")
            part |= {user: "use" for user in site.final.users if user.op != "output"}
        context = [*region, *part]
        what, arguments = "", []
        if stop is not None:
            what, arguments = self._obstacle(stop)
        return Slice(
            module=_module(self.gm, region, self.view, site.final if stop is None else stop.at),
            roles={node.name: role for node, role in part.items()},
            facts={node.name: proven[node] for node in context if node in proven}
            | {a.name: proven[a] for n in region for a in n.all_input_nodes if a in proven},
            experts=_experts(site.anchors),
            broke="" if stop is None else stop.at.name,
            obstacle=what,
            arguments=tuple(arguments),
        )

    def _router(self, block: Block, proven: dict[fx.Node, str]) -> set[fx.Node]:
        """The nodes of a block's router. If it is proven, what they are joins what is known of nodes."""
        try:
            router = find(block, self.facts)
        except Break:
            return _towards(block, self.view)
        nodes = region_of(block, router, self.view)
        said = router_words(router)
        proven.update({node: said[value] for node in nodes if (value := self.view.value(node)) in said})
        return set(nodes)

    def _obstacle(self, miss: Miss) -> tuple[str, list[tuple[str, str, str]]]:
        at = next((v for v in self.view.made[miss.at] if v in self.facts.broken), None)
        if at is None:  # the facts held, but the block as a whole is not one that can be replaced
            at = self.view.value(miss.at)
            return "", [(miss.at.name, self.words.fact(self.facts.of(at)) or "nothing is known", "")]
        return obstacle(self.facts.broken[at].at, self.facts, self.words)


def _experts(anchors: tuple[fx.Node, ...]) -> int:
    """The number of experts that a grouped matmul's weight has."""
    for anchor in anchors:
        for arg in anchor.all_input_nodes:
            example = arg.meta.get("example_value")
            if isinstance(example, torch.Tensor) and example.dim() == 3:
                return int(example.shape[0])
    return 1


def _around(miss: Miss, view: View, facts: Facts) -> set[fx.Node]:
    """The nodes of a miss: from where routing and rows come in, to where the proof broke and the module's end."""
    module = module_of(miss.anchors[0])[0]
    end = max(view.positions[node] for node in (*miss.anchors, miss.at))
    behind: set[fx.Node] = set()
    for node in view.positions:
        if node in miss.anchors or any(a in behind for a in node.all_input_nodes):
            inside = module != "" and (module_of(node)[0] + ".").startswith(module + ".")
            if node.op != "output" and (inside or view.positions[node] <= end):
                behind.add(node)
    end = max(view.positions[node] for node in (*behind, miss.at))
    region: set[fx.Node] = set()
    pending = [(node, True) for node in (*behind, miss.at)]
    while pending:
        node, certain = pending.pop()
        if node in region or node.op in ("placeholder", "get_attr") or not (certain or _belongs(node, view, facts)):
            continue
        region.add(node)
        pending += [(arg, False) for arg in node.all_input_nodes]
        for storage in view.storages(node):
            pending += [(w, True) for w in storage.writers if view.positions[w] <= end]
    return region


def _belongs(node: fx.Node, view: View, facts: Facts) -> bool:
    """Whether `node` dispatches tokens, or is on the way from ids, weights or matrices to that."""
    if node not in view.cells:
        return False
    if not isinstance(view.cells[node], Cell):
        return any(role_of(facts.of(value)) == "dispatch" for value in view.made[node])
    value = view.value(node)
    fact = facts.of(value)
    if isinstance(value.op, str):
        return False
    helper = value.op in _SHAPE_OPS or _written_by_rows(node, view, facts)
    return role_of(fact) == "dispatch" or isinstance(fact, (Iota, Full)) or (fact is None and helper)


def _written_by_rows(node: fx.Node, view: View, facts: Facts) -> bool:
    """Whether `node` is memory that a permutation is written into later."""
    cell = view.cells[node]
    return any(facts.of(value) is not None for _, value in cell.history[1:])


def _entries(region: set[fx.Node] | frozenset[fx.Node], view: View) -> set[fx.Node]:
    """Elements of tuples that come from outside: inputs of the slice, so that it has no tuples among them."""
    return {
        node
        for node in region
        if node.target is operator.getitem
        and node.args[0] not in region
        and isinstance(view.cells.get(node.args[0]), (tuple, list))
    }


def _towards(block: Block, view: View) -> set[fx.Node]:
    """The nodes that lead from the block's tokens to its ids and weights."""
    positions, end = view.positions, view.positions[block.final]
    behind: set[fx.Node] = set()
    x = _origin(block.x)
    roots = {node for node, cell in view.cells.items() if isinstance(cell, Cell) and _origin(cell.value) is x}
    for node in positions:
        if node in roots or any(a in behind for a in node.all_input_nodes):
            behind.add(node)
    wanted = {block.ids, block.weights}
    pending = [a for node in block.region for a in node.all_input_nodes if view.value(a) in wanted]
    ahead: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in ahead and positions[node] < end and node.op not in ("placeholder", "get_attr"):
            ahead.add(node)
            pending += node.all_input_nodes
    # Some routers read something else than the experts do: those are known by the name of their module.
    named = {
        node for node in ahead if any(word in module_of(node)[0].rpartition(".")[2] for word in ("router", "gate"))
    }
    return ((ahead & behind) or named) - roots


def _origin(value: Value) -> Value:
    """`value` without changes of shape and dtype."""
    while value.op in _SHAPE_OPS:
        value = value.args[0]
    return value


def _module(
    gm: fx.GraphModule, region: set[fx.Node] | frozenset[fx.Node], view: View, result: fx.Node
) -> fx.GraphModule:
    """The nodes of `region` as a module: what they read from outside comes in, `result` and what is read outside goes
    out. A node that nobody reads (an in-place op) stays inside: an output would be a use of it."""
    inside = sorted(region, key=view.positions.__getitem__)
    graph, env = fx.Graph(), {}
    outer = (a for node in inside for a in node.all_input_nodes if a not in region)
    for node in sorted(dict.fromkeys(outer), key=view.positions.__getitem__):
        body = getattr(gm, node.target, None) if node.op == "get_attr" else None
        if isinstance(body, torch.nn.Module):
            env[node] = graph.node_copy(node)
            continue
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in inside:
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [env[n] for n in inside if n is result or any(user not in region for user in n.users)]
    outputs = [node for node in outputs if isinstance(node.meta.get("example_value"), torch.Tensor)]
    graph.output(tuple(outputs))
    return fx.GraphModule(gm, graph)
