"""The order of the passes over one graph: analyse, insert, join the router, verify, commit, erase; then the bodies of
checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mok_compile import ops
from mok_compile.options import Options
from mok_compile.passes.blocks.router import Router, find
from mok_compile.passes.blocks.site import Analysis, Block, Miss, analyse, module_of
from mok_compile.passes.facts.rules import Break
from mok_compile.passes.fusing.checkpoint import translate_policy
from mok_compile.passes.fusing.join import Joined, erase, hand_over, join
from mok_compile.passes.fusing.substitute import Insertion, Substitution
from mok_compile.passes.fusing.traced import OPEN, VERIFIED, block_of, is_traced
from mok_compile.passes.fusing.verify import arguments_of, verify
from mok_compile.passes.graph.source import said_at, source_of
from mok_compile.report import Site, Spread
from mok_compile.router import RouterSpec
from mok_compile.spec import ExpertsSpec

log = logging.getLogger("mok_compile")


def fuse(gm: fx.GraphModule, inputs: Sequence[Any] | None, options: Options, watched: bool = False) -> list[Site]:
    """Replaces the MoE blocks of `gm` in place and says what became of each, in program order.

    `inputs` are the real inputs of the graph, or None where they are not known (then nothing is verified). Bodies of
    checkpointed regions are fused too; other higher-order ops are left alone. With `watched` each site carries its
    slice of the graph and what was proven there.
    """
    direct = {node: _direct(node) for node in gm.graph.nodes if ops.is_block(node.target)}
    found = _analyse(gm)
    slices = _slices(gm, found) if watched else {}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    traced = _traced(found, direct) if options.router else {}
    became = [(miss, miss.at, _missed(miss)) for miss in found.misses]
    became += [(block, block.final, site) for block, site in _replace(gm, found, traced, inputs, options)]
    joinable = {block.anchors[0] for block in traced}
    became += [(None, node, site) for node, site in direct.items() if node not in joinable]
    sites = []
    for what, node, site in became:
        site.slice = slices.get(what)
        sites.append((order[node], site))
    bodies = [node for node in gm.graph.nodes if node.target is torch.ops.higher_order.tag_activation_checkpoint]
    given = arguments_of(bodies, gm, inputs) if options.verify and inputs is not None and bodies else {}
    for node in bodies:
        body = getattr(gm, node.args[0].target)
        inner = fuse(body, given.get(node), options, watched)
        for site in inner:
            site.subgraph = ".".join(filter(None, (node.args[0].target, site.subgraph)))
        if any(site.status == "fused" for site in inner):
            translate_policy(body)
        sites += [(order[node], site) for site in inner]
    sites += [(order[node], site) for node in gm.graph.nodes for site in _out_of_reach(node, gm)]
    return [site for _, site in sorted(sites, key=lambda pair: pair[0])]


def _out_of_reach(node: fx.Node, gm: fx.GraphModule) -> list[Site]:
    """The blocks in the bodies of a higher-order op that are left as they are: the branches of `torch.cond`, say. Those
    that are the op already run fused there too."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    if node.target is torch.ops.higher_order.tag_activation_checkpoint:
        return []
    named = {arg.target: getattr(gm, arg.target, None) for arg in node.all_input_nodes if arg.op == "get_attr"}
    bodies = {name: body for name, body in named.items() if isinstance(body, fx.GraphModule)}
    detail = f"the block is inside of {node.target.name()}, whose bodies are left as they are"
    sites = []
    for name, body in bodies.items():
        found = _analyse(body)
        for anchors in [site.anchors for site in (*found.blocks, *found.misses)]:
            where = location(anchors)
            sites.append(Site("missed", "no-match", detail, where, node=node.name, subgraph=name))
        direct = [_direct(inner) for inner in body.graph.nodes if ops.is_block(inner.target)]
        sites += [replace(site, subgraph=name) for site in direct]
        sites += [site for inner in body.graph.nodes for site in _out_of_reach(inner, body)]
    return sites


