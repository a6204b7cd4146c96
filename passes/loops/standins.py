"""What the body of a loop over experts gets to see while one turn of it is recorded.

They stand for an expert's number, for the experts and for what belongs to one of them. What they cannot stand for ends
the proof: nothing that a turn does may depend on which expert it is for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.graph import record  # noqa: F401  registers the ops
from mok_compile.passes.graph.view import decomposed
from mok_compile.passes.loops.alike import check_calm, difference
from mok_compile.passes.loops.calls import unwatched

if TYPE_CHECKING:
    from mok_compile.passes.loops.iteration import Turn

loop_ops = torch.ops.mok_loop
_TOKEN = "\0e\0"  # stands for the expert's number in a string


class Split(Exception):
    """Experts from `at` on are of another kind than those before; `why`, where that is known."""

    def __init__(self, at: int, why: str = "") -> None:
        super().__init__(at)
        self.at, self.why = at, why


class Absent(Exception):
    """There are no such experts: eager fails if one of them is hit."""


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


class _Unasked:
    """Base of what stands for a number or for numbers: none of their other attributes, asked by name, is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's and torch's own questions
            raise AttributeError(name)
        raise Break("no-match", f"the loop reads {name} of a number")


class Index(_Unasked):
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
            raise Split(number if number > self.lo else number + 1)
        return True

    def __ne__(self, other):
        return not self == other

    def __lt__(self, other):
        number = self._number(other)
        if self.lo < number < self.hi:
            raise Split(number)
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


def number_of(value: Any = 0, *args) -> Any:
    """Stands for `int`."""
    return value.item() if isinstance(value, (Index, Count, torch.Tensor)) else int(value, *args)


def is_kind(value: Any, kinds: Any) -> bool:
    """Stands for `isinstance`."""
    if isinstance(value, (_Unasked, Listed)):
        raise Break("no-match", "the loop asks of what kind a number, or a list for all experts, is")
    return isinstance(value, kinds)


