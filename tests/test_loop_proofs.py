"""Blocks of one make share one proof of their loop, and blocks that differ in anything have their own."""

import pytest
import torch
from blocks import Stack
from harness import compare
from loops import FORMS, E, H, Hit, Mlp
from test_changes import CHANGES
from test_module_lists import Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn

from mok_compile.integrations import proofs
from mok_compile.passes.loops import iteration


@pytest.fixture
def proven(monkeypatch):
    """The modules whose loop was proven on its own."""
    owners, honest = [], iteration.understand

    def understand(cut, owner, *args):
        owners.append(owner)
        return honest(cut, owner, *args)

    monkeypatch.setattr(iteration, "understand", understand)
    return owners


def check(model, x=None, **settings):
    traced = Traced(model, **settings)
    compare(model, traced, tokens(2, 9) if x is None else x, tolerance=5e-5)
    return traced


@pytest.mark.parametrize("form", FORMS)
def test_one_proof_for_all_layers(form, proven):
    model = Stack(*(FORMS[form]() for _ in range(3)))
    traced = check(model, fullgraph=True)
    assert traced.report.fused == 3, traced.report
    assert proven == [model.blocks[0]]


def test_with_any_number_of_tokens(proven):
    model = Stack(Hit(), Hit())
    traced = Traced(model, dynamic=True, fullgraph=True)
    for length in (9, 5):
        compare(model, traced, tokens(2, length), tolerance=5e-5)
    assert traced.counts() == (2, 0) and len(proven) == 1


def test_the_number_of_a_layer_is_none_of_its_loop_s_business(proven):
    model = Stack(Hit(), Hit())
    for number, block in enumerate(model.blocks):
        block.layer_idx = number
    assert check(model).report.fused == 2
    assert len(proven) == 1


@pytest.mark.parametrize("what", CHANGES)
def test_a_layer_that_differs_has_its_own(what, proven):
    """What makes a compiled block be traced anew keeps it from sharing its neighbour's proof."""
    make, change = CHANGES[what]
    model = Stack(make(), make())
    change(model.blocks[1])
    check(model)
    # The same make after all, or a change of an object that both layers hold.
    same = what in ("one", "their order", "a number in an object", "a number in a callable object")
    assert len(set(map(id, proven))) == (1 if same else 2)


def hook(block):
    block.experts[1].register_forward_hook(lambda module, args, out: out * 2)


def frozen_class(block):
    class Loud(Mlp):
        def forward(self, x):
            return super().forward(x) * 2

    block.experts = nn.ModuleList(Loud() for _ in range(E))


def double(block):
    block.double()
    block.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    block.register_forward_hook(lambda module, args, out: out.float())


def one_module(block):
    """One expert in two places."""
    block.experts[3] = block.experts[1]


DIFFERENT = {
    "a hook": hook,
    "their class": frozen_class,
    "their dtype": double,
    "their number": lambda block: (block.experts.append(Mlp()), setattr(block, "num_experts", E + 1)),
    "slots": lambda block: setattr(block, "top_k", 3),
    "one module twice": one_module,
    "a buffer": lambda block: [expert.register_buffer("scale", torch.ones(H)) for expert in block.experts],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_other_differences(what, proven):
    model = Stack(Hit(), Hit())
    DIFFERENT[what](model.blocks[1])
    if what == "their number":
        model.blocks[1].gate = nn.Linear(H, E + 1, bias=False)
    check(model)
    assert model.blocks[1] in proven or what == "a hook"


class Modes(Stack):
    def forward(self, x):
        with torch.no_grad():
            x = x + self.blocks[0](x)
        x = x + self.blocks[1](x)
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.blocks[2](x).float()


def test_modes_are_part_of_it(proven):
    model = Modes(Hit(), Hit(), Hit())
    traced = Traced(model, fullgraph=True)
    x = tokens(2, 9)
    assert torch.allclose(model(x), traced(x), atol=0.05)
    assert len(proven) == 3


def test_training_of_one_layer(proven):
    model = Stack(Hit(), Hit())
    for block in model.blocks:
        for expert in block.experts:
            expert.act_fn = nn.Dropout(0.5)
    model.blocks[0].eval()
    traced = Traced(model)
    traced(tokens(2, 9))
    assert len(set(map(id, proven))) == 2 and traced.report.fused == 1, traced.report


def test_a_refusal_is_shared_with_its_reason(proven):
    from mok_compile.integrations.loops import refused

    model = Stack(Hit(), Hit())
    for block in model.blocks:
        for expert in block.experts:
            expert.act_fn = nn.Dropout(0.5)
    Traced(model)(tokens(2, 9))
    assert [refused[block] for block in model.blocks] == [refused[model.blocks[0]]] * 2


def test_nothing_is_kept_after_the_compile():
    check(Stack(Hit(), Hit()))
    assert not proofs._known


def test_code_that_changes_between_two_compiles(monkeypatch, proven):
    """A method of a class is in no description: the next compile proves anew."""
    model = Stack(Hit(), Hit())
    assert check(model).report.fused == 2
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)))
    torch._dynamo.reset()
    assert check(model).report.fused == 2
    assert len(proven) == 2
