"""A functional ATen view of a Dynamo graph, for analysis only.

Each Dynamo node is run once on fake tensors, whatever its spelling (function, method, operator), and the ATen ops it
turns into are recorded; nodes that look alike (same target, same argument shapes) share one recording, so that
identical layers cost almost nothing. The recordings are then replayed symbolically: a *value* is an ATen op applied to
values, hash-consed, so that equal computations are the same object. In-place ops become functional: a *cell* (the
tensor object that a node returns) holds one value after another, and cells that share memory know each other, so that
it is clear which value a node stands for at each point of the program.

The view never goes onward to the compiler: it would lose autograd structure, tags and parameter sources.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_leaves, tree_map

from mok_compile.passes.graph.pieces import product_of_pieces
from mok_compile.passes.graph.writes import UNSAID, written

aten = torch.ops.aten


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor without its numbers. `shape` may hold SymInts."""

    dtype: torch.dtype
    shape: tuple
    device: torch.device
    subclass: bool = False

    @staticmethod
    def of(t: torch.Tensor) -> Meta:
        return Meta(t.dtype, tuple(t.shape), t.device, is_traceable_wrapper_subclass(t))


class Value:
    """One tensor value: output `index` of `op` applied to `args` (values, constants, nested tuples of these).

    `op` is an OpOverload, or "input" / "opaque" for what the view does not look into, "random" for numbers that were
    drawn, "written" for what a tensor became when something unknown was written into it. `detached` marks values
    computed while gradients were switched off inside a graph that computes gradients, `pieced` a product that the
    program computes in pieces: its last bits are not those of one product.
    """

    __slots__ = ("args", "detached", "index", "kwargs", "meta", "number", "op", "pieced")

    def __init__(
        self, number: int, op, args: tuple, kwargs: dict, index: int, meta: Meta, detached: bool, pieced: bool = False
    ) -> None:
        self.number, self.op, self.args, self.kwargs = number, op, args, kwargs
        self.index, self.meta, self.detached, self.pieced = index, meta, detached, pieced

    def __repr__(self) -> str:
        return f"v{self.number}"

    @property
    def inputs(self) -> Iterator[Value]:
        return (a for a in tree_iter((self.args, self.kwargs)) if isinstance(a, Value))

    def behind(self) -> Iterator[Value]:
        """This value and all that it is computed from, each once."""
        seen, pending = {self}, [self]
        while pending:
            value = pending.pop()
            yield value
            new = [v for v in dict.fromkeys(value.inputs) if v not in seen]
            seen.update(new)
            pending += new


@dataclass(eq=False)
class Storage:
    """Memory: writing through one of its cells changes the others."""

    cells: list[Cell] = field(default_factory=list)
    writers: list[fx.Node] = field(default_factory=list)


@dataclass(eq=False)
class Cell:
    """A tensor object of the program: the values it has held, each with the position from which on it holds."""

    storage: Storage
    history: list[tuple[int, Value]]

    @property
    def value(self) -> Value:
        return self.history[-1][1]

    def value_at(self, position: int) -> Value | None:
        """The value held just before the node at `position` runs; None if the cell does not exist yet."""
        held = [v for p, v in self.history if p < position]
        return held[-1] if held else None


@dataclass(frozen=True)
class Entry:
    """One entry of a tensor of one dimension."""

    value: Value
    index: int


@dataclass(frozen=True)
class _Ref:
    """A tensor in a recording: argument `number`, or output `index` of step `number`."""

    step: bool
    number: int
    index: int = 0


@dataclass(frozen=True)
class _Step:
    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    outputs: tuple[tuple[_Ref, Meta, _Ref | None], ...]  # new tensors, and an earlier one that shares their memory
    written: tuple[_Ref, ...]
    overlaps: bool  # something written holds several of its elements in one place


