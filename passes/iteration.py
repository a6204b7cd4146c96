"""What a loop over experts computes, proven from one turn for an expert that stands for all.

The loop's own body runs once on fake tensors, under a recorder. The expert's number is an `Index` there: it may pick an
expert or a row of a tensor, and be compared; whatever else the body wants of it ends the proof. So the turn is the same
for every expert, up to what was picked. Where experts differ in kind (identities behind the MLPs, a number that means
"none"), the range of numbers is split and each part is gone through by itself. What the turn computes is found with
the facts that prove whole graphs, and a few rules for one expert's share.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from mok_compile.passes.cut import Cut
from mok_compile.passes.facts import (
    BiasRows,
    Combined,
    Differentiable,
    Fact,
    Iota,
    Pointwise,
    Rows,
    RowWeight,
    Token,
    Weight,
)
from mok_compile.passes.record import Recorder
from mok_compile.passes.rules import RULES, Break, Facts, _biased, _projected, same
from mok_compile.passes.site import Block, _block
from mok_compile.passes.view import Cell, Meta, Value, View

aten, loop_ops = torch.ops.aten, torch.ops.mok_loop
_TOKEN = "\0e\0"  # stands for the expert's number in a string
_MAX_PARTS = 4


class _Split(Exception):
    """Experts from `at` on are of another kind than those before."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class _Absent(Exception):
    """There are no such experts: eager fails if one of them is hit."""


