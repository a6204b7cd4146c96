"""Rules for experts that are computed in products with more than two dimensions, as einsum and bmm do.

Either each slot has a gathered copy of its expert's matrix (``w[ids]``), or every expert computes every token and the
routing weights are zero where a token does not go. What matters is which dimension runs over what, however these are
split, merged and swapped on the way: dimensions are groups of *axes*, and products contract axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mok_compile import activation as act
from mok_compile.passes.facts.kinds import (
    CHOICE,
    EVERY,
    EXPERT,
    FEATURE,
    NONE,
    SLOT,
    TOKEN,
    BiasRows,
    Column,
    Combined,
    Fact,
    Full,
    Hits,
    Laid,
    Pointwise,
    Projection,
    Rows,
    RowWeight,
    Share,
)
from mok_compile.passes.facts.masks import distinct
from mok_compile.passes.facts.rules import (
    RULES,
    Break,
    Facts,
    combination,
    dim_of,
    half_of,
    is_integer,
    loses,
    pinned,
    projection_of,
    root_of,
    rule,
    same,
    weight_of,
    with_bias,
    with_weight,
)
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten
AGAIN = "again"  # what a dimension runs over that only repeats
TOKENS = ((TOKEN,), ())  # the roles of the tokens' dimension; the second where there is but one token


@dataclass(frozen=True)
class Axis:
    """One dimension of the tensor at the bottom, or a repetition of all of it (`number` < 0)."""

    number: int
    size: Any = field(compare=False)


@dataclass(frozen=True)
class Shape:
    """A tensor as its `base` in another shape: for each dimension the axes of the base that it runs over."""

    base: Value
    dims: tuple[tuple[Axis, ...], ...]
    dtypes: frozenset[torch.dtype] = frozenset()


def unfold(value: Value, rounded: bool = True, until: Value | None = None) -> Shape:
    """`value` without the changes of shape and the casts that led to it, from `until` on if that is among them; without
    `rounded`, not past a cast that rounds."""
    changed = None if value.detached or value is until else _unfold(value, rounded, until)
    if changed is not None:
        return changed
    return Shape(value, tuple((Axis(i, n),) for i, n in enumerate(value.meta.shape)), frozenset([value.meta.dtype]))


def _unfold(value: Value, rounded: bool, until: Value | None) -> Shape | None:
    if value.op not in _CHANGES:
        return None
    if not rounded and loses(value.args[0].meta.dtype, value.meta.dtype):
        return None
    inner, args = unfold(value.args[0], rounded, until), value.args[1:]
    dims = _CHANGES[value.op](value, inner.dims, *args, **value.kwargs)
    return None if dims is None else Shape(inner.base, tuple(dims), inner.dtypes | {value.meta.dtype})


def _regrouped(value: Value, dims, *args, **kwargs):
    return regroup([axis for dim in dims for axis in dim], value.meta.shape)


def regroup(axes: list[Axis], shape: tuple) -> list[tuple[Axis, ...]] | None:
    """`axes` in row-major order, as the dimensions of `shape`; None where a dimension would be cut."""
    axes, dims = list(axes), []
    for size in shape:
        group: list[Axis] = []
        while not same(math.prod(a.size for a in group), size) or (not group and axes and same(axes[0].size, 1)):
            if not axes:
                return None
            group.append(axes.pop(0))
        dims.append(tuple(group))
    if axes and dims and all(same(a.size, 1) for a in axes):
        dims[-1] += tuple(axes)
        axes = []
    return None if axes else dims


def _permuted(value: Value, dims, order):
    return [dims[d % len(dims)] for d in order]


def _swapped(value: Value, dims, first=0, second=1):
    dims = list(dims)
    first, second = first % len(dims), second % len(dims)
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _repeated(value: Value, dims, sizes, **kwargs):
    """expand and repeat: dimensions of one entry become many; leading ones may come on top."""
    new = len(value.meta.shape) - len(dims)
    dims = [()] * new + list(dims)
    old = (1,) * new + tuple(value.args[0].meta.shape)
    again = 0
    for d, (before, after) in enumerate(zip(old, value.meta.shape, strict=True)):
        if same(before, after):
            continue
        size = after if same(before, 1) else sizes[d]
        if again or (not same(before, 1) and value.op is not aten.repeat.default):
            return None
        again -= 1
        dims[d] = (Axis(again, size), *(() if same(before, 1) else dims[d]))
    return dims


def _sliced(value: Value, dims, *args):
    return list(dims) if all(map(same, value.meta.shape, value.args[0].meta.shape)) else None


def _cast(value: Value, dims, **kwargs):
    return list(dims) if value.meta.dtype.is_floating_point else None


def _counts(value: Value, size: Any) -> bool:
    """Whether `value` is 0, 1, .. as often as `size`."""
    while value.op is aten.detach.default:
        value = value.args[0]
    return value.op is aten.arange.default and len(value.args) == 1 and same(value.meta.shape[0], size)


def _taken(value: Value, dims, dim, index, **kwargs):
    """gather along the first dimension by an index that counts the rows, as often as it likes, column by column."""
    at = unfold(index)
    count, width = value.args[0].meta.shape if len(dims) == 2 else (None, None)
    counts = len(dims) == 2 == len(at.dims) and _counts(at.base, count)
    if not counts or dim not in (0, -2) or not same(index.meta.shape[1], width):
        return None
    rows, columns = at.dims
    again = [axis for axis in rows if axis.number < 0]
    own = same(count, 1) or len(again) < len(rows)  # the number of a single row is the same everywhere
    if not own or any(axis.number >= 0 and not same(axis.size, 1) for axis in columns):
        return None
    if any(axis.number < 0 for dim in dims for axis in dim):
        return None
    place = next((i for i, axis in enumerate(rows) if axis.number >= 0), len(rows))
    return [(*rows[:place], *dims[0], *rows[place + 1 :]), dims[1]]


_CHANGES = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _regrouped),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims), _regrouped),
    aten.permute.default: _permuted,
    **dict.fromkeys((aten.transpose.int, aten.t.default), _swapped),
    **dict.fromkeys((aten.expand.default, aten.repeat.default), _repeated),
    **dict.fromkeys((aten.clone.default, aten.alias.default), lambda value, dims, *args, **kwargs: list(dims)),
    aten.slice.Tensor: _sliced,
    aten._to_copy.default: _cast,
    aten.gather.default: _taken,
}
# Of these, rows that are known have rules of their own, or none.
_NOT_OF_ROWS = (
    *(aten._to_copy.default, aten.slice.Tensor, aten.gather.default),
    *(aten.expand.default, aten.repeat.default),
)


# What the operands of a product are

Roles = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Operand:
    """An operand of a product: what it is, what each of its dimensions runs over, and the number of experts."""

    what: Any
    roles: Roles
    experts: Any = None


def _tokens(value: Value, facts: Facts) -> Operand | None:
    """Tokens x [.., H], as they are or again for each expert or slot."""
    shape = unfold(value, until=_result_before(value, facts))
    base = shape.base
    plain = facts.of(base) is None or isinstance(facts.of(base), Combined)
    if not plain or not base.meta.dtype.is_floating_point or len(base.meta.shape) < 2:
        return None
    last = len(base.meta.shape) - 1
    names = dict.fromkeys(range(last), TOKEN) | {last: FEATURE, -1: AGAIN}
    roles = _flat(named_roles(shape.dims, names))
    return None if roles is None else Operand((base, shape.dtypes), roles)


def _result_before(value: Value, facts: Facts) -> Value | None:
    """The result of another block that `value` is in another shape, as that block leaves it; None if it is none. What
    it was inside of that block, such as a product whose last dimension has one entry, is that block's."""
    while not isinstance(facts.of(value), Combined):
        if value.detached or value.op not in _CHANGES:
            return None
        value = value.args[0]
    return value


