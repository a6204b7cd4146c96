"""Experts in einsum and bmm: gathered matrices for each slot, or every expert on every token."""

import pytest
import torch
from harness import Fused, check_fused, compare, gradients, twin
from torch import nn
from torch.nn import functional as F

HIDDEN, INNER, EXPERTS, K, TOKENS = 16, 12, 5, 2, 9


class Block(nn.Module):
    k = K

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        for name, shape in self.shapes().items():
            setattr(self, name, nn.Parameter(torch.randn(EXPERTS, *shape) * 0.5))
        self.double()

    def shapes(self):
        return {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER)}

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), self.k, -1)
        return self.mix(x, ids, weights / weights.sum(-1, keepdim=True))

    def table(self, ids, weights):
        return weights.new_zeros(ids.shape[0], EXPERTS).scatter(1, ids, weights)

    def one_hot(self, ids):
        return F.one_hot(ids, EXPERTS).to(self.w1.dtype)


class GatheredEinsum(Block):
    """gpt-fast."""

    def mix(self, x, ids, weights):
        w1, w3, w2 = self.w1[ids], self.w3[ids], self.w2[ids]
        gate, up = F.silu(torch.einsum("ti,taoi->tao", x, w1)), torch.einsum("ti,taoi->tao", x, w3)
        return torch.einsum("tai,ta->ti", self.down(gate * up, w2), weights)

    def down(self, rows, w2):
        return torch.einsum("tao,taio->tai", rows, w2)


class GatheredFused(Block):
    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w2[ids])
        return (rows * weights.unsqueeze(-1)).sum(1)


class GatheredMatmul(Block):
    def mix(self, x, ids, weights):
        gate, up = (self.w13[ids] @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
        rows = (self.w2[ids] @ (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (rows * weights[..., None]).sum(dim=-2)


class DenseEinsum(Block):
    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,eih->tei", x, self.w13).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)
        return torch.einsum("te,teh->th", self.table(ids, weights), rows)


class OneHotDispatch(Block):
    """Dispatch and combine tables without capacity."""

    def mix(self, x, ids, weights):
        hits = self.one_hot(ids)
        rows = torch.einsum("te,th->eth", hits.sum(1), x)
        rows = F.silu(torch.bmm(rows, self.w1.transpose(1, 2))) * torch.bmm(rows, self.w3.transpose(1, 2))
        rows = torch.bmm(rows, self.w2.transpose(1, 2))
        return torch.einsum("te,eth->th", (hits * weights.unsqueeze(-1)).sum(1), rows)


class Llama4(Block):
    """Every expert on tokens times their scores, which are zero where a token does not go."""

    k, fence, act, score_dtype = 1, float("-inf"), staticmethod(F.silu), None

    def shapes(self):
        return {"gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}

    def forward(self, x):
        return self.scored(x, self.gate(x))

    def scored(self, x, logits):
        best, ids = logits.topk(self.k, dim=1)
        scores = torch.full_like(logits, self.fence).scatter_(1, ids, best)
        scores = torch.sigmoid(scores.float()).to(self.score_dtype or scores.dtype)
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.gate_up).chunk(2, -1)
        rows = torch.bmm(up * self.act(gate), self.down).view(-1, HIDDEN)
        return rows.reshape(EXPERTS, -1, HIDDEN).sum(0)


class Llama4Flattened(Llama4):
    """Tokens of several dimensions, flattened, and experts added onto a shared one: Llama 4 of transformers 4."""

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        return (flat * 2).add_(super().forward(flat))


class Sequences(Block):
    """Every expert on every token, the rows weighed as [E, B, S, H]: Qwen3-VL of transformers 4 in inference."""

    def shapes(self):
        return {"gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.k, -1)
        rows = flat.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN)
        gate, up = torch.bmm(rows, self.gate_up).chunk(2, -1)
        rows = torch.bmm(up * F.silu(gate), self.down)
        return self.weigh(rows, self.table(ids, weights), *x.shape[:2])

    def weigh(self, rows, table, batch, length):
        rows = rows.reshape(EXPERTS, batch, -1, HIDDEN)
        return (rows * table.transpose(0, 1).view(EXPERTS, batch, -1)[..., None]).sum(0)


class WithBias(Block):
    def shapes(self):
        return {**super().shapes(), "b13": (2 * INNER,), "b2": (HIDDEN,)}


class GatheredBias(WithBias):
    """The reference implementation of gpt-oss, which adds the second bias in place."""

    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("beck,bk->bec", self.w13[ids, ...], x) + self.b13[ids, ...]).chunk(2, -1)
        rows = torch.einsum("beck,bek->bec", self.w2[ids, ...], F.silu(gate) * up)
        rows += self.b2[ids, ...]
        return x + torch.einsum("bec,be->bc", rows, weights)


class GatheredColumns(WithBias):
    """Biases with one more dimension, as the matrices' columns."""

    def mix(self, x, ids, weights):
        rows = self.w13[ids] @ x[:, None, :, None] + self.b13[ids].unsqueeze(-1)
        gate, up = rows.squeeze(-1).chunk(2, -1)
        rows = self.b2[ids][..., None] + self.w2[ids] @ (F.silu(gate) * up).unsqueeze(-1)
        return (rows.squeeze(-1) * weights[..., None]).sum(1)


class DenseBias(WithBias):
    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("th,eih->tei", x, self.w13) + self.b13).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2) + self.b2
        return torch.einsum("te,teh->th", self.table(ids, weights), rows)


