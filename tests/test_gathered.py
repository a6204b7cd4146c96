"""Blocks that gather a weight for each row and multiply in batches, as Hugging Face does for few tokens."""

import pytest
import torch
from blocks import EXPERTS, HIDDEN, Gathered, K, Moe, routing, tokens
from harness import Fused, check_fused, check_open, compare
from torch.nn import functional as F


class RowVectors(Gathered):
    def multiply(self, weight, flat, rows):
        return torch.bmm(rows.unsqueeze(1), weight[flat].transpose(1, 2)).squeeze(1)


class Expanded(Gathered):
    def repeat(self, x):
        return x[:, None].expand(-1, self.k, -1).reshape(-1, self.hidden)


class WeighedOnGrid(Gathered):
    def weigh(self, out, weights):
        return out.view(-1, self.k, self.hidden) * weights[..., None]


@pytest.mark.parametrize("block", [Gathered, RowVectors, Expanded, WeighedOnGrid])
def test_spellings(block):
    fused = check_fused(block(), tokens())
    assert [str(s) for s in fused.specs] == ["silu(gate) * up (concat) -> float32"]
    assert not any("bmm" in t for t in fused.targets())


def test_square_weights_the_other_way_round():
    """H == 2I == I: shapes cannot tell a weight from its transpose."""

    class Backwards(Gathered):
        def multiply(self, weight, flat, rows):
            if weight is self.down:
                return torch.bmm(rows.unsqueeze(1), weight[flat]).squeeze(1)
            return super().multiply(weight, flat, rows)

    double = torch.float64
    check_fused(Backwards(hidden=8, inner=8, dtype=double), tokens(hidden=8, dtype=double), tolerance=1e-10)


class OtherIds(Gathered):
    def down_ids(self, flat):
        return (flat + 1) % self.num_experts


class RolledIds(Gathered):
    def down_ids(self, flat):
        return flat.roll(1)


class Tiled(Gathered):
    """Slots run over experts first, ids do not."""

    def repeat(self, x):
        return x.repeat(self.k, 1)


class ShiftedRows(Gathered):
    def repeat(self, x):
        return super().repeat(x.roll(1, 0)).roll(1, 0)


class WeighedByFirst(Gathered):
    def weigh(self, out, weights):
        return out * weights[:, :1].expand(-1, self.k).reshape(-1, 1).flip(0)


class SumOfWrongAxis(Gathered):
    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        gate, up = self.multiply(self.up, flat, self.repeat(x)).chunk(2, -1)
        out = self.weigh(self.multiply(self.down, flat, F.silu(gate) * up), weights)
        return out.view(self.k, -1, self.hidden).sum(0)


class ClampedIds(Gathered):
    """The last experts share their down projection."""

    def down_ids(self, flat):
        return flat.clamp(max=2)


class DetachedWeights(Gathered):
    def multiply(self, weight, flat, rows):
        return torch.bmm(weight[flat].detach(), rows.unsqueeze(-1)).squeeze(-1)


class NoGradWeights(Gathered):
    def multiply(self, weight, flat, rows):
        with torch.no_grad():
            picked = weight[flat]
        return torch.bmm(picked, rows.unsqueeze(-1)).squeeze(-1)


class NoGradRows(Gathered):
    def repeat(self, x):
        with torch.no_grad():
            return super().repeat(x)


@pytest.mark.parametrize(
    "block",
    [OtherIds, RolledIds, Tiled, ShiftedRows, ClampedIds, DetachedWeights, NoGradWeights, NoGradRows],
)
def test_one_piece_wrong(block):
    """Never fused; a form that is not recognised at all counts as no block."""
    model = block(dtype=torch.float64)
    fused = Fused(model)
    compare(model, fused, tokens(dtype=torch.float64), tolerance=1e-9)
    assert fused.report.fused == 0, fused.report
    assert "verify" not in fused.reasons, fused.report


def test_another_sum_stays_behind_the_experts():
    check_open(SumOfWrongAxis(), tokens())


def test_weights_of_any_origin_in_slot_order():
    """What stands at a slot is its weight, however it was computed."""
    check_fused(WeighedByFirst(dtype=torch.float64), tokens(dtype=torch.float64), tolerance=1e-9)


class Clamped(Gathered):
    """Sentinel ids clamped into the range, their weights masked: as under expert parallelism."""

    def forward(self, x, ids, weights):
        flat = ids.reshape(-1)
        mask = flat >= self.num_experts
        flat = flat.clamp(0, self.num_experts - 1)
        h = self.multiply(self.up, flat, self.repeat(x))
        gate, up = h.chunk(2, -1)
        out = self.multiply(self.down, flat, F.silu(gate) * up)
        scale = weights.reshape(-1).masked_fill(mask, 0.0)
        return (out * scale.unsqueeze(-1)).view(-1, self.k, self.hidden).sum(1)


def test_sentinels():
    ids, weights = routing(dtype=torch.float64)
    ids[3, 1] = ids[7] = EXPERTS
    model = Clamped(dtype=torch.float64)
    fused = check_fused(model, tokens(dtype=torch.float64), ids, weights, tolerance=1e-9)
    assert fused.report.missed == 0


def test_plain_batched_matmuls_are_no_blocks():
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), k)

    fused = Fused(Attention())
    q, k = torch.randn(2, K, 5, HIDDEN)
    fused(q, k)
    assert fused.counts() == (0, 0)


@pytest.mark.parametrize("block", [Moe, Gathered, RowVectors])
def test_a_block_without_gradients_in_a_graph_with_some(block):
    """A teacher beside its student: the op stands where gradients are off, as the block does."""

    class Distilled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = block(seed=1, dtype=torch.float64), block(dtype=torch.float64)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            return (self.student(x) - wanted).square()

    check_fused(Distilled(), tokens(dtype=torch.float64), fused=2, tolerance=1e-9)


class TopOne(Moe):
    """With one slot a token there is nothing to divide and nothing to add up."""

    def __init__(self, **kwargs):
        super().__init__(k=1, **kwargs)

    def route(self, x):
        return tuple(torch.softmax(x @ self.gate.t(), -1).topk(1, -1))[::-1]

    def gather(self, x, perm):
        return x[perm]

    def combine(self, x, rows, weights, perm):
        return self.place(x, rows * weights.reshape(-1)[perm].unsqueeze(-1), perm)

    def place(self, x, rows, perm):
        return self.restore(rows, perm)


class TopOneAdded(TopOne):
    def place(self, x, rows, perm):
        return torch.zeros_like(x).index_add_(0, perm, rows)


class TopOneWritten(TopOne):
    def place(self, x, rows, perm):
        out = torch.empty_like(x)
        out[perm] = rows
        return out


@pytest.mark.parametrize("block", [TopOne, TopOneAdded, TopOneWritten])
def test_one_expert_a_token(block):
    for dynamic in (False, True):
        check_fused(block(), tokens(), dynamic=dynamic)


class OtherPlace(TopOne):
    def place(self, x, rows, perm):
        return rows[perm]


def test_one_expert_a_token_put_elsewhere():
    check_open(OtherPlace(), tokens())
