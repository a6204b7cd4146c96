"""Several blocks in one graph, and blocks among other code: each is found, and each keeps to its own."""

import pytest
import torch
from blocks import EXPERTS, HIDDEN, TOKENS, Biased, Fixed, K, Moe, Separate, Stack, Ungated, grouped, routing, tokens
from harness import Fused, check_fused, check_refused, compare
from torch import nn

SWIGLU = "silu(gate) * up"


def test_layers_of_different_kinds():
    model = Stack(Moe(seed=0), Biased(seed=1), Separate(seed=2), Ungated(seed=3))
    fused = check_fused(model, tokens(), fused=4, tolerance=1e-4)
    assert [s.layout for s in fused.specs] == ["concat", "concat", "separate", "single"]
    locations = [site.location for site in fused.report.sites]
    assert [f"blocks.{i}" in where or f"blocks[{i}]" in where for i, where in enumerate(locations)] == [True] * 4


def test_one_layer_called_twice():
    """The second call reads the first one's output with the same weights."""
    block = Moe(dtype=torch.float64)
    check_fused(Stack(block, block), tokens(dtype=torch.float64), fused=2, tolerance=1e-9)


def test_output_fed_into_the_next_block():
    """Nothing in between, not even a residual."""
    model = nn.Sequential(Moe(dtype=torch.float64), Moe(seed=1, dtype=torch.float64))
    check_fused(model, tokens(dtype=torch.float64), fused=2, tolerance=1e-9)


class ResultTwice(Moe):
    """The sum is read in its own dtype and, rounded, in another."""

    def combine(self, x, rows, weights, perm):
        total = super().combine(x, rows, weights, perm)
        return total + total.bfloat16().float() + total.bfloat16().double().float()


def test_result_in_two_dtypes():
    fused = check_fused(ResultTwice(), tokens(), tolerance=1e-4)
    assert fused.targets().count("mok.moe.default") == 1


class SameInputTwice(Moe):
    """Two calls that compute the very same values."""

    def forward(self, x):
        return super().forward(x) + 2 * super().forward(x)


def test_the_same_block_on_the_same_input():
    check_fused(SameInputTwice(), tokens(), fused=2)


class SharedRouting(nn.Module):
    """Two sets of experts, one routing: the sort is shared."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Moe(seed=0), Ungated(seed=1)

    def forward(self, x):
        ids, weights = self.first.route(x)
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        offsets = self.first.offsets(sorted_ids)
        total = 0
        for block in (self.first, self.second):
            rows = block.gather(x, perm)
            rows = block.activate(block.project_up(rows, sorted_ids, offsets))
            total = total + block.combine(x, block.project_down(rows, sorted_ids, offsets), weights, perm)
        return total


def test_two_blocks_with_one_routing():
    fused = check_fused(SharedRouting(), tokens(), fused=2)
    assert not any("sort" in t for t in fused.targets())


class Chained(nn.Module):
    """The second block takes its ids from the first one's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Moe(seed=0), Moe(seed=1)

    def forward(self, x):
        ids, weights = self.first.route(x)
        y = self.first.experts(x, ids, weights)
        return self.second.experts(y, (ids + 1) % EXPERTS, weights * 2)


def test_ids_made_of_other_ids():
    check_fused(Chained(), tokens(), fused=2)


class SharedWeights(nn.Module):
    """Two routers over the same experts."""

    def __init__(self):
        super().__init__()
        self.block = Moe()
        self.other_gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x):
        y = self.block(x)
        scores = torch.softmax(y @ self.other_gate.t(), -1)
        weights, ids = scores.topk(K, -1)
        return self.block.experts(y, ids, weights)


def test_experts_with_two_routers():
    check_fused(SharedWeights(), tokens(), fused=2, tolerance=1e-4)