def named_roles(dims: list | tuple, names: dict[int, str]) -> Roles | None:
    """The roles of dimensions. Tokens of several axes keep their order; where they are neighbours they are one. Axes of
    one entry among them say nothing: a single token has no role."""
    numbers = [axis.number for dim in dims for axis in dim]
    if len(set(numbers)) != len(numbers) or not set(numbers) <= set(names):
        return None
    axes = [axis for dim in dims for axis in dim if names[axis.number] == TOKEN]
    solid = [axis for axis in axes if not same(axis.size, 1)]
    tokens = [axis.number for axis in solid]
    if tokens != sorted(tokens):
        return None
    roles = []
    for dim in dims:
        own = [names[axis.number] for axis in dim if axis not in axes or axis in solid]
        own = [name for name in own if name != NONE]
        roles.append(tuple(r for i, r in enumerate(own) if r != TOKEN or i == 0 or own[i - 1] != TOKEN))
    return tuple(roles)


def _flat(roles: Roles | None) -> Roles | None:
    """`roles` if their tokens are all in one dimension."""
    return None if roles is None or sum(TOKEN in dim for dim in roles) > 1 else roles


@dataclass(frozen=True)
class Matrices:
    """The weight of all experts, [E, a, b], or their bias [E, N]; gathered for each slot by `ids`."""

    stored: Value
    ids: Value | None


