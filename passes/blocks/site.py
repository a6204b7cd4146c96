"""From facts to sites: where a graph holds a whole MoE block, or where the proof of one broke.

A `Block` says everything needed to replace the block by one op; a `Miss` says why there is none. Both start from the
same anchors, the grouped matmuls: each anchor ends up in a block or in a miss, never nowhere.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mok_compile import activation as act
from mok_compile.passes.blocks.adapters import ADAPTER, adapters_in
from mok_compile.passes.blocks.loops import loop_behind
from mok_compile.passes.blocks.unclaimed import placed_behind, unclaimed
from mok_compile.passes.facts.chosen import are_chosen, experts_on_every_token, is_soft, rows_behind
from mok_compile.passes.facts.kinds import (
    EVERY,
    Broken,
    Column,
    Combined,
    ExpertWeights,
    FromTable,
    Grid,
    Hits,
    Laid,
    Pointwise,
    Projection,
    Rows,
    Slim,
    Weight,
)
from mok_compile.passes.facts.outputs import outputs_of
from mok_compile.passes.facts.rules import CUT, Break, Facts, pinned, register_foreign, same
from mok_compile.passes.graph.dead import dead
from mok_compile.passes.graph.view import Cell, Value, View, target_of
from mok_compile.spec import ExpertsSpec, dtype_name

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Block:
    """A proven MoE block. Operands are values of the view; up, down and their biases in the order of the op.

    Where something else than the weighted sum follows the experts (`open` says what), the block is their rows alone:
    those of `x` are then one for each slot, in the order of `perm` where there is one.
    """

    final: fx.Node
    anchors: tuple[fx.Node, ...]
    region: frozenset[fx.Node]
    spec: ExpertsSpec
    k: int
    x: Value
    ids: Value
    weights: Value | FromTable | None
    up: tuple[Weight, ...]
    down: Weight
    up_bias: tuple[Value | tuple[Value, ...], ...]
    down_bias: Value | tuple[Value, ...] | None
    base: Value | None
    perm: Value | None = None
    open: Miss | None = None

    @property
    def operands(self) -> list[Value]:
        """All values that the block reads from outside."""
        matrices = (t for w in (*self.up, self.down) for t in w.tensors)
        biases = (t for b in (*self.up_bias, self.down_bias) for t in tensors_of(b))
        found = (self.x, self.ids, *tensors_of(self.weights), *matrices, *biases, self.base, self.perm)
        return [v for v in found if v is not None]


def tensors_of(operand: Value | FromTable | tuple[Value, ...] | None) -> tuple[Value, ...]:
    """The values that an operand consists of."""
    if isinstance(operand, FromTable):
        return (operand.table,)
    return operand if isinstance(operand, tuple) else () if operand is None else (operand,)


@dataclass(frozen=True, eq=False)
class Miss:
    """A block that was recognised but not proven: reason code, one sentence, and the node where the proof broke.

    `named` is the node to name to the user where that is another, such as one that reads a value inside the block;
    `cut_off` says that the graph holds nothing but the router.
    """

    anchors: tuple[fx.Node, ...]
    reason: str
    detail: str
    at: fx.Node
    named: fx.Node | None = None
    cut_off: bool = False


@dataclass(frozen=True)
class Analysis:
    """All sites of one graph, in program order."""

    view: View | None
    blocks: list[Block]
    misses: list[Miss]
    facts: Facts | None = None


def _may_anchor(node: fx.Node) -> bool:
    """Whether `node` can be a matmul by expert, judged by its name alone."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and any(part in name for part in _MATMULS)


_MATMULS = ("grouped_mm", "bmm", "matmul", "linear", "mm", "einsum")


def is_anchor(node: fx.Node, view: View, facts: Facts) -> bool:
    """Whether `node` multiplies rows with their experts' weights: a grouped matmul under any of its names, or a
    batched one with gathered weights."""
    if "grouped_mm" in getattr(node.target, "__name__", str(node.target)):
        return node.op == "call_function"
    return any(_by_expert(v, facts) for v in view.made[node])