class _Domain(Exception):
    """The loop goes over the experts [0, size)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(frozen=True)
class Members:
    """Source of a bank: parameter `name` of each of the modules ``owner.container[key]``."""

    container: str
    keys: tuple[int | str, ...]
    name: str


@dataclass(frozen=True)
class Local:
    """Source: the local variable at `place` among the live ones; `listed`: a list of one tensor for each expert."""

    place: int
    listed: bool = False


@dataclass(frozen=True)
class Part:
    """What the experts [lo, hi) do: a proven block, or hand their tokens through, weighted (`passed`), or nothing.

    `sources` says what the input values ("input", (name,)) are: a `Members`, a `Local`, or a parameter itself.
    """

    lo: int
    hi: int
    block: Block | None = None
    passed: Passed | None = None
    sources: dict[str, Any] | None = None


def understand(cut: Cut, owner: torch.nn.Module, live: tuple) -> tuple[Part, ...]:
    """Proves what the loop of `cut` does in `owner`: what becomes of each range of experts.

    `live`: the values of the loop's local variables: fake tensors, lists of them, numbers. Break with reason and detail
    where there is no proof.
    """
    _check_quiet(owner, cut.reads)
    try:
        _Turn(cut, owner, live, None).run()
        raise Break("no-match", "the loop is never entered")
    except _Domain as domain:
        ranges = [(0, domain.size)]
    parts: list[Part] = []
    while ranges:
        lo, hi = ranges.pop(0)
        try:
            parts.append(_prove(cut, owner, live, lo, hi))
        except _Split as split:
            ranges[:0] = [(lo, split.at), (split.at, hi)]
        except _Absent:
            parts.append(Part(lo, hi))
        if len(parts) + len(ranges) > _MAX_PARTS:
            raise Break("layout", "the experts are of too many kinds")
    return tuple(parts)


def _prove(cut: Cut, owner: torch.nn.Module, live: tuple, lo: int, hi: int) -> Part:
    before = _Snapshot(owner)
    turn, idle = _Turn(cut, owner, live, (lo, hi)), _Turn(cut, owner, live, (lo, hi), rows=0)
    try:
        result, nothing = turn.run(), idle.run()
    finally:
        changed = before.restore()
    if changed:
        raise Break("no-match", "the loop changes a module")
    if not idle.unchanged(nothing):
        raise Break("no-match", "an expert without tokens changes the result")
    return turn.conclude(result)


class _Turn:
    """One turn of a loop, for an expert in `range`; None only asks how many there are."""

    def __init__(
        self, cut: Cut, owner: torch.nn.Module, live: tuple, range: tuple[int, int] | None, rows: int | None = None
    ) -> None:
        self.cut, self.owner, self.live, self.range, self.rows = cut, owner, live, range, rows
        self.recorder = Recorder()
        self.asked: torch.Tensor | None = None
        self.total: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        """The probe's result."""
        sizes: dict = {}
        values = [self._value(value, place, sizes) for place, value in enumerate(self.live)]
        self.total = values[self.cut.live.index(self.cut.total)]
        if not isinstance(self.total, torch.Tensor):
            raise Break("no-match", "what the loop adds onto is no tensor")
        shadows = {"__mok_once__": self._once, "int": _int, "enumerate": _enumerate}
        try:
            with self.recorder, _Indexing(self):
                return self.cut.probe(_Owner(self), *values, **shadows)
        except (Break, _Split, _Absent, _Domain):
            raise
        except Exception as error:  # whatever foreign code raises where it meets what it does not expect
            raise Break("data-dependent", f"the loop does something unusual: {type(error).__name__}: {error}") from None

    def unchanged(self, result: torch.Tensor) -> bool:
        """Whether nothing but rows that are none were added."""
        view = View(self._finished(result))
        value, base = view.value(self.recorder.node(result)), view.value(self.recorder.node(self.total))
        start = self._input(self.total)
        while value is not None and value.op is aten.index_add.default and same(value.args[2].meta.shape[0], 0):
            value = value.args[0]
        return base is not None and value is not None and value.op == "input" and value.args[0] == start

    def conclude(self, result: torch.Tensor) -> Part:
        """What the recorded turn means."""
        graph = self._finished(result)
        view = View(graph)
        facts = _Facts(view, self)
        final = self.recorder.node(result)
        self._check_untouched(view, final)
        value, (lo, hi) = view.value(final), self.range
        if value.op == "input" and value.args[0] == self._input(self.total):
            return Part(lo, hi)
        fact = facts.of(value)
        if value in facts.broken:
            raise Break(facts.broken[value].reason, facts.broken[value].detail)
        if not isinstance(fact, (Combined, Passed)):
            raise Break("no-match", "what the loop adds up is not proven to be its experts' outputs")
        base = fact.base
        if base is None or base.op != "input" or base.args[0] != self._input(self.total):
            raise Break("no-match", "the loop does not add onto what it started from")
        if any(base in v.inputs and not (v.op is aten.index_add.default and v.args[0] is base) for v in view.values):
            raise Break("no-match", "the loop reads what it has added up so far")
        self._check_all_hit(view, facts, fact.rows.ids)
        if isinstance(fact, Passed):
            return Part(lo, hi, passed=fact, sources=self.recorder.sources)
        if lo != 0:
            raise Break("layout", "the experts' numbers do not start at 0")
        block = replace(_block(final, view, facts), base=None)
        return Part(lo, hi, block, sources=self.recorder.sources)

    def _check_all_hit(self, view: View, facts: _Facts, ids: Value) -> None:
        """A loop over the experts that were hit must go over all that these `ids` hit."""
        if self.asked is None:
            return
        fact = facts.of(view.value(self.recorder.node(self.asked)))
        if not isinstance(fact, Hits) or fact.ids is not ids or fact.num_experts < self.range[1]:
            raise Break("no-match", "the loop is not proven to go over all experts that were hit")

    def _check_untouched(self, view: View, final: fx.Node) -> None:
        """Nothing but the total may be written into."""
        mine = view.cells[final].storage
        for node, cell in view.cells.items():
            written = node.op == "placeholder" and isinstance(cell, Cell) and len(cell.history) > 1
            if written and cell.storage is not mine:
                raise Break("mutation", "the loop writes into a tensor that it reads")

    def _finished(self, result: torch.Tensor) -> fx.Graph:
        node = self.recorder.node(result) if isinstance(result, torch.Tensor) else None
        if node is None:
            raise Break("no-match", "the loop does not return what it adds onto")
        self.recorder.graph.output(node)
        return self.recorder.graph

    def _input(self, tensor: torch.Tensor) -> str:
        return self.recorder.node(tensor).name if self.recorder.node(tensor).op == "placeholder" else self._start

    def _value(self, value: Any, place: int, sizes: dict) -> Any:
        """A local variable as the probe gets it: tensors as placeholders, with sizes of its own."""

        def known(size):
            if not isinstance(size, torch.SymInt):
                return size
            key = size.node.expr
            if key.is_number:
                return int(key)
            if key not in sizes:
                sizes[key] = self.recorder.size(2)
            return sizes[key]

        if isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                raise Break("subclass", "weights or activations are a tensor subclass (DTensor, quantised, ...)")
            fake = self.recorder.empty(tuple(map(known, value.shape)), value, Local(place))
            if self.cut.live[place] == self.cut.total:
                self._start = self.recorder.node(fake).name
            return fake
        if isinstance(value, list) and value and all(isinstance(v, torch.Tensor) for v in value):
            return _Listed(self, value, place)
        if isinstance(value, tuple):
            return tuple(map(known, value))
        return known(value)

    def _once(self, items: Any) -> Iterator:
        """The loop's header: one turn, for an expert that stands for all of `items`."""
        make: Callable = lambda index: index  # noqa: E731
        dims = 0
        if isinstance(items, range):
            if (items.start, items.step) != (0, 1):
                raise Break("no-match", f"the loop goes over {items}")
            size = len(items)
        elif isinstance(items, _Counted):
            size, make = len(items.group), lambda index: (index, items.group[index])
        elif isinstance(items, torch.Tensor):
            self.asked, size, dims = items, self._hit_size(), len(items.shape) - 1
        elif isinstance(items, _Hit):
            self.asked, size = items.tensor, self._hit_size()
        else:
            raise Break("data-dependent", f"the loop goes over a {type(items).__name__}")
        if self.range is None:
            raise _Domain(size)
        self.recorder.rows = self.rows
        yield make(Index(*self.range, dims))
        self.recorder.rows = None

    def _hit_size(self) -> int:
        """Of how many experts the loop asks which were hit."""
        for node in reversed(self.recorder.graph.nodes):
            if node.target is loop_ops.nonzero.default:
                shape = node.args[0].meta["example_value"].shape
                if len(shape) == 1 and isinstance(shape[0], int):
                    return shape[0]
        raise Break("data-dependent", "the loop goes over numbers of which nothing is known")


