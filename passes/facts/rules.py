"""How facts pass through ATen ops: one small rule per op (or family of ops that differ in spelling only).

A rule sees a value and the facts of its arguments and returns the value's fact, None if it knows nothing, or raises
`Break` where an MoE block turns into something that is not understood. New spellings need a rule here, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from mok_compile import activation as act
from mok_compile.passes.facts.kinds import (
    SLOT,
    SORTED,
    BiasRows,
    Broken,
    Column,
    Combined,
    Counts,
    Differentiable,
    Expert,
    ExpertWeights,
    Fact,
    Full,
    Grid,
    Inverse,
    Iota,
    Laid,
    Lifted,
    Matrix,
    NoRoute,
    Offsets,
    Partial,
    Perm,
    Pointwise,
    Projection,
    Rows,
    RowWeight,
    Slim,
    Token,
    Weight,
)
from mok_compile.passes.facts.sign import may_be_negative
from mok_compile.passes.graph.view import Entry, Value

aten = torch.ops.aten


class Break(Exception):
    """The proof stops: `reason` is a reason code, `detail` a sentence, `at` the node to name if it is another than the
    one that is looked at."""

    def __init__(self, reason: str, detail: str, at: fx.Node | None = None) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.at = reason, detail, at


class Facts:
    """The facts of all values of a view, and in `broken` where a proof stopped and what that spoiled."""

    differentiable = Differentiable  # facts of what carries gradients that belong to the block

    def __init__(
        self,
        values: list[Value],
        known: dict[Value, Fact] | None = None,
        numbers: dict[sympy.Expr, Entry] | None = None,
    ) -> None:
        self._of: dict[Value, Fact] = dict(known or {})
        self._numbers = numbers or {}
        self.broken: dict[Value, Broken] = {}
        # Rows that are written into once more, and sums that another expert was added onto.
        self.overwritten = {v.args[0] for v in values if v.op in (aten.index_put.default, aten.slice_scatter.default)}
        self.extended: set[Value] = set()
        self.parts: dict[Value, int] = {}  # by ids: into how many parts the sorted rows were split
        # Of values that an expert computes for every token, what they are to a block that counts only its own.
        self.included: dict[Value, Fact] = {}
        self.experts: set[Value] = set()  # products of every token with a stack of matrices that are those of experts
        for value in values:
            if value not in self._of:
                self._derive(value)
        self._complete()

    def of(self, value: Any) -> Fact | None:
        """The fact of `value`; None for constants and for values of which nothing is known."""
        return self._of.get(value) if isinstance(value, Value) else None

    def _derive(self, value: Value) -> None:
        apply = RULES.get(value.op)
        try:
            fact = apply(self, value, *value.args, **value.kwargs) if apply else None
            if fact is None and value.meta.dtype.is_floating_point and any(self._inside(v) for v in value.inputs):
                if value.op == "random":
                    raise Break("dropout", "random numbers, as dropout draws them, work between dispatch and combine")
                if value.op in _NORMS and _past_down(self._of.get(value.args[0])):
                    raise Break("post-norm", f"{name_of(value)} works on the output of the down projection")
                raise Break("no-match", f"{name_of(value)} is not understood between dispatch and combine")
            if isinstance(fact, self.differentiable) and any(self._otherwise(v, value) for v in value.inputs):
                raise Break("no-match", f"gradients are switched off in a part of the block, around {name_of(value)}")
            if isinstance(fact, (Rows, Pointwise)) and len(value.meta.shape) != 2 and isinstance(fact.order, str):
                raise Break("no-match", f"{name_of(value)} gives the rows more dimensions")
        except Break as stop:
            # Where the proof of an operand had stopped before, that is the cause to name.
            cause = next((self.broken[v] for v in value.inputs if v in self.broken), stop)
            self.broken[value] = Broken(cause.reason, cause.detail, value)
            return
        if fact is not None:
            self._of[value] = fact
            return
        # What is computed from a broken proof is broken for the same reason; a new block starts from fresh facts.
        spoiled = next((self.broken[v] for v in value.inputs if v in self.broken), None)
        if spoiled is not None:
            self.broken[value] = spoiled

    def read_from(self, size: Any) -> Entry | None:
        """Where a size was read from."""
        return self._numbers.get(size.node.expr) if isinstance(size, torch.SymInt) else None

    def about(self, value: Value) -> Fact | None:
        """The fact of `value`, or what it is to a block that counts only a part of it."""
        return self._of.get(value) or self.included.get(value)

    def _complete(self) -> None:
        """Sums over experts, added up one by one: the last one is the block's result."""
        from mok_compile.passes.facts.merge import merge  # which needs this module

        for value, fact in list(self._of.items()):
            if isinstance(fact, Partial):
                del self._of[value]
                try:
                    if value not in self.extended:
                        self._of[value] = Combined(merge(fact.parts), fact.base)
                except Break as stop:
                    self.broken[value] = Broken(stop.reason, stop.detail, value)
        # With one expert a token, rows in slot order are the result, unless more becomes of them.
        rows = {v for v, fact in self._of.items() if _is_result(fact)}
        if rows:
            for value, fact in self._of.items():
                if isinstance(fact, (Pointwise, Slim, Grid, Combined)):
                    rows.difference_update(value.inputs)
            self._of |= {value: Combined(self._of[value], None) for value in rows}

    def _otherwise(self, value: Value, user: Value) -> bool:
        """Whether of two values of a block one is computed while gradients are switched off."""
        return isinstance(self._of.get(value), self.differentiable) and value.detached != user.detached

    def _inside(self, value: Value) -> bool:
        """Whether `value` is known as rows between the up projection and the combine."""
        return isinstance(self._of.get(value), (Pointwise, Slim, Grid, Laid))


