"""Graphs that look like an MoE block and are none, or that must not be touched: left alone, for the right reason, with
the numbers of eager. Many are one step away from a spelling that is fused, or fit only because two sizes happen to be
equal. All run with mok.verify, and none may be refused only by it."""

import inspect

import pytest
import torch
from blocks import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOKENS,
    Biased,
    Fixed,
    Interleaved,
    K,
    Moe,
    Sentinel,
    Separate,
    grouped,
    routing,
    tokens,
)
from harness import Fused, check_fused, check_open, check_refused, check_stopped
from torch.nn import functional as F

from mok_compile import ops


class WeightsNotPermuted(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1).unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class WeightsPermutedTwice(Moe):
    def combine(self, x, rows, weights, perm):
        return super().combine(x, rows, weights.reshape(-1)[perm], perm)


class WeightsTwice(Moe):
    def combine(self, x, rows, weights, perm):
        return super().combine(x, rows * weights.reshape(-1)[perm].unsqueeze(-1), weights, perm)


class WeightsOfColumns(Moe):
    """Without unsqueeze the weights meet the columns; it runs because T * K == H."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm]
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class WeightsExpandedAlongRows(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].expand(self.hidden, self.hidden)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class OneWeightForAll(Moe):
    """A weight per rank, the same for all tokens."""

    def combine(self, x, rows, weights, perm):
        grid = self.restore(rows, perm).view(-1, self.k, self.hidden)
        return (grid * weights[:1].unsqueeze(-1)).sum(1)


class ScalarWeight(Moe):
    def combine(self, x, rows, weights, perm):
        rows = self.restore(rows, perm) * weights[:1, :1]
        return rows.view(-1, self.k, self.hidden).sum(1)


class LongWeights(Moe):
    """Weights of more slots than there are; the permutation picks from the first ones."""

    def combine(self, x, rows, weights, perm):
        weights = torch.cat([weights.reshape(-1), weights.new_ones(self.k)])
        rows = rows * weights[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class NotPutBack(Moe):
    def restore(self, rows, perm):
        return rows


class PutBackByPerm(Moe):
    """The permutation instead of its inverse."""

    def restore(self, rows, perm):
        return rows[perm]


class InverseOfNothing(Moe):
    """One number broadcast where the positions should stand."""

    def restore(self, rows, perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(1)
        return rows[inverse]


class Descending(Moe):
    def sort(self, ids):
        return torch.sort(ids.reshape(-1), descending=True)


class SortedRowsOfOthers(Moe):
    """The rows are those of the next slot."""

    def gather(self, x, perm):
        return x[(perm + 1) % perm.shape[0] // self.k]


class WrongTokens(Moe):
    """perm % T is the token only if slots ran over tokens first."""

    def gather(self, x, perm):
        return x[perm % x.shape[0]]


class GatherByWrongK(Moe):
    def gather(self, x, perm):
        return x[perm // (self.k + 1)]


class ViewByWrongK(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        rows = self.restore(rows, perm).view(-1, 2 * self.k, self.hidden).sum(1)
        return rows.repeat_interleave(2, 0)


class SumOverTokens(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(0).sum(0).expand(x.shape)


class SumAxisOfEqualSize(Moe):
    """T == K: the other axis has the same size."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(x.shape[0], self.k, self.hidden).sum(0)


class Mean(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).mean(1)


class Maximum(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).amax(1)


class ShiftedOffsets(Moe):
    def offsets(self, sorted_ids):
        return super().offsets(sorted_ids).sub(1).clamp(min=0)


class ExclusiveOffsets(Moe):
    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return (torch.cumsum(counts, 0) - counts).to(torch.int32)


class BinsOffByOne(Moe):
    """E bins over one expert more, and one expert more to choose from: the last two share a bin."""

    def route(self, x):
        more = torch.cat([self.gate, self.gate[:1] * 0.5])
        weights, ids = torch.topk(torch.softmax(x @ more.t(), -1), self.k, -1)
        return ids, weights

    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts)
        return torch.cumsum(counts, 0, dtype=torch.int32)


class BinsOfGivenIds(BinsOffByOne):
    """Of ids that need not be the experts' own."""

    def route(self, x):
        ids, weights = Moe.route(self, x)
        return ids + 0, weights


