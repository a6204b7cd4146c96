"""From a block's ids and routing weights back to logits: the router, if every value on the way is proven.

Works on values of the view, from the end to the start, and knows two chains of steps (`mok_compile.router`) with the
choice of experts between them. A router that only looks like one (another dimension, weights of other experts, a
gradient that is cut) breaks the proof, with reason ``router``: its block is fused without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mok_compile.passes.blocks.site import Block
from mok_compile.passes.facts.kinds import FromTable, Full
from mok_compile.passes.facts.rules import Break, Facts, as_number, pinned, same
from mok_compile.passes.graph.pieces import turns
from mok_compile.passes.graph.view import Value
from mok_compile.router import LATE, Groups, RouterSpec, Step
from mok_compile.spec import dtype_name

aten = torch.ops.aten
_UNARY = {
    aten.sigmoid.default: "sigmoid",
    aten.softplus.default: "softplus",
    aten.sqrt.default: "sqrt",
    aten.tanh.default: "tanh",
}
_BINARY = {
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.add.Tensor: "add", aten.add.Scalar: "add",
    aten.div.Tensor: "div", aten.div.Scalar: "div",
}  # fmt: skip
_SUMS = (aten.sum.dim_IntList, aten.linalg_vector_norm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_SHAPES = (
    *(*_VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default),
    *(aten.clone.default, aten.alias.default),
)


@dataclass(frozen=True, eq=False)
class Router:
    """A proven router. The operands are those of ``mok::moe``; `transposed`: the weight is stored [H, E].

    `scores` are the values along its first chain, logits first; `ids` and `weights` what it gives to the experts,
    row by row, whatever their shape; no `weights` where these stand in a table.
    """

    spec: RouterSpec
    x: Value
    weight: Value
    transposed: bool
    bias: Value | None
    correction: Value | None
    expert_scale: Value | None
    scores: tuple[Value, ...]
    ids: Value
    weights: Value | None

    @property
    def logits(self) -> Value:
        return self.scores[0]

    @property
    def operands(self) -> list[Value]:
        found = (self.x, self.weight, self.bias, self.correction, self.expert_scale)
        return [value for value in found if value is not None]


def find(block: Block, facts: Facts) -> Router:
    """The router of `block`. Break("router") with the place where the proof ends."""
    if block.weights is None:
        raise _stop("the experts' rows are not multiplied by routing weights")
    ids = bare(block.ids, cut=True)
    while ids.op is aten._to_copy.default and not ids.meta.dtype.is_floating_point and ids.meta.dtype.itemsize > 1:
        ids = bare(ids.args[0], cut=True)
    if ids.op is aten.searchsorted.Tensor:
        raise _stop("the tokens are sorted by expert before the loop over the experts, so that it sees no router")
    if ids.op is not aten.topk.default or ids.index != 1:
        raise _stop(f"the expert ids come from {_name(ids)}, not from top-k")
    return _Search(block, facts, ids).router()


def bare(value: Value, width: int | None = None, cut: bool = False) -> Value:
    """`value` without changes of shape; with `width` only those that keep a last dimension of this size. Those that run
    with gradients switched off only if a gradient may be `cut` there."""
    while value.op in _SHAPES and (cut or not value.detached):
        source = value.args[0]
        if width is not None and (not source.meta.shape or not same(source.meta.shape[-1], width)):
            break
        value = source
    return value


def forms(value: Value) -> list[Value]:
    """`value`, and what it was before each of its changes of shape, as far as these hand gradients on."""
    found = [value]
    while found[-1].op in _SHAPES and not found[-1].detached:
        found.append(found[-1].args[0])
    return found


def _at_least_0(value: Value) -> bool:
    """Whether `value` holds scores that cannot be negative. Where one is zero, so is the gradient that its logit gets:
    what derivative its absolute value has there makes no difference."""
    while value.op in (*_SHAPES, aten._to_copy.default, aten.topk.default, aten.gather.default) and value.index == 0:
        value = value.args[0]
    return value.op in (aten._softmax.default, aten.sigmoid.default)


class _Search:
    def __init__(self, block: Block, facts: Facts, ids: Value) -> None:
        self.block, self.facts, self.ids = block, facts, ids
        self.choice, self.k, self.ordered = self._topk(ids)
        if self.k != block.k:
            raise _stop(f"top-{self.k} chooses the experts, but each token has {block.k} slots")
        self.experts = self.choice.meta.shape[-1]
        if not isinstance(self.experts, int):
            raise _stop("the number of experts is symbolic")
        self.scale: Value | None = None

    def router(self) -> Router:
        weights, chain, given = self._weights()
        end = chain[0]
        source = end.args[0] if end.op is aten.gather.default else self.choice
        if end.op is not aten.gather.default and self.choice.detached:
            raise _stop("the gradient of the router is cut")
        if bare(source) is bare(self.choice):  # top-k's own numbers
            scores, groups = self._groups(source)
            corrected, correction, masked = False, None, groups is not None
        else:
            scores, corrected, groups, correction = self._chosen_from(self._same_rows(source))
            masked = False
        steps, values = self._chain(scores, self.experts, lambda v: v.op in (aten.mm.default, aten.addmm.default))
        logits = values[0]
        if logits.pieced:  # near ties, one product could choose other experts
            raise _stop("the logits are computed in pieces, which one product would round in another way")
        if any(step.op in LATE for step in steps):
            raise _stop("scores are normalised before the choice")
        spec = RouterSpec(self.k, steps, weights, groups, corrected, masked, self.ordered)
        bias, x, weight, transposed = self._linear(logits)
        return Router(spec, x, weight, transposed, bias, correction, self.scale, tuple(values), self.ids, given)

    def _weights(self) -> tuple[tuple[Step, ...], list[Value], Value | None]:
        """The chain that leads to the routing weights, and these if they are a value of their own."""
        given, after = self.block.weights, []
        if isinstance(given, FromTable):
            given, after = self._scattered(given.table, given.dim)
        given, late = self._untabled(bare(given))
        steps, chain = self._chain(given, self.k, self._ends)
        return (*steps, *late, *after), chain, None if late or after else chain[-1]

    def _scattered(self, table: Value, dim: int) -> tuple[Value, list[Step]]:
        """What was written into a table of logits at the chosen experts, and the steps that every number of the table
        has taken since. `dim`: the table's dimension for the experts.

        A softmax over the experts is one over what was written, if all else in its row is minus infinity: that adds
        exp(-inf) = 0 to the sum and gets no gradient, whatever was written. Equal numbers stand at experts of their
        own, since top-k gives each once, and a row of minus infinity alone is NaN either way. Only casts may come
        before it, which keep minus infinity, or after it: the derivative of a root is infinite at the others' zeros.
        """
        value, dim, steps = self._filled(table, dim)
        if value.op is not aten.scatter.src or value.detached or dim != -1 or not self._at_the_ids(value):
            raise _stop(
                "the routing weights stand in a table of all experts; they are not the chosen experts' own scores"
            )
        rest = self.facts.of(value.args[0])
        whole = isinstance(rest, Full) and rest.number == -math.inf
        if not whole and any(step.op == "softmax" for step in steps):
            raise _stop("softmax runs over a table in which the experts that were not chosen are not minus infinity")
        return value.args[3], steps

    def _filled(self, value: Value, dim: int) -> tuple[Value, int, list[Step]]:
        """`value`, a table, before the steps that each of its numbers takes for itself, or before one softmax over the
        experts with nothing but casts; its dimension for the experts then; and these steps."""
        steps: list[Step] = []
        while value.op is not aten.scatter.src:
            if value.op in (aten.transpose.int, aten.t.default) and len(value.meta.shape) == 2 and not value.detached:
                value, dim = value.args[0], -3 - dim
                continue
            if value.op in (aten.clone.default, aten.alias.default) and not value.detached:
                value = value.args[0]
                continue
            if dim == -1 and (source := self._same_rows(value)) is not value:
                value = source
                continue
            over = value.op is aten._softmax.default and dim == -1 and _last(value, value.args[1])
            others = [step.op for step in steps if step.op != "cast"]
            known = value.op is aten._to_copy.default or (value.op in _UNARY and "softmax" not in others)
            if not known and (others or not over):
                break
            step, value = self._step(value)
            steps.insert(0, step)
        return value, dim, steps

    def _topk(self, value: Value) -> tuple[Value, int, bool]:
        """What `value` (a result of top-k along the last dimension) chooses from, how many, and whether in order."""
        a, k, dim, largest, ordered = (*value.args, *(-1, True, True)[len(value.args) - 2 :])
        k = pinned(k)
        if value.kwargs or not isinstance(k, int) or not _last(a, dim) or not largest:
            raise _stop("top-k does not choose the largest along the last dimension")
        return a, k, ordered

    def _ends(self, value: Value) -> bool:
        """Whether `value` are the chosen experts' scores: of top-k itself, or gathered with its ids."""
        if value.op is aten.topk.default and value.index == 0:
            if value.args != self.ids.args:
                raise _stop("ids and weights come from two different top-k")
            return True
        if value.op is not aten.gather.default:
            return False
        a, dim, index = value.args[:3]
        if not _last(a, dim) or self._limited(bare(index, self.k, cut=True)) is not self.ids:
            raise _stop("the weights are gathered with other ids than the experts' own")
        return True

    def _untabled(self, value: Value) -> tuple[Value, list[Step]]:
        """`value` before it was put into a table [T, E] and taken out again by the same ids, which top-k gives once;
        and the steps that it took in there."""
        if value.op is not aten.gather.default or value.detached:
            return value, []
        table, dim, index = value.args[:3]
        if not _last(table, dim) or self._limited(bare(index, self.k, cut=True)) is not self.ids:
            return value, []
        filled = self._filled(table, -1)[0]
        if filled.op is not aten.scatter.src or filled.detached or not self._at_the_ids(filled):
            return value, []
        source, steps = self._scattered(table, -1)
        return self._same_rows(source), steps

    def _at_the_ids(self, table: Value) -> bool:
        """Whether `table`, a result of scatter, holds a number for each slot at its token and expert."""
        _, dim, index, source = table.args
        alike = len(index.meta.shape) == len(source.meta.shape) and all(map(same, index.meta.shape, source.meta.shape))
        own = self._limited(bare(index, self.k, cut=True)) is self.ids
        return own and alike and _last(table, dim)

    def _limited(self, index: Value) -> Value:
        """`index` before it was limited to valid experts, which top-k's own ids are."""
        if index.op is not aten.clamp.default or index.kwargs or len(index.args) != 3:
            return index
        a, low, high = index.args
        whole = isinstance(low, int) and isinstance(high, int) and low <= 0 and high >= self.experts - 1
        return bare(a, self.k, cut=True) if whole else index

    def _chain(self, value: Value, width: int, at_end: Callable[[Value], bool]) -> tuple[tuple[Step, ...], list[Value]]:
        """The steps that lead to `value` [.., width], and the values between them, both from the start on."""
        if not same(value.meta.shape[-1], width):
            raise _stop(f"{_name(value)} gives rows of another length")
        steps, values = [], [value]
        while not at_end(values[0]):
            step, source = self._step(values[0])
            source, before = self._untabled(self._same_rows(source))
            steps[:0] = [*before, step]
            values.insert(0, source)
        if values[0].detached:
            raise _stop("the router runs with gradients switched off")
        return tuple(steps), values

    def _same_rows(self, value: Value) -> Value:
        """`value` without changes of shape that keep its rows whole."""
        return bare(value, value.meta.shape[-1]) if value.meta.shape else value

    def _free(self, value: Value) -> Value:
        """The same on the way to the ids, which has no gradient that could be cut."""
        while True:
            value = bare(value, value.meta.shape[-1], cut=True)
            if value.op is not aten.detach.default:
                return value
            value = value.args[0]

    def _step(self, value: Value) -> tuple[Step, Value]:
        """The last step of a chain, and what it was applied to."""
        if value.detached or value.op is aten.detach.default:
            raise _stop("the gradient of the router is cut")
        if isinstance(value.op, str):
            raise _stop("weights or scores come from outside, or from an op that the analysis does not see into")
        a = value.args[0]
        step = self._named(value, a)
        if step is None:
            for a, other in self._operands(value):
                step = self._scaled(value, a, other)
                if step is not None:
                    break
            else:
                raise _stop(f"{_name(value)} is no step of a router")
        dtype = step.dtype or a.meta.dtype
        if step.op == "expert_scale":
            dtype = torch.promote_types(a.meta.dtype, self.scale.meta.dtype)
        if dtype != value.meta.dtype:
            raise _stop(f"{_name(value)} gives {value.meta.dtype} in an unusual way")
        return step, a

    def _named(self, value: Value, a: Value) -> Step | None:
        """A step with one tensor argument."""
        if value.op is aten._to_copy.default:
            plain = value.kwargs.keys() <= {"dtype", "layout", "device", "memory_format"}
            floats = value.meta.dtype.is_floating_point and a.meta.dtype.is_floating_point
            if not plain or not floats or value.meta.device != a.meta.device:
                raise _stop(f"a cast to {value.meta.dtype} on {value.meta.device} is no step of a router")
            return Step("cast", (dtype_name(value.meta.dtype),))
        if value.op is aten._softmax.default:
            if not _last(a, value.args[1]):
                raise _stop("softmax runs over another dimension")
            return Step("softmax", (dtype_name(value.meta.dtype),) if value.args[2] else ())
        if value.op in _UNARY and len(value.args) == 1 and not value.kwargs:
            return Step(_UNARY[value.op])
        return None

    def _operands(self, value: Value) -> Iterator[tuple[Value, object]]:
        """Both readings of a binary op: which argument is the chain, which the other one. Only of a quotient the first
        one alone."""
        plain = value.op in _BINARY and len(value.args) == 2 and not value.kwargs
        if not plain:
            return
        a, b = value.args
        if isinstance(a, Value):
            yield a, b
        if isinstance(b, Value) and _BINARY[value.op] != "div":
            yield b, a

    def _scaled(self, value: Value, a: Value, other) -> Step | None:
        """A step that joins the chain with a constant, with its own sum, or with a number for each expert."""
        op = _BINARY[value.op]
        fact = self.facts.of(other)
        number = fact.number if isinstance(fact, Full) and not other.meta.shape else as_number(other)
        if number is not None and math.isfinite(number):
            return Step(op, (number,))
        if not isinstance(other, Value) or len(a.meta.shape) != len(value.meta.shape):
            return None
        if op == "div":
            return self._normalised(a, other)
        if op == "mul" and self.scale is None and self._by_expert(other) and same(a.meta.shape[-1], self.k):
            self.scale = other.args[0]
            return Step("expert_scale")
        return None

    def _by_expert(self, value: Value) -> bool:
        """Whether `value` is a number for each expert, picked by the ids."""
        if value.op is aten.index.Tensor and len(value.args[1]) == 1:
            index = value.args[1][0]
        elif value.op is aten.index_select.default and value.args[1] == 0:
            index = value.args[2]
        else:
            return False
        table = value.args[0].meta
        right = index is not None and bare(index, self.k, cut=True) is self.ids and not value.detached
        return right and table.dtype.is_floating_point and len(table.shape) == 1 and same(table.shape[0], self.experts)

    def _normalised(self, a: Value, total: Value) -> Step | None:
        """a / sum(a), with or without something that keeps the sum away from zero."""
        how: tuple = ()
        if total.detached:
            return None
        if total.op in (aten.add.Tensor, aten.add.Scalar) and len(total.args) == 2 and not total.kwargs:
            total, eps = total.args
            how = ("add", as_number(eps))
        elif total.op in (aten.clamp.default, aten.clamp_min.default):
            low = total.args[1] if len(total.args) > 1 else total.kwargs.get("min")
            if len(total.args) > 2 or total.kwargs.keys() - {"min"}:
                return None
            total, how = total.args[0], ("clamp", as_number(low))
        if not isinstance(total, Value) or None in how or total.op not in _SUMS:
            return None
        b, *args = total.args
        if total.op is aten.linalg_vector_norm.default:  # of numbers that are not negative, the sum
            if args[:1] != [1] or not _at_least_0(b):
                return None
            args = args[1:]
        dims, *keep = args
        kept = keep == [True] or total.kwargs.get("keepdim") is True
        rest = total.kwargs.keys() - {"keepdim"}
        own = b is a and dims is not None and len(dims) == 1 and _last(b, dims[0]) and kept and not rest
        return Step("normalise", how) if own and not total.detached and total.meta.dtype == a.meta.dtype else None

    def _chosen_from(self, scores: Value) -> tuple[Value, bool, Groups | None, Value | None]:
        """How `scores` became what top-k chose from: whether and by which value corrected, within which groups."""
        choice, groups = self._groups(self.choice, cut=True)
        if choice is scores:
            return scores, False, groups, None
        if choice.op is aten.add.Tensor and len(choice.args) == 2 and not choice.kwargs:
            for a, b in (choice.args, choice.args[::-1]):
                if isinstance(a, Value) and isinstance(b, Value) and self._free(a) is scores and self._per_expert(b):
                    return scores, True, groups, b
        raise _stop("top-k is not proven to choose from the scores that the weights are, as they are or corrected")

    def _per_expert(self, value: Value) -> bool:
        """Whether `value` holds one number for each expert, the same for all tokens."""
        shape = value.meta.shape
        ones = all(same(n, 1) for n in shape[:-1])
        return value.meta.dtype.is_floating_point and len(shape) > 0 and same(shape[-1], self.experts) and ones

    def _groups(self, choice: Value, cut: bool = False) -> tuple[Value, Groups | None]:
        """`choice` before the experts of most groups were masked, and how they were."""
        masked = self._masked(bare(choice, cut=cut))
        if masked is None:
            return self._rows(choice, cut), None
        a, mask, fill, stays = masked
        count, chosen, ordered, best, grouped = self._group_mask(a, mask, stays)
        if self._base(grouped) is not self._base(a):
            raise _stop("groups are chosen by something else than the scores that they mask")
        a = self._rows(a, cut)
        if chosen == count:  # all groups stay
            return a, None
        return a, Groups(count, chosen, best, fill, ordered)

    def _rows(self, value: Value, cut: bool) -> Value:
        """`value` without changes of shape, such as that of a row for all experts into one for each group; what it is
        then has a row for all experts."""
        while value.op in _SHAPES and (cut or not value.detached) and not same(value.meta.shape[-1], self.experts):
            value = value.args[0]
        return self._free(value) if cut else self._same_rows(value)

    def _base(self, value: Value) -> Value:
        """`value` without any change of shape, on the way to the ids."""
        while value.op in (*_SHAPES, aten.detach.default):
            value = value.args[0]
        return value

    def _masked(self, value: Value) -> tuple[Value, Value, float, bool] | None:
        """`value` as (a, mask, fill, whether a stays where the mask is true)."""
        if value.op in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            (a, mask, fill), stays = value.args, False
        elif value.op in (aten.where.self, aten.where.ScalarOther):
            (mask, a, fill), stays = value.args, True
        else:
            return None
        fact = self.facts.of(fill)
        number = fact.number if isinstance(fact, Full) else as_number(fill)
        if number is None or not isinstance(a, Value):
            raise _stop("what top-k chooses from is masked in a way that is not understood")
        if len(a.meta.shape) != len(value.meta.shape) or not all(map(same, a.meta.shape, value.meta.shape)):
            raise _stop("the mask of what top-k chooses from has another shape")
        return a, mask, number, stays

    def _group_mask(self, a: Value, mask: Value, stays: bool) -> tuple[int, int, bool, int, Value]:
        """A mask of `a`, [.., E] or [.., groups, experts of a group], that tells the chosen groups from the others:
        groups, how many are chosen, whether in order, how many experts a group is judged by, and the scores as
        [.., groups, experts of a group]. `stays`: whether what it is true for stays."""
        wrong = _stop("what top-k chooses from is masked by something else than groups")
        if len(mask.meta.shape) != len(a.meta.shape):
            raise _stop("the mask of what top-k chooses from has another shape")
        mask, stays = _unturned(mask, stays)
        of = a
        if same(a.meta.shape[-1], self.experts):  # seen by groups somewhere on the way
            while mask.op in _VIEWS and same(mask.meta.shape[-1], self.experts):
                mask, stays = _unturned(mask.args[0], stays)
            of = mask
        count, size = of.meta.shape[-2:] if len(of.meta.shape) > 1 else (None, None)
        if not isinstance(count, int) or not isinstance(size, int) or count * size != self.experts:
            raise wrong
        grid = (*of.meta.shape[:-1], size)
        if mask.op is aten.expand.default:
            if not all(map(same, mask.meta.shape, grid)):
                raise wrong
            mask, stays = _unturned(mask.args[0], stays)
        column = (*grid[:-1], 1)  # a number for each group
        if len(mask.meta.shape) != len(column) or not all(map(same, mask.meta.shape, column)):
            raise wrong
        if mask.op in _VIEWS or (mask.op is aten.unsqueeze.default and _last(mask, mask.args[1])):
            mask, stays = _unturned(mask.args[0], stays)
        if len(mask.meta.shape) != len(column) - 1 or not all(map(same, mask.meta.shape, column)):
            raise wrong
        if mask.op is not aten.scatter.value or len(mask.args) != 4 or mask.kwargs:
            raise wrong
        base, dim, index, number = mask.args
        rest = self.facts.of(base)
        if not isinstance(rest, Full) or {rest.number, float(number)} != {0.0, 1.0} or not _last(base, dim):
            raise wrong
        if stays != bool(number):
            raise _stop("what top-k chooses from is masked in the groups that were chosen, not in the others")
        if index.op is not aten.topk.default or index.index != 1:
            raise wrong
        by, chosen, ordered = self._topk(index)
        best, grouped = self._judged(self._free(by))
        if tuple(grouped.meta.shape[-2:]) != (count, size):
            raise wrong
        return count, chosen, ordered, best, grouped

    def _judged(self, value: Value) -> tuple[int, Value]:
        """How many of its experts a group is as good as, and the scores that are compared."""
        one = value.op is aten.amax.default and len(value.args) == 2 and len(value.args[1]) == 1
        if one and _last(value.args[0], value.args[1][0]):
            return 1, value.args[0]
        if value.op is aten.max.dim and value.index == 0 and len(value.args) == 2 and _last(*value.args):
            return 1, value.args[0]
        if value.op is aten.sum.dim_IntList and len(value.args) == 2 and not value.kwargs:
            top, dims = value.args
            if top.op is aten.topk.default and top.index == 0 and dims is not None and len(dims) == 1:
                grouped, best, in_order = self._topk(top)
                if _last(top, dims[0]) and (in_order or best <= 2):  # else the sum may be rounded in another way
                    return best, grouped
        raise _stop(f"groups are judged by {_name(value)}, not by their best experts")

    def _linear(self, logits: Value) -> tuple[Value | None, Value, Value, bool]:
        """(bias, x, weight, whether that is stored [H, E]) of the product that `logits` are."""
        bias, x, weight = logits.args if logits.op is aten.addmm.default else (None, *logits.args)
        transposed = True
        if turns(weight.op, weight.args) and not weight.detached:
            weight, transposed = weight.args[0], False
        one_dtype = all(v.meta.dtype == logits.meta.dtype for v in (x, weight, bias) if v is not None)
        rows = math.prod(self.block.x.meta.shape[:-1])
        if logits.kwargs or not one_dtype or not same(x.meta.shape[0], rows):
            raise _stop("the logits are not one row for each of the experts' tokens")
        if bias is not None and (len(bias.meta.shape) != 1 or not same(bias.meta.shape[0], self.experts)):
            raise _stop("the logits' bias is not one number for each expert")
        return bias, x, weight, transposed


def _unturned(mask: Value, stays: bool) -> tuple[Value, bool]:
    """`mask` of zeros and ones before it was cast, copied or negated, and `stays`, negated as often."""
    while True:
        zero = mask.op is aten.eq.Scalar and mask.args[1] == 0
        if zero or mask.op is aten.logical_not.default or (mask.op is aten.bitwise_not.default and _is_bool(mask)):
            stays = not stays
        elif mask.op not in (aten._to_copy.default, aten.clone.default, aten.alias.default):
            return mask, stays
        mask = mask.args[0]


def _is_bool(value: Value) -> bool:
    return value.meta.dtype == torch.bool


def _last(value: Value, dim: int) -> bool:
    return isinstance(dim, int) and dim in (-1, len(value.meta.shape) - 1)


def _name(value: Value) -> str:
    return "an input of the graph" if value.op == "input" else str(value.op).removesuffix(".default")


def _stop(detail: str) -> Break:
    return Break("router", detail)