class DispatchBias(WithBias):
    def mix(self, x, ids, weights):
        hits = self.one_hot(ids)
        rows = torch.einsum("te,th->eth", self.dispatch(hits, weights), x)
        gate, up = (torch.bmm(rows, self.w13.transpose(1, 2)) + self.b13.unsqueeze(1)).chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, self.w2.transpose(1, 2)) + self.b2[:, None, :]
        return self.combine(hits, weights, rows)

    def dispatch(self, hits, weights):
        return hits.sum(1)

    def combine(self, hits, weights, rows):
        return torch.einsum("te,eth->th", (hits * weights.unsqueeze(-1)).sum(1), rows)


class BiasedSequences(Sequences):
    """GPT-OSS of transformers 4 in inference."""

    def shapes(self):
        return {**super().shapes(), "gate_up_bias": (2 * INNER,), "down_bias": (HIDDEN,)}

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        best, ids = torch.topk(self.gate(flat), self.k, -1)
        rows = flat.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN)
        rows = torch.bmm(rows, self.gate_up) + self.gate_up_bias[..., None, :]
        gate, up = rows[..., ::2].clamp(max=0.7), rows[..., 1::2].clamp(-0.7, 0.7)
        rows = torch.bmm((up + 1) * gate * torch.sigmoid(gate * 1.7), self.down) + self.down_bias[..., None, :]
        return self.weigh(rows, self.table(ids, best.softmax(-1)), *x.shape[:2])


GATHERED = [GatheredEinsum, GatheredFused, GatheredMatmul, GatheredBias, GatheredColumns]
DENSE = [DenseEinsum, OneHotDispatch, DenseBias, DispatchBias]


