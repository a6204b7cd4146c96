"""Puts the fused op in the place of a proven block.

All or nothing, in the Dynamo graph, before AOTAutograd. Operands are read just before the block's last node, so all
that the block read must still hold the same value there. For each block: `insert` the op beside the old nodes (which
`verify` can then compare), `commit` to hand the users over or `withdraw`; at the end `erase` what is left unused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._pytree import tree_iter

from mok_compile import engines
from mok_compile.engines import Choice, Problem
from mok_compile.ops import IDS
from mok_compile.passes.blocks.site import Block, tensors_of
from mok_compile.passes.facts.kinds import FromTable, Weight
from mok_compile.passes.facts.rules import Break, same
from mok_compile.passes.graph.view import Cell, Value, View, target_of
from mok_compile.spec import dtype_name

aten = torch.ops.aten
_INDICES = (aten.topk.default, aten.sort.default, aten.sort.stable)  # their second result counts from 0


@dataclass(frozen=True, eq=False)
class Insertion:
    """The fused op beside the block it stands for: all new nodes, the last of which is the result."""

    block: Block
    nodes: tuple[fx.Node, ...]
    choice: Choice
    problem: Problem
    handed: dict[fx.Node, fx.Node] = field(default_factory=dict)  # further results that others read -> their new node
    quiet: frozenset[fx.Node] = frozenset()  # operands whose gradient can cancel, down to nothing but rounding

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def table(self) -> tuple[fx.Node, fx.Node] | None:
        """The table that the routing weights are taken from and the ids to take them by; None if there is none."""
        for node in self.nodes:
            if node.target is torch.gather:
                table = node.args[0]
                while table in self.nodes:  # in another shape
                    table = table.args[0]
                return table, node.args[2]
        return None

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes of the old graph that the op reads."""
        return list(dict.fromkeys(a for node in self.nodes for a in node.all_input_nodes if a not in self.nodes))


