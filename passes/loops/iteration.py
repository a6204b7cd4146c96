"""What a loop over experts computes, proven from one turn for an expert that stands for all.

The loop's own body runs once on fake tensors, under a recorder. The expert's number is an `Index` there: it may pick an
expert or a row of a tensor, and be compared; whatever else the body wants of it ends the proof. So the turn is the same
for every expert, up to what was picked. Where experts differ in kind (identities behind the MLPs, a number that means
"none"), the range of numbers is split and each part is gone through by itself. What the turn computes is found with
the facts that prove whole graphs, and a few rules for one expert's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mok_compile.passes.blocks.adapters import ADAPTER, PRODUCTS, adapters_in
from mok_compile.passes.blocks.site import Block, block_at
from mok_compile.passes.facts.kinds import Combined, Fact, Onto, Pointwise, Rows, Token
from mok_compile.passes.facts.rules import Break, name_of, root_of, same
from mok_compile.passes.graph.record import Recorder
from mok_compile.passes.graph.view import Value, View
from mok_compile.passes.loops.alike import check_quiet, check_types
from mok_compile.passes.loops.calls import check_called, watched
from mok_compile.passes.loops.cut import Cut
from mok_compile.passes.loops.effects import Effects
from mok_compile.passes.loops.reach import Reach
from mok_compile.passes.loops.standins import (
    Absent,
    Appended,
    Count,
    Counted,
    Edge,
    Group,
    Index,
    Indexing,
    Listed,
    Local,
    Numbers,
    Owner,
    Split,
    Zipped,
    before,
    is_kind,
    length_of,
    number_of,
    numbered,
    type_of,
    zipped,
)
from mok_compile.passes.loops.turn import (
    FLAT,
    ChosenAt,
    Dropped,
    Hit,
    Member,
    Occupied,
    Passed,
    Slot,
    Staged,
    Symbolic,
    Turned,
    TurnFacts,
    Used,
    not_from_0,
)

aten, loop_ops = torch.ops.aten, torch.ops.mok_loop
_MAX_PARTS = 4
FIRST_ROWS = (
    "the loop takes some of an expert's rows alone, such as the first so many: with such a capacity, tokens are left "
    "out where an expert has more"
)
CAPACITY = (
    "the loop asks how many rows an expert has, and takes the first so many: with such a capacity, tokens are left out "
    "where an expert has more"
)
_WHOLE = (torch.int32, torch.int64)  # dtypes of counts that Python adds up
# Of the answers to a question: those that turn it around, and those that do not.
_FLIPS = (aten.eq.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.logical_not.default, aten.bitwise_not.default)
_KEEPS = (aten.gt.Scalar, aten.ge.Scalar, aten.ne.Scalar, aten._to_copy.default)
# What adds rows onto a tensor, in place; its third argument has as many.
_ADDITIONS = (aten.index_add_.default, aten.index_put_.default, aten.scatter_add_.default, aten.scatter_reduce_.two)
_ADDED = (aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.scatter_reduce.two)
_SAME = (
    *(aten._to_copy.default, aten.alias.default, aten.detach.default),
    *(aten.view.default, aten._unsafe_view.default),
)


class _Domain(Exception):
    """The loop goes over the experts [0, size)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(frozen=True)
class Known:
    """The places of local variables of which the graph up to the loop says more: `masks` hold zeros, and at most one 1
    in each row, `distinct` integers of which no two in a row are alike, `blank` zeros, or nothing yet. `counted` and
    `sized`: pairs of integers and of a tensor that has as many rows as these add up to, none below zero, or as there
    are of them."""

    masks: frozenset[int] = frozenset()
    distinct: frozenset[int] = frozenset()
    blank: frozenset[int] = frozenset()
    counted: frozenset[tuple[int, int]] = frozenset()
    sized: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Part:
    """What the experts [lo, hi) do: a proven block, or hand their tokens through, weighted (`passed`), or nothing.

    `dropout`: the rate at which numbers are taken out of the block's weighted rows before they are added up.
    `sources` says what the input values ("input", (name,)) are: a `Members`, a `Local`, or a parameter itself.
    """

    lo: int
    hi: int
    block: Block | None = None
    passed: Passed | None = None
    dropout: float = 0.0
    sources: dict[str, Any] | None = None


