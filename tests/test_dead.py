"""What a graph computes for nobody reads nothing; what has an effect is not for nobody."""

import pytest
import torch
from harness import Fused, check_fused, check_refused
from test_batched import HIDDEN, INNER, Block, tokens
from torch import nn
from torch.nn import functional as F

from mok_compile.passes.blocks import site
from mok_compile.passes.graph.dead import dead
from mok_compile.passes.graph.view import View, name_of


class Watched(Block):
    """Something is computed from the activations, beside what the experts give."""

    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        inner = F.silu(gate) * up
        self.look(inner)
        rows = torch.einsum("tki,tkhi->tkh", inner, self.w2[ids])
        return (rows * weights.unsqueeze(-1)).sum(1)


class Adapter(Watched):
    """Low-rank, computed and not added."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, INNER)), nn.Parameter(torch.randn(HIDDEN, 2))
        self.double()

    def look(self, inner):
        F.linear(F.linear(F.dropout(inner.to(self.a.dtype), 0.5, False), self.a), self.b).contiguous()


class OneOfTwo(Watched):
    def look(self, inner):
        inner.max(-1).values.abs()


class Logits(Watched):
    """Before the block ends."""

    def forward(self, x):
        logits = self.gate(x)
        weights, ids = torch.topk(logits.softmax(-1), self.k, -1)
        logits.logsumexp(-1).square()
        return self.mix(x, ids, weights / weights.sum(-1, keepdim=True))

    def look(self, inner):
        pass


@pytest.mark.parametrize("block", [Adapter, OneOfTwo, Logits])
def test_what_nobody_needs_reads_nothing(block):
    fused = check_fused(block(), tokens(), tolerance=1e-9)
    assert fused.report.sites[0].router is not None, fused.report


class Drawn(Watched):
    """Random numbers of which nobody has any use: the next ones are others."""

    def look(self, inner):
        torch.rand_like(inner).abs()


class Counted(Watched):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(INNER).double())

    def look(self, inner):
        self.seen.add_(inner.detach().sum((0, 1)))


class Normed(Watched):
    """Its running statistics alone are wanted, which no schema says that it writes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(INNER).double()
        self.norm.running_var.zero_()

    def look(self, inner):
        self.norm(inner.detach().flatten(0, 1))


class NormedChannels(Normed):
    def look(self, inner):
        F.instance_norm(inner.detach().mT, self.norm.running_mean, self.norm.running_var)


@pytest.mark.parametrize("block", [Drawn, Counted, Normed, NormedChannels])
def test_effects_are_kept(block):
    check_refused(block(), tokens(), reason="interior-use")
    model, left = block(), []
    for run in (model, Fused(model)):
        torch.manual_seed(3)
        run(tokens())
        left.append((torch.rand(2), [buffer.clone() for buffer in model.buffers()]))
        for buffer in model.buffers():
            buffer.zero_()
    torch.testing.assert_close(left[0], left[1])


def dead_in(run, *inputs, **patch):
    """What the graph of `run` calls for nobody."""
    found = []

    def backend(gm, inputs):
        found.append(dead(gm.graph, View(gm.graph)))
        return gm.forward

    with torch._dynamo.config.patch(**patch):
        torch.compile(run, backend=backend, fullgraph=True)(*inputs)
    return [name_of(node) for node in found[0]]


def test_what_is_dead():
    def run(x, w, table):
        y = x.detach()
        y.requires_grad_()  # a node that nobody reads
        x.bernoulli()
        table[:2].add_(1)
        table[2:].square()
        torch.topk(w, 2)[0].to(w.dtype).contiguous()
        return x @ w + y.detach()

    wanted = ["contiguous", "to", "getitem", "topk", "square", "getitem"]
    assert dead_in(run, torch.rand(3, 3), torch.rand(3, 3), torch.rand(4)) == wanted


def test_checks_of_what_only_the_data_tells_are_not():
    def run(x):
        torch._check((x > 1).sum().item() < 7)
        return x + 1

    assert dead_in(run, torch.rand(3), capture_scalar_outputs=True) == []


def test_a_graph_without_experts_stays_as_it_is():
    def run(x, w):
        (x * 2).abs()
        return x @ w

    fused = Fused(run)
    fused(torch.randn(3, 3), torch.randn(3, 3))
    assert any("abs" in target for target in fused.targets())


class Idle(Watched):
    """What reads nothing that was computed is in nobody's way."""

    def look(self, inner):
        torch.arange(7).square()


def test_a_graph_is_not_looked_at_twice_for_nothing(monkeypatch):
    views = []
    monkeypatch.setattr(site, "View", lambda graph: views.append(View(graph)) or views[-1])
    for block, looks in ((Idle, 1), (Adapter, 2)):
        check_fused(block(), tokens(), tolerance=1e-9)
        assert len(views) == looks
        views.clear()