def _analyse(gm: fx.GraphModule) -> Analysis:
    """The sites of a graph. A bug of ours must not end the user's compile: the graph then stays as it is, loudly."""
    nodes = len(gm.graph.nodes)
    try:
        return analyse(gm.graph)
    except Exception:
        log.warning("mok-compile: this graph could not be analysed and is left unfused; please report", exc_info=True)
        return Analysis(None, [], [])
    finally:
        if len(gm.graph.nodes) != nodes:
            gm.recompile()


def _direct(node: fx.Node) -> Site:
    """A block that was the op already when Dynamo traced it: a loop over experts, the experts implementation "mok", or
    a user's own call."""
    *_, spec, engine = node.args
    detail = "traced from a Python loop over the experts" if is_traced(node) else "the model calls the op itself"
    site = Site("fused", None, detail, location((node,)), ExpertsSpec.from_json(spec), engine)
    site.node, site.verify_error = node.name, node.meta.get(VERIFIED)
    if OPEN in node.meta:
        site.reason, site.combine_detail = "post-norm", node.meta[OPEN]
    if ops.is_block(node.target, router=True):
        site.router = RouterSpec.from_json(node.args[10])
    if ops.is_parallel(node.target):
        transport, _, ranks, num_experts = node.args[7:11]
        site.spread = Spread(num_experts, ranks, transport)
    return site


def _traced(found: Analysis, direct: dict[fx.Node, Site]) -> dict[Block, Site]:
    """The blocks that were loops, which may still take their router in."""
    if found.view is None:  # a graph without any matrix product has no router
        return {}
    closed = {node: site for node, site in direct.items() if is_traced(node) and OPEN not in node.meta}
    blocks = {block_of(node, found.view): site for node, site in closed.items()}
    return {block: site for block, site in blocks.items() if block is not None}


def _slices(gm: fx.GraphModule, found: Analysis) -> dict[Block | Miss, Any]:
    from mok_compile.passes.fusing.extract import Extraction  # nobody else needs it

    if found.view is None:  # nothing was proven of this graph
        return {}
    try:
        extraction = Extraction(gm, found)
        return {site: extraction.slice_of(site) for site in (*found.blocks, *found.misses)}
    except Exception:  # a picture of the compile must not end the compile
        log.warning("mok-compile: the sites of this graph cannot be drawn", exc_info=True)
        return {}


def _replace(
    gm: fx.GraphModule,
    found: Analysis,
    traced: dict[Block, Site],
    inputs: Sequence[Any] | None,
    options: Options,
) -> list[tuple[Block, Site]]:
    """What became of the blocks that were `found`, and of the `traced` ones, which are the op already: they only take
    in their routers."""
    if not found.blocks and not traced:
        return []
    routers = {block: _router(block, found, options) for block in (*found.blocks, *traced)}
    substitution = Substitution(gm.graph, found.view, options.engine)
    sites: dict[Block, Site] = {}
    insertions: list[Insertion] = []
    for block, site in traced.items():
        try:
            insertions.append(_router_alone(substitution, block, routers[block]))
        except Break as stop:
            sites[block] = replace(site, reason="router", router_detail=stop.detail)
        except Exception as error:  # as in _analyse
            log.warning("mok-compile: a router could not be taken in; please report", exc_info=True)
            sites[block] = replace(site, reason="router", router_detail=f"it could not be taken in: {error!r}")
    for block in found.blocks:
        try:
            insertions.append(_joined(substitution, substitution.insert(block), routers))
        except Break as stop:
            sites[block] = _refused(block, stop.reason, stop.detail)
        except Exception as error:  # as in _analyse
            log.warning("mok-compile: a proven block could not be replaced; please report", exc_info=True)
            sites[block] = _refused(block, "no-match", f"the block could not be replaced: {error!r}")
    compared, committed = {}, []
    if options.verify and inputs is not None and insertions:
        compared = verify(gm, found.view, insertions, inputs)
    for insertion in insertions:
        comparison = compared.get(insertion)
        site = traced.get(insertion.block)
        if comparison is not None and comparison.failed:
            substitution.withdraw(insertion)
            if site is None:
                sites[insertion.block] = _refused(insertion.block, "verify", comparison.detail)
            else:
                sites[insertion.block] = replace(site, reason="router", router_detail=comparison.detail)
        else:
            substitution.commit(insertion)
            committed.append(insertion)
            if isinstance(insertion, Joined):
                hand_over(substitution, insertion)
            error = None if comparison is None else comparison.worst
            fused = _fused(insertion, routers[insertion.block], error)
            sites[insertion.block] = fused if site is None else _with_router(site, fused)
    substitution.erase()
    for insertion in committed:
        if isinstance(insertion, Joined):
            erase(substitution, insertion)
    gm.graph.lint()
    gm.recompile()
    return list(sites.items())