def _by_expert(value: Value, facts: Facts) -> bool:
    picked = [fact.ids for arg in value.inputs if isinstance(fact := facts.of(arg), ExpertWeights)]
    if value.op is aten.bmm.default and picked:
        return facts.of(value) is not None or any(map(are_chosen, picked))
    if value.op not in (aten.bmm.default, aten.mm.default, aten.addmm.default):
        return False
    fact = facts.about(value)
    if isinstance(fact, Laid):
        return fact.rows.order != EVERY or value in facts.experts
    return isinstance(fact, Pointwise) and (isinstance(fact.order, Hits) or value.op is not aten.addmm.default)


def analyse(graph: fx.Graph) -> Analysis:
    """Finds the MoE blocks of `graph` (one graph, without its subgraphs). Where there are experts, what reads something
    that it computes, and computes something for nobody, is erased first."""
    if not any(map(_may_anchor, graph.nodes)):
        return Analysis(None, [], _cut_off(graph))
    register_foreign()
    view = View(graph)
    facts = Facts(view.values, numbers=view.numbers)
    facts.experts = experts_on_every_token(view.values, facts)
    anchors = [node for node in graph.nodes if is_anchor(node, view, facts)]
    if not anchors:
        return Analysis(view, [], _unclaimed(graph, [], view, facts) or _cut_off(graph), facts)
    unread = dict.fromkeys(dead(graph, view))
    reads = (arg for node in unread for arg in node.all_input_nodes if arg not in unread)
    if any(arg.op not in ("placeholder", "get_attr") for arg in reads):
        for node in unread:
            graph.erase_node(node)
        return analyse(graph)
    blocks, broken = [], {}
    for final in _finals(graph, view, facts):
        try:
            blocks.append(block_at(final, _made(final, view, facts), view, facts))
        except Break as stop:
            for anchor in _anchors_of(final, view, facts):  # the blocks before it have their own reason
                broken.setdefault(anchor, (stop, final))
    fused = {anchor for block in blocks for anchor in block.anchors}
    rest = [anchor for anchor in anchors if anchor not in fused]
    misses = []
    for miss in _misses(rest, broken, view, facts):
        opened, left = ([], miss) if miss.detail == ADAPTER else _open_blocks(miss, view, facts)
        blocks += opened
        misses += [left] if left.anchors else []
    misses += _unclaimed(graph, [*blocks, *misses], view, facts)
    return Analysis(view, sorted(blocks, key=lambda block: view.positions[block.final]), misses, facts)


def _open_blocks(miss: Miss, view: View, facts: Facts) -> tuple[list[Block], Miss]:
    """The experts of `miss`, where they are proven as far as their own rows, and what is left of it: why not even that
    is proven, if none are."""
    blocks: list[Block] = []
    fused: set[fx.Node] = set()
    why = miss
    for outputs in outputs_of(miss.anchors, view, facts):
        try:
            block = block_at(outputs.node, outputs.rows, view, facts)
        except Break as stop:
            why = Miss(miss.anchors, stop.reason, stop.detail, outputs.node, stop.at)
            continue
        if fused.isdisjoint(block.anchors):
            fused |= set(block.anchors)
            blocks.append(replace(block, perm=outputs.perm, open=miss))
    left = tuple(anchor for anchor in miss.anchors if anchor not in fused)
    return blocks, replace(miss if blocks else why, anchors=left)


def _unclaimed(graph: fx.Graph, sites: list[Block | Miss], view: View, facts: Facts) -> list[Miss]:
    """The misses of experts that are none of these sites. Where adapters stand beside their products, or a proof that
    had come as far as these was cut off by a detach(), that is said."""
    missed = {node for site in sites if isinstance(site, Miss) for node in site.anchors}
    fused = {node for site in sites if isinstance(site, Block) for node in (*site.anchors, *site.region)}
    misses = []
    for found in unclaimed(graph, missed, fused):
        cut = (facts.broken[v] for node in found.products for v in view.made[node] if v in facts.broken)
        cut = next((broken for broken in cut if broken.detail == CUT), None)
        why = found if cut is None or found.reason != "no-match" else cut
        miss = Miss(found.products or (found.at,), why.reason, why.detail, found.at)
        adapter = _adapter(found.products, view) if why is found and found.reason == "no-match" else None
        misses.append(miss if adapter is None else _with_adapter(miss.anchors, adapter, view))
    return misses


