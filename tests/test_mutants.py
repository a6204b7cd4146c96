"""Soundness: whatever is done to a block's graph or source, the compiled mutant computes what the mutant computes.

By hand, many more: `python tests/mutants.py 5000`, or `pytest -m exhaustive tests/test_mutants.py`.
"""

import itertools
from dataclasses import replace

import mutants
import pytest
import torch
import torch.utils.checkpoint
from blocks import Biased, Separate, routing, tokens
from corpus import CASES, EXPERTS, HIDDEN, TOKENS, K, given
from harness import Fused, compare, gradients, twin
from mutants import capture, copy_of, differences, explain, judge, run, spelled_alike, trace, unchanged
from torch import fx
from torch._dynamo.backends.debugging import aot_eager

from mok_compile.options import Options
from mok_compile.passes.facts import rules
from mok_compile.passes.fusing.fuse import fuse

aten = torch.ops.aten
NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_unchanged_blocks_are_fused(case):
    """Otherwise a matcher that refuses everything would pass the tests below."""
    program = capture(case)
    gm = fx.GraphModule(program.root, copy_of(program.graph))
    trace(gm, program.inputs)
    sites = fuse(gm, None, Options(engine="portable"))
    assert [site.status for site in sites] == ["fused"] * case.blocks
    assert not differences(case, run(gm, program.inputs), unchanged(case))


def judged(case, seeds, **how):
    """The results of these mutants; fails on wrong ones."""
    results = {seed: judge(case, seed, **how) for seed in seeds}
    wrong = [explain(case, seed, result) for seed, result in results.items() if result.state == "wrong"]
    if wrong:
        pytest.fail("\n\n".join([f"{len(wrong)} wrong mutants", *wrong[:3]]), pytrace=False)
    return list(results.values())


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_mutants(case):
    results = judged(case, range(8))
    told = [r for r in results if r.state == "right" and r.changed]
    assert told, "no edit means anything: the test says nothing"


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_many_mutants(case):
    judged(case, range(1000, 1400))


def test_other_spellings_stay_fused():
    results = [r for case in CASES for r in judged(case, range(2), edits=(spelled_alike,), count=1)]
    running = [r for r in results if r.state == "right" and not r.changed]  # a copy that is written into is a change
    assert len(running) > 100
    assert sum(r.fused > 0 for r in running) >= 0.95 * len(running)


def test_a_matcher_that_lies_is_caught(monkeypatch):
    """A detach taken for nothing, an activation taken for another: the mutants show it, and say where."""
    case = next(case for case in CASES if case.name == "grouped")
    monkeypatch.setitem(rules.RULES, aten.detach.default, lambda facts, value, a: facts.of(a))
    detach = (
        lambda graph, rng: mutants._insert(graph, rng, first(graph, "silu"), {"detach": mutants.FLOAT["detach"]}),
    )
    result = judge(case, 3, edits=detach, count=1)
    assert result.state == "wrong" and result.fused == 1
    said = explain(case, 3, result)
    assert "edit    detach between silu and" in said and "wrong   gradient" in said
    assert "grouped:3" in said and "torch.nn.functional.silu" in said and len(said.splitlines()) < 20

    monkeypatch.undo()
    honest = rules.RULES[aten.tanh.default]
    assert judge(case, 3, edits=detach, count=1).state == "right"
    monkeypatch.setitem(
        rules.RULES, aten.tanh.default, lambda *args: replace(honest(*args), expr=honest(*args).expr.args[0])
    )
    tanh = (lambda graph, rng: mutants._insert(graph, rng, first(graph, "silu"), {"tanh": mutants.FLOAT["tanh"]}),)
    assert judge(case, 3, edits=tanh, count=1).state == "wrong"


def first(graph, name):
    return next(node for node in graph.nodes if node.name == name)


# What a graph does not show, or Dynamo shows in its own way: changes of the source of one stage of a block.


