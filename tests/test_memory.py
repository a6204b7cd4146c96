"""Values that are written in place, under any name: the numbers are those of eager, with mok.verify off too."""

import pytest
import torch
from blocks import Biased, Fixed, Moe, grouped, routing, tokens
from harness import Fused, compare
from torch.nn import functional as F

DOUBLE = torch.float64


class HalfWritten(Moe):
    """One half of the projection is scaled in place through a view."""

    def activate(self, h):
        h[:, : self.inner].mul_(2)
        return super().activate(h)


class GateWritten(Moe):
    def activate(self, h):
        gate, up = h.split(self.inner, -1)
        gate = gate.clone()
        gate.add_(1)
        return F.silu(gate) * up


class ViewWritten(Moe):
    """Gate is a view of h; writing it changes what h's other reader sees."""

    def activate(self, h):
        h = h * 1
        gate = h[:, : self.inner]
        gate.neg_()
        return F.silu(h[:, : self.inner]) * h[:, self.inner :]


class OutArgument(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows.clone()
        scaled = torch.empty_like(rows)
        torch.mul(rows.detach(), 1.0, out=scaled)
        return super().combine(x, rows + scaled, weights, perm)


class RowsOverwritten(Moe):
    """The buffer of the gathered rows is used again for something else before the projection."""

    def gather(self, x, perm):
        rows = super().gather(x, perm).clone()
        rows[0] = 0
        return rows


class BooleanMask(Moe):
    def combine(self, x, rows, weights, perm):
        rows = rows.clone()
        rows[perm % 2 == 0] = 0
        return super().combine(x, rows, weights, perm)


class SortedIdsShifted(Biased):
    """The sorted ids change between the counts and the biases."""

    def project_up(self, rows, sorted_ids, offsets):
        sorted_ids.copy_((sorted_ids + 1) % self.num_experts)
        return super().project_up(rows, sorted_ids, offsets)


class PermWritten(Moe):
    """The permutation changes after the rows are gathered."""

    def gather(self, x, perm):
        rows = super().gather(x, perm)
        perm.copy_(perm.flip(0))
        return rows


class InverseWritten(Moe):
    def restore(self, rows, perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0])
        inverse.copy_(inverse.roll(1))
        return rows[inverse]


class InversePatched(Moe):
    """Two positions are exchanged afterwards."""

    def restore(self, rows, perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0])
        first, second = inverse[0].clone(), inverse[1].clone()
        inverse[0], inverse[1] = second, first
        return rows[inverse]


class OffsetsWritten(Moe):
    def offsets(self, sorted_ids):
        offsets = super().offsets(sorted_ids)
        offsets[1:3] = offsets[1:3].flip(0).sort()[0]
        return offsets


class WeightsWritten(Moe):
    def route(self, x):
        ids, weights = super().route(x)
        weights = weights.clone()
        weights[:, 0] *= 3
        return ids, weights


class WeightsWrittenLate(Moe):
    """After the slots' weights are gathered, so without effect."""

    def combine(self, x, rows, weights, perm):
        weights = weights.clone()
        scale = weights.reshape(-1)[perm]
        weights.mul_(0)
        return self.restore(rows * scale.unsqueeze(-1), perm).view(-1, self.k, self.hidden).sum(1)


class WeightsWrittenThroughView(Moe):
    def combine(self, x, rows, weights, perm):
        weights = weights.clone()
        flat = weights.view(-1)
        weights[0] = 5.0
        return self.restore(rows * flat[perm].unsqueeze(-1), perm).view(-1, self.k, self.hidden).sum(1)


class ResultWritten(Moe):
    """The sum is changed in place before and after its cast."""

    def combine(self, x, rows, weights, perm):
        y = super().combine(x, rows, weights, perm)
        y += 1
        z = y.view(-1)
        z[::2] *= 2
        return y


