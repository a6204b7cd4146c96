"""What can be known of a value in MoE terms.

Facts speak of *rows*: slots s = t * K + k in "slot" order, or the same slots in "sorted" order, sorted by expert.
A fact about an integer or a weight says what stands at a row; further dimensions only repeat it. ``ids`` is the value
that the routing stems from: two facts belong together only if it is the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mok_compile.activation import Expr
from mok_compile.passes.graph.view import Value

SLOT, SORTED = "slot", "sorted"
EVERY = "every"  # a row for each token and each expert, whether it goes there or not


@dataclass(frozen=True)
class Fact:
    """Something proven of a value."""


@dataclass(frozen=True)
class Broken:
    """The value should have been part of an MoE block, but the proof stops here."""

    reason: str
    detail: str
    at: Value


@dataclass(frozen=True)
class Iota(Fact):
    """0, 1, 2, ..."""


@dataclass(frozen=True)
class Full(Fact):
    """The same number everywhere."""

    number: float


@dataclass(frozen=True)
class Expert(Fact):
    """The expert number of each row; `clamped` to at most `limit`, so that it can index a bias."""

    ids: Value
    order: str
    clamped: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Perm(Fact):
    """At sorted position r: the slot that comes there."""

    ids: Value


@dataclass(frozen=True)
class Inverse(Fact):
    """At slot s: its sorted position."""

    ids: Value


@dataclass(frozen=True)
class Token(Fact):
    """At each row: the token it belongs to, slot // k. `ids` is None in slot order, which needs no ids."""

    ids: Value | None
    order: str
    k: int


@dataclass(frozen=True)
class Counts(Fact):
    """Rows of each of the E experts."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class Offsets(Fact):
    """End of each expert's rows in sorted order."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class Bounds(Fact):
    """[E + 1]: where each expert's rows begin in sorted order, and where the last one's end."""

    ids: Value
    num_experts: int


@dataclass(frozen=True)
class NoRoute(Fact):
    """True at the rows in sorted order whose id is no expert's (with `negated`: False there)."""

    ids: Value
    num_experts: int
    negated: bool = False


@dataclass(frozen=True)
class FromTable:
    """Routing weights that stand in a table [T, E]: that of a slot is in its token's row, at its expert. The experts
    of a token are distinct. `dim`: the table's dimension for the experts."""

    table: Value
    dim: int = -1


@dataclass(frozen=True)
class RowWeight(Fact):
    """The routing weight of each row. `weights` is the value in slot order, [S], [T, K] or with ones after that.

    Here and below, `masked` holds the numbers of experts that masks of rows without expert took for granted.
    """

    weights: Value | FromTable
    ids: Value | None
    order: str | Hits
    masked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BiasRows(Fact):
    """At each row: the row of `bias` [E, N] of its expert; with `clamped`, of some expert where the row has none."""

    bias: Value
    ids: Value
    order: str
    masked: frozenset[int] = frozenset()
    clamped: bool = False


@dataclass(frozen=True)
class Rows(Fact):
    """At each row: the token's row of x, times `weight` if there is one. `dtypes`: all it was ever cast to.

    `fenced`, here and below: of the rows of every expert, zero where the token does not go.
    """

    x: Value
    k: int
    ids: Value | None
    order: str | Hits
    weight: Value | FromTable | None = None
    dtypes: frozenset[torch.dtype] = frozenset()
    masked: frozenset[int] = frozenset()
    fenced: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight of all experts as the model stores it: [E, out, in] or one [out, in] for each expert; the last two
    dimensions are the other way round where `transposed`."""

    stored: Value | tuple[Value, ...]
    transposed: bool

    @property
    def tensors(self) -> tuple[Value, ...]:
        return self.stored if isinstance(self.stored, tuple) else (self.stored,)

    @property
    def shape(self) -> tuple:
        """(E, in, out)."""
        *_, a, b = self.tensors[0].meta.shape
        experts = len(self.stored) if isinstance(self.stored, tuple) else self.stored.meta.shape[0]
        return (experts, a, b) if self.transposed else (experts, b, a)


@dataclass(frozen=True)
class Matrix:
    """The weight of one expert: [out, in], or [in, out] where `transposed`."""

    stored: Value
    transposed: bool


@dataclass(frozen=True)
class ExpertWeights(Fact):
    """At each row: the matrix of its expert, laid out as `weight` says."""

    weight: Weight
    ids: Value
    order: str


@dataclass(frozen=True)
class Projection:
    """The rows of `source`, each times its expert's matrix, plus a bias. `ids`: the routing that picked it."""

    source: Rows | Pointwise
    weight: Weight | Matrix
    ids: Value
    bias: Value | tuple[Value, ...] | None = None

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def level(self) -> int:
        """1 for an up projection, 2 for a down projection."""
        return 1 if isinstance(self.source, Rows) else self.source.level + 1


@dataclass(frozen=True)
class Column:
    """Columns of a projection: all, the first or second half, or the even or odd ones."""

    projection: Projection
    part: str

    def __repr__(self) -> str:
        return f"{self.part}({self.projection.weight.stored!r})"