class Doubling(torch.autograd.Function):
    """Nothing, with twice the gradient."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.library.custom_op("mutants::tripled", mutates_args=())
def tripled(t: torch.Tensor) -> torch.Tensor:
    """Nothing is known of it."""
    return t * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: grad * 3)


def on_result(change):
    """`change` for the floats (or else the integers) that a stage returns."""

    def wrap(stage):
        def changed(self, *args):
            result = stage(self, *args)
            if isinstance(result, tuple):
                return (change(self, result[0]), *result[1:])
            return change(self, result)

        return changed

    return wrap


def hooked(self, t):
    if t.requires_grad:
        t.register_hook(lambda grad: grad * 2)
    return t


def kept(self, t):
    self.kept = t
    return t


def summed(self, t):
    self.seen.add_(t.detach().double().sum())
    return t


def within(manager):
    def wrap(stage):
        def changed(self, *args):
            with manager():
                return stage(self, *args)

        return changed

    return wrap


def checkpointed(stage):
    return lambda self, *args: torch.utils.checkpoint.checkpoint(stage, self, *args, use_reentrant=False)


def argument_written(stage):
    def changed(self, first, *rest):
        result = stage(self, first, *rest)
        written = first[0] if isinstance(first, tuple) else first
        written.mul_(2) if written.is_floating_point() else written.clamp_(max=1)
        return result

    return changed


def outside_of_the_graph(stage):
    return torch._dynamo.disable(stage)


CHANGES = {
    "hook": on_result(hooked),
    "gradient": on_result(lambda self, t: Doubling.apply(t) if t.is_floating_point() else t),
    "custom_op": on_result(lambda self, t: tripled(t) if t.is_floating_point() else t),
    "kept": on_result(kept),
    "watched": on_result(summed),
    "vmap": on_result(lambda self, t: torch.vmap(lambda row: row * 2)(t) if t.is_floating_point() else t),
    "clone": on_result(lambda self, t: t.clone()),
    "no_grad": within(torch.no_grad),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "checkpoint": checkpointed,
    "argument": argument_written,
    "break": outside_of_the_graph,
}
STAGES = ("sort", "offsets", "gather", "project_up", "activate", "project_down", "restore", "combine")


class Copying:
    """Mixed into a block, so that it may write into what it is given."""

    def forward(self, x, ids, weights):
        return self.experts(x * 1, ids.clone(), weights * 1)


class FusedWithAutograd(Fused):
    """With AOTAutograd, as the real backend: it takes writes into saved tensors out of the graph."""

    def _backend(self, gm, inputs):
        super()._backend(gm, inputs)
        return aot_eager(gm, inputs)


def check_source(block, stage, change):
    kind = given(block)
    changed = type("Mutant", (Copying, kind), {stage: CHANGES[change](getattr(kind, stage))})
    model = changed(HIDDEN, HIDDEN, EXPERTS, K, torch.float64)
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    ids, weights = routing(TOKENS, EXPERTS, K, torch.float64)
    x = tokens(TOKENS, HIDDEN, torch.float64)
    eager = twin(model)
    try:
        gradients(eager, eager, (x, ids, weights))
    except RuntimeError as error:
        assert "modified" in str(error)
        pytest.skip("autograd forbids it")
    torch._dynamo.reset()
    fused = (FusedWithAutograd if change == "argument" else Fused)(model, fullgraph=False, verify=False)
    compare(model, fused, x, ids, weights, tolerance=1e-7)
    if change == "kept":
        torch.testing.assert_close(model.kept, eager.kept)
    if change == "watched":  # by both runs of compare
        torch.testing.assert_close(model.seen, 2 * eager.seen)
    return fused


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_sources(stage, change):
    check_source(Biased, stage, change)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", STAGES)
def test_sources_of_two_matmuls(stage, change):
    check_source(Separate, stage, change)


def test_harmless_sources_are_fused():
    for stage, change in itertools.product(("sort", "gather", "project_up", "activate", "project_down"), ("clone",)):
        assert check_source(Biased, stage, change).report.fused == 1, stage