@dataclass(frozen=True)
class _Recording:
    """What a node turned into. Sizes that only the data tells are called here as when it was recorded: `sizes` are
    those of the arguments, in the order of appearance."""

    steps: tuple[_Step, ...]
    result: Any  # nested structure of _Ref and constants
    sizes: tuple[sympy.Symbol, ...] = ()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class View:
    """The view of one graph.

    `values` lists all values in program order; `made[node]` those that come to be at a node, `cells[node]` the tensor
    object (or the structure of objects) that the node returns.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.values: list[Value] = []
        self.numbers: dict[sympy.Expr, Entry] = {}  # sizes that were read from a tensor: `.item()`, `.tolist()`
        self.made: dict[fx.Node, list[Value]] = {}
        self.cells: dict[fx.Node, Any] = {}
        self.positions = {node: i for i, node in enumerate(graph.nodes)}
        self._interned: dict = {}
        self._recordings: dict = {}
        self._storages: dict[int, Storage] = {}
        self._grad = self._initial_grad = torch.is_grad_enabled()
        self._grad_outside: dict[fx.Node, bool] = {}
        self.without_grad: set[fx.Node] = set()  # nodes that run while gradients are switched off inside the graph
        for node in graph.nodes:
            self.made[node] = []
            self._visit(node)

    def value(self, node: fx.Node) -> Value | None:
        """The value of `node` when it has just run, of an assignment what it made of the tensor that it writes into;
        None if that is not one tensor."""
        cell = self.cells.get(target_of(node))
        return cell.value_at(self.positions[node] + 1) if isinstance(cell, Cell) else None

    def holder(self, value: Value, before: fx.Node) -> fx.Node | None:
        """The latest node that still holds `value` when `before` is about to run."""
        position = self.positions[before]
        holders = (
            node
            for node, cell in self.cells.items()
            if self.positions[node] < position and isinstance(cell, Cell) and cell.value_at(position) is value
        )
        return max(holders, key=self.positions.__getitem__, default=None)

    def storages(self, node: fx.Node) -> list[Storage]:
        """The memory that `node`'s results live in."""
        return [c.storage for c in tree_iter(self.cells.get(target_of(node))) if isinstance(c, Cell)]

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if self._initial_grad and not self._grad:
            self.without_grad.add(node)
        if node.op in ("placeholder", "get_attr"):
            self._hold(node, lambda example: self._intern(node, "input", (node.name,), {}, 0, Meta.of(example)))
            return
        if node.target is torch._C._set_grad_enabled:
            self._grad = bool(node.args[0])
            return
        if node.target is torch.autograd.grad_mode._enter_inference_mode:
            self._grad_outside[node] = self._grad
            self._grad = self._grad and not node.args[0]
            return
        if node.target is torch.autograd.grad_mode._exit_inference_mode:
            self._grad = self._grad_outside[node.args[0]]
            return
        if node.target is operator.getitem and isinstance(node.args[1], int):
            container = self.cells.get(node.args[0])
            if isinstance(container, (tuple, list)):
                self.cells[node] = container[node.args[1]]
                return
        self._note_number(node)
        recorded = self._record(node)
        if recorded is None:
            self._opaque(node)
        else:
            self._replay(node, *recorded)

    def _intern(self, node: fx.Node, op, args: tuple, kwargs: dict, index: int, meta: Meta) -> Value:
        detached = self._initial_grad and not self._grad and meta.dtype.is_floating_point
        if op is aten.detach.default and not self._grad:
            op = aten.alias.default  # there is nothing to cut
        product = None if kwargs else product_of_pieces(op, args, detached)
        if _turns_back(op, args) and args[0].detached == detached:
            op, args = aten.alias.default, args[0].args[:1]
        elif product is not None:
            x, matrix = product
            turned = Meta(matrix.meta.dtype, matrix.meta.shape[::-1], matrix.meta.device)
            op, args = aten.mm.default, (x, self._intern(node, aten.t.default, (matrix,), {}, 0, turned))
        # The dtype too: an in-place op keeps that of what it writes into, its functional form may not.
        pieced = product is not None
        key = (op, _hashable(args), _hashable(kwargs), index, detached, meta.dtype, pieced)
        value = self._interned.get(key)
        if value is None:
            value = self._interned[key] = Value(len(self.values), op, args, kwargs, index, meta, detached, pieced)
            self.values.append(value)
        self.made[node].append(value)
        return value

    def _fresh(self, node: fx.Node, meta: Meta, op: str = "opaque", *args) -> Value:
        """A value that equals no other."""
        return self._intern(node, op, (node.name, len(self.values), *args), {}, 0, meta)

    def _hold(self, node: fx.Node, value_of: Callable[[torch.Tensor], Value]) -> None:
        """Gives `node` new cells after its example values."""

        def cell(example):
            if not isinstance(example, torch.Tensor):
                return None
            return self._cell(node, value_of(example), self._storage(example))

        example = node.meta.get("example_value")
        if _has_tensors(example):
            self.cells[node] = tree_map(cell, example)

    def _cell(self, node: fx.Node, value: Value, storage: Storage) -> Cell:
        cell = Cell(storage, [(self.positions[node], value)])
        storage.cells.append(cell)
        return cell

    def _storage(self, example: torch.Tensor, known: Storage | None = None) -> Storage:
        """The memory of `example`, by what Dynamo's own fake tensors share."""
        try:
            key = example.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return known or Storage()
        return self._storages.setdefault(key, known or Storage())

    def _write(self, node: fx.Node, cell: Cell, value: Value) -> None:
        position, before = self.positions[node], cell.value
        cell.storage.writers.append(node)
        for other in cell.storage.cells:
            other.history.append((position, value if other is cell else self._around(node, other, before, value)))

    def _around(self, node: fx.Node, cell: Cell, part: Value, value: Value) -> Value:
        """What `cell` holds once `value` was written over `part`, which shares its memory."""
        if part.args[:1] != (cell.value,) or part.detached != cell.value.detached:
            return self._overwritten(node, cell)
        if part.op is aten.view.default:  # all of it, in another shape
            meta = cell.value.meta
            return self._intern(node, aten.view.default, (value, meta.shape), {}, 0, meta)
        if part.op is not aten.slice.Tensor or not _is_new(cell.value):
            return self._overwritten(node, cell)
        args = (cell.value, value, *part.args[1:])
        return self._intern(node, aten.slice_scatter.default, args, part.kwargs, 0, cell.value.meta)

    def _overwritten(self, node: fx.Node, cell: Cell) -> Value:
        return self._fresh(node, cell.value.meta, "written")

    def _opaque(self, node: fx.Node) -> None:
        """A node that the view does not look into: its results are unknown, and it may have written its arguments."""
        for arg in node.all_input_nodes:
            example = arg.meta.get("example_value")
            for cell, fake in zip(tree_leaves(self.cells.get(arg)), tree_leaves(example), strict=False):
                if isinstance(cell, Cell) and _may_write(node, fake):
                    self._write(node, cell, self._overwritten(node, cell))
        self._hold(node, lambda example: self._fresh(node, Meta.of(example)))

    def _note_number(self, node: fx.Node) -> None:
        """Remembers which entry of which tensor a size is. The entries of `.tolist()` have no example of their own."""
        example = node.meta.get("example_value")
        if not isinstance(example, torch.SymInt) or name_of(node) != "item" or len(node.all_input_nodes) != 1:
            return
        entry = node.all_input_nodes[0]
        whole = entry.target is operator.getitem and isinstance(entry.args[1], int)
        value = self.value(entry.args[0]) if whole else None
        if value is not None:
            self.numbers[example.node.expr] = Entry(value, entry.args[1])

    def _record(self, node: fx.Node) -> tuple[_Recording, list[Cell], _Rename] | None:
        """The recording of `node`, the cells of its tensor arguments, and what its sizes are called here; None if it
        cannot be recorded."""
        call = _callable(node)
        operands: dict[Cell, torch.Tensor] = {}

        def convert(arg):
            if not isinstance(arg, fx.Node):
                return arg
            example, held = arg.meta.get("example_value"), self.cells.get(arg)
            if _has_tensors(example):
                cells, fakes = tree_leaves(held), tree_leaves(example)
                if len(cells) != len(fakes):
                    raise _Unknown
                return tree_map(lambda cell: reference(cell, fakes[cells.index(cell)]), held)
            if all(isinstance(leaf, _NUMBERS) for leaf in tree_leaves(example)):
                return example
            raise _Unknown

        def reference(cell, example):
            if not isinstance(cell, Cell):
                raise _Unknown
            operands.setdefault(cell, example)
            return _Ref(False, list(operands).index(cell))

        try:
            args = map_aggregate((node.args, node.kwargs), convert)
        except _Unknown:
            return None
        result = node.meta.get("example_value")
        fakes = list(operands.values()) or tree_leaves(result)[:1]
        if call is None or not fakes or not all(type(f) is FakeTensor for f in fakes):
            return None
        sizes = _unbacked((args, [(f.shape, f.stride()) for f in operands.values()]))
        names = {symbol: sympy.Symbol(f"size{i}", integer=True) for i, symbol in enumerate(sizes)}
        signature = tuple(_signature(f, names) for f in operands.values())
        key = (node.op, node.target, _hashable(args, names), signature)
        if key not in self._recordings:
            with decomposed(name_of(node)):
                self._recordings[key] = _run(call, args, list(operands.values()), sizes, fakes[0].fake_mode)
        recording = self._recordings[key]
        rename = None if recording is None else _agrees(recording, node, sizes)
        return None if rename is None else (recording, list(operands), rename)

    def _replay(self, node: fx.Node, recording: _Recording, arguments: list[Cell], rename: _Rename) -> None:
        made: dict[_Ref, Cell] = {_Ref(False, i): cell for i, cell in enumerate(arguments)}
        for step in recording.steps:
            args, kwargs = _tuples(
                map_aggregate((step.args, step.kwargs), lambda a: made[a].value if isinstance(a, _Ref) else rename(a))
            )
            random = torch.Tag.nondeterministic_seeded in step.op.tags
            for ref in step.written:
                functional = _functional(step.op)
                meta = made[ref].value.meta
                known = functional and len(step.written) == 1 and not step.overlaps and not random
                new = (node, functional, args, kwargs, 0, meta)
                value = self._intern(*new) if known else self._fresh(node, meta, "random" if random else "written")
                self._write(node, made[ref], value)
            for ref, meta, alias in step.outputs:
                meta = rename.meta(meta)
                new = (node, step.op, args, kwargs, ref.index, meta)
                value = self._fresh(node, meta, "random", *args) if random else self._intern(*new)
                made[ref] = self._cell(node, value, made[alias].storage if alias else Storage())
        examples = {
            ref: e
            for ref, e in zip(tree_leaves(recording.result), tree_leaves(node.meta.get("example_value")), strict=False)
            if isinstance(ref, _Ref) and isinstance(e, torch.Tensor)
        }
        for ref, example in examples.items():
            self._storage(example, made[ref].storage)
        held = tree_map(lambda r: made[r] if isinstance(r, _Ref) else None, recording.result)
        if held is not None:
            self.cells[node] = held


