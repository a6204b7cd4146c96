"""Which products with a stack of matrices are products with experts.

Every token times each of E matrices is also what attention does with one matrix a head, a bank of adapters, a grouped
convolution. They are experts where something says how much each of them counts for a token: the rows are known to be
routed, or a choice among E, made beside them, selects or weighs what they become, or weights of tokens and experts
weigh the results of the second projection. And a matrix for each row is also what adapters do that came with a request:
those of experts were chosen, or are several for a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from mok_compile.passes.facts.rules import Facts, same  # isort: skip  # whose own imports come in this order
from mok_compile.passes.facts.batched import routing_weights, unfold
from mok_compile.passes.facts.kinds import CHOICE, EVERY, EXPERT, SLOT, TOKEN, Combined, Hits, Laid, Pointwise, Share
from mok_compile.passes.graph.view import Value

aten = torch.ops.aten
_CHOICES = {  # at which place the dimension is among the arguments, and the dimension where none is given
    **dict.fromkeys((aten.sort.default, aten.sort.stable), (1, -1)),
    **dict.fromkeys((aten.argmax.default, aten.max.dim), (1, None)),
    **dict.fromkeys((aten.multinomial.default,), (None, -1)),
    **dict.fromkeys((aten.topk.default,), (2, -1)),
}
_CUTS = (aten.relu.default, aten.clamp.default, aten.clamp_min.default, aten.threshold.default, aten.hardtanh.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_SELECTS = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.bmm.default, aten.mm.default, aten.gather.default, aten.index.Tensor),
    *(aten.index_select.default, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.scatter.src, aten.index_put.default),
}


def experts_on_every_token(values: list[Value], facts: Facts) -> set[Value]:
    """Those of `values`, each a matrix product with a stack of matrices on every token, whose matrices are experts."""
    products = [v for v in values if v.op in (aten.bmm.default, aten.mm.default) and _on_every_token(v, facts)]
    if not products:
        return set()
    return rows_behind([*_routed(values, facts), *_weighed(values, facts), *_met(values, products, facts)], facts)


def are_chosen(ids: Value) -> bool:
    """Whether `ids` say which experts tokens go to, as far as can be told: a choice led to them, there are several for
    a token, or where they come from is not known."""
    for value in ids.behind():
        shape = value.meta.shape
        several = not value.meta.dtype.is_floating_point and len(shape) > 1 and not same(shape[-1], 1)
        if value.op in _CHOICES or value.op in ("opaque", "random", "written") or (value.op == "input" and several):
            return True
    return False


def _on_every_token(value: Value, facts: Facts) -> bool:
    fact = facts.of(value)
    return isinstance(fact, Laid) and fact.rows.order == EVERY


def rows_behind(found: Iterable[Value], facts: Facts) -> set[Value]:
    """`found`, and all rows of every token and expert that they are computed from."""
    pending, seen = list(found), set()
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            pending += [v for v in value.inputs if _on_every_token(v, facts)]
    return seen


def _routed(values: list[Value], facts: Facts) -> Iterable[Value]:
    """Rows of which it is known where they count, sums of such rows, and those that were picked."""
    for value in values:
        fact = facts.of(value)
        routed = _on_every_token(value, facts) and fact.rows.ids is not None
        picked = isinstance(fact, Laid) and not routed and any(_on_every_token(v, facts) for v in value.inputs)
        if isinstance(fact, Combined) or routed or (picked and fact.rows.order == SLOT):
            yield value


def _weighed(values: list[Value], facts: Facts) -> Iterable[Value]:
    """Results of the second projection that weights [T, E] multiply."""
    return (value for value in values if _weights_at(value, facts) is not None)


def _weights_at(value: Value, facts: Facts) -> Value | None:
    """The weights [T, E] that are multiplied with results of the second projection there."""
    if value.op not in (aten.mul.Tensor, aten.bmm.default):
        return None
    rows = [facts.of(v) for v in value.inputs if _on_every_token(v, facts)]
    second = [fact for fact in rows if isinstance(fact.rows, Pointwise) and fact.rows.level > 1]
    others = [v for v in value.inputs if facts.of(v) is None]
    if len(second) != 1 or len(others) != 1 or not _of_tokens_and_experts(others[0], second[0].experts, facts):
        return None
    return others[0]


def is_soft(value: Value, facts: Facts) -> bool:
    """Whether weights multiply the results of all experts there that are not zero for any: from the logits on, nothing
    chooses, compares or cuts off."""
    pending = [weights] if (weights := _weights_at(value, facts)) is not None else []
    soft = bool(pending)
    while pending:
        value = pending.pop()
        masks = any(isinstance(facts.of(unfold(v).base), (Hits, Share)) for v in (value, *value.inputs))
        cut = value.op in (*_CHOICES, *_CUTS, "opaque", "random", "written") or value.meta.dtype == torch.bool
        soft &= not masks and not cut
        pending += () if value.op in _PRODUCTS else value.inputs
    return soft


def _of_tokens_and_experts(value: Value, experts: int, facts: Facts) -> bool:
    weights = routing_weights(value, facts)
    if weights is None or not isinstance(weights.what, Value) or weights.what.op == "input":
        return False
    roles = {role for dim in weights.roles for role in dim}
    return roles == {TOKEN, CHOICE} and same(weights.what.meta.shape[-1], experts)


def _met(values: list[Value], products: list[Value], facts: Facts) -> Iterable[Value]:
    """Products that a choice among their matrices meets, where neither depends on the other. Where the two are added
    up, they were two branches."""
    choices = {v: n for v in values if (n := _among(v, facts)) is not None}
    bits = {value: 1 << i for i, value in enumerate([*products, *choices])}
    depends: dict[Value, int] = {}  # on which of these, as bits
    for value in values:
        depends[value] = bits.get(value, 0)
        for v in value.inputs:
            depends[value] |= depends[v]
    own = sum(bits[product] for product in products)
    for value in values:
        sides = {depends[v] for v in value.inputs} if value.op in _SELECTS else ()
        for rows, choosing in itertools.permutations(sides, 2):
            if not rows & ~choosing & own:
                continue
            for choice, n in choices.items():
                if bits[choice] & choosing & ~rows:
                    yield from (
                        product
                        for product in products
                        if bits[product] & rows & ~choosing
                        and not depends[product] & bits[choice]
                        and not depends[choice] & bits[product]
                        and same(n, facts.of(product).experts)
                    )


def _among(value: Value, facts: Facts) -> int | None:
    """Among how many `value` is a choice."""
    fact = facts.of(value)
    hits = fact.hits if isinstance(fact, Share) else fact
    if isinstance(hits, Hits) and EXPERT in hits.axes and len(hits.axes) == len(value.meta.shape):
        return value.meta.shape[hits.axes.index(EXPERT)]
    if value.op not in _CHOICES:
        return None
    place, dim = _CHOICES[value.op]
    given = value.args[place:] if place is not None else ()
    dim = value.kwargs.get("dim", given[0] if given else dim)
    return value.args[0].meta.shape[dim] if isinstance(dim, int) else None
