"""Experts in a spelling that nobody knows are named; models without experts are not."""

import pytest
import torch
from harness import Fused
from loops import E, H, I, K, Mlp
from torch import nn
from torch.nn import functional as F

import mok_compile


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(H, E, bias=False)
        self.mlps = nn.ModuleList(Mlp() for _ in range(E))

    def route(self, x):
        return torch.topk(F.softmax(self.choose(x), -1), K, -1)


class Capacity(Routed):
    """A loop over masks in which each expert takes its first tokens only, and something is done with them."""

    def forward(self, x):
        weights, ids = self.route(x)
        hot = F.one_hot(ids[:, 0], E)
        kept = (hot.cumsum(0) <= 8) * hot
        y = torch.zeros_like(x)
        for e in range(E):
            y = y + self.mlps[e](x * kept[:, e, None]) * kept[:, e, None] * weights[:, :1]
        return y


class Router(nn.Module):
    """Keeps the ids, which leave the graph that way."""

    def __init__(self):
        super().__init__()
        self.choose = nn.Linear(H, E, bias=False)

    def forward(self, x):
        weights, self.ids = torch.topk(F.softmax(self.choose(x), -1), K, -1)
        return weights, self.ids


class KeptIds(Capacity):
    def __init__(self):
        super().__init__()
        self.choose = Router()

    def route(self, x):
        return self.choose(x)


class Stacked(Routed):
    """All experts first, then those that were chosen."""

    def forward(self, x):
        outputs = torch.stack([torch.tanh(mlp(x)) for mlp in self.mlps], 1)
        weights, ids = self.route(x)
        return (outputs.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)


class Vmapped(Routed):
    def __init__(self):
        super().__init__()
        self.mlps, self.up, self.down = None, nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x):
        weights, ids = self.route(x)
        outputs = torch.vmap(lambda up, down: F.linear(F.silu(F.linear(x, up)), down))(self.up, self.down)
        return (outputs.transpose(0, 1).gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)