def _cut_off(graph: fx.Graph) -> list[Miss]:
    """The miss of a graph that holds a router, but no experts."""
    router = loop_behind(graph)
    if router is None:
        return []
    if (found := placed_behind(router)) is not None:
        return [Miss((found.at,), found.reason, found.detail, found.at, cut_off=True)]
    detail = (
        "the expert ids leave the graph here: a Python loop over the experts follows, or another statement that waits "
        "for the data, such as bincount or nonzero"
    )
    return [Miss((router,), "data-dependent", detail, router, cut_off=True)]


def _finals(graph: fx.Graph, view: View, facts: Facts) -> Iterator[fx.Node]:
    """The nodes that hold a block's result: the combined rows, after the casts that nothing else sees past."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        combined = _made(node, view, facts)
        if node in seen or not isinstance(combined, Combined):
            continue
        chain = [node]
        # Rows added onto something are the result as they are: what they were added onto is overwritten by then.
        while combined.base is None and len(users := _readers(node, view)) == 1:
            user = users.pop()
            if user.op == "output" or _made(user, view, facts) != combined or user in view.without_grad:
                break  # the op runs where the last node did, and needs its gradient
            if _fits(view.value(node), combined) and _reshaped(view.value(node), view.value(user)):
                break  # what becomes of the result's shape is not the block's
            seen.add(node)
            node = user
            chain.append(node)
        pending = [node]
        while pending:
            seen.add(pending[-1])
            readers = _readers(pending.pop(), view)
            pending += [u for u in readers if u not in seen and _made(u, view, facts) == combined]
        fitting = [n for n in chain if _fits(view.value(n), combined)]
        yield fitting[-1] if fitting else node


def _readers(node: fx.Node, view: View) -> set[fx.Node]:
    """Who reads what `node` has made, under its names so far: after ``y[i] = rows`` that is still the name of `y`."""
    cell, position = view.cells.get(target_of(node)), view.positions[node]
    held = [n for n, other in view.cells.items() if other is cell] if isinstance(cell, Cell) else []
    names = {node, *(n for n in held if view.positions[n] < position)}
    return {user for name in names for user in name.users if view.positions[user] > position}


def _reshaped(before: Value, after: Value) -> bool:
    """Whether more than dimensions of one entry went away."""
    old, new = ([n for n in v.meta.shape if not same(n, 1)] for v in (before, after))
    kept = len(old) == len(new) and all(map(same, old, new))
    return not kept or len(after.meta.shape) > len(before.meta.shape)


def _fits(result: Value, combined: Combined) -> bool:
    """Whether `result` has the shape that a block's result can have: [T, H], or that of the tokens."""
    shape = result.meta.shape
    source = combined.rows.bare.source
    while not isinstance(source, Rows):
        source = source.columns[0].projection.source
    x = _unflattened(source.x, result).meta.shape
    return len(shape) == 2 or (len(shape) == len(x) and all(map(same, shape, x)))


def _made(node: fx.Node, view: View, facts: Facts):
    value = view.value(node)
    return facts.of(value) if value is not None else None


