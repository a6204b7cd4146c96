"""Routers of blocks whose experts run in a Python loop go into the op as those of any block."""

from dataclasses import replace

import pytest
import torch
from harness import compare
from loops import Checkpointed, E, Hit, Mlp, Ranged, Sorted, Stacked
from routers import CASES, Routed
from test_module_lists import Fewer, Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F

from mok_compile.passes.fusing import join
from mok_compile.router import Step
from mok_compile.spec import ExpertsSpec


class Listed(Routed):
    """One of the routers, and a list of experts."""

    def make_weights(self):
        super().make_weights()
        del self.up, self.down
        width = self.gate.shape[1]
        self.mlps = nn.ModuleList(self.make_expert(width) for _ in range(self.num_experts))

    def make_expert(self, width):
        return nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def experts(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.mlps[e](x[t]) * weights[t, k, None])
        return y


class WithRouting(Listed):
    """Returns ids and weights too."""

    def forward(self, x):
        ids, weights = self.route(x)
        return self.experts(x, ids, weights), ids, weights


def routed(traced):
    """The specification of the one router, which is in the op."""
    (site,) = traced.report.sites
    assert (site.op, site.reason, site.detail) == ("moe", None, "traced from a Python loop over the experts"), site
    assert traced.targets().count("mok.moe.default") == 1
    assert not any("mok.experts" in t or "topk" in t or "linear" in t for t in traced.targets()), traced.targets()
    return site.router


@pytest.mark.parametrize("name", CASES)
def test_every_router_is_taken_in(name):
    model = Listed(name)
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(14), tolerance=3e-4)  # normalising cancels most of a gradient
    assert routed(traced) == CASES[name].spec


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_ids_and_weights_are_eagers_to_the_bit(name, training):
    model = WithRouting(name)
    with torch.no_grad():  # many equal logits: torch.topk's own rule decides
        model.gate.copy_(torch.randint(0, 2, model.gate.shape))
        model.correction.copy_(torch.randint(0, 2, model.correction.shape))
    x = torch.randint(0, 2, (64, model.gate.shape[1])).float().requires_grad_(training)
    traced = Traced(model, fullgraph=True)
    with torch.set_grad_enabled(training):
        (_, *wanted), (_, *found) = model(x), traced(x)
    routed(traced)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


class Reference(Listed):
    """The block of DeepSeek's own repository: experts without tokens are skipped by their counts, one is shared."""

    def make_weights(self):
        super().make_weights()
        self.shared = self.make_expert(self.gate.shape[1])

    def experts(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] == 0:
                continue
            t, k = torch.where(ids == e)
            y[t] += self.mlps[e](x[t]) * weights[t, k, None]
        return y + self.shared(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_reference_code_of_deepseek(dynamic):
    model = Reference("deepseek_reference")
    traced = Traced(model, fullgraph=True, dynamic=dynamic)
    for count in (14, 9):
        compare(model, traced, tokens(count), tolerance=3e-4)
    sites = {(site.op, site.reason, site.router) for site in traced.report.sites}
    assert sites == {("moe", None, CASES["deepseek_reference"].spec)}, traced.report


class Loss(Listed):
    """Reads its logits and ids once more, as an auxiliary loss does."""

    def forward(self, x):
        logits = self.logits(x)
        weights, ids = torch.topk(logits.softmax(-1), self.k, -1)
        y = self.experts(x, ids, weights)
        hits = F.one_hot(ids, self.num_experts).float().mean(0)
        return y.sum() + (hits * logits.softmax(-1).mean(0)).sum() + logits.logsumexp(-1).square().mean()


def test_logits_come_from_the_op_with_their_gradient():
    model = Loss()
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(14), tolerance=3e-5)
    routed(traced)


class Inside(Listed):
    """Reads a value between scores and weights."""

    def forward(self, x):
        values, ids = torch.topk(self.logits(x).softmax(-1), self.k, -1)
        return self.experts(x, ids, values / values.sum(-1, keepdim=True)) * values.sum()


class Before(Listed):
    """Reads its ids before the experts run."""

    def experts(self, x, ids, weights):
        return super().experts(x * F.one_hot(ids, self.num_experts).float().mean(), ids, weights)


