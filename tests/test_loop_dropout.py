"""Dropout in a loop over experts: behind the experts it stays, drawn for all of them at once; inside it is named."""

import pytest
import torch
from harness import assert_close
from loops import E, H, K, Mlp, Plain, Ranged
from test_module_lists import Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F

from mok_compile import explain
from mok_compile.integrations import loops

RATE = 0.25


class Behind(nn.Module):
    """Dropout of each expert's weighted output, as NLLB-MoE has it."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.experts = nn.ModuleList([Mlp() for _ in range(E)])
        self.dropout = nn.Dropout(rate)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.finish(self.experts[e](x[t]), weights[t, k, None]).to(x.dtype))
        return y

    def finish(self, rows, weights):
        return self.dropout(rows * weights)


class BeforeTheWeights(Behind):
    def finish(self, rows, weights):
        return self.dropout(rows) * weights


class Rescaled(Behind):
    def finish(self, rows, weights):
        return self.dropout(rows * weights) * (1 - self.dropout.p)


class Functional(Behind):
    def finish(self, rows, weights):
        return F.dropout(rows * weights, self.dropout.p, self.training)


def routed(count=40, k=K):
    x = tokens(count)
    ids = torch.rand(count, E, generator=torch.Generator().manual_seed(3)).topk(k).indices
    return x, ids, torch.rand(count, k, generator=torch.Generator().manual_seed(4)).requires_grad_()


def slots(model, x, ids, weights):
    """What each slot contributes without dropout: [K, T, H]."""
    model.eval()
    found = []
    for k in range(ids.shape[1]):
        only = torch.zeros_like(weights)
        only[:, k] = 1
        found.append(model(x, ids, weights * only))
    model.train()
    return torch.stack(found)


@pytest.mark.parametrize("block", [Behind, BeforeTheWeights, Functional, Rescaled])
@pytest.mark.parametrize("k", [1, 3])
def test_each_number_is_kept_or_dropped(block, k):
    """Of each slot's numbers some are dropped and the others are scaled; gradients go through what was kept."""
    model, given = block(), routed(k=k)
    traced = Traced(model, fullgraph=True)
    found = traced(*given)
    assert traced.counts() == (1, 0), traced.report
    parts = slots(model, *given) / (1 - RATE)
    choices = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * k).view(-1, k)
    sums = torch.einsum("ck,kth->cth", choices, parts)
    off, which = (sums - found).abs().min(0)
    assert off.max() <= 1e-5 * parts.abs().max()
    kept = choices[which].permute(2, 0, 1)
    assert abs(kept.mean() - (1 - RATE)) < 0.05
    wanted = (parts * kept).sum(0)
    seed = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    leaves = [given[0], given[2], *model.parameters()]
    for a, b in zip(*(torch.autograd.grad(out, leaves, seed) for out in (found, wanted)), strict=True):
        assert_close(a, b, 1e-4)


def test_draws_anew_each_time_and_repeats_with_the_seed():
    model, given = Behind(), routed()
    traced = Traced(model, fullgraph=True)
    traced(*given)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(traced(*given))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_the_report_says_what_follows_the_experts():
    model = Behind()
    (site,) = explain(model)(*routed()).sites
    assert (site.status, site.reason) == ("fused", "post-norm") and "dropout" in site.combine_detail


def test_evaluation_and_a_rate_of_zero_are_ordinary_blocks():
    for model in (Behind().eval(), Behind(0.0)):
        torch._dynamo.reset()
        (site,) = explain(model)(*routed()).sites
        assert (site.status, site.reason in (None, "router")) == ("fused", True), site


def test_a_changed_rate_is_seen():
    model, given = Behind(), routed()
    traced = Traced(model)
    traced(*given)
    model.dropout.p = 0.9
    assert (traced(*given) == 0).double().mean() > 0.5
    assert traced.report.fused == 2


def test_any_number_of_tokens():
    model = Behind()
    traced = Traced(model, dynamic=True, fullgraph=True)
    for count in (40, 17, 5):
        x, ids, weights = routed(count)
        assert traced(x, ids, weights).shape == x.shape
    assert len(traced.graphs) == 1 and traced.report.fused == 1


def test_the_router_stays_outside():
    """Its number of experts for a token is not that of the op."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.block = nn.Linear(H, E, bias=False), Behind()

        def forward(self, x):
            weights, ids = self.gate(x).softmax(-1).topk(K)
            return self.block(x, ids, weights)

    (site,) = explain(Routed(), {"mok.verify": True})(tokens(12)).sites
    assert (site.status, site.op) == ("fused", "experts") and 0 < site.verify_error < 1e-4


def test_a_wrong_proof_is_caught(monkeypatch):
    honest = loops._written

    def written(*args):
        call, passed = honest(*args)
        call = list(call)
        call[4] = call[4][::-1]  # gate and up
        return tuple(call), passed

    monkeypatch.setattr(loops, "_written", written)
    model = Behind()
    Traced(model)(*routed())
    assert "relative error" in loops.distrusted[model]


# Refused


class Twice(Behind):
    def finish(self, rows, weights):
        return self.dropout(self.dropout(rows * weights))


class Shared(Behind):
    """One draw for two uses."""

    def finish(self, rows, weights):
        rows = self.dropout(rows * weights)
        return rows + rows


class Normed(Behind):
    def finish(self, rows, weights):
        return torch.tanh(self.dropout(rows)) * weights


class OfWeights(Behind):
    def finish(self, rows, weights):
        return rows * self.dropout(weights)


class OnTokens(Behind):
    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](self.dropout(x[t])) * weights[t, k, None])
        return y


@pytest.mark.parametrize("block", [Twice, Shared, Normed, OfWeights, OnTokens])
def test_dropout_elsewhere_keeps_the_loop(block):
    model, given = block(), routed()
    traced = Traced(model)
    found = []
    for run in (traced, traced, model):
        torch.manual_seed(3)
        found.append(run(*given))
    assert torch.equal(*found[1:]) and traced.report.fused == 0, traced.report


@pytest.mark.parametrize("block", [OnTokens, lambda: Ranged([Plain(dropout=0.5) for _ in range(E)])])
def test_dropout_inside_is_named(block):
    model = block()
    given = routed() if isinstance(model, Behind) else (tokens(2, 9),)
    (site,) = explain(model)(*given).sites
    assert (site.status, site.reason) == ("missed", "dropout") and "rate" in site.cure, site
    assert explain(model.eval())(*given).fused == 1


def test_evaluation():
    model, (x, ids, weights) = Behind().eval(), routed()
    traced = Traced(model, fullgraph=True)
    assert_close(traced(x, ids, weights), model(x, ids, weights))
