"""``mok.verify`` runs a loop over experts beside the op that it was traced as."""

import pytest
import torch
from harness import assert_close, compare
from loops import Checkpointed, E, Hit, Mlp, Ranged, Sorted, Stacked
from test_module_lists import Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn

from mok_compile import explain
from mok_compile.integrations import loops

X, IDS, WEIGHTS, DTYPE, UP, DOWN, UP_BIAS, DOWN_BIAS, SPEC, ENGINE = range(10)


def lie(monkeypatch, change):
    """What is proven of a loop is changed on the way: `change` writes into the list of the op's operands."""
    honest = loops._written

    def written(*args):
        call, passed = honest(*args)
        call = list(call)
        change(call)
        return tuple(call), passed

    monkeypatch.setattr(loops, "_written", written)


def swap_gate_and_up(call):
    call[UP] = call[UP][::-1]


def other_activation(call):
    call[SPEC] = call[SPEC].replace("silu(gate)", "tanh(gate)")


def no_weights(call):
    call[WEIGHTS] = None


def other_experts(call):
    """The experts' matrices from the second one on, and the first one last."""
    (kind, (container, keys, *rest), *more), = call[DOWN]  # fmt: skip
    call[DOWN] = ((kind, (container, keys[1:] + keys[:1], *rest), *more),)


LIES = [swap_gate_and_up, other_activation, no_weights, other_experts]


@pytest.mark.parametrize("block", [Hit, Ranged, Sorted])
@pytest.mark.parametrize("change", LIES)
def test_a_wrong_proof_is_caught(change, block, monkeypatch, caplog):
    if block is Sorted and change is no_weights:
        pytest.skip("the loop itself has no weights")
    lie(monkeypatch, change)
    model = block()
    traced = Traced(model)
    compare(model, traced, tokens(2, 9))
    assert traced.report.fused == 0 and model in loops.distrusted
    assert "is not what it was proven to be" in caplog.text


def test_without_verify_it_is_not(monkeypatch):
    """The lies are lies."""
    lie(monkeypatch, other_activation)
    model, x = Hit(), tokens(2, 9)
    assert not torch.allclose(Traced(model, verify=False)(x), model(x))


def test_the_report_says_so(monkeypatch):
    lie(monkeypatch, other_activation)
    report = explain(nn.Sequential(Hit()), {"mok.verify": True})(tokens(2, 9))
    assert [(site.status, site.reason) for site in report.sites] == [("missed", "verify")]
    assert "relative error" in report.sites[0].detail


def test_a_wrong_gradient_is_caught(monkeypatch):
    """The output is right: only the experts' gradient is cut."""
    honest = loops._bank

    def cut(*args):
        return [t.detach() for t in honest(*args)]

    monkeypatch.setattr(loops, "_bank", cut)
    model = Hit()
    traced = Traced(model)
    compare(model, traced, tokens(2, 9))
    assert traced.report.fused == 0 and "gradient" in loops.distrusted[model]


def test_in_a_checkpoint(monkeypatch):
    x = tokens(2, 9)
    traced = Traced(Checkpointed(Hit()), fullgraph=True)
    traced(x)
    (site,) = traced.report.sites
    assert site.subgraph and 0 < site.verify_error < 1e-4
    torch._dynamo.reset()
    lie(monkeypatch, other_activation)
    model = Checkpointed(Hit())
    Traced(model)(x)
    assert model.block in loops.distrusted


def test_the_graph_is_the_same_afterwards():
    graphs = []
    for verify in (False, True):
        torch._dynamo.reset()
        traced = Traced(Hit(), fullgraph=True, verify=verify)
        traced(tokens(2, 9))
        graphs.append(traced.targets())
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("make", [Hit, Stacked, Sorted, lambda: Ranged([*(Mlp() for _ in range(E)), nn.Identity()])])
def test_what_is_right_stays(make):
    model = make()
    traced = Traced(model, dynamic=True, fullgraph=True)
    for length in (9, 5):
        compare(model, traced, tokens(2, length), tolerance=3e-5)
    assert traced.counts() == (1, 0)
    assert 0 < traced.report.sites[0].verify_error < 1e-4


def test_weights_from_outside_are_not_compared():
    """The module's own code cannot be run with the weights that `functional_call` lends it."""
    model, x = Hit(), tokens(2, 9)
    lent = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    lent = {name: nn.Parameter(p) for name, p in lent.items()}

    def run(x):
        return torch.func.functional_call(model, lent, (x,))

    traced = Traced(run)
    assert_close(traced(x), run(x))
    assert model not in loops.distrusted