class CountsFromOne(Moe):
    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=1, max=self.num_experts)
        return torch.cumsum(counts, 0, dtype=torch.int32)


class OffsetsInBytes(Moe):
    """Right for 255 rows at most."""

    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return torch.cumsum(counts, 0, dtype=torch.uint8).to(torch.int32)


class CountsInBytes(Moe):
    def experts(self, x, ids, weights):
        self.unsorted = ids.flatten()
        return super().experts(x, ids, weights)

    def offsets(self, sorted_ids):
        counts = torch.nn.functional.one_hot(self.unsorted, self.num_experts).sum(0, dtype=torch.uint8)
        return torch.cumsum(counts, 0, dtype=torch.int32)


class CountsInShorts(Moe):
    """Right for 32767 rows of an expert at most."""

    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return torch.cumsum(counts.to(torch.int16), 0, dtype=torch.int32)


class CountsOfBooleans(Moe):
    def offsets(self, sorted_ids):
        return super().offsets(sorted_ids.bool())


class SearchsortedLeft(Moe):
    def offsets(self, sorted_ids):
        return torch.searchsorted(sorted_ids, torch.arange(self.num_experts)).int()


class Dropout(Moe):
    def activate(self, h):
        return F.dropout(super().activate(h), 0.0 if not self.training else 1e-9)


class NormBeforeCombine(Moe):
    def combine(self, x, rows, weights, perm):
        return super().combine(x, F.layer_norm(rows, (self.hidden,)), weights, perm)


class ActivationBehindDown(Moe):
    def combine(self, x, rows, weights, perm):
        return super().combine(x, torch.tanh(rows), weights, perm)


class NormInside(Moe):
    def activate(self, h):
        return F.normalize(super().activate(h), dim=-1)


class OnlyGate(Moe):
    def activate(self, h):
        return F.silu(h.chunk(2, -1)[0])


class UnequalHalves(Moe):
    def activate(self, h):
        gate, up = h.split([self.inner - 2, self.inner + 2], -1)
        return F.silu(F.pad(gate, (0, 2))) * up[:, 2:]


class OverlappingHalves(Moe):
    def activate(self, h):
        return F.silu(h[:, : self.inner]) * h[:, 1 : self.inner + 1]


