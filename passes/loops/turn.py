"""Facts of one turn of a loop over experts: how an expert's share is picked, computed and added up.

They go with the facts and rules of whole graphs: the rows of the turn's expert are known as rows in an order of their
own, its matrix as that of all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mok_compile.passes.facts.kinds import (
    SORTED,
    BiasRows,
    Broken,
    Combined,
    Differentiable,
    Expert,
    Fact,
    Iota,
    Offsets,
    Onto,
    Perm,
    Pointwise,
    Rows,
    RowWeight,
    Token,
    Weight,
)
from mok_compile.passes.facts.rules import (
    RULES,
    Break,
    Facts,
    combination,
    name_of,
    projection_of,
    root_of,
    same,
    with_bias,
)
from mok_compile.passes.graph import record  # noqa: F401  registers the ops
from mok_compile.passes.graph.view import Meta, Value, View

if TYPE_CHECKING:
    from mok_compile.passes.loops.iteration import Turn

aten, loop_ops = torch.ops.aten, torch.ops.mok_loop


@dataclass(frozen=True)
class Choice(Fact):
    """1 where the slot goes to the expert, else 0; `axes` of "t" (token), "k" (slot of it), "e" (expert), "1"."""

    ids: Value
    axes: tuple[str, ...]
    num_experts: int


@dataclass(frozen=True)
class Mine(Fact):
    """`Choice` of the turn's expert. Several axes "t" are one, in row-major order. With `merged`, whether any of the
    token's slots goes there."""

    ids: Value
    axes: tuple[str, ...]
    merged: bool = False


@dataclass(frozen=True)
class Hit(Fact):
    """One number: whether the turn's expert has a row, or how many; `negated`: whether it has none."""

    ids: Value
    negated: bool = False


@dataclass(frozen=True)
class MyShare(Fact):
    """[T, K], or [T] where `summed`: the routing weights of the slots that go to the turn's expert, zeros elsewhere."""

    ids: Value
    weights: Value
    summed: bool = False


@dataclass(frozen=True)
class Used(Fact):
    """Positive where the expert has a row, else zero."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class Occupied(Fact):
    """The numbers of the experts that have a row, each once."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class ChosenAt(Fact):
    """[n, axes]: where the turn's expert is chosen; `sizes` of these axes."""

    ids: Value
    order: str
    axes: tuple[str, ...]
    sizes: tuple


@dataclass(frozen=True)
class Part(Fact):
    """One of several indices that are the tokens of the expert's rows together: number `place`, of dimensions that are
    as large as `sizes`."""

    token: Token
    place: int
    sizes: tuple


@dataclass(frozen=True)
class Marks(Fact):
    """[n, K]: at each of the expert's rows, which of its token's slots go there: one."""

    ids: Value
    order: str


@dataclass(frozen=True)
class Slot(Fact):
    """At each of the expert's rows: which of its token's slots it is."""

    ids: Value
    order: str


@dataclass(frozen=True)
class Turned(Fact):
    """At each of the expert's rows: which of all slots it is."""

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


@dataclass(frozen=True)
class Dropped(Fact):
    """What `rows` says, but dropout has taken numbers of the experts' outputs away, at this rate."""

    rows: Pointwise | Onto | Combined
    rate: float


class Symbolic(Exception):
    """The number of a token's slots, `size`, is a symbol."""

    def __init__(self, size: torch.SymInt) -> None:
        super().__init__(size)
        self.size = size


# The op of a value that no node holds: the expert of each row, by how many rows each expert has.
ROW_IDS = "row_ids"
# The same: the expert of each slot, by a mask that has at most one; no expert's number where it has none.
CHOSEN = "chosen"
# The same: a tensor with one dimension for all but the last.
FLAT = "flat"
OWN: dict[Any, Callable] = {}


def _own(*ops) -> Callable:
    def register(function: Callable) -> Callable:
        for op in ops:
            OWN[op] = function
        return function

    return register


class TurnFacts(Facts):
    """Facts of one turn: the rules of this module first."""

    differentiable = Differentiable | Member | Staged | Passed | Dropped | MyShare

    def __init__(self, view: View, turn: Turn) -> None:
        self.turn = turn
        self._made: dict[tuple, Value] = {}
        super().__init__(view.values, {v: self._one_hot(v) for v in view.values if turn.is_mask(v)})

    def derived(self, op: Any, args: tuple, like: Value, shape: tuple, dtype: torch.dtype | None = None) -> Value:
        """A value that no node holds: `op` of banks as a whole, where the loop applies it to one member."""
        key = (op, *args)
        if key not in self._made:
            meta = Meta(dtype or like.meta.dtype, shape, like.meta.device)
            self._made[key] = Value(-1 - len(self._made), op, args, {}, like.index, meta, like.detached)
        return self._made[key]

    def _one_hot(self, mask: Value) -> Choice:
        """What `mask` says, which has at most one expert for each slot."""
        *slots, experts = mask.meta.shape
        ids = self.derived(CHOSEN, (mask,), mask, tuple(slots), torch.int64)
        return Choice(ids, (*"tk"[: len(slots)], "e"), experts)

    def unstaged(self, value: Any) -> Any:
        """`value` without the dimension of one before it, if it is known as something with one."""
        fact = self.of(value)
        if not isinstance(fact, Staged):
            return value
        low = self.derived("unstaged", (value,), value, value.meta.shape[1:])
        self._of[low] = fact.inner
        return low

    def assumed(self, value: Value, fact: Fact | None) -> Value:
        """A value that no node holds, like `value` but with this fact."""
        other = self.derived("assumed", (value, fact), value, value.meta.shape)
        if fact is not None:
            self._of[other] = fact
        return other

    def _derive(self, value: Value) -> None:
        apply = OWN.get(value.op)
        if value.op in _ROWWISE and any(isinstance(self.of(v), Staged) for v in value.inputs):
            apply = _rowwise
        if any(isinstance(self.of(v), Dropped) for v in value.inputs) and value.op is not loop_ops.flat.default:
            apply = _behind_dropout
        if apply is not None:
            try:
                fact = apply(self, value, *value.args, **value.kwargs)
            except Break as stop:
                self._break(value, stop)
                return
            if fact is not None:
                if value.detached and isinstance(fact, self.differentiable):
                    self._break(value, Break("no-match", "gradients are switched off inside the loop"))
                else:
                    self._of[value] = fact
                return
        super()._derive(value)

    def _break(self, value: Value, stop: Break) -> None:
        self.broken[value] = Broken(stop.reason, stop.detail, value)


def not_from_0(lo: int, why: str) -> Break:
    """Why the experts from number `lo` on are no block; `why` they are not of one kind with those before."""
    other = f"the loop does something else for the experts before number {lo}, and runs an MLP only from there on"
    return Break("layout", why or other)


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
    axes = {1: ("t",), 2: ("t", "k"), 3: ("t", "t", "k")}.get(len(ids.meta.shape))
    if not axes or not _integer(ids):
        return None
    return Mine(_flat(facts, ids) if len(axes) == 3 else ids, axes)


def _flat(facts: TurnFacts, tensor: Value) -> Value:
    """`tensor` with one dimension for all but the last."""
    *sizes, last = tensor.meta.shape
    return facts.derived(FLAT, (tensor,), tensor, (math.prod(sizes), last))


