"""Checkpoints: around a compiled block, inside a compiled model, and with a policy of what to save."""

import functools

import pytest
import torch
from blocks import Moe, Stack, tokens
from harness import Fused, compare
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mok_compile import ops  # noqa: F401  registers the ops


class Checkpointed(nn.Module):
    def __init__(self, block, **how):
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, **self.how)


def saves_grouped_mm(ctx, op, *args, **kwargs):
    names = ("_grouped_mm", "grouped_mm_fallback")
    saved = any(name in str(op) for name in names)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saves_nothing(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def calls_of(function):
    """How often each of our ops, or its twin without derivative, runs in `function`."""
    with torch.profiler.profile() as profile:
        function()
    names = [e.name.removesuffix("_no_grad") for e in profile.events()]
    return {op: names.count(f"mok::{op}") for op in ("experts", "experts_infer", "experts_backward")}


OPTIONS = {"mok.engine": "portable"}


def test_fused_inside_the_body_of_a_checkpoint():
    """Each layer is a body of its own; found with our passes alone."""
    model = Stack(Checkpointed(Moe(dtype=torch.float64)), Checkpointed(Moe(seed=1, dtype=torch.float64)))
    fused = Fused(model)
    compare(model, fused, tokens(dtype=torch.float64), tolerance=1e-9)
    assert fused.counts() == (2, 0), fused.report


def test_checkpoint_inside_compile():
    """The forward saves nothing, so it runs the op that saves nothing; the backward runs the block once more."""
    model, x = Checkpointed(Moe()), tokens()
    compiled = torch.compile(model, backend="mok", options=OPTIONS, fullgraph=True)
    compare(model, compiled, x)
    outputs = []
    forward = calls_of(lambda: outputs.append(compiled(x)))
    backward = calls_of(lambda: outputs[0].sum().backward())
    assert forward == {"experts": 0, "experts_infer": 1, "experts_backward": 0}
    assert backward == {"experts": 1, "experts_infer": 0, "experts_backward": 1}
    assert counters["mok"]["fused"] == 1


def test_compile_inside_checkpoint():
    block = Moe()
    compiled = torch.compile(block, backend="mok", options=OPTIONS, fullgraph=True)
    outer = Checkpointed(compiled)
    compare(block, outer, tokens())
    assert counters["mok"]["missed"] == 0
    assert counters["mok"]["fused"] >= 1


def test_verified_compile_inside_checkpoint():
    """What verification saves for its own gradients is none of the checkpoint's."""
    block = Moe(dtype=torch.float64)
    fused = Fused(block, verify=True)
    compare(block, Checkpointed(fused), tokens(dtype=torch.float64), tolerance=1e-9)
    assert fused.counts() == (1, 0), fused.report


def test_verification_shows_nothing_to_the_users_hooks():
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor

    fused = Fused(Moe(), verify=True)
    numbers = []
    for _ in range(2):  # compiled in the first call
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fused(tokens())
        numbers.append(len(seen))
        seen.clear()
    assert fused.counts() == (1, 0)
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(("policy", "again"), [(saves_grouped_mm, 0), (saves_nothing, 1)], ids=["saves", "recomputes"])
def test_policy_of_the_grouped_matmuls_is_that_of_the_fused_op(policy, again):
    model, x = Checkpointed(Moe(), context_fn=selective(policy)), tokens()
    compiled = torch.compile(model, backend="mok", options=OPTIONS, fullgraph=True)
    compare(model, compiled, x)
    outputs = []
    forward = calls_of(lambda: outputs.append(compiled(x)))
    backward = calls_of(lambda: outputs[0].sum().backward())
    assert forward["experts"] + forward["experts_infer"] == 1
    assert backward["experts"] == again
    assert backward["experts_backward"] == 1
    assert counters["mok"]["fused"] == 1


def saves_topk(ctx, op, *args, **kwargs):
    saved = op is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("policy", "again"), [(saves_topk, 0), (saves_nothing, 1)], ids=["saves", "recomputes"])
def test_policy_of_topk_is_that_of_the_choice_of_experts(policy, again):
    model, x = Checkpointed(Moe(), context_fn=selective(policy)), tokens()
    compiled = torch.compile(model, backend="mok", options=OPTIONS, fullgraph=True)
    compare(model, compiled, x)
    y = compiled(x)
    with torch.profiler.profile() as profile:
        y.sum().backward()
    assert [event.name.removesuffix("_no_grad") for event in profile.events()].count("mok::route") == again


def test_policy_that_names_the_fused_op():
    def policy(ctx, op, *args, **kwargs):
        ours = op is torch.ops.mok.experts.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = Checkpointed(Moe(), context_fn=selective(policy)), tokens()
    compiled = torch.compile(model, backend="mok", options=OPTIONS, fullgraph=True)
    compare(model, compiled, x)
    y = compiled(x)
    assert calls_of(lambda: y.sum().backward()) == {"experts": 0, "experts_infer": 0, "experts_backward": 1}


def test_recomputation_gives_the_same_bits():
    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.mok.experts.default:
                self.seen.append([t.clone() for t in out])
            return out

    from naive import Problem

    problem = Problem(bias=True, dtype=torch.float32)
    with Recorder() as recorder:
        y = checkpoint(lambda x: problem.op(), problem.x, use_reentrant=False)
        y.sum().backward()
    first, second = recorder.seen
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
