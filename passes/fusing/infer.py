"""After partitioning: `mok::experts` becomes `mok::experts_infer`, and `mok::experts_parallel` likewise, where nobody
reads what it saves for backward. Then all ops give way to their twins without derivative.

The first is so without gradients and in the forward of checkpointed regions; only the partitioned graph knows.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from mok_compile.define import no_grad


def drop_saved_outputs(graph: fx.Graph) -> int:
    """Rewrites a post-grad graph in place; returns how many ops were changed."""
    changed = 0
    blocks = [node for node in graph.nodes if node.op == "call_function" and _infer_form(node.target) is not None]
    for node in blocks:
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users if user.users):
            continue
        with graph.inserting_before(node):
            infer = graph.call_function(_infer_form(node.target), node.args, node.kwargs)
        infer.meta = dict(node.meta)
        if "val" in infer.meta:
            infer.meta["val"] = infer.meta["val"][0]
        for user in list(node.users):
            user.replace_all_uses_with(infer)
            graph.erase_node(user)
        graph.erase_node(node)
        changed += 1
    return changed


def drop_derivatives(graph: fx.Graph) -> None:
    """Puts the twins of our ops into a post-grad graph, in place."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = no_grad.get(node.target, node.target)


def _infer_form(target) -> torch._ops.OpOverload | None:
    """The op that computes what `target` does and saves nothing; None if `target` is no block that saves something."""
    if target is torch.ops.mok.experts.default:
        return torch.ops.mok.experts_infer.default
    is_parallel = isinstance(target, torch._ops.OpOverload) and target._schema.name == "mok::experts_parallel"
    return torch.ops.mok.experts_parallel_infer.default if is_parallel else None