@_own(aten._to_copy.default)
def _copy(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    if device is not None and value.meta.device != a.meta.device:
        return None
    if isinstance(fact, (Choice, Mine, Marks)) or (isinstance(fact, (Used, Hit)) and _holds_counts(value)):
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
        tokens = [d for d in order if fact.axes[d] == "t"]
        return replace(fact, axes=tuple(fact.axes[d] for d in order)) if tokens == sorted(tokens) else None
    if isinstance(fact, Member) and order == [1, 0]:
        return Member(replace(fact.weight, transposed=not fact.weight.transposed))
    if isinstance(fact, Staged) and isinstance(fact.inner, Member) and order == [0, 2, 1]:
        weight = fact.inner.weight
        return Staged(Member(replace(weight, transposed=not weight.transposed)))
    return fact if order == list(range(rank)) and isinstance(fact, Member) else None


@_own(aten.sum.dim_IntList)
def _sum(facts, value, a, dim, keepdim=False, **kwargs):
    fact = facts.of(a)
    if isinstance(fact, MyShare):
        last = dim is not None and [d % len(a.meta.shape) for d in dim] == [1] and not (keepdim or fact.summed)
        return replace(fact, summed=True) if last and value.meta.dtype == a.meta.dtype else None
    if isinstance(fact, Mine):
        return _merged(fact, dim, keepdim) if _holds_counts(value) else None
    if not isinstance(fact, Choice) or keepdim or dim is None:
        return None
    left = [axis for i, axis in enumerate(fact.axes) if i not in [d % len(fact.axes) for d in dim]]
    return Used(fact.ids, fact.num_experts) if left == ["e"] and _holds_counts(value) else None


def _holds_counts(value: Value) -> bool:
    """Whether no count of rows is zero in the type of `value` unless it is zero: 256 is, in eight bits."""
    dtype = value.meta.dtype
    return dtype.is_floating_point or dtype in (torch.bool, torch.int32, torch.int64)


@_own(loop_ops.tally.default)
def _tally(facts, value, ids, n):
    ids = _counted_of(facts, ids)
    return None if ids is None else Used(ids, n if isinstance(n, int) else facts.turn.num_experts())


def _counted_of(facts: TurnFacts, ids: Value) -> Value | None:
    """The expert numbers that `ids` are, in any order."""
    fact = facts.of(ids)
    if isinstance(fact, Expert) and not fact.clamped:
        return fact.ids
    ids = root_of(ids)
    return ids if facts.of(ids) is None and _integer(ids) else None


@_own(aten.cumsum.default)
def _cumsum(facts, value, counts, dim, **kwargs):
    ids = _tallied(facts, counts)
    return Offsets(ids, facts.of(counts).num_experts) if ids is not None and value.meta.dtype == torch.int64 else None


def _tallied(facts: TurnFacts, counts: Value) -> Value | None:
    """The expert numbers of which `counts` says how many there are of each, in one dimension."""
    while counts.op in (aten._to_copy.default, aten.alias.default, aten.detach.default):
        if counts.meta.dtype not in (torch.int32, torch.int64):
            return None
        counts = counts.args[0]
    return facts.of(counts).ids if counts.op is loop_ops.tally.default and facts.of(counts) is not None else None


@_own(aten.gt.Scalar, aten.ne.Scalar, aten.ge.Scalar)
def _positive(facts, value, a, number):
    fact = facts.of(a)
    least = 1 if value.op is aten.ge.Scalar else 0
    return fact if isinstance(fact, (Used, Hit, Mine)) and number == least else None


@_own(aten.eq.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.logical_not.default, aten.bitwise_not.default)
def _none(facts, value, a, number=None):
    fact = facts.of(a)
    least = {aten.eq.Scalar: 0, aten.lt.Scalar: 1, aten.le.Scalar: 0}.get(value.op)
    flipped = a.meta.dtype == torch.bool if least is None else a.meta.dtype != torch.bool
    return replace(fact, negated=not fact.negated) if isinstance(fact, Hit) and flipped and number == least else None


@_own(aten.any.default, aten.sum.default, aten.count_nonzero.default)
def _hit(facts, value, a, **kwargs):
    fact = facts.of(a)
    return Hit(fact.ids) if isinstance(fact, Mine) and _holds_counts(value) else None


@_own(aten.any.dim, aten.any.dims)
def _any(facts, value, a, dim=None, keepdim=False):
    fact = facts.of(a)
    return _merged(fact, dim, keepdim) if isinstance(fact, Mine) else None


def _merged(fact: Mine, dim: int | Sequence[int] | None, keepdim: bool) -> Mine | None:
    """`fact` where all slots of a token are one."""
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    gone = [fact.axes[d] for d in dims]
    if keepdim or gone != ["k"]:
        return None
    return Mine(fact.ids, tuple(axis for axis in fact.axes if axis != "k"), True)


@_own(loop_ops.nonzero.default)
def _nonzero(facts, value, mask, n):
    fact = facts.of(mask)
    if isinstance(fact, Used):
        return Occupied(fact.ids, fact.num_experts)
    if not isinstance(fact, Mine):
        return None
    if fact.merged and not facts.turn.is_distinct(fact.ids):
        raise Break("no-match", "a token may go to one expert twice, and would be counted once")
    # The places of two masks are in the same order if they run through tokens and slots alike.
    axes = [axis for axis in fact.axes if axis != "1"]
    before = axes.index("k") if "k" in axes else axes.count("t")
    order = {axes.count("t"): "token by token", 0: "slot by slot"}.get(before, f"slots behind {before} of the axes")
    return ChosenAt(fact.ids, order, fact.axes, mask.meta.shape)


@_own(loop_ops.unique.default)
def _unique(facts, value, ids, n):
    ids = root_of(ids)
    if not facts.turn.is_distinct(ids):
        raise Break("no-match", "the loop goes over numbers that are not proven to be those of a top-k choice")
    return Occupied(ids, facts.turn.num_experts())


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
    if isinstance(fact, Occupied):
        return fact
    if not isinstance(fact, ChosenAt):
        return None
    axis, (_, *slots) = fact.axes[index], fact.ids.meta.shape
    if slots and not isinstance(slots[0], int):
        raise Symbolic(slots[0])
    token = Token(fact.ids, fact.order, *(slots or [1]))
    if axis == "t" and fact.axes.count("t") > 1:
        place = fact.axes[: index % len(fact.axes)].count("t")
        return Part(token, place, tuple(size for a, size in zip(fact.axes, fact.sizes, strict=True) if a == "t"))
    if axis == "t":
        return token
    return Slot(fact.ids, fact.order) if axis == "k" else None


@_own(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor, aten.alias.default)
def _narrow(facts, value, a, *args, **kwargs):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if isinstance(fact, ChosenAt):  # of one dimension: a single column
        return _column(facts, a, 1, 0) if len(old) == 2 and same(old[1], 1) and len(new) == 1 else None
    if isinstance(fact, (Choice, Mine)) and len(new) < len(old):
        dims = [args[0]] if isinstance(args[0], int) else list(args[0]) if args else None
        if dims is None:
            return None
        dims = [d % len(old) for d in dims]
        if len(old) - len(new) != len(dims):
            return None
        return replace(fact, axes=tuple(axis for i, axis in enumerate(fact.axes) if i not in dims))
    whole = len(old) == len(new) and all(map(same, old, new))
    kept = Choice | Mine | Used | Occupied | Member | Token | Pointwise | RowWeight
    return fact if whole and isinstance(fact, kept) else None


@_own(loop_ops.pick.default)
def _pick(facts, value, bank, keepdim):
    fact, (lo, hi) = facts.of(bank), facts.turn.range
    if isinstance(fact, Choice):
        if fact.axes[0] != "e" or hi > fact.num_experts:
            return None
        return Mine(fact.ids, (("1",) if keepdim else ()) + fact.axes[1:])
    if fact is None and not bank.meta.dtype.is_floating_point:
        raise Break("no-match", "the experts' rows are picked by numbers of which nothing is known")
    if fact is not None or len(bank.meta.shape) not in (2, 3):
        return None
    if lo != 0:
        raise not_from_0(lo, facts.turn.why)
    if bank.meta.shape[0] != hi:
        bank = facts.derived(aten.slice.Tensor, (bank, 0, 0, hi), bank, (hi, *bank.meta.shape[1:]))
    member = Member(Weight(bank, True))
    return Staged(member) if keepdim else member


@_own(loop_ops.segment.default)
def _segment(facts, value, rows, n):
    counts, fact = facts.turn.counts, facts.of(rows)
    if isinstance(fact, Perm) or (isinstance(fact, (Token, Rows, RowWeight)) and fact.order == SORTED):
        if _bounded(facts) is not fact.ids:
            raise Break("no-match", "the places of each expert's rows are not proven to be those of the sorted ids")
        return Turned(fact.ids, "segment") if isinstance(fact, Perm) else replace(fact, order="segment")
    if counts is None or facts.of(rows) is not None or not rows.meta.dtype.is_floating_point:
        return None
    if not facts.turn.are_counted(counts, rows):
        raise Break("no-match", "the counts of each expert's rows are not proven to be those of all rows")
    ids = facts.derived(ROW_IDS, (counts, rows), counts, rows.meta.shape[:1], torch.int64)
    return Rows(rows, 1, ids, "segment", dtypes=frozenset([rows.meta.dtype]))


def _bounded(facts: TurnFacts) -> Value | None:
    """The expert numbers of which the turn takes those of its expert, once they are sorted."""
    ends, counts = facts.turn.bounds, facts.turn.counts
    found = [] if counts is None else [_tallied(facts, counts)]
    if ends is not None:
        found.append(facts.of(ends).ids if isinstance(facts.of(ends), Offsets) else None)
    return found[0] if len(set(found)) == 1 else None


@_own(aten.floor_divide.default, aten.div.Tensor_mode)
def _floor_divide(facts, value, a, k, rounding_mode="floor"):
    fact, whole = facts.of(a), isinstance(k, int) and k > 0 and rounding_mode in ("floor", "trunc")
    return Token(fact.ids, fact.order, k) if isinstance(fact, Turned) and whole and _integer(value) else None


@_own(aten.repeat.default)
def _repeat(facts, value, a, repeats):
    """One column as many."""
    column = len(a.meta.shape) == 2 and same(a.meta.shape[1], 1) and len(repeats) == 2 and repeats[0] == 1
    return facts.of(a) if column and isinstance(facts.of(a), Token) else None


@_own(aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(facts, value, base, dim, index, source, reduce="sum", include_self=True):
    if (reduce, include_self) != ("sum", True) or not isinstance(facts.of(source), (Rows, Pointwise)):
        return None
    repeated = index.op in (aten.repeat.default, aten.expand.default) and len(index.meta.shape) == 2
    if not repeated or not same(index.meta.shape[1], source.meta.shape[1]):
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    rules = OWN if isinstance(facts.of(source), Rows) else RULES
    return rules[aten.index_add.default](facts, value, base, dim, index, source)


@_own(loop_ops.joined.default)
def _joined(facts, value, result, rows):
    fact = facts.of(result)
    whole = isinstance(fact, Pointwise) and fact.bare is not None and fact.level == 2
    if not whole or fact.weight is not None or fact.stray or fact.order != "segment":
        return None
    return Combined(fact, None)


@_own(loop_ops.flat.default)
def _flattened(facts, value, total):
    fact = facts.of(total)
    return fact if isinstance(fact, (Combined, Passed, Dropped)) else None


@_own(loop_ops.pick_at.default)
def _pick_at(facts, value, table, rows):
    by = facts.of(rows)
    if not isinstance(by, Token) or facts.of(table) is not None or not table.meta.dtype.is_floating_point:
        return None
    if not same(table.meta.shape[0], by.ids.meta.shape[0]):
        return None
    weights = facts.derived(aten.gather.default, (table, 1, by.ids), table, by.ids.meta.shape)
    return RowWeight(weights, by.ids, by.order)


@_own(aten.index_select.default)
def _index_select(facts, value, a, dim, index):
    return _index(facts, value, a, (index,)) if dim % max(1, len(a.meta.shape)) == 0 else None


@_own(aten.index.Tensor)
def _index(facts, value, a, indices):
    by = [facts.of(i) if isinstance(i, Value) else i for i in indices]
    if by and all(isinstance(fact, Part) for fact in by):
        token = _parts(by)
        whole = token is not None and len(a.meta.shape) == len(by) + 1 and all(map(same, a.meta.shape, by[0].sizes))
        if not whole:
            return None
        places = facts.assumed(indices[0], token)
        return RULES[aten.index.Tensor](facts, value, _flat(facts, a), (places,))
    if len(by) == 1 and isinstance(by[0], Token) and isinstance(facts.of(a), (Mine, MyShare)):
        return _mine_at(facts, facts.of(a), by[0]) if len(indices[0].meta.shape) == 1 else None
    if len(by) == 2 and by[0] is None and indices[0] is None and isinstance(by[1], Token):
        if a.op is not aten.unsqueeze.default or a.args[1] % len(a.meta.shape) != 0:
            return None
        rows = RULES[aten.index.Tensor](facts, value, a.args[0], (indices[1],))
        return Staged(rows) if isinstance(rows, Rows) else None
    if len(by) == 1 and isinstance(by[0], Turned):
        per_slot = facts.of(a) is None and a.meta.dtype.is_floating_point and all(same(n, 1) for n in a.meta.shape[1:])
        return RowWeight(a, by[0].ids, by[0].order) if per_slot and len(a.meta.shape) in (1, 2) else None
    if len(by) == 1 and isinstance(by[0], Token) and by[0].k == 1 and len(by[0].ids.meta.shape) == 1:
        return _one_each(facts, a, by[0]) or RULES[aten.index.Tensor](facts, value, a, indices)
    if len(by) == 2 and isinstance(by[0], Token) and isinstance(by[1], Slot):
        if len({len(index.meta.shape) for index in indices}) > 1:
            return None  # a row for each pair
        ids, weights = by[0].ids, a
        while weights.op is aten.unsqueeze.default and weights.args[1] in (-1, len(weights.meta.shape) - 1):
            weights = weights.args[0]
        if len(weights.meta.shape) == 2 and isinstance(weights.meta.shape[1], torch.SymInt):
            raise Symbolic(weights.meta.shape[1])
        if len(weights.meta.shape) == 3 and same(weights.meta.shape[2], 1):
            weights = facts.derived(aten.squeeze.dim, (weights, 2), weights, weights.meta.shape[:2])
        fits = len(weights.meta.shape) == 2 and all(map(same, weights.meta.shape, ids.meta.shape))
        if by[1] != Slot(ids, by[0].order) or not fits or not weights.meta.dtype.is_floating_point:
            return None
        return RowWeight(weights, ids, by[0].order) if facts.of(weights) is None else None
    return None


def _parts(by: Sequence[Part]) -> Token | None:
    """The token index that `by` are together."""
    alike = all(p.token == by[0].token and all(map(same, p.sizes, by[0].sizes)) for p in by)
    return by[0].token if alike and [p.place for p in by] == [*range(len(by[0].sizes))] else None


def _mine_at(facts: TurnFacts, fact: Mine | MyShare, by: Token) -> Marks | RowWeight | None:
    """What `fact` says at the rows of the expert."""
    slots = isinstance(fact, Mine) and fact.axes == ("t", "k")
    if by.ids is not fact.ids or not (slots or getattr(fact, "summed", False)):
        return None
    if not facts.turn.is_distinct(fact.ids):
        raise Break("no-match", "a token may go to one expert twice, and the two would be taken for one")
    return Marks(fact.ids, by.order) if slots else RowWeight(fact.weights, fact.ids, by.order)


@_own(aten.argmax.default)
def _argmax(facts, value, a, dim=None, keepdim=False):
    fact = facts.of(a)
    return Slot(fact.ids, fact.order) if isinstance(fact, Marks) and dim in (1, -1) else None


@_own(aten.gather.default)
def _gather(facts, value, a, dim, index, **kwargs):
    """``weights[tokens].gather(1, slots)``."""
    rows, slot = facts.of(a), facts.of(index)
    if not isinstance(rows, Rows) or not isinstance(slot, Slot) or dim % 2 != 1 or not same(index.meta.shape[1], 1):
        return None
    weights = rows.x
    plain = rows.weight is None and rows.dtypes == {weights.meta.dtype} and facts.of(weights) is None
    fits = len(weights.meta.shape) == 2 and all(map(same, weights.meta.shape, slot.ids.meta.shape))
    alike = (rows.ids, rows.order) == (slot.ids, slot.order)
    return RowWeight(weights, slot.ids, slot.order) if plain and fits and alike else None


def _one_each(facts: TurnFacts, a: Value, by: Token) -> RowWeight | None:
    """The weights [T] or [T, 1] of tokens that have one slot each."""
    shape, floating = a.meta.shape, a.meta.dtype.is_floating_point
    if facts.of(a) is not None or not floating or not same(shape[0], by.ids.meta.shape[0]):
        return None
    if len(shape) == 1:
        a = facts.derived(aten.unsqueeze.default, (a, -1), a, (*shape, 1))
    return RowWeight(a, by.ids, by.order) if len(shape) == 1 or (len(shape) == 2 and same(shape[1], 1)) else None


@_own(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(facts, value, a, shape):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if isinstance(fact, ChosenAt):
        return _narrow(facts, value, a)
    if isinstance(fact, Mine) and len(new) < len(old):
        tokens = fact.axes.count("t")
        rest = fact.axes[tokens:]
        flat = fact.axes[:tokens] == ("t",) * tokens and len(new) == 1 + len(rest)
        return replace(fact, axes=("t", *rest)) if flat and all(map(same, new[1:], old[tokens:])) else None
    if len(old) == len(new) and all(map(same, old, new)):
        return fact if isinstance(fact, (Member, Staged, Mine)) else None
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


@_own(loop_ops.dropout.default)
def _dropout(facts, value, a, rate, draw):
    fact = facts.of(a)
    if isinstance(fact, Pointwise) and fact.bare is not None and fact.level == 2:
        return Dropped(fact, rate)
    if isinstance(fact, (Rows, Pointwise, Staged)):
        raise Break("dropout", "dropout works inside the experts, before their last projection")
    return None


def _behind_dropout(facts, value, *args, **kwargs):
    """Weights, casts and the sum: the same as if dropout came after them, or before it in the sum."""
    dropped = [a for a in args if isinstance(facts.of(a), Dropped)]
    if value.op not in (*_BEHIND, *_SUMS):
        raise Break("post-norm", f"{name_of(value)} works on the experts' outputs behind dropout")
    fact, place = facts.of(dropped[0]), _SUMS.get(value.op)
    rows = Onto if value.op is aten.index_put.default else Pointwise
    if len(dropped) != 1 or not isinstance(fact.rows, rows) or (place is not None and dropped != [args[place]]):
        raise Break("post-norm", f"{name_of(value)} joins outputs behind dropout")
    low = facts.assumed(value, None)
    args = tuple(facts.assumed(a, fact.rows) if a is dropped[0] else a for a in args)
    apply = OWN.get(value.op)
    whole = apply(facts, low, *args, **kwargs) if apply else None
    whole = RULES[value.op](facts, low, *args, **kwargs) if whole is None else whole
    if value.op is aten.add.Tensor and not isinstance(whole, Onto):
        raise Break("post-norm", "something is added to the experts' outputs behind dropout")
    return replace(fact, rows=whole) if isinstance(whole, (Pointwise, Onto, Combined)) else None


# What may follow dropout, and what adds up, with the place of its rows among its arguments.
_BEHIND = (aten.mul.Tensor, aten.mul.Scalar, aten._to_copy.default, aten.squeeze.dim, aten.add.Tensor)
_SUMS = {aten.index_add.default: 3, aten.index_put.default: 2, aten.scatter_add.default: 3, aten.scatter_reduce.two: 3}


@_own(aten.mm.default)
def _mm(facts, value, a, b):
    rows, member = facts.of(a), facts.of(b)
    if not isinstance(member, Member) or not isinstance(rows, (Rows, Pointwise)) or len(b.meta.shape) != 2:
        return None
    if rows.ids is None:
        return None
    return projection_of(value, rows, member.weight, rows.ids)


@_own(aten.addmm.default)
def _addmm(facts, value, bias, a, b, *, beta=1, alpha=1):
    member, product = facts.of(bias), _mm(facts, value, a, b)
    if product is None or not isinstance(member, Member) or len(bias.meta.shape) != 1 or (beta, alpha) != (1, 1):
        return None
    return with_bias(product, BiasRows(member.weight.stored, product.ids, product.order))


@_own(aten.add.Tensor)
def _add(facts, value, a, b, alpha=1):
    for x, y in ((a, b), (b, a)):
        fact, member = facts.of(x), facts.of(y)
        if isinstance(fact, Pointwise) and isinstance(member, Rows) and alpha == 1 and y.op is aten.index.Tensor:
            own = isinstance(facts.of(y.args[1][0]), (Token, Part)) and facts.turn.is_start(y.args[0])
            if own and (member.ids, member.order, member.k) == (fact.ids, fact.order, fact.k):
                return Onto(fact, y.args[0])
        if isinstance(fact, Pointwise) and isinstance(member, Member) and len(y.meta.shape) == 1 and alpha == 1:
            return with_bias(fact, BiasRows(member.weight.stored, fact.ids, fact.order))
    return None


@_own(aten.index_put.default)
def _index_put(facts, value, base, indices, source, accumulate=False):
    """``total[rows] += ...``, as it is spelled out."""
    fact, by = facts.of(source), [facts.of(index) for index in indices]
    if facts.turn.is_blank(base) and isinstance(fact, Pointwise) and not accumulate:
        token = by[0] if len(by) == 1 else None
        own = isinstance(token, Token) and (token.ids, token.order, token.k) == (fact.ids, fact.order, fact.k)
        if not own or fact.k != 1 or value.meta.dtype != source.meta.dtype:
            raise Break("no-match", "rows are filled by an index that is not proven to be theirs")
        return combination(facts, fact, base)
    if not isinstance(fact, Onto) or fact.base is not base or accumulate:
        return None
    rows, parts = fact.rows, len(base.meta.shape) == len(by) + 1 and all(isinstance(part, Part) for part in by)
    whole = parts and all(map(same, base.meta.shape, by[0].sizes))
    by = _parts(by) if whole else by[0] if len(by) == 1 else None
    if not isinstance(by, Token) or (by.ids, by.order, by.k) != (rows.ids, rows.order, rows.k):
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    if rows.k > 1 and not facts.turn.is_distinct(rows.ids):
        raise Break("no-match", "a token may go to one expert twice, and one of the two would be lost")
    return combination(facts, rows, base)


@_own(aten.mul.Tensor, aten.mul.Scalar)
def _mul(facts, value, a, b):
    """A constant behind the routing weights belongs to them. Weights times the expert's mask are its share."""
    fact = facts.of(a)
    for weights, mask in ((a, facts.of(b)), (b, fact)):
        if isinstance(mask, Mine) and (mask.axes, mask.merged) == (("t", "k"), False) and facts.of(weights) is None:
            fits = isinstance(weights, Value) and all(map(same, weights.meta.shape, mask.ids.meta.shape))
            kept = fits and len(weights.meta.shape) == 2 and weights.meta.dtype == value.meta.dtype
            return MyShare(mask.ids, weights) if kept and value.meta.dtype.is_floating_point else None
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
