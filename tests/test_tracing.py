"""What Dynamo is told while it traces our code, in ways that every release of torch has."""

import pytest
import torch
from hf import make
from loops import Hit
from test_module_lists import Traced, tokens
from torch import nn
from torch._dynamo.variables import functions

from mok_compile.integrations import transformers
from mok_compile.integrations.tracing import constant_of_module


@pytest.fixture
def constants(monkeypatch):
    """The names of the constant functions that Dynamo calls; each with constants alone, as torch 2.10 and 2.11 want."""
    honest, called = functions.invoke_and_store_as_constant, []

    def call(tx, function, name, args, kwargs):
        assert all(argument.is_python_constant() for argument in (*args, *kwargs.values()))
        called.append(function.__name__)
        return honest(tx, function, name, args, kwargs)

    monkeypatch.setattr(functions, "invoke_and_store_as_constant", call)
    return called


def test_a_loop_is_planned_by_constants(constants):
    Traced(Hit(), fullgraph=True)(tokens(2, 9))
    assert constants


def test_an_implementation_is_called_by_constants(constants):
    transformers.register()
    model, ids = make("qwen3_moe", num_hidden_layers=1)
    model.set_experts_implementation("mok")
    torch.compile(model, backend="eager")(input_ids=ids)
    assert constants


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x + _length(self, x.dtype)


@constant_of_module
def _length(module, dtype):
    return len(module.name) if dtype == torch.float32 else 0


def test_the_constant_is_of_one_module():
    """Two modules of one class share their compiled code, but not what it was told of the first."""
    short, long, x = Named("a"), Named("abc"), torch.zeros(2)
    assert torch.equal(long(x), x + 3)
    for module in (short, long):
        module.compile(backend="eager", fullgraph=True)
    assert torch.equal(short(x), x + 1) and torch.equal(long(x), x + 3) and torch.equal(short(x.double()), x.double())