def type_of(value: Any, *args) -> Any:
    """Stands for `type`."""
    if args:
        return type(value, *args)
    if isinstance(value, (_Unasked, Listed)):
        raise Break("no-match", "the loop asks of what type a number, or a list for all experts, is")
    if isinstance(value, torch.Tensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return value.__class__ if isinstance(value, (Owner, Group, Expert)) else type(value)


def length_of(value: Any) -> Any:
    """Stands for `len`, which would make a number of a size."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)


def numbered(items: Any, start: int = 0) -> Any:
    """Stands for `enumerate`."""
    if not isinstance(items, (Group, Numbers, torch.Tensor)):
        return enumerate(items, start)
    if start != 0:
        raise Break("no-match", f"the loop numbers its experts from {start} on")
    return Counted(items.tensor if isinstance(items, Numbers) else items)


@dataclass(frozen=True)
class Counted:
    """``enumerate`` of experts, or of the number of each expert's rows."""

    items: Group | torch.Tensor


def zipped(*items: Any, strict: bool = False) -> Any:
    """Stands for `zip`."""
    return Zipped(items, strict) if any(isinstance(i, (Group, Listed)) for i in items) else zip(*items, strict=strict)


@dataclass(frozen=True)
class Zipped:
    """``zip`` of experts and of what belongs to each of them: entries along the first dimension, items of a list, or
    their numbers."""

    items: tuple[Group | Listed | torch.Tensor | range, ...]
    strict: bool

    @property
    def size(self) -> int:
        def of(item: Any) -> Any:
            if isinstance(item, (Group, Listed)) or (isinstance(item, range) and (item.start, item.step) == (0, 1)):
                return len(item)
            return item.shape[0] if isinstance(item, torch.Tensor) and item.dim() else None

        sizes = [of(item) for item in self.items]
        if not all(isinstance(size, int) for size in sizes):
            raise Break("no-match", "the loop goes over experts along with something else than theirs")
        if self.strict and len(set(sizes)) > 1:
            raise Break("shape", "the loop goes over experts strictly along with what is not as many")
        return min(sizes)

    def __getitem__(self, index: Index) -> tuple:
        return tuple(index if isinstance(item, range) else item[index] for item in self.items)


@dataclass(frozen=True)
class Numbers(_Unasked):
    """The numbers in `tensor`, as Python has them."""

    tensor: torch.Tensor
    turn: Turn

    def cumsum(self, axis: int = 0) -> Numbers:
        if axis not in (0, -1):
            raise Break("no-match", "the loop adds up numbers in an unusual way")
        return Numbers(self.tensor.cumsum(0), self.turn)

    def tolist(self) -> Numbers:
        return self

    def __len__(self) -> int:
        return length_of(self.tensor)

    def __getitem__(self, index: Any) -> Count | Edge:
        """How many rows the turn's expert has, if these are counts, or where they end: `Turn.conclude` makes sure."""
        size = self.tensor.shape[0] if self.tensor.dim() == 1 else 0
        if isinstance(index, Index) and self.turn.are_ends(self.tensor):
            return self.turn.edge(self.tensor, True)
        if not isinstance(index, Index) or not isinstance(size, int) or size < index.hi:
            raise Break("no-match", "the loop takes a number of which nothing is known")
        self.turn.looked_up.append(self.tensor)
        return Count(self.turn.rows == 0)


class Count(_Unasked):
    """How many rows the turn's expert has: none, or (`idle` False) some. `exact`: nothing else than that many, if the
    numbers that the loop goes over are counts."""

    __hash__ = None

    def __init__(self, idle: bool, exact: bool = False) -> None:
        self.idle, self.exact = idle, exact

    def item(self) -> Count:
        return self

    def __eq__(self, other):
        self._check(other)
        return self.idle

    def __ne__(self, other):
        return not self == other

    def __gt__(self, other):
        return not self == other

    def __le__(self, other):
        return self == other

    def __ge__(self, other):
        self._check(other, 1)
        return not self.idle

    def __lt__(self, other):
        return not self >= other

    def __bool__(self):
        return not self.idle

    def __add__(self, other):
        if isinstance(other, Edge) and not other.end and self.exact:
            return Edge(self.idle, True)
        raise Break("no-match", "the loop computes with the number of an expert's rows")

    __radd__ = __add__

    def __index__(self):
        raise Break("no-match", "the loop depends on the number of an expert's rows")

    __int__ = __float__ = __index__

    @staticmethod
    def _check(other: Any, number: int = 0) -> None:
        if not isinstance(other, int) or other != number:
            raise Break("no-match", "the loop compares the number of an expert's rows with something else than none")


class Edge(_Unasked):
    """Where the rows of the turn's expert begin, or `end`, in rows that are sorted by expert; `idle`: it has none."""

    __hash__ = None

    def __init__(self, idle: bool, end: bool = False) -> None:
        self.idle, self.end = idle, end

    def __eq__(self, other):
        end = self._end(other)
        return self.idle or self.end == end

    def __ne__(self, other):
        return not self == other

    def __lt__(self, other):
        end = self._end(other)
        return not self.idle and not self.end and end

    def __gt__(self, other):
        end = self._end(other)
        return not self.idle and self.end and not end

    def __le__(self, other):
        return not self > other

    def __ge__(self, other):
        return not self < other

    def __bool__(self):
        raise Break("no-match", "the loop depends on the place of an expert's rows")

    def __sub__(self, other):
        if not self.end or self._end(other):
            raise Break("no-match", "the loop computes with the places of an expert's rows")
        return Count(self.idle)

    @staticmethod
    def _end(other: Any) -> bool:
        if not isinstance(other, Edge):
            raise Break("no-match", "the loop compares the place of an expert's rows with something else than another")
        return other.end


def before(ends: Any, number: Any) -> Any:
    """Stands for ``0 if number == 0 else ends[number - 1]``: where the rows of the expert begin."""
    if not isinstance(number, Index):
        return 0 if number == 0 else ends[number - 1]
    if not isinstance(ends, Numbers) or number.lo != 0 or not ends.turn.are_ends(ends.tensor):
        raise Break("no-match", "the loop computes with an expert's number")
    return ends.turn.edge(ends.tensor, False)


class Appended:
    """The list that a loop puts its results in."""

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def append(self, result: Any) -> None:
        if self.results or not isinstance(result, torch.Tensor):
            raise Break("no-match", "a turn of the loop puts something else than one tensor into its list")
        self.results.append(result)


class Owner:
    """The module whose method the loop is in; lists and dictionaries of modules in it pick the expert by its number."""

    __class__ = property(lambda self: type(self.__dict__["_mok_turn"].owner))  # what `isinstance` asks for

    def __init__(self, turn: Turn) -> None:
        self.__dict__["_mok_turn"] = turn

    def __getattr__(self, name: str) -> Any:
        turn: Turn = self.__dict__["_mok_turn"]
        value = getattr(turn.owner, name)
        if isinstance(value, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            return Group(turn, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise Break("no-match", f"the loop sets self.{name}")

    def __getitem__(self, key: Any) -> Any:
        turn: Turn = self.__dict__["_mok_turn"]
        return Group(turn, "", turn.owner)[key]


class Group:
    """A container of experts."""

    __class__ = property(lambda self: type(self._modules))  # what `isinstance` asks for

    def __init__(self, turn: Turn, name: str, modules: torch.nn.Module) -> None:
        kinds = (torch.nn.ModuleList, torch.nn.ModuleDict)
        standard = any(type(modules).__getitem__ is kind.__getitem__ for kind in kinds if isinstance(modules, kind))
        if not standard:
            raise Break("no-match", f"{type(modules).__name__} is no list of experts")
        self._turn, self._name, self._modules = turn, name, modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self):
        raise Break("data-dependent", "the loop goes over the experts themselves")

    def values(self) -> Group:
        return self

    def __getattr__(self, name: str) -> Any:
        if _TOKEN in name:
            return self[name]
        raise Break("no-match", f"the loop reads {name} of the experts")

    def __getitem__(self, key: Any) -> Expert:
        """The expert that stands for all that `key` can mean."""
        lo, hi = self._turn.range
        self._turn.picked_of.add(len(self._modules))
        if hi > len(self._modules):
            raise Split(len(self._modules)) if lo < len(self._modules) else Absent
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
        with torch._C.DisableTorchFunction():  # looks at all parameters; `Indexing` has no business there
            found = ((i, difference(members[0], member, self._turn.reach)) for i, member in enumerate(members))
            other = next(((i, what) for i, what in found if what is not None), None)
        if other is not None:
            i, what = other
            raise Split(lo + i, f"experts {lo} and {lo + i} are not alike: {what}")
        return Expert(self._turn, self._name, keys, members)


class Expert:
    """An expert that stands for all of `members`."""

    __class__ = property(lambda self: type(self._members[0]))  # what `isinstance` asks for

    def __init__(self, turn: Turn, container: str, keys: tuple, members: list[torch.nn.Module]) -> None:
        self._turn, self._container, self._keys, self._members = turn, container, keys, members

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise Break("no-match", f"the loop reads {name} of an expert")

    def __bool__(self) -> bool:
        return bool(self._members[0])

    def parameters(self) -> Iterator[torch.Tensor]:
        return (self._picked(name, parameter) for name, parameter in self._members[0].named_parameters())

    def _picked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        source = Members(self._container, self._keys, name)
        bank = self._turn.recorder.empty((len(self._members), *tensor.shape), tensor, source)
        picked = loop_ops.pick(bank, False)
        picked._is_param = isinstance(tensor, torch.nn.Parameter)  # what `isinstance` asks for
        return picked

    def __call__(self, *args, **kwargs):
        first = self._members[0]
        check_calm(first)
        picked = {}
        for path, module in first.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    full = f"{path}.{name}" if path else name
                    picked[full] = self._picked(full, tensor)
        given = dict(picked)
        # Weights that are tied in the first expert need not be tied in the others.
        result = torch.func.functional_call(first, picked, args, kwargs, tie_weights=False)
        if any(picked[name] is not tensor for name, tensor in given.items()):
            raise Break("mutation", "an expert replaces one of its buffers")
        return result


class Listed:
    """A list of one tensor for each expert."""

    def __init__(self, turn: Turn, tensors: list[torch.Tensor], place: int) -> None:
        self._turn, self._tensors, self._place = turn, tensors, place

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: Any) -> torch.Tensor:
        lo, hi = self._turn.range
        first, same_kind = self._tensors[0], {(t.shape, t.dtype, t.device) for t in self._tensors}
        if not isinstance(key, Index) or hi > len(self._tensors) or lo != 0 or len(same_kind) > 1:
            raise Break("no-match", "the loop picks from a list by something else than an expert's number")
        self._turn.picked_of.add(len(self._tensors))
        shape = (hi, *first.shape)
        return loop_ops.pick(self._turn.recorder.empty(shape, first, Local(self._place, listed=True)), False)


# Of the tensors of a recording, nothing that autograd says is what eager would be told.
_GRADIENTS = [getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")]
_PRINTS = (torch.Tensor.__repr__, torch.Tensor.__format__)


class Indexing(TorchFunctionMode):
    """Tensors that are indexed or compared with an `Index`, and dropout, which is told by its name and rate."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self._draws = itertools.count()

    @unwatched
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
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice) and isinstance(args[1].stop, Edge):
            return self._segment(args[0], args[1])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(map(_listed, args[1])))
        if func is torch.Tensor.__getitem__ and isinstance(args[1], Numbers):
            args = (args[0], _listed(args[1]))
        if func in _GRADIENTS:
            raise Break("data-dependent", "the loop asks about the gradients of a tensor")
        if func in _PRINTS:
            raise Break("data-dependent", "the loop prints a tensor")
        if func is torch.Tensor.numpy:
            return Numbers(args[0], self.turn)
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and args[0].numel() == 1:
            hit = self.turn.answer(args[0])
            return hit if func is torch.Tensor.__bool__ or args[0].dtype == torch.bool else Count(not hit)
        if func is torch.nn.functional.dropout:
            return self._dropout(func, *args, **kwargs)
        with decomposed(getattr(func, "__name__", "")):
            return func(*args, **kwargs)

    def _dropout(self, func: Callable, rows: torch.Tensor, p: float = 0.5, training: bool = True, inplace=False):
        if not training or inplace or not 0 < p < 1:
            return func(rows, p, training, inplace)
        return loop_ops.dropout(rows, float(p), next(self._draws))

    def _pick(self, tensor: torch.Tensor, index: Index) -> torch.Tensor:
        if tensor.shape[0] < index.hi:
            raise Split(tensor.shape[0]) if index.lo < tensor.shape[0] else Absent
        self.turn.picked_of.add(tensor.shape[0])
        return loop_ops.pick(tensor, index.dims == 1)

    def _segment(self, tensor: torch.Tensor, key: slice) -> torch.Tensor:
        whole = isinstance(key.start, Edge) and not key.start.end and key.stop.end and key.step is None
        again = self.turn.segmented is not None and self.turn.segmented is not tensor
        if not whole or (again and self.turn.cut.appends):
            raise Break("no-match", "the loop takes rows that are not proven to be its expert's")
        self.turn.segmented = tensor
        return loop_ops.segment(tensor, self.turn.recorder.rows)

    def _pick_at(self, tensor: torch.Tensor, keys: tuple, places: list[int]) -> torch.Tensor:
        rows, rest = _listed(keys[0]), keys[2:]
        if places != [1] or not isinstance(rows, torch.Tensor) or any(key is not None for key in rest):
            raise Break("no-match", "the loop picks numbers of an expert in an unusual way")
        if tensor.dim() != 2 or tensor.shape[1] < keys[1].hi:
            raise Break("shape", "an expert has no column of its own")
        if rows.dtype == torch.bool:
            if rows.dim() != 1:
                raise Break("no-match", "the loop picks numbers of an expert in an unusual way")
            rows = rows.nonzero().squeeze(1)
        found = loop_ops.pick_at(tensor, rows)
        for _ in rest:
            found = found.unsqueeze(-1)
        return found


def _listed(key: Any) -> Any:
    """Numbers that index a tensor do so as the tensor that they are from."""
    return key.tensor if isinstance(key, Numbers) and not key.tensor.dtype.is_floating_point else key
