"""Routers that put the chosen logits into a table of minus infinity and take the softmax of that, as makeMoE does."""

import pytest
import torch
from harness import Fused, check_fused, compare
from loops import E, H, K, Mlp
from torch import nn
from torch.nn import functional as F

from mok_compile import explain


class Scattered(nn.Module):
    """Every expert on every token, weighed by the table. Subclasses differ in one detail."""

    fill = float("-inf")

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E), nn.ModuleList(Mlp() for _ in range(E))
        self.double()

    def forward(self, x):
        logits = self.gate(x)
        top, ids = logits.topk(K, -1)
        return self.mix(x, ids, self.shares(torch.full_like(logits, self.fill).scatter(-1, ids, self.written(top))))

    def written(self, top):
        return top

    def shares(self, table):
        return table.softmax(-1)

    def mix(self, x, ids, table):
        return sum(expert(x) * table[..., e, None] for e, expert in enumerate(self.experts))


class InPlace(Scattered):
    def forward(self, x):
        logits = self.gate(x)
        top, ids = logits.topk(K, -1)
        table = torch.full((len(x), E), self.fill, dtype=x.dtype)
        table.scatter_(1, ids, top)
        return self.mix(x, ids, F.softmax(table, dim=1))


class Gathered(Scattered):
    """The shares of the chosen experts, taken out again."""

    def mix(self, x, ids, table):
        shares = table.gather(-1, ids) * 0.5
        return super().mix(x, ids, torch.zeros_like(table).scatter(-1, ids, shares))


class Cast(Scattered):
    def shares(self, table):
        return table.float().softmax(-1).to(table.dtype)


class Doubled(Scattered):
    def written(self, top):
        return top * 2.0


RIGHT = {
    Scattered: "top 2, softmax",
    InPlace: "top 2, softmax",
    Gathered: "top 2, softmax, * 0.5",
    Cast: "top 2, float32, softmax",
    Doubled: "top 2, * 2, softmax",
}


def tokens(count=9):
    return torch.randn(count, H, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("block", RIGHT)
def test_fused(block):
    tolerance = 1e-6 if block is Cast else 1e-9
    (site,) = check_fused(block(), tokens(), tolerance=tolerance).report.sites
    assert str(site.router) == RIGHT[block], site.router_detail


@pytest.mark.parametrize("logits", ["ties", "one of two", "none"])
def test_ties_and_infinite_logits(logits):
    """All alike; one of the chosen two at minus infinity; all at minus infinity, which gives no numbers."""
    model = Scattered()
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(0.0 if logits == "ties" else -torch.inf)
        if logits == "one of two":
            model.gate.bias[2] = 1.0
    fused, x = Fused(model, verify=False), tokens()
    with torch.no_grad():
        found, wanted = fused(x), model(x)
    assert fused.report.sites[0].router is not None
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-9, atol=1e-12)
    assert wanted.isnan().all() == (logits == "none")


class Finite(Scattered):
    fill = -3.0


class Zeros(Scattered):
    fill = 0.0


class OverTokens(Scattered):
    def shares(self, table):
        return table.softmax(0)


class Twice(Scattered):
    def shares(self, table):
        return table.softmax(-1).softmax(-1)


class Rooted(Scattered):
    """In eager mode the gradients are no numbers, since all zeros of the table go through the root."""

    def shares(self, table):
        return table.softmax(-1).sqrt()


class SigmoidFirst(Scattered):
    def shares(self, table):
        return table.sigmoid().softmax(-1)


class OfOthers(Scattered):
    def written(self, top):
        return top.flip(-1)


class AtOthers(Scattered):
    def forward(self, x):
        logits = self.gate(x)
        top, ids = logits.topk(K, -1)
        table = torch.full_like(logits, self.fill).scatter(-1, ids.flip(-1), top)
        return self.mix(x, ids, table.softmax(-1))


class Cut(Scattered):
    def shares(self, table):
        return table.detach().softmax(-1)


@pytest.mark.parametrize("block", [Finite, Zeros, OverTokens, Twice, Rooted, SigmoidFirst, OfOthers, AtOthers, Cut])
def test_one_detail_wrong(block):
    """The weights are others, so that the router stays outside; what is fused has the numbers of eager."""
    model = block()
    fused = Fused(model)
    if block is Rooted:
        fused(tokens())
    else:
        compare(model, fused, tokens(), tolerance=1e-9)
    assert "verify" not in fused.reasons and all(site.router is None for site in fused.report.sites), fused.report


class MakeMoe(Scattered):
    """AviSoori1x/makeMoE: a loop with a branch on the data, in three dimensions."""

    def mix(self, x, ids, table):
        final = torch.zeros_like(x)
        flat, flat_table = x.view(-1, H), table.view(-1, E)
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                rows = expert(flat[flat_mask]) * flat_table[flat_mask, i].unsqueeze(1)
                final[mask] += rows.squeeze(1)
        return final


def test_make_moe():
    model, x = MakeMoe().float(), torch.randn(2, 9, H)
    (site,) = explain(model, {"mok.verify": True})(x).sites
    assert (site.status, site.reason, str(site.router)) == ("fused", None, "top 2, softmax"), site


class Noisy(MakeMoe):
    """Its default: what is chosen from is not what a product gave."""

    def __init__(self):
        super().__init__()
        self.noise = nn.Linear(H, E)

    def forward(self, x):
        logits = self.gate(x)
        logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, ids = logits.topk(K, -1)
        table = torch.full_like(logits, self.fill).scatter(-1, ids, top)
        return self.mix(x, ids, table.softmax(-1))


def test_noise_on_the_logits_stays_outside():
    (site,) = explain(Noisy().float())(torch.randn(2, 9, H)).sites
    assert (site.status, site.reason, site.router) == ("fused", "router", None), site