def block_at(final: fx.Node, combined: Combined, view: View, facts: Facts) -> Block:
    """The block of which `final` holds what `combined` says. Break where it is not one that can be replaced."""
    result = view.value(final)
    down = combined.rows.bare
    source = down.source
    if not isinstance(source, Pointwise):
        raise Break("no-match", "the combined rows come from a single projection")
    layout, ups, expr = layout_of(source)
    rows: Rows = ups[0].source
    rows = replace(rows, x=_unflattened(rows.x, result))
    weights = combined.rows.weight
    if rows.weight is not None and weights is not None:
        raise Break("no-match", "routing weights are applied before and after the experts")
    if combined.rows.weight is not None and source.weight is not None and down.bias is not None:
        raise Break("no-match", "routing weights multiply the activations, but a bias follows them")
    _check_sizes(result, rows, ups, down, layout)
    tokens = math.prod(rows.x.meta.shape[:-1])
    for per_slot in (combined.rows.ids, weights if weights is not None else rows.weight):
        if isinstance(per_slot, Value) and not same(_slots_of(per_slot, tokens), tokens * rows.k):
            raise Break("shape", "the block does not take k slots of every token")
    _check_dtypes(rows, source, ups, down, combined.rows, result)
    spec = ExpertsSpec(
        activation=str(expr),
        layout=layout,
        out_dtype=dtype_name(result.meta.dtype),
        weight_on="input" if rows.weight is not None else "output",
    )
    roots = [rows.x, ups[0].source.x, combined.rows.ids, *tensors_of(weights if weights is not None else rows.weight)]
    for projection in (*ups, down):
        roots += [*projection.weight.tensors, *tensors_of(projection.bias)]
    region = _region(final, view, {*roots, *tensors_of(combined.base)})
    region |= _sizes_of(region)
    _check_interior(final, region, view, facts)
    return Block(
        final=final,
        anchors=tuple(sorted((n for n in region if is_anchor(n, view, facts)), key=view.positions.__getitem__)),
        region=frozenset(region),
        spec=spec,
        k=rows.k,
        x=rows.x,
        ids=combined.rows.ids,
        weights=weights if weights is not None else rows.weight,
        up=tuple(p.weight for p in ups),
        down=down.weight,
        up_bias=tuple(p.bias for p in ups if p.bias is not None),
        down_bias=down.bias,
        base=combined.base,
    )


def _slots_of(value: Value, tokens: int | torch.SymInt) -> int | torch.SymInt:
    """The number of slots that `value` [.., K], maybe with ones after that, has something for. What may be K is pinned:
    Dynamo need not know it for that of another tensor."""
    shape = list(value.meta.shape)
    while len(shape) > 2 and same(shape[-1], 1):
        shape.pop()
    if len(shape) > 1 and isinstance(shape[-1], torch.SymInt) and same(math.prod(shape[:-1]), tokens):
        shape[-1] = pinned(shape[-1]) or shape[-1]
    return math.prod(shape)


def layout_of(source: Pointwise) -> tuple[str, list[Projection], act.Expr]:
    """Layout of the up projection, its projections (gate first) and the activation in terms of gate and up."""
    columns = source.columns
    projections = list(dict.fromkeys(c.projection for c in columns))
    parts = {c.part for c in columns}
    leaf = {c: act.Expr("column", (c,)) for c in columns}
    if any(p.level != 1 for p in projections) or len({p.source for p in projections}) != 1:
        raise Break("no-match", "gate and up project different rows")
    if len(projections) == 1 and parts in ({"first", "second"}, {"even", "odd"}):
        layout = "concat" if "first" in parts else "interleaved"
        names = {"first": act.GATE, "second": act.UP, "even": act.GATE, "odd": act.UP}
        return layout, projections, act.substitute(source.expr, {leaf[c]: names[c.part] for c in columns})
    if len(projections) == 1 and parts == {"all"}:
        return "single", projections, act.substitute(source.expr, {leaf[columns[0]]: act.UP})
    if len(projections) == 2 and parts == {"all"}:
        if len([p for p in projections if p.bias is not None]) == 1:
            raise Break("layout", "one of gate and up has a bias, the other has none")
        orders = [(columns[0], columns[1]), (columns[1], columns[0])]
        exprs = [act.substitute(source.expr, {leaf[g]: act.GATE, leaf[u]: act.UP}) for g, u in orders]
        best = next((i for i, e in enumerate(exprs) if _gate_named(e)), 0)
        return "separate", [c.projection for c in orders[best]], exprs[best]
    raise Break("layout", f"the activation reads an unusual choice of columns: {sorted(map(repr, columns))}")