def _matrices(value: Value, facts: Facts) -> Operand | None:
    shape = unfold(value)
    base = shape.base
    if facts.of(base) is not None:
        return None
    picked = base.op is aten.index.Tensor and len(base.args[1]) == 1 and isinstance(base.args[1][0], Value)
    if picked and not base.detached:
        stored, ids = base.args[0], base.args[1][0]
        if facts.of(ids) is not None or not is_integer(ids) or len(stored.meta.shape) != 3:
            return None
        lead = len(ids.meta.shape)
        if lead < 2 or facts.of(stored) is not None:
            return None
        names = dict.fromkeys(range(lead - 1), TOKEN) | {lead - 1: CHOICE, lead: "a", lead + 1: "b"}
        what = Matrices(stored, ids)
    elif len(base.meta.shape) == 3 and base.meta.dtype.is_floating_point:
        names, what = {0: EXPERT, 1: "a", 2: "b"}, Matrices(base, None)
    else:
        return None
    roles = _flat(named_roles(shape.dims, names))
    experts = None if picked else base.meta.shape[0]
    return None if roles is None or len(shape.dtypes) > 1 else Operand(what, roles, experts)


def _rows(value: Value, facts: Facts) -> Operand | None:
    fact = facts.of(value)
    return Operand(fact.rows, fact.roles, fact.experts) if isinstance(fact, Laid) else None


def routing_weights(value: Value, facts: Facts) -> Operand | None:
    """Routing weights [T, K], or those of all experts [T, E], as they are after the last rounding."""
    shape = unfold(value, rounded=False)
    base, fact, experts = shape.base, facts.of(shape.base), None
    if isinstance(fact, (Share, Hits)):
        hits = fact.hits if isinstance(fact, Share) else fact
        if not hits.reduced or hits.negated or hits.expert is not None or set(hits.axes) - {TOKEN, EXPERT, NONE}:
            return None
        if isinstance(fact, Hits) and not distinct(hits.ids):
            return None
        roles = named_roles(shape.dims, dict(enumerate(hits.axes)))
        experts = base.meta.shape[hits.axes.index(EXPERT)] if EXPERT in hits.axes else None
    elif fact is None and base.meta.dtype.is_floating_point and len(base.meta.shape) >= 2:
        last = len(base.meta.shape) - 1
        roles = named_roles(shape.dims, dict.fromkeys(range(last), TOKEN) | {last: CHOICE})
    else:
        return None
    return None if roles is None else Operand(fact if fact is not None else base, roles, experts)


# Products


@rule(aten.bmm.default)
def _bmm(facts, value, a, b):
    for left, right, swapped in ((a, b, False), (b, a, True)):
        fact = _product(facts, value, left, right, swapped)
        if fact is not None:
            return fact
    return None


@rule(aten.mm.default)
def _mm(facts, value, a, b):
    if len(unfold(b).base.meta.shape) != 3 or isinstance(facts.of(a), (Rows, Pointwise)):
        return None
    fact = _product(facts, value, a, b, False)
    return replace(fact, roles=fact.roles[1:]) if isinstance(fact, Laid) and len(fact.roles) == 3 else fact


