"""Modules that change behind a compiled loop over experts, and loops that change something themselves."""

import collections
import copy
import enum
import functools
import random
import types

import loops
import pytest
import torch
from harness import assert_close, compare
from loops import FORMS, E, H, Hit, I, Mlp, Plain, Ranged
from test_module_lists import Traced, tokens
from torch import nn
from torch.nn import functional as F

BETA = 1.7


class Limited(Mlp):
    def __init__(self, limit=0.7):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)).clamp(max=self.limit) * self.up_proj(x))


class Settings:
    def __init__(self):
        self.beta = 1.7

    def __call__(self, x):
        return x * torch.sigmoid(self.beta * x)


class Configured(Mlp):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(self.config.beta * gate) * self.up_proj(x))


class Called(Configured):
    def forward(self, x):
        return self.down_proj(self.config(self.gate_proj(x)) * self.up_proj(x))


class Kind(enum.Enum):
    SILU, TANH = 1, 2


class Kinds(Mlp):
    kind = Kind.SILU

    def forward(self, x):
        act = F.silu if self.kind is Kind.SILU else torch.tanh
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class Table(Mlp):
    """What it does is in a dictionary and a list."""

    def __init__(self):
        super().__init__()
        self.settings, self.acts = {"beta": 1.7}, [F.silu, torch.sigmoid]

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * self.acts[1](self.settings["beta"] * gate) * self.up_proj(x))


class Function(Mlp):
    def __init__(self):
        super().__init__()
        self.act = F.silu

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Global(Mlp):
    def forward(self, x):
        return self.down_proj(_swish(self.gate_proj(x)) * self.up_proj(x))


def _swish(x):
    return x * torch.sigmoid(BETA * x)


class Sigmoid(Mlp):
    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


def of(make):
    return lambda: Hit([make() for _ in range(E)])


def sharing(cls):
    config = Settings()
    return lambda: Hit([cls(config) for _ in range(E)])


def tied():
    block = Hit()
    for expert in block.experts:
        expert.up_proj.weight = expert.gate_proj.weight
    return block


def every(change):
    def apply(block):
        for expert in block.experts:
            change(expert)

    return apply


def one(change):
    return lambda block: change(block.experts[2])


def limit(expert):
    expert.limit = 0.05


def other_act(expert):
    expert.act_fn = nn.Tanh()


def other_function(expert):
    expert.act = torch.tanh


def forward(expert):
    expert.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 3, expert)


def inner_forward(expert):
    expert.act_fn.forward = torch.tanh


def bias(expert):
    expert.down_proj.bias = nn.Parameter(torch.linspace(-1, 1, H))


def wrap(expert):
    expert.gate_proj = nn.Sequential(expert.gate_proj, nn.ReLU())


def tie(expert):
    expert.up_proj.weight = expert.gate_proj.weight


def untie(expert):
    expert.up_proj.weight = nn.Parameter(torch.linspace(-1, 1, H * I).view(I, H))


def beta(block):
    block.experts[0].config.beta = 0.3


def kind(expert):
    expert.kind = Kind.TANH


def entry(expert):
    expert.settings["beta"] = 0.3


def replace(cls):
    def apply(block):
        torch.manual_seed(4)
        block.experts[3] = cls()

    return apply


def reverse(block):
    block.experts = nn.ModuleList(list(block.experts)[::-1])


CHANGES = {
    "a number of all": (of(Limited), every(limit)),
    "a number of one": (of(Limited), one(limit)),
    "an activation of all": (Hit, every(other_act)),
    "an activation of one": (Hit, one(other_act)),
    "a function of all": (of(Function), every(other_function)),
    "an enumeration": (of(Kinds), every(kind)),
    "an entry of a dictionary": (of(Table), every(entry)),
    "a number in an object": (sharing(Configured), beta),
    "a number in a callable object": (sharing(Called), beta),
    "the class of one": (Hit, replace(Sigmoid)),
    "one": (Hit, replace(Mlp)),
    "their order": (Hit, reverse),
    "forward of one": (Hit, one(forward)),
    "forward of activations": (Hit, every(inner_forward)),
    "biases of all": (Hit, every(bias)),
    "a bias of one": (Hit, one(bias)),
    "a linear of all": (Hit, every(wrap)),
    "tied weights": (Hit, one(tie)),
    "untied weights": (tied, one(untie)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_experts_are_changes(what):
    make, change = CHANGES[what]
    block, x = make(), tokens(2, 9)
    traced = Traced(block)
    compare(block, traced, x)
    assert traced.report.fused == 1, traced.report
    change(block)
    compare(block, traced, x)


# What the code reads without its name being in it, or not from a module


class Scaled(Mlp):
    """`scale()` says by how much the gate is scaled."""

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x) * self.scale()) * self.up_proj(x))