class SortedByOne(nn.Module):
    """Two routings are sorted, and the second block mixes them up."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Moe(seed=0), Moe(seed=1)

    def forward(self, x):
        ids, weights = self.first.route(x)
        others, _ = self.second.route(x)
        y = self.first.experts(x, ids, weights)
        sorted_ids, perm = torch.sort(others.reshape(-1))
        offsets = self.second.offsets(torch.sort(ids.reshape(-1))[0])
        rows = self.second.gather(y, perm)
        rows = self.second.activate(self.second.project_up(rows, sorted_ids, offsets))
        return self.second.combine(y, self.second.project_down(rows, sorted_ids, offsets), weights, perm)


def test_one_right_and_one_wrong_block():
    check_refused(SortedByOne(), tokens(), reason="no-match", fused=1, detail="different routings")


class Residual(nn.Module):
    """In-place residual, norm, shared expert on the same input, router logits returned."""

    def __init__(self):
        super().__init__()
        self.block = Moe()
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        y = self.block(h)
        y += self.shared(h)
        y = torch.add(y, x)
        y.mul_(2)
        return y


def test_the_result_is_written_into_afterwards():
    check_fused(Residual(), tokens())


class OntoShared(Moe):
    """The combine adds onto the shared expert's output, in place."""

    def make_weights(self):
        super().make_weights()
        self.shared = self.new(self.hidden, self.hidden)

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return (x @ self.shared).index_add_(0, perm // self.k, rows)


def test_combined_onto_something():
    check_fused(OntoShared(), tokens())


class RouterOutputs(Moe):
    def forward(self, x):
        logits = x @ self.gate.t()
        weights, ids = torch.topk(torch.softmax(logits, -1), self.k, -1)
        load = torch.nn.functional.one_hot(ids, self.num_experts).float().mean((0, 1))
        aux = (load * torch.softmax(logits, -1).mean(0)).sum()
        return self.experts(x, ids, weights) + aux + logits.sum() + weights.std()


def test_ids_weights_and_logits_are_read_by_others():
    check_fused(RouterOutputs(), tokens())


class Reused(Moe):
    """The permutation and the offsets serve outside the block too."""

    def combine(self, x, rows, weights, perm):
        y = super().combine(x, rows, weights, perm)
        return y * (1 + perm.float().mean()) + self.ends.float().sum()

    def offsets(self, sorted_ids):
        self.ends = super().offsets(sorted_ids)
        return self.ends


def test_the_permutation_is_read_by_others():
    fused = check_fused(Reused(), tokens())
    assert any("sort" in t for t in fused.targets())


class Rerouted(Fixed):
    """The routing weights are changed in place before the block."""

    def forward(self, x, ids, weights):
        weights = weights * 1
        weights /= weights.sum(-1, keepdim=True)
        return self.experts(x, ids, weights)


def test_routing_weights_normalised_in_place():
    """The last name of a value that is changed in place counts, not the first."""
    ids, weights = routing()
    check_fused(Rerouted(), tokens(), ids, weights)


class ChangedBuffer(Moe):
    """A buffer is written before one block and after another reads it."""

    def make_weights(self):
        super().make_weights()
        self.register_buffer("scale", torch.ones(self.num_experts, self.hidden, self.inner))

    def forward(self, x):
        self.scale.mul_(1.5)
        y = super().forward(x)
        self.scale.sub_(0.25)
        return y

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows, (self.down * self.scale).transpose(1, 2), offsets)


def test_buffers_written_around_the_block():
    model = ChangedBuffer()
    x = tokens()
    fused = Fused(model)
    state = {n: b.clone() for n, b in model.named_buffers()}
    wanted = model(x)
    model.load_state_dict(state, strict=False)
    found = fused(x)
    torch.testing.assert_close(found, wanted)
    assert fused.counts() == (1, 0)