def _product(facts: Facts, value: Value, left: Value, right: Value, swapped: bool) -> Fact | None:
    """The product of `left` (rows or routing weights) with `right`; `swapped` where `right` stands on the left."""
    matrices = _matrices(right, facts)
    if matrices is not None:
        rows = _rows(left, facts) or _tokens(left, facts)
        found = None if rows is None else _projection(facts, value, rows, matrices, swapped)
        if found is not None:
            return found
    rows = _rows(right, facts)
    weights = routing_weights(left, facts) if rows is not None else None
    if weights is not None:
        batch, free, over = _sides(weights.roles, swapped)
        rows_batch, rows_over, rest = _sides(rows.roles, swapped)
        if free == () and batch == rows_batch in TOKENS and over == rows_over and rest == (FEATURE,):
            return _mixed(facts, _by(rows.what, weights.what), over)
    # Tokens times routing weights, without a sum: an outer product over one entry.
    weights, tokens = routing_weights(left, facts), _tokens(right, facts)
    if weights is not None and tokens is not None and isinstance(weights.what, (Share, Hits)):
        batch, free, over = _sides(weights.roles, swapped)
        tokens_batch, tokens_over, rest = _sides(tokens.roles, swapped)
        outer = over == tokens_over == () and free == (EXPERT,) and rest == (FEATURE,)
        if batch == tokens_batch in TOKENS and outer:
            roles = (batch, rest, free) if swapped else (batch, free, rest)
            return Laid(_by(_start(tokens, EVERY, 1), weights.what), roles, weights.experts)
    return None


def _sides(roles: Roles, transposed: bool) -> Roles:
    """(batch, free, contracted) of a left operand, (batch, contracted, free) of a right one; `transposed` where it
    stands on the other side."""
    batch, first, second = roles if len(roles) == 3 else ((), *roles)
    return (batch, second, first) if transposed else (batch, first, second)


def _projection(facts: Facts, value: Value, rows: Operand, weight: Operand, swapped: bool) -> Fact | None:
    batch, free, over = _sides(rows.roles, swapped)
    # On the right the contracted side comes first; where operands are swapped it comes last.
    weight_batch, weight_over, rest = _sides(weight.roles, swapped)
    gathered = weight.what.ids is not None
    k = pinned(weight.what.ids.meta.shape[-1]) if gathered else 1
    alone = gathered and k == 1
    if alone:
        batch, free, over, weight_batch, weight_over, rest = _but_choice(
            (batch, free, over, weight_batch, weight_over, rest)
        )
    if over != (FEATURE,) or weight_over not in (("a",), ("b",)):
        return None
    out = "b" if weight_over == ("a",) else "a"
    start = not isinstance(rows.what, (Rows, Pointwise))
    tokens = weight_batch[:-1]  # of gathered matrices
    per_row = (*tokens, CHOICE) if gathered else (EXPERT,)
    if alone and free == () and rest == (out,) and batch == weight_batch in TOKENS:
        roles = ((*batch, CHOICE), free, (FEATURE,))
    elif gathered and start and batch == weight_batch in TOKENS and free == () and rest == (CHOICE, out):
        roles = (batch, free, (CHOICE, FEATURE))
    elif gathered and free == () and rest == (out,) and weight_batch == per_row and tokens in TOKENS:
        if batch != (per_row if not start else (*tokens, AGAIN)):
            return None
        roles = (per_row, free, (FEATURE,))
    elif not gathered and start and batch == weight_batch == () and free in TOKENS and rest == (EXPERT, out):
        roles = (batch, free, (EXPERT, FEATURE))
    elif not gathered and free in TOKENS and rest == (out,) and weight_batch == per_row:
        if batch != (per_row if not start else (AGAIN,)):
            return None
        roles = (per_row, free, (FEATURE,))
    else:
        return None
    if swapped:
        roles = (roles[0], roles[2], roles[1])
    ids = root_of(weight.what.ids) if gathered else None
    source = _start(rows, SLOT if gathered else EVERY, k) if start else rows.what
    if gathered and source.ids not in (None, ids):
        raise Break("no-match", "rows and gathered weights stem from different routings")
    stored = weight_of(weight.what.stored)
    stored = replace(stored, transposed=stored.transposed != (weight_over == ("a",)))
    return Laid(projection_of(value, source, stored, ids or source.ids), roles, weight.experts)


def _is_alone(rows: Rows | Pointwise) -> bool:
    """Whether each token has one slot."""
    return rows.order == SLOT and rows.k == 1