class ReversedUp(Moe):
    def activate(self, h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up.flip(-1)


class OuterTensor(Moe):
    """A learned scale inside the activation."""

    def make_weights(self):
        super().make_weights()
        self.scale = self.new(self.inner)

    def activate(self, h):
        return super().activate(h) * self.scale


class Normed(Moe):
    """A norm over each row of the experts' outputs."""

    norm = staticmethod(lambda rows: torch.softmax(rows, -1))

    def project_down(self, rows, sorted_ids, offsets):
        return self.norm(super().project_down(rows, sorted_ids, offsets))


class LayerNormed(Normed):
    norm = staticmethod(lambda rows: torch.nn.functional.layer_norm(rows, rows.shape[-1:]))


@pytest.mark.parametrize("block", [Normed, LayerNormed])
def test_norms_of_the_outputs(block):
    check_open(block(), tokens(), detail="works on the output of the down projection")


class LowRank(Moe):
    """LoRA beside the stacked weight of gate and up."""

    scale = 0.5

    def make_weights(self):
        super().make_weights()
        self.a = self.new(self.num_experts, self.hidden, 2)
        self.b = self.new(self.num_experts, 2, 2 * self.inner)

    def project_up(self, rows, sorted_ids, offsets):
        path = grouped(grouped(rows, self.a, offsets), self.b, offsets)
        return super().project_up(rows, sorted_ids, offsets) + path * self.scale


class Merged(LowRank):
    def project_up(self, rows, sorted_ids, offsets):
        return grouped(rows, self.up.transpose(1, 2) + self.scale * (self.a @ self.b), offsets)


def test_low_rank_paths_are_named_and_fused_once_they_are_merged():
    check_refused(LowRank(), tokens(), reason="activation", detail="LoRA")
    check_fused(Merged(), tokens())


class ThirdProjection(Moe):
    def make_weights(self):
        super().make_weights()
        self.third = self.new(self.num_experts, self.hidden, self.hidden, scale=0.5)

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(super().project_down(rows, sorted_ids, offsets), self.third, offsets)


class WeightsBeforeActivation(Moe):
    def experts(self, x, ids, weights):
        self.scale = weights.reshape(-1)
        return super().experts(x, ids, weights)

    def gather(self, x, perm):
        self.sorted_scale = self.scale[perm].unsqueeze(-1)
        return super().gather(x, perm)

    def activate(self, h):
        return super().activate(h * self.sorted_scale)


@pytest.mark.parametrize(
    ("block", "reason", "detail"),
    [
        (WeightsNotPermuted, "post-norm", "works on the output of the down projection"),
        (WeightsPermutedTwice, "post-norm", ""),
        (WeightsTwice, "post-norm", "twice"),
        (OneWeightForAll, "post-norm", "mul.Tensor is not understood"),
        (ScalarWeight, "post-norm", ""),
        (LongWeights, "post-norm", ""),
        (NotPutBack, "post-norm", ""),
        (PutBackByPerm, "post-norm", ""),
        (InverseOfNothing, "post-norm", ""),
        (Descending, "no-match", ""),
        (SortedRowsOfOthers, "no-match", "not proven to be tokens gathered by expert"),
        (WrongTokens, "no-match", "not proven to be tokens gathered by expert"),
        (GatherByWrongK, "post-norm", ""),
        (ViewByWrongK, "post-norm", ""),
        (SumOverTokens, "post-norm", "another dimension"),
        (Mean, "post-norm", ""),
        (Maximum, "post-norm", ""),
        (ShiftedOffsets, "no-match", "offsets"),
        (ExclusiveOffsets, "no-match", "offsets"),
        (BinsOffByOne, "no-match", "offsets"),
        (BinsOfGivenIds, "no-match", "offsets"),
        (CountsFromOne, "no-match", "offsets"),
        (CountsOfBooleans, "no-match", "offsets"),
        (OffsetsInBytes, "no-match", "offsets"),
        (CountsInBytes, "no-match", "offsets"),
        (CountsInShorts, "no-match", "offsets"),
        (SearchsortedLeft, "no-match", "offsets"),
        (NormBeforeCombine, "post-norm", ""),
        (ActivationBehindDown, "post-norm", "tanh"),
        (NormInside, "no-match", ""),
        (OnlyGate, "layout", "unusual choice of columns"),
        (UnequalHalves, "no-match", ""),
        (OverlappingHalves, "no-match", "not into its two halves"),
        (ReversedUp, "no-match", "flip"),
        (OuterTensor, "activation", "from elsewhere"),
        (WeightsBeforeActivation, "no-match", ""),
    ],
)
def test_one_piece_wrong(block, reason, detail):
    check_stopped(block(), tokens(), reason=reason, detail=detail)


def test_a_third_projection_stays_behind_the_other_two():
    check_open(ThirdProjection(), tokens(), detail="third projection", missed=1)


@pytest.mark.parametrize("block", [WeightsOfColumns, WeightsExpandedAlongRows])
def test_weights_along_columns_where_sizes_coincide(block):
    check_open(block(k=2), tokens(HIDDEN // 2), detail="mul")


def test_sum_axis_where_sizes_coincide():
    check_open(SumAxisOfEqualSize(), tokens(K), detail="another dimension")


class SwappedHalves(Moe):
    def activate(self, h):
        gate, up = h.chunk(2, -1)
        return gate * F.silu(up)


class SwappedInterleaved(Interleaved):
    def activate(self, h):
        return h[..., ::2] * F.silu(h[..., 1::2])


@pytest.mark.parametrize(("block", "layout"), [(SwappedHalves, "concat"), (SwappedInterleaved, "interleaved")])
def test_swapped_halves_are_fused_as_what_they_are(block, layout):
    fused = check_fused(block(), tokens())
    assert [str(s) for s in fused.specs] == [f"gate * silu(up) ({layout}) -> float32"]


class SwappedSeparate(Separate):
    def activate(self, h):
        return h[0] * F.silu(h[1])


def test_separate_weights_are_named_by_their_use():
    """Which of two weights is called gate is ours to choose; the gradients say whether they stay apart."""
    fused = check_fused(SwappedSeparate(), tokens())
    assert [str(s) for s in fused.specs] == ["silu(gate) * up (separate) -> float32"]


# Ids, offsets, permutations and biases of another routing


class TwoRoutings(Moe):
    """Each method may take `self.other`, the ids of another router (or [S] sorted ones)."""

    def make_weights(self):
        super().make_weights()
        self.second_gate = self.new(self.num_experts, self.hidden)

    def route(self, x):
        ids, weights = super().route(x)
        self.other = torch.topk(x @ self.second_gate.t(), self.k, -1)[1]
        self.other_sorted, self.other_perm = torch.sort(self.other.reshape(-1))
        return ids, weights


class OtherOffsets(TwoRoutings):
    def offsets(self, sorted_ids):
        return super().offsets(self.other_sorted)


class OtherRestore(TwoRoutings):
    def restore(self, rows, perm):
        return super().restore(rows, self.other_perm)


class OtherGather(TwoRoutings):
    def gather(self, x, perm):
        return super().gather(x, self.other_perm)


class OtherWeights(TwoRoutings):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[self.other_perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class OtherDownOffsets(TwoRoutings):
    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(rows, sorted_ids, self.offsets(self.other_sorted))


class OtherIndexAdd(TwoRoutings):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm][:, None]
        return torch.zeros_like(x).index_add_(0, self.other_perm // self.k, rows)


@pytest.mark.parametrize("block", [OtherOffsets, OtherGather, OtherDownOffsets])
def test_ids_of_another_routing(block):
    check_refused(block(), tokens(), reason="no-match")


@pytest.mark.parametrize("block", [OtherRestore, OtherWeights, OtherIndexAdd])
def test_ids_of_another_routing_behind_the_experts(block):
    check_open(block(), tokens(), detail="another")


class OtherBias(Biased):
    def project_up(self, rows, sorted_ids, offsets):
        return Moe.project_up(self, rows, sorted_ids, offsets) + self.up_bias[sorted_ids.flip(0)]


class BiasOfClampedIds(Biased):
    """The last experts share a bias."""

    def project_up(self, rows, sorted_ids, offsets):
        return Moe.project_up(self, rows, sorted_ids, offsets) + self.up_bias[sorted_ids.clamp(max=2)]


class BiasOfShiftedIds(Biased):
    def project_up(self, rows, sorted_ids, offsets):
        return Moe.project_up(self, rows, sorted_ids, offsets) + self.up_bias[sorted_ids.clamp(min=0) - 1]


class BiasOfBooleans(Biased):
    """All experts but the first share a bias."""

    def project_up(self, rows, sorted_ids, offsets):
        return Moe.project_up(self, rows, sorted_ids, offsets) + self.up_bias[sorted_ids.bool().long()]


class BiasBehindActivation(Biased):
    columns = 1

    def make_weights(self):
        super().make_weights()
        self.down_bias.data.zero_()

    def project_up(self, rows, sorted_ids, offsets):
        return torch.relu(Moe.project_up(self, rows, sorted_ids, offsets)) + self.up_bias[sorted_ids]

    def activate(self, h):
        return h


class OneBiasForAll(Biased):
    """H == E: a plain [H] bias for all experts."""

    def project_down(self, rows, sorted_ids, offsets):
        return Moe.project_down(self, rows, sorted_ids, offsets) + self.down_bias[0]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (OtherBias, "no-match"),
        (BiasOfClampedIds, "activation"),
        (BiasOfShiftedIds, "no-match"),
        (BiasOfBooleans, "no-match"),
        (BiasBehindActivation, "no-match"),
        (OneBiasForAll, "post-norm"),
    ],
)
def test_biases_of_the_wrong_rows(block, reason):
    check_stopped(block(), tokens(), reason=reason)


class BiasByCounts(Biased):
    """Padded with a row for those of no expert, as torchtitan's gpt-oss has it."""

    def project_up(self, rows, sorted_ids, offsets):
        counts = torch.cat([offsets[:1], offsets.diff(), (len(rows) - offsets[-1])[None]]).long()
        bias = torch.cat([self.up_bias, self.up_bias.new_zeros(1, self.up_bias.shape[1])])
        return Moe.project_up(self, rows, sorted_ids, offsets) + bias.repeat_interleave(
            counts, 0, output_size=len(rows)
        )


@pytest.mark.parametrize(("block", "by"), [(OtherBias, "flip"), (BiasByCounts, "repeat_interleave")])
def test_what_picks_a_bias_is_named(block, by):
    check_refused(block(), tokens(), reason="no-match", detail=by)


class WrongSentinel(Sentinel):
    """Masks the last expert, which has rows."""

    limit = -1

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        offsets = self.offsets(sorted_ids)
        mask = (sorted_ids >= self.num_experts + self.limit).unsqueeze(-1)
        rows = self.mask_rows(x[perm // self.k], mask)
        rows = self.project_down(self.activate(self.project_up(rows, None, offsets)), None, offsets)
        return Moe.combine(self, x, self.mask_out(rows, mask), weights, perm)

    def mask_rows(self, rows, mask):
        return rows.masked_fill(mask, 0.0)

    def mask_out(self, rows, mask):
        return rows


class WrongSentinelBehind(WrongSentinel):
    def mask_rows(self, rows, mask):
        return rows

    def mask_out(self, rows, mask):
        return rows.masked_fill(mask, 0.0)


class MaskOfOne(WrongSentinelBehind):
    limit = 0

    def mask_out(self, rows, mask):
        return rows.masked_fill(mask, 1.0)


class MaskOfRest(WrongSentinelBehind):
    limit = 0

    def mask_out(self, rows, mask):
        return rows.masked_fill(~mask, 0.0)


class MaskOfColumns(WrongSentinelBehind):
    """T * K == H and no unsqueeze: the mask meets the columns."""

    limit = 0

    def mask_out(self, rows, mask):
        return rows.masked_fill(mask.squeeze(-1), 0.0)


def test_masks_of_something_else():
    check_refused(WrongSentinel(), tokens(), *routing(), reason="no-match", detail="mask")


@pytest.mark.parametrize("block", [WrongSentinelBehind, MaskOfOne, MaskOfRest])
def test_masks_of_something_else_behind_the_experts(block):
    check_open(block(), tokens(), *routing(), detail="mask")


def test_mask_along_columns_where_sizes_coincide():
    ids, weights = routing(HIDDEN // 2, k=2)
    ids[2, 1] = ids[5, 0] = EXPERTS
    check_open(MaskOfColumns(k=2), tokens(HIDDEN // 2), ids, weights, detail="mask")


class HalfScatter(Moe):
    """The index covers half of the columns: the other half stays zero."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        index = (perm // self.k).unsqueeze(-1).expand(-1, self.hidden // 2)
        return torch.zeros_like(x).scatter_add(0, index, rows)


class ScaledIndexAdd(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, perm // self.k, rows, alpha=2)


class OverwritingScatter(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return torch.zeros_like(x).index_put((perm // self.k,), rows)


@pytest.mark.parametrize("block", [HalfScatter, ScaledIndexAdd, OverwritingScatter])
@torch.no_grad()
def test_scatter_that_is_no_combine(block):
    check_open(block(), tokens())


# Gradients


class DetachRows(Moe):
    def activate(self, h):
        return super().activate(h).detach()


class DetachGatheredWeights(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].detach().unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class NoGradGatheredWeights(Moe):
    def combine(self, x, rows, weights, perm):
        with torch.no_grad():
            scale = weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows * scale, perm).view(-1, self.k, self.hidden).sum(1)


class NoGradWeightView(Moe):
    """Only the last view of the weights is taken without gradients."""

    def combine(self, x, rows, weights, perm):
        with torch.no_grad():
            flat = weights.reshape(-1)
        rows = rows * flat[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class NoGradActivation(Moe):
    def activate(self, h):
        with torch.no_grad():
            return super().activate(h)


class NoGradGather(Moe):
    def gather(self, x, perm):
        with torch.no_grad():
            return super().gather(x, perm)


class NoGradTranspose(Moe):
    """The transposed view is taken without gradients: eager gives the weight none."""

    def project_up(self, rows, sorted_ids, offsets):
        with torch.no_grad():
            weight = self.up.transpose(1, 2)
        return grouped(rows, weight, offsets)


class DataTranspose(Moe):
    def project_up(self, rows, sorted_ids, offsets):
        return grouped(rows, self.up.data.transpose(1, 2), offsets)


class DetachBias(Biased):
    def project_up(self, rows, sorted_ids, offsets):
        return Moe.project_up(self, rows, sorted_ids, offsets) + self.up_bias[sorted_ids].detach()


class NoGradBias(Biased):
    def project_up(self, rows, sorted_ids, offsets):
        with torch.no_grad():
            bias = self.up_bias[sorted_ids]
        return Moe.project_up(self, rows, sorted_ids, offsets) + bias


@pytest.mark.parametrize("block", [DetachRows, NoGradActivation, NoGradGather, DetachBias])
def test_gradient_cut_inside_the_block(block):
    check_refused(block(), tokens(), reason="no-match")


@pytest.mark.parametrize("block", [DetachGatheredWeights, NoGradGatheredWeights])
def test_gradient_of_the_routing_weights_cut(block):
    check_open(block(), tokens())


def test_gradient_of_the_bias_cut():
    check_refused(NoGradBias(), tokens(), reason="no-match")


@pytest.mark.parametrize("block", [NoGradTranspose, DataTranspose, NoGradWeightView])
def test_gradient_cut_before_the_block(block):
    """The operand that has no gradient in eager gets none: not an error, and not a reason to refuse."""
    check_fused(block(), tokens())


# Values that others read, and values that change


class ReturnsInside(Moe):
    def forward(self, x):
        flat = x.reshape(-1, self.hidden)
        ids, weights = self.route(flat)
        y = self.experts(flat, ids, weights)
        return y + self.kept.sum()

    def activate(self, h):
        self.kept = super().activate(h)
        return self.kept


def test_value_inside_is_read_outside():
    check_refused(ReturnsInside(), tokens(), reason="interior-use", detail="outside")


class NormalisedByItself(Moe):
    """The routing weight is computed from the rows themselves."""

    def combine(self, x, rows, weights, perm):
        grid = self.restore(rows, perm).view(-1, self.k, self.hidden)
        return (grid * grid.norm(dim=-1, keepdim=True)).sum(1)


def test_weights_from_the_rows_themselves():
    check_open(NormalisedByItself(), tokens(), detail="a value inside the block")


class WritesInput(Moe):
    def gather(self, x, perm):
        rows = super().gather(x, perm)
        x.mul_(2)
        return rows


class WritesIds(Fixed):
    def gather(self, x, perm):
        rows = super().gather(x, perm)
        self.given.fill_(0)
        return rows

    def forward(self, x, ids, weights):
        self.given = ids
        return super().forward(x, ids, weights)


class WritesRoutingWeights(Fixed):
    def forward(self, x, ids, weights):
        self.given = weights
        return super().forward(x, ids, weights)

    def combine(self, x, rows, weights, perm):
        out = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        self.given.zero_()
        return self.restore(out, perm).view(-1, self.k, self.hidden).sum(1)


class WritesExpertWeight(Moe):
    def activate(self, h):
        with torch.no_grad():
            self.down_buffer.copy_(self.down * 2)
        return super().activate(h)

    def make_weights(self):
        super().make_weights()
        self.register_buffer("up_buffer", torch.ones(self.num_experts, 2 * self.inner, self.hidden))
        self.register_buffer("down_buffer", torch.ones(self.num_experts, self.hidden, self.inner))

    def project_up(self, rows, sorted_ids, offsets):
        out = grouped(rows, self.up_buffer.transpose(1, 2), offsets)
        with torch.no_grad():
            self.up_buffer.mul_(0.5)
        return out


@torch.no_grad()
def test_input_is_overwritten_in_between():
    check_refused(WritesInput(), tokens(grad=False), reason="mutation")


def test_ids_are_overwritten_in_between():
    ids, weights = routing()
    check_refused(WritesIds(), tokens(), ids, weights, reason="mutation")


def test_routing_weights_are_overwritten_in_between():
    ids, weights = routing(grad=False)
    check_refused(WritesRoutingWeights(), tokens(grad=False), ids, weights, reason="mutation")


class HalvesExpertsAfterwards(Fixed):
    """Eager's backward pass does not read the down projection where neither the tokens nor the up projection need a
    gradient; the op's would, for the routing weights."""

    def forward(self, x, ids, weights):
        y = super().forward(x, ids, weights)
        with torch.no_grad():
            self.down.mul_(0.5)
        return y


def test_expert_weights_are_overwritten_afterwards():
    model, found = HalvesExpertsAfterwards(), []
    model.requires_grad_(False)
    before, fused = model.down.clone(), Fused(model)
    for run in (model, fused):
        model.down.copy_(before)
        ids, weights = routing()
        y = run(tokens(grad=False), ids, weights)
        found.append((y.detach(), model.down.clone(), *torch.autograd.grad(y.square().sum(), weights)))
    torch.testing.assert_close(*found)
    assert fused.reasons == ["mutation"] and "written in place after" in str(fused.report), fused.report


class Aliased(Fixed):
    """`base` and x are views of the same memory, and base is written after x was gathered."""

    def forward(self, base, x, ids, weights):
        self.base = base
        return super().forward(x, ids, weights)

    def gather(self, x, perm):
        rows = super().gather(x, perm)
        self.base.zero_()
        return rows


def test_input_is_overwritten_through_another_view():
    torch._dynamo.reset()
    model, (ids, weights) = Aliased(), routing()

    def run(call):
        base = tokens(TOKENS + 2, grad=False)
        out = call(base, base[2:], ids, weights)
        return out, base

    fused = Fused(model)
    wanted, found = run(model), run(fused)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert fused.reasons == ["mutation"], fused.report


class ResultIntoInput(Moe):
    """The combine adds onto x itself."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return x.index_add_(0, perm // self.k, rows)


@torch.no_grad()
def test_result_is_written_into_an_input():
    check_refused(ResultIntoInput(), tokens(grad=False), reason="mutation")


class ResultIntoOldMemory(Moe):
    """The memory that the result is added onto is read again under its other name."""

    def forward(self, x):
        flat = x.reshape(-1, self.hidden)
        self.memory = flat * 2
        self.view = self.memory[:, :3]
        y = self.experts(flat, *self.route(flat))
        return y + self.view.sum()

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return self.memory.index_add_(0, perm // self.k, rows)


def test_result_is_written_into_memory_that_is_read_again():
    check_refused(ResultIntoOldMemory(), tokens(), reason="mutation")


# Hooks, subclasses, dtypes


class Hooked(Moe):
    def activate(self, h):
        rows = super().activate(h)
        rows.register_hook(lambda grad: grad * 2)
        return rows


def test_tensor_hook_inside():
    """Dynamo of torch 2.11 makes another op of it, of which nothing is known."""
    of_2_11 = torch.__version__.startswith("2.11")
    check_refused(Hooked(), tokens(), reason="no-match" if of_2_11 else "hooks")


class Identity(torch.nn.Module):
    def forward(self, rows):
        return rows


class WithSubmodule(Moe):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.identity = Identity()

    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(self.identity(rows), sorted_ids, offsets)


def test_module_hook_that_changes_a_value_inside():
    model = WithSubmodule()
    model.identity.register_forward_hook(lambda module, args, out: out * 2 + args[0].sin())
    check_refused(model, tokens(), reason="no-match", detail="sin")


def test_module_hook_that_records_a_value_inside():
    torch._dynamo.reset()
    model, seen = WithSubmodule(), []
    model.identity.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    x = tokens()
    fused = Fused(model)
    with torch.no_grad():
        wanted = model(x)
        torch.testing.assert_close(fused(x), wanted)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])
    assert fused.counts() == (0, 1), fused.report
    assert fused.reasons == ["interior-use"]


class Bf16Weights(Moe):
    """bfloat16 in the middle of float32."""

    def activate(self, h):
        return super().activate(h).bfloat16().float()


def test_rounding_inside_the_block():
    check_refused(Bf16Weights(), tokens(), reason="dtype")


class DrawnTwice(Separate):
    """Gate and up get noise of their own, each drawn in the same words."""

    def gather(self, x, perm):
        noisy = (x * torch.empty_like(x).uniform_(0.5, 1.5) for _ in range(2))
        return [super(DrawnTwice, self).gather(t, perm) for t in noisy]

    def project_up(self, rows, sorted_ids, offsets):
        return [super(DrawnTwice, self).project_up(r, sorted_ids, offsets)[i] for i, r in enumerate(rows)]


class Dropped(Moe):
    """Dropout, in front of the down projection or behind it."""

    def activate(self, h):
        return self.drop(super().activate(h), "inside")

    def project_down(self, rows, sorted_ids, offsets):
        return self.drop(super().project_down(rows, sorted_ids, offsets), "behind")

    def drop(self, rows, place):
        return F.dropout(rows, 0.5) if place == self.place else rows


@pytest.mark.parametrize(
    ("block", "place", "status"),
    [(DrawnTwice, "", "missed"), (Dropped, "inside", "missed"), (Dropped, "behind", "fused")],
)
def test_random_numbers(block, place, status):
    model = block()
    model.place = place
    torch._dynamo.reset()
    fused = Fused(model, verify=False)
    found = []
    for run in (model, fused):
        torch.manual_seed(7)
        x = tokens()
        y = run(x)
        found.append((y.detach(), torch.autograd.grad(y.sum(), [x, *model.parameters()], allow_unused=True)))
    torch.testing.assert_close(*found)
    assert [site.status for site in fused.report.sites] == [status], fused.report
    assert block is DrawnTwice or "dropout" in str(fused.report)


class NarrowedRoutingWeights(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].bfloat16().unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


def test_routing_weights_narrowed_inside_the_block():
    check_open(NarrowedRoutingWeights(), tokens(), detail="narrowed")


class Int8Ids(Moe):
    """A dtype that the op does not take."""

    def sort(self, ids):
        return torch.sort(ids.to(torch.int8).reshape(-1))


def test_ids_of_an_unusual_dtype():
    check_fused(Int8Ids(), tokens())


class FewerExpertsCounted(Moe):
    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts - 1, min=0, max=self.num_experts - 2)
        return torch.cumsum(torch.cat([counts, counts.new_zeros(1)]), 0, dtype=torch.int32)


def test_counts_of_fewer_experts():
    check_refused(FewerExpertsCounted(), tokens(), reason="no-match", detail="offsets")


def test_sizes_all_equal():
    """H == I == E == T: nothing is left to tell the dimensions apart but their order."""
    n, double = 8, torch.float64
    check_fused(Moe(hidden=n, inner=n, experts=n, k=2, dtype=double), tokens(n, n, double), tolerance=1e-10)
    check_fused(Moe(hidden=n, inner=n // 2, experts=n, k=1, dtype=double), tokens(n, n, double), tolerance=1e-10)


class NotTransposed(Moe):
    """H == 2I == I * 2: the weight is taken as stored, which runs because it is square."""

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows, self.down, offsets)


def test_square_weight_taken_untransposed():
    n, double = 8, torch.float64
    check_fused(NotTransposed(hidden=n, inner=n, dtype=double), tokens(hidden=n, dtype=double), tolerance=1e-10)


def test_sizes_of_the_blocks_differ():
    """What the tests above take for granted."""
    assert len({HIDDEN, INNER, 2 * INNER, EXPERTS, K, TOKENS, TOKENS * K}) == 7


def test_operands_that_the_op_refuses_are_a_miss(monkeypatch):
    """A slip of the matcher must not end the compile, and leaves no node behind."""
    monkeypatch.setattr(ops, "IDS", ())
    refused = check_refused(Moe(), tokens(), reason="no-match", detail="could not be replaced")
    plain = []
    torch._dynamo.reset()
    torch.compile(Moe(), backend=lambda gm, inputs: plain.append(gm) or gm.forward, dynamic=False)(tokens())
    assert len(refused.graphs[0].graph.nodes) == len(plain[0].graph.nodes)


def test_a_hook_that_reads_an_interior_value_is_named_by_its_own_line():
    class Activation(torch.nn.Module):
        def forward(self, h):
            gate, up = h.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

    class Watched(Moe):
        def __init__(self):
            super().__init__()
            self.act = Activation()

        def activate(self, h):
            return self.act(h)

    norms = []

    def watch(module, args, out):
        norms.append(out.norm())  # the line to be named

    model = Watched()
    model.act.register_forward_hook(watch)
    fused = Fused(model, verify=False)
    fused(tokens())
    (site,) = fused.report.sites
    line = inspect.getsourcelines(watch)[1] + 1
    assert site.reason == "interior-use" and site.location.endswith(f"test_refusals.py:{line}"), site.location
    assert "norms.append(out.norm())" in site.detail
