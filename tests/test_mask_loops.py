"""Loops over experts that get the mask of their tokens ready-made from a router with a capacity, in the style of Switch
Transformers: fused where the graph says that no slot goes to two experts."""

import pytest
import torch
from loops import E, H, Plain, Ranged
from test_module_lists import LOOP, Traced, check, compare, fresh, tokens  # noqa: F401
from torch import nn
from torch.nn import functional as F

from mok_compile import explain


class Loop(nn.Module):
    """Adds up what the experts make of their tokens, by a mask [T, 1, E]."""

    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x, mask, weights):
        y = torch.zeros_like(x)
        mask = mask.permute(2, 1, 0)
        for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            k, t = torch.where(mask[e].squeeze(0))
            y.index_add_(0, t, (self.experts[e](x[t]) * weights[t, k, None]).to(x.dtype))
        return y


class Capped(Ranged):
    """Top-1; the first tokens of each sequence have their expert, until that has `capacity` of them."""

    capacity = 2

    def __init__(self, experts=None):
        super().__init__(experts or [Plain() for _ in range(E)], top_k=1)
        self.loop, self.experts = Loop(self.experts), None

    def forward(self, x):
        scores = self.gate(x).float().softmax(-1)
        mask = self.mask(scores)
        weights = scores.max(-1).values.unsqueeze(-1).to(x.dtype)
        y = self.loop(x.view(-1, H), mask.view(-1, 1, E), weights.view(-1, 1))
        return y.view(x.shape)

    def mask(self, scores):
        mask = F.one_hot(scores.argmax(-1), E)
        return mask * (torch.cumsum(mask, -2) <= self.capacity)


class Struck(Capped):
    """Booleans, and tokens struck out one after the other."""

    def mask(self, scores):
        mask = scores.argmax(-1)[..., None] == torch.arange(E)
        return (mask & (mask.long().cumsum(-2) <= self.capacity) & (scores.max(-1, keepdim=True).values > 0.25)).long()


class Twice(Capped):
    """Two experts for one slot."""

    def mask(self, scores):
        first, second = scores.topk(2, -1).indices.unbind(-1)
        return F.one_hot(first, E) + F.one_hot(second, E)


class Counted(Capped):
    """Numbers beyond one: a weight would be lost."""

    def mask(self, scores):
        return super().mask(scores) * scores.argsort(-1)


class Negative(Capped):
    """An expert whose numbers cancel is never asked."""

    def mask(self, scores):
        mask = F.one_hot(scores.argmax(-1), E)
        return mask * (1 - 2 * (torch.cumsum(mask, -2) % 2))


class Written(Capped):
    """The last expert takes every token, besides."""

    def mask(self, scores):
        mask = super().mask(scores)
        mask[..., -1] = 1
        return mask


class WrittenBehindTheBack(Capped):
    def mask(self, scores):
        mask = F.one_hot(scores.argmax(-1), E)
        mask.detach()[..., -1].fill_(1)
        return mask * (torch.cumsum(mask, -2) <= self.capacity)


class Along(Capped):
    """One token for each expert, not one expert for each token."""

    def mask(self, scores):
        return F.one_hot(scores[:, :, 0].argsort(-1) % E, E).mT.reshape(*scores.shape[:2], E)


class Shuffled(Capped):
    """Rows of twice the length, taken for two tokens."""

    def mask(self, scores):
        wide = F.one_hot(scores.argmax(-1), 2 * E) + F.one_hot(scores.argmin(-1), 2 * E)
        return wide.view(scores.shape[0], -1, E)[:, : scores.shape[1]].contiguous()


@pytest.mark.parametrize("block", [Capped, Struck])
@pytest.mark.parametrize("dynamic", [False, True])
def test_at_most_one_expert_for_each_slot(block, dynamic):
    block = block()
    traced = check(block, dynamic=dynamic)
    assert traced.report.sites[0].detail == LOOP
    compare(block, traced, tokens(3, 7))
    with torch.no_grad():
        idle = [p.grad for p in block.loop.experts[0].parameters()]
    assert all(g is not None for g in idle)


def test_no_token_has_an_expert():
    block = Capped()
    block.capacity = 0
    check(block)


@pytest.mark.parametrize("block", [Twice, Counted, Negative, Written, WrittenBehindTheBack, Along, Shuffled])
def test_masks_that_say_something_else(block):
    block = block()
    traced = Traced(block)
    compare(block, traced, tokens(2, 9))
    assert not any(site.detail == LOOP for site in traced.report.sites), traced.report


def test_mask_from_outside():
    loop = Loop([Plain() for _ in range(E)])
    mask = F.one_hot(torch.arange(6) % E, E)[:, None]
    x, weights = tokens(6), torch.rand(6, 1)
    compare(loop, Traced(loop), x, mask, weights)
    assert "known" in explain(loop)(x, mask, weights).sites[0].detail


class SkipsTheFirst(Ranged):
    """Stacked weights, of which the first ones are left alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, H, H)), nn.Parameter(torch.randn(E, H, H))

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(E):
            t, k = torch.where(ids == e)
            if e < 2 or t.numel() == 0:
                continue
            y.index_add_(0, t, torch.relu(x[t] @ self.up[e]) @ self.down[e] * weights[t, k, None])
        return y


def test_experts_that_are_left_out_are_named():
    (site,) = explain(SkipsTheFirst())(tokens(2, 9)).sites
    assert site.reason == "layout" and "before number 2" in site.detail


def test_dropout_is_named():
    block = Capped([Plain(dropout=0.5) for _ in range(E)])
    (site,) = explain(block.train())(tokens(2, 9)).sites
    assert (site.reason, site.status) == ("dropout", "missed") and "dropout" in site.detail
    assert explain(block.eval())(tokens(2, 9)).fused == 1
