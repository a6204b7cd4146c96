"""Blocks made to deceive the proof, found by a fuzzer: each once gave another answer than eager."""

import pytest
import torch
from blocks import EXPERTS, HIDDEN, TOKENS, Biased, Fixed, K, routing, tokens
from harness import Fused, assert_close, check_fused, check_open, check_refused, compare, twin
from test_user_blocks import HIDDEN as WRITTEN_HIDDEN
from test_user_blocks import Dense, DenseWhere, StackedWeights
from torch.nn import functional as F


def problem():
    ids, weights = routing()
    return tokens(), ids, weights


class NarrowGather(Fixed):
    """Only the first columns of the rows are put back in order."""

    def restore(self, rows, perm):
        return rows.gather(0, torch.argsort(perm)[:, None].expand(-1, self.hidden // 2))

    def combine(self, x, rows, weights, perm):
        rows = self.restore(rows * weights.reshape(-1)[perm].unsqueeze(-1), perm)
        return rows.view(-1, self.k, self.hidden // 2).sum(1)


class WideScatter(Fixed):
    """The rows are added onto the first columns of something wider."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        token = (perm // self.k)[:, None].expand(-1, self.hidden)
        return torch.zeros(x.shape[0], 2 * self.hidden).scatter_add(0, token, rows)


class SortedAgain(Fixed):
    """The ends of the experts' rows are searched in another order."""

    def offsets(self, sorted_ids):
        order = torch.arange(sorted_ids.shape[0]).flip(0)
        return torch.searchsorted(sorted_ids, torch.arange(self.num_experts), right=True, sorter=order, out_int32=True)


def test_ends_searched_in_another_order():
    check_refused(SortedAgain(), *problem(), reason="no-match", verify=False)


@pytest.mark.parametrize("block", [NarrowGather, WideScatter])
def test_other_columns_than_those_of_the_rows(block):
    check_open(block(), *problem(), verify=False)


class Rounded(Fixed):
    """A cast between floats rounds up to the expert numbers."""

    def forward(self, x, ids, weights):
        return self.experts(x, (ids.double() * (1 - 1e-12)).float().long(), weights)


def test_casts_between_floats_round():
    check_fused(Rounded(), *problem(), verify=False)


class Workspace(Fixed):
    """The inverse permutation is written into a view of a buffer, which the next call may read."""

    def make_weights(self):
        super().make_weights()
        self.register_buffer("inverse", torch.zeros(2 * TOKENS * K, dtype=torch.int64))

    def restore(self, rows, perm):
        inverse = self.inverse[: perm.shape[0]]
        inverse[perm] = torch.arange(perm.shape[0])
        return rows[inverse]


class Cleared(Fixed):
    """The rows are added onto a view of a buffer that is set to zero just before."""

    def make_weights(self):
        super().make_weights()
        self.register_buffer("buffer", torch.ones(TOKENS + 4, HIDDEN))

    def combine(self, x, rows, weights, perm):
        buffer = self.buffer[: x.shape[0]]
        buffer.zero_()
        return buffer.index_add(0, perm // self.k, rows * weights.reshape(-1)[perm].unsqueeze(-1))


class Doubled(Fixed):
    """The down projection is doubled in place, behind autograd's back."""

    def project_down(self, rows, sorted_ids, offsets):
        self.down.data.mul_(2)
        return super().project_down(rows, sorted_ids, offsets)


@pytest.mark.parametrize("block", [Workspace, Cleared, Doubled])
def test_writes_into_the_models_memory_stay(block):
    model = block()
    eager = twin(model)
    compiled = check_fused_once(model, *problem())
    eager(*problem())
    for name, tensor in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert compiled.counts() == (1, 0)


def check_fused_once(model, *inputs):
    """One run only: the model changes with each."""
    torch._dynamo.reset()
    compiled, wanted = Fused(model, verify=False), twin(model)(*inputs)
    assert_close(compiled(*inputs), wanted)
    return compiled


class Small(Fixed):
    """Narrow expert numbers, which torch would take for a mask."""

    def make_weights(self):
        super().make_weights()
        self.up_bias = self.new(self.num_experts, 2 * self.inner)
        self.down_bias = self.new(self.num_experts, self.hidden)

    def project_up(self, rows, sorted_ids, offsets):
        return super().project_up(rows, sorted_ids, offsets) + self.up_bias[sorted_ids.long()]

    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(rows, sorted_ids, offsets) + self.down_bias[sorted_ids.long()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_narrow_ids_and_biases(dtype):
    x, ids, weights = problem()
    check_fused(Small(), x, ids.to(dtype), weights, verify=False)


class Multiplied(Fixed):
    """Gathered weights and torch.matmul, which says expand where there is nothing to expand."""

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        rows = x[torch.arange(flat.shape[0]) // self.k]
        rows = self.activate(self.times(self.up[flat], rows))
        rows = self.times(self.down[flat], rows) * weights.reshape(-1, 1)
        return rows.view(-1, self.k, self.hidden).sum(1)

    def times(self, matrices, rows):
        return (matrices @ rows.unsqueeze(-1)).squeeze(-1)


class Selected(Multiplied):
    def times(self, matrices, rows):
        return torch.matmul(matrices, rows[:, :, None])[..., 0]


@pytest.mark.parametrize("block", [Multiplied, Selected])
def test_matmul_with_gathered_weights(block):
    check_fused(block(), *problem(), verify=False)


def test_negative_ids_count_from_the_end():
    x, ids, weights = problem()
    check_fused(Multiplied(), x, ids - 2, weights, verify=False)


class Shifted(Fixed):
    """Sorted first, rows of negative numbers push all others to the wrong experts."""

    def forward(self, x, ids, weights):
        return self.experts(x, self.shifted(ids), weights)

    def shifted(self, ids):
        return ids - 1


class Negated(Shifted):
    def shifted(self, ids):
        ids = ids.clone()
        ids[:1].neg_()
        return ids


class FilledNegative(Shifted):
    def shifted(self, ids):
        return ids.masked_fill(ids > 2, -1)


@pytest.mark.parametrize("block", [Shifted, Negated, FilledNegative])
def test_computed_numbers_that_may_be_negative(block):
    check_refused(block(), *problem(), reason="no-match", detail="may be negative", verify=False)


class Folded(Shifted):
    """As expert parallelism does: numbers of other ranks' experts mean none."""

    def shifted(self, ids):
        return torch.where(ids // 3 != 0, 5, (ids - 3) % 3).clamp(min=0)


def test_computed_numbers_that_cannot_be_negative():
    check_fused(Folded(), *problem(), verify=False)


class Lone(Shifted):
    """With one expert `histc` counts every number there is."""

    def shifted(self, ids):
        return ids + 1


class LoneClamped(Shifted):
    def shifted(self, ids):
        return ids.clamp(min=1)


class LoneFolded(Shifted):
    def shifted(self, ids):
        return (ids + 1) % 4


@pytest.mark.parametrize("block", [Lone, LoneClamped, LoneFolded])
def test_one_expert_takes_every_row(block):
    ids, weights = routing(experts=1, k=1)
    check_refused(block(experts=1, k=1), tokens(), ids, weights, reason="no-match", verify=False)


class Masked(Multiplied):
    """The rows are masked by whole numbers, and by nothing else."""

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        rows = x[torch.arange(flat.shape[0]) // self.k]
        rows = self.times(self.down[flat], self.activate(self.times(self.up[flat], rows)))
        return (rows.view(-1, self.k, self.hidden) * (weights > 0.5)[..., None]).sum(1)


def test_masks_are_no_weights():
    check_open(Masked(), *problem(), detail="torch.bool", verify=False)


class Inference(Fixed):
    """The rows are weighted in inference mode, combined outside of it."""

    def combine(self, x, rows, weights, perm):
        with torch.inference_mode():
            rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


def test_inference_mode_inside():
    x, ids, weights = (t.detach() for t in problem())
    check_open(Inference(), x, ids, weights, detail="gradients are switched off", verify=False)


class NothingCast(Fixed):
    """A cast that changes nothing returns what it was given, gradient and all, wherever it stands."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        y = self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)
        with torch.no_grad():
            return y.to(x.dtype)


def test_the_op_runs_where_gradients_are_on():
    check_fused(NothingCast(), *problem(), verify=False)


class StrayBias(Biased, Fixed):
    """Ids are clamped so that they can pick a bias; rows without expert then have the last expert's."""

    def project_down(self, rows, sorted_ids, offsets):
        rows = Fixed.project_down(self, rows, sorted_ids, offsets)
        return self.mask(rows + self.down_bias[sorted_ids.clamp(max=self.num_experts - 1)], sorted_ids)

    def mask(self, rows, sorted_ids):
        return rows


class MaskedBias(StrayBias):
    def mask(self, rows, sorted_ids):
        return rows.masked_fill((sorted_ids >= self.num_experts).unsqueeze(-1), 0.0)


def test_clamped_biases_need_a_mask_behind_them():
    check_open(StrayBias(), *problem(), detail="not masked", verify=False)
    check_fused(MaskedBias(), *problem(), verify=False)


class OperandsWrittenLater(Fixed):
    """Eager's gathers and products need none of these again; the op does."""

    def forward(self, x, ids, weights):
        x, ids, weights = x * 1, ids.clone(), weights * 1
        y = self.experts(x, ids, weights)
        x.mul_(2)
        ids.add_(1)
        return y


def test_operands_that_are_written_after_the_block():
    check_fused(OperandsWrittenLater(), *problem(), verify=False)


class SharedMatrix(StackedWeights):
    """Two experts have one up projection in common: one tensor for each expert, but the down projection is stacked."""

    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.up[max(e, 1)]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]
            out = out.index_add(0, token, rows)
        return out


def test_one_matrix_for_two_experts(caplog):
    x = torch.randn(9, WRITTEN_HIDDEN, dtype=torch.float64, requires_grad=True)
    check_refused(SharedMatrix(), x, reason="layout", detail="stacked", verify=False)
    assert "please report" not in caplog.text


class ScaledBySum(DenseWhere):
    """What an expert adds is scaled by a number without dimensions."""

    def add(self, out, x, ids, weights, e, expert):
        kept = torch.where((ids == e).any(-1, keepdim=True), expert(x), 0.0)
        return out + kept * kept.sum() * (weights * (ids == e)).sum(-1, keepdim=True)


def test_a_number_among_the_weights(caplog):
    x = torch.randn(9, WRITTEN_HIDDEN, dtype=torch.float64, requires_grad=True)
    model = ScaledBySum()
    fused = Fused(model, verify=False)
    compare(model, fused, x)
    assert fused.report.fused == 0 and "please report" not in caplog.text


class RoundedResult(Fixed):
    """The result is rounded to bfloat16, and goes on in its own type."""

    def combine(self, x, rows, weights, perm):
        return super().combine(x, rows, weights, perm).to(torch.bfloat16).to(x.dtype)


class RoundedTokens(Fixed):
    """The tokens are rounded on the way to their rows."""

    def gather(self, x, perm):
        rows = x[:, None].to(torch.bfloat16).to(x.dtype).expand(-1, self.k, -1)
        return rows.reshape(-1, self.hidden)[perm]


@pytest.mark.parametrize("block", [RoundedResult, RoundedTokens])
def test_rounding_in_between_stays(block):
    model, inputs = block(), problem()
    fused = Fused(model, verify=False)
    compare(model, fused, *inputs)


class RoundedShare(Dense):
    """The routing weights of each expert are rounded."""

    def add(self, out, x, ids, weights, e, expert):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        return out + share.to(torch.bfloat16).to(share.dtype) * expert(x)


def test_rounded_routing_weights_of_one_expert():
    x = torch.randn(9, WRITTEN_HIDDEN, dtype=torch.float64, requires_grad=True)
    model = RoundedShare()
    fused = Fused(model, verify=False)
    compare(model, fused, x, tolerance=1e-9)
    assert fused.report.fused == 0


class Reweighted(torch.autograd.Function):
    """Reads the ids; its backward pass writes in place, into gradients only."""

    @staticmethod
    def forward(ctx, weights, ids):
        ctx.save_for_backward(weights, ids)
        return weights * 2

    @staticmethod
    def backward(ctx, grad):
        weights, ids = ctx.saved_tensors
        grads = torch.zeros(weights.shape[0], EXPERTS)
        grads.scatter_add_(-1, ids, grad * 2)
        return grads.gather(-1, ids), None


class ReadByAFunction(Fixed):
    def forward(self, x, ids, weights):
        return self.experts(x, ids, Reweighted.apply(weights, ids))


def test_ids_that_a_function_with_its_own_gradient_reads():
    check_fused(ReadByAFunction(), *problem(), verify=False)
