"""Selective checkpointing: the fused op inherits what the user's policy says of the grouped matmuls it contains.

A policy that saves ``aten._grouped_mm`` would otherwise no longer see one, and the fused op would be recomputed.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

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
        if op is not torch.ops.mok.experts.default:
            return policy(ctx, op, *args, **kwargs)
        own = policy(ctx, op, *args, **kwargs)
        inner = policy(ctx, torch.ops.aten._grouped_mm.default, *args, **kwargs)
        return own if own in _SAVES or inner not in _SAVES else inner

    wrapped._knows_mok = True
    return wrapped
