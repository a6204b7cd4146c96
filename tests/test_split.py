"""Sorted rows that are split by the counts of the experts, as lists of ranges: jetmoe, granite, and by hand."""

import pytest
import torch
from harness import Fused, check_fused, compare, over_ranges
from test_batched import EXPERTS, HIDDEN, INNER, Block, tokens
from torch.nn import functional as F


class Split(Block):
    """Argsort, counts as numbers, one MLP for each range."""

    def mix(self, x, ids, weights):
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        parts = torch.split(self.rows(x, order), self.counts(flat))
        rows = torch.cat(self.parts([self.mlp(e, part) for e, part in enumerate(parts)]))
        rows = rows * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add_(0, order // self.k, rows)

    def rows(self, x, order):
        return x[order // self.k]

    def counts(self, flat):
        return torch.histc(flat.double(), EXPERTS, 0, EXPERTS - 1).long().tolist()

    def mlp(self, e, rows):
        return F.linear(F.silu(F.linear(rows, self.w1[e])) * F.linear(rows, self.w3[e]), self.w2[e])

    def parts(self, parts):
        return parts


class CountsOfFloats(Split):
    """Made floats before they are flattened."""

    def mix(self, x, ids, weights):
        self.ids = ids
        return super().mix(x, ids, weights)

    def counts(self, flat):
        return torch.histc(self.ids.float().view(-1), EXPERTS, 0, EXPERTS - 1).int().tolist()


class CountsByOneHot(Split):
    def counts(self, flat):
        return F.one_hot(flat, EXPERTS).sum(0).tolist()


class JetMoe(Block):
    """Split, projected and put together again for each of the two projections."""

    def forward(self, x):
        best, ids = self.gate(x).topk(self.k, dim=1)
        weights = best.softmax(1).type_as(x)
        hits = torch.zeros([x.shape[0], EXPERTS], dtype=x.dtype).scatter(1, ids, 1)
        sizes = hits.long().sum(0).tolist()
        order = ids.flatten().sort(0)[1]
        tokens = order.div(self.k, rounding_mode="trunc")
        gate, up = self.project(x[tokens], self.w13, sizes).chunk(2, -1)
        rows = self.project(F.silu(gate) * up, self.w2, sizes) * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, tokens, rows)

    def project(self, rows, weight, sizes):
        return torch.cat([F.linear(part, weight[e]) for e, part in enumerate(rows.split(sizes, dim=0))], 0)


class Ranges(Block):
    """Sorted rows by their ranges, read and written one after the other: Aria in transformers 4."""

    def shapes(self):
        return {"w1": (INNER, HIDDEN), "up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}

    def mix(self, x, ids, weights):
        counts = torch.histc(self.counted(ids).to(torch.float32), bins=EXPERTS, min=0, max=EXPERTS - 1).to(ids.dtype)
        order = torch.argsort(ids.view(-1))
        rows = x.index_select(0, self.slots(order) // self.k)
        gate, up = self.project(rows, self.up, counts.cpu()).chunk(2, dim=-1)
        rows = self.project(F.silu(gate) * up, self.down, counts.cpu())
        out = torch.zeros((ids.shape[0] * self.k, rows.shape[1]), dtype=rows.dtype)
        out.index_copy_(0, self.slots(order), rows)
        return (out.view(-1, self.k, rows.shape[1]) * weights.unsqueeze(-1)).sum(dim=1)

    def counted(self, ids):
        return ids.flatten()

    def slots(self, order):
        return order

    def project(self, rows, weight, counts):
        out = self.blank(rows.shape[0], weight.shape[-1], dtype=rows.dtype)
        bounds = torch.cat((torch.zeros(1, dtype=torch.long), torch.cumsum(counts, dim=0)))
        for e in self.experts():
            start, end = bounds[e], bounds[e + 1]
            self.write(out, start, end, torch.matmul(rows[start:end], weight[self.expert(e)]))
        return out

    def blank(self, *size, dtype):
        return torch.zeros(*size, dtype=dtype)

    def experts(self):
        return range(EXPERTS)

    def expert(self, e):
        return e

    def write(self, out, start, end, rows):
        out[start:end] = rows


class RangesByEnds(Ranges):
    """No zero before the ends."""

    def project(self, rows, weight, counts):
        out, ends = rows.new_empty(rows.shape[0], weight.shape[-1]), counts.cumsum(0)
        out[: ends[0]] = rows[: ends[0]] @ weight[0]
        for e in range(1, EXPERTS):
            out[ends[e - 1] : ends[e]] = rows[ends[e - 1] : ends[e]] @ weight[e]
        return out


class RangesOfSomeTokens(Ranges):
    """Some slots go to no expert: their rows stay zero."""

    def mix(self, x, ids, weights):
        return super().mix(x, ids.masked_fill(ids == 2, EXPERTS), weights)


class RangesOfOtherExperts(Ranges):
    def expert(self, e):
        return (e + 1) % EXPERTS


class RangesBackwards(Ranges):
    def experts(self):
        return reversed(range(EXPERTS))


class RangeLeftOut(Ranges):
    def experts(self):
        return range(EXPERTS - 1)


class RangeTwice(Ranges):
    def experts(self):
        return (0, *range(EXPERTS))


class RangesOfOtherCounts(Ranges):
    def counted(self, ids):
        return (ids.flatten() + 1) % EXPERTS


class RangesOnOnes(Ranges):
    """Rows without an expert would be ones."""

    def blank(self, *size, dtype):
        return torch.ones(*size, dtype=dtype)


class RangesHalfWritten(Ranges):
    """The columns of the other half stay zero."""

    def write(self, out, start, end, rows):
        out[start:end, : rows.shape[1] // 2] = rows[:, : rows.shape[1] // 2]


class RangesScaledWhileWritten(Ranges):
    """What was written so far is changed in between."""

    def write(self, out, start, end, rows):
        out.mul_(0.5)
        out[start:end] = rows


class RangesUnsorted(Ranges):
    def slots(self, order):
        return order.flip(0)


class OtherExpert(Split):
    def mlp(self, e, rows):
        return super().mlp((e + 1) % EXPERTS, rows)


class SecondProjectionOther(JetMoe):
    def project(self, rows, weight, sizes):
        return super().project(rows, weight if weight is self.w13 else weight.flip(0), sizes)


class CountsOfOthers(Split):
    def counts(self, flat):
        return super().counts((flat + 1) % EXPERTS)


class CountsBackwards(Split):
    def counts(self, flat):
        return super().counts(flat)[::-1]


class PartsBackwards(Split):
    def parts(self, parts):
        return parts[::-1]


class RowsUnsorted(Split):
    def rows(self, x, order):
        return x.repeat_interleave(self.k, 0)


def blocks(*classes):
    """As parameters of a test."""
    return [pytest.param(cls, marks=over_ranges) if issubclass(cls, Ranges) else cls for cls in classes]


@pytest.mark.parametrize(
    "block", blocks(Split, CountsOfFloats, CountsByOneHot, JetMoe, Ranges, RangesByEnds, RangesOfSomeTokens)
)
def test_fused(block):
    fused = check_fused(block(), tokens(), tolerance=1e-9)
    assert [spec.activation for spec in fused.specs] == ["silu(gate) * up"]
    left = ("split", "item", "aten._assert_scalar.default", "aten.sym_size.int")
    assert not any(t in left or "method cat" in t or "function split" in t for t in fused.targets()), fused.targets()


@pytest.mark.parametrize("block", blocks(Split, JetMoe, Ranges))
def test_any_number_of_tokens(block):
    model = block()
    fused = Fused(model, dynamic=True)
    for count in (9, 4, 23):
        with torch.no_grad():
            x = tokens(count)
            assert torch.allclose(fused(x), model(x), rtol=1e-9, atol=1e-12)
    assert fused.report.fused == len(fused.graphs) and fused.report.missed == 0, fused.report


@pytest.mark.parametrize("block", blocks(OtherExpert, SecondProjectionOther, RangesOfOtherExperts, RangesBackwards))
def test_experts_in_another_order(block):
    """Range e meets another expert than number e: right or left alone, whichever way the weights come."""
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(), tolerance=1e-9)
    assert "verify" not in fused.reasons, fused.report


WRONG_RANGES = [
    *(RangeLeftOut, RangeTwice, RangesOfOtherCounts, RangesOnOnes, RangesHalfWritten, RangesScaledWhileWritten),
    RangesUnsorted,
]


@pytest.mark.parametrize("block", blocks(CountsOfOthers, CountsBackwards, PartsBackwards, RowsUnsorted, *WRONG_RANGES))
def test_one_detail_wrong(block):
    model = block()
    fused = Fused(model)
    compare(model, fused, tokens(), tolerance=1e-9)
    assert fused.report.fused == 0 and "verify" not in fused.reasons, fused.report


def test_sizes_are_apart():
    assert len({HIDDEN, INNER, EXPERTS}) == 3