def _turns_back(op: Any, args: tuple) -> bool:
    """Whether a transposition undoes the one before it."""
    before = args[0] if op in (aten.t.default, aten.transpose.int) else None
    if before is None or before.op is not op:
        return False
    rank = max(1, len(before.meta.shape))
    return {d % rank for d in args[1:]} == {d % rank for d in before.args[1:]}


_CREATE = (
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format),
    *(aten.empty_like.default, aten.new_empty.default, aten.ones.default, aten.full.default),
)


def _is_new(value: Value) -> bool:
    """Whether `value` is in memory that was made for it: no two of its elements are in one place."""
    while value.op in (aten.slice_scatter.default, aten.detach.default, aten.alias.default):
        value = value.args[0]
    return value.op in _CREATE


def name_of(node: fx.Node) -> str:
    """The name of what `node` calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def decomposed(name: str) -> contextlib.AbstractContextManager:
    """While this lasts, calls of what has that `name` can be recorded. ``matmul`` is taken apart in Python: the C++ for
    that wants sizes as numbers in torch 2.10 and 2.11, see https://github.com/pytorch/pytorch/pull/183397."""
    return enable_python_dispatcher() if name in ("matmul", "__matmul__") else contextlib.nullcontext()


def target_of(node: fx.Node) -> fx.Node:
    """The node that holds what `node` makes: itself, or the tensor that an assignment ``a[i] = b`` writes into."""
    return node.args[0] if node.target is operator.setitem else node