def _unflattened(x: Value, result: Value) -> Value:
    """The tokens in the shape in which the result has them, where they were flattened in between."""
    inner = x
    while inner.op is aten.view.default and not inner.detached and len(inner.meta.shape) < len(result.meta.shape):
        inner = inner.args[0]
    alike = len(inner.meta.shape) == len(result.meta.shape) and all(map(same, inner.meta.shape, result.meta.shape))
    return inner if alike else x


def _gate_named(expr: act.Expr) -> bool:
    form = act.gated_form(expr)
    return form is not None and form.gate_leaf == "gate"


def _check_sizes(result: Value, rows: Rows, ups: list[Projection], down: Projection, layout: str) -> None:
    experts, inner, hidden = down.weight.shape
    if not all(isinstance(size, int) for p in (*ups, down) for size in p.weight.shape):
        raise Break("shape", "the sizes of the experts' weights are symbolic")
    columns = 2 * inner if layout in ("concat", "interleaved") else inner
    if any(p.weight.shape != (experts, hidden, columns) for p in ups):
        shapes = [tuple(p.weight.tensors[0].meta.shape) for p in (*ups, down)]
        raise Break("shape", f"the shapes of up and down projection do not fit one expert MLP: {shapes}")
    parts = [part for p in (*ups, down) for part in (p.weight.stored, p.bias) if part is not None]
    if len({isinstance(part, tuple) for part in parts}) > 1:
        raise Break("layout", "some weights or biases are stacked, others are one tensor for each expert")
    if any(len(set(map(_form, p.weight.tensors))) > 1 for p in (*ups, down)):
        raise Break("shape", "the experts' weights have different shapes")
    shape = rows.x.meta.shape
    flat = (math.prod(shape[:-1]), shape[-1]) if len(result.meta.shape) == 2 else shape
    alike = len(result.meta.shape) == len(flat) and all(map(same, result.meta.shape, flat))
    if len(shape) < 2 or not same(shape[-1], hidden) or not alike:
        raise Break("shape", "the result has another shape than the tokens that went in")
    for projection, width in ((ups[0], columns), (ups[-1], columns), (down, hidden)):
        for bias in tensors_of(projection.bias):
            if tuple(bias.meta.shape) != ((width,) if isinstance(projection.bias, tuple) else (experts, width)):
                raise Break("shape", f"a bias has the shape {tuple(bias.meta.shape)}")


def _form(tensor: Value) -> tuple:
    return tuple(tensor.meta.shape)


def _check_dtypes(
    rows: Rows, source: Pointwise, ups: list[Projection], down: Projection, out: Pointwise, result: Value
) -> None:
    tensors = [t for p in (*ups, down) for t in (*p.weight.tensors, *tensors_of(p.bias))]
    dtype = down.weight.tensors[0].meta.dtype
    if dtype not in DTYPES or any(t.meta.dtype != dtype for t in tensors):
        raise Break("dtype", f"weights and biases are {sorted({str(t.meta.dtype) for t in tensors})}")

    def narrower(d: torch.dtype) -> bool:
        return d.itemsize < dtype.itemsize or (d.itemsize == dtype.itemsize and d != dtype)

    lost = [d for d in source.dtypes | out.dtypes | {result.meta.dtype} if narrower(d)]
    lost += [d for d in rows.dtypes if narrower(d) and d != rows.x.meta.dtype]
    if lost and lost != [result.meta.dtype]:
        raise Break("dtype", f"values inside the block are rounded to {lost[0]}, the weights are {dtype}")


def _region(final: fx.Node, view: View, roots: set[Value]) -> set[fx.Node]:
    """The nodes between the block's operands and `final`, with the in-place ops on what they make."""
    region: set[fx.Node] = set()
    pending = [(final, view.positions[final] + 1)]
    while pending:
        node, read = pending.pop()
        cells = view.cells.get(node)
        if node in region or node.op == "placeholder":
            continue
        example = node.meta.get("example_value")
        number = isinstance(example, torch.SymInt) or (example is None and node.target is operator.getitem)
        if cells is None and not number and not _writes(node, view):
            continue
        if isinstance(cells, Cell) and node is not final and cells.value_at(read) in roots:
            continue
        region.add(node)
        for arg in node.all_input_nodes:
            pending.append((arg, view.positions[node]))
        for storage in view.storages(node):
            pending += [(w, read) for w in storage.writers if view.positions[w] < read]
    return region


