"""Another number of experts for a token, in one compiled model."""

import pytest
import torch
from blocks import Fixed, Gathered, Moe
from harness import Fused, compare
from test_batched import GatheredEinsum
from test_module_lists import Given, Traced, fresh  # noqa: F401  `fresh` is a fixture
from test_user_blocks import WhereIndexAdd

SLOTS = (2, 3, 4, 3)


def routed(k, tokens=14, hidden=16, experts=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(k)
    weights, ids = torch.rand(tokens, experts, generator=generator, dtype=dtype).topk(k, -1)
    x = torch.randn(tokens, hidden, generator=generator, dtype=dtype)
    return x.requires_grad_(), ids, weights.requires_grad_()


class AnyNumber(Fixed):
    """Takes the number of slots from the ids."""

    def experts(self, x, ids, weights):
        self.k = ids.shape[1]
        return super().experts(x, ids, weights)


class Asked(Moe):
    """Is told the number of slots."""

    def forward(self, x, k):
        self.k = k
        return super().forward(x)


class Unrolled(WhereIndexAdd):
    def forward(self, x, ids, weights):
        return self.mix(x, ids, weights)


class Einsum(GatheredEinsum):
    def forward(self, x, ids, weights):
        return self.mix(x, ids, weights)


class AnyGathered(AnyNumber, Gathered):
    pass


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("block", [AnyNumber, Unrolled, Einsum])
def test_graphs(block, dynamic):
    """A graph for each number, whatever Dynamo takes for a symbol."""
    model = block().double()
    fused = Fused(model, dynamic=dynamic)
    for k in SLOTS:
        compare(model, fused, *routed(k, experts=4 if block is Unrolled else 5), tolerance=1e-9)
    assert fused.counts() == (3, 0), fused.report


def test_a_number_that_is_not_known_to_be_one_of_slots():
    """Repeating x so and so often may mean anything: a miss, with eager's numbers."""
    model = AnyGathered().double()
    fused = Fused(model, dynamic=True)
    for k in SLOTS:
        compare(model, fused, *routed(k), tolerance=1e-9)
    assert set(fused.reasons) == {"no-match"} and fused.report.fused == 0, fused.report


@pytest.mark.parametrize("dynamic", [True, None])
def test_with_the_router(dynamic):
    model = Asked().double()
    fused = Fused(model, dynamic=dynamic)
    for k in SLOTS:
        compare(model, fused, routed(k)[0], k, tolerance=1e-8)
    assert fused.counts() == (3, 0), fused.report
    assert [str(site.router).split(",")[1] for site in fused.report.sites] == [" top 2", " top 3", " top 4"]


@pytest.mark.parametrize("dynamic", [True, None])
def test_loops(dynamic):
    model = Given().double()
    traced = Traced(model, dynamic=dynamic, fullgraph=True)
    for k in SLOTS:
        compare(model, traced, *routed(k), tolerance=1e-9)
    assert traced.counts() == (3, 0), traced.report
