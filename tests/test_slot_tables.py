"""Every expert on every token, weighed by a table that is written slot by slot."""

import pytest
import torch
from harness import Fused, check_fused, compare
from test_user_blocks import EXPERTS, HIDDEN, K, Loop
from torch.nn import functional as F


def tokens(*shape):
    x = torch.randn(*shape or (9,), HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_()


class Written(Loop):
    slots = K

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), self.k, -1)
        return self.mix(x, ids, weights)

    def mix(self, x, ids, weights):
        return self.weigh(x, self.written(ids, weights))

    def weigh(self, x, table):
        outputs = torch.cat([expert(x).unsqueeze(-2) for expert in self.experts], -2)
        return (outputs * table.unsqueeze(-1)).sum(-2)

    def written(self, ids, weights):
        table = self.start(ids)
        for k in range(self.slots):
            table = self.write(table, k, ids, weights)
        return table

    def start(self, ids):
        return torch.zeros(*ids.shape[:-1], EXPERTS, dtype=torch.float64)

    def write(self, table, k, ids, weights):
        return table.scatter_(-1, ids[:, k : k + 1], weights[:, k : k + 1])


class Added(Written):
    def write(self, table, k, ids, weights):
        return table.scatter_add(-1, ids[:, k].unsqueeze(-1), weights[:, k, None])


class Backwards(Written):
    def write(self, table, k, ids, weights):
        return (
            super().write(table, -1 - k, ids[..., None].squeeze(-1), weights) if k else self.last(table, ids, weights)
        )

    def last(self, table, ids, weights):
        return table.scatter_(-1, ids[:, -1:], weights[:, -1:])

    def written(self, ids, weights):
        table = self.last(self.start(ids), ids, weights)
        return table.scatter(1, ids[:, :1], weights[:, :1])


class Assigned(Written):
    def write(self, table, k, ids, weights):
        table[torch.arange(len(table)), ids[:, k]] = weights[:, k]
        return table


class OneHot(Written):
    def write(self, table, k, ids, weights):
        return table + F.one_hot(ids[:, k], EXPERTS) * weights[:, k, None]


class Summed(Written):
    def written(self, ids, weights):
        return sum(F.one_hot(ids[:, k], EXPERTS) * weights[:, k, None] for k in range(K))


class InTheLoop(Written):
    def weigh(self, x, table):
        return sum(table[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


class OneSlot(Written):
    k = slots = 1


class EverySlot(Written):
    k = slots = EXPERTS


FORMS = [Written, Added, Backwards, Assigned, OneHot, Summed, InTheLoop, OneSlot, EverySlot]


@pytest.mark.parametrize("count", [1, EXPERTS, 9])
@pytest.mark.parametrize("block", FORMS)
def test_fused_with_its_router(block, count):
    (site,) = check_fused(block(), tokens(count), tolerance=1e-8).report.sites
    assert site.op == "moe", site.router_detail


@pytest.mark.parametrize("block", FORMS)
def test_any_number_of_tokens(block):
    torch._dynamo.reset()
    model = block()
    fused = Fused(model, dynamic=True)
    for count in (9, 6):
        compare(model, fused, tokens(count), tolerance=1e-8)
    assert fused.counts() == (1, 0), fused.report


# One detail is different


class SlotMissing(Written):
    slots = K - 1


class SlotMissingOfOneHot(OneHot):
    slots = K - 1


class SlotTwice(Added):
    def write(self, table, k, ids, weights):
        return super().write(table, 0, ids, weights)


class SlotTwiceOfOneHot(OneHot):
    slots = K + 1

    def write(self, table, k, ids, weights):
        return super().write(table, k % K, ids, weights)


class OtherSlot(Written):
    def write(self, table, k, ids, weights):
        return table.scatter_(-1, ids[:, k : k + 1], weights[:, K - 1 - k : K - k])


class OtherIds(Written):
    def write(self, table, k, ids, weights):
        return super().write(table, k, (EXPERTS - 1 - ids) if k else ids, weights)


class OtherWeights(Written):
    def write(self, table, k, ids, weights):
        return super().write(table, k, ids, weights * (1 + k))


class NotDistinct(Written):
    """The second of two slots of one expert is written over the first."""

    def mix(self, x, ids, weights):
        return super().mix(x, ids // 2, weights)


class OntoOnes(Written):
    def start(self, ids):
        return torch.ones(len(ids), EXPERTS, dtype=torch.float64)


class OntoScores(Added):
    def forward(self, x):
        self.scores = self.gate(x).softmax(-1)
        return super().forward(x)

    def start(self, ids):
        return self.scores


class ScaledBetween(Written):
    def write(self, table, k, ids, weights):
        return super().write(table, k, ids, weights) * 0.5


class Widened(OneHot):
    """The weights in another type than the table."""

    def write(self, table, k, ids, weights):
        return super().write(table, k, ids, weights.float())


class Subtracted(OneHot):
    def write(self, table, k, ids, weights):
        return torch.add(table, F.one_hot(ids[:, k], EXPERTS) * weights[:, k, None], alpha=1 - 2 * k)


class OtherRows(Assigned):
    def write(self, table, k, ids, weights):
        table[torch.arange(len(table)).flip(0), ids[:, k]] = weights[:, k]
        return table


class Columns(Written):
    """The other way round: as many tokens as experts."""

    def write(self, table, k, ids, weights):
        return table.scatter_(0, ids[:, k].unsqueeze(0), weights[:, k].unsqueeze(0))


class FirstTokens(Written):
    def write(self, table, k, ids, weights):
        return table.scatter(-1, ids[:3, k : k + 1], weights[:3, k : k + 1])


class WithoutGrad(Written):
    """One of the slots has no gradient."""

    def write(self, table, k, ids, weights):
        with torch.set_grad_enabled(k == 0):
            return super().write(table.clone(), k, ids, weights)


class ReadBetween(Written):
    """The outputs are weighed when half of the table is written."""

    def written(self, ids, weights):
        table = self.write(self.start(ids), 0, ids, weights)
        self.write(table.clone(), 1, ids, weights)
        return table


@pytest.mark.parametrize("block", [
    *(SlotMissing, SlotMissingOfOneHot, SlotTwice, SlotTwiceOfOneHot, OtherSlot, OtherIds, OtherWeights, NotDistinct),
    *(OntoOnes, OntoScores, ScaledBetween, Widened, Subtracted, OtherRows, Columns, FirstTokens, WithoutGrad),
    ReadBetween,
])  # fmt: skip
def test_one_detail_wrong(block):
    model, x = block(), tokens(EXPERTS)
    for verify in (True, False):
        torch._dynamo.reset()
        fused = Fused(model, verify=verify)
        compare(model, fused, x, tolerance=1e-8)
    assert fused.report.fused == 0 and fused.reasons == ["no-match"], fused.report