class Setup:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)


class OfClass(Scaled):
    def scale(self):
        return Setup.scale


class OfModule(Scaled):
    def scale(self):
        return loops.E


class OfEnclosing(Scaled):
    def scale(self):
        return self.read()


class PutTogether(Scaled):
    scale_0 = 1.0

    def __init__(self):
        super().__init__()
        self.act_a = nn.SiLU()

    def scale(self):
        return getattr(self, "scale_" + str(0))


class Children(Mlp):
    def forward(self, x):
        y = self.gate_proj(x)
        for name, child in self.named_children():
            if name.startswith("act"):
                y = child(y)
        return self.down_proj(y * self.up_proj(x))


class Missing(Scaled):
    """An attribute that is not there is looked up elsewhere."""

    def __init__(self):
        super().__init__()
        self.entries = {"factor": 1.0}

    def __getattr__(self, name):
        return self.__dict__["entries"]["factor"] if name == "factor" else super().__getattr__(name)

    def scale(self):
        return self.factor


class Default(Mlp):
    def forward(self, x, scale=1.0):
        return self.down_proj(F.silu(self.gate_proj(x) * scale) * self.up_proj(x))


class Swish:
    beta = 1.0

    def __call__(self, x):
        return x * torch.sigmoid(self.beta * x)


class Makes(Mlp):
    def forward(self, x):
        return self.down_proj(Swish()(self.gate_proj(x)) * self.up_proj(x))


class Takes(Mlp):
    """Its activation is what is in `acts`."""

    acts = None

    def forward(self, x):
        return self.down_proj(self.acts[0](self.gate_proj(x)) * self.up_proj(x))


def enclosed(value):
    """A function that returns `value`, and one to give it another."""

    def get():
        return value

    def put(other):
        nonlocal value
        value = other

    return get, put


def taking(act):
    block = Hit([Takes() for _ in range(E)])
    for expert in block.experts:
        expert.acts = (act,)
    return block


def scaling(get):
    block = Hit([OfEnclosing() for _ in range(E)])
    for expert in block.experts:
        expert.read = get
    return block


def scaled_by(settings, x):
    return F.silu(x * settings["scale"])


def by_default(x, scale=1.0):
    return F.silu(x * scale)


def test_state_outside_of_modules(monkeypatch):
    get, put = enclosed(1.0)
    held, _ = enclosed({"scale": 1.0})
    settings, queue, slotted = {"scale": 1.0}, collections.UserDict(scale=1.0), Slotted()
    slotted.scale = 1.0
    callables = [Swish()]
    callables[0].beta = 1.0
    cases = {
        "a class": (of(OfClass), lambda: monkeypatch.setattr(Setup, "scale", 3.0)),
        "a module": (of(OfModule), lambda: monkeypatch.setattr(loops, "E", 0.1)),
        "a closure": (lambda: scaling(get), lambda: put(3.0)),
        "what a closure holds": (lambda: scaling(lambda: held()["scale"]), lambda: held().update(scale=3.0)),
        "a name put together": (of(PutTogether), lambda: monkeypatch.setattr(PutTogether, "scale_0", 3.0)),
        "__getattr__": (of(Missing), every(lambda e: e.entries.update(factor=3.0))),
        "a default": (of(Default), lambda: monkeypatch.setattr(Default.forward, "__defaults__", (3.0,))),
        "a class that is made": (of(Makes), lambda: monkeypatch.setattr(Swish, "beta", 3.0)),
        "a method": (of(Sigmoid), lambda: monkeypatch.setattr(Sigmoid, "forward", Mlp.forward)),
        "a partial": (lambda: taking(functools.partial(scaled_by, settings)), lambda: settings.update(scale=3.0)),
        "another mapping": (lambda: taking(functools.partial(scaled_by, queue)), lambda: queue.update(scale=3.0)),
        "a default of a function": (
            lambda: taking(by_default),
            lambda: monkeypatch.setattr(by_default, "__defaults__", (3.0,)),
        ),
        "slots": (lambda: scaling(lambda: slotted.scale), lambda: setattr(slotted, "scale", 3.0)),
        "an object in a list": (lambda: taking(callables[0]), lambda: setattr(callables[0], "beta", 3.0)),
        "children": (with_children, every(lambda e: setattr(e, "act", nn.Tanh()))),
        "more children": (with_children, every(lambda e: e.add_module("act_2", nn.Tanh()))),
    }
    wrong = {}
    for what, (make, change) in cases.items():
        torch._dynamo.reset()
        block, x = make(), tokens(2, 9)
        traced = Traced(block, verify=False)
        compare(block, traced, x)
        assert traced.report.fused == 1, (what, traced.report)
        change(block) if change.__code__.co_argcount else change()
        try:
            compare(block, traced, x)
        except AssertionError as error:
            wrong[what] = str(error)
    assert not wrong


