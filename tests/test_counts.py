"""Routers that hand the experts' token counts on as Python numbers, in the style of Granite MoE, or as a tensor by
which the experts take their rows, in the style of Aria."""

import pytest
import torch
from harness import assert_close, compare, over_ranges
from test_module_lists import Traced, tokens
from torch import nn
from torch.nn import functional as F

H, I, E, K = 16, 12, 5, 2


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(H, E, bias=False)

    def forward(self, x):
        logits, ids = self.layer(x).float().topk(K, dim=1)
        gates = torch.softmax(logits, dim=1).type_as(x)
        sizes = torch.zeros([x.shape[0], E], dtype=x.dtype).scatter(1, ids, 1).long().sum(0).tolist()
        order = ids.flatten().sort(0)[1]
        return order.div(K, rounding_mode="trunc"), gates.flatten()[order], sizes


class Linears(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, columns, rows) * 0.3)

    def forward(self, x, sizes):
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes), self.weight, strict=True)])


class Block(nn.Module):
    def __init__(self, odd=False):
        super().__init__()
        self.router, self.up, self.down, self.odd = Router(), Linears(H, 2 * I), Linears(I, H), odd

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, H)
        index, gates, sizes = self.router(x)
        gate, up = self.up(x[index], sizes).chunk(2, dim=-1)
        mixed = F.silu(gate) * up
        if self.odd:
            mixed = mixed - mixed.mean(0)
        out = self.down(mixed, sizes) * gates[:, None]
        return torch.zeros_like(x).index_add(0, index, out).view(shape)


class CountedApart(Block):
    """Counts become numbers in a method of the block's, far from the router's choice, as in the first JetMoE."""

    def __init__(self, odd=False):
        super().__init__(odd)
        self.router = nn.Linear(H, E, bias=False)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, H)
        values, ids = self.choose(x)
        order = ids.flatten().argsort()
        sizes = self.count(ids)
        gate, up = self.up(x[order // K], sizes).chunk(2, dim=-1)
        mixed = F.silu(gate) * up
        if self.odd:
            mixed = mixed - mixed.mean(0)
        out = self.down(mixed, sizes) * values.softmax(-1).flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // K, out).view(shape)

    def choose(self, x):
        return self.router(x).topk(K, dim=1)

    def count(self, ids):
        experts = F.one_hot(ids.flatten(), E)
        return experts.sum(0).tolist()


def project(rows, weight, counts):
    """A function, which no door leads to."""
    out = torch.zeros(rows.shape[0], weight.shape[-1], dtype=rows.dtype)
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), torch.cumsum(counts, dim=0)))
    for e in range(weight.shape[0]):
        out[bounds[e] : bounds[e + 1]] = torch.matmul(rows[bounds[e] : bounds[e + 1]], weight[e])
    return out


class Ranges(nn.Module):
    def __init__(self, odd=False):
        super().__init__()
        self.router, self.odd = nn.Linear(H, E, bias=False), odd
        self.up, self.down = nn.Parameter(torch.randn(E, H, 2 * I) * 0.3), nn.Parameter(torch.randn(E, I, H) * 0.3)

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, H)
        logits, ids = self.choose(x)
        counts = torch.histc(ids.flatten().to(torch.float32), bins=E, min=0, max=E - 1).to(ids.dtype)
        order = torch.argsort(ids.view(-1))
        gate, up = project(x.index_select(0, order // K), self.up, counts.cpu()).chunk(2, dim=-1)
        mixed = F.silu(gate) * up
        if self.odd:
            mixed = mixed - mixed.mean(0)
        rows = project(mixed, self.down, counts.cpu())
        out = torch.zeros_like(rows).index_copy_(0, order, rows).view(-1, K, H)
        return (out * F.softmax(logits, dim=-1).unsqueeze(-1)).sum(dim=1).view(shape)

    def choose(self, x):
        return torch.topk(self.router(x), k=K, dim=1)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    assert not torch._dynamo.config.capture_scalar_outputs
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Block, CountedApart, pytest.param(Ranges, marks=over_ranges)])
@pytest.mark.parametrize("training", [True, False])
def test_counts_stay_in_the_graph(kind, training):
    block = kind().train(training)
    traced = Traced(block)
    compare(block, traced, tokens(2, 9))
    assert traced.counts() == (1, 0) and len(traced.graphs) == 1, traced.report


@pytest.mark.parametrize("kind", [Block, Ranges])
def test_idle_experts(kind):
    block = kind().double()  # the router's gradient is a small rest of large terms
    with torch.no_grad():
        next(block.router.parameters()).zero_()
    compare(block, Traced(block), tokens(2, 9).double())


@pytest.mark.parametrize("kind", [Block, CountedApart, Ranges])
def test_what_is_not_fused_compiles_as_ever(kind):
    """The graph breaks at the counts, as under any other backend."""
    block, x, graphs = kind(odd=True), tokens(2, 9), []

    def other(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(block, backend=other)(x)
    torch._dynamo.reset()
    traced = Traced(block)
    assert_close(traced(x), block(x))
    assert traced.report.fused == 0 and len(traced.graphs) == len(graphs) > 1


@torch._dynamo.assume_constant_result
def captured():
    return torch._dynamo.config.capture_scalar_outputs


class AsksForFlag(nn.Module):
    """Other calls with the flag than without, and the same numbers."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        if captured():
            x = torch.sub(torch.add(x, 1), 1)
        else:
            for _ in range(3):
                x = torch.mul(x, 1)
        return self.block(torch.neg(x))


@pytest.mark.parametrize("kind", [Block, pytest.param(Ranges, marks=over_ranges)])
@pytest.mark.parametrize("odd", [False, True])
def test_another_way_with_the_flag(kind, odd):
    """The new trace need not meet the instructions that the old one met."""
    model, x = AsksForFlag(kind(odd)), tokens(2, 9)
    traced = Traced(model)
    assert_close(traced(x), model(x))
    assert traced.report.fused == (not odd)


@pytest.mark.parametrize("kind", [Block, Ranges])
def test_switched_off(kind):
    block, x = kind(), tokens(2, 9)
    traced = Traced(block, enabled=False)
    assert torch.equal(traced(x), block(x))