# Functions of all numbers of a row, which no function of gate and up is.
_NORMS = (aten.native_layer_norm.default, aten._softmax.default, aten._log_softmax.default)


def _past_down(fact: Fact | None) -> bool:
    """Whether `fact` is of rows that went through both projections."""
    rows = fact.rows if isinstance(fact, (Slim, Grid, Laid)) else fact
    return isinstance(rows, Pointwise) and rows.level == 2


def _is_result(fact: Fact) -> bool:
    plain = isinstance(fact, Pointwise) and fact.order == SLOT and fact.k == 1 and not fact.stray
    return plain and fact.bare is not None and fact.level == 2


RULES: dict[Any, Callable] = {}


def rule(*ops) -> Callable:
    """Registers a function as a rule of `ops`. Of several rules of one op the last one is asked first; the others only
    where it knows nothing."""

    def register(function: Callable) -> Callable:
        for op in ops:
            RULES[op] = _either(function, RULES[op]) if op in RULES else function
        return function

    return register


def _either(first: Callable, then: Callable) -> Callable:
    def apply(facts, value, *args, **kwargs):
        fact = first(facts, value, *args, **kwargs)
        return then(facts, value, *args, **kwargs) if fact is None else fact

    return apply


def same(a, b) -> bool:
    """Whether two sizes are equal for certain, whatever the symbols in them stand for; adds no guard."""
    return bool(statically_known_true(a == b))


def pinned(size: int | torch.SymInt | None) -> int | None:
    """The number of a token's slots, which is part of the block: a symbolic one is pinned, with the guard that this
    takes. None for one that only the data tells."""
    if not isinstance(size, torch.SymInt):
        return size
    return None if free_unbacked_symbols(size) else int(size)


def name_of(value: Value) -> str:
    return str(value.op).removesuffix(".default")


def as_number(a) -> float | None:
    """A constant as a float; a symbolic float is pinned, with the guard that this takes. NaN is none."""
    if isinstance(a, bool) or not isinstance(a, (int, float, torch.SymFloat)):
        return None
    number = float(a)
    return None if math.isnan(number) else number


def dim_of(value: Value, dim: int) -> int:
    return dim % max(1, len(value.meta.shape))


def _peel(value: Value) -> Value:
    """`value` without casts and copies that keep an expert number what it is."""
    while True:
        exact = value.meta.dtype in _EXACT
        copied = value.op in (aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default)
        if copied and exact and not _rounds(value):
            value = value.args[0]
        else:
            return value