# Stand-ins for what the loop's body sees


class Index:
    """The number of an expert in [lo, hi), no particular one: as a tensor with `dims` dimensions or as an integer."""

    __hash__ = None

    def __init__(self, lo: int, hi: int, dims: int = 0) -> None:
        self.lo, self.hi, self.dims = lo, hi, dims

    def __getitem__(self, at):
        if self.dims == 1 and at in (0, -1):
            return Index(self.lo, self.hi)
        raise Break("no-match", "the loop takes an expert's number apart")

    def item(self) -> Index:
        return Index(self.lo, self.hi)

    def __format__(self, spec: str) -> str:
        if self.dims or spec:
            raise Break("no-match", "the loop prints an expert's number")
        return _TOKEN

    __str__ = lambda self: format(self)  # noqa: E731

    def __add__(self, other):
        if isinstance(other, int) and other == 0:
            return self
        raise Break("no-match", "the loop computes with an expert's number")

    __radd__ = __add__

    def __eq__(self, other):
        number = self._number(other)
        if not self.lo <= number < self.hi:
            return False
        if self.hi - self.lo > 1:
            raise _Split(number if number > self.lo else number + 1)
        return True

    def __ne__(self, other):
        return not self == other

    def __lt__(self, other):
        number = self._number(other)
        if self.lo < number < self.hi:
            raise _Split(number)
        return self.hi <= number

    def __ge__(self, other):
        return not self < other

    def __le__(self, other):
        return self < self._number(other) + 1

    def __gt__(self, other):
        return not self <= other

    def __bool__(self):
        raise Break("no-match", "the loop depends on an expert's number")

    __index__ = __int__ = __float__ = __len__ = __iter__ = __bool__

    @staticmethod
    def _number(other: Any) -> int:
        if not isinstance(other, int):
            raise Break("no-match", "the loop compares an expert's number with something that is no number")
        return other


def _int(value: Any = 0, *args) -> Any:
    return value.item() if isinstance(value, Index) else int(value, *args)


def _enumerate(items: Any, *args) -> Any:
    if isinstance(items, _Group) and not args:
        return _Counted(items)
    return enumerate(items, *args)


@dataclass(frozen=True)
class _Counted:
    """``enumerate`` of experts."""

    group: _Group


@dataclass(frozen=True)
class _Hit:
    """A list of the numbers in `tensor`."""

    tensor: torch.Tensor