def tokens(*count):
    return torch.randn(*count or (TOKENS,), HIDDEN, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("block", GATHERED + DENSE)
def test_fused(block):
    fused = check_fused(block(), tokens(), tolerance=1e-9)
    assert [spec.activation for spec in fused.specs] == ["silu(gate) * up"]
    assert not any("bmm" in t or "einsum" in t for t in fused.targets())


@pytest.mark.parametrize("shape", [(TOKENS,), (2, TOKENS)])
@pytest.mark.parametrize("block", [DenseEinsum, DenseBias, GatheredEinsum, GatheredFused, OneHotDispatch])
def test_blocks_in_a_row(block, shape):
    """The second one's input is what the first one ends with, in whatever shape that came."""
    check_fused(nn.Sequential(Flat(block()), Flat(block())), tokens(*shape), fused=2, tolerance=1e-6)


class Flat(nn.Module):
    """A block of [T, H] on sequences."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x.flatten(0, -2)).view(x.shape)


def test_llama4():
    # Scores pass through float32: what is rounded there is rounded by both.
    fused = check_fused(Llama4(), tokens(), tolerance=1e-6)
    assert [spec.weight_on for spec in fused.specs] == ["input"]


class RoundedScores(Llama4):
    score_dtype = torch.bfloat16


class RoundedWeights(GatheredFused):
    def mix(self, x, ids, weights):
        return super().mix(x, ids, weights.bfloat16())


@pytest.mark.parametrize("tokens", [(TOKENS,), (2, 7)])
@pytest.mark.parametrize("block", GATHERED)
def test_one_slot(block, tokens):
    """A dimension of one stands anywhere once einsum is through with it."""

    class Single(block):
        k = 1

        def forward(self, x):
            weights, ids = torch.topk(self.gate(x).softmax(-1), 1, -1)
            return self.mix(x.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2)).view(x.shape)

    model, x = Single(), torch.randn(*tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    fused = Fused(model)
    compare(model, fused, x)
    assert fused.counts() == (1, 0), fused.report


class SlotsOfSequences(Block):
    def mix(self, x, ids, weights):
        rows = F.silu(torch.einsum("bth,btkih->btki", x, self.w1[ids]))
        return torch.einsum("btki,btkhi,btk->bth", rows, self.w2[ids], self.weigh(weights))

    def weigh(self, weights):
        return weights.exp()


class WeighedFeatures(Block):
    """The one slot's output times a vector is no weighted output."""

    def shapes(self):
        return super().shapes() | {"scale": (HIDDEN,)}

    def mix(self, x, ids, weights):
        rows = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        rows = torch.einsum("tki,tkhi->tkh", rows, self.w2[ids])
        return (rows * self.scale[0] * weights.exp()[..., None]).sum(1)


class OtherTokensWeights(Block):
    def mix(self, x, ids, weights):
        rows = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        rows = torch.einsum("tki,tkhi->tkh", rows, self.w2[ids])
        return torch.einsum("tkh,sk->th", rows, weights.exp())


class OtherTokensExperts(Block):
    def mix(self, x, ids, weights):
        rows = F.silu(torch.einsum("th,tkih->tki", x, self.w1[ids]))
        rows = torch.einsum("tki,tkhi->tkh", rows, self.w2[ids.flip(0)])
        return torch.einsum("tkh,tk->th", rows, weights.exp())


class SummedOverTokens(Block):
    def mix(self, x, ids, weights):
        rows = F.silu(torch.einsum("th,skih->tki", x, self.w1[ids]))
        return torch.einsum("tki,tkhi,tk->th", rows, self.w2[ids], weights.exp())


@pytest.mark.parametrize(
    ("block", "fused"),
    [(SlotsOfSequences, 1), (WeighedFeatures, None), (OtherTokensWeights, None), (OtherTokensExperts, 0),
     (SummedOverTokens, 0)],
)  # fmt: skip
@pytest.mark.parametrize("slots", [1, 2])
def test_few_slots(block, fused, slots):
    class Few(block):
        k = slots

        def forward(self, x):
            weights, ids = torch.topk(self.gate(x).softmax(-1), self.k, -1)
            return self.mix(x, ids, weights)

    model = Few()
    shape = (2, 7, HIDDEN) if block is SlotsOfSequences else (HIDDEN, HIDDEN)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compiled = Fused(model)
    compare(model, compiled, x)
    assert fused is None or compiled.counts()[0] == fused, compiled.report


# Scores of other tokens side by side may be another last bit of float32.
@pytest.mark.parametrize(("block", "tolerance"), [(RoundedScores, 1e-6), (RoundedWeights, 1e-9)])
def test_routing_weights_that_were_rounded_stay_so(block, tolerance):
    """With those before the rounding the results would differ by some thousandths."""
    check_fused(block(), tokens(), tolerance=tolerance)


class ScoresGiven(Llama4):
    """Logits that 16 bits hold exactly: the experts are the same ones in any dtype."""

    def forward(self, rows):
        return self.scored(rows[:, :HIDDEN], rows[:, HIDDEN:])


def test_llama4_in_16_bits():
    """Scores times tokens are rounded once, as in eager mode: against float64 the error is no larger than eager's."""
    torch.manual_seed(0)
    rows = torch.cat([torch.randn(192, HIDDEN), torch.rand(192, EXPERTS).argsort(-1)], dim=1).bfloat16()
    model = ScoresGiven().bfloat16()
    oracle, fused = twin(model).double(), Fused(model)
    exact, eager, found = (
        {"y": out, **grads}
        for out, grads, _ in (
            gradients(oracle, oracle, [rows.double().requires_grad_()]),
            gradients(model, model, [rows.requires_grad_()]),
            gradients(model, fused, [rows]),
        )
    )
    assert fused.counts() == (1, 0), fused.report
    for name in ("y", "input 0", "gate_up", "down"):
        errors = [float((side[name].double() - exact[name]).norm()) for side in (found, eager)]
        assert 0 < errors[0] <= 1.1 * errors[1], (name, errors)


@pytest.mark.parametrize("block", [*GATHERED, *DENSE, Llama4])
def test_one_token(block):
    check_fused(block(), tokens(1), tolerance=1e-6)


@pytest.mark.parametrize("shape", [(2, 7), (3, 3), (1, 6), (4, 1), (1, 1)])
@pytest.mark.parametrize("block", [Sequences, BiasedSequences, Llama4Flattened])
def test_tokens_of_several_dimensions(block, shape):
    check_fused(block(), tokens(*shape), tolerance=1e-6)
    model = block()
    fused = Fused(model, dynamic=True)
    for x in (tokens(*shape), tokens(5, 4)):
        compare(model, fused, x, tolerance=1e-6)
    assert fused.report.fused == len(fused.graphs) and fused.report.missed == 0, fused.report


@pytest.mark.parametrize("block", GATHERED + DENSE)
def test_inference_and_any_number_of_tokens(block):
    model = block()
    fused = Fused(model, dynamic=True)
    for count in (TOKENS, 4, 23):
        with torch.no_grad():
            x = tokens(count)
            assert torch.allclose(fused(x), model(x), rtol=1e-9, atol=1e-12)
    assert fused.report.fused == len(fused.graphs) and fused.report.missed == 0, fused.report


# One detail is different


class OtherDownIds(GatheredFused):
    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w2[ids.flip(1)])
        return (rows * weights.unsqueeze(-1)).sum(1)