_EXACT = (torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
# Of which these hold the number of an expert's rows too.
COUNT_DTYPES = _EXACT[1:]


def _rounds(value: Value) -> bool:
    """Whether a cast narrows floats, which need not be whole numbers yet: 0.9999999999 becomes 1."""
    return value.meta.dtype == torch.float32 and value.args[0].meta.dtype == torch.float64


def root_of(value: Value) -> Value:
    """The value that expert numbers stem from: without casts, copies and changes of shape that keep their order."""
    while True:
        value = _peel(value)
        if value.op in (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim):
            value = value.args[0]
        else:
            return value


def unsliced(value: Value) -> Value:
    """`value` without slices that take everything: where sizes are symbols, ``x[:, None]`` has one."""
    while value.op is aten.slice.Tensor and not value.detached and (*value.args, 1)[4:5] in ((), (1,)):
        if not all(map(same, value.meta.shape, value.args[0].meta.shape)):
            break
        value = value.args[0]
    return value


def is_integer(value: Value) -> bool:
    return not value.meta.dtype.is_floating_point and value.meta.dtype != torch.bool


# Constants and integers


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(facts, value, *args, **kwargs):
    start, step = (*args, 1)[0:3:2] if len(args) > 1 else (0, 1)
    return Iota() if start == 0 and step == 1 and is_integer(value) else None


@rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def _zeros(facts, value, *args, **kwargs):
    return Full(0.0)


@rule(aten.scalar_tensor.default)
def _scalar(facts, value, number, **kwargs):
    number = as_number(number)
    return None if number is None else Full(number)


@rule(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(facts, value, base, number=None, *args, fill_value=None, **kwargs):
    number = args[0] if value.op is aten.new_full.default else number if number is not None else fill_value
    number = as_number(number)
    return None if number is None else Full(number)


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
def _sort(facts, value, a, dim=-1, descending=False, *, stable=None, **kwargs):
    if len(a.meta.shape) != 1 or descending or kwargs.get("descending") or not is_integer(a):
        return None
    positions = value.index == 1 or value.op in (aten.argsort.default, aten.argsort.stable)
    fact = facts.of(a)
    if isinstance(fact, Perm):
        return Inverse(fact.ids) if positions else Iota()
    if fact is not None and not (isinstance(fact, Expert) and fact.order == SLOT and not fact.clamped):
        return None
    ids = root_of(a)
    return Perm(ids) if positions else Expert(ids, SORTED)


@rule(aten.floor_divide.default, aten.div.Tensor_mode)
def _floor_divide(facts, value, a, k, rounding_mode="floor"):
    fact = facts.of(a)
    if isinstance(fact, Perm) and len(fact.ids.meta.shape) > 1 and same(fact.ids.meta.shape[-1], k):
        k = pinned(k)
    if not isinstance(k, int) or k < 1 or rounding_mode not in ("floor", "trunc") or not is_integer(value):
        return _binary_div(facts, value, a, k) if rounding_mode is None else None
    if isinstance(fact, Perm):
        return Token(fact.ids, SORTED, k)
    return Token(None, SLOT, k) if isinstance(fact, Iota) else None


@rule(aten.histc.default)
def _histc(facts, value, a, bins=100, min=0, max=0):
    ids = counted_experts(facts, a)
    # In bins of width one, the last of which would count the number of no expert as well.
    whole = max == bins - 1 or (max == bins and ids is not None and is_choice(ids, bins))
    return Counts(ids, bins) if ids is not None and min == 0 and whole else None


def is_choice(ids: Value, among: int) -> bool:
    """Whether `ids` are indices of so many numbers."""
    source = ids.args[0] if ids.op is aten.topk.default and ids.index == 1 else None
    return source is not None and same(source.meta.shape[dim_of(source, (*ids.args, -1)[2])], among)


@rule(aten.bincount.default)
def _bincount(facts, value, a, weights=None, minlength=0):
    ids = counted_experts(facts, a)
    return Counts(ids, minlength) if ids is not None and weights is None and minlength > 0 else None


def counted_experts(facts: Facts, a: Value) -> Value | None:
    a = _peel(a)
    if facts.of(a) is None and not is_integer(a):
        a = root_of(a)  # made floats before they were flattened
    fact = facts.of(a)
    if isinstance(fact, Expert):
        return None if fact.clamped else fact.ids
    return root_of(a) if fact is None and is_integer(a) else None


@rule(aten.cumsum.default)
def _cumsum(facts, value, a, dim, **kwargs):
    fact = facts.of(a)
    counts = isinstance(fact, Counts) and value.meta.dtype in COUNT_DTYPES
    return Offsets(fact.ids, fact.num_experts) if counts and dim_of(a, dim) == 0 else None


@rule(aten.searchsorted.Tensor)
def _searchsorted(facts, value, a, b, *, right=False, side=None, sorter=None, **kwargs):
    if sorter is not None:
        return None
    fact, probe = facts.of(a), facts.of(b)
    past = right or side == "right"
    if isinstance(fact, Expert) and fact.order == SORTED and not fact.clamped and isinstance(probe, Iota) and past:
        return Offsets(fact.ids, value.meta.shape[0])
    return None


@rule(aten.ge.Scalar, aten.eq.Scalar, aten.lt.Scalar, aten.ne.Scalar)
def _compare(facts, value, a, number):
    fact = facts.of(a)
    if not isinstance(fact, Expert) or fact.order != SORTED or fact.clamped or not isinstance(number, int):
        return None
    return NoRoute(fact.ids, number, value.op in (aten.lt.Scalar, aten.ne.Scalar))


@rule(aten.bitwise_not.default, aten.logical_not.default)
def _not(facts, value, a):
    fact = facts.of(a)
    return replace(fact, negated=not fact.negated) if isinstance(fact, NoRoute) else None


# Changes of place and shape


@rule(aten.index.Tensor)
def _index(facts, value, a, indices):
    return _take(facts, value, a, indices[0]) if len(indices) == 1 and indices[0] is not None else None


@rule(aten.index_select.default)
def _index_select(facts, value, a, dim, index):
    return _take(facts, value, a, index) if dim_of(a, dim) == 0 else None


@rule(aten.gather.default)
def _gather(facts, value, a, dim, index, **kwargs):
    # The index of a gather along rows must not change within a row: it is then an expanded row index, of all columns.
    columns = len(a.meta.shape) == 2 and same(value.meta.shape[-1], a.meta.shape[-1])
    whole_rows = len(index.meta.shape) == 1 or (index.op is aten.expand.default and columns)
    return _take(facts, value, a, index) if dim_of(a, dim) == 0 and whole_rows else None


def _take(facts: Facts, value: Value, a: Value, index: Value) -> Fact | None:
    """Rows of `a` picked by `index` along dimension 0."""
    a = unsliced(a)
    fact, by = facts.of(a), facts.of(index)
    if isinstance(by, Token):
        plain = fact is None or isinstance(fact, Combined)
        if plain and len(a.meta.shape) == 2 and a.meta.dtype.is_floating_point:
            return Rows(a, by.k, by.ids, by.order, dtypes=frozenset([a.meta.dtype]))
        return None
    if isinstance(by, Perm):
        if isinstance(fact, Inverse):
            return Iota() if fact.ids is by.ids else None
        if isinstance(fact, Iota):
            return Perm(by.ids)
        if isinstance(fact, (Rows, Pointwise, Token, RowWeight, Expert)) and fact.order == SLOT:
            return replace(fact, ids=by.ids, order=SORTED) if fact.ids in (None, by.ids) else None
        if fact is not None:
            return None
        if is_integer(a):
            return Expert(by.ids, SORTED) if root_of(a) is by.ids else None
        if _one_per_row(a, index):
            return RowWeight(a, by.ids, SORTED)
        # With one expert a token, slots are tokens.
        rows = len(a.meta.shape) == 2 and a.meta.dtype.is_floating_point and same(a.meta.shape[0], index.meta.shape[0])
        return Rows(a, 1, by.ids, SORTED, dtypes=frozenset([a.meta.dtype])) if rows else None
    if isinstance(by, Inverse) and isinstance(fact, (Rows, Pointwise, Token, RowWeight, Expert)):
        if fact.order != SORTED or fact.ids is not by.ids:
            raise Break("no-match", "rows are put back in order by the permutation of another routing")
        return replace(fact, order=SLOT)
    if by is None and len(index.meta.shape) == 1 and is_integer(index):
        by = Expert(root_of(index), SLOT)
    if not isinstance(by, Expert) or fact is not None or not a.meta.dtype.is_floating_point:
        return None
    if len(a.meta.shape) == 2 and (by.limit is None or same(a.meta.shape[0], by.limit + 1)):
        return BiasRows(a, by.ids, by.order, clamped=by.clamped)
    return ExpertWeights(weight_of(a), by.ids, by.order) if len(a.meta.shape) == 3 and not by.clamped else None


def weight_of(operand: Value) -> Weight:
    """A weight given as [E, out, in], found as the model stores it.

    A view taken where gradients are switched off is an operand of its own: the fused op must not reach behind it.
    """
    if operand.detached:
        return Weight(operand, False)
    if operand.op is aten.transpose.int and {d % 3 for d in operand.args[1:3]} == {1, 2}:
        return Weight(operand.args[0], True)
    if operand.op is aten.permute.default and tuple(d % 3 for d in operand.args[1]) == (0, 2, 1):
        return Weight(operand.args[0], True)
    return Weight(operand, False)


@rule(aten.index_put.default)
def _index_put(facts, value, base, indices, source, accumulate=False):
    if len(indices) != 1 or not isinstance(indices[0], Value):
        return None
    if accumulate:
        return _scatter_rows(facts, value, base, indices[0], source)
    rows, by = facts.of(source), facts.of(indices[0])
    if isinstance(rows, Pointwise) and isinstance(by, Perm) and rows.order == SORTED:
        whole = all(map(same, value.meta.shape, source.meta.shape))
        return replace(rows, order=SLOT) if whole and rows.ids is by.ids else None
    return _inverse(facts, indices[0], source)


@rule(aten.scatter.src)
def _scatter(facts, value, base, dim, index, source):
    return _inverse(facts, index, source) if len(index.meta.shape) == 1 else None


def _inverse(facts: Facts, index: Value, source: Value) -> Fact | None:
    by = facts.of(index)
    counted = isinstance(facts.of(source), Iota) and same(source.meta.shape[0], index.meta.shape[0])
    return Inverse(by.ids) if isinstance(by, Perm) and counted else None


@rule(aten.index_add.default)
def _index_add(facts, value, base, dim, index, source, *, alpha=1):
    return _scatter_rows(facts, value, base, index, source) if dim_of(base, dim) == 0 and alpha == 1 else None


@rule(aten.scatter_add.default)
def _scatter_add(facts, value, base, dim, index, source):
    expanded = index.op is aten.expand.default or same(base.meta.shape[-1], 1)
    whole_rows = expanded and len(index.meta.shape) == 2 and same(index.meta.shape[1], source.meta.shape[1])
    return _scatter_rows(facts, value, base, index, source) if dim_of(base, dim) == 0 and whole_rows else None


def _scatter_rows(facts: Facts, value: Value, base: Value, index: Value, source: Value) -> Fact | None:
    """Rows of `source` added onto their tokens' rows of `base`."""
    by, rows = facts.of(index), facts.of(source)
    if not isinstance(rows, Pointwise):
        return None
    if isinstance(by, Perm) and rows.k == 1:
        by = Token(by.ids, SORTED, 1)
    # Of one routing there are as many rows as places, also where the sizes are sums of counts.
    all_rows = isinstance(by, Token) and by.ids is not None and by.ids is rows.ids
    if not same(base.meta.shape[-1], source.meta.shape[-1]) or not (
        all_rows or same(index.meta.shape[0], source.meta.shape[0])
    ):
        raise Break("no-match", "the rows that are added up are not whole rows of the result")
    if not isinstance(by, Token):
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    if by.order != rows.order or by.k != rows.k or by.ids not in (None, rows.ids):
        raise Break("no-match", "rows are added up by the token index of another order or routing")
    return combination(facts, rows, None if facts.of(base) == Full(0.0) else base)


@rule(aten.sum.dim_IntList)
def _sum(facts, value, a, dim, keepdim=False, *, dtype=None):
    fact = facts.of(a)
    if not isinstance(fact, Grid):
        return None
    if keepdim or dim is None or [dim_of(a, d) for d in dim] != [1]:
        raise Break("no-match", "the rows of a token are summed over another dimension than its experts")
    return combination(facts, fact.rows, None)


def combination(facts: Facts, rows: Fact, base: Value | None) -> Combined:
    if not isinstance(rows, Pointwise) or rows.bare is None or rows.level != 2:
        raise Break("no-match", "the rows that are combined are not the plain output of a down projection")
    if rows.stray:
        raise Break("no-match", "rows without expert get some expert's bias and are not masked after it")
    return Combined(rows, base)


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(facts, value, a, shape):
    fact = facts.of(a)
    old, new = a.meta.shape, value.meta.shape
    if len(old) == len(new) and all(map(same, old, new)):
        return fact
    if isinstance(fact, (Rows, Pointwise)):
        if len(new) == 3 and same(new[1], fact.k) and same(new[2], old[1]) and fact.order == SLOT:
            return Grid(fact)
        return None
    if isinstance(fact, Grid):
        return fact.rows if len(new) == 2 and same(new[1], old[2]) else None
    if isinstance(fact, Slim):
        return fact.rows if len(new) == 2 and same(new[0], old[0]) else None
    flat = len(old) == 1 and all(same(n, 1) for n in new[1:])
    column = len(new) == 1 and all(same(n, 1) for n in old[1:])
    return fact if _per_row(fact) and (flat or column) else None


@rule(aten.unsqueeze.default)
def _unsqueeze(facts, value, a, dim):
    fact, axis = facts.of(a), dim % len(value.meta.shape)
    if isinstance(fact, (Rows, Pointwise)) and axis in (1, 2):
        return Slim(fact, axis)
    plain = fact is None or isinstance(fact, Combined)
    if plain and axis == 1 and len(a.meta.shape) == 2 and a.meta.dtype.is_floating_point:
        return Lifted(unsliced(a))
    return _repeat(facts, value, a)


@rule(aten.squeeze.dim)
def _squeeze(facts, value, a, dim):
    fact = facts.of(a)
    if isinstance(fact, Slim):
        return fact.rows if dim_of(a, dim) == fact.axis else None
    return _repeat(facts, value, a)


@rule(aten.select.int)
def _select(facts, value, a, dim, index):
    fact = facts.of(a)
    return fact.rows if isinstance(fact, Slim) and dim_of(a, dim) == fact.axis and index in (0, -1) else None


@rule(aten.expand.default)
def _expand(facts, value, a, shape, **kwargs):
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if isinstance(fact, Lifted):
        k = value.meta.shape[1]
        return Grid(Rows(fact.x, k, None, SLOT, dtypes=frozenset([a.meta.dtype]))) if isinstance(k, int) else None
    if len(old) == len(new) and all(map(same, old, new)):  # as torch.matmul does
        return fact
    return _repeat(facts, value, a)


def _repeat(facts: Facts, value: Value, a: Value) -> Fact | None:
    fact, old, new = facts.of(a), a.meta.shape, value.meta.shape
    if not old or not new or (value.op is aten.expand.default and len(new) != len(old)):
        return None
    return fact if _per_row(fact) and same(new[0], old[0]) else None


@rule(aten.transpose.int, aten.permute.default)
def _transpose(facts, value, a, *dims):
    fact = facts.of(a)
    swapped = tuple(d % 3 for d in dims[0]) == (0, 2, 1) if len(dims) == 1 else {d % 3 for d in dims} == {1, 2}
    if len(a.meta.shape) != 3 or not swapped:
        return None
    if isinstance(fact, ExpertWeights):
        return replace(fact, weight=replace(fact.weight, transposed=not fact.weight.transposed))
    return Slim(fact.rows, 3 - fact.axis) if isinstance(fact, Slim) else None


def _per_row(fact: Fact | None) -> bool:
    return isinstance(fact, (Expert, Perm, Inverse, Token, NoRoute, RowWeight, Full))


@rule(aten.clone.default, aten.alias.default, aten.lift_fresh.default, aten.contiguous.default)
def _identity(facts, value, a, *args, **kwargs):
    return facts.of(a)


CUT = "the graph is cut by detach() inside the block"


@rule(aten.detach.default)
def _detach(facts, value, a):
    fact = facts.of(a)
    if isinstance(fact, facts.differentiable):
        raise Break("no-match", CUT)
    return fact


@rule(aten._to_copy.default)
def _cast(facts, value, a, *, dtype=None, device=None, **kwargs):
    fact = facts.of(a)
    if device is not None and value.meta.device != a.meta.device and not isinstance(fact, Counts):
        return None
    if not isinstance(fact, Differentiable | Full):
        # Numbers of experts fit into any of the exact types, counts into most, places into the wide integers only.
        counts = COUNT_DTYPES if isinstance(fact, (Counts, Offsets)) else (torch.int32, torch.int64)
        return fact if value.meta.dtype in (_EXACT if isinstance(fact, Expert) else counts) else None
    if not value.meta.dtype.is_floating_point:
        return None
    if isinstance(fact, (Rows, Pointwise)):
        return replace(fact, dtypes=fact.dtypes | {value.meta.dtype})
    if isinstance(fact, (Grid, Slim)):
        return replace(fact, rows=replace(fact.rows, dtypes=fact.rows.dtypes | {value.meta.dtype}))
    if isinstance(fact, ExpertWeights) or (isinstance(fact, Combined) and fact.base is not None):
        return None
    if isinstance(fact, Combined):  # what was rounded stays so; the result alone may end in a narrow type
        return None if _narrowed(a) else fact
    if not loses(a.meta.dtype, value.meta.dtype):
        return fact
    if isinstance(fact, Full):
        return fact if float(torch.tensor(fact.number, dtype=value.meta.dtype)) == fact.number else None
    if isinstance(fact, Lifted):
        return None
    raise Break("dtype", f"routing weights, biases or outputs are narrowed to {value.meta.dtype} inside the block")


def loses(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a cast between these floating-point types rounds."""
    return new != old and new.itemsize <= old.itemsize


def _narrowed(value: Value) -> bool:
    """Whether `value` went through a cast that rounds."""
    while value.op is aten._to_copy.default:
        if loses(value.args[0].meta.dtype, value.meta.dtype):
            return True
        value = value.args[0]
    return False


@rule(aten.masked_fill.Scalar)
def _masked_fill(facts, value, a, mask, number):
    return _masked(facts, a, mask, facts.of(mask), number)


@rule(aten.masked_fill.Tensor)
def _masked_fill_tensor(facts, value, a, mask, number):
    full = facts.of(number)
    return _masked(facts, a, mask, facts.of(mask), full.number if isinstance(full, Full) else None)


@rule(aten.where.self, aten.where.ScalarOther)
def _where(facts, value, mask, a, b):
    other = facts.of(b)
    number = other.number if isinstance(other, Full) else as_number(b)
    by = facts.of(mask)
    by = replace(by, negated=not by.negated) if isinstance(by, NoRoute) else None
    return _masked(facts, a, mask, by, number)


def _masked(facts: Facts, a: Value, mask: Value, by: Fact | None, number: float | None) -> Fact | None:
    """Rows without expert set to zero: they contribute nothing anyway."""
    fact = facts.of(a)
    if not isinstance(fact, (Rows, Pointwise, RowWeight, BiasRows)):
        return None
    routed = isinstance(by, NoRoute) and not by.negated and by.ids is fact.ids and fact.order == SORTED
    if not routed or number != 0 or len(mask.meta.shape) != len(a.meta.shape):
        raise Break("no-match", "rows are masked by something else than 'no expert has this row'")
    masked = frozenset([by.num_experts])
    if isinstance(fact, Pointwise):
        _check_masks(masked, fact.columns[0].projection.num_experts)
        return replace(fact, stray=False)
    return replace(fact, masked=fact.masked | masked)


def _check_masks(masked: frozenset[int], num_experts: int) -> None:
    if any(number != num_experts for number in masked):
        raise Break("no-match", f"rows are masked as if there were {sorted(masked)} experts, not {num_experts}")


# The two projections


@rule(aten._grouped_mm.default)
def _grouped_mm(facts, value, a, weight, offs=None, bias=None, out_dtype=None):
    if not isinstance(offs, Value) or len(weight.meta.shape) != 3 or len(a.meta.shape) != 2:
        return None
    if bias is not None or out_dtype not in (None, value.meta.dtype):
        raise Break("no-match", "the grouped matmul has a bias or an output dtype of its own")
    source, ends = facts.of(a), facts.of(offs)
    if a.meta.subclass:
        raise Break("subclass", "weights or activations are a tensor subclass (DTensor, quantised, ...)")
    if not isinstance(source, (Rows, Pointwise)):
        raise Break("no-match", "the rows of the grouped matmul are not proven to be tokens gathered by expert")
    if not isinstance(ends, Offsets):
        raise Break("no-match", "the offsets of the grouped matmul are not proven to be running counts of the ids")
    if source.order != SORTED or source.ids is not ends.ids:
        raise Break("no-match", "rows and offsets of the grouped matmul stem from different routings")
    if not same(weight.meta.shape[0], ends.num_experts):
        raise Break("no-match", f"{ends.num_experts} experts are counted, but the weight has {weight.meta.shape[0]}")
    if facts.of(weight) is not None:
        raise Break("no-match", "the weight of the grouped matmul depends on the routing")
    if may_be_negative(ends.ids, ends.num_experts):
        raise Break("no-match", "the expert numbers are computed so that they may be negative")
    stored = weight_of(weight)
    return projection_of(value, source, replace(stored, transposed=not stored.transposed), source.ids)


def projection_of(value: Value, source: Rows | Pointwise, weight: Weight | Matrix, ids: Value) -> Pointwise:
    """The rows of `source`, each times the matrix of its expert."""
    if isinstance(source, Rows) and source.masked:
        _check_masks(source.masked, weight.shape[0])
        # One source for gate and up, whether or not both were masked.
        source = replace(source, masked=frozenset())
    if weight.stored.meta.subclass:
        raise Break("subclass", "weights or activations are a tensor subclass (DTensor, quantised, ...)")
    projection = Projection(source, weight, ids)
    if projection.level > 2:
        raise Break("no-match", "a third projection follows the down projection")
    carried = source.weight if isinstance(source, Pointwise) else None
    leaf = act.Expr("column", (Column(projection, "all"),))
    return Pointwise(leaf, ids, source.k, source.order, carried, frozenset([value.meta.dtype]))


@rule(aten.bmm.default)
def _bmm(facts, value, a, b):
    left, right = facts.of(a), facts.of(b)
    matrix, vector = (left, right) if isinstance(left, ExpertWeights) else (right, left)
    if not isinstance(matrix, ExpertWeights):
        return None
    if not isinstance(vector, Slim):
        raise Break("no-match", "the rows that meet their experts' weights are not proven to be tokens")
    rows = vector.rows
    if rows.order != matrix.order or rows.ids not in (None, matrix.ids):
        raise Break("no-match", "rows and gathered weights stem from different routings")
    column = matrix is left
    if vector.axis != (2 if column else 1):
        raise Break("no-match", "the batched matmul contracts the wrong dimension")
    # W [S, out, in] @ x [S, in, 1] takes the weight as it is; x [S, 1, in] @ W [S, in, out] has it transposed.
    weight = matrix.weight if column else replace(matrix.weight, transposed=not matrix.weight.transposed)
    return Slim(projection_of(value, rows, weight, matrix.ids), vector.axis)


@rule(aten.split.Tensor)
def _split(facts, value, a, size, dim=0):
    fact = facts.of(a)
    if not isinstance(fact, Pointwise):
        return None
    if dim_of(a, dim) != 1 or not isinstance(size, int) or not same(a.meta.shape[1], 2 * size) or value.index > 1:
        raise Break("no-match", "the up projection is not split into two halves")
    return half_of(fact, ("first", "second")[value.index])


@rule(aten.split_with_sizes.default)
def _split_with_sizes(facts, value, a, sizes, dim=0):
    halves = len(sizes) == 2 and sizes[0] == sizes[1]
    return _split(facts, value, a, sizes[0], dim) if halves else None


@rule(aten.slice.Tensor)
def _slice(facts, value, a, dim=0, start=None, end=None, step=1):
    fact = facts.of(a)
    length = a.meta.shape[dim_of(a, dim)]
    start = 0 if start is None else start
    if isinstance(start, int) and isinstance(length, int) and start < 0:
        start = max(0, start + length)
    whole = step == 1 and same(value.meta.shape[dim_of(a, dim)], length)
    if whole:
        return fact
    if not isinstance(fact, Pointwise) or dim_of(a, dim) != 1:
        return None
    if step == 2 and start in (0, 1) and same(value.meta.shape[1] * 2, length):
        return half_of(fact, ("even", "odd")[start])
    if step == 1 and same(value.meta.shape[1] * 2, length):
        if same(start, 0):
            return half_of(fact, "first")
        if same(start, value.meta.shape[1]):
            return half_of(fact, "second")
    raise Break("no-match", "the up projection is sliced, but not into its two halves")


def half_of(fact: Pointwise, part: str) -> Pointwise:
    if fact.bare is None or fact.weight is not None:
        raise Break("no-match", "something other than the plain up projection is split into halves")
    return replace(fact, expr=act.Expr("column", (Column(fact.bare, part),)))


# Arithmetic


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _mul(facts, value, a, b):
    left, right = facts.of(a), facts.of(b)
    for fact, other, operand in ((left, right, b), (right, left, a)):
        if isinstance(fact, (Pointwise, Rows)) and isinstance(other, RowWeight):
            return with_weight(fact, other) if len(operand.meta.shape) == 2 else None
        if isinstance(fact, Grid) and other is None and isinstance(operand, Value):
            return _weighted_grid(fact, operand, value)
        if isinstance(fact, (Pointwise, Rows)) and fact.order == SLOT and other is None and _column(operand, value):
            return with_weight(fact, RowWeight(operand, None, SLOT))
        if isinstance(fact, Grid) and isinstance(other, RowWeight):
            return _weighted_grid(fact, other.weights, value) if other.order == SLOT else None
    return _arithmetic(value, act.mul, left, right, a, b)


def _one_per_row(a: Any, rows: Value) -> bool:
    """Whether `a` holds one number for each row of `rows`: [S] or [S, 1]."""
    if not isinstance(a, Value) or not a.meta.dtype.is_floating_point:
        return False
    shape = a.meta.shape
    return len(shape) in (1, 2) and same(shape[0], rows.meta.shape[0]) and all(same(n, 1) for n in shape[1:])


def _column(a: Any, rows: Value) -> bool:
    return isinstance(a, Value) and len(a.meta.shape) == 2 and _one_per_row(a, rows)


def with_weight(fact: Pointwise | Rows, by: RowWeight) -> Fact:
    if fact.order != by.order or by.ids not in (None, fact.ids):
        raise Break("no-match", "rows are multiplied by routing weights in another order than their own")
    if fact.weight is not None:
        raise Break("no-match", "rows are multiplied by routing weights twice")
    if isinstance(fact, Rows):
        return replace(fact, weight=by.weights, masked=fact.masked | by.masked)
    if by.masked:
        _check_masks(by.masked, fact.columns[0].projection.num_experts)
    return replace(fact, weight=by.weights)


def _weighted_grid(fact: Grid, weights: Value, value: Value) -> Fact | None:
    shape = weights.meta.shape
    if len(shape) != 3 or not all(map(same, shape, (value.meta.shape[0], fact.rows.k, 1))):
        return None
    if not weights.meta.dtype.is_floating_point:
        raise Break("no-match", f"rows are multiplied by {weights.meta.dtype}, not by routing weights")
    return Grid(with_weight(fact.rows, RowWeight(weights, None, SLOT)))


@rule(aten.add.Tensor, aten.add.Scalar)
def _add(facts, value, a, b, alpha=1):
    left, right = facts.of(a), facts.of(b)
    if alpha != 1:
        return None
    for fact, other in ((left, right), (right, left)):
        if isinstance(fact, Pointwise) and isinstance(other, BiasRows):
            return with_bias(fact, other)
        if isinstance(fact, Combined):
            return None
    return _arithmetic(value, act.add, left, right, a, b)


def with_bias(fact: Pointwise, bias: BiasRows) -> Fact:
    projection = fact.bare
    if projection is None or projection.bias is not None or fact.weight is not None:
        raise Break("no-match", "a bias is added to something other than the plain output of a projection")
    if bias.order != fact.order or bias.ids is not fact.ids:
        picked = f"the bias is picked by what {name_of(bias.ids)} gives"
        raise Break("no-match", f"{picked}, which is not proven to be the expert of each of these rows")
    _check_masks(bias.masked, projection.num_experts)
    leaf = act.Expr("column", (Column(replace(projection, bias=bias.bias), "all"),))
    # Behind the up projection such rows take part in no further product; behind the down projection they would count.
    stray = bias.clamped and not bias.masked and projection.level == 2
    return replace(fact, expr=leaf, stray=stray)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(facts, value, a, b, alpha=1):
    if alpha != 1:
        return None
    return _arithmetic(value, lambda x, y: act.add(x, act.mul(-1.0, y)), facts.of(a), facts.of(b), a, b)


@rule(aten.rsub.Scalar)
def _rsub(facts, value, a, b, alpha=1):
    return _sub(facts, value, b, a, alpha)


@rule(aten.div.Tensor, aten.div.Scalar)
def _binary_div(facts, value, a, b):
    number = as_number(b)
    if number:
        return _arithmetic(value, act.mul, facts.of(a), None, a, 1.0 / number)
    divide = lambda x, y: act.mul(x, act.unary("reciprocal", y))  # noqa: E731
    return _arithmetic(value, divide, facts.of(a), facts.of(b), a, b)


def _arithmetic(value: Value, combine: Callable, left, right, a, b) -> Fact | None:
    """`combine` of two pointwise functions of the same rows, or of one and a constant."""
    base = left if isinstance(left, Pointwise) else right
    if not isinstance(base, Pointwise):
        return None
    drawn = any(map(is_random, (a, b)))
    if base.level > 1:
        what = "dropout, or something else with random numbers," if drawn else name_of(value)
        raise Break("post-norm", f"{what} works on the output of the down projection")
    sides = []
    for fact, operand in ((left, a), (right, b)):
        number = fact.number if isinstance(fact, Full) else as_number(operand)
        if isinstance(fact, Pointwise):
            if fact.ids is not base.ids or fact.order != base.order or fact.weight is not None:
                raise Break("no-match", f"{name_of(value)} joins rows of different order, routing or weight")
            sides.append(fact.expr)
        elif number is not None:
            sides.append(number)
        else:
            if drawn:
                raise Break("dropout", f"{name_of(value)} joins the experts' rows with random numbers, as dropout does")
            raise Break("activation", f"{name_of(value)} joins the experts' rows with a tensor from elsewhere")
    dtypes = base.dtypes.union(*(f.dtypes for f in (left, right) if isinstance(f, Pointwise)), {value.meta.dtype})
    return replace(base, expr=combine(*sides), dtypes=dtypes)


def is_random(value: Any) -> bool:
    """Whether `value` is nothing but random numbers, scaled."""
    while isinstance(value, Value):
        if value.op == "random":
            return True
        inputs = list(value.inputs)
        value = inputs[0] if len(inputs) == 1 else None
    return False


def _unary(name: str, *ops) -> None:
    @rule(*ops)
    def apply(facts, value, a, *args, **kwargs):
        return function_of(facts, value, a, lambda x: act.unary(name, x))


def function_of(facts: Facts, value: Value, a: Value, function: Callable) -> Fact | None:
    fact = facts.of(a)
    if not isinstance(fact, Pointwise):
        return None
    if fact.weight is not None:
        raise Break("activation", f"{name_of(value)} is applied after the routing weights")
    if fact.level > 1:
        raise Break("post-norm", f"{name_of(value)} works on the output of the down projection")
    return replace(fact, expr=function(fact.expr), dtypes=fact.dtypes | {value.meta.dtype})


for _function_name, _ops in {
    "sigmoid": [aten.sigmoid.default],
    "silu": [aten.silu.default],
    "relu": [aten.relu.default],
    "tanh": [aten.tanh.default],
    "exp": [aten.exp.default],
    "erf": [aten.erf.default],
    "sqrt": [aten.sqrt.default],
    "rsqrt": [aten.rsqrt.default],
    "reciprocal": [aten.reciprocal.default],
    "square": [aten.square.default],
}.items():
    _unary(_function_name, *_ops)


@rule(aten.gelu.default)
def _gelu(facts, value, a, *, approximate="none"):
    return function_of(facts, value, a, lambda x: act.unary("gelu" if approximate == "none" else "gelu_tanh", x))


@rule(aten.softplus.default)
def _softplus(facts, value, a, beta=1, threshold=20):
    return function_of(facts, value, a, lambda x: act.unary("softplus", x)) if (beta, threshold) == (1, 20) else None


@rule(aten.neg.default)
def _neg(facts, value, a):
    return function_of(facts, value, a, lambda x: act.mul(-1.0, x))


@rule(aten.pow.Tensor_Scalar)
def _pow(facts, value, a, exponent):
    return function_of(facts, value, a, lambda x: act.unary("square", x)) if exponent == 2 else None


@rule(aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default, aten.hardtanh.default)
def _clamp(facts, value, a, *args, min=None, max=None):
    if value.op is aten.clamp_max.default:
        low, high = None, args[0] if args else max
    elif value.op is aten.clamp_min.default:
        low, high = args[0] if args else min, None
    else:
        low, high = (*args, min if not args else None, max if len(args) < 2 else None)[:2]
    fact = facts.of(a)
    if isinstance(fact, Expert):
        if low not in (None, 0) or not isinstance(high, int) or fact.clamped:
            return None
        return replace(fact, clamped=True, limit=high)
    given = [bound for bound in (low, high) if bound is not None]
    if not given or any(as_number(bound) is None for bound in given):
        return None
    return function_of(facts, value, a, lambda x: act.clamp(x, as_number(low), as_number(high)))


def register_foreign() -> None:
    """Rules for ops of other libraries, once those are loaded."""
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if fallback is not None:
        RULES[fallback.default] = _grouped_mm
    scatter_add = getattr(torch.ops.torchtitan, "deterministic_scatter_add", None)
    if scatter_add is not None:
        RULES[scatter_add.default] = _torchtitan_scatter_add


def _torchtitan_scatter_add(facts, value, base, index, source):
    return RULES[aten.scatter_add.default](facts, value, base, 0, index, source)