class _Owner:
    """The module whose method the loop is in; lists and dictionaries of modules in it pick the expert by its number."""

    def __init__(self, turn: _Turn) -> None:
        self.__dict__["_mok_turn"] = turn

    def __getattr__(self, name: str) -> Any:
        turn: _Turn = self.__dict__["_mok_turn"]
        value = getattr(turn.owner, name)
        if isinstance(value, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            return _Group(turn, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Break("no-match", f"the loop sets self.{name}")

    def __getitem__(self, key: Any) -> Any:
        turn: _Turn = self.__dict__["_mok_turn"]
        return _Group(turn, "", turn.owner)[key]


class _Group:
    """A container of experts."""

    def __init__(self, turn: _Turn, name: str, modules: torch.nn.Module) -> None:
        kinds = (torch.nn.ModuleList, torch.nn.ModuleDict)
        standard = any(type(modules).__getitem__ is kind.__getitem__ for kind in kinds if isinstance(modules, kind))
        if not standard:
            raise Break("no-match", f"{type(modules).__name__} is no list of experts")
        self._turn, self._name, self._modules = turn, name, modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self):
        raise Break("data-dependent", "the loop goes over the experts themselves")

    def values(self) -> _Group:
        return self

    def __getattr__(self, name: str) -> Any:
        if _TOKEN in name:
            return self[name]
        raise Break("no-match", f"the loop reads {name} of the experts")

    def __getitem__(self, key: Any) -> _Expert:
        """The expert that stands for all that `key` can mean."""
        lo, hi = self._turn.range
        if hi > len(self._modules):
            raise _Split(len(self._modules)) if lo < len(self._modules) else _Absent
        if isinstance(key, Index) and isinstance(self._modules, torch.nn.ModuleDict):
            keys = tuple(self._modules)[lo:hi]  # through enumerate(experts.values())
        elif isinstance(key, Index):
            keys = tuple(range(lo, hi))
        elif isinstance(key, str) and _TOKEN in key:
            keys = tuple(key.replace(_TOKEN, str(e)) for e in range(lo, hi))
        else:
            raise Break("no-match", "the loop picks an expert by something else than its number")
        try:
            members = [self._modules[key] for key in keys]
        except KeyError as missing:
            raise Break("no-match", f"there is no expert {missing}") from None
        for i, member in enumerate(members):
            if not _alike(members[0], member, members[0], member):
                raise _Split(lo + i)
        return _Expert(self._turn, self._name, keys, members)


class _Expert:
    """An expert that stands for all of `members`."""

    def __init__(self, turn: _Turn, container: str, keys: tuple, members: list[torch.nn.Module]) -> None:
        self._turn, self._container, self._keys, self._members = turn, container, keys, members

    def __call__(self, *args, **kwargs):
        first, count, recorder = self._members[0], len(self._members), self._turn.recorder
        _check_calm(first)
        picked = {}
        for name, tensor in (*first.named_parameters(), *first.named_buffers()):
            bank = recorder.empty((count, *tensor.shape), tensor, Members(self._container, self._keys, name))
            picked[name] = loop_ops.pick(bank, False)
        return torch.func.functional_call(first, picked, args, kwargs)


class _Listed:
    """A list of one tensor for each expert."""

    def __init__(self, turn: _Turn, tensors: list[torch.Tensor], place: int) -> None:
        self._turn, self._tensors, self._place = turn, tensors, place

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: Any) -> torch.Tensor:
        lo, hi = self._turn.range
        first, same_kind = self._tensors[0], {(t.shape, t.dtype, t.device) for t in self._tensors}
        if not isinstance(key, Index) or hi > len(self._tensors) or lo != 0 or len(same_kind) > 1:
            raise Break("no-match", "the loop picks from a list by something else than an expert's number")
        shape = (hi, *first.shape)
        return loop_ops.pick(self._turn.recorder.empty(shape, first, Local(self._place, listed=True)), False)


class _Indexing(TorchFunctionMode):
    """Tensors that are indexed or compared with an `Index`."""

    def __init__(self, turn: _Turn) -> None:
        super().__init__()
        self.turn = turn

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Parameters as placeholders: autograd would record for them what it saves.
        known = lambda a: self.turn.recorder.known(a) if isinstance(a, torch.Tensor) else a  # noqa: E731
        args, kwargs = tree_map(known, (args, kwargs or {}))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], Index):
            return self._pick(args[0], args[1])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            places = [i for i, key in enumerate(args[1]) if isinstance(key, Index)]
            if places:
                return self._pick_at(args[0], args[1], places)
        if func in (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq) and isinstance(args[1], Index):
            return loop_ops.equal(args[0])
        if func is torch.Tensor.tolist:
            return _Hit(args[0])
        return func(*args, **kwargs)

    def _pick(self, tensor: torch.Tensor, index: Index) -> torch.Tensor:
        if tensor.shape[0] < index.hi:
            raise _Split(tensor.shape[0]) if index.lo < tensor.shape[0] else _Absent
        return loop_ops.pick(tensor, index.dims == 1)

    def _pick_at(self, tensor: torch.Tensor, keys: tuple, places: list[int]) -> torch.Tensor:
        rows, rest = keys[0], keys[2:]
        if places != [1] or not isinstance(rows, torch.Tensor) or any(key is not None for key in rest):
            raise Break("no-match", "the loop picks numbers of an expert in an unusual way")
        if tensor.dim() != 2 or tensor.shape[1] < keys[1].hi:
            raise Break("shape", "an expert has no column of its own")
        found = loop_ops.pick_at(tensor, rows)
        for _ in rest:
            found = found.unsqueeze(-1)
        return found


# What must hold of the modules


