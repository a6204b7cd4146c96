"""The block of Llama 4's own repository: every expert gets every token by `gather`, times its score, which is zero
where the token does not go; their outputs are added onto the shared expert's by `scatter_add_`."""

import pytest
import torch
from blocks import grouped
from harness import Fused, check_fused, compare
from torch import nn
from torch.nn import functional as F

HIDDEN, INNER, EXPERTS = 16, 12, 5


class Reference(nn.Module):
    k, fence = 1, float("-inf")

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.4)

        self.router = new(HIDDEN, EXPERTS)
        self.w1, self.w3, self.w2 = (new(EXPERTS, *shape) for shape in 2 * ((HIDDEN, INNER),) + ((INNER, HIDDEN),))
        self.shared = new(HIDDEN, HIDDEN)

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        logits = self.logits(flat)
        best, ids = torch.topk(logits.transpose(0, 1), self.k, dim=1)
        fenced = torch.full_like(logits.transpose(0, 1), self.fence).scatter_(1, ids, best)
        scores = self.scores(fenced.transpose(0, 1))
        numbers = self.numbers(len(flat)).reshape(-1, 1).expand(-1, HIDDEN)
        rows = self.gather(flat, numbers) * self.column(scores)
        out = self.experts(rows).view(-1, HIDDEN)
        y = self.start(flat)
        y.scatter_add_(dim=0, index=self.back(numbers), src=out)
        return y.view(x.shape)

    def logits(self, x):
        """[E, T]"""
        return torch.matmul(x, self.router).transpose(0, 1)

    def scores(self, fenced):
        return torch.sigmoid(fenced)

    def numbers(self, count):
        return torch.arange(count).view(1, -1).expand(EXPERTS, -1)

    def gather(self, x, numbers):
        return torch.gather(x, dim=0, index=numbers)

    def column(self, scores):
        return scores.reshape(-1, 1)

    def experts(self, rows):
        rows = rows.view(EXPERTS, -1, HIDDEN)
        return torch.bmm(F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3), self.w2)

    def start(self, x):
        return x @ self.shared

    def back(self, numbers):
        return numbers


class Cut(Reference):
    """As it is there: the experts' rows have no gradient."""

    def experts(self, rows):
        return super().experts(rows.detach())


class Several(Reference):
    k = 2


class Cast(Reference):
    def scores(self, fenced):
        return torch.sigmoid(fenced.double()).float()


class ByTokens(Reference):
    """The rows run over experts first."""

    def numbers(self, count):
        return torch.arange(count).view(-1, 1).expand(-1, EXPERTS)

    def column(self, scores):
        return scores.transpose(0, 1).reshape(-1, 1)

    def experts(self, rows):
        rows = super().experts(rows.view(-1, EXPERTS, HIDDEN).transpose(0, 1))
        return rows.transpose(0, 1).reshape(-1, HIDDEN)


class OntoZeros(Reference):
    def start(self, x):
        return torch.zeros_like(x)


class IndexAdd(Reference):
    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        logits = self.logits(flat).transpose(0, 1)
        best, ids = torch.topk(logits, self.k, dim=1)
        scores = torch.full_like(logits, self.fence).scatter_(1, ids, best).sigmoid().transpose(0, 1)
        numbers = self.numbers(len(flat)).reshape(-1)
        rows = torch.gather(flat, 0, numbers[:, None].expand(-1, HIDDEN)) * scores.reshape(-1, 1)
        return self.start(flat).index_add_(0, numbers, self.experts(rows).view(-1, HIDDEN)).view(x.shape)


def tokens(*shape, grad=True):
    x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(grad)


FORMS = [Reference, Several, Cast, ByTokens, OntoZeros, IndexAdd]


@pytest.mark.parametrize("shape", [(2, 7), (1, EXPERTS), (EXPERTS, EXPERTS), (1, 1), (3, 1)])
@pytest.mark.parametrize("block", FORMS)
def test_fused_with_its_router(block, shape):
    fused = check_fused(block(), tokens(*shape), tolerance=2e-5)
    (site,) = fused.report.sites
    assert (site.op, site.spec.weight_on) == ("moe", "input"), site.router_detail
    assert str(site.router).startswith(f"top {block.k}, ") and "sigmoid" in str(site.router)
    assert not any("bmm" in t or "topk" in t or "scatter" in t for t in fused.targets())


@pytest.mark.parametrize("block", FORMS)
def test_any_number_of_tokens(block):
    torch._dynamo.reset()
    model = block()
    fused = Fused(model, dynamic=True)
    for shape in ((2, 7), (3, 4)):
        compare(model, fused, tokens(*shape), tolerance=2e-5)
    assert fused.counts() == (1, 0), fused.report


def test_a_gradient_that_is_cut():
    """In training the experts' rows have none, and fused they would; in inference there is nothing to cut."""
    torch._dynamo.reset()
    model = Cut()
    fused = Fused(model)
    compare(model, fused, tokens(2, 7))
    assert fused.counts() == (0, 1) and fused.reasons == ["no-match"], fused.report
    assert "cut by detach()" in fused.report.sites[0].detail
    with torch.no_grad():
        (site,) = check_fused(model, tokens(2, 7, grad=False)).report.sites
    assert site.op == "moe", site.router_detail


# One detail is different


class NotFenced(Reference):
    fence = -1.0


class OtherTokens(Reference):
    def numbers(self, count):
        return super().numbers(count).flip(1)


class OtherTokensBack(Reference):
    def back(self, numbers):
        return numbers.roll(1, 0)


class OtherColumnsBack(Reference):
    """As many tokens as features: the rows' places are told by their columns."""

    def back(self, numbers):
        return torch.arange(HIDDEN).expand(len(numbers), -1)


