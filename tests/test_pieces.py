"""Experts that multiply by their matrices in pieces, as code does that was written for tensor parallelism."""

from itertools import pairwise

import pytest
import torch
from harness import check_fused, check_refused
from loops import E, H, I, Ranged
from test_loop_spellings import stays
from test_module_lists import check, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F


class Pieces(nn.Module):
    """`size` of the pieces along the inner dimension. Subclasses differ in one detail."""

    size = I // 2

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False)
        self.down_proj = nn.Linear(I, H, bias=False)

    def up(self, x, weight):
        return torch.cat([F.linear(x, piece) for piece in weight.split(self.size)], dim=-1)

    def down(self, h, weight):
        pieces = zip(h.split(self.size, -1), weight.split(self.size, 1), strict=True)
        return sum(F.linear(rows, piece) for rows, piece in pieces)

    def forward(self, x):
        h = F.silu(self.up(x, self.gate_proj.weight)) * self.up(x, self.up_proj.weight)
        return self.down(h, self.down_proj.weight)


class Uneven(Pieces):
    size = 5  # 5, 5 and 2


class Slices(Pieces):
    def up(self, x, weight):
        return torch.cat((x @ weight[:3].t(), x @ weight[3:-2].t(), x @ weight[-2:].transpose(0, 1)), 1)

    def down(self, h, weight):
        return F.linear(h[:, :7], weight[:, :7]) + F.linear(h[:, 7:], weight[:, 7:])


class Attributes(Pieces):
    """Turned by other names."""

    def up(self, x, weight):
        return torch.cat((x @ weight[:3].T, x @ weight[3:-2].mT, x @ weight[-2:].permute(1, 0)), 1)

    def down(self, h, weight):
        return h[:, :7] @ weight[:, :7].T + h[:, 7:] @ weight[:, 7:].mT


class Chunks(Pieces):
    def up(self, x, weight):
        return torch.cat([F.linear(x, piece) for piece in weight.chunk(3)], dim=-1)

    def down(self, h, weight):
        a, b, c = (F.linear(*pair) for pair in zip(h.chunk(3, -1), weight.chunk(3, -1), strict=True))
        return a + (b + c)


class Filled(Ranged):
    """Rows of all slots, filled in expert by expert."""

    def moe(self, x, ids, weights):
        rows = x.repeat_interleave(ids.shape[1], 0)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[ids.flatten() == e] = expert(rows[ids.flatten() == e])
        return (y.view(*ids.shape, -1) * weights[..., None]).sum(1)


@pytest.mark.parametrize("block", [Ranged, Filled])
@pytest.mark.parametrize("expert", [Pieces, Uneven, Slices, Attributes, Chunks])
def test_fused(expert, block):
    check(block([expert() for _ in range(E)]))


class AnotherOrder(Pieces):
    def up(self, x, weight):
        first, second = weight.split(self.size)
        return torch.cat([F.linear(x, second), F.linear(x, first)], -1)


class Crossed(Pieces):
    def down(self, h, weight):
        (a, b), (u, v) = h.split(self.size, -1), weight.split(self.size, 1)
        return F.linear(a, v) + F.linear(b, u)


class Twice(Pieces):
    def down(self, h, weight):
        (a, _), (u, _) = h.split(self.size, -1), weight.split(self.size, 1)
        return F.linear(a, u) + F.linear(a, u)


class LeftOut(Pieces):
    def down(self, h, weight):
        cuts = list(pairwise(range(0, I, 3)))  # not the last three
        return sum(F.linear(h[:, a:b], weight[:, a:b]) for a, b in cuts)


class OfTwo(Pieces):
    """The second piece is that of another matrix."""

    def up(self, x, weight):
        return torch.cat([F.linear(x, weight[:6]), F.linear(x, self.gate_proj.weight[6:])], -1)


class Cut(Pieces):
    """One piece gets no gradient."""

    def up(self, x, weight):
        first, second = weight.split(self.size)
        with torch.no_grad():
            frozen = F.linear(x, second)
        return torch.cat([F.linear(x, first), frozen], -1)


class CutWeight(Pieces):
    def up(self, x, weight):
        with torch.no_grad():
            second = weight[self.size :]
        return torch.cat([F.linear(x, weight[: self.size]), F.linear(x, second)], -1)


class Subtracted(Pieces):
    def down(self, h, weight):
        (a, b), (u, v) = h.split(self.size, -1), weight.split(self.size, 1)
        return torch.add(F.linear(a, u), F.linear(b, v), alpha=-1)


class Square(nn.Module):
    """Of matrices with square halves. Subclasses multiply by a half as it is."""

    turns = (0, 1)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * H, bias=False), nn.Linear(2 * H, H, bias=False)

    def forward(self, x):
        a, b = self.up.weight.split(H)
        h = F.gelu(torch.cat([x @ a.transpose(0, 1), x @ b.transpose(*self.turns)], -1))
        a, b = self.down.weight.split(H, 1)
        return h[:, :H] @ a.transpose(*self.turns) + h[:, H:] @ b.t()


class NotTurned(Square):
    turns = (0, 0)


class NotTurnedEither(Square):
    turns = (-1, 1)


class NotPermuted(Square):
    """``permute(0, 1)`` turns nothing."""

    def forward(self, x):
        a, b = self.up.weight.split(H)
        h = F.gelu(torch.cat([x @ a.T, x @ b.permute(0, 1)], -1))
        a, b = self.down.weight.split(H, 1)
        return h[:, :H] @ a.T + h[:, H:] @ b.T


class Dense(nn.Module):
    """Every expert on every token, so that no branch stands in the way of the graph."""

    def __init__(self, expert):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(expert() for _ in range(E))

    def logits(self, x):
        return self.gate(x)

    def forward(self, x):
        weights, ids = self.logits(x).softmax(-1).topk(2)
        share = ((weights * (ids == e)).sum(-1, keepdim=True) for e in range(E))
        return sum(mine * expert(x) for mine, expert in zip(share, self.experts, strict=True))


def test_square_halves():
    check_fused(Dense(Square).double(), tokens(9, dtype=torch.float64))


WRONG = [
    AnotherOrder,
    Crossed,
    Twice,
    LeftOut,
    OfTwo,
    Cut,
    CutWeight,
    Subtracted,
    NotTurned,
    NotTurnedEither,
    NotPermuted,
]


@pytest.mark.parametrize("expert", WRONG)
def test_one_detail_wrong(expert):
    x = tokens(9)
    check_refused(Dense(expert).to(x.dtype), x, reason="no-match")
    stays(Ranged([expert() for _ in range(E)]), x)


class AddedLogits(Dense):
    def logits(self, x):
        return F.linear(x[:, :6], self.gate.weight[:, :6]) + F.linear(x[:, 6:], self.gate.weight[:, 6:])


class LogitsSideBySide(Dense):
    def logits(self, x):
        return torch.cat([F.linear(x, part) for part in self.gate.weight.split(2)], -1)


@pytest.mark.parametrize("block", [AddedLogits, LogitsSideBySide])
def test_logits_in_pieces_stay(block):
    """One product would round them in another way, and so choose other experts where two are near."""
    (site,) = check_fused(block(Pieces).double(), tokens(9, dtype=torch.float64)).report.sites
    assert (site.op, site.reason) == ("experts", "router") and "in pieces" in site.router_detail, site