def _sizes_of(region: set[fx.Node]) -> set[fx.Node]:
    """What is only said of sizes inside the region: assertions about how many rows a mask has."""
    found, pending = set(), list(region)
    while pending:
        for user in pending.pop().users:
            example = user.meta.get("example_value")
            scalar = user.target in _SCALARS or isinstance(example, (torch.SymInt, torch.SymBool))
            if user.op == "call_function" and scalar and user not in region and user not in found:
                found.add(user)
                pending.append(user)
    outside = [node for node in found if not set(node.all_input_nodes) | set(node.users) <= found | region]
    while outside:  # read elsewhere too
        for node in outside:
            found.discard(node)
        outside = [node for node in found if not set(node.users) <= found | region]
    return found


_CHECKS = (aten._assert_scalar.default, torch._check, torch._check_is_size)  # the last one is that of torch 2.10
_SCALARS = (aten.sym_size.int, *_CHECKS, operator.getitem)


def _writes(node: fx.Node, view: View) -> bool:
    return any(node in storage.writers for arg in node.all_input_nodes for storage in view.storages(arg))


def _check_interior(final: fx.Node, region: set[fx.Node], view: View, facts: Facts) -> None:
    """The rows inside the block must not be read from outside."""
    finals = set(view.storages(final))
    for node in region:
        if finals & set(view.storages(node)):
            continue
        routed = any(isinstance(facts.about(v), (Rows, Pointwise, Slim, Grid, Laid)) for v in view.made[node])
        for user in node.users if routed else ():
            if user in region:
                continue
            if "hook" in str(user.target):
                raise Break("hooks", f"a hook sits on {node.name}, a value inside the block", user)
            returned = "is returned from the graph: the model, a hook or a recorder keeps it"
            what = returned if user.op == "output" else f"is read outside of it, by {user.name}"
            reader = node if user.op == "output" else user
            raise Break("interior-use", f"{node.name}, a value inside the block, {what}", reader)


def _anchors_of(final: fx.Node, view: View, facts: Facts) -> list[fx.Node]:
    """The grouped matmuls that `final` is computed from."""
    region = _region(final, view, set())
    return [node for node in region if is_anchor(node, view, facts)]


def _misses(anchors: list[fx.Node], broken: dict, view: View, facts: Facts) -> Iterator[Miss]:
    """One miss for each group of anchors that belong to one block: those of one call of one module."""
    groups: list[list[fx.Node]] = []
    for anchor in anchors:
        before = groups[-1][-1] if groups else None
        if before is not None and _one_block(before, anchor, view, facts):
            groups[-1].append(anchor)
        else:
            groups.append([anchor])
    adapted = bool(groups) and next(adapters_in(view.values), None) is not None
    # Some of the experts alone may have one: those beside a product.
    lists = [found.products for found in unclaimed(groups[0][0].graph, set(), set())] if adapted else []
    for group in groups:
        beside = [node for products in lists if not set(group).isdisjoint(products) for node in products]
        added = _adapter([*group, *beside], view) if adapted else None
        if added is not None:
            yield _with_adapter(tuple(group), added, view)
            continue
        soft = next((n for n in _behind_all(group) for v in view.made.get(n, ()) if is_soft(v, facts)), None)
        if soft is not None:
            yield Miss(tuple(group), "soft", "these weights of all experts come from no choice among them", soft)
            continue
        known = next((broken[a] for a in group if a in broken), None)
        if known is not None:
            stop, at = known
            yield Miss(tuple(group), stop.reason, stop.detail, at, stop.at)
            continue
        hook = next((n for n in view.positions if "hook" in str(n.target) and _inside(n, group)), None)
        stop = _first_break(group, view, facts)
        if hook is not None:
            yield Miss(tuple(group), "hooks", f"a hook sits on a value inside the block, {hook.name}", hook)
        elif stop is None:
            detail = "the output of the experts is never proven to be combined into one row per token"
            yield Miss(tuple(group), "no-match", detail, group[-1])
        else:
            yield Miss(tuple(group), stop.reason, stop.detail, _node_of(stop.at, view, group[0]))