def _hooked(module: torch.nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _check_quiet(owner: torch.nn.Module, reads: tuple[str, ...]) -> None:
    """Nobody listens to what the loop calls."""
    for name in reads:
        found = getattr(owner, name, None)
        for module in found.modules() if isinstance(found, torch.nn.Module) else ():
            if _hooked(module):
                raise Break("hooks", f"a hook sits on {name}, inside the block")


def _check_calm(expert: torch.nn.Module) -> None:
    for module in expert.modules():
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            raise Break("hooks", "an expert has a forward of its own (a wrapper, or a compiled one)")
        for tensor in (*module.parameters(False), *module.buffers(False)):
            if type(tensor) not in (torch.nn.Parameter, torch.nn.Buffer, torch.Tensor):
                raise Break("subclass", f"an expert's weights are {type(tensor).__name__}")


_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, tuple, list, dict, set, frozenset)


def _alike(a: torch.nn.Module, b: torch.nn.Module, root_a: torch.nn.Module, root_b: torch.nn.Module) -> bool:
    """Whether two experts differ in nothing but the numbers in their parameters."""
    if a is b:
        return True
    if type(a) is not type(b) or a.__dict__.keys() != b.__dict__.keys():
        return False
    for tensors in ("_parameters", "_buffers"):
        mine, theirs = getattr(a, tensors), getattr(b, tensors)
        if mine.keys() != theirs.keys() or not all(_same_kind(t, theirs[name]) for name, t in mine.items()):
            return False
    if a._modules.keys() != b._modules.keys():
        return False
    pairs = [(child, b._modules[name]) for name, child in a._modules.items()]
    if not all((x is y) or (x is not None and y is not None and _alike(x, y, root_a, root_b)) for x, y in pairs):
        return False
    values = ((value, b.__dict__[name]) for name, value in a.__dict__.items() if name not in _OWN)
    return all(_same_value(x, y, a, b) for x, y in values)