class ZerosWritten(Moe):
    """The zeros that rows are added onto are no longer zero."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm][:, None]
        y = torch.zeros_like(x)
        y[1] = 7.0
        return y.index_add_(0, perm // self.k, rows)


class AddedTwice(Moe):
    """The same rows are added twice onto the same memory."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm][:, None]
        y = torch.zeros_like(x)
        y.index_add_(0, perm // self.k, rows)
        y.index_add_(0, perm // self.k, rows)
        return y


class TwoSums(Moe):
    """Two results from the same rows."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm][:, None]
        first = torch.zeros_like(x).index_add_(0, perm // self.k, rows)
        second = self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)
        return first * second.tanh()


class ExpertWeightWritten(Moe):
    """A copy of the weight is scaled in place between the projections."""

    def experts(self, x, ids, weights):
        self.copy = self.down.clone()
        return super().experts(x, ids, weights)

    def project_up(self, rows, sorted_ids, offsets):
        rows = super().project_up(rows, sorted_ids, offsets)
        self.copy.mul_(2)
        return rows

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows, self.copy.transpose(1, 2), offsets)


class InputWrittenBefore(Moe):
    def forward(self, x):
        x = x * 1
        x[0].add_(3)
        y = super().forward(x)
        return y


class InputWrittenAfter(Moe):
    def forward(self, x):
        x = x.clone()
        y = super().forward(x.clone())
        x.mul_(2)
        return y + x


class SharedStorage(Moe):
    """x is half of a buffer whose other half is written in between, which changes nothing."""

    def forward(self, x):
        buffer = torch.cat([x, x])
        self.other = buffer[x.shape[0] :]
        return self.experts(buffer[: x.shape[0]].clone(), *self.route(x)) + buffer.sum()

    def gather(self, x, perm):
        rows = super().gather(x, perm)
        self.other.zero_()
        return rows


BLOCKS = [
    *(HalfWritten, GateWritten, ViewWritten, OutArgument, RowsOverwritten, BooleanMask, SortedIdsShifted, PermWritten),
    *(InverseWritten, InversePatched, OffsetsWritten, WeightsWritten, WeightsWrittenLate, WeightsWrittenThroughView),
    *(ResultWritten, ZerosWritten, AddedTwice, TwoSums, ExpertWeightWritten, InputWrittenBefore, InputWrittenAfter),
    SharedStorage,
]
# What may not be fused as a whole, because its meaning is another one; the rest may or may not be understood.
OTHERS = {
    *(HalfWritten, ViewWritten, OutArgument, RowsOverwritten, BooleanMask, SortedIdsShifted, PermWritten),
    *(InverseWritten, InversePatched, OffsetsWritten),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_numbers(block):
    model, x = block(dtype=DOUBLE), tokens(dtype=DOUBLE)
    fused = Fused(model, verify=False)
    compare(model, fused, x, tolerance=1e-9)
    assert fused.report.fused + fused.report.missed >= 1
    if block in OTHERS:
        behind = (OutArgument, BooleanMask, InverseWritten, InversePatched)  # the experts' rows are not concerned
        assert fused.counts() == ((1, 0) if block in behind else (0, 1)), fused.report
        assert all(site.combine_detail for site in fused.report.sites if site.status == "fused"), fused.report


class Regions(Fixed):
    """Gradients on and off at places that `where` says."""

    where = ""

    def forward(self, x, ids, weights):
        with torch.set_grad_enabled("all" not in self.where):
            return super().forward(x, ids, weights)

    def project_up(self, rows, sorted_ids, offsets):
        with torch.set_grad_enabled("up" not in self.where):
            return super().project_up(rows, sorted_ids, offsets)

    def project_down(self, rows, sorted_ids, offsets):
        with torch.set_grad_enabled("down" not in self.where):
            return super().project_down(rows, sorted_ids, offsets)

    def sort(self, ids):
        with torch.no_grad():
            return super().sort(ids)

    def offsets(self, sorted_ids):
        with torch.no_grad():
            return super().offsets(sorted_ids)

    def restore(self, rows, perm):
        with torch.set_grad_enabled("restore" not in self.where):
            return super().restore(rows, perm)


@pytest.mark.parametrize("where", ["", "up", "down", "restore", "all"])
def test_regions_without_gradient(where):
    model = type("Some", (Regions,), {"where": where})(dtype=DOUBLE)
    ids, weights = routing(dtype=DOUBLE)
    fused = Fused(model, verify=False)
    compare(model, fused, tokens(dtype=DOUBLE), ids, weights, tolerance=1e-9)
    if where == "":
        assert fused.counts() == (1, 0), fused.report


def test_gradients_switched_on_inside():
    """Compiled where gradients are off, with a part that has them on."""

    class Inside(Fixed):
        def activate(self, h):
            with torch.enable_grad():
                return super().activate(h)

        def project_down(self, rows, sorted_ids, offsets):
            with torch.enable_grad():
                return super().project_down(rows, sorted_ids, offsets)

        def combine(self, x, rows, weights, perm):
            with torch.enable_grad():
                return super().combine(x, rows, weights, perm)

        def forward(self, x, ids, weights):
            with torch.no_grad():
                return super().forward(x, ids, weights)

    model = Inside(dtype=DOUBLE)
    ids, weights = routing(dtype=DOUBLE)
    fused = Fused(model, verify=False)
    compare(model, fused, tokens(dtype=DOUBLE), ids, weights, tolerance=1e-9)
    assert fused.report.fused + fused.report.missed == 1