@pytest.mark.parametrize("k", [1, 2])
def test_k_of_one_and_two_with_a_token_each(k):
    """T * K == E and the like."""
    double = torch.float64
    check_fused(Moe(experts=4, k=k, dtype=double), tokens(4 // k, dtype=double), tolerance=1e-10)


class FlatIds(Moe):
    """K == 1 with ids and weights of rank one."""

    def route(self, x):
        ids, _weights = super().route(x)
        return ids.squeeze(-1), torch.sigmoid(x @ self.gate.t()).gather(1, ids).squeeze(-1)


def test_ids_of_rank_one():
    check_fused(FlatIds(k=1), tokens())


class ThreeDimensions(Moe):
    """ids and weights [B, S, K] and x [B, S, H], flattened by views only."""

    def forward(self, x):
        batch = x.view(2, -1, self.hidden)
        ids, weights = self.route(batch)
        return self.experts(x.view(-1, self.hidden), ids, weights).view(x.shape)


def test_batches():
    check_fused(ThreeDimensions(), tokens())


class TransposedIds(Moe):
    """The list of slots is read as if it ran over tokens first: odd, but fused as what it is."""

    def sort(self, ids):
        return torch.sort(ids.t().reshape(-1))


def test_slots_in_another_order():
    check_fused(TransposedIds(), tokens())


def test_weights_that_are_views_of_one_parameter():
    """Both projections live in one parameter."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Fixed()
            size = self.block.up.numel() + self.block.down.numel()
            self.buffer = nn.Parameter(torch.randn(size))

        def forward(self, x, ids, weights):
            n = EXPERTS * 48 * HIDDEN
            block = self.block
            up, down = self.buffer[:n].view(EXPERTS, 48, HIDDEN), self.buffer[n:].view(EXPERTS, HIDDEN, 24)
            sorted_ids, perm = block.sort(ids)
            offsets = block.offsets(sorted_ids)
            rows = block.activate(grouped(block.gather(x, perm), up.transpose(1, 2), offsets))
            return block.combine(x, grouped(rows, down.transpose(1, 2), offsets), weights, perm)

    ids, weights = routing()
    check_fused(Held(), tokens(), ids, weights)


@pytest.mark.parametrize("strided", [False, True])
def test_input_that_is_a_slice_or_a_transpose(strided):
    class Sliced(Moe):
        def forward(self, x):
            flat = x.t()[:, : self.hidden] if strided else x[1:, : self.hidden]
            ids, weights = self.route(flat)
            return self.experts(flat, ids, weights)

    x = tokens(HIDDEN + 4, HIDDEN + 4)
    check_fused(Sliced(), x)


def test_dynamic_number_of_tokens():
    """One static and one dynamic graph, whatever comes after."""
    model = Moe()
    fused = Fused(model, dynamic=None)
    for count in (TOKENS, 5, 2, 31, 8):
        compare(model, fused, tokens(count))
    assert len(fused.graphs) == 2
    compare(model, fused, tokens(1))
    assert len(fused.graphs) <= 3
    assert fused.counts() == (len(fused.graphs), 0), fused.report


def test_dynamic_from_the_start():
    model = Biased()
    fused = Fused(model, dynamic=True)
    for count in (TOKENS, 5, 2, 31):
        compare(model, fused, tokens(count))
    assert len(fused.graphs) == 1
    assert fused.counts() == (1, 0), fused.report


def test_static_graphs_one_for_each_size():
    model = Moe()
    fused = Fused(model, dynamic=False)
    for count in (5, 6, 5):
        compare(model, fused, tokens(count))
    assert len(fused.graphs) == 2
    assert fused.counts() == (2, 0)


def test_the_passes_add_no_guard():
    """What the analysis looks at must not specialise the graph: as many compiles as without it."""
    model, counts = Moe(), []

    def plain(gm, inputs):
        counts.append(gm)
        return gm.forward

    sizes = (TOKENS, 5, 9, 10, 15, 16, 48, 24)
    compiled = torch.compile(model, backend=plain, dynamic=True)
    for count in sizes:
        compiled(tokens(count))
    torch._dynamo.reset()
    fused = Fused(model, dynamic=True, verify=False)
    for count in sizes:
        fused(tokens(count))
    assert len(fused.graphs) == len(counts) == 1
    assert fused.counts() == (1, 0)


def test_no_tokens():
    model = Moe()
    fused = Fused(model, dynamic=False)
    compare(model, fused, tokens(0))
    assert fused.counts() == (1, 0)
