"""Products with stacks of matrices that are no experts: nothing is fused, and nothing is reported."""

from typing import ClassVar

import pytest
import torch
from harness import Fused
from torch import nn
from torch.nn import functional as F

B, T, H, HEADS, D, V = 2, 7, 16, 4, 6, 11


class Model(nn.Module):
    shapes: ClassVar = {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in self.shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))


class Head(Model):
    shapes: ClassVar = {"w": (V, H)}


class Linear(Head):
    def forward(self, x):
        return F.linear(x, self.w)


class LinearOfFour(Head):
    def forward(self, x):
        return F.linear(x[:, None].expand(-1, 3, -1, -1), self.w)


class MatmulExpanded(Head):
    def forward(self, x):
        return x @ self.w.t().expand(x.shape[0], -1, -1)


class MatmulExpandedTwice(Head):
    """A second linear layer of the same kind behind it."""

    def forward(self, x):
        rows = torch.tanh(x @ self.w.t().expand(x.shape[0], -1, -1))
        return rows @ self.w.expand(x.shape[0], -1, -1)


class MatmulBroadcast(Head):
    def forward(self, x):
        return torch.matmul(self.w[None], x.transpose(1, 2))


class Bmm(Head):
    def forward(self, x):
        return torch.bmm(x, self.w.t().unsqueeze(0).repeat(x.shape[0], 1, 1)).softmax(-1).argmax(-1)


class Einsum(Head):
    def forward(self, x):
        return torch.einsum("bth,vh->btv", x, self.w)


class TwoHeads(Head):
    """One of logits for each position, the largest of which are taken."""

    def forward(self, x):
        logits = torch.einsum("bth,hv->btv", x, self.w.t())
        return logits.topk(x.shape[0], -1).values.softmax(-1)


class Projected(Model):
    """One matrix for each head, and a linear layer of the heads."""

    shapes: ClassVar = {"w": (HEADS, H, D), "out": (H, HEADS * D)}

    def forward(self, x):
        heads = torch.einsum("bth,ehd->bted", x, self.w)
        return F.linear(heads.flatten(-2), self.out)


class Attention(Model):
    shapes: ClassVar = {"q": (HEADS, H, D), "k": (HEADS, H, D), "v": (HEADS, H, D), "o": (HEADS, D, H)}

    def forward(self, x):
        q, k, v = (torch.einsum("bth,nhd->bntd", x, w) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.einsum("bntd,ndh->bth", mixed, self.o)


class AttentionOfBmm(Attention):
    def forward(self, x):
        rows = x[0].expand(HEADS, -1, -1)
        q, k, v = (torch.bmm(rows, w) for w in (self.q, self.k, self.v))
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * D**-0.5, -1)
        return torch.bmm(torch.bmm(scores, v), self.o).sum(0)


class GatedAttention(Attention):
    """A gate for each token and head."""

    shapes: ClassVar = {**Attention.shapes, "gate": (HEADS, H)}

    def forward(self, x):
        q, k, v = (torch.einsum("bth,nhd->bntd", x, w) for w in (self.q, self.k, self.v))
        v = v * torch.sigmoid(x @ self.gate.t()).transpose(1, 2)[..., None]
        mixed = F.scaled_dot_product_attention(q, k, v) * torch.sigmoid(x @ self.gate.t()).transpose(1, 2)[..., None]
        return x + torch.einsum("bntd,ndh->bth", mixed, self.o)


class BesideRouter(Attention):
    """As many heads as classes, of which the best are returned: a choice that no head has to do with."""

    shapes: ClassVar = {**Attention.shapes, "gate": (HEADS, H)}

    def forward(self, x):
        scores, ids = (x @ self.gate.t()).softmax(-1).topk(2, -1)
        return super().forward(x) + scores.sum(-1, keepdim=True) * ids.sum(-1, keepdim=True)