_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def _has_tensors(example: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(example))


class _Unknown(Exception):
    """An argument of which no fake tensor is known."""


_STATEFUL = ("_set_", "_enter_", "_exit_", "_vmap", "_assert", "_check", "manual_seed", "sym_")


def _callable(node: fx.Node) -> Callable | None:
    """What to call to record `node`; None for what must not run out of its place: state changes, higher-order ops,
    functions that are not torch's."""
    target = node.target
    if node.op == "call_method":
        return lambda self, *args, **kwargs: getattr(self, target)(*args, **kwargs)
    if node.op != "call_function" or isinstance(target, torch._ops.HigherOrderOperator):
        return None
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return target
    if target is getattr:  # of the others some say what is no value: requires_grad, grad
        return target if node.args[1:] in (("T",), ("mT",)) else None
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    known = module == "_operator" or module.startswith("torch") or getattr(torch, name, None) is target
    return target if known and not name.startswith(_STATEFUL) else None


def _run(call: Callable, args: tuple, examples: list[FakeTensor], sizes: tuple, mode) -> _Recording | None:
    """Runs `call` on fresh fakes like `examples` and writes down the ATen ops; None if it fails."""
    quiet, fresh = contextlib.nullcontext(), contextlib.nullcontext()
    if mode.shape_env is not None:
        quiet, fresh = mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols()
    try:
        with torch.no_grad(), quiet, fresh, _unlogged(), mode:
            fakes = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device=e.device) for e in examples]
            call_args, call_kwargs = map_aggregate(args, lambda a: fakes[a.number] if isinstance(a, _Ref) else a)
            with _Recorder() as recorder:
                result = call(*call_args, **call_kwargs)
    except Exception:  # whatever a foreign op raises (no fake, data-dependent, wrong device): the node stays opaque
        return None
    refs = {id(fake): _Ref(False, i) for i, fake in enumerate(fakes)}
    memory = {fake.untyped_storage()._cdata: _Ref(False, i) for i, fake in enumerate(fakes)}

    def reference(a):
        return refs.get(id(a), a) if isinstance(a, torch.Tensor) else a

    steps = []
    for number, (op, step_args, step_kwargs, out) in enumerate(recorder.calls):
        into = [t for t in tree_leaves(written(op, step_args, step_kwargs)) if isinstance(t, torch.Tensor)]
        step_args, step_kwargs = map_aggregate((tuple(step_args), step_kwargs), reference)
        outputs = []
        for index, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in refs:
                ref, storage = _Ref(True, number, index), tensor.untyped_storage()._cdata
                outputs.append((ref, Meta.of(tensor), memory.get(storage)))
                refs[id(tensor)] = ref
                memory.setdefault(storage, ref)
        overlaps = any(map(_overlaps, into))
        steps.append(_Step(op, step_args, step_kwargs, tuple(outputs), tuple(map(reference, into)), overlaps))
    result = tree_map(reference, result)
    unknown = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((result, [(s.args, s.kwargs) for s in steps])))
    return None if unknown else _Recording(tuple(steps), result, sizes)


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """An op that fails here is no error, which torch would log with a traceback: autocast was on where it stands."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of `tensor` share their place: after `expand`, `unfold` and the like."""
    sizes = (n if isinstance(n, int) else 2 for n in tensor.shape)
    known = ((s, n) for s, n in zip(tensor.stride(), sizes, strict=True) if n > 1 and isinstance(s, int))
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(known):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional op of an in-place one (``add_`` -> ``add``); None for out= variants and ops without one."""
    name = op._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, op.namespace), name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, op._overloadname, None)


def _agrees(recording: _Recording, node: fx.Node, sizes: tuple[sympy.Symbol, ...]) -> _Rename | None:
    """What the recording's sizes are called at `node`; None if the result does not look as Dynamo says: it does not
    where autocast was on inside the graph."""
    metas = {ref: meta for step in recording.steps for ref, meta, _ in step.outputs}
    leaves = tree_leaves(recording.result), tree_leaves(node.meta.get("example_value"))
    rename = _Rename({a: b for a, b in zip(recording.sizes, sizes, strict=True) if a is not b})
    if len(leaves[0]) != len(leaves[1]):
        return rename if node.meta.get("example_value") is None else None
    for ref, example in zip(*leaves, strict=True):
        if isinstance(example, torch.Tensor) != isinstance(ref, _Ref):
            return None
        found = metas.get(ref) if isinstance(ref, _Ref) else None
        if not found:
            continue
        if found.dtype != example.dtype or len(found.shape) != len(example.shape):
            return None
        for a, b in zip(found.shape, example.shape, strict=True):
            a, b = _expr(a), _expr(b)
            # A size that came to be here: the number of hits of a mask. It bears a new name at each run.
            if a not in recording.sizes and a not in rename.names and free_unbacked_symbols(a) == {a}:
                rename.names[a] = b
            elif rename.expr(a) != b:
                return None
    return rename


class _Rename:
    """Sizes that only the data tells, from the names of a recording to those of a node."""

    def __init__(self, names: dict[sympy.Symbol, sympy.Expr]) -> None:
        self.names = names

    def expr(self, a):
        return a.xreplace(self.names) if isinstance(a, sympy.Basic) else a

    def __call__(self, a: Any) -> Any:
        if not self.names or not isinstance(a, torch.SymInt) or not a.node.expr.free_symbols & self.names.keys():
            return a
        return a.node.shape_env.create_symintnode(self.expr(a.node.expr), hint=None)

    def meta(self, meta: Meta) -> Meta:
        return Meta(meta.dtype, tuple(map(self, meta.shape)), meta.device, meta.subclass) if self.names else meta


def _expr(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _unbacked(a: Any) -> tuple[sympy.Symbol, ...]:
    """The sizes in `a` that only the data tells, in the order of appearance."""
    symbolic = (leaf for leaf in tree_leaves(a) if isinstance(leaf, torch.SymInt))
    return tuple(dict.fromkeys(s for leaf in symbolic for s in sorted(free_unbacked_symbols(leaf), key=str)))


def _may_write(node: fx.Node, fake: Any) -> bool:
    """Whether an opaque node can have written a tensor. The version counter of Dynamo's own fake tells who never was
    written; the bodies of higher-order ops work on fakes of their own, so these are read."""
    bodies = [getattr(node.graph.owning_module, a.target, None) for a in node.all_input_nodes if a.op == "get_attr"]
    bodies = [b for b in bodies if isinstance(b, fx.GraphModule)]
    if not isinstance(fake, torch.Tensor):
        return False
    if bodies:
        return any(_writes(body, fake.dtype) for body in bodies)
    return writes_unseen(node) or fake.is_inference() or fake._version > 0


def writes_unseen(node: fx.Node) -> bool:
    """Whether `node` may write into its arguments without a trace in the version counters of Dynamo's own fakes: so do
    higher-order ops (kernels of Triton among them), ops with schemas of their own, and those for lists of tensors."""
    target, name = node.target, name_of(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        # What an overload for out= writes into, it takes by keyword.
        overloads = [name for name in target.overloads() if "out" not in name or node.kwargs]
        return any(getattr(target, overload)._schema.is_mutable for overload in overloads)
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutable or name in UNSAID or (name.startswith("_foreach") and name.endswith("_"))


def _writes(body: fx.GraphModule, dtype: torch.dtype) -> bool:
    """Whether `body` writes into a tensor that is, or may be, of this dtype."""
    for node in body.graph.nodes:
        name = name_of(node)
        in_place = name.endswith("_") and not name.endswith("__")
        augmented = node.target in _AUGMENTED or name == "__setitem__" or "out" in node.kwargs
        # Higher-order ops with bodies have these among the children.
        bodies = any(isinstance(a, fx.Node) and a.op == "get_attr" for a in node.args)
        mutable = writes_unseen(node) and not bodies
        if node.op not in ("call_function", "call_method"):
            continue
        if name == "view" and any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
            return True  # memory of one dtype under the name of another
        if in_place or augmented or mutable:
            target = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            written = target.meta.get("example_value") if target is not None else None
            if mutable or "out" in node.kwargs or not isinstance(written, torch.Tensor) or written.dtype == dtype:
                return True
    return any(_writes(child, dtype) for child in body.children() if isinstance(child, fx.GraphModule))


_AUGMENTED = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imod, operator.ilshift, operator.irshift,
}  # fmt: skip


def _signature(t: torch.Tensor, names: dict) -> tuple:
    return t.dtype, str(t.device), _hashable(t.shape, names), _hashable(t.stride(), names)


def _tuples(a: Any) -> Any:
    """Lists as tuples, so that arguments are immutable."""
    if isinstance(a, (list, tuple)):
        return tuple(_tuples(x) for x in a)
    return {k: _tuples(v) for k, v in a.items()} if isinstance(a, dict) else a


def _hashable(a: Any, names: dict[sympy.Symbol, sympy.Symbol] | None = None) -> Any:
    """`a` as a dictionary key: equal only for equal computations (1, 1.0 and True differ)."""
    if isinstance(a, (list, tuple)):
        return tuple(_hashable(x, names) for x in a)
    if isinstance(a, dict):
        return tuple((k, _hashable(v, names)) for k, v in sorted(a.items()))
    if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("sym", a.node.expr.xreplace(names) if names else a.node.expr)
    if isinstance(a, slice):
        return ("slice", _hashable((a.start, a.stop, a.step), names))
    return (type(a), a) if isinstance(a, (int, float, bool)) else a


def view_of(node: fx.Node, nodes: set[fx.Node]) -> tuple[View, dict[fx.Node, fx.Node]]:
    """The view of a part of a graph: `nodes`, among them `node`, its result. What these are made from are inputs. Also
    the nodes of the part, by the original ones."""
    graph, env = fx.Graph(), {}
    for old in node.graph.nodes:
        if old in nodes:
            for arg in old.all_input_nodes:
                if arg not in env:
                    env[arg] = graph.placeholder(arg.name)
                    env[arg].meta = dict(arg.meta)
            env[old] = graph.node_copy(old, env.__getitem__)
    graph.output(env[node])
    return View(graph), env
