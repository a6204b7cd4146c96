"""Facts in words, and the part of an MoE block that a value belongs to: for people who read dumps."""

from __future__ import annotations

from torch import fx

from mok_compile import activation as act
from mok_compile.passes.blocks.router import Router
from mok_compile.passes.facts.kinds import (
    SORTED,
    BiasRows,
    Combined,
    Counts,
    Expert,
    Fact,
    Full,
    Grid,
    Inverse,
    Iota,
    NoRoute,
    Offsets,
    Perm,
    Pointwise,
    Rows,
    RowWeight,
    Token,
)
from mok_compile.passes.graph.view import Value, View

# The parts of a block, in the order in which data flows through them.
ROLES = {
    "router": "decides which experts a token goes to, with which weight",
    "dispatch": "sorts the slots by expert and gathers their tokens",
    "up": "the experts' first grouped matmul",
    "activation": "what happens between the two matmuls",
    "down": "the experts' second grouped matmul",
    "combine": "weights the experts' rows and adds them up per token",
    "use": "reads the block's result",
    "unproven": "comes after the place where the proof broke",
}


def role_of(fact: Fact | None) -> str | None:
    """The part of a block that a value with this fact belongs to; None if the fact does not tell."""
    about = getattr(fact, "rows", None)  # the same rows in another shape
    if about is not None and not isinstance(fact, (Pointwise, Combined)):
        return "combine" if isinstance(fact, Grid) and isinstance(about, Pointwise) else role_of(about)
    if isinstance(fact, Combined):
        return "combine"
    if isinstance(fact, Pointwise):
        plain = fact.bare is not None and fact.weight is None and fact.order == SORTED
        if fact.level > 1:
            return "down" if plain else "combine"
        return "up" if plain else "activation"
    return None if fact is None or isinstance(fact, (Iota, Full)) else "dispatch"


class Words:
    """Describes the facts of one view; values are called by the node that made them."""

    def __init__(self, view: View) -> None:
        self._names: dict[Value, str] = {}
        for node, made in view.made.items():
            for value in made:
                self._names.setdefault(value, node.name)
        returned = {}
        for node in view.made:  # a node that returns a value names it better than one that made it on the way
            returned.setdefault(view.value(node), node.name)
        self._names |= returned

    def name(self, value) -> str:
        """The node that `value` is called by; of a stack of matrices, that of the tensor that holds them."""
        value = getattr(value, "stored", value)
        if isinstance(value, (tuple, list)) and value:
            return f"{self.name(value[0])} and {len(value) - 1} more" if len(value) > 1 else self.name(value[0])
        return self._names.get(value, repr(value)) if value is not None else "the ids"

    def fact(self, fact: Fact | None) -> str:
        """One phrase; empty when nothing is known."""
        name = self.name
        match fact:
            case None:
                return ""
            case Iota():
                return "0, 1, 2, ..."
            case Full(number=number):
                return f"{number:g} everywhere"
            case Expert(ids=ids, order=order, clamped=clamped):
                limited = ", limited to valid experts" if clamped else ""
                return f"expert of each row, {order} order, from {name(ids)}{limited}"
            case Perm(ids=ids):
                return f"slot at each sorted position of {name(ids)}"
            case Inverse(ids=ids):
                return f"sorted position of each slot of {name(ids)}"
            case Token(order=order, k=k):
                return f"token of each row, {order} order, {k} rows a token"
            case Counts(ids=ids, num_experts=experts):
                return f"rows of each of {experts} experts, from {name(ids)}"
            case Offsets(ids=ids, num_experts=experts):
                return f"end of the rows of each of {experts} experts, from {name(ids)}"
            case NoRoute(negated=negated):
                return f"{'False' if negated else 'True'} where a row belongs to no expert"
            case RowWeight(weights=weights, order=order):
                return f"routing weight of each row, {order} order, from {name(weights)}"
            case BiasRows(bias=bias, order=order):
                return f"bias {name(bias)} of each row's expert, {order} order"
            case Rows(x=x, k=k, order=order, weight=weight):
                times = f" times routing weight {name(weight)}" if weight is not None else ""
                return f"rows of {name(x)}, each {k} times, {order} order{times}"
            case Pointwise(order=order, weight=weight):
                times = f", times routing weight {name(weight)}" if weight is not None else ""
                return f"{self._expression(fact)}, {order} order{times}"
            case Grid(rows=rows):
                return f"[token, k, ...] of: {self.fact(rows)}"
            case Combined(rows=rows, base=base):
                onto = f", added onto {name(base)}" if base is not None else ""
                return f"sum of each token's rows of {self.fact(rows)}{onto}"
        # A fact without words of its own here is described by what its class says of itself, and what it is about.
        about = getattr(fact, "rows", None)
        said = (type(fact).__doc__ or type(fact).__name__).strip().splitlines()[0].rstrip(".")
        return f"{said}: {self.fact(about)}" if isinstance(about, Fact) else said

    def _expression(self, fact: Pointwise) -> str:
        if fact.bare is not None:
            what = "up" if fact.bare.level == 1 else "down"
            bias = f" plus {self.name(fact.bare.bias)}" if fact.bare.bias is not None else ""
            return f"{what} projection by {self.name(fact.bare.weight)}{bias}"
        # Gate and up as far as the columns tell; of two whole projections the first one read is called gate.
        whole = [column for column in fact.columns if column.part == "all"]
        leaves = {}
        for column in fact.columns:
            first = column.part in ("first", "even") or (column == whole[0] if len(whole) > 1 else False)
            leaves[act.Expr("column", (column,))] = act.GATE if first else act.UP
        return str(act.substitute(fact.expr, leaves))


