"""The outputs of all experts in one tensor, whose dimension for the experts stands anywhere: weighted and summed, or
multiplied by the table of weights."""

import pytest
import torch
from harness import Fused, check_fused, check_refused
from torch import nn
from torch.nn import functional as F

K = 2


class Stack(nn.Module):
    """`hidden` may be the number of experts, so that their dimensions could be taken for each other."""

    def __init__(self, join, hidden=6, experts=4):
        super().__init__()
        torch.manual_seed(0)
        self.join, self.gate = join, nn.Linear(hidden, experts)
        mlps = (nn.Sequential(nn.Linear(hidden, 5), nn.GELU(), nn.Linear(5, hidden)) for _ in range(experts))
        self.experts = nn.ModuleList(mlps)
        self.double()

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        ids = scores.topk(K, -1)[1]
        table = scores * F.one_hot(ids, len(self.experts)).sum(-2)
        return self.join([expert(x) for expert in self.experts], table)


def tokens(*shape, hidden=6):
    return torch.randn(*shape, hidden, dtype=torch.float64, requires_grad=True)


JOINS = {
    "first": lambda outs, table: (torch.stack(outs) * table.movedim(-1, 0)[..., None]).sum(0),
    "before the last": lambda outs, table: (torch.stack(outs, -2) * table[..., None]).sum(-2),
    "last": lambda outs, table: (table.unsqueeze(-2) * torch.stack(outs, -1)).sum(-1),
    "last, moved": lambda outs, table: (torch.stack(outs, -1).transpose(-1, -2) * table[..., None]).sum(-2),
    "last, einsum": lambda outs, table: torch.einsum("...he,...e->...h", torch.stack(outs, -1), table),
    "before the last, einsum": lambda outs, table: torch.einsum("...eh,...e->...h", torch.stack(outs, -2), table),
    "last, matmul": lambda outs, table: (torch.stack(outs, -1) @ table[..., None]).squeeze(-1),
    "before the last, matmul": lambda outs, table: (table[..., None, :] @ torch.stack(outs, -2)).squeeze(-2),
    "flat": lambda outs, table: torch.bmm(
        torch.stack(outs, -1).view(-1, outs[0].shape[-1], len(outs)), table.view(-1, len(outs), 1)
    ).view(outs[0].shape),
}


@pytest.mark.parametrize("hidden", [6, 4])
@pytest.mark.parametrize("shape", [(9,), (2, 5), (1,)])
@pytest.mark.parametrize("join", JOINS)
def test_fused(join, shape, hidden):
    check_fused(Stack(JOINS[join], hidden), tokens(*shape, hidden=hidden), tolerance=1e-9)


@pytest.mark.parametrize("join", ["last", "last, matmul"])
def test_any_number_of_tokens(join):
    model = Stack(JOINS[join])
    fused = Fused(model, dynamic=True)
    for shape in ((2, 5), (3, 7), (4, 2)):
        x = tokens(*shape)
        with torch.no_grad():
            assert torch.allclose(fused(x), model(x), rtol=1e-9, atol=1e-12)
    assert fused.counts() == (len(fused.graphs), 0), fused.report


WRONG = {  # of as many features as experts, and as many tokens in both dimensions
    "weights of features": lambda outs, table: (torch.stack(outs, -1) * table.unsqueeze(-1)).sum(-1),
    "sum of features": lambda outs, table: (torch.stack(outs, -1) * table.unsqueeze(-2)).sum(-2),
    "features times weights": lambda outs, table: (torch.stack(outs, -2) @ table[..., None]).squeeze(-1),
    "weights times features": lambda outs, table: (table[..., None, :] @ torch.stack(outs, -1)).squeeze(-2),
    "tokens in another order": lambda outs, table: (torch.stack(outs, -1).transpose(0, 1) * table.unsqueeze(-2)).sum(
        -1
    ),
    "another order as they are flattened": lambda outs, table: torch.bmm(
        torch.stack(outs, -1).transpose(0, 1).reshape(-1, 4, 4), table.view(-1, 4, 1)
    ).view(outs[0].shape),
    "features and experts read as each other": lambda outs, table: (
        torch.stack(outs, -1).view(*outs[0].shape[:-1], 16).view(*outs[0].shape[:-1], 4, 4).transpose(-1, -2)
        * table.unsqueeze(-2)
    ).sum(-1),
}


@pytest.mark.parametrize("join", WRONG)
def test_one_detail_wrong(join):
    check_refused(Stack(WRONG[join], 4), tokens(3, 3, hidden=4), reason="no-match")
