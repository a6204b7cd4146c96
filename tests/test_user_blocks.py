"""Blocks as people write them: a loop over the experts that Dynamo unrolls, with masks, indices or one-hot tables."""

import pytest
import torch
from harness import Fused, check_fused, compare
from torch import nn
from torch.nn import functional as F

from mok_compile import explain

HIDDEN, INNER, EXPERTS, K, TOKENS = 16, 12, 4, 2, 9


class Mlp(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=bias)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Loop(nn.Module):
    """Top-k routing and a list of experts; subclasses say how the experts are computed."""

    k, bias = K, False

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList([Mlp(self.bias) for _ in range(EXPERTS)])
        self.double()

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), self.k, -1)
        return self.mix(x, ids, weights / weights.sum(-1, keepdim=True))

    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = self.add(out, x, ids, weights, e, expert)
        return out

    def table(self, ids, weights):
        """[T, E]: the weights at the experts of each token."""
        return weights.new_zeros(*ids.shape[:-1], EXPERTS).scatter_(-1, ids, weights)


# The rows of an expert are picked


class WhereIndexAdd(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.where(ids == e)
        return out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])


class WithBiases(WhereIndexAdd):
    bias = True


class NonzeroColumns(Loop):
    def add(self, out, x, ids, weights, e, expert):
        places = (ids == e).nonzero()
        token, slot = places[:, 0], places[:, 1]
        out[token] += expert(x[token]) * weights[token, slot].unsqueeze(-1)
        return out


class NonzeroTuple(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        return out.index_put((token,), weights[token, slot].unsqueeze(1) * expert(x[token]), accumulate=True)


class AnyMask(Loop):
    def add(self, out, x, ids, weights, e, expert):
        mask = (ids == e).any(-1)
        own = (weights * (ids == e)).sum(-1)[mask]
        out[mask] += expert(x[mask]) * own[:, None]
        return out


class OneHotPermuted(Loop):
    """Mixtral of transformers 4."""

    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        masks = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(masks[e])
            rows = x[None, token].reshape(-1, HIDDEN)
            out.index_add_(0, token, (expert(rows) * weights[token, slot, None]).to(x.dtype))
        return out


class FlatAssignment(Loop):
    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(K, 0)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            out[flat == e] = expert(rows[flat == e])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class GatingTable(Loop):
    """Softmax over logits that are minus infinity for all but k experts."""

    def forward(self, x):
        logits = self.gate(x)
        best, ids = logits.topk(K, -1)
        table = torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1)
        out, flat, flat_table = torch.zeros_like(x), x.view(-1, HIDDEN), table.view(-1, EXPERTS)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(-1)
            rows = mask.view(-1)
            out[mask] += (expert(flat[rows]) * flat_table[rows, e].unsqueeze(1)).squeeze(1)
        return out


class TopOneAssignment(Loop):
    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out[ids == e] = expert(x[ids == e]) * weights[ids == e].unsqueeze(-1)
        return out


class TopOneIndices(Loop):
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        ids = scores.argmax(-1)
        weights = scores.gather(1, ids[:, None])
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero(ids == e).squeeze(-1)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows])
        return out


class StackedWeights(Loop):
    """One tensor for all experts, indexed in the loop."""

    def __init__(self):
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.float64))

    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


PICKED = [
    *(WhereIndexAdd, WithBiases, NonzeroColumns, NonzeroTuple, AnyMask, OneHotPermuted, FlatAssignment),
    *(GatingTable, TopOneAssignment, TopOneIndices, StackedWeights),
]


# Every expert computes every token


class Dense(Loop):
    def add(self, out, x, ids, weights, e, expert):
        return out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)


class DenseWhere(Loop):
    def add(self, out, x, ids, weights, e, expert):
        mask = ids == e
        kept = torch.where(mask.any(-1, keepdim=True), expert(x), 0.0)
        out += kept * (weights * mask).sum(-1, keepdim=True)
        return out


class DenseWeightsInside(Loop):
    def add(self, out, x, ids, weights, e, expert):
        y = expert(x) * self.table(ids, weights)[:, e : e + 1]
        return out + torch.where((ids == e).any(-1, keepdim=True), y, torch.zeros_like(y))


class DenseBySlot(Loop):
    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                out += weights[:, k, None] * (ids[:, k] == e)[:, None] * expert(x)
        return out


class DenseTable(Loop):
    def mix(self, x, ids, weights):
        table = self.table(ids, weights)
        return sum(table[..., e].unsqueeze(-1) * expert(x) for e, expert in enumerate(self.experts))


