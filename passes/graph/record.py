"""Writes down what runs: an fx graph of ATen ops, with fake tensors, as the view wants it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.graph.source import trace_of_caller
from mok_compile.passes.graph.writes import written

aten = torch.ops.aten

# Stand for what differs from expert to expert. Never run: they are proven to mean something and then left out.
lib = torch.library.Library("mok_loop", "DEF")
lib.define("pick(Tensor bank, bool keepdim) -> Tensor")  # bank[e]
lib.define("pick_at(Tensor bank, Tensor rows) -> Tensor")  # bank[rows, e]
lib.define("equal(Tensor ids) -> Tensor")  # ids == e
lib.define("segment(Tensor rows, SymInt n) -> Tensor")  # the n rows of the expert, where all are sorted by expert
lib.define("joined(Tensor result, Tensor rows) -> Tensor")  # what all turns make of their `rows`, one after the other
lib.define("nonzero(Tensor mask, SymInt n) -> Tensor")  # of the n places that are not zero
lib.define("tally(Tensor ids, SymInt n) -> Tensor")  # how many entries each of the first n experts has
lib.define("unique(Tensor ids, SymInt n) -> Tensor")  # the n numbers that stand there, each once
lib.define("flat(Tensor total) -> Tensor")  # with one dimension for all but the last
lib.define("dropout(Tensor rows, float rate, int draw) -> Tensor")  # the draws of a turn are numbered
_FAKES: dict[str, Callable] = {
    "pick": lambda bank, keepdim: bank.new_empty((1, *bank.shape[1:]) if keepdim else bank.shape[1:]),
    "pick_at": lambda bank, rows: bank.new_empty((*rows.shape, *bank.shape[2:])),
    "equal": lambda ids: ids.new_empty(ids.shape, dtype=torch.bool),
    "segment": lambda rows, n: rows.new_empty((n, *rows.shape[1:])),
    "joined": lambda result, rows: result.new_empty((rows.shape[0], *result.shape[1:])),
    "nonzero": lambda mask, n: mask.new_empty((n, mask.dim()), dtype=torch.int64),
    "tally": lambda ids, n: ids.new_empty((n,), dtype=torch.int64),
    "unique": lambda ids, n: ids.new_empty((n,)),
    "flat": lambda total: total.new_empty((math.prod(total.shape[:-1]), total.shape[-1])),
    "dropout": lambda rows, rate, draw: torch.empty_like(rows),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"mok_loop::{_name}", _fake, lib=lib)

_BY_INDEX = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
_IGNORED = ("prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride")


class Recorder(TorchDispatchMode):
    """Records while it is entered. `sources` says where each placeholder comes from; real tensors that turn up become
    placeholders with themselves as source. Every ``nonzero`` finds `rows` places, or some unknown number of them.
    Masks that index are spelled out as such places."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sources: dict[str, Any] = {}
        self.rows: int | torch.SymInt | None = None
        self.places: list[fx.Node] = []  # that were looked for while `rows` said how many there are
        self._nodes: dict[int, fx.Node] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._sizes: dict[Any, fx.Node] = {}
        self._alive: list[torch.Tensor] = []
        self._grad = torch.is_grad_enabled()

    def node(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that returned `tensor`."""
        return self._nodes.get(id(tensor))

    def writes(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Each node that writes into a tensor, and that tensor's."""
        for node in self.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                into = tree_leaves(written(node.target, node.args, node.kwargs))
                yield from ((node, place) for place in into if isinstance(place, fx.Node))

    def origin(self, node: fx.Node) -> Any:
        """How the tensor of `node` was computed, in terms that another recording shares. How many rows there were is
        left out. None if something was written into a tensor that it was computed from."""
        behind, pending = {node}, [node]
        while pending:
            new = {n for n in pending.pop().all_input_nodes if n not in behind}
            behind |= new
            pending += new
        memory = {m for n in behind for m in _memory(n)}
        if any(not memory.isdisjoint(_memory(place)) for _, place in self.writes()):
            return None, node
        return self._told(node)

    def _told(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            source = self.sources.get(node.name)
            return id(source) if isinstance(source, torch.Tensor) else source
        args = node.args[:1] if node.target is torch.ops.mok_loop.nonzero.default else node.args
        told = tree_map(lambda a: self._told(a) if isinstance(a, fx.Node) else a, (args, node.kwargs))
        return node.target, str(told)

    def empty(self, shape: tuple, like: torch.Tensor, source: Any) -> torch.Tensor:
        """A new placeholder with the dtype and device of `like`."""
        if is_traceable_wrapper_subclass(like):
            raise Break("subclass", "weights or activations are a tensor subclass (DTensor, quantised, ...)")
        with _disable_current_modes(), self.mode:
            fake = torch.empty(shape, dtype=like.dtype, device=like.device)
        node = self.graph.placeholder(f"arg{len(self.sources)}")
        self.sources[node.name] = source
        return self._keep(fake, node)

    def size(self, at_least: int = 1) -> torch.SymInt:
        """A new size of which nothing else is known."""
        size = self.env.create_unbacked_symint()
        torch._check(size >= at_least)
        return size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in _IGNORED:
            with self.mode:
                return func(*args, **kwargs)
        if func in _BY_INDEX:
            args = (args[0], self._placed(args[1]), *args[2:])
        if func is aten.nonzero.default:
            rows = self.size() if self.rows is None else self.rows
            func, args = torch.ops.mok_loop.nonzero.default, (args[0], rows)
        if func is aten._unique2.default and not any(args[2:]) and not any(kwargs.values()):
            found = self.__torch_dispatch__(torch.ops.mok_loop.unique.default, (), (args[0], self.size()))
            return found, found.new_empty(0), found.new_empty(0)  # of which nobody gets to see the last two
        if func is aten.bincount.default and (*args, None)[1] is None and not kwargs:
            # Without a least number of experts, as many are counted as are hit up to the last one.
            experts = args[2] if len(args) > 2 and args[2] > 0 else self.size()
            func, args = torch.ops.mok_loop.tally.default, (args[0], experts)
        if func in _SQUEEZES and not all(map(_is_told, _squeezed(*args))):
            raise Break("data-dependent", "the loop squeezes a dimension of which nobody knows whether it is one")
        if torch.Tag.data_dependent_output in func.tags:
            raise Break("data-dependent", f"the loop waits for the value of {func._schema.name}")
        self._follow_grad_mode()
        args, kwargs = tree_map(lambda a: self.known(a) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        with self.mode:
            out = func(*args, **kwargs)
        given = tree_map(self._given, (args, kwargs))
        node = self.graph.call_function(func, *given)
        node.meta["example_value"] = out
        node.meta["stack_trace"] = trace_of_caller()
        if func is torch.ops.mok_loop.nonzero.default and self.rows is not None:
            self.places.append(node)
        if isinstance(out, torch.Tensor):
            self._keep(out, node)
        elif isinstance(out, (list, tuple)):
            for i, entry in enumerate(out):
                if isinstance(entry, torch.Tensor):
                    self._keep(entry, self.graph.call_function(operator.getitem, (node, i)))
        return out

    def _placed(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """`indices` with the places of its masks instead of them."""
        placed: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                placed.append(index)
                continue
            places = self.__torch_dispatch__(aten.nonzero.default, (), (index,))
            placed += self.__torch_dispatch__(aten.unbind.int, (), (places, 1))
        return placed

    def _given(self, argument: Any) -> Any:
        """An argument as the graph has it: tensors and sizes as nodes."""
        if isinstance(argument, torch.Tensor):
            return self._nodes[id(argument)]
        if not isinstance(argument, torch.SymInt):
            return argument
        size = argument.node.expr
        if size not in self._sizes:
            self._sizes[size] = self.graph.placeholder(f"size{len(self._sizes)}")
            self._sizes[size].meta["example_value"] = argument
        return self._sizes[size]

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or the placeholder of a real one."""
        if id(tensor) in self._nodes:
            return tensor
        if id(tensor) not in self._fakes:
            self._alive.append(tensor)
            self._fakes[id(tensor)] = self.empty(tuple(tensor.shape), tensor, tensor)
        return self._fakes[id(tensor)]

    def _keep(self, fake: torch.Tensor, node: fx.Node) -> torch.Tensor:
        node.meta["example_value"] = fake
        self._nodes[id(fake)] = node
        self._alive.append(fake)  # an id must not be used again
        return fake

    def _follow_grad_mode(self) -> None:
        if torch.is_grad_enabled() != self._grad:
            self._grad = torch.is_grad_enabled()
            self.graph.call_function(torch._C._set_grad_enabled, (self._grad,))


_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _squeezed(tensor: torch.Tensor, dims: int | Sequence[int] | None = None) -> list[int | torch.SymInt]:
    """The sizes that are asked for being one."""
    if dims is None or not tensor.dim():
        return [*tensor.shape]
    return [tensor.shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)]


def _is_told(size: int | torch.SymInt) -> bool:
    """Whether `size` is known to be one, or to be another."""
    return statically_known_true(size == 1) or statically_known_true(size != 1)


def _memory(node: fx.Node) -> set[int]:
    leaves = tree_leaves(node.meta.get("example_value"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