@dataclass(frozen=True)
class Pointwise(Fact):
    """At each row: `expr` of columns of the projections of the same rows, times the routing weight if `weight` is set.

    `expr` has leaves ``Expr("column", (Column,))``. `ids`, `k` and `x` are those of the rows it started from. While
    `stray` is set, rows without expert hold some expert's bias and must still be masked.
    """

    expr: Expr
    ids: Value
    k: int
    order: str | Hits
    weight: Value | FromTable | None = None
    dtypes: frozenset[torch.dtype] = field(default=frozenset())
    stray: bool = False
    fenced: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that `expr` reads, in the order of first appearance."""
        return tuple(dict.fromkeys(_columns(self.expr)))

    @property
    def bare(self) -> Projection | None:
        """The projection, if this is nothing but all its columns."""
        leaf = self.expr.args[0] if self.expr.op == "column" else None
        return leaf.projection if leaf is not None and leaf.part == "all" else None

    @property
    def level(self) -> int:
        return max(c.projection.level for c in self.columns)


@dataclass(frozen=True)
class Lifted(Fact):
    """[T, 1, H]: x with a dimension for the experts of each token, still to be expanded."""

    x: Value


@dataclass(frozen=True)
class Slim(Fact):
    """Rows with a dimension of one more at `axis` (1 or 2), as a batched matmul wants its vectors."""

    rows: Rows | Pointwise
    axis: int


@dataclass(frozen=True)
class Laid(Fact):
    """Rows with more dimensions: for each of them what it runs over, as roles (TOKEN, CHOICE, EXPERT, FEATURE).
    Several of TOKEN are one, in row-major order. `experts` is the size of EXPERT where that is one of them."""

    rows: Rows | Pointwise
    roles: tuple[tuple[str, ...], ...]
    experts: int | None = None


@dataclass(frozen=True)
class Grid(Fact):
    """Rows in slot order, seen as [T, K, ...]."""

    rows: Rows | Pointwise


@dataclass(frozen=True)
class Combined(Fact):
    """The sum of a token's rows [T, H]; `base` is what it was added onto, None for nothing."""

    rows: Pointwise
    base: Value | None


# Experts one at a time: instead of sorting the rows, a mask says for each expert which rows are its own.


@dataclass(frozen=True)
class Hits(Fact):
    """At token t, slot k and expert e: whether ids[t, k] is e, as a mask or as 0 and 1.

    `axes` says for each dimension what it runs over: TOKEN (several such are one, in row-major order), CHOICE (the K
    slots of a token), BOTH (all slots, t * K + k), EXPERT (all experts from 0 on), or NONE (one entry). Without axis,
    the expert is `expert` and the slot `choice`, or the slots were reduced: "any" of them, or their "sum". With
    `negated` it is the mask of all others. `k` is the number of slots of a token where it is known.
    """

    ids: Value
    axes: tuple[str, ...]
    k: int | None = field(default=None, compare=False)
    expert: int | None = None
    choice: int | None = None
    reduced: str = ""
    negated: bool = False


TOKEN, CHOICE, BOTH, EXPERT, FEATURE, NONE = "token", "choice", "both", "expert", "feature", "none"


@dataclass(frozen=True)
class Share(Fact):
    """The routing weights where `hits` is true, exact zeros elsewhere; summed where `hits` is reduced."""

    hits: Hits
    weights: Value | FromTable


@dataclass(frozen=True)
class Slotted(Fact):
    """A table of routing weights in which those of some slots are, `done`: ``Share(hits, weights)`` once all are."""

    hits: Hits
    weights: Value
    done: frozenset[int]


@dataclass(frozen=True)
class Fenced(Fact):
    """Logits of every token and expert: minus infinity at those that a token does not go to. `axes` as for Hits."""

    ids: Value
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Places(Fact):
    """[n, dimensions of the mask]: where the mask is true, in row-major order."""

    hits: Hits


@dataclass(frozen=True)
class Place(Fact):
    """[n]: where the mask is true along one of its axes, in row-major order of the mask."""

    hits: Hits
    axis: str


@dataclass(frozen=True)
class Output(Fact):
    """[T, H]: what one expert makes of its tokens, zero for all others; `rows` are in the order of its hits."""

    rows: Pointwise


@dataclass(frozen=True)
class Outputs(Fact):
    """What the experts from 0 on make of every token, those included that do not go to them; times `share` if set.
    `axes` as for Hits, with FEATURE for the hidden dimension. With `ids`, of each token those of its `k` slots."""

    rows: tuple[Value, ...]
    axes: tuple[str, ...]
    share: Share | None = None
    ids: Value | None = None
    k: int | None = None


@dataclass(frozen=True)
class Stretched(Fact):
    """One expert's `rows`, repeated as often as a place has room for: once, if the place is theirs."""

    rows: Pointwise


@dataclass(frozen=True)
class Onto(Fact):
    """One expert's `rows` added onto those rows of `base` that belong to their tokens."""

    rows: Pointwise
    base: Value


@dataclass(frozen=True, eq=False)
class Partial(Fact):
    """[T, H]: the outputs of some experts, each added onto its tokens' rows of `base` (None for zeros)."""

    parts: tuple[Pointwise, ...]
    base: Value | None


@dataclass(frozen=True, eq=False)
class Filled(Fact):
    """[S, H]: rows in slot or sorted order, of which those of some experts were written into `base`."""

    parts: tuple[Pointwise, ...]
    base: Value


# Facts about floating-point numbers, which carry gradients.
Differentiable = (
    (Rows | Lifted | Pointwise | Slim | Grid | Combined | RowWeight | BiasRows | ExpertWeights)
    | (Laid | Share | Slotted | Fenced | Output | Outputs | Stretched | Onto | Partial | Filled)
)  # fmt: skip


def _columns(expr: Expr):
    if expr.op == "column":
        yield expr.args[0]
    else:
        for arg in expr.args:
            if isinstance(arg, Expr):
                yield from _columns(arg)