def _adapter(products: Sequence[fx.Node], view: View) -> Value | None:
    """The sum of one of these products and of what an adapter makes of the same rows."""
    adapted = {one: added for added, one in adapters_in(view.values)}
    return next((adapted[v] for node in products for v in view.made[node] if v in adapted), None)


def _with_adapter(anchors: tuple[fx.Node, ...], added: Value, view: View) -> Miss:
    return Miss(anchors, "activation", ADAPTER, _node_of(added, view, anchors[0]))


def _one_block(a: fx.Node, b: fx.Node, view: View, facts: Facts) -> bool:
    """Whether two neighbouring anchors belong to one block: b depends on a, or both share an argument or a routing."""
    if _routing(a, view, facts) & _routing(b, view, facts):
        return True
    if not rows_behind(view.made[b], facts).isdisjoint(view.made[a]):
        return True
    if set(a.all_input_nodes) & {n for n in b.all_input_nodes if n.op != "get_attr"}:
        return True
    return module_of(a)[0] != "" and module_of(a)[0] == module_of(b)[0] and b in _descendants(a)


def _routing(anchor: fx.Node, view: View, facts: Facts) -> set[Value]:
    """The ids that an anchor's rows or weights were picked by."""
    of = (facts.about(v) for made in view.made[anchor] for v in (made, *made.inputs))
    bare = (fact.rows if isinstance(fact, (Laid, Grid, Slim)) else fact for fact in of)
    return {ids for fact in bare if (ids := getattr(fact, "ids", None)) is not None}


def _inside(node: fx.Node, group: list[fx.Node]) -> bool:
    """Whether `node` lies between the first and the last anchor of a block."""
    return len(group) > 1 and node in _descendants(group[0]) and group[-1] in _descendants(node)


def _behind_all(group: list[fx.Node]) -> list[fx.Node]:
    """The anchors of a block, and all that is computed from the first of them."""
    return [*group, *_descendants(group[0])]


def _descendants(node: fx.Node) -> set[fx.Node]:
    found, pending = set(), [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def _first_break(group: list[fx.Node], view: View, facts: Facts) -> Broken | None:
    """The earliest place where the proof of this block broke: at one of its anchors or behind it."""
    nodes = _behind_all(group)
    breaks = {facts.broken[v] for node in nodes for v in view.made.get(node, ()) if v in facts.broken}
    anchors = {v for anchor in group for v in view.made[anchor]}
    own = [b for b in breaks if not anchors.isdisjoint(b.at.behind())]
    return min(own, key=lambda b: b.at.number, default=None)


def _node_of(value: Value, view: View, otherwise: fx.Node) -> fx.Node:
    return next((node for node, made in view.made.items() if value in made), otherwise)


# A step of a path as Dynamo writes it where it went through no attribute: `[0]`, `_modules['0']`, `['_modules']['0']`.
_STEP = re.compile(r"(?:\.?__dict__)?(?:\.?_modules|\['_modules'\])?\['(\w+)'\]|\[(\d+)\]")


def module_of(*nodes: fx.Node) -> tuple[str, str]:
    """Path and class name of the innermost module that all `nodes` were traced in; empty where there is none."""
    stacks = [list((node.meta.get("nn_module_stack") or {}).values()) for node in nodes]
    shared = [entries[0] for entries in zip(*stacks, strict=False) if len({str(path) for path, _ in entries}) == 1]
    if not shared:
        return "", ""
    path, cls = shared[-1]
    path = re.sub(r"^L\['\w+'\]", "", path)  # the variable that held the model
    path = _STEP.sub(r".\1\2", path).removeprefix(".")
    return path, getattr(cls, "__name__", str(cls).rpartition(".")[2])


__all__ = ["Analysis", "Block", "Column", "Miss", "analyse", "is_anchor", "module_of"]