class Substitution:
    """The replacement of the blocks of one graph."""

    def __init__(self, graph: fx.Graph, view: View, engine: str) -> None:
        self.graph, self.view, self.engine = graph, view, engine
        self._end: dict[fx.Node, int] = dict(view.positions)
        self._committed: list[Block] = []

    def insert(self, block: Block) -> Insertion:
        """Adds the op for `block` just before its last node. Break("mutation") where operands are overwritten."""
        self._check_result(block)
        with self.adding() as nodes, self.graph.inserting_before(block.final):
            choice, problem = self._call(block)
        return self._inserted(block, nodes, choice, problem)

    def repeat(self, block: Block, call: fx.Node) -> Insertion:
        """Adds ``mok::experts`` once more for a block that is this `call` of it."""
        *_, spec, _ = call.args
        x, ids, weights, _, down = (fx.node.map_arg(operand, _fake) for operand in call.args[:5])
        problem = Problem.of(x, ids, weights, down)
        choice = engines.choose(block.spec, problem, self.engine)
        with self.adding() as nodes, self.graph.inserting_before(block.final):
            again = self._emit(block, call.target, *call.args[:-2], spec, choice.name)
            self._emit(block, operator.getitem, again, 0)
        return self._inserted(block, nodes, choice, problem)

    def _inserted(self, block: Block, nodes: list[fx.Node], choice: Choice, problem: Problem) -> Insertion:
        self._end |= dict.fromkeys(nodes, self.view.positions[block.final])
        return Insertion(block, tuple(nodes), choice, problem)

    @contextlib.contextmanager
    def adding(self) -> Iterator[list[fx.Node]]:
        """Afterwards the list holds the nodes that were added to the graph; if anything was raised, they are gone."""
        before, nodes = set(self.graph.nodes), []
        try:
            yield nodes
        except Exception:
            for node in reversed([node for node in self.graph.nodes if node not in before]):
                self.graph.erase_node(node)
            raise
        nodes += [node for node in self.graph.nodes if node not in before]

    def commit(self, insertion: Insertion) -> None:
        """From here on the op's result is what every node stood for that returned the block's result object."""
        final = insertion.block.final
        cell, end = self.view.cells[target_of(final)], self.view.positions[final]
        for node in [node for node, other in self.view.cells.items() if other is cell]:
            for user in list(node.users):
                if self._end[user] > end:
                    user.replace_input_with(node, insertion.result)
        self._committed.append(insertion.block)

    def withdraw(self, insertion: Insertion) -> None:
        """Takes the op out again."""
        for node in reversed(insertion.nodes):
            self.graph.erase_node(node)

    def erase(self) -> None:
        """Removes what the committed blocks leave unused, in-place ops on their own values included."""
        for block in self._committed:
            erase_block(self.graph, block, self.view)

    def _check_result(self, block: Block) -> None:
        cell, end = self.view.cells[target_of(block.final)], self.view.positions[block.final]
        for node, other in self.view.cells.items():
            if not isinstance(other, Cell) or other.storage is not cell.storage or self.view.positions[node] > end:
                continue
            outlives = other is not cell and any(self.view.positions[user] > end for user in node.users)
            if node.op == "placeholder" or outlives:
                raise Break("mutation", f"the result is written into memory that {node.name} shares")

    def _call(self, block: Block) -> tuple[Choice, Problem]:
        given = x = self._kept(block, self._operand(block, block.x))
        down = self._weights(block, block.down)
        if _fake(x).dtype != _fake(down[0]).dtype:
            x = self._emit(block, torch.Tensor.to, x, _fake(down[0]).dtype)
        if _fake(x).dim() != 2:
            flat = self._flat(block) if x is given else None
            x = self._emit(block, torch.flatten, x, 0, -2) if flat is None else self._kept(block, flat)
        ids = self._per_slot(block, block.ids)
        if block.perm is not None:
            ids = self._emit(block, operator.getitem, ids, self._operand(block, block.perm))
        if _fake(ids).dtype not in IDS:
            ids = self._emit(block, torch.Tensor.to, ids, torch.int64)
        if self._counts_from_the_end(block):
            ids = self._emit(block, torch.remainder, ids, block.down.shape[0])
        if block.weights is None:
            weights = self._emit(block, torch.ones_like, ids, dtype=_fake(x).dtype)
        elif isinstance(block.weights, FromTable):
            weights = self._from_table(block, block.weights, ids)
        else:
            weights = self._per_slot(block, block.weights)
        lists = (
            [node for w in block.up for node in self._weights(block, w)],
            down,
            [self._kept(block, self._operand(block, b)) for bias in block.up_bias for b in tensors_of(bias)],
            [self._kept(block, self._operand(block, b)) for b in tensors_of(block.down_bias)],
        )
        problem = Problem.of(_fake(x), _fake(ids), _fake(weights), [_fake(node) for node in down])
        choice = engines.choose(block.spec, problem, self.engine)
        call = self._emit(
            block, torch.ops.mok.experts.default, x, ids, weights, *lists, block.spec.to_json(), choice.name
        )
        result = self._describe(block, self.graph.call_function(operator.getitem, (call, 0)))
        result.meta["example_value"] = _fake(call)[0]
        if given is not x and _fake(given).dim() == len(self.view.value(block.final).meta.shape) != 2:
            result = self._emit(block, torch.Tensor.view_as, result, given)
        result.meta["example_value"] = _fake(target_of(block.final))
        if block.base is not None:
            base = self._operand(block, block.base)
            self._describe(block, self.graph.call_function(torch.add, (base, result)), target_of(block.final))
        return choice, problem

    def _counts_from_the_end(self, block: Block) -> bool:
        """Whether expert numbers may be negative and mean experts: where they index the weights, as in Python."""
        indexes = any(v.op is aten.bmm.default for anchor in block.anchors for v in self.view.made[anchor])
        return indexes and not (block.ids.op in _INDICES and block.ids.index == 1)

    def _operand(self, block: Block, value: Value) -> fx.Node:
        """The node to read `value` from at the block's end: the one that the block itself reads, if it still can."""
        position = self.view.positions[block.final]
        read = (a for node in block.region for a in node.all_input_nodes if a not in block.region)
        for node in sorted(read, key=self.view.positions.__getitem__):
            cell = self.view.cells.get(node)
            if isinstance(cell, Cell) and cell.value_at(position) is value:
                return node
        node = self.view.holder(value, block.final)
        while node is None and value.op is aten.alias.default and not value.detached:  # ``w.t()`` that `linear` turns
            value = value.args[0]
            node = self.view.holder(value, block.final)
        if node is None and value.op is aten._to_copy.default and not self._was_held(value):
            dtype = dtype_name(value.meta.dtype)
            raise Break("dtype", f"an input of the block is cast to {dtype} inside a product, as autocast does")
        if node is None:
            raise Break("mutation", "an input of the block is overwritten in place before the block ends")
        return node

    def _was_held(self, value: Value) -> bool:
        """Whether a tensor of the program ever held `value`, which may also have come to be inside of an op."""
        cells = (cell for held in self.view.cells.values() for cell in tree_iter(held) if isinstance(cell, Cell))
        return any(other is value for cell in cells for _, other in cell.history)

    def _flat(self, block: Block) -> fx.Node | None:
        """The node of the block that holds its tokens as [T, H] and that others read too, its router for one: gradients
        then meet there, as they did."""
        position = self.view.positions[block.final]
        for node in sorted(block.region, key=self.view.positions.__getitem__):
            cell = self.view.cells.get(node)
            value = cell.value_at(position) if isinstance(cell, Cell) and set(node.users) - block.region else None
            flattened = value is not None and value.op is aten.view.default and value.args[0] is block.x
            shape = value.meta.shape if flattened and not value.detached else ()
            if len(shape) == 2 and same(shape[1], block.x.meta.shape[-1]):
                return node
        return None

    def _kept(self, block: Block, node: fx.Node) -> fx.Node:
        """`node`, or a copy of it where it is written later on: the op's backward pass reads it again."""
        return self._emit(block, torch.clone, node) if self._is_overwritten(block, node) else node

    def _is_overwritten(self, block: Block, node: fx.Node) -> bool:
        """Whether `node` is written after the block, and the op's backward pass would read it again."""
        end = self.view.positions[block.final]
        written = any(self.view.positions[w] > end for s in self.view.storages(node) for w in s.writers)
        return written and torch.is_grad_enabled()

    def _weights(self, block: Block, weight: Weight) -> list[fx.Node]:
        """A weight as the op wants it: one [E, out, in], or E of [out, in]. They are too large to be copied."""
        nodes = [self._operand(block, tensor) for tensor in weight.tensors]
        if any(self._is_overwritten(block, node) for node in nodes):
            raise Break("mutation", "the experts' weights are written in place after the block")
        return [self._emit(block, torch.transpose, n, -2, -1) for n in nodes] if weight.transposed else nodes

    def _from_table(self, block: Block, weights: FromTable, ids: fx.Node) -> fx.Node:
        """The routing weights [T, K] that stand in a table at the experts of each token."""
        node = self._operand(block, weights.table)
        if weights.dim != -1:
            node = self._emit(block, torch.movedim, node, weights.dim, -1)
        if len(weights.table.meta.shape) != 2:
            node = self._emit(block, torch.flatten, node, 0, -2)
        if _fake(ids).dtype != torch.int64:
            ids = self._emit(block, torch.Tensor.to, ids, torch.int64)
        return self._emit(block, torch.gather, node, 1, ids)

    def _per_slot(self, block: Block, value: Value) -> fx.Node:
        """Ids or routing weights as [T, K], from the most original value that is still held."""
        while value.op in (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default):
            if value.detached or self.view.holder(value.args[0], block.final) is None:
                break
            value = value.args[0]
        node, shape = self._kept(block, self._operand(block, value)), value.meta.shape
        if len(shape) == 2 and same(shape[1], block.k):
            return node
        return self._emit(block, torch.reshape, node, (-1, block.k))

    def _emit(self, block: Block, target: Callable, *args, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), _fake)
        with torch.no_grad():
            node.meta["example_value"] = target(*fake_args, **fake_kwargs)
        return self._describe(block, node)

    def _describe(self, block: Block, node: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """Gives `node` the metadata that Dynamo's own nodes carry."""
        if like is not None:
            node.meta["example_value"] = like.meta["example_value"]
        source = next(iter(block.anchors), block.final)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in source.meta:
                node.meta[key] = source.meta[key]
        return node


def _fake(node: fx.Node) -> torch.Tensor:
    return node.meta["example_value"]


def erase_block(graph: fx.Graph, block: Block, view: View) -> None:
    """Removes the nodes of a block that nothing outside needs; an in-place op is needed with what it writes into,
    which may be memory that only starts outside: a view of a buffer."""
    region = frozenset(node for node in block.region if not node._erased)  # by a block that this one builds upon
    result = set(view.storages(block.final))
    outside = {s for node in view.cells if node not in region and not node._erased for s in view.storages(node)}
    needed: set[fx.Node] = set()
    pending = [node for node in region if any(user not in region for user in node.users)]
    pending += [writer for s in outside - result for writer in s.writers if writer in region]
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        pending += [arg for arg in node.all_input_nodes if arg in region]
        for storage in view.storages(node):
            pending += [writer for writer in storage.writers if writer in region]
    for node in sorted(region - needed, key=view.positions.__getitem__, reverse=True):
        graph.erase_node(node)
