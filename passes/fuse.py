"""The order of the passes over one graph: analyse, insert, verify, commit, erase; then the bodies of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mok_compile import ops  # noqa: F401  registers the ops that the substitution inserts
from mok_compile.options import Options
from mok_compile.passes.checkpoint import translate_policy
from mok_compile.passes.rules import Break
from mok_compile.passes.site import Analysis, Block, Miss, analyse, module_of
from mok_compile.passes.substitute import Insertion, Substitution
from mok_compile.passes.verify import verify
from mok_compile.report import Site


def fuse(gm: fx.GraphModule, inputs: Sequence[Any] | None, options: Options) -> list[Site]:
    """Replaces the MoE blocks of `gm` in place and says what became of each, in program order.

    `inputs` are the real inputs of the graph, or None where they are not known (then nothing is verified). Bodies of
    checkpointed regions are fused too; other higher-order ops are left alone.
    """
    found = analyse(gm.graph)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    sites = [(order[miss.at], _missed(miss)) for miss in found.misses]
    sites += [(order[block.final], site) for block, site in _replace(gm, found, inputs, options)]
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(gm, node.args[0].target)
            inner = fuse(body, None, options)
            if any(site.status == "fused" for site in inner):
                translate_policy(body)
            sites += [(order[node], site) for site in inner]
    return [site for _, site in sorted(sites, key=lambda pair: pair[0])]


def _replace(
    gm: fx.GraphModule, found: Analysis, inputs: Sequence[Any] | None, options: Options
) -> list[tuple[Block, Site]]:
    if not found.blocks:
        return []
    substitution = Substitution(gm.graph, found.view, options.engine)
    sites: dict[Block, Site] = {}
    insertions: list[Insertion] = []
    for block in found.blocks:
        try:
            insertions.append(substitution.insert(block))
        except Break as stop:
            sites[block] = _refused(block, stop.reason, stop.detail)
    compared = {}
    if options.verify and inputs is not None and insertions:
        compared = verify(gm, found.view, insertions, inputs)
    for insertion in insertions:
        comparison = compared.get(insertion)
        if comparison is not None and comparison.failed:
            substitution.withdraw(insertion)
            sites[insertion.block] = _refused(insertion.block, "verify", comparison.detail)
        else:
            substitution.commit(insertion)
            sites[insertion.block] = _fused(insertion, None if comparison is None else comparison.worst)
    substitution.erase()
    gm.graph.lint()
    gm.recompile()
    return list(sites.items())


def _fused(insertion: Insertion, error: float | None) -> Site:
    block, choice = insertion.block, insertion.choice
    detail = "; ".join(f"{name}: {why}" for name, why in choice.passed_over.items())
    return Site("fused", None, detail, _where(block), block.spec, choice.name, error, block.final.name)


def _refused(block: Block, reason: str, detail: str) -> Site:
    return Site("missed", reason, detail, _where(block), block.spec, node=block.final.name)


def _missed(miss: Miss) -> Site:
    detail = f"{miss.detail} (at {miss.at.name})"
    return Site("missed", miss.reason, detail, location(miss.anchors[0]), node=miss.at.name)


def _where(block: Block) -> str:
    return location(block.anchors[0] if block.anchors else block.final)


def location(node: fx.Node) -> str:
    """Module path, class, and the source line that `node` comes from."""
    path, cls = module_of(node)
    where = f"{path} [{cls}]" if path else "(no module)"
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [line.strip() for line in trace if line.strip().startswith("File ")]
    if lines:
        file, number = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
        where += f" {file.rpartition('site-packages/')[2]}:{number}"
    return where


def uses_ops(gm: torch.nn.Module) -> bool:
    """Whether `gm` or one of its subgraphs calls a ``mok::`` op."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mok"
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )
