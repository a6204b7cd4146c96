"""mok.verify: a rule that lies is caught, whatever it lies about, and what it refuses stays as it was."""

from dataclasses import replace

import pytest
import torch
from blocks import Biased, Moe, Sentinel, Stack, Ungated, routing, tokens
from harness import Fused, check_fused, check_refused, compare

from mok_compile import activation as act
from mok_compile.passes import rules, site
from mok_compile.passes.verify import _error

aten = torch.ops.aten


def lie(monkeypatch, op, change):
    """Replaces the fact that the rule of `op` derives."""
    honest = rules.RULES[op]

    def rule(facts, value, *args, **kwargs):
        fact = honest(facts, value, *args, **kwargs)
        return change(fact) if fact is not None else None

    monkeypatch.setitem(rules.RULES, op, rule)


def test_wrong_activation(monkeypatch):
    lie(monkeypatch, aten.silu.default, lambda f: replace(f, expr=act.unary("sigmoid", f.expr.args[0])))
    check_refused(Moe(), tokens(), reason="verify", detail="relative error")


def test_halves_swapped(monkeypatch):
    swap = {"first": "second", "second": "first"}
    half = rules._half
    monkeypatch.setattr(rules, "_half", lambda fact, part: half(fact, swap.get(part, part)))
    check_refused(Moe(), tokens(), reason="verify")


def test_forgotten_weights(monkeypatch):
    lie(monkeypatch, aten.mul.Tensor, lambda f: replace(f, weight=None) if hasattr(f, "weight") else f)
    check_refused(Moe(), tokens(), reason="verify")


def test_forgotten_bias(monkeypatch):
    monkeypatch.setattr(rules, "_biased", lambda fact, bias: fact)
    check_refused(Biased(), tokens(), reason="verify")


def test_lie_about_gradients_only(monkeypatch):
    """The numbers of the forward pass are right; only the gradients show that a detach was ignored."""

    class Detached(Moe):
        def activate(self, h):
            return super().activate(h.detach())

    monkeypatch.setitem(rules.RULES, aten.detach.default, lambda facts, value, a: facts.of(a))
    compiled = check_refused(Detached(), tokens(), reason="verify", detail="gradient of")
    assert compiled.report.sites[0].status == "missed"


def test_wrong_operand(monkeypatch):
    honest = site._block

    def swapped(*args):
        found = honest(*args)
        object.__setattr__(found, "spec", replace(found.spec, layout="interleaved"))
        return found

    monkeypatch.setattr(site, "_block", swapped)
    check_refused(Moe(), tokens(), reason="verify")


def test_off_means_off(monkeypatch):
    """Without mok.verify the lie goes through: what the tests above prove is that verify caught it."""
    lie(monkeypatch, aten.silu.default, lambda f: replace(f, expr=act.unary("sigmoid", f.expr.args[0])))
    model, x = Moe(), tokens()
    fused = Fused(model, verify=False)
    with pytest.raises(AssertionError, match="relative error"):
        compare(model, fused, x)
    assert fused.counts() == (1, 0)
    assert fused.report.sites[0].verify_error is None


def test_one_of_two_blocks_is_withdrawn(monkeypatch):
    lie(monkeypatch, aten.pow.Tensor_Scalar, lambda f: replace(f, expr=f.expr.args[0]))
    model, x = Stack(Moe(), Ungated()), tokens()
    fused = Fused(model)
    compare(model, fused, x, tolerance=1e-4)
    assert fused.counts() == (1, 1), fused.report
    assert fused.reasons == ["verify"]
    assert fused.targets().count("mok.experts.default") == 1
    assert any("grouped_mm" in t for t in fused.targets())


def test_the_error_is_reported():
    fused = check_fused(Moe(), tokens())
    error = fused.report.sites[0].verify_error
    assert 0 < error < 1e-4
    assert "verified" in str(fused.report)


def test_verifying_changes_nothing():
    """Inputs that the graph writes, random state and gradients are as before."""

    class Writes(Moe):
        def forward(self, x):
            y = super().forward(x)
            x.add_(1)
            return y + torch.rand_like(y)

    model, x = Writes(), tokens(grad=False)
    fused = Fused(model)
    with torch.no_grad():
        outcomes = []
        for call in (model, fused):
            given = x.clone()
            torch.manual_seed(4)
            outcomes.append((call(given), given, torch.rand(3)))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)
    assert fused.counts() == (1, 0), fused.report
    assert all(p.grad is None for p in model.parameters())


def test_sentinels_are_no_difference():
    ids, weights = routing()
    ids[1, 0] = ids[4] = 5
    fused = check_fused(Sentinel(), tokens(), ids, weights)
    assert fused.report.sites[0].verify_error < 1e-4


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[3.0, 4.0]], [[3.0, 4.5]], 0.1),
        ([[float("nan"), 1.0]], [[float("nan"), 1.0]], 0.0),
        ([[float("nan"), 1.0]], [[0.0, 1.0]], float("inf")),
        ([[float("inf"), 1.0]], [[float("inf"), 1.0]], 0.0),
        ([[float("inf"), 1.0]], [[-float("inf"), 1.0]], float("inf")),
        ([[1.0, 1.0]], [[1.0], [1.0]], float("inf")),
    ],
)
def test_measure(old, new, error):
    assert _error(torch.tensor(old), torch.tensor(new), False) == pytest.approx(error)


def test_measure_without_one_side():
    assert _error(None, None, False) == 0.0
    assert _error(None, torch.zeros(2, 2), False) == 0.0
    assert _error(torch.ones(2, 2), None, False) == float("inf")
    assert _error(torch.ones(0, 2), torch.ones(0, 2), False) == 0.0