def understand(cut: Cut, owner: torch.nn.Module, live: tuple, known: Known, reach: Reach) -> tuple[Part, ...]:
    """Proves what the loop of `cut` does in `owner`: what becomes of each range of experts.

    `live`: the values of the loop's local variables: fake tensors, lists of them, numbers. `known`: what the graph says
    of them. `reach`: of the cut's probe.
    Break with reason and detail where there is no proof.
    """
    check_quiet(owner, cut.reads)
    check_types(reach)
    check_called(reach)
    _check_apart(cut, live)
    for value in live:
        _fix_slots(value)
    try:
        Turn(cut, owner, live, None, reach).run()
        raise Break("no-match", "the loop is never entered")
    except _Domain as domain:
        ranges = [(0, domain.size, "")]
    parts: list[Part] = []
    while ranges:
        lo, hi, why = ranges.pop(0)
        try:
            parts.append(_prove(cut, owner, live, known, (lo, hi, why), reach))
        except Split as split:
            ranges[:0] = [(lo, split.at, why), (split.at, hi, split.why)]
            why = split.why
        except Absent:
            parts.append(Part(lo, hi))
        except Pinned:
            ranges[:0] = [(lo, hi, why)]
        if len(parts) + len(ranges) > (1 if cut.appends else _MAX_PARTS):
            raise Break("layout", why or "the experts are of too many kinds")
    return tuple(parts)


def _check_apart(cut: Cut, live: tuple) -> None:
    """What the loop adds onto must share no memory with what it reads."""
    total = live[cut.live.index(cut.total)]
    others = [v for place, v in enumerate(live) if cut.live[place] != cut.total and isinstance(v, torch.Tensor)]
    if isinstance(total, torch.Tensor) and memory_of(total) in map(memory_of, others):
        raise Break("mutation", "the loop adds onto a tensor that it reads")


def _fix_slots(value: Any) -> None:
    """The number of a token's slots is part of the block, in ids [T, K] and weights [T, K]: Dynamo is to guard it where
    it could be any. (And the hidden size, which the experts' weights have anyway.)"""
    if isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype != torch.bool:
        tokens, slots = value.shape
        if isinstance(tokens, torch.SymInt) and isinstance(slots, torch.SymInt):
            int(slots)