class HeadsOfMlp(Model):
    """Two layers in each head, and the sum of the heads."""

    shapes: ClassVar = {"up": (HEADS, H, D), "down": (HEADS, D, H)}

    def forward(self, x):
        rows = torch.relu(torch.einsum("bth,ehd->bted", x, self.up))
        return torch.einsum("bted,edh->bteh", rows, self.down).sum(2) + x


class LoraStack(Model):
    """All adapters of a bank, each with its scale."""

    shapes: ClassVar = {"a": (HEADS, H, 2), "b": (HEADS, 2, H), "scale": (HEADS,), "w": (H, H)}

    def forward(self, x):
        low = torch.einsum("bth,lhr->btlr", x, self.a)
        return F.linear(x, self.w) + torch.einsum("btlr,lrh,l->bth", low, self.b, self.scale)


class GroupedConvolution(Model):
    shapes: ClassVar = {"w": (HEADS, D, H // HEADS)}

    def forward(self, x):
        groups = x.view(-1, HEADS, H // HEADS).transpose(0, 1)
        return torch.bmm(groups, self.w.transpose(1, 2)).transpose(0, 1).reshape(*x.shape[:-1], -1)


class Codebooks(Model):
    """Logits for each of some codebooks, and the best code of each."""

    shapes: ClassVar = {"w": (HEADS, V, H)}

    def forward(self, x):
        return torch.einsum("bth,cvh->btcv", x, self.w).argmax(-1)


class CodebooksOfMlp(Codebooks):
    shapes: ClassVar = {"up": (HEADS, D, H), "w": (HEADS, HEADS, D)}

    def forward(self, x):
        rows = F.gelu(torch.einsum("bth,cdh->btcd", x, self.up))
        logits = torch.einsum("btcd,cvd->btcv", rows, self.w)
        return logits.gather(-1, logits.topk(2, -1).indices)


PLAIN = [Linear, LinearOfFour, MatmulExpanded, MatmulExpandedTwice, MatmulBroadcast, Bmm, Einsum, TwoHeads]
STACKED = [
    *(Projected, Attention, AttentionOfBmm, GatedAttention, BesideRouter, HeadsOfMlp),
    *(LoraStack, GroupedConvolution, Codebooks, CodebooksOfMlp),
]


@pytest.mark.parametrize("shape", [(B, T), (B, 1), (1, T)])
@pytest.mark.parametrize("block", PLAIN + STACKED)
def test_no_site(block, shape):
    torch._dynamo.reset()
    model = block()
    fused = Fused(model)
    with torch.no_grad():
        x = torch.randn(*shape, H)
        torch.testing.assert_close(fused(x), model(x))
    assert not fused.report.sites, fused.report


class LoraOfSequences(Model):
    """An adapter for each sequence, which came with the request."""

    shapes: ClassVar = {"a": (HEADS, H, 2), "b": (HEADS, 2, H), "w": (H, H)}

    def forward(self, x, ids):
        return F.linear(x, self.w) + torch.bmm(torch.bmm(x, self.a[ids]), self.b[ids])


class LoraOfTokens(LoraOfSequences):
    def forward(self, x, ids):
        ids = ids.repeat_interleave(x.shape[1])
        rows = x.reshape(-1, 1, H)
        return F.linear(x, self.w) + torch.bmm(torch.bmm(rows, self.a[ids]), self.b[ids]).view(x.shape)


class LoraEinsum(LoraOfSequences):
    def forward(self, x, ids):
        return F.linear(x, self.w) + torch.einsum("bth,bhr,bro->bto", x, self.a[ids], self.b[ids])


@pytest.mark.parametrize("block", [LoraOfSequences, LoraOfTokens, LoraEinsum])
def test_adapters_by_request(block):
    torch._dynamo.reset()
    model, x, ids = block(), torch.randn(B, T, H), torch.tensor([3, 1])
    fused = Fused(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, ids), model(x, ids))
    assert not fused.report.sites, fused.report