class WeightsOfOtherSlots(GatheredEinsum):
    def mix(self, x, ids, weights):
        return super().mix(x, ids, weights.flip(0).sum(1, keepdim=True).expand(-1, K))


class ContractsTokens(Block):
    """A sum over tokens, not over slots."""

    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,tkih->tki", x, self.w13[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w2[ids])
        return torch.einsum("tk,tkh->kh", weights, rows)


class MixesSlots(GatheredEinsum):
    """Each slot's rows meet the matrices of all slots of the token."""

    def down(self, rows, w2):
        return torch.einsum("tbo,taio->tai", rows, w2)


class SquareBackwards(Block):
    """The down projection contracts the other side: sizes are equal, the weight is not."""

    def shapes(self):
        return {"w1": (HIDDEN, HIDDEN), "w3": (HIDDEN, HIDDEN), "w2": (HIDDEN, HIDDEN)}

    def mix(self, x, ids, weights):
        gate = F.silu(torch.einsum("ti,taoi->tao", x, self.w1[ids]))
        up = torch.einsum("ti,taio->tao", x, self.w3[ids])
        rows = torch.einsum("tao,taio->tai", gate * up, self.w2[ids])
        return torch.einsum("tai,ta->ti", rows, weights)


class DenseWithoutRouting(DenseEinsum):
    def mix(self, x, ids, weights):
        return super().mix(x, ids, weights)

    def table(self, ids, weights):
        return weights.sum(1, keepdim=True).expand(-1, EXPERTS)


class OtherTable(OneHotDispatch):
    """Dispatched by one routing, combined by another."""

    def mix(self, x, ids, weights):
        rows = torch.einsum("te,th->eth", self.one_hot(ids).sum(1), x)
        rows = F.silu(torch.bmm(rows, self.w1.transpose(1, 2))) * torch.bmm(rows, self.w3.transpose(1, 2))
        rows = torch.bmm(rows, self.w2.transpose(1, 2))
        other = self.one_hot(ids.roll(1, 0))
        return torch.einsum("te,eth->th", (other * weights.unsqueeze(-1)).sum(1), rows)