def _but_choice(roles: Roles) -> Roles:
    """`roles` without that of a token's only slot, which stands anywhere: it has but one entry."""
    return tuple(tuple(role for role in dim if role != CHOICE) for dim in roles)


def _start(tokens: Operand, order: str, k) -> Rows:
    x, dtypes = tokens.what
    return Rows(x, k, None, order, dtypes=dtypes)


# Shapes and functions of the rows


def _reshaped(facts, value, a, *args, **kwargs):
    fact = facts.of(a)
    if not isinstance(fact, Laid):
        return None
    names = dict(enumerate(role for dim in fact.roles for role in dim))
    sizes = _sizes(fact, a)
    if sizes is None:
        return None
    axes = iter(Axis(n, sizes[n]) for n in names)
    dims = [tuple(next(axes) for _ in dim) for dim in fact.roles]
    changed = _CHANGES[value.op](value, dims, *args, **kwargs)
    if changed is None and _CHANGES[value.op] is _regrouped:
        for cut, longer in _cuts(dims, names, value.meta.shape):
            changed = regroup([axis for dim in cut for axis in dim], value.meta.shape)
            if changed is not None:
                names = longer
                break
    roles = None if changed is None else named_roles(changed, names)
    return None if roles is None else _settled(facts, replace(fact, roles=roles))


def _settled(facts: Facts, fact: Laid) -> Fact:
    """The rows themselves where `fact` is nothing but what becomes of tokens with one slot: no sum follows."""
    rows = fact.rows
    alone = isinstance(rows, Pointwise) and _is_alone(rows) and rows.bare is not None
    *tokens, features = _but_choice(fact.roles)
    if not alone or rows.level != 2 or features != (FEATURE,):
        return fact
    if len(tokens) == 1 and tokens[0] in TOKENS:
        return rows
    several = len(tokens) > 1 and set(tokens) == {(TOKEN,)}
    return _mixed(facts, rows, (CHOICE,)) if several and rows.weight is not None else fact


def _cuts(dims: list, names: dict[int, str], shape: tuple) -> Iterator[tuple[list, dict[int, str]]]:
    """The one axis of tokens as several, row-major, in sizes in which they stand next to each other in `shape`."""
    tokens = [axis for dim in dims for axis in dim if names[axis.number] == TOKEN]
    for i, j in itertools.combinations(range(len(shape) + 1), 2):
        if len(tokens) == 1 and j > i + 1 and same(math.prod(shape[i:j]), tokens[0].size):
            parts = tuple(Axis(len(names) + n, size) for n, size in enumerate(shape[i:j]))
            cut = [tuple(part for axis in dim for part in (parts if axis is tokens[0] else (axis,))) for dim in dims]
            yield cut, names | {part.number: TOKEN for part in parts}


for _op in _CHANGES:
    if _op not in _NOT_OF_ROWS:
        rule(_op)(_reshaped)