def with_children():
    block = Hit([Children() for _ in range(E)])
    for expert in block.experts:
        expert.act = expert.act_fn
        del expert.act_fn
    return block


@pytest.mark.parametrize("where", ["expert", "inside"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_that_come_later(kind, where):
    """A loop that stays one runs them, so they take the loop back to what it was."""
    block, x = Hit(), tokens(2, 9)
    traced = Traced(block)
    compare(block, traced, x)
    assert traced.report.fused == 1
    module = block.experts[1] if where == "expert" else block.experts[1].up_proj
    calls = []
    handle = getattr(module, f"register_{kind}")(lambda *_: calls.append(0))
    traced(x).sum().backward()
    assert len(calls) == 1
    handle.remove()
    block.zero_grad()
    compare(block, traced, x)


class Optional(Hit):
    """Has an attribute of the name of a parameter of its experts, and it is None."""

    def __init__(self):
        super().__init__()
        self.bias = None


def test_an_attribute_of_the_block_is_none():
    block = Optional()
    traced = Traced(block, fullgraph=True)
    compare(block, traced, tokens(2, 9))
    assert traced.report.fused == 1, traced.report


def test_a_global_changes(monkeypatch):
    block, x = of(Global)(), tokens(2, 9)
    traced = Traced(block)
    compare(block, traced, x)
    monkeypatch.setitem(globals(), "BETA", 0.3)
    compare(block, traced, x)
    assert traced.report.fused == 2, traced.report


def test_a_number_changes_again_and_again():
    """Not only the first change: Dynamo takes a number that has changed for one that varies."""
    block, x = of(Limited)(), tokens(2, 9)
    traced = Traced(block)
    for value in (0.7, 0.1, 0.3, 0.05):
        for expert in block.experts:
            expert.limit = value
        compare(block, traced, x, tolerance=5e-5)
    assert traced.report.fused == 4


@pytest.mark.parametrize("change", [every(lambda e: e.train()), one(lambda e: e.dropout.train())])
def test_experts_alone_go_to_training(change):
    block, x = Ranged([Plain(dropout=0.5) for _ in range(E)]).eval(), tokens(2, 9)
    traced = Traced(block)
    compare(block, traced, x)
    change(block)
    torch.manual_seed(3)
    wanted = block(x)
    torch.manual_seed(3)
    assert_close(traced(x), wanted)


@pytest.mark.parametrize("where", ["first", "third"])
def test_weights_tied_in_one_expert(where):
    block = Hit()
    tie(block.experts[0 if where == "first" else 2])
    traced = Traced(block, fullgraph=True)
    compare(block, traced, tokens(2, 9))
    assert traced.report.fused == 1


def test_a_part_in_two_places_of_the_first_expert():
    block = Hit()
    block.experts[0].up_proj = block.experts[0].gate_proj
    traced = Traced(block)
    compare(block, traced, tokens(2, 9))
    assert traced.report.fused == 0


# Blocks that change what their experts are before they call them


class SetsLimit(Hit):
    def forward(self, x):
        for expert in self.experts:
            expert.limit = 0.05 if x.shape[1] > 9 else 0.7
        return super().forward(x)


class SetsActivation(Hit):
    def forward(self, x):
        act = nn.Tanh() if x.shape[1] > 9 else nn.SiLU()
        for expert in self.experts:
            expert.act_fn = act
        return super().forward(x)


class SetsGlobal(Hit):
    def forward(self, x):
        global BETA
        BETA = 0.2 if x.shape[1] > 9 else 1.7
        return super().forward(x)


class Swaps(Hit):
    def forward(self, x):
        if x.shape[1] > 9:
            self.experts[0], self.experts[1] = self.experts[1], self.experts[0]
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SetsLimit([Limited() for _ in range(E)]),
        SetsActivation,
        lambda: SetsGlobal([Global() for _ in range(E)]),
        Swaps,
    ],
)
def test_changed_before_they_are_called(make, monkeypatch):
    monkeypatch.setitem(globals(), "BETA", BETA)
    block = make()
    other = copy.deepcopy(block)
    traced = Traced(block)
    for length in (9, 12, 9):
        x = tokens(2, length)
        assert_close(traced(x), other(x))