class Differentiated(Routed):
    """The gradient of a block, as a part of the model."""

    def forward(self, x):
        def total(x):
            weights, ids = self.route(x)
            return sum(mlp(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, mlp in enumerate(self.mlps)).sum()

        return torch.func.grad(total)(x)


def report(model, x):
    torch._dynamo.reset()
    fused = Fused(model.eval())
    with torch.no_grad():
        assert torch.equal(fused(x), model(x))
    return fused.report


@pytest.mark.parametrize("model", [Stacked, Vmapped, Differentiated])
def test_named(model):
    (site,) = report(model(), torch.randn(9, H)).sites
    assert (site.status, site.reason) == ("missed", "no-match")
    assert f"one of {E} experts" in site.detail and "test_unclaimed.py" in site.location


class Buffers(Routed):
    """Each expert has a buffer for so many tokens, and a token its place in it."""

    room = 3

    def __init__(self):
        super().__init__()
        self.mlps, self.up, self.down = None, nn.Parameter(torch.randn(E, H, I)), nn.Parameter(torch.randn(E, I, H))

    def forward(self, x):
        weights, ids = self.route(x)
        hot = F.one_hot(ids.t().reshape(-1), E)
        place = (hot.cumsum(0) - hot).view(K, -1, E).transpose(0, 1)
        kept = hot.view(K, -1, E).transpose(0, 1) * (place < self.room)
        slots = F.one_hot((place * kept).sum(-1), self.room)
        dispatch = (kept.unsqueeze(-1) * slots.unsqueeze(2)).to(x.dtype)
        given = torch.einsum("tkec,th->ech", dispatch, x)
        outputs = self.compute(given)
        return torch.einsum("tkec,tk,ech->th", dispatch, weights, outputs)

    def compute(self, given):
        return torch.einsum("eci,eih->ech", F.relu(torch.einsum("ech,ehi->eci", given, self.up)), self.down)


class Chosen(Buffers):
    """The experts choose their tokens."""

    def choose_tokens(self, x):
        return F.softmax(self.choose(x), -1).t().topk(self.room, dim=-1)

    def forward(self, x):
        weights, tokens = self.choose_tokens(x)
        outputs = torch.bmm(F.relu(torch.bmm(x[tokens], self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens.reshape(-1), outputs.reshape(-1, H))


class ChosenByColumn(Chosen):
    def choose_tokens(self, x):
        weights, tokens = F.softmax(self.choose(x), -1).topk(self.room, dim=0)
        return weights.t(), tokens.t()


class ChosenInALoop(Routed):
    def forward(self, x):
        weights, tokens = F.softmax(self.choose(x), -1).topk(3, dim=0)
        y = torch.zeros_like(x)
        for e, mlp in enumerate(self.mlps):
            y.index_add_(0, tokens[:, e], mlp(x[tokens[:, e]]) * weights[:, e, None])
        return y


@pytest.mark.parametrize(
    ("model", "why"),
    [
        *((model, "a place in the buffer") for model in (Capacity, KeptIds, Buffers)),
        *((model, "chooses its tokens") for model in (Chosen, ChosenByColumn, ChosenInALoop)),
    ],
)
def test_tokens_that_are_shared_out_in_another_way(model, why):
    (site,) = report(model(), torch.randn(9, H)).sites
    assert (site.status, site.reason) == ("missed", "routing")
    assert why in site.detail and f"of {E} experts" in site.detail and "test_unclaimed.py" in site.location


class BuffersOfExperts(Buffers):
    """As modules: a router that makes the choice, and experts that know nothing of it."""

    class Experts(nn.Module):
        def __init__(self, up, down):
            super().__init__()
            self.up, self.down = up, down

        def forward(self, given):
            return torch.bmm(F.relu(torch.bmm(given, self.up)), self.down)

    def __init__(self):
        super().__init__()
        self.choose, self.experts = Router(), self.Experts(self.up, self.down)
        del self.up, self.down

    def route(self, x):
        return self.choose(x)

    def compute(self, given):
        return self.experts(given)


def test_router_and_experts_are_one_miss():
    """The reason is found in the router, the block's name is that of the experts."""
    (site,) = mok_compile.explain(nn.Sequential(BuffersOfExperts()))(torch.randn(9, H)).sites
    assert (site.status, site.reason) == ("missed", "routing")
    assert site.location.startswith("0.experts [Experts]") and "cumsum" in site.detail


class Summed(Routed):
    """All experts on every token, by einsum, weighed by a table."""

    def __init__(self):
        super().__init__()
        self.mlps, self.up, self.down = None, nn.Parameter(torch.randn(E, H, I)), nn.Parameter(torch.randn(E, I, H))

    def forward(self, x):
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E, dtype=weights.dtype).scatter(-1, ids, weights)
        outputs = torch.einsum("tei,eih->teh", F.silu(torch.einsum("th,ehi->tei", x, self.up)), self.down)
        return torch.einsum("teh,te->th", outputs, table.to(outputs.dtype))


class SummedUnderAutocast(Summed):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_named(inside, caplog):
    """And torch logs no error of ops that are replayed without it."""
    model = SummedUnderAutocast() if inside else Summed()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        (site,) = report(model, torch.randn(9, H)).sites
    assert (site.status, site.reason) == ("missed", "dtype"), site
    assert "rounded to bfloat16" in site.detail and "float32" in site.detail
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class FirstApart(Routed):
    """All but the first expert's outputs are stacked and weighed at once."""

    def forward(self, x):
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E).scatter(-1, ids, weights)
        first, *others = [mlp(x) for mlp in self.mlps]
        return self.join(first, table[:, :1], (torch.stack(others, -1) @ table[:, 1:, None]).squeeze(-1))

    def join(self, first, weight, others):
        return first * weight + others


class FirstUnweighed(FirstApart):
    def join(self, first, weight, others):
        return first + others


@pytest.mark.parametrize("model", [FirstApart, FirstUnweighed])
def test_experts_that_are_not_all_treated_alike(model):
    model, x = model(), torch.randn(9, H)
    fused = Fused(model)
    torch.testing.assert_close(fused(x), model(x))
    sites = fused.report.sites
    (site,) = (site for site in sites if site.status == "missed")
    assert site.reason == "no-match" and f"one of {E} experts" in site.detail, site
    assert all(site.problem.num_experts == 1 for site in sites if site.status == "fused")


class WithAShared(FirstApart):
    """A shared expert of the same shapes is none of those that are left."""

    def __init__(self):
        super().__init__()
        self.shared = Mlp()

    def forward(self, x):
        weights, ids = self.route(x)
        table = torch.zeros(len(x), E).scatter(-1, ids, weights)
        return (torch.stack([mlp(x) for mlp in self.mlps], -1) @ table[..., None]).squeeze(-1) + self.shared(x)


def test_a_shared_expert_is_not_left_over():
    torch._dynamo.reset()
    fused = Fused(WithAShared())
    fused(torch.randn(9, H))
    assert fused.counts() == (1, 0), fused.report


class Adapters(nn.Module):
    """A linear layer with a mixture of low-rank adapters."""

    def __init__(self, inner, outer):
        super().__init__()
        self.linear, self.choose = nn.Linear(inner, outer), nn.Linear(inner, E)
        self.a, self.b = nn.Parameter(torch.randn(E, inner, 2)), nn.Parameter(torch.randn(E, 2, outer))

    def forward(self, x):
        weights, ids = self.choose(x).softmax(-1).topk(K, -1)
        rows = torch.einsum("tkr,tkro->tko", torch.einsum("ti,tkir->tkr", x, self.a[ids]), self.b[ids])
        return self.linear(x) + (rows * weights[..., None]).sum(1)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adapters(H, 3 * H), Adapters(3 * H, H)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def test_each_layer_of_adapters_has_its_own_shapes():
    sites = report(TwoLayers(), torch.randn(9, H)).sites
    assert [site.reason for site in sites] == ["shape", "shape"]
    for site, name, inner, outer in zip(sites, ("first", "second"), (H, 3 * H), (3 * H, H), strict=True):
        assert site.location.startswith(name) and f"[({E}, {inner}, 2), ({E}, 2, {outer})]" in site.detail, site


class Nucleus(Stacked):
    """A running sum along the experts is no place in a buffer."""

    def route(self, x):
        weights, ids = super().route(x)
        return weights * (weights.cumsum(-1) < 0.9), ids


def test_a_running_sum_over_experts():
    (site,) = report(Nucleus(), torch.randn(9, H)).sites
    assert (site.status, site.reason) == ("missed", "no-match")


class Classifier(nn.Module):
    """As many layers as classes, of which the best are returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(E))
        self.head = nn.Linear(H, E)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        scores, classes = self.head(x).softmax(-1).topk(K)
        return scores * classes


class Shortened(nn.Module):
    """Goes on with the most important ones of E tokens, through as many layers."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(H, 1)
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, x):
        x = x[:E]
        chosen = self.score(x).squeeze(-1).topk(K).indices
        x = x[chosen]
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Codebook(nn.Module):
    """The nearest of E vectors, and what an MLP makes of it."""

    def __init__(self):
        super().__init__()
        self.codes, self.mlp = nn.Parameter(torch.randn(E, H)), Mlp()

    def forward(self, x):
        return self.mlp(self.codes[(x @ self.codes.T).argmax(-1)])


@pytest.mark.parametrize("model", [Classifier, Shortened, Codebook])
def test_no_false_alarm(model):
    assert not report(model(), torch.randn(9, H)).sites