def _sizes(fact: Laid, a: Value) -> list | None:
    """The size of each role of `fact`, in their order; None where two of one dimension are not known apart."""
    known = {CHOICE: fact.rows.k, EXPERT: fact.experts}
    sizes = []
    for dim, n in zip(fact.roles, a.meta.shape, strict=True):
        if len([role for role in dim if role not in known]) > 1:
            return None
        rest = math.prod(known[role] for role in dim if role in known)
        sizes += [known[role] if role in known else n // rest for role in dim]
    return sizes


class _Inside:
    """Facts for the rules of plain rows, whatever the number of dimensions."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def of(self, value: Any) -> Fact | None:
        fact = self.facts.of(value)
        return fact.rows if isinstance(fact, Laid) else fact


def _elementwise(op, plain) -> None:
    @rule(op)
    def apply(facts, value, *args, **kwargs):
        laid = [facts.of(a) for a in args if isinstance(facts.of(a), Laid)]
        if not laid:
            return None
        shapes = [a.meta.shape for a in args if isinstance(facts.of(a), Laid)]
        spread = any(len(s) != len(value.meta.shape) or not all(map(same, s, value.meta.shape)) for s in shapes)
        if len({fact.roles for fact in laid}) > 1 or spread:
            raise Break("no-match", f"{op} joins rows of different shapes")
        fact = plain(_Inside(facts), value, *args, **kwargs)
        return replace(laid[0], rows=fact) if isinstance(fact, (Rows, Pointwise)) else None


for _op in (
    *(aten.sigmoid.default, aten.silu.default, aten.relu.default, aten.tanh.default, aten.exp.default),
    *(aten.erf.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.square.default),
    *(aten.gelu.default, aten.softplus.default, aten.neg.default, aten.pow.Tensor_Scalar, aten.mul.Tensor),
    *(aten.mul.Scalar, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar),
    *(aten.div.Tensor, aten.div.Scalar, aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default),
    *(aten.hardtanh.default, aten._to_copy.default),
):
    _elementwise(_op, RULES[_op])


@rule(aten.add.Tensor)
def _add_bias(facts, value, a, b, alpha=1):
    """A bias [E, N], as it is or gathered for each slot (``bias[ids]``)."""
    for rows, other in ((a, b), (b, a)):
        fact = facts.of(rows)
        if not isinstance(fact, Laid) or not isinstance(fact.rows, Pointwise) or not isinstance(other, Value):
            continue
        bias = _bias(other, facts)
        if bias is None or alpha != 1 or not all(map(same, value.meta.shape, rows.meta.shape)):
            continue
        roles = ((),) * (len(fact.roles) - len(bias.roles)) + bias.roles
        gathered = bias.what.ids is not None
        wanted = fact.roles if gathered else tuple(d if d in ((EXPERT,), (FEATURE,)) else () for d in fact.roles)
        if roles != wanted or (FEATURE,) not in roles or gathered != (fact.rows.order == SLOT):
            continue
        if not gathered and ((EXPERT,) not in roles or not same(bias.experts, fact.experts)):
            continue
        if fact.rows.fenced:
            raise Break("no-match", "a bias is added to rows that a mask has set to zero")
        ids = root_of(bias.what.ids) if gathered else fact.rows.ids
        return replace(fact, rows=with_bias(fact.rows, BiasRows(bias.what.stored, ids, fact.rows.order)))
    return None


def _bias(value: Value, facts: Facts) -> Operand | None:
    shape = unfold(value)
    stored, ids = shape.base, None
    if stored.op is aten.index.Tensor and len(stored.args[1]) == 1 and not stored.detached:
        stored, ids = stored.args[0], stored.args[1][0]
    lead = 1 if ids is None else len(ids.meta.shape)
    names = {0: EXPERT} if ids is None else dict.fromkeys(range(lead - 1), TOKEN) | {lead - 1: CHOICE}
    plain = len(stored.meta.shape) == 2 and stored.meta.dtype.is_floating_point and len(shape.dtypes) == 1
    if not plain or any(facts.of(v) is not None for v in (shape.base, stored, ids)):
        return None
    if ids is not None and (lead < 2 or not is_integer(ids)):
        return None
    roles = named_roles(shape.dims, names | {lead: FEATURE})
    return None if roles is None else Operand(Matrices(stored, ids), roles, stored.meta.shape[0])


def _is_features(fact: Laid, dim: int) -> bool:
    """Whether `dim` runs over the features alone."""
    roles = _but_choice(fact.roles) if _is_alone(fact.rows) else fact.roles
    return roles[dim] == (FEATURE,)


@rule(aten.split.Tensor)
def _split(facts, value, a, size, dim=0):
    fact = facts.of(a)
    if not isinstance(fact, Laid) or not isinstance(fact.rows, Pointwise):
        return None
    dim = dim_of(a, dim)
    halves = _is_features(fact, dim) and isinstance(size, int) and same(a.meta.shape[dim], 2 * size)
    return replace(fact, rows=half_of(fact.rows, ("first", "second")[value.index])) if halves else None


@rule(aten.slice.Tensor)
def _slice(facts, value, a, dim=0, start=None, end=None, step=1):
    fact = facts.of(a)
    if not isinstance(fact, Laid) or not isinstance(fact.rows, Pointwise):
        return None
    dim, start = dim_of(a, dim), start or 0
    length, size = a.meta.shape[dim], value.meta.shape[dim]
    if step == 1 and same(size, length):
        return fact
    if not _is_features(fact, dim) or not same(2 * size, length):
        return None
    if step == 2 and start in (0, 1):
        return replace(fact, rows=half_of(fact.rows, ("even", "odd")[start]))
    half = "first" if same(start, 0) else "second" if same(start, size) else None
    return replace(fact, rows=half_of(fact.rows, half)) if step == 1 and half else None


# Routing weights and the sum


@rule(aten.mul.Tensor)
def _mul(facts, value, a, b):
    for left, right in ((a, b), (b, a)):
        if not isinstance(left, Value) or not isinstance(right, Value):
            return None
        weights = routing_weights(right, facts)
        if weights is None:
            continue
        rows = _rows(left, facts)
        if rows is None and isinstance(weights.what, (Share, Hits)) and facts.of(left) is None:
            rows = _for_each_expert(_tokens(left, facts), weights)
        if rows is None or len(weights.roles) != len(rows.roles):
            continue
        wanted = tuple(tuple(r for r in dim if r != FEATURE) for dim in rows.roles)
        if (
            rows.what.k == 1 and rows.what.order == SLOT
        ):  # weights [T, 1] or [T, 1, 1], whatever dimension is the slot's
            weights = replace(weights, roles=_but_choice(weights.roles))
            wanted = _but_choice(wanted)
        whole = all(not dim or FEATURE not in own for dim, own in zip(weights.roles, rows.roles, strict=True))
        # Tokens in several dimensions: [T, 1] with [1, T] would be all pairs of them.
        sizes = zip(rows.roles, left.meta.shape, right.meta.shape, strict=True)
        whole = whole and all(same(n, m) for dim, n, m in sizes if TOKEN in dim)
        if weights.roles == wanted and whole and (rows.what.order == EVERY) == isinstance(weights.what, (Share, Hits)):
            return Laid(_by(rows.what, weights.what), rows.roles, weights.experts or rows.experts)
    return None


def _for_each_expert(tokens: Operand | None, weights: Operand) -> Operand | None:
    """Tokens, repeated or broadcast over the experts of `weights`."""
    if tokens is None or len(tokens.roles) != len(weights.roles):
        return None
    roles = tuple(
        (EXPERT,) if dim == () and by == (EXPERT,) else tuple(EXPERT if role == AGAIN else role for role in dim)
        for dim, by in zip(tokens.roles, weights.roles, strict=True)
    )
    each = EXPERT in (role for dim in roles for role in dim)
    return Operand(_start(tokens, EVERY, 1), roles) if each else None


def _by(rows: Rows | Pointwise, weights: Value | Share | Hits) -> Rows | Pointwise:
    """`rows` times their routing weights."""
    if isinstance(weights, Value):
        return with_weight(rows, RowWeight(weights, None, rows.order))
    hits = weights.hits if isinstance(weights, Share) else weights
    if rows.ids not in (None, hits.ids):
        raise Break("no-match", "rows are multiplied by the routing weights of another routing")
    rows = replace(rows, ids=hits.ids, k=pinned(hits.k))
    if isinstance(weights, Hits):  # zeros where a token does not go, which its routing weight says once more
        return replace(rows, fenced=True)
    return with_weight(rows, RowWeight(weights.weights, hits.ids, rows.order))


@rule(aten.sum.dim_IntList)
def _sum(facts, value, a, dim, keepdim=False, *, dtype=None):
    fact = facts.of(a)
    if not isinstance(fact, Laid):
        return None
    alone = _is_alone(fact.rows)
    roles = _but_choice(fact.roles) if alone else fact.roles
    over = (
        [] if dim is None else [(CHOICE,) if alone and roles[dim_of(a, d)] == () else roles[dim_of(a, d)] for d in dim]
    )
    if keepdim or len(over) != 1 or over[0] not in ((CHOICE,), (EXPERT,)):
        raise Break("no-match", "the rows of a token are summed over another dimension than its experts")
    left = [dim for dim in roles if dim not in ((), over[0])]
    if left[-1:] != [(FEATURE,)] or set(left[:-1]) - {(TOKEN,)}:
        raise Break("no-match", "the sum over the experts of a token does not give rows of tokens")
    return _mixed(facts, fact.rows, over[0])


@rule(aten.scatter_add.default, aten.index_add.default)
def _add_onto_tokens(facts, value, base, dim, index, source, *, alpha=1):
    """The rows of all experts, each added onto its token's."""
    fact = facts.of(source)
    if not isinstance(fact, Laid):
        return None
    places, *columns = unfold(index).dims
    roles = named_roles((places,), {0: TOKEN, -1: EXPERT})
    own = roles is not None and fact.roles == (*roles, (FEATURE,)) and _counts(unfold(index).base, base.meta.shape[0])
    own = own and all(same(axis.size, fact.experts) for axis in places if axis.number < 0)
    if value.op is aten.scatter_add.default:
        again = all(axis.number < 0 or same(axis.size, 1) for dim in columns for axis in dim)
        shapes = index.meta.shape, source.meta.shape
        own = own and again and len(shapes[0]) == len(shapes[1]) and all(map(same, *shapes))
    if not own or dim_of(base, dim) != 0 or alpha != 1 or not same(base.meta.shape[-1], source.meta.shape[-1]):
        raise Break("no-match", "rows are added up by an index that is not proven to be their token")
    return replace(_mixed(facts, fact.rows, (EXPERT,)), base=None if facts.of(base) == Full(0.0) else base)


def _mixed(facts: Facts, rows: Rows | Pointwise, over: tuple[str, ...]) -> Combined:
    """The sum of the rows of each token."""
    if rows.order == SLOT:
        if over != (CHOICE,):
            raise Break("no-match", "the rows of a token are summed over another dimension than its experts")
        return combination(facts, rows, None)
    if over != (EXPERT,):
        raise Break("no-match", "the rows of a token are summed over another dimension than its experts")
    combination(facts, rows, None)
    return Combined(_routed(rows), None)


def _routed(rows: Pointwise) -> Pointwise:
    """Rows of every token and expert as those of the slots: the others add nothing."""
    down = rows.bare
    source = down.source
    if not isinstance(source, Pointwise):
        raise Break("no-match", "the combined rows come from a single projection")
    ups = list(dict.fromkeys(c.projection for c in source.columns))
    starts = {up.source for up in ups}
    if len(starts) != 1 or not isinstance(ups[0].source, Rows):
        raise Break("no-match", "gate and up project different rows")
    start = starts.pop()
    ids = {i for i in (rows.ids, source.ids, start.ids) if i is not None}
    if len(ids) != 1:
        raise Break("no-match", "every expert computes every token, and no routing says which of them count")
    ids, k = ids.pop(), max(rows.k, source.k, start.k)
    if rows.weight is None and source.weight is None and not rows.fenced and not _vanishes(rows, source, start):
        raise Break("no-match", "what an expert makes of a token that does not go to it is not zero")
    return at_slots(rows, ids, k)


def at_slots(rows: Pointwise, ids: Value, k: int) -> Pointwise:
    """Rows of every token and expert as those of the slots alone."""
    down = rows.bare
    source = down.source
    leaves = {}
    for column in source.columns:
        start = column.projection.source
        up = replace(column.projection, source=replace(start, ids=None, order=SLOT, k=k, fenced=False), ids=ids)
        leaves[_leaf(column)] = _leaf(Column(up, column.part))
    inner = replace(source, expr=act.substitute(source.expr, leaves), ids=ids, k=k, order=SLOT, fenced=False)
    down = _leaf(Column(Projection(inner, down.weight, ids, down.bias), "all"))
    return replace(rows, expr=down, ids=ids, k=k, order=SLOT, fenced=False)


def _vanishes(rows: Pointwise, source: Pointwise, start: Rows) -> bool:
    """Whether rows of zeros become zeros again: no biases, and an activation that is zero at zero."""
    zero = start.weight is not None or start.fenced
    biased = rows.bare.bias is not None or any(c.projection.bias is not None for c in source.columns)
    leaves = {_leaf(c): act.GATE if i == 0 else act.UP for i, c in enumerate(source.columns)}
    if not zero or biased or len(source.columns) > 2:
        return False
    at = torch.zeros((), dtype=torch.float64)
    return not bool(act.evaluate(act.substitute(source.expr, leaves), at, at))


def _leaf(column: Column) -> act.Expr:
    return act.Expr("column", (column,))