def test_training_is_switched_before_they_are_called():
    class Switches(Ranged):
        def forward(self, x):
            self.experts.train(x.shape[1] > 9)
            return super().forward(x)

    block = Switches([Plain(dropout=0.5) for _ in range(E)])
    other = copy.deepcopy(block)
    traced = Traced(block)
    for length in (9, 12, 9):
        x = tokens(2, length)
        torch.manual_seed(3)
        wanted = other(x)
        torch.manual_seed(3)
        assert_close(traced(x), wanted)


def test_notes_of_the_block_itself_are_no_change():
    class Notes(Hit):
        def forward(self, x):
            self.last_length = x.shape[1]
            return super().forward(x)

    block = Notes()
    traced = Traced(block, fullgraph=True)
    compare(block, traced, tokens(2, 9))
    assert traced.report.fused == 1 and block.last_length == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functional_call(dtype):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Hit()

        def forward(self, x):
            other = {name: p.to(dtype) * 2 for name, p in self.block.named_parameters()}
            return torch.func.functional_call(self.block, other, (x.to(dtype),))

    model = Outer()
    traced = Traced(model)
    compare(model, traced, tokens(2, 9))
    assert traced.report.fused == 1, traced.report


# Experts that leave something behind


class CountsInDict(Mlp):
    def __init__(self):
        super().__init__()
        self.stats = {"calls": 0}

    def forward(self, x):
        self.stats["calls"] += 1
        return super().forward(x)

    def seen(self):
        return self.stats["calls"]


class CountsInObject(Mlp):
    tracker = types.SimpleNamespace(calls=0)

    def forward(self, x):
        self.tracker.calls += 1
        return super().forward(x)

    def seen(self):
        return self.tracker.calls


class CountsInClass(Mlp):
    calls = 0

    def forward(self, x):
        CountsInClass.calls += 1
        return super().forward(x)

    def seen(self):
        return CountsInClass.calls


CALLS = []


class Logs(Mlp):
    def forward(self, x):
        CALLS.append(1)
        return super().forward(x)

    def seen(self):
        return len(CALLS)


def counted(call, experts):
    """By how much each call of two counts up what the experts have seen."""
    steps = []
    for _ in range(2):
        before = [expert.seen() for expert in experts]
        call(tokens(2, 9))
        steps.append([expert.seen() - b for expert, b in zip(experts, before, strict=True)])
    return steps


@pytest.mark.parametrize("cls", [CountsInDict, CountsInObject, CountsInClass, Logs])
def test_calls_are_counted_as_without_us(cls):
    """Which is as in eager, but for class attributes in torch 2.10 and 2.11."""
    block = of(cls)()
    wanted = counted(torch.compile(block, backend="eager"), block.experts)
    torch._dynamo.reset()
    traced = Traced(block)
    assert counted(traced, block.experts) == wanted
    assert any(map(any, wanted)) and traced.report.fused == 0
    if cls is not CountsInClass:
        assert wanted == counted(block, block.experts)


class Buffered(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.count(x)
        return super().forward(x)


class AddsUp(Buffered):
    def count(self, x):
        self.rows += x.shape[0]


class Replaces(Buffered):
    def count(self, x):
        self.rows = self.rows + 1


class Largest(Buffered):
    def count(self, x):
        with torch.no_grad():
            self.rows.copy_(torch.maximum(self.rows, x.abs().max()))


class PastAutograd(Buffered):
    def count(self, x):
        self.rows.data.add_(1)


@pytest.mark.parametrize("cls", [AddsUp, Replaces, Largest, PastAutograd])
def test_buffers_are_what_they_are_in_eager(cls):
    block, x = of(cls)(), tokens(2, 9)
    other = copy.deepcopy(block)
    traced = Traced(block)
    for _ in range(2):
        assert_close(traced(x), other(x))
    assert other.experts[0].rows > 0
    assert [e.rows.item() for e in block.experts] == [e.rows.item() for e in other.experts]


class Drops(Mlp):
    def forward(self, x):
        return super().forward(x) * (random.random() < 0.5)


def test_random_numbers_of_python():
    block, x = of(Drops)(), tokens(2, 9)
    traced = Traced(block)
    for seed in range(4):
        random.seed(seed)
        wanted, left = block(x), random.random()
        random.seed(seed)
        assert_close(traced(x), wanted)
        assert random.random() == left


def test_a_proof_leaves_python_s_random_numbers_alone():
    block, x = FORMS["hit"](), tokens(2, 9)
    random.seed(1)
    wanted = random.random()
    random.seed(1)
    Traced(block)(x)
    assert random.random() == wanted