class OtherColumns(Reference):
    """The tokens' first number everywhere."""

    def gather(self, x, numbers):
        return super().gather(x[:, :1].expand(-1, HIDDEN), numbers)


class OtherOrder(Reference):
    """Rows by token and scores by expert."""

    def numbers(self, count):
        return torch.arange(count).view(-1, 1).expand(-1, EXPERTS)


class OtherOrderBack(Reference):
    def back(self, numbers):
        return torch.arange(len(numbers) // EXPERTS).view(-1, 1).expand(-1, EXPERTS).reshape(-1, 1).expand(-1, HIDDEN)


class OtherScores(Reference):
    """Scores by token and rows by expert: as many tokens as experts, and all shapes fit."""

    def column(self, scores):
        return scores.transpose(0, 1).reshape(-1, 1)


class EverySecond(Reference):
    def numbers(self, count):
        return torch.arange(0, 2 * count, 2).remainder(count).view(1, -1).expand(EXPERTS, -1)


@pytest.mark.parametrize("shape", [(EXPERTS,), (HIDDEN,), (7,)])
@pytest.mark.parametrize("block", [NotFenced, OtherTokens, OtherTokensBack, OtherColumnsBack, OtherColumns, OtherOrder,
                                   OtherOrderBack, OtherScores, EverySecond])  # fmt: skip
def test_one_detail_wrong(block, shape):
    if block is OtherColumnsBack and shape != (HIDDEN,):
        return
    model, x = block(), tokens(*shape)
    torch._dynamo.reset()
    fused = Fused(model)
    compare(model, fused, x, tolerance=2e-5)
    if block is OtherColumns:  # a block of other tokens
        return
    assert fused.report.fused == 0 and fused.reasons == ["no-match"], fused.report


class FirstColumnsBack(Reference):
    """Of each row only the first numbers are added."""

    def back(self, numbers):
        return numbers[:, : HIDDEN // 2]


def test_parts_of_rows():
    model, x = FirstColumnsBack(), tokens(7, grad=False)
    with torch.no_grad():
        fused = Fused(model)
        assert torch.equal(fused(x), model(x))
    assert fused.report.fused == 0 and fused.reasons == ["no-match"], fused.report


class ScaledByExpert(Reference):
    def scores(self, fenced):
        return torch.sigmoid(fenced) * torch.arange(1.0, EXPERTS + 1)[:, None]


class OtherLogits(Several):
    """The scores of the other slot."""

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        best, ids = torch.topk(flat @ self.router, self.k, dim=1)
        scores = torch.full((len(flat), EXPERTS), self.fence).scatter_(1, ids, best.flip(1)).sigmoid().transpose(0, 1)
        numbers = self.numbers(len(flat)).reshape(-1, 1).expand(-1, HIDDEN)
        rows = self.gather(flat, numbers) * self.column(scores)
        return self.start(flat).scatter_add_(0, numbers, self.experts(rows).view(-1, HIDDEN)).view(x.shape)


@pytest.mark.parametrize(
    ("block", "detail"), [(ScaledByExpert, "in a table of all experts"), (OtherLogits, "flip is no step of a router")]
)
def test_experts_without_their_router(block, detail):
    (site,) = check_fused(block(), tokens(2, 7), tolerance=2e-5).report.sites
    assert (site.op, site.reason) == ("experts", "router") and detail in site.router_detail


# One expert for each token: rows are picked or sorted, and multiplied by their scores before the experts


class Sorted(Reference):
    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        best, ids = torch.topk(flat @ self.router, 1, dim=1)
        order = torch.argsort(ids.view(-1), stable=True)
        ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0).to(torch.int32)
        places = order.unsqueeze(-1).expand(-1, HIDDEN)
        rows = torch.gather(flat, 0, places) * self.sorted(torch.sigmoid(best), order)
        rows = grouped(F.silu(grouped(rows, self.w1, ends)) * grouped(rows, self.w3, ends), self.w2, ends)
        return self.start(flat).scatter_add_(0, places, rows).view(x.shape)

    def sorted(self, scores, order):
        return scores[order]


class OneByOne(Reference):
    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        best, ids = torch.topk(flat @ self.router, 1, dim=1)
        scores, y = torch.sigmoid(best), torch.zeros_like(flat)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            rows = flat[t] * scores[t, k, None]
            y.index_add_(0, t, (F.silu(rows @ self.w1[e]) * (rows @ self.w3[e])) @ self.w2[e])
        return (self.start(flat) + y).view(x.shape)


@pytest.mark.parametrize("block", [Sorted, OneByOne])
def test_one_expert_for_each_token(block):
    (site,) = check_fused(block(), tokens(2, 7), tolerance=2e-5).report.sites
    assert (site.op, site.spec.weight_on, str(site.router)) == ("moe", "input", "top 1, sigmoid"), site.router_detail


class SortedUnsorted(Sorted):
    """The scores in the order of the tokens."""

    def sorted(self, scores, order):
        return scores


class SortedTwice(Sorted):
    """The scores before the experts and behind them."""

    def start(self, x):
        return super().start(x) * 0

    def forward(self, x):
        y = super().forward(x)
        return y * torch.sigmoid(torch.topk(x @ self.router, 1, dim=-1)[0])


def test_scores_in_another_order():
    fused = Fused(model := SortedUnsorted())
    compare(model, fused, tokens(2, 7), tolerance=2e-5)
    assert fused.report.fused == 0 and fused.reasons == ["no-match"], fused.report


def test_scores_before_and_behind():
    fused = Fused(model := SortedTwice())
    compare(model, fused, tokens(2, 7), tolerance=2e-5)
    assert "verify" not in fused.reasons, fused.report
