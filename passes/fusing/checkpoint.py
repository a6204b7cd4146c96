"""Selective checkpointing: a fused op inherits what the user's policy says of the ops that it contains.

A policy that saves ``aten._grouped_mm`` would otherwise no longer see one, and the fused op would be recomputed.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mok_compile import ops  # registers the ops

_INSIDE = {
    torch.ops.mok.experts.default: (torch.ops.aten._grouped_mm.default,),
    torch.ops.mok.route.default: (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.topk.default),
}
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def translate_policy(body: fx.GraphModule) -> None:
    """Wraps the policy of a checkpointed `body` that holds fused ops; does nothing without one."""
    contexts = body.meta.get("_checkpoint_context_fn")
    if contexts is None or isinstance(contexts, _Translated):
        return
    body.meta["_checkpoint_context_fn"] = _Translated(contexts)


class _Translated:
    """A context function whose policies know the fused op. Keeps the `cache_hash` that makes the original cacheable."""

    def __init__(self, contexts) -> None:
        self.contexts = contexts
        if hasattr(contexts, "cache_hash"):
            self.cache_hash = contexts.cache_hash

    def __call__(self):
        pair = self.contexts()
        for mode in pair:
            policy = getattr(mode, "policy_fn", None)
            if policy is not None and not getattr(policy, "_knows_mok", False):
                mode.policy_fn = _knowing(policy)
        return pair


def _knowing(policy):
    @functools.wraps(policy)
    def wrapped(ctx, op, *args, **kwargs):
        inside = (torch.ops.aten._grouped_mm.default,) if ops.is_parallel(op) else _INSIDE.get(op, ())
        said = [policy(ctx, o, *args, **kwargs) for o in (op, *inside)]
        return next((s for s in said if s in _SAVES), said[0])

    wrapped._knows_mok = True
    return wrapped