class BiasOfOtherSlots(WithBias):
    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("beck,bk->bec", self.w13[ids], x) + self.b13[ids.flip(-1)]).chunk(2, -1)
        rows = torch.einsum("beck,bek->bec", self.w2[ids], F.silu(gate) * up)
        return torch.einsum("bec,be->bc", rows, weights)


class BiasOfSlots(WithBias):
    """A bias that depends on the place of a slot, not on its expert."""

    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("beck,bk->bec", self.w13[ids], x) + self.b13[:K]).chunk(2, -1)
        rows = torch.einsum("beck,bek->bec", self.w2[ids], F.silu(gate) * up)
        return torch.einsum("bec,be->bc", rows, weights)


class BiasOfTokens(DenseBias):
    """As many tokens as experts."""

    def forward(self, x):
        return super().forward(x[:EXPERTS])

    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("th,eih->tei", x, self.w13) + self.b13[:, None]).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2) + self.b2
        return torch.einsum("te,teh->th", self.table(ids, weights), rows)


class BiasBehindMask(DenseBias):
    """The bias of every expert counts, for every token."""

    def mix(self, x, ids, weights):
        gate, up = (torch.einsum("th,eih->tei", x, self.w13) + self.b13).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)
        return (rows * self.one_hot(ids).sum(1)[..., None] + self.b2).sum(1)


class BiasOfIdleExperts(DispatchBias):
    """Scores on the input alone, which are zero where a token does not go; biases are not."""

    def dispatch(self, hits, weights):
        return (hits * weights.unsqueeze(-1)).sum(1)

    def combine(self, hits, weights, rows):
        return rows.sum(0)


class NotFenced(Llama4):
    fence = -1.0


class NotZeroAtZero(Llama4):
    act = staticmethod(lambda gate: torch.sigmoid(gate).mul(2))

    def forward(self, x):
        return self.scored(x, self.gate(x))

    def scored(self, x, logits):
        best, ids = logits.topk(self.k, dim=1)
        scores = torch.full_like(logits, self.fence).scatter_(1, ids, best).sigmoid()
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.gate_up).chunk(2, -1)
        rows = torch.bmm((up + 1) * self.act(gate), self.down)
        return rows.sum(0)


class RowsOfAnotherOrder(Llama4):
    """The scores run over experts first, the repeated rows over tokens."""

    def forward(self, x):
        return self.scored(x, self.gate(x))

    def scored(self, x, logits):
        best, ids = logits.topk(self.k, dim=1)
        scores = torch.full_like(logits, self.fence).scatter_(1, ids, best).sigmoid()
        rows = x.repeat_interleave(EXPERTS, 0) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), self.gate_up).chunk(2, -1)
        return torch.bmm(up * self.act(gate), self.down).sum(0)


class SwappedRows(Sequences):
    """Sequences and their positions are swapped in the rows alone."""

    def weigh(self, rows, table, batch, length):
        rows = rows.reshape(EXPERTS, batch, -1, HIDDEN).transpose(1, 2)
        return (rows * table.transpose(0, 1).view(EXPERTS, batch, -1)[..., None]).sum(0)


class SwappedWeights(Sequences):
    def weigh(self, rows, table, batch, length):
        weights = table.transpose(0, 1).view(EXPERTS, batch, -1).transpose(1, 2)
        return (rows.reshape(EXPERTS, batch, -1, HIDDEN) * weights[..., None]).sum(0)


class SwappedBoth(Sequences):
    """The right sums, in another order than the tokens."""

    def weigh(self, rows, table, batch, length):
        weights = table.transpose(0, 1).view(EXPERTS, batch, -1).transpose(1, 2)
        return (rows.reshape(EXPERTS, batch, -1, HIDDEN).transpose(1, 2) * weights[..., None]).sum(0)


class SumsSequences(Sequences):
    def weigh(self, rows, table, batch, length):
        rows = rows.reshape(EXPERTS, batch, -1, HIDDEN)
        return (rows * table.transpose(0, 1).view(EXPERTS, batch, -1)[..., None]).sum(1)