class DenseOneHot(Loop):
    def add(self, out, x, ids, weights, e, expert):
        table = (F.one_hot(ids, EXPERTS).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
        return out + expert(x) * table[:, e : e + 1]


class AnotherOrder(Loop):
    """Expert number e is another module of the list."""

    def add(self, out, x, ids, weights, e, expert):
        return out + self.table(ids, weights)[:, (e + 1) % EXPERTS, None] * expert(x)


class MaskedScores(Loop):
    """The scores of all experts, masked and normalised again."""

    def forward(self, x):
        logits = self.gate(x)
        mask = torch.zeros_like(logits).scatter(1, logits.topk(K, -1)[1], 1.0)
        scores = logits.softmax(-1) * mask
        scores = scores / scores.sum(-1, keepdim=True)
        return sum(scores[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


class Stacked(Loop):
    def mix(self, x, ids, weights):
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (outputs * self.table(ids, weights).unsqueeze(-1)).sum(1)


class StackedEinsum(Loop):
    def mix(self, x, ids, weights):
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("te,teh->th", self.table(ids, weights), outputs)


DENSE = [
    *(Dense, DenseWhere, DenseWeightsInside, DenseBySlot, DenseTable, DenseOneHot, MaskedScores),
    *(AnotherOrder, Stacked, StackedEinsum),
]


def tokens(*shape):
    return torch.randn(*shape or (TOKENS,), HIDDEN, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("block", PICKED + DENSE)
def test_fused(block):
    fused = check_fused(block(), tokens(), tolerance=1e-9)
    assert [spec.activation for spec in fused.specs] == ["silu(gate) * up"]
    left = ("linear", "where", "nonzero", "one_hot", "index_add_", "setitem", "_assert_scalar")
    calls = [t for t in fused.targets() if any(f" {word}" in t or t.startswith(word) for word in left)]
    assert len(calls) <= 1, calls  # the router's


@pytest.mark.parametrize("block", [WhereIndexAdd, AnyMask, FlatAssignment, GatingTable, DenseWhere, Stacked])
def test_inference_and_any_number_of_tokens(block):
    model = block()
    fused = Fused(model, dynamic=True)
    for count in (TOKENS, 5, 23):
        x = tokens(count)
        with torch.no_grad():
            assert torch.allclose(fused(x), model(x), rtol=1e-9, atol=1e-12)
    assert fused.report.fused == len(fused.graphs) and fused.report.missed == 0, fused.report


@pytest.mark.parametrize("block", [GatingTable, DenseTable])
def test_tokens_in_two_dimensions(block):
    check_fused(block(), tokens(2, 5), tolerance=1e-9)


class InPlace(Loop):
    """Statements that add onto the flat rows of zeros, which then get the shape of the tokens back."""

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.k, -1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            self.add(out, token, expert(flat[token]) * weights[token, slot, None])
        return out.view(x.shape)

    def add(self, out, token, rows):
        out.index_add_(0, token, rows)


class InPlaceAssigned(InPlace):
    def add(self, out, token, rows):
        out[token] += rows


class ReadTwice(InPlaceAssigned):
    def forward(self, x):
        out = super().forward(x)
        return out + out.flip(0)


class CopiedBesideAlias(InPlace):
    """The flat rows have a second name, which is read too."""

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.k, -1)
        out = torch.zeros_like(flat)
        alias = out.view(x.shape)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            self.add(out, token, expert(flat[token]) * weights[token, slot, None])
        return out.clone().view(x.shape) + alias


@pytest.mark.parametrize("block", [InPlace, InPlaceAssigned, ReadTwice, CopiedBesideAlias])
def test_rows_added_in_place_are_one_block(block):
    fused = check_fused(block(), tokens(2, 5), tolerance=1e-9)
    assert sum(target.startswith("mok.") for target in fused.targets()) == 1


def test_weights_go_into_the_op_as_they_are():
    """A list of modules as a list, a stacked tensor as one."""
    for block, count in ((WhereIndexAdd, EXPERTS), (StackedWeights, 1)):
        fused = check_fused(block(), tokens(), tolerance=1e-9)
        (call,) = [n for gm in fused.graphs for n in gm.graph.nodes if str(n.target).startswith("mok.")]
        up, down = [len(a) for a in call.args if isinstance(a, (list, tuple)) and a][:2]
        assert (up, down) == ((2 * count, count) if count > 1 else (1, 1))


def test_experts_without_tokens():
    model = WhereIndexAdd()
    with torch.no_grad():
        model.gate.bias[2] = -1e9
    check_fused(model, tokens(), tolerance=1e-9)


def test_a_value_that_is_no_number_where_a_token_does_not_go():
    """Eager multiplies it by zero and spreads it, the fused block never computes it (see docs/numerics.md)."""
    model = Dense()
    with torch.no_grad():
        model.gate.bias[3] = -1e9
        model.experts[3].w2.weight.fill_(float("inf"))
    x = tokens()
    fused = Fused(model, verify=False)
    assert not model(x).isfinite().any() and fused(x).isfinite().all()
    assert fused.counts() == (1, 0)


# One detail is different


class OffsetId(WhereIndexAdd):
    def add(self, out, x, ids, weights, e, expert):
        return super().add(out, x, ids, weights, e + 1, expert)


class MissingExpert(WhereIndexAdd):
    def add(self, out, x, ids, weights, e, expert):
        return out if e == 1 else super().add(out, x, ids, weights, e, expert)


class ExpertTwice(WhereIndexAdd):
    def add(self, out, x, ids, weights, e, expert):
        out = super().add(out, x, ids, weights, e, expert)
        return super().add(out, x, ids, weights, e, expert) if e == 2 else out


class OtherMask(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.where(ids == e)
        other, _ = torch.where(ids.flip(0) == e)
        return out.index_add_(0, token, expert(x[other]) * weights[token, slot, None])


class OtherSlot(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.where(ids == e)
        return out.index_add_(0, token, expert(x[token]) * weights[token, 1 - slot, None])


class FirstSlotsWeight(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, _ = torch.where(ids == e)
        return out.index_add_(0, token, expert(x[token]) * weights[token, 0, None])


class OtherColumn(Loop):
    def add(self, out, x, ids, weights, e, expert):
        return out + self.table(ids, weights)[:, max(e - 1, 0), None] * expert(x)


class OtherPlace(Loop):
    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.where(ids == e)
        return out.index_add_(0, slot, expert(x[token]) * weights[token, slot, None])


class LosesRepeats(Loop):
    """Expert numbers that may repeat within a token: of two rows one is lost."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        return self.mix(x, (scores * 7).long()[:, :K] % EXPERTS, scores[:, :K])

    def add(self, out, x, ids, weights, e, expert):
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
        return out


class OtherActivation(WhereIndexAdd):
    def __init__(self):
        super().__init__()
        self.experts[2].forward = lambda x, m=self.experts[2]: m.w2(torch.tanh(m.w1(x)) * m.w3(x))


class DifferentWeightsOfExperts(Loop):
    def add(self, out, x, ids, weights, e, expert):
        return out + ((weights * (1 + e)) * (ids == e)).sum(-1, keepdim=True) * expert(x)


class UnroutedCounts(Loop):
    """What the other experts say is not multiplied by zero."""

    def add(self, out, x, ids, weights, e, expert):
        return out + (weights * (ids == e) + 0.1).sum(-1, keepdim=True) * expert(x)


class SoftMixture(Loop):
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        return sum(scores[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


class NegatedMask(Loop):
    def add(self, out, x, ids, weights, e, expert):
        return out + torch.where((ids != e).all(-1, keepdim=True), expert(x), 0.0)


class FilledWithOnes(FlatAssignment):
    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(K, 0)
        out = torch.ones_like(rows)
        for e, expert in enumerate(self.experts[:-1]):
            out[flat == e] = expert(rows[flat == e])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class HalfFenced(Loop):
    """A large negative number is not minus infinity."""

    def forward(self, x):
        logits = self.gate(x)
        best, ids = logits.topk(K, -1)
        table = torch.full_like(logits, -1.0).scatter(-1, ids, best).softmax(-1)
        return sum(table[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


@pytest.mark.parametrize(
    "block",
    [
        *(OffsetId, MissingExpert, ExpertTwice, OtherMask, OtherSlot, FirstSlotsWeight, OtherColumn, OtherPlace),
        *(LosesRepeats, OtherActivation, DifferentWeightsOfExperts, UnroutedCounts, SoftMixture, NegatedMask),
        *(FilledWithOnes, HalfFenced),
    ],
)
def test_one_detail_wrong(block):
    """Refused by proof, not by mok.verify, and the numbers stay eager's."""
    model = block()
    fused = Fused(model, fullgraph=block is not OtherMask)
    try:
        compare(model, fused, tokens(), tolerance=1e-9)
    except RuntimeError as error:  # OtherMask: as many rows as hits, or an error in eager too
        assert block is OtherMask and "size" in str(error)
    assert fused.report.fused == 0 and "verify" not in fused.reasons, fused.report


def test_a_block_is_called_by_the_module_around_its_experts():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([WhereIndexAdd(), Dense()])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    fused = check_fused(Layers(), tokens(), fused=2, tolerance=1e-9)
    assert [site.location.split(" /")[0] for site in fused.report.sites] == [
        "layers.0 [WhereIndexAdd]",
        "layers.1 [Dense]",
    ]


def test_a_block_in_a_branch_of_the_graph_is_named():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Dense()

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.block, lambda x: x * 2, (x,))

    model, x = Branch(), tokens().detach()
    fused = Fused(model)
    with torch.no_grad():
        assert torch.equal(fused(x), model(x))
    (site,) = fused.report.sites
    assert (site.status, site.reason) == ("missed", "no-match") and "cond" in site.detail
    assert site.location.startswith("block [Dense]")


class SoftStacked(SoftMixture):
    def forward(self, x):
        return torch.einsum(
            "te,teh->th", self.gate(x).sigmoid(), torch.stack([expert(x) for expert in self.experts], 1)
        )


class Thresholded(SoftMixture):
    """Zero where a score is low: sparse, though in an unknown way."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        return sum((scores * (scores > 0.2))[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


@pytest.mark.parametrize("block", [SoftMixture, SoftStacked, Thresholded])
def test_a_soft_mixture_is_told_apart(block):
    report = explain(block())(tokens())
    assert [site.reason for site in report.sites] == ["no-match" if block is Thresholded else "soft"], report
