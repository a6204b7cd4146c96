"""What an op writes into: what its schema says, and what it keeps to itself."""

from __future__ import annotations

from typing import Any

import torch

# These update the running statistics that they are given, of which their schemas say nothing.
UNSAID = frozenset(
    {
        *("_batch_norm_impl_index", "batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
        *("batch_norm_update_stats", "cudnn_batch_norm", "instance_norm", "miopen_batch_norm", "native_batch_norm"),
    }
)
_OF_STATISTICS = ("running_mean", "running_var")
_IN_TRAINING = ("training", "use_input_stats")


def written(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[Any]:
    """Of the arguments of this call those that `op` writes into, tensors or lists of them."""
    arguments = op._schema.arguments
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(arguments)}
    found = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    updates = op.namespace == "aten" and op._schema.name.removeprefix("aten::") in UNSAID
    if updates and all(given.get(name, True) for name in _IN_TRAINING):
        found += [given[name] for name in _OF_STATISTICS]
    return [value for value in found if value is not None]