class RepeatsInside(Sequences):
    """Copies of the tokens stand between sequences and positions, not before them."""

    def forward(self, x):
        flat = x.reshape(-1, HIDDEN)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.k, -1)
        rows = x[:, None].expand(-1, self.k, -1, -1).reshape(-1, 1, HIDDEN)
        ids = ids.view(*x.shape[:2], self.k)
        gate, up = torch.bmm(rows, self.gate_up[ids].reshape(-1, HIDDEN, 2 * INNER)).chunk(2, -1)
        rows = torch.bmm(up * F.silu(gate), self.down[ids].reshape(-1, INNER, HIDDEN))
        return (rows.view(-1, self.k, HIDDEN) * weights[..., None]).sum(1).view(x.shape)


@pytest.mark.parametrize("block", [SwappedRows, SwappedWeights, SwappedBoth, SumsSequences, RepeatsInside])
def test_one_detail_of_several_dimensions_wrong(block):
    """As many sequences as positions: shapes say nothing."""
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(3, 3))
    assert fused.report.fused == 0 and "verify" not in fused.reasons, fused.report


class Turned(DenseEinsum):
    """As many tokens as features, and the sum is turned on its side."""

    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,eih->eti", x, self.w13).chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, self.w2.transpose(1, 2))
        return (rows * self.table(ids, weights).t().unsqueeze(-1)).transpose(1, 2).sum(0)


def test_a_sum_on_its_side():
    model = Turned()
    fused = Fused(model)
    compare(model, fused, tokens(HIDDEN))
    assert fused.report.fused == 0 and "verify" not in fused.reasons, fused.report


@pytest.mark.parametrize(
    "block",
    [
        *(OtherDownIds, WeightsOfOtherSlots, ContractsTokens, MixesSlots, DenseWithoutRouting),
        *(OtherTable, NotFenced, NotZeroAtZero, RowsOfAnotherOrder),
        *(BiasOfOtherSlots, BiasOfSlots, BiasOfTokens, BiasBehindMask, BiasOfIdleExperts),
    ],
)
def test_one_detail_wrong(block):
    """Never a wrong number: refused by proof, or it was no mistake."""
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(), tolerance=1e-6)
    assert fused.counts() == (0, 1) and "verify" not in fused.reasons, fused.report


def test_sides_of_square_weights():
    check_fused(SquareBackwards(), tokens(), tolerance=1e-9)


class NormBetween(DenseEinsum):
    """Something that is not understood stands between the projections."""

    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,eih->tei", x, self.w13).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", (F.silu(gate) * up).cumsum(-1), self.w2)
        return torch.einsum("te,teh->th", self.table(ids, weights), rows)


class SoftMixture(DenseEinsum):
    """Every expert counts for every token."""

    def forward(self, x):
        return self.mix(x, None, None)

    def mix(self, x, ids, weights):
        self.shares = self.gate(x).softmax(-1)
        return super().mix(x, ids, weights)

    def table(self, ids, weights):
        return self.shares


class SoftMixtureOfProducts(SoftMixture):
    def mix(self, x, ids, weights):
        gate, up = torch.einsum("th,eih->tei", x, self.w13).chunk(2, -1)
        rows = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)
        return (rows * self.gate(x).softmax(-1)[..., None]).sum(1)


class CutOff(SoftMixture):
    """Scores that are zero for some experts, though nothing chooses."""

    def table(self, ids, weights):
        return torch.relu(self.shares - 0.2)


@pytest.mark.parametrize("block", [SoftMixture, SoftMixtureOfProducts])
def test_soft_mixtures_are_named(block):
    """No sparse block, and no fault of its spelling."""
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(), tolerance=1e-6)
    assert fused.counts() == (0, 1) and fused.reasons == ["soft"], fused.report
    assert "top-k" in fused.report.sites[0].cure


@pytest.mark.parametrize("block", [NormBetween, CutOff, DenseWithoutRouting])
def test_experts_on_every_token_are_named(block):
    """What is no form that can be fused is a miss: a choice or weights of tokens and experts say that these are
    experts."""
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(), tolerance=1e-6)
    assert fused.counts() == (0, 1) and fused.reasons[0] in ("no-match", "post-norm"), fused.report