class Elsewhere(Listed):
    """Weights of the next token."""

    def route(self, x):
        ids, weights = super().route(x)
        return ids, weights.roll(1, 0)


class OtherIds(Listed):
    """Weights of other experts than those that are called."""

    def route(self, x):
        values, ids = torch.topk(self.logits(x), self.k, -1)
        table = torch.zeros(len(x), self.num_experts).scatter(1, ids, values.softmax(-1))
        return ids, table.gather(1, ids.flip(-1))


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (Inside, "is read outside of it"),
        (Before, "before the block ends"),
        (Elsewhere, "is no step of a router"),
        (OtherIds, "other ids"),
    ],
)
def test_the_router_stays_outside(block, detail):
    model = block()
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(14), tolerance=3e-5)
    (site,) = traced.report.sites
    assert (site.status, site.op, site.reason) == ("fused", "experts", "router") and detail in site.router_detail, site


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Stacked, "top 2, softmax"),  # through a table of every expert's score
        (Fewer, "sigmoid, top 2"),  # two of the experts that are chosen are never called
        (lambda: Ranged([*(Mlp() for _ in range(E)), nn.Identity()]), "sigmoid, top 2"),
        (Sorted, None),
    ],
    ids=["table", "fewer", "identity", "counted"],
)
def test_forms(block, words):
    model = block()
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(2, 9), tolerance=3e-5)
    assert [str(site.router) for site in traced.report.sites] == [str(words)], traced.report


def test_option_off():
    traced = Traced(Hit(), fullgraph=True, router=False)
    traced(tokens(2, 9))
    (site,) = traced.report.sites
    assert (site.op, site.reason, site.router_detail) == ("experts", None, "")


SPEC = ExpertsSpec("silu(gate) * up", "concat", "float32").to_json()


class OnesOwn(Routed):
    """Calls the op itself."""

    def experts(self, x, ids, weights):
        return torch.ops.mok.experts(x, ids, weights, [self.up], [self.down], [], [], SPEC, "portable")[0]


def test_a_call_of_ones_own_stays_as_it_is():
    """Only what was a loop is rewritten."""
    traced = Traced(OnesOwn(), fullgraph=True)
    traced(tokens(14))
    assert [(site.op, site.detail) for site in traced.report.sites] == [("experts", "the model calls the op itself")]


def test_a_call_of_ones_own_in_a_branch_of_the_graph_is_named():
    """The bodies of a branch are left as they are; the op that is called there runs."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = OnesOwn()

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.block, lambda x: x * 2, (x,))

    traced = Traced(Branch(), fullgraph=True)
    traced(tokens(14))
    (site,) = traced.report.sites
    assert (site.status, site.op, site.detail) == ("fused", "experts", "the model calls the op itself")
    assert site.subgraph.startswith("cond_true")


def test_a_checkpointed_loop():
    model = Checkpointed(Hit())
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(2, 9))
    assert [(site.op, bool(site.subgraph)) for site in traced.report.sites] == [("moe", True)]


def test_verify_keeps_a_wrong_router_out(monkeypatch):
    """The block stays fused: it is the router that differs."""
    from mok_compile.passes.blocks import router as router_pass

    honest = router_pass.find

    def lie(block, facts):
        found = honest(block, facts)
        return replace(found, spec=replace(found.spec, weights=(*found.spec.weights, Step("mul", (2.0,)))))

    monkeypatch.setattr("mok_compile.passes.fusing.fuse.find", lie)
    model = Hit()
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(2, 9))
    (site,) = traced.report.sites
    assert (site.status, site.op, site.reason) == ("fused", "experts", "router")
    assert "relative error" in site.router_detail


def test_a_router_that_fails_to_join_leaves_the_graph_as_it_was(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("as a bug of ours would")

    monkeypatch.setattr(join, "region_of", fail)
    model = Hit()
    traced = Traced(model, fullgraph=True)
    compare(model, traced, tokens(2, 9))
    (site,) = traced.report.sites
    assert (site.op, site.reason) == ("experts", "router") and "please report" in caplog.text
    assert traced.targets().count("mok.experts.default") == 1
