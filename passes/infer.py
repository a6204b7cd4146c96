"""After partitioning: `mok::experts` becomes `mok::experts_infer` where nobody reads what it saves for backward.

That is so without gradients and in the forward of checkpointed regions; only the partitioned graph knows.
"""

from __future__ import annotations

import operator

import torch
from torch import fx


def drop_saved_outputs(graph: fx.Graph) -> int:
    """Rewrites a post-grad graph in place; returns how many ops were changed."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.mok.experts.default):
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users if user.users):
            continue
        with graph.inserting_before(node):
            infer = graph.call_function(torch.ops.mok.experts_infer.default, node.args, node.kwargs)
        infer.meta = dict(node.meta)
        if "val" in infer.meta:
            infer.meta["val"] = infer.meta["val"][0]
        for user in list(node.users):
            user.replace_all_uses_with(infer)
            graph.erase_node(user)
        graph.erase_node(node)
        changed += 1
    return changed