def router_words(router: Router) -> dict[Value, str]:
    """The values of a proven router in words."""
    said = {value: f"scores: {', '.join(map(str, router.spec.scores[:i]))}" for i, value in enumerate(router.scores)}
    said[router.logits] = "logits [T, E]"
    steps = ", ".join(map(str, router.spec.weights))
    said[router.weights] = "routing weights: scores of the chosen experts" + (f", {steps}" if steps else "")
    said[router.ids] = f"experts of each token: {router.spec.choice}"
    return said


# What an argument has to be for the proof to go on, for the ops at which it most often breaks.
_WANTED = {
    "grouped_mm": (
        "tokens gathered by expert (or activations of them), sorted order",
        "a weight [E, in, out] that does not depend on the routing",
        "ends of the experts' rows: running sum of the counts of the same ids",
    ),
    "mul": ("rows of the experts", "their routing weights in the same order, or a function of the same rows"),
    "add": ("rows of the experts", "the bias of the same rows' expert, a constant, or a function of the same rows"),
    "index_add": ("zeros, or what the result is added to", "", "token of each row, same order as the rows", "rows"),
    "scatter_add": ("zeros, or what the result is added to", "", "token of each row, same order as the rows", "rows"),
    "sum": ("rows as [token, k, hidden], summed over k alone",),
    "index": ("rows", "slot at each sorted position, or its inverse, of the same ids"),
    "masked_fill": ("rows in sorted order", "True where a row belongs to no expert", "0"),
}
_OTHERWISE = (
    "an op that a rule carries the fact through: an element-wise function of gate and up before the down projection; "
    "behind it the routing weights, the inverse permutation and the sum over k"
)


def obstacle(value: Value, facts, words: Words) -> tuple[str, list[tuple[str, str, str]]]:
    """The op at which a proof broke, and of each argument: its name, what is known of it, what was expected."""
    name = str(value.op).removesuffix(".default")
    base = name.split(".")[1] if "." in name else name
    wanted = next((w for key, w in _WANTED.items() if base.strip("_").startswith(key)), None)
    rows = []
    for i, arg in enumerate(_flat(value.args)):
        expected = wanted[i] if wanted is not None and i < len(wanted) else ""
        if isinstance(arg, Value):
            rows.append((words.name(arg), words.fact(facts.of(arg)) or "nothing is known", expected))
        elif expected and arg is not None:
            rows.append((repr(arg), "", expected))
    return (name if wanted is not None else f"{name}; expected {_OTHERWISE}"), rows


def _flat(args: tuple) -> list:
    return [a for arg in args for a in (arg if isinstance(arg, tuple) and any(map(_is_value, arg)) else (arg,))]


def _is_value(a) -> bool:
    return isinstance(a, Value)


def roles(region: frozenset[fx.Node] | set[fx.Node], view: View, facts) -> dict[fx.Node, str]:
    """The part of a block that each node of its region belongs to; helpers go with what they help."""
    found: dict[fx.Node, str] = {}
    own = {value for node in region for value in view.made[node]}
    for node in sorted(region, key=view.positions.__getitem__):
        value = view.value(node)
        role = role_of(facts.of(value)) if value is not None else None
        if value in facts.broken and facts.broken[value].at in own:  # not spoiled by a miss further up
            role = "unproven"
        if role is not None:
            found[node] = role
    for node in sorted(region - set(found), key=view.positions.__getitem__, reverse=True):
        found[node] = next((found[user] for user in node.users if user in found), "dispatch")
    return found