def _same_kind(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _same_value(x: Any, y: Any, a: torch.nn.Module, b: torch.nn.Module) -> bool:
    if x is y:
        return True
    if isinstance(x, types.MethodType) and isinstance(y, types.MethodType):
        return x.__func__ is y.__func__ and (x.__self__ is y.__self__ or (x.__self__ is a and y.__self__ is b))
    return isinstance(x, _PLAIN) and type(x) is type(y) and x == y


class _Snapshot:
    """The attributes of all modules in `owner`, which the loop's own code might change."""

    def __init__(self, owner: torch.nn.Module) -> None:
        self._of = [(m, dict(m.__dict__)) for m in owner.modules()]
        values = [value for _, attributes in self._of for value in attributes.values()]
        self._contents = [(value, copy.copy(value)) for value in values if type(value) in (list, dict, set)]

    def restore(self) -> bool:
        """Puts back what has changed; whether anything has."""
        changed = False
        for module, attributes in self._of:
            now = module.__dict__
            if now.keys() != attributes.keys() or any(now[name] is not value for name, value in attributes.items()):
                changed = True
                now.clear()
                now.update(attributes)
        for value, before in self._contents:
            if len(value) != len(before):
                changed = True
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
        return changed


# Facts of one turn


@dataclass(frozen=True)
class Choice(Fact):
    """1 where the slot goes to the expert, else 0; `axes` of "t" (token), "k" (slot of it), "e" (expert), "1"."""

    ids: Value
    axes: tuple[str, ...]
    num_experts: int


@dataclass(frozen=True)
class Mine(Fact):
    """`Choice` of the turn's expert."""

    ids: Value
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Used(Fact):
    """Positive where the expert has a row, else zero."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class Hits(Fact):
    """The numbers of the experts that have a row, each once."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class Places(Fact):
    """[n, axes]: where the turn's expert is chosen."""

    ids: Value
    order: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Slot(Fact):
    """At each of the expert's rows: which of its token's slots it is."""

    ids: Value
    order: str


@dataclass(frozen=True)
class Member(Fact):
    """The turn's expert's own matrix or bias, out of ``weight.stored``."""

    weight: Weight


@dataclass(frozen=True)
class Staged(Fact):
    """What `inner` says, with a dimension of one before it."""

    inner: Rows | Pointwise | Member


@dataclass(frozen=True)
class Passed(Fact):
    """The tokens themselves, weighted, added onto `base`."""

    rows: Rows
    base: Value


OWN: dict[Any, Callable] = {}


def _own(*ops) -> Callable:
    def register(function: Callable) -> Callable:
        for op in ops:
            OWN[op] = function
        return function

    return register


class _Facts(Facts):
    """Facts of one turn: the rules of this module first."""

    def __init__(self, view: View, turn: _Turn) -> None:
        self.turn = turn
        self._made: dict[tuple, Value] = {}
        super().__init__(view.values)

    def derived(self, op: Any, args: tuple, like: Value, shape: tuple, dtype: torch.dtype | None = None) -> Value:
        """A value that no node holds: `op` of banks as a whole, where the loop applies it to one member."""
        key = (op, *args)
        if key not in self._made:
            meta = Meta(dtype or like.meta.dtype, shape, like.meta.device)
            self._made[key] = Value(-1 - len(self._made), op, args, {}, like.index, meta, like.detached)
        return self._made[key]

    def unstaged(self, value: Any) -> Any:
        """`value` without the dimension of one before it, if it is known as something with one."""
        fact = self.of(value)
        if not isinstance(fact, Staged):
            return value
        low = self.derived("unstaged", (value,), value, value.meta.shape[1:])
        self._of[low] = fact.inner
        return low

    def _derive(self, value: Value) -> None:
        apply = OWN.get(value.op)
        if value.op in _ROWWISE and any(isinstance(self.of(v), Staged) for v in value.inputs):
            apply = _rowwise
        if apply is not None:
            try:
                fact = apply(self, value, *value.args, **value.kwargs)
            except Break as stop:
                self._break(value, stop)
                return
            if fact is not None:
                if value.detached and isinstance(fact, (Differentiable, Member, Staged, Passed)):
                    self._break(value, Break("no-match", "gradients are switched off inside the loop"))
                else:
                    self._of[value] = fact
                return
        super()._derive(value)

    def _break(self, value: Value, stop: Break) -> None:
        from mok_compile.passes.facts import Broken

        self.broken[value] = Broken(stop.reason, stop.detail, value)


def _integer(value: Value) -> bool:
    return not value.meta.dtype.is_floating_point and value.meta.dtype != torch.bool


@_own(aten.eq.Tensor)
def _one_hot(facts, value, a, b):
    """``ids[..., None] == arange(E)``, as torch.nn.functional.one_hot spells itself."""
    counted = isinstance(facts.of(b), Iota) and len(b.meta.shape) == 1 and isinstance(b.meta.shape[0], int)
    if not counted or a.op is not aten.unsqueeze.default or a.args[1] not in (-1, len(a.meta.shape) - 1):
        return None
    ids = a.args[0]
    axes = {1: ("t",), 2: ("t", "k")}.get(len(ids.meta.shape))
    return Choice(ids, (*axes, "e"), b.meta.shape[0]) if axes and _integer(ids) else None


@_own(loop_ops.equal.default)
def _equal(facts, value, ids):
    axes = {1: ("t",), 2: ("t", "k")}.get(len(ids.meta.shape))
    return Mine(ids, axes) if axes and _integer(ids) else None


@_own(aten._to_copy.default)
def _copy(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    if device is not None and value.meta.device != a.meta.device:
        return None
    if isinstance(fact, (Choice, Mine, Used)):
        return fact
    if isinstance(fact, RowWeight) and isinstance(fact.weights, Value) and value.meta.dtype.is_floating_point:
        args = (fact.weights, value.meta.dtype)
        cast = facts.derived(aten._to_copy.default, args, fact.weights, fact.weights.meta.shape, value.meta.dtype)
        return replace(fact, weights=cast)
    if isinstance(fact, Member) and value.meta.dtype.is_floating_point:
        stored = fact.weight.stored
        if dtype in (None, stored.meta.dtype):
            return fact
        cast = facts.derived(aten._to_copy.default, (stored, dtype), stored, stored.meta.shape, dtype)
        return Member(replace(fact.weight, stored=cast))
    return None


@_own(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(facts, value, a, *dims):
    fact, rank = facts.of(a), len(a.meta.shape)
    if value.op is aten.permute.default:
        order = [d % rank for d in dims[0]]
    else:
        order = list(range(rank))
        i, j = (d % rank for d in dims) if dims else (0, rank - 1)
        order[i], order[j] = order[j], order[i]
    if isinstance(fact, (Choice, Mine)):
        return replace(fact, axes=tuple(fact.axes[d] for d in order))
    if isinstance(fact, Member) and order == [1, 0]:
        return Member(replace(fact.weight, transposed=not fact.weight.transposed))
    if isinstance(fact, Staged) and isinstance(fact.inner, Member) and order == [0, 2, 1]:
        weight = fact.inner.weight
        return Staged(Member(replace(weight, transposed=not weight.transposed)))
    return fact if order == list(range(rank)) and isinstance(fact, Member) else None


@_own(aten.sum.dim_IntList)
def _sum(facts, value, a, dim, keepdim=False, **kwargs):
    fact = facts.of(a)
    if not isinstance(fact, Choice) or keepdim or dim is None:
        return None
    left = [axis for i, axis in enumerate(fact.axes) if i not in [d % len(fact.axes) for d in dim]]
    return Used(fact.ids, fact.num_experts) if left == ["e"] else None


@_own(aten.gt.Scalar, aten.ne.Scalar, aten.ge.Scalar)
def _positive(facts, value, a, number):
    fact = facts.of(a)
    least = 1 if value.op is aten.ge.Scalar else 0
    return fact if isinstance(fact, Used) and number == least else None


@_own(loop_ops.nonzero.default)
def _nonzero(facts, value, mask, n):
    fact = facts.of(mask)
    if isinstance(fact, Used):
        return Hits(fact.ids, fact.num_experts)
    return Places(fact.ids, f"places {value.number}", fact.axes) if isinstance(fact, Mine) else None


@_own(aten.unbind.int)
def _unbind(facts, value, a, dim=0):
    return _column(facts, a, dim, value.index)


@_own(aten.select.int)
def _select(facts, value, a, dim, index):
    fact = facts.of(a)
    if isinstance(fact, Staged):
        return fact.inner if dim % len(a.meta.shape) == 0 and index in (0, -1) else None
    return _column(facts, a, dim, index)


def _column(facts: Facts, a: Value, dim: int, index: int) -> Fact | None:
    fact = facts.of(a)
    if dim % len(a.meta.shape) != 1:
        return None
    if isinstance(fact, Hits):
        return fact
    if not isinstance(fact, Places):
        return None
    axis = fact.axes[index]
    if axis == "t":
        shape = fact.ids.meta.shape
        return Token(fact.ids, fact.order, shape[1] if len(shape) == 2 else 1)
    return Slot(fact.ids, fact.order) if axis == "k" else None


@_own(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor, aten.alias.default)
def _narrow(facts, value, a, *args, **kwargs):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if isinstance(fact, (Choice, Mine)) and len(new) < len(old):
        dims = [args[0]] if isinstance(args[0], int) else list(args[0]) if args else None
        if dims is None:
            return None
        dims = [d % len(old) for d in dims]
        if len(old) - len(new) != len(dims):
            return None
        return replace(fact, axes=tuple(axis for i, axis in enumerate(fact.axes) if i not in dims))
    whole = len(old) == len(new) and all(map(same, old, new))
    return fact if whole and isinstance(fact, (Choice, Mine, Used, Hits, Member)) else None


@_own(loop_ops.pick.default)
def _pick(facts, value, bank, keepdim):
    fact, (lo, hi) = facts.of(bank), facts.turn.range
    if isinstance(fact, Choice):
        if fact.axes[0] != "e" or hi > fact.num_experts:
            return None
        return Mine(fact.ids, (("1",) if keepdim else ()) + fact.axes[1:])
    if fact is not None or not bank.meta.dtype.is_floating_point or len(bank.meta.shape) not in (2, 3):
        return None
    if lo != 0:
        raise Break("layout", "the weights of the experts do not start at number 0")
    if bank.meta.shape[0] != hi:
        bank = facts.derived(aten.slice.Tensor, (bank, 0, 0, hi), bank, (hi, *bank.meta.shape[1:]))
    member = Member(Weight(bank, True))
    return Staged(member) if keepdim else member


@_own(loop_ops.pick_at.default)
def _pick_at(facts, value, table, rows):
    by = facts.of(rows)
    if not isinstance(by, Token) or facts.of(table) is not None or not table.meta.dtype.is_floating_point:
        return None
    if not same(table.meta.shape[0], by.ids.meta.shape[0]):
        return None
    weights = facts.derived(aten.gather.default, (table, 1, by.ids), table, by.ids.meta.shape)
    return RowWeight(weights, by.ids, by.order)


@_own(aten.index.Tensor)
def _index(facts, value, a, indices):
    by = [facts.of(i) if isinstance(i, Value) else i for i in indices]
    if len(by) == 2 and by[0] is None and indices[0] is None and isinstance(by[1], Token):
        if a.op is not aten.unsqueeze.default or a.args[1] % len(a.meta.shape) != 0:
            return None
        rows = RULES[aten.index.Tensor](facts, value, a.args[0], (indices[1],))
        return Staged(rows) if isinstance(rows, Rows) else None
    if len(by) == 2 and isinstance(by[0], Token) and isinstance(by[1], Slot):
        ids, weights = by[0].ids, a
        while weights.op is aten.unsqueeze.default and weights.args[1] in (-1, len(weights.meta.shape) - 1):
            weights = weights.args[0]
        fits = len(weights.meta.shape) == 2 and all(map(same, weights.meta.shape, ids.meta.shape))
        if by[1] != Slot(ids, by[0].order) or not fits or not weights.meta.dtype.is_floating_point:
            return None
        return RowWeight(weights, ids, by[0].order) if facts.of(weights) is None else None
    return None


@_own(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(facts, value, a, shape):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if len(old) == len(new) and all(map(same, old, new)):
        return fact if isinstance(fact, (Member, Staged)) else None
    return fact.inner if isinstance(fact, Staged) and len(new) == len(old) - 1 and same(new[-1], old[-1]) else None


@_own(aten.unsqueeze.default, aten.expand.default)
def _stage(facts, value, a, *args, **kwargs):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if isinstance(fact, (Staged, Member)) and len(old) == len(new) and all(map(same, old, new)):
        return fact
    staged = len(new) == len(old) + 1 and same(new[0], 1) and all(map(same, old, new[1:]))
    before = value.op is aten.expand.default or args[0] % len(new) == 0
    rows = isinstance(fact, (Rows, Pointwise)) and isinstance(fact.order, str)
    return Staged(fact) if staged and before and (rows or isinstance(fact, Member)) else None


@_own(aten.bmm.default)
def _bmm(facts, value, a, b):
    if not all(isinstance(facts.of(v), Staged) for v in (a, b)):
        return None
    low = facts.derived("unstaged", (value,), value, value.meta.shape[1:])
    product = _mm(facts, low, facts.unstaged(a), facts.unstaged(b))
    return Staged(product) if product is not None else None


_ROWWISE = {
    getattr(packet, overload)
    for packet in (
        aten.mul, aten.add, aten.sub, aten.rsub, aten.div, aten.silu, aten.sigmoid, aten.relu, aten.tanh, aten.exp,
        aten.erf, aten.gelu, aten.softplus, aten.neg, aten.pow, aten.clamp, aten.clamp_min, aten.clamp_max,
        aten.hardtanh, aten._to_copy, aten.split, aten.slice,
    )
    for overload in packet.overloads()
}  # fmt: skip


def _rowwise(facts, value, *args, **kwargs):
    """Functions of rows, whatever stands before the rows."""
    if value.op in (aten.split.Tensor, aten.slice.Tensor):
        place = 2 if value.op is aten.split.Tensor else 1
        if len(args) <= place or args[place] % len(value.meta.shape) == 0:
            return None
        args = (*args[:place], args[place] % len(value.meta.shape) - 1, *args[place + 1 :])
    low = facts.derived("unstaged", (value,), value, value.meta.shape[1:])
    args = tuple(facts.unstaged(a) for a in args)
    apply = OWN.get(value.op)
    fact = apply(facts, low, *args, **kwargs) if apply else None
    fact = RULES[value.op](facts, low, *args, **kwargs) if fact is None and value.op in RULES else fact
    return Staged(fact) if isinstance(fact, (Rows, Pointwise, Member)) else None


@_own(aten.mm.default)
def _mm(facts, value, a, b):
    rows, member = facts.of(a), facts.of(b)
    if not isinstance(member, Member) or not isinstance(rows, (Rows, Pointwise)) or len(b.meta.shape) != 2:
        return None
    if rows.ids is None:
        return None
    return _projected(value, rows, member.weight, rows.ids)


@_own(aten.addmm.default)
def _addmm(facts, value, bias, a, b, *, beta=1, alpha=1):
    member, product = facts.of(bias), _mm(facts, value, a, b)
    if product is None or not isinstance(member, Member) or len(bias.meta.shape) != 1 or (beta, alpha) != (1, 1):
        return None
    return _biased(product, BiasRows(member.weight.stored, product.ids, product.order))


@_own(aten.add.Tensor)
def _add(facts, value, a, b, alpha=1):
    for x, y in ((a, b), (b, a)):
        fact, member = facts.of(x), facts.of(y)
        if isinstance(fact, Pointwise) and isinstance(member, Member) and len(y.meta.shape) == 1 and alpha == 1:
            return _biased(fact, BiasRows(member.weight.stored, fact.ids, fact.order))
    return None


@_own(aten.mul.Tensor, aten.mul.Scalar)
def _mul(facts, value, a, b):
    """A constant behind the routing weights belongs to them."""
    fact = facts.of(a)
    constant = isinstance(b, (int, float)) and not isinstance(b, bool)
    if not constant or not isinstance(fact, Pointwise) or fact.level < 2 or not isinstance(fact.weight, Value):
        return None
    scaled = facts.derived(aten.mul.Tensor, (fact.weight, b), fact.weight, fact.weight.meta.shape)
    return replace(fact, weight=scaled)


@_own(aten.index_add.default)
def _index_add(facts, value, base, dim, index, source, *, alpha=1):
    rows, by = facts.of(source), facts.of(index)
    if not isinstance(rows, Rows):
        return None  # rows of experts: the rules of whole graphs
    whole = dim % len(base.meta.shape) == 0 and alpha == 1 and same(base.meta.shape[-1], source.meta.shape[-1])
    if not isinstance(by, Token) or (by.ids, by.order, by.k) != (rows.ids, rows.order, rows.k) or not whole:
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    return Passed(rows, base)
