"""Ops whose output shape only the data tells: in the graph while Dynamo traces for our backend, nowhere else."""

import pytest
import torch
from test_user_blocks import AnyMask, Loop, WhereIndexAdd, tokens
from torch import nn

import mok_compile
from mok_compile.backend import transform
from mok_compile.integrations import capture, watch
from mok_compile.options import Options

FLAGS = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")


class Ours:
    """The backend without Inductor."""

    compiler_name = "mok"

    def __init__(self, **options):
        options = {"capture": True, "engine": "portable", **options}
        self.options, self.graphs, self.reports = Options(**options), [], []

    def __call__(self, gm, inputs):
        self.reports.append(transform(gm, inputs, self.options))
        self.graphs.append(gm)
        return gm.forward

    @property
    def fused(self):
        return sum(report.fused for report in self.reports)


@pytest.fixture(autouse=True)
def flags_stay():
    watch()
    before = [getattr(torch._dynamo.config, name) for name in FLAGS]
    yield
    assert [getattr(torch._dynamo.config, name) for name in FLAGS] == before == [False, False]
    assert not capture._on


def run(model, x, backend):
    return torch.compile(model, backend=backend)(x)


def in_a_function(block):
    """The block with its loop in a function, where Dynamo meets it as it is."""

    def mix(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = block.add(self, out, x, ids, weights, e, expert)
        return out

    class Outside(Loop):
        def forward(self, x):
            weights, ids = torch.topk(self.gate(x).softmax(-1), self.k, -1)
            return mix(self, x, ids, weights)

    return Outside()


@pytest.mark.parametrize("block", [AnyMask, WhereIndexAdd])
def test_a_block_with_masks_needs_no_flags(block):
    model, x, backend = in_a_function(block), tokens(), Ours()
    assert torch.allclose(run(model, x, backend), model(x), rtol=1e-9)
    assert (len(backend.graphs), backend.fused) == (1, 1)


def test_after_a_reset_of_dynamo():
    """It clears Dynamo's callbacks, and nobody fetches the backend anew: the first frame is traced as any other."""
    model, x, backend = in_a_function(AnyMask), tokens(), Ours()
    for _ in range(2):
        torch._dynamo.reset()
        assert torch.allclose(run(model, x, backend), model(x), rtol=1e-9)
    assert (len(backend.graphs), backend.fused) == (2, 2)


def test_it_is_asked_for():
    assert not Options().capture
    model, x, backend = in_a_function(AnyMask), tokens(), Ours(capture=False)
    run(model, x, backend)
    assert backend.fused == 0 and len(backend.graphs) > 1


class Filled(Loop):
    """The training of DeepSeek's model files."""

    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(self.k, dim=0)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class FilledInPart(Filled):
    """Rows of the last expert stay what they were."""

    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(self.k, dim=0)
        y = rows.clone()
        for e, expert in enumerate(self.experts[:-1]):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class FilledByNeighbours(Filled):
    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(self.k, dim=0)
        y = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(rows.roll(1, 0)[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class FilledFromTheMean(Filled):
    def mix(self, x, ids, weights):
        flat, rows = ids.view(-1), x.repeat_interleave(self.k, dim=0)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            out = expert(rows[flat == e])
            y[flat == e] = out - out.mean()
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def step(model, run, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_loop_that_fills_rows_by_masks_needs_no_asking(fullgraph, dynamic):
    model, x, backend = Filled(), tokens(), Ours(capture=False)
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    for wanted, found in zip(step(model, model, x), step(model, compiled, x), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert (len(backend.graphs), backend.fused) == (1, 1)


@pytest.mark.parametrize("make", [FilledInPart, FilledByNeighbours, FilledFromTheMean])
def test_a_loop_that_fills_other_rows_is_traced_as_ever(make):
    model, x, backend, theirs = make(), tokens(), Ours(capture=False), []

    def other(gm, inputs):
        theirs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=backend)
    for wanted, found in zip(step(model, model, x), step(model, compiled, x), strict=True):
        equal = found is None or not found.any() if wanted is None else torch.allclose(found, wanted, rtol=1e-9)
        assert equal
    assert backend.fused == 0
    torch._dynamo.reset()
    watch()
    run(model, x, other)
    assert len(backend.graphs) == len(theirs)


def test_other_backends_see_no_flags_for_such_a_loop():
    def other(gm, inputs):
        assert not any(getattr(torch._dynamo.config, name) for name in FLAGS)
        return gm.forward

    model, x = Filled(), tokens()
    assert torch.allclose(run(model, x, other), model(x), rtol=1e-9)


class Masked(nn.Module):
    """No block: what a mask picks stays a matter of the data."""

    def forward(self, x):
        picked = x[x > 0]
        return picked.exp().sum() * int((x > 1).sum())


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.masked = in_a_function(AnyMask), Masked()

    def forward(self, x):
        return self.masked(self.block(x))


def test_a_block_beside_sizes_that_are_left():
    """The frame around both is traced again and breaks; the block's own frame does not."""
    model, x, backend = Both(), tokens(), Ours()
    assert torch.allclose(run(model, x, backend), model(x), rtol=1e-9)
    assert backend.fused == 1 and len(backend.graphs) > 1


def test_sizes_that_are_left_are_traced_as_ever():
    """As many graphs, with the same calls, as under a backend that is not ours."""
    model, x, backend, theirs = Masked(), tokens(), Ours(), []

    def other(gm, inputs):
        theirs.append(gm)
        return gm.forward

    assert torch.equal(run(model, x, backend), model(x))
    torch._dynamo.reset()
    watch()
    run(model, x, other)

    def calls(graphs):
        return [[str(n.target) for n in gm.graph.nodes if n.op.startswith("call")] for gm in graphs]

    assert calls(backend.graphs) == calls(theirs) and len(theirs) > 1


@torch._dynamo.assume_constant_result
def captured():
    return torch._dynamo.config.capture_scalar_outputs


class AsksForFlags(Masked):
    """Other calls with the flags than without."""

    def forward(self, x):
        if captured():
            x = torch.tanh(x).sin()
        else:
            for _ in range(3):
                x = torch.relu(x)
        return super().forward(x + 1)


def test_another_way_without_the_flags():
    """The new trace need not meet the instructions that the old one met."""
    model, x, backend = AsksForFlags(), tokens(), Ours()
    assert torch.equal(run(model, x, backend), model(x))
    assert len(backend.graphs) > 1


class AsksLength(nn.Module):
    def forward(self, rows):
        return torch.tanh(rows) if len(rows) else rows


class SkipsByLength(Loop):
    """Branches at a number that only the data tells, which Dynamo calls an error: by its truth, not by a comparison."""

    def add(self, out, x, ids, weights, e, expert):
        t, k = torch.where(ids == e)
        return out.index_add(0, t, expert(x[t]) * weights[t, k, None]) if len(t) else out


class InTheExperts(Loop):
    """The same in code that the loop calls."""

    def __init__(self):
        super().__init__()
        self.asks = AsksLength()

    def add(self, out, x, ids, weights, e, expert):
        t, k = torch.where(ids == e)
        return out.index_add(0, t, self.asks(expert(x[t])) * weights[t, k, None])


class LengthOfCounts(Loop):
    def add(self, out, x, ids, weights, e, expert):
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        t, k = torch.where(ids == e)
        return out.index_add(0, t, expert(x[t]) * weights[t, k, None]) if counts[e] else out


class FillsAndAsks(Loop):
    """Nobody has asked for the flags here: rows are filled in."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = x[ids == e]
            self.seen = len(rows)
            if len(rows):
                out[ids == e] = expert(rows) * weights[ids == e, None]
        return out


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("block", [SkipsByLength, InTheExperts, LengthOfCounts, FillsAndAsks])
def test_what_dynamo_calls_an_error_with_the_flags_compiles(block, asked):
    model, x, backend = block(), tokens(), Ours(capture=asked)
    assert torch.allclose(run(model, x, backend), model(x), rtol=1e-9, atol=1e-12)


def test_other_backends_break_as_ever():
    graphs = []

    def other(gm, inputs):
        assert not torch._dynamo.config.capture_dynamic_output_shape_ops
        graphs.append(gm)
        return gm.forward

    run(Masked(), tokens(), other)
    assert len(graphs) > 1


def test_flags_of_the_user_are_obeyed():
    """With the flags on, the user wants such graphs: nothing is traced again."""
    backend = Ours()
    with torch._dynamo.config.patch(dict.fromkeys(FLAGS, True)):
        run(Masked(), tokens(), backend)
    assert len(backend.graphs) == 1


def test_an_error_in_a_compile_leaves_no_flag_behind():
    class Failing(Ours):
        def __call__(self, gm, inputs):
            raise ValueError("no")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        run(AnyMask(), tokens(), Failing())


def test_explain_says_what_the_backend_does():
    options = {"mok.capture": True}
    report = mok_compile.explain(in_a_function(AnyMask), options)(tokens())
    assert (report.fused, report.missed) == (1, 0), report
    assert mok_compile.explain(Masked(), options)(tokens()).fused == 0


def test_gradients_through_the_real_backend():
    model, x = in_a_function(AnyMask), tokens()
    model(x).sum().backward()
    wanted, x.grad = x.grad, None
    compiled = torch.compile(model, backend="mok", options={"mok.capture": True})
    compiled(x).sum().backward()
    assert torch.allclose(x.grad, wanted, rtol=1e-9, atol=1e-12)
    assert torch._dynamo.utils.counters["mok"]["fused"] == 1