def _router(block: Block, found: Analysis, options: Options) -> Router | Break | None:
    """The router of a block, or why there is none to fuse; None if nobody wants to know, or the routing weights are not
    part of the block."""
    if not options.router or block.open:
        return None
    try:
        return find(block, found.facts)
    except Break as stop:
        return stop
    except Exception as error:  # as in _analyse
        log.warning("mok-compile: a router could not be analysed; please report", exc_info=True)
        return Break("router", f"the router could not be analysed: {error!r}")


def _joined(substitution: Substitution, insertion: Insertion, routers: dict[Block, Router | Break | None]) -> Insertion:
    """`insertion` with its router if that is proven and can be taken in."""
    router = routers[insertion.block]
    if not isinstance(router, Router):
        return insertion
    try:
        return join(substitution, insertion, router)
    except Break as stop:
        routers[insertion.block] = stop
        return insertion


def _router_alone(substitution: Substitution, block: Block, router: Router | Break) -> Joined:
    """The router of a block that is the op already, with the op in a form that takes it in. Break("router") or
    Break("mutation") if that cannot be; all is then as before."""
    if isinstance(router, Break):
        raise router
    insertion = substitution.repeat(block, block.anchors[0])
    try:
        return join(substitution, insertion, router)
    except Exception:
        substitution.withdraw(insertion)
        raise


def _with_router(site: Site, fused: Site) -> Site:
    """The site of a block that was the op already, once it has its router."""
    errors = [error for error in (site.verify_error, fused.verify_error) if error is not None]
    return replace(fused, detail=site.detail, problem=None, verify_error=max(errors, default=None))


def _fused(insertion: Insertion, router: Router | Break | None, error: float | None) -> Site:
    block, choice = insertion.block, insertion.choice
    detail = "; ".join(f"{name}: {why}" for name, why in choice.passed_over.items())
    unrouted = isinstance(router, Break)
    return Site(
        "fused",
        "post-norm" if block.open else choice.reason or ("router" if unrouted else None),
        detail,
        _where(block),
        block.spec,
        choice.name,
        error,
        block.final.name,
        problem=insertion.problem,
        router=router.spec if isinstance(router, Router) else None,
        router_detail=router.detail if unrouted else "",
        combine_detail=_why(block.open) if block.open else "",
    )


def _refused(block: Block, reason: str, detail: str) -> Site:
    return Site("missed", reason, detail, _where(block), block.spec, node=block.final.name)


def _missed(miss: Miss) -> Site:
    at = miss.named or miss.at
    return Site("missed", miss.reason, _why(miss), location(miss.anchors, at), node=at.name, cut_off=miss.cut_off)


def _why(miss: Miss) -> str:
    return said_at(miss.named or miss.at, miss.detail)


def _where(block: Block) -> str:
    return location(block.anchors or (block.final,))


def location(nodes: Sequence[fx.Node], at: fx.Node | None = None) -> str:
    """Path and class of the module around `nodes`, and the source line of the first of them (or of `at`, where that is
    more to the point)."""
    path, cls = module_of(*nodes)
    where = f"{path} [{cls}]" if path else "(no module)"
    source = (source_of(at) if at is not None else None) or source_of(nodes[0])
    return where if source is None else f"{where} {source}"


def uses_ops(gm: torch.nn.Module) -> bool:
    """Whether `gm` or one of its subgraphs calls a ``mok::`` op."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(ops.is_ours(node.target) for graph in graphs for node in graph.nodes)