def memory_of(tensor: torch.Tensor) -> int | None:
    """What tells the memory of `tensor` from that of others; None of a subclass, which is refused later."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _prove(
    cut: Cut, owner: torch.nn.Module, live: tuple, known: Known, range: tuple[int, int, str], reach: Reach
) -> Part:
    effects = Effects(owner, reach)
    turn, idle = Turn(cut, owner, live, range, reach), Turn(cut, owner, live, range, reach, rows=0)
    try:
        result, nothing = turn.run(), idle.run()
    finally:
        changed = effects.undo()
    if changed:
        raise Break("mutation", "the loop changes more than tensors: an attribute, a list, the random numbers' state")
    for recorded in (turn, idle):
        recorded.check_untouched()
    if not idle.asked <= turn.asked and cut.limits:
        raise Break("routing", CAPACITY)
    if not idle.asked <= turn.asked:
        raise Break("data-dependent", "what an expert without tokens does depends on something else than that")
    if not idle.unchanged(nothing):
        raise Break("no-match", "an expert without tokens changes the result")
    return turn.conclude(result, known)


def _without(value: Value, ops: tuple) -> Value:
    while value.op in ops:
        value = value.args[0]
    return value


def _undropped(fact: Fact | None) -> Fact | None:
    return fact.rows if isinstance(fact, Dropped) else fact


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _is_least(number: int, size: torch.SymInt | None) -> bool:
    """Whether `size` is never below `number`: the half of a size may be one."""
    return size is not None and statically_known_true(size >= number)


def _writes_nothing(node: fx.Node) -> bool:
    """Whether this in-place op leaves its tensor as it is: adds no rows, or zero times something, or copies it."""
    given = [arg.meta["example_value"] if isinstance(arg, fx.Node) else arg for arg in node.args]
    if node.target in _ADDITIONS:
        return given[2].dim() > 0 and same(given[2].shape[0], 0)
    if node.target is aten.add_.Tensor:
        product = getattr(node.args[1], "target", None) in (aten.mul.Tensor, aten.mul.Scalar)
        return product and 0 in node.args[1].args
    if node.target is aten.copy_.default:
        place, source = ((t.shape, t.stride(), t.storage_offset(), memory_of(t)) for t in given[:2])
        return place == source
    return False


def _unproven(value: Value, view: View, facts: TurnFacts) -> Break:
    """Why `value` is not known as the weighted sum of what experts give."""

    def stop(reason: str, detail: str, at: Value) -> Break:
        reason = "data-dependent" if reason == "no-match" and at.op in _ADDED else reason  # no expert computes that
        return Break(reason, detail, next((node for node, made in view.made.items() if at in made), None))

    def facts_behind(v: Value) -> list[Fact | None]:
        return [facts.of(other) for other in v.inputs]

    for added, _ in adapters_in(view.values):
        return stop("activation", ADAPTER, added)
    unknown = [v for v in view.values if facts.of(v) is None and v.op not in ("input", "opaque")]
    for product in (v for v in unknown if v.op in PRODUCTS and v not in facts.broken):
        of = facts_behind(product)
        if any(isinstance(f, _ROWS) for f in of) and not any(isinstance(f, (*_ROWS, Member)) for f in of[1:]):
            return stop("no-match", "the weight of a projection is computed inside of the loop", product)
    if (broken := facts.broken.get(value)) is not None:
        alike = (other.at for other in facts.broken.values() if other.detail == broken.detail)
        if (limit := next((v for v in broken.at.behind() if v is not broken.at and _is_limit(v)), None)) is not None:
            return stop("routing", FIRST_ROWS, limit)
        return stop(broken.reason, broken.detail, min(alike, key=lambda v: v.number))
    for v in unknown:
        of = facts_behind(v)
        if v.op in _TAKES and any(isinstance(f, _PLACES) for f in of):
            return stop("routing", FIRST_ROWS, v)
        if any(isinstance(f, _ROWS) for f in of):
            return stop("no-match", f"{name_of(v)} of an expert's rows is not understood", v)
    return Break("no-match", "what the loop adds up is not proven to be its experts' outputs")


def _is_limit(value: Value) -> bool:
    """Whether `value` says which entries are the first so many, as ``torch.arange(n) < capacity`` does."""
    return value.op in _COMPARES and any(_without(v, _SAME).op in _COUNTS_UP for v in value.inputs)


_COMPARES = (
    *(aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor),
    *(aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor),
)
_COUNTS_UP = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_ROWS = (Rows, Pointwise, Staged)
# What says which rows are an expert's, and what takes some of a tensor's entries.
_PLACES = (ChosenAt, Slot, Token, Turned)
_TAKES = (aten.slice.Tensor, aten.index.Tensor, aten.index_select.default)


class Pinned(Exception):
    """A size that was a symbol is a number from now on."""


class Turn:
    """One turn of a loop, for an expert in `range` (and why that does not start at 0); None only asks how many there
    are. The expert has `rows` rows, or some number of them."""

    def __init__(
        self,
        cut: Cut,
        owner: torch.nn.Module,
        live: tuple,
        range: tuple[int, int, str] | None,
        reach: Reach,
        rows: int | None = None,
    ) -> None:
        self.cut, self.owner, self.live, self.reach, self.rows = cut, owner, live, reach, rows
        self.range, self.why = (None, "") if range is None else (range[:2], range[2])
        self.recorder = Recorder()
        self.segmented: torch.Tensor | None = None  # rows sorted by expert, of which the turn takes its own
        self.counts: Value | None = None  # how many those are for each expert
        self.bounds: Value | None = None  # or where they end
        self._counted: torch.Tensor | None = None
        self.ends: torch.Tensor | None = None  # of each expert's rows
        self._asked: torch.Tensor | None = None  # the numbers of the experts that the loop goes over
        self.looked_up: list[torch.Tensor] = []  # of which the turn takes its expert's entry as the number of its rows
        self._answers: list[tuple[fx.Node, bool]] = []  # that the turn got when it asked whether its expert has rows
        self.by_counts = False  # whether the loop goes over counts
        self._earlier: list[fx.Node] = []  # what was computed before the turn
        self.picked_of: set[int] = set()  # how many experts there are where the turn takes its own from
        self._total: Any = None
        self._known = Known()
        self._rows: fx.Node | None = None  # what is left of the total, [T, H]
        symbolic = (s for v in live if isinstance(v, torch.Tensor) for s in v.shape if _is_symbol(s))
        self._exprs = {size.node.expr: size for size in symbolic}
        self._symbols: dict[Any, torch.SymInt] = {}  # what sizes of the recording are in the graph

    def run(self) -> torch.Tensor | None:
        """What the turn leaves of the total, or puts into its list."""
        sizes: dict = {}
        values = [self._value(value, place, sizes) for place, value in enumerate(self.live)]
        self._total = values[self.cut.live.index(self.cut.total)]
        if not isinstance(self._total, Appended if self.cut.appends else torch.Tensor):
            raise Break("no-match", "what the loop adds onto is not what it looks like")
        shadows = {
            "__mok_once__": self._once,
            "__mok_numbers__": self._numbers,
            "__mok_before__": before,
            "int": number_of,
            "isinstance": is_kind,
            "len": length_of,
            "type": type_of,
            "enumerate": numbered,
            "zip": zipped,
        }
        try:
            with self.recorder, Indexing(self), watched(self.reach):
                total, edge = self.cut.probe(Owner(self), *values, **shadows)
                if self.cut.start is not None and not self._goes_on(edge):
                    raise Break("no-match", "the loop does not go on where the rows of its expert end")
                return self._appended() if self.cut.appends else total
        except (Break, Split, Absent, _Domain):
            raise
        except GuardOnDataDependentSymNode as error:
            detail = "the loop depends on the number of an expert's rows otherwise than by skipping those without any"
            stop = Break("routing", CAPACITY) if self.cut.limits else Break("data-dependent", detail)
            raise stop.with_traceback(error.__traceback__) from None
        except Exception as error:  # whatever foreign code raises where it meets what it does not expect
            stop = Break("data-dependent", f"the loop does something unusual: {type(error).__name__}: {error}")
            raise stop.with_traceback(error.__traceback__) from None

    def unchanged(self, result: torch.Tensor | None) -> bool:
        """Whether nothing but rows that are none were added, or zeros."""
        if self.cut.appends:
            return result is None or same(result.shape[0], 0)
        memory = memory_of(self._total)
        writers = (n for n, place in self.recorder.writes() if memory_of(place.meta["example_value"]) == memory)
        return result is self._total and all(map(_writes_nothing, writers))

    def check_untouched(self) -> None:
        """Nothing but the total may be written into of what another turn reads: what was there before this one."""
        graph = self.recorder.graph
        views = (loop_ops.pick.default, loop_ops.segment.default)
        given = (n for n in graph.nodes if n.op == "placeholder" or n.target in views)
        values = (node.meta.get("example_value") for node in (*given, *self._earlier))
        held = {memory_of(value) for value in values if isinstance(value, torch.Tensor)}
        held -= {memory_of(self._total)} if isinstance(self._total, torch.Tensor) else set()
        if any(memory_of(place.meta["example_value"]) in held for _, place in self.recorder.writes()):
            raise Break("mutation", "the loop writes into a tensor that it reads")

    def answer(self, asked: torch.Tensor) -> bool:
        """Whether the number `asked` is not zero, if it says whether the expert has rows: `conclude` makes sure."""
        node = self.recorder.node(asked)
        if node is None or self.recorder.rows is None:
            raise Break("data-dependent", "the loop waits for a value that only the data tells")
        negated, chain = False, node
        while chain.op == "call_function" and chain.target in (*_FLIPS, *_KEEPS):
            negated, chain = negated != (chain.target in _FLIPS), chain.args[0]
        answer = (self.rows == 0) == negated
        self._answers.append((node, negated))
        return answer

    @property
    def asked(self) -> set:
        """What the course of the turn may depend on, as another recording of it has it too."""
        nodes = [node for node, _ in self._answers] + [self.recorder.node(t) for t in self.looked_up]
        return {self.recorder.origin(node) for node in (*nodes, *self.recorder.places)}

    def conclude(self, result: torch.Tensor | None, known: Known) -> Part:
        """What the recorded turn means."""
        self._known = known
        (lo, hi), sources = self.range, self.recorder.sources
        view = View(self._finished(result))
        final = self._rows
        if self._counted is not None:
            self.counts = view.value(self.recorder.node(self._counted))
        if self.ends is not None:
            self.bounds = view.value(self.recorder.node(self.ends))
        facts = self._facts(view)
        value = view.value(final)
        if self.is_start(view.value(self.recorder.node(result))):
            self._check_idle(view, facts)
            return Part(lo, hi)
        fact = facts.of(value)
        rate = 0.0
        if isinstance(fact, Dropped):
            fact, rate = _undropped(fact), fact.rate
        if not isinstance(fact, (Combined, Passed)):
            raise _unproven(value, view, facts)
        if not self.cut.appends:
            self._check_base(view, facts, fact.base)
        self._check_all_hit(view, facts, fact.rows.ids)
        self._check_counts(view, facts, fact.rows.ids)
        self._check_answers(view, facts, fact.rows.ids)
        self._check_all_counted(view)
        if isinstance(fact, Passed):
            return Part(lo, hi, passed=fact, sources=sources)
        if lo != 0:
            raise not_from_0(lo, self.why)
        block = replace(block_at(final, fact, view, facts), base=None)
        return Part(lo, hi, block, dropout=rate, sources=sources)

    def _facts(self, view: View) -> TurnFacts:
        try:
            return TurnFacts(view, self)
        except Symbolic as found:  # the number of slots is part of the block: Dynamo is to guard it
            size = self._symbols.get(found.size.node.expr)
            if size is None or free_unbacked_symbols(size):
                raise Break("shape", "the number of a token's slots is symbolic") from None
            int(size)
            raise Pinned from None

    def _check_base(self, view: View, facts: TurnFacts, base: Value | None) -> None:
        if base is None or not self.is_start(base):
            raise Break("no-match", "the loop does not add onto what it started from")
        onto = {v for v in view.values if v.op in _ADDED and v.args[0] is base}
        added = {v for v in view.values if isinstance(fact := _undropped(facts.of(v)), Onto) and fact.base is base}
        for read in (v for v in view.values if base in v.inputs and v not in onto):
            if read.op is not aten.index.Tensor or any(read in v.inputs and v not in added for v in view.values):
                raise Break("no-match", "the loop reads what it has added up so far")

    def _check_all_hit(self, view: View, facts: TurnFacts, ids: Value) -> None:
        """A loop over the experts that were hit must go over all that these `ids` hit."""
        if self._asked is None:
            return
        fact = facts.of(view.value(self.recorder.node(self._asked)))
        if not isinstance(fact, Occupied) or root_of(fact.ids) is not root_of(ids) or fact.num_experts < self.range[1]:
            raise Break("no-match", "the loop is not proven to go over all experts that were hit")

    def _check_counts(self, view: View, facts: TurnFacts, ids: Value) -> None:
        """What a loop takes for the number of an expert's rows must be zero where these `ids` do not hit it."""
        for tensor in self.looked_up:
            fact = facts.of(view.value(self.recorder.node(tensor)))
            if not isinstance(fact, Used) or fact.ids is not ids or fact.num_experts < self.range[1]:
                raise Break("no-match", "the loop skips experts by numbers that are not proven to count their rows")

    def _check_all_counted(self, view: View) -> None:
        """A loop over counts goes on where there are more of them than the least number that was asked for."""
        asked = (v.args[1] for v in view.values if v.op is loop_ops.tally.default)
        least = min((n for n in asked if isinstance(n, int)), default=None)
        if self.by_counts and least is not None and any(least < size for size in self.picked_of):
            raise Break("no-match", "the loop is not proven to go no further than the experts that it counts")

    def _check_answers(self, view: View, facts: TurnFacts, ids: Value) -> None:
        """What a loop asks, and places that it looks for, must be those of the rows of its expert by these `ids`."""
        for node, negated in self._answers:
            if facts.of(view.value(node)) != Hit(ids, negated) or view.cells[node].value is not view.value(node):
                raise Break("data-dependent", "the loop asks for something else than whether an expert has rows")
        for node in self.recorder.places:
            fact = facts.of(view.value(node))
            if not isinstance(fact, ChosenAt) or fact.ids is not ids:
                raise Break("data-dependent", "the loop asks for other places than those of its expert's rows")

    def are_ends(self, numbers: torch.Tensor) -> bool:
        """Whether `numbers` are running sums."""
        node = self.recorder.node(numbers)
        return node is not None and node.target is aten.cumsum.default

    def edge(self, ends: torch.Tensor, end: bool) -> Edge:
        """Where the rows of the turn's expert begin or end, if the numbers `ends` say that: `conclude` makes sure."""
        if (self.ends is not None and self.ends is not ends) or self.cut.start is not None:
            raise Break("no-match", "the loop takes rows by the places of others")
        self.ends = ends
        return Edge(self.rows == 0, end)

    def _check_idle(self, view: View, facts: TurnFacts) -> None:
        """A turn that adds nothing must not have taken another way because of something else than its expert's rows."""
        nodes = [node for node, _ in self._answers] + self.recorder.places
        found = [facts.of(view.value(node)) for node in (*nodes, *map(self.recorder.node, self.looked_up))]
        if found:
            ids = getattr(found[0], "ids", None)
            self._check_counts(view, facts, ids)
            self._check_answers(view, facts, ids)

    def num_experts(self) -> int:
        """How many experts there are in the lists that the loop reads, or in the parameters that are stacked."""
        held = [getattr(self.owner, name, None) for name in self.cut.reads]
        lists = {len(h) for h in held if isinstance(h, (torch.nn.ModuleList, torch.nn.ModuleDict))}
        stacks = {h.shape[0] for h in held if isinstance(h, torch.nn.Parameter) and h.dim() == 3}
        sizes = lists or stacks
        if len(sizes) != 1:
            raise Break("data-dependent", "the loop goes over numbers of which nothing is known")
        return sizes.pop()

    def _finished(self, result: torch.Tensor | None) -> fx.Graph:
        node = self.recorder.node(result) if isinstance(result, torch.Tensor) else None
        if node is None:
            raise Break("no-match", "the loop does not return what it adds onto")
        if result.dim() > 2 and not self.cut.appends:
            with self.recorder:
                node = self.recorder.node(loop_ops.flat(result))
        self._rows = node
        self.recorder.graph.output(node)
        return self.recorder.graph

    def is_mask(self, value: Value) -> bool:
        """Whether `value` is a mask of which one expert at most is known for each slot."""
        source = self.recorder.sources.get(value.args[0]) if value.op == "input" else None
        return isinstance(source, Local) and source.place in self._known.masks and len(value.meta.shape) in (2, 3)

    def is_blank(self, value: Value) -> bool:
        """Whether `value` is what the loop fills, and held nothing but zeros, or nothing, before."""
        return self.cut.fills and self.is_start(value) and self.cut.live.index(self.cut.total) in self._known.blank

    def is_distinct(self, value: Value) -> bool:
        """Whether `value` holds a token's expert numbers of which no two are known to be alike."""
        while value.op in (aten.view.default, aten._unsafe_view.default, aten.clone.default, FLAT):
            if not same(value.meta.shape[-1], value.args[0].meta.shape[-1]):
                return False
            value = value.args[0]
        source = self.recorder.sources.get(value.args[0]) if value.op == "input" else None
        return isinstance(source, Local) and source.place in self._known.distinct

    def are_counted(self, counts: Value, rows: Value) -> bool:
        """Whether `counts`, one for each expert, are known to add up to the number of `rows`."""
        known = self._known.counted
        while counts.op in (*_SAME, aten.sum.dim_IntList):
            if counts.meta.dtype not in _WHOLE:
                return False
            counts = counts.args[0]
        if counts.op is loop_ops.tally.default and self.picked_of == {counts.args[1]}:
            # All numbers are counted: one of an expert beyond these has eager fail.
            counts, known = _without(counts.args[0], _SAME), self._known.sized
        sources = [self.recorder.sources.get(v.args[0]) if v.op == "input" else None for v in (counts, rows)]
        return all(isinstance(s, Local) for s in sources) and tuple(s.place for s in sources) in known

    def is_start(self, value: Value) -> bool:
        """Whether `value` is what the total was before the turn."""
        source = self.recorder.sources.get(value.args[0]) if value.op == "input" else None
        return isinstance(source, Local) and self.cut.live[source.place] == self.cut.total

    def _goes_on(self, edge: Any) -> bool:
        """Whether the next turn's rows start at `edge`."""
        return isinstance(edge, Edge) and (edge.end or self.rows == 0)

    def _appended(self) -> torch.Tensor | None:
        """What all turns put into the list, one after the other; None if this one puts nothing there."""
        results = self._total.results
        return loop_ops.joined(results[0], self.segmented) if results and self.segmented is not None else None

    def _value(self, value: Any, place: int, sizes: dict) -> Any:
        """A local variable as the probe gets it: tensors as placeholders, with sizes of its own."""

        def known(size):
            if not isinstance(size, torch.SymInt):
                return size
            return of(size.node.expr, size)

        def of(key, size=None):
            """The size of the recording for the expression `key`: where others are parts of it, their product."""
            if key.is_number:
                return int(key)
            if key in sizes:
                return sizes[key]
            factor, symbols = key.as_coeff_mul()
            parts = next((other for other in self._exprs if (key / other).is_Integer and key != other), None)
            if self._exprs.keys() >= {*symbols} and key not in symbols:
                sizes[key] = math.prod(map(of, symbols)) * int(factor)
            elif parts is not None:
                sizes[key] = of(parts) * int(key / parts)
            else:
                meant = self._exprs.get(key, size)
                sizes[key] = self.recorder.size(next(n for n in (2, 1, 0) if not n or _is_least(n, meant)))
            if size is not None:
                self._symbols[sizes[key].node.expr] = size
            return sizes[key]

        if self.cut.live[place] == self.cut.start:
            if type(value) is not int or value != 0:
                raise Break("no-match", "the first expert's rows do not start at the first row")
            return Edge(self.rows == 0)
        if isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                raise Break("subclass", "weights or activations are a tensor subclass (DTensor, quantised, ...)")
            return self.recorder.empty(tuple(map(known, value.shape)), value, Local(place))
        if isinstance(value, list) and self.cut.appends and self.cut.live[place] == self.cut.total:
            return Appended()
        if isinstance(value, list) and value and all(isinstance(v, torch.Tensor) for v in value):
            return Listed(self, value, place)
        if isinstance(value, tuple):
            return tuple(map(known, value))
        return known(value)

    def _numbers(self, tensor: Any) -> Any:
        """Stands for ``tensor.tolist()``."""
        return Numbers(tensor, self) if isinstance(tensor, torch.Tensor) else tensor.tolist()

    def _once(self, items: Any) -> Iterator:
        """The loop's header: one turn, for an expert that stands for all of `items`."""
        make: Callable = lambda index: index  # noqa: E731
        dims = 0
        if isinstance(items, range):
            if (items.start, items.step) != (0, 1):
                raise Break("no-match", f"the loop goes over {items}")
            size = len(items)
        elif isinstance(items, Counted) and isinstance(items.items, Group):
            size, make = len(items.items), lambda index: (index, items.items[index])
        elif isinstance(items, Zipped):
            size, make = items.size, lambda index: items[index]
        elif isinstance(items, Counted):
            self._counted, self.by_counts = items.items, True
            # Running counts in a narrower type would not be those that the op is given.
            if items.items.dim() != 1 or items.items.dtype not in _WHOLE:
                raise Break("no-match", "the loop does not go over one count for each expert")
            size = items.items.shape[0]
            size = size if isinstance(size, int) else self.num_experts()
            if not self.are_ends(items.items):
                make = lambda index: (index, Count(self.rows == 0, exact=True))  # noqa: E731
            else:
                self._counted = None
                make = lambda index: (index, self.edge(items.items, True))  # noqa: E731
        elif isinstance(items, torch.Tensor):
            self._asked, size, dims = items, self._hit_size(), len(items.shape) - 1
        elif isinstance(items, Numbers):
            self._asked, size = items.tensor, self._hit_size()
        else:
            raise Break("data-dependent", f"the loop goes over a {type(items).__name__}")
        if self.range is None:
            raise _Domain(size)
        self._earlier = list(self.recorder.graph.nodes)
        self.recorder.rows = self.recorder.size() if self.rows is None else self.rows
        yield make(Index(*self.range, dims))
        self.recorder.rows = None

    def _hit_size(self) -> int:
        """Of how many experts the loop asks which were hit."""
        for node in reversed(self.recorder.graph.nodes):
            if node.target is loop_ops.unique.default:
                return self.num_experts()
            if node.target is loop_ops.nonzero.default:
                shape = node.args[0].meta["example_value"].shape
                if len(shape) == 1 and isinstance(shape[0], int):
                    return shape[0]
        raise Break("data-dependent", "the loop goes over numbers of which nothing is known")
