"""Spellings of an MoE block that must be fused, with the numbers and gradients of eager."""

import pytest
import torch
from blocks import (
    HIDDEN,
    Biased,
    GptOss,
    Interleaved,
    Moe,
    Separate,
    Transposed,
    Ungated,
    tokens,
)
from harness import check_fused
from torch import nn
from torch.nn import functional as F

SWIGLU = "silu(gate) * up (concat) -> float32"


@pytest.mark.parametrize(
    ("block", "spec"),
    [
        (Moe, SWIGLU),
        (Biased, SWIGLU),
        (Transposed, SWIGLU),
        (Interleaved, "silu(gate) * up (interleaved) -> float32"),
        (Separate, "silu(gate) * up (separate) -> float32"),
        (Ungated, "square(relu(up)) (single) -> float32"),
        (
            GptOss,
            "clamp(gate, -inf, 1.5) * sigmoid(clamp(gate, -inf, 1.5) * 1.702) * (clamp(up, -1.5, 1.5) + 1.0) "
            "(interleaved) -> float32",
        ),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_kinds_of_experts(block, spec):
    fused = check_fused(block(), tokens())
    assert [str(s) for s in fused.specs] == [spec]
    assert not any("grouped_mm" in t for t in fused.targets())
    assert fused.targets().count("mok.moe.default") == 1


class BinsOfWidthOne(Moe):
    """Those of torchtitan: numbers that top-k chose among E never reach the last bin's end."""

    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts)
        return torch.cumsum(counts, 0, dtype=torch.int32)


class Argsort(Moe):
    def sort(self, ids):
        flat = ids.flatten()
        perm = flat.argsort()
        return flat[perm], perm


class StableSort(Moe):
    def sort(self, ids):
        return tuple(torch.sort(ids.view(-1), stable=True))


class IdsInt32(Moe):
    def sort(self, ids):
        return ids.to(torch.int32).reshape(-1).sort()


class FloorMethod(Moe):
    def gather(self, x, perm):
        return x[perm.div(self.k, rounding_mode="floor")]


class IndexSelect(Moe):
    def gather(self, x, perm):
        return x.index_select(0, torch.div(perm, self.k, rounding_mode="trunc"))


class Gather(Moe):
    def gather(self, x, perm):
        return x.gather(0, (perm // self.k).unsqueeze(-1).expand(-1, self.hidden))


class TokenTable(Moe):
    def gather(self, x, perm):
        table = torch.arange(perm.shape[0]) // self.k
        return x[table[perm]]


class RowsThenSort(Moe):
    def gather(self, x, perm):
        return x[torch.arange(perm.shape[0]) // self.k][perm]


class CastOffsets(Moe):
    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.to(torch.float32), self.num_experts, 0, self.num_experts - 1)
        return counts.cumsum(0).to(torch.int32)


class UnsortedCounts(Moe):
    """Counts taken from the ids in slot order."""

    def experts(self, x, ids, weights):
        self.raw = ids.reshape(-1)
        return super().experts(x, ids, weights)

    def offsets(self, sorted_ids):
        return super().offsets(self.raw)


class Searchsorted(Moe):
    def offsets(self, sorted_ids):
        return torch.searchsorted(sorted_ids, torch.arange(self.num_experts), right=True).int()


class SearchsortedSide(Moe):
    def offsets(self, sorted_ids):
        return torch.searchsorted(sorted_ids, torch.arange(self.num_experts), side="right", out_int32=True)


class Slices(Moe):
    def activate(self, h):
        return F.silu(h[:, : self.inner]) * h[:, self.inner :]


class Split(Moe):
    def activate(self, h):
        gate, up = torch.split(h, self.inner, dim=1)
        return up * F.silu(gate)


class SplitSizes(Moe):
    def activate(self, h):
        gate, up = h.split([self.inner, self.inner], -1)
        return F.silu(gate).mul(up)


class SliceFromTheEnd(Moe):
    def activate(self, h):
        return F.silu(h[:, : -self.inner]) * h[:, -self.inner :]


class Narrow(Moe):
    def activate(self, h):
        return F.silu(h.narrow(1, 0, self.inner)) * h.narrow(1, self.inner, self.inner)


class InplaceAct(Moe):
    def activate(self, h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate.clone(), inplace=True).mul_(up)


class ArgsortInverse(Moe):
    def restore(self, rows, perm):
        return rows[torch.argsort(perm)]


class ScatterInverse(Moe):
    def restore(self, rows, perm):
        return rows[torch.empty_like(perm).scatter_(0, perm, torch.arange(perm.shape[0]))]


class IndexPutInverse(Moe):
    def restore(self, rows, perm):
        return rows[torch.zeros_like(perm).index_put((perm,), torch.arange(perm.shape[0]))]


class SelectInverse(Moe):
    def restore(self, rows, perm):
        return torch.index_select(rows, 0, perm.sort()[1])


class IndexAdd(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm][:, None]
        return torch.zeros_like(x).index_add_(0, perm // self.k, rows)


class IndexAddFunctional(Moe):
    def combine(self, x, rows, weights, perm):
        rows = weights.reshape(-1, 1)[perm] * rows
        return x.new_zeros(x.shape).index_add(0, perm // self.k, rows)


class ScatterAdd(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        index = (perm // self.k).reshape(-1, 1).expand(-1, self.hidden)
        return torch.zeros_like(x).scatter_add(0, index, rows)


class IndexPutAccumulate(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(1)
        return torch.zeros_like(x).index_put_((perm // self.k,), rows, accumulate=True)


class WeightsOnGrid(Moe):
    """Routing weights multiply the rows once these are back in order."""

    def combine(self, x, rows, weights, perm):
        grid = self.restore(rows, perm).view(-1, self.k, self.hidden)
        return (grid * weights.unsqueeze(-1)).sum(dim=1)


class WeightsInSlotOrder(Moe):
    def combine(self, x, rows, weights, perm):
        rows = self.restore(rows, perm) * weights.reshape(-1, 1)
        return rows.reshape(-1, self.k, self.hidden).sum(dim=-2)


class WeightsOnActivation(Moe):
    """The down projection is linear, so weights before it are weights behind it."""

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        offsets = self.offsets(sorted_ids)
        rows = self.activate(self.project_up(self.gather(x, perm), sorted_ids, offsets))
        rows = self.project_down(rows * weights.reshape(-1)[perm, None], sorted_ids, offsets)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class WeightsOnInput(Moe):
    def experts(self, x, ids, weights):
        self.scale = weights.reshape(-1)
        return super().experts(x, ids, weights)

    def gather(self, x, perm):
        return x[perm // self.k] * self.scale[perm].unsqueeze(-1)

    def combine(self, x, rows, weights, perm):
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class NoWeights(Moe):
    def combine(self, x, rows, weights, perm):
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class NoOps(Moe):
    """Casts and reshapes that change nothing."""

    def project_up(self, rows, sorted_ids, offsets):
        return super().project_up(rows.to(rows.dtype).contiguous(), sorted_ids, offsets).view(-1, 2 * self.inner)

    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(rows.clone(), sorted_ids, offsets).float().type_as(rows)


@pytest.mark.parametrize(
    "block",
    [
        *(BinsOfWidthOne, Argsort, StableSort, IdsInt32, FloorMethod, IndexSelect, Gather, TokenTable, RowsThenSort),
        *(CastOffsets, UnsortedCounts, Searchsorted, SearchsortedSide),
        *(Slices, Split, SplitSizes, SliceFromTheEnd, Narrow, InplaceAct),
        *(ArgsortInverse, ScatterInverse, IndexPutInverse, SelectInverse),
        *(IndexAdd, IndexAddFunctional, ScatterAdd, IndexPutAccumulate),
        *(WeightsOnGrid, WeightsInSlotOrder, WeightsOnActivation, NoOps),
    ],
)
def test_spellings_of_one_block(block):
    fused = check_fused(block(), tokens())
    assert [str(s) for s in fused.specs] == [SWIGLU]


class Bincount(Moe):
    """The number of bins depends on the data, as far as Dynamo knows."""

    def offsets(self, sorted_ids):
        return torch.bincount(sorted_ids, minlength=self.num_experts).cumsum(0, dtype=torch.int32)


def test_bincount():
    x = tokens(dtype=torch.bfloat16, grad=False)
    with torch.no_grad():
        check_fused(Bincount(dtype=torch.bfloat16), x, tolerance=3e-2)


def test_weights_on_the_input():
    fused = check_fused(WeightsOnInput(), tokens())
    assert [s.weight_on for s in fused.specs] == ["input"]


def test_no_routing_weights():
    fused = check_fused(NoWeights(), tokens())
    assert [str(s) for s in fused.specs] == [SWIGLU]


class WithActivation(Moe):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def activate(self, h):
        return self.function(*h.chunk(2, -1))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda g, u: g * torch.sigmoid(g) * u, "silu(gate) * up"),
        (lambda g, u: u * (torch.sigmoid(g) * g), "silu(gate) * up"),
        (lambda g, u: F.gelu(g) * u, "gelu(gate) * up"),
        (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu_tanh(gate) * up"),
        (lambda g, u: F.relu(g) * u, "relu(gate) * up"),
        (lambda g, u: F.relu(g) ** 2 * u, "square(relu(gate)) * up"),
        (lambda g, u: F.relu(g) * F.relu(g) * u, "square(relu(gate)) * up"),
        (lambda g, u: torch.tanh(g) * u, "tanh(gate) * up"),
        (lambda g, u: g.sigmoid() * u, "sigmoid(gate) * up"),
        (lambda g, u: g * u, "gate * up"),
        (lambda g, u: F.silu(u) * g, "gate * silu(up)"),
        (lambda g, u: F.silu(g - 0.5) * (1 - u), "silu(gate + -0.5) * (up * -1.0 + 1.0)"),
        (lambda g, u: F.silu(g) * u / 3, None),
        (lambda g, u: F.silu(g) / (1 + u.exp()), None),
        (lambda g, u: F.silu(-g) * F.softplus(u), None),
        (lambda g, u: F.silu(g) * u + g, None),
        (lambda g, u: F.hardtanh(g, -0.4, 0.9) * u.clamp_min(-0.3), None),
        (lambda g, u: g * torch.erf(g) * u * 0.5, None),
        (lambda g, u: F.silu(g) * 2 * u, None),
    ],
)
def test_activations(function, text):
    fused = check_fused(WithActivation(function), tokens())
    if text is not None:
        assert [s.activation for s in fused.specs] == [text]


@pytest.mark.parametrize(
    "lift",
    [lambda s: s[None], lambda s: s.expand(HIDDEN), lambda s: torch.stack([s] * HIDDEN), lambda s: s.reshape(1)],
    ids=["unsqueeze", "expand", "stack", "reshape"],
)
@pytest.mark.parametrize("number", [lambda x: x.mean(), lambda x: x.new_zeros(())], ids=["computed", "constant"])
def test_numbers_beside_the_block(lift, number):
    """A tensor without dimensions that is given some, as a temperature or a scale is."""

    class Scaled(Moe):
        def forward(self, x):
            return super().forward(x) * (1 + lift(number(x)))

    check_fused(Scaled(), tokens())


class StoredTurned(nn.Module):
    """Every expert on every token, its matrices stored [in, out] and turned for `linear`, which turns them back."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        shapes = ((HIDDEN, 6), (6, HIDDEN))
        self.matrices = nn.ParameterList(torch.randn(shape) / 3 for _ in range(4) for shape in shapes)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        y = 0
        for e in range(4):
            up, down = self.matrices[2 * e : 2 * e + 2]
            y = y + (weights * (ids == e)).sum(-1, keepdim=True) * F.linear(F.gelu(F.linear(x, up.t())), down.t())
        return y


def test_matrices_that_are_turned_twice():
    check_fused(StoredTurned(), torch.randn(9, HIDDEN))
