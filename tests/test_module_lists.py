"""Loops over experts in a list become one op, or stay what they are."""

import copy
import inspect
import os
import subprocess
import sys
import types

import pytest
import torch
from harness import Fused, assert_close, compare
from loops import FORMS, Binned, E, H, Hit, K, Mlp, Plain, Ranged, Sorted, Zipped
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from mok_compile import explain, integrations

HERE = os.path.dirname(__file__)
LOOP = "traced from a Python loop over the experts"


class Traced(Fused):
    """`Fused` under the name of the real backend, so that the doors open."""

    def __init__(self, model, dynamic=False, fullgraph=False, **options):
        integrations.watch()
        super().__init__(model, dynamic, fullgraph, **options)

        def backend(gm, inputs):
            return self._backend(gm, inputs)

        backend.compiler_name, backend.options = "mok", self.options
        self.call = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, H, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()


def check(block, x=None, fused=1, **options):
    """`block` compiled, in one graph if it is fused: output and gradients are eager's."""
    traced = Traced(block, fullgraph=bool(fused), **options)
    compare(block, traced, tokens(2, 9) if x is None else x)
    assert traced.report.fused == fused, traced.report
    assert all(site.verify_error is not None for site in traced.report.sites if site.status == "fused")
    return traced


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    check(FORMS[form]())


@pytest.mark.parametrize("form", FORMS)
def test_inference(form):
    block, x = FORMS[form]().eval(), tokens(2, 9)
    with torch.no_grad():
        traced = Traced(block, fullgraph=True)
        assert_close(traced(x), block(x))
    assert traced.counts() == (1, 0)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form):
    """No further from float64 than eager is, up to rounding that falls otherwise."""
    block = FORMS[form]().bfloat16()
    exact = copy.deepcopy(block).double()
    x = tokens(3, 40, dtype=torch.bfloat16)
    found, eager, wanted = Traced(block, fullgraph=True)(x), block(x), exact(x.double())
    assert found.dtype == eager.dtype
    same = [(y.double() - wanted).flatten(0, 1).norm(dim=-1) for y in (found, eager)]  # bfloat16 may route otherwise
    # A product that is rounded before its bias is added has one rounding more than torch's linear.
    assert same[0].median() <= (1.6 if form in ("plain", "biases") else 1.1) * same[1].median()


@pytest.mark.parametrize("form", FORMS)
def test_one_token(form):
    block, x = FORMS[form](), tokens(1, 1)
    traced = Traced(block, fullgraph=True)
    compare(block, traced, x, tolerance=5e-5)
    assert traced.report.fused == 1, traced.report


@pytest.mark.parametrize("form", FORMS)
def test_dynamic(form):
    """One graph for any number of tokens."""
    block = FORMS[form]()
    traced = Traced(block, dynamic=True, fullgraph=True)
    for length in (9, 5, 17):
        compare(block, traced, tokens(2, length))
    assert len(traced.graphs) == 1 and traced.counts() == (1, 0)


def test_a_module_that_holds_its_forward():
    """As a call that records router logits leaves it in transformers 4, before anything is compiled."""
    original = inspect.unwrap(Hit.forward)

    class New(Hit):
        forward = types.FunctionType(original.__code__, original.__globals__)

    block = New()
    block.forward = block.forward
    check(nn.Sequential(block))
    assert block.forward.__self__ is block
    del block.forward
    check(block)


class Given(nn.Module):
    """Experts and routing weights come from outside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Divided(Given):
    """The weights are normalised just before the loop."""

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        weights = weights / weights.sum(-1, keepdim=True)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class DividedInPlace(Given):
    def forward(self, x, ids, weights):
        weights = weights.clone()
        y = torch.zeros_like(x)
        weights /= weights.sum(-1, keepdim=True)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class DividedAfterMask(Given):
    """The masks' making is taken into the loop's region past a statement that belongs before it."""

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        weights = weights * 3 / weights.sum(-1, keepdim=True)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            k, t = torch.where(mask[e[0]])
            y.index_add_(0, t, self.experts[e[0]](x[t]) * weights[t, k, None])
        return y


class WrittenAfterMask(Given):
    """What the loop reads is made of a view of what is then written in place: it must stay in between."""

    def forward(self, x, ids, weights):
        weights = weights.clone()
        y = torch.zeros_like(x)
        seen = weights.t()
        used = seen.bool()
        weights -= weights
        weights += 1
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None] * used[k, t, None])
        return y


def routed():
    """Arguments of a `Given`."""
    x = tokens(9)
    ids = torch.rand(9, E, generator=torch.Generator().manual_seed(3)).topk(K)[1]
    weights = torch.rand(9, K, generator=torch.Generator().manual_seed(4))
    return x, ids, weights


@pytest.mark.parametrize("block", [Divided, DividedInPlace, DividedAfterMask])
def test_weights_normalised_just_before_the_loop(block):
    module, args = block(), routed()
    traced = Traced(module, fullgraph=True)
    assert_close(traced(*args), module(*args))
    assert traced.counts() == (1, 0), traced.report


def test_what_is_computed_before_a_write_in_place_stays_before_it():
    x, ids, weights = routed()
    weights[0] = 0
    module = WrittenAfterMask()
    assert_close(Traced(module)(x, ids, weights), module(x, ids, weights))


class Picked(Given):
    """Adds onto rows that are picked, as mistral-inference does."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x), K)
        weights = weights.softmax(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y[t] += weights[t, k, None] * expert(x[t])
        return y


class PickedRange(Picked):
    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=1)
        return self.mix(x, ids, weights.unsqueeze(-1))

    def mix(self, x, ids, weights):
        y = x * 2
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            y[t] += self.experts[e](x[t]) * weights[t, k]
        return y


class TopOne(Picked):
    """One expert a token: no two of them can be alike."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            (t,) = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, None]
        return y


@pytest.mark.parametrize("make", [Picked, PickedRange])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_picked_and_added_onto(make, dynamic):
    model = make()
    traced = check(model, tokens(9), dynamic=dynamic)
    assert traced.report.sites[0].op == "moe"
    compare(model, traced, tokens(13), tolerance=5e-5)
    with torch.no_grad():
        model.gate.weight.zero_()  # idle experts
    compare(model, traced, tokens(9))


class Repeats(PickedRange):
    """A token may go to one expert twice, and of two rows one is lost."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        return self.mix(x, (scores * 7).long()[:, :K] % E, scores[:, :K, None])


class Rewritten(PickedRange):
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        _, ids = torch.topk(scores.detach(), K)
        ids.view(-1)[1::2] = ids[0, 0]
        return self.mix(x, ids, scores.gather(1, ids).unsqueeze(-1))


class Along(PickedRange):
    """Top-k along the tokens: its numbers are no experts', but may be taken for them."""

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x)[:E], K, dim=0)
        return self.mix(x[:K], ids % E, weights.unsqueeze(-1))


class OtherRows(PickedRange):
    def mix(self, x, ids, weights):
        y = x * 2
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, k] + y[t]
        return y


class OtherPlaces(PickedRange):
    def mix(self, x, ids, weights):
        y = x * 2
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y[k] += self.experts[e](x[t]) * weights[t, k]
        return y


class Overwritten(PickedRange):
    def mix(self, x, ids, weights):
        y = x * 2
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, k]
            y[t] = y[t] * 2
        return y


@pytest.mark.parametrize("make", [Repeats, Rewritten, Along, OtherRows, OtherPlaces, Overwritten])
def test_rows_that_are_not_just_added_onto(make):
    model = make()
    traced = Traced(model)
    compare(model, traced, tokens(9))
    assert not any(site.detail == LOOP for site in traced.report.sites), traced.report


def test_rows_of_one_expert_each():
    traced = check(TopOne(), tokens(9))
    assert traced.report.sites[0].detail == LOOP


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_may_be_lost_are_named(nested):
    """As a miss, be it the model itself, and with fullgraph=True as one of the graph."""
    model, x = nn.Sequential(Repeats()) if nested else Repeats(), tokens(9)
    (site,) = explain(model)(x).sites
    assert (site.status, site.reason) == ("missed", "data-dependent") and "twice" in site.detail
    assert site.location.startswith("0" if nested else "(no module) [Repeats]")


STAR = """
{how}
class Star(Given):
    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.experts)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, F.silu(self.experts[e](x[t])).mul(1) * weights[t, k, None])
        return y
"""


@pytest.mark.parametrize(
    "how",
    [
        "from test_module_lists import *",
        "import torch; from test_module_lists import *",
        "from test_module_lists import torch, F, Given",
        "import test_module_lists as lists; Given, torch, F = lists.Given, lists.torch, lists.F",
        "import torch; x = F = 0; from test_module_lists import *; import torch.nn.functional as F",
        "import torch, x_of_another_kind as x; from test_module_lists import *",
    ],
)
def test_however_a_file_gets_its_names(how, tmp_path, monkeypatch):
    """Python compiles calls of imported names otherwise than those of other names."""
    assert _is_seen(how, tmp_path, monkeypatch), "the loop is not seen"


def test_names_that_mean_something_else_than_in_python(tmp_path, monkeypatch):
    """The loop would be gone through with Python's own."""
    assert not _is_seen("from test_module_lists import *; zip = enumerate", tmp_path, monkeypatch)


def _is_seen(how, tmp_path, monkeypatch):
    (tmp_path / "x_of_another_kind.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"star_{abs(hash(how))}"
    (tmp_path / f"{name}.py").write_text(STAR.format(how=how))
    monkeypatch.delitem(sys.modules, name, raising=False)
    cls = __import__(name).Star
    integrations.watch()
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1))
    return hasattr(cls.__dict__["forward"], "__wrapped__")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_any_number_of_slots(k):
    """One graph for any number of tokens, but one for each number of slots: that is part of the block."""
    block = Given()
    traced = Traced(block, dynamic=True, fullgraph=True)
    for length in (9, 5, 17):
        weights, ids = torch.rand(length, E).topk(k)
        compare(block, traced, tokens(length), ids, weights.requires_grad_())
    assert len(traced.graphs) == 1 and traced.counts() == (1, 0)


def test_idle_experts_get_zeros():
    block = Hit([Mlp() for _ in range(E)])
    with torch.no_grad():
        block.gate.weight.zero_()
    traced = Traced(block, fullgraph=True)
    compare(block, traced, tokens(2, 9))
    traced(tokens(2, 9)).sum().backward()
    idle = [e for e in block.experts if not e.down_proj.weight.grad.any()]
    assert len(idle) == E - K
    assert all(p.grad is not None for e in idle for p in e.parameters())


def test_frozen_experts():
    block = Hit()
    block.experts.requires_grad_(False)
    check(block)


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointing(reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Hit(), Ranged()])

        def forward(self, x):
            for block in self.blocks:
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return x

    traced = Traced(Model(), fullgraph=True)
    compare(traced.call._orig_mod, traced, tokens(2, 9))
    assert traced.report.fused == 2


def test_autocast():
    block, x = Hit(), tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        traced = Traced(block, fullgraph=True)
        found, eager = traced(x), block(x)
    assert traced.counts() == (1, 0)
    wanted = copy.deepcopy(block)(x)
    assert found.dtype == eager.dtype
    errors = [(y.float() - wanted).flatten(0, 1).norm(dim=-1).median() for y in (found, eager)]
    assert errors[0] <= 1.1 * errors[1]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_data_parallel():
    """Dynamo gives the graph to a splitter of its own, which gives us the pieces."""
    block, x = Hit(), tokens(2, 9)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        traced = Traced(torch.nn.parallel.DistributedDataParallel(block), fullgraph=False, verify=False)
        compare(block, traced, x)
    finally:
        torch.distributed.destroy_process_group()
    assert traced.counts() == (1, 0), traced.report


def test_weights_are_not_stacked():
    traced = check(Hit())
    assert not any("stack" in name or "cat" in name for name in traced.targets())


def test_the_loop_stays_in_eager_and_under_other_backends():
    block, x = Hit(), tokens(2, 9)
    expected = block(x)
    names = []

    def other(gm, inputs):
        names.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    integrations.watch()
    assert torch.equal(block(x), expected)
    assert torch.equal(torch.compile(block, backend=other)(x), expected)
    assert names and not any("mok" in name for name in names)


def test_switched_off_the_loop_stays_a_loop():
    block, x = Hit(), tokens(2, 9)
    traced = Traced(block, enabled=False)
    assert torch.equal(traced(x), block(x))
    assert not any("mok" in name for name in traced.targets())


def test_report():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Hit(), Ranged()

        def forward(self, x):
            return self.second(self.first(x))

    report = explain(Model())(tokens(2, 9))
    assert (report.fused, report.missed, len(report.graphs)) == (2, 0, 1)
    assert [site.location.partition(" ")[0] for site in report.sites] == ["first", "second"]
    assert all("loops.py" in site.location and site.detail == LOOP for site in report.sites)


class KeepsIds(Ranged):
    def moe(self, x, ids, weights):
        self.ids = ids
        return super().moe(x, ids, weights)


def test_ids_that_leave_the_graph_of_their_loop():
    block = KeepsIds()
    traced = Traced(block)
    compare(block, traced, tokens(2, 9))
    assert traced.counts() == (1, 0) and len(traced.graphs) == 1, traced.report


class FewerThanOne(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] < 1:
                continue
            t, k = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, k, None]
        return y


class AtLeastOne(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] >= 1:
                t, k = torch.where(ids == e)
                y[t] += self.experts[e](x[t]) * weights[t, k, None]
        return y


@pytest.mark.parametrize("kind", [FewerThanOne, AtLeastOne])
def test_none_said_otherwise(kind):
    check(kind(), tokens(1, 2))


class ZippedStrictly(Zipped):
    """With more masks than experts, which Python refuses."""

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x), self.top_k)
        masks = (ids.unsqueeze(-1) == torch.arange(self.num_experts + 1)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts, strict=True):
            t, k = torch.where(mask)
            y[t] += weights[t, k, None] * expert(x[t])
        return y


def test_an_error_of_the_loop_stays():
    block, x = ZippedStrictly(), tokens(9)
    for call in (block, Traced(block)):
        with pytest.raises(ValueError, match="shorter"):
            call(x)


class FirstPlaces(nn.Module):
    """makeMoE with a capacity: it is a share of all slots."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E), nn.ModuleList(Plain() for _ in range(E))

    def forward(self, x):
        logits = self.gate(x)
        best, ids = logits.topk(K, -1)
        table = torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1).view(-1, E)
        flat, room = x.view(-1, H), x.shape[0] * x.shape[1] * K // E
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            chosen = torch.nonzero((ids == e).any(-1).view(-1)).squeeze(-1)
            kept = chosen[:room] if chosen.numel() > room else chosen
            if kept.numel() > 0:
                y.index_add_(0, kept, expert(flat[kept]) * table[kept, e].unsqueeze(1))
        return y.view(x.shape)


def test_refusals_are_named():
    block = Hit()
    block.experts[2].register_forward_hook(lambda module, args, out: None)
    report = explain(nn.Sequential(block))(tokens(2, 9))
    assert [(site.status, site.reason) for site in report.sites] == [("missed", "hooks")]
    assert "hook" in report.sites[0].detail


# Loops that are not quite the loop over experts


class Unscaled(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, _ = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]))
        return y


class OtherToken(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights.flip(0)[t, k, None])
        return y


class OtherSlot(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, 1 - k, None])
        return y


class SkipsFirst(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            if e == 0:
                continue
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class StartsLater(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(1, self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class StopsEarly(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            if e == 3:
                break
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Fewer(Ranged):
    """Experts 3 and 4 are never called."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(3):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class ByNumber(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None] * (e + 1))
        return y


class OneIsSpecial(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = self.experts[e](x[t])
            if e == 2:
                out = out * 2
            y.index_add_(0, t, out * weights[t, k, None])
        return y


class NumberLeft(Ranged):
    """What the loop goes by is read when it is over."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        e = 0
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y * e


class SortedAndCounted(Sorted):
    """Looks at the list of the experts' outputs otherwise than by putting them together."""

    def moe(self, x, ids, weights):
        counts, order = F.one_hot(ids, E).sum((0, 1)), ids.view(-1).argsort()
        rows = x[order // ids.shape[1]]
        outputs = []
        start = 0
        for i, count in enumerate(counts):
            if count == 0:
                continue
            end = start + count
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        return x + torch.cat(outputs).sum(0) * len(outputs)


class SortedFirst(Sorted):
    def moe(self, x, ids, weights):
        counts, order = F.one_hot(ids, E).sum((0, 1)), ids.view(-1).argsort()
        rows = x[order // ids.shape[1]]
        outputs = []
        start = 0
        for i, count in enumerate(counts):
            if count == 0:
                continue
            end = start + count
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        return x + torch.cat(outputs).sum(0) + outputs[0].sum(0)


class SortedInBytes(Sorted):
    """Ranges end at 255 and begin again at 0."""

    def counted(self, counts):
        return counts.to(torch.uint8)


class Joined(Sorted):
    """What is joined is used as it is, whatever rows the counts leave out."""

    def moe(self, x, ids, weights):
        counts = self.counted(ids)
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        outputs = []
        start = 0
        for i, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        joined = torch.cat(outputs)
        return x + joined.mean(0) * weights.sum() + joined.shape[0]

    def scattered(self, ids):
        return ids.new_zeros(ids.shape[0], E).scatter_(1, ids, 1)


class Capped(Joined):
    def counted(self, ids):
        return self.scattered(ids).sum(0).clamp(max=2)


class CappedInPlace(Joined):
    def counted(self, ids):
        counts = self.scattered(ids).sum(0)
        counts.clamp_(max=2)
        return counts


class CappedInPart(Joined):
    def counted(self, ids):
        counts = self.scattered(ids)
        counts[:4].zero_()
        return counts.sum(0)


class CappedInNumpy(Joined):
    def counted(self, ids):
        return self.scattered(ids).sum(0).numpy().clip(max=2)


class OneLess(Joined):
    def counted(self, ids):
        return (self.scattered(ids).sum(0) - 1).relu()


class FirstSlots(Joined):
    def counted(self, ids):
        return F.one_hot(ids[:, 0], E).sum(0)


class TwiceTheSame(Joined):
    """A token that is counted once has two rows."""

    def counted(self, ids):
        return self.scattered(ids // 2 * 2).sum(0)


class TwiceInPlace(Joined):
    def counted(self, ids):
        others = ids + 0
        others[:, 1] = others[:, 0]
        return self.scattered(others).sum(0)


class SomeBins(Joined):
    def counted(self, ids):
        return torch.histc((ids * 2).float(), bins=E, min=0, max=E - 1).long()


class NoNumbersOfOthers(Joined):
    """Expert numbers that are nobody's are left out."""

    def counted(self, ids):
        return ((ids + 1)[..., None] == torch.arange(E)).sum((0, 1))


class CheckedForMore(Joined):
    def counted(self, ids):
        others = ids * 2
        assert F.one_hot(others, 2 * E).shape[-1] == 2 * E
        return (others[..., None] == torch.arange(E)).sum((0, 1))


class Listed(Joined):
    """Counts as Python numbers."""

    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        counts = self.counted(ids)
        outputs = []
        start = 0
        counts = counts.tolist()
        for i, count in enumerate(counts):
            if count == 0:
                continue
            end = start + count
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        joined = torch.cat(outputs)
        return x + joined.mean(0) * weights.sum() + joined.shape[0]


class CappedList(Listed):
    counted = Capped.counted


class ListInBytes(Listed):
    def counted(self, ids):
        return self.scattered(ids).to(torch.uint8).sum(0, dtype=torch.uint8)


class FewBins(Binned):
    """Where the graph says nothing of the expert numbers, those of experts beyond the bins may be among them."""

    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        outputs, start = [], 0
        for i, count in enumerate(torch.bincount(ids.view(-1), minlength=3).tolist()):
            if count > 0:
                outputs.append(self.experts[i](rows[start : start + count]))
            start = start + count
        return x + torch.cat(outputs).mean(0) * weights.sum()


class BinsOfSums(Binned):
    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        outputs, start = [], 0
        for i, count in enumerate(torch.bincount(ids.sum(1) // 2, minlength=E).tolist()):
            if count > 0:
                outputs.append(self.experts[i](rows[start : start + count]))
            start = start + count
        return x + torch.cat(outputs).mean(0) * weights.sum()


class CappedBins(Binned):
    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        outputs, start = [], 0
        counts = torch.bincount(ids.view(-1), minlength=E).clamp(max=2).tolist()
        for i, count in enumerate(counts):
            if count > 0:
                outputs.append(self.experts[i](rows[start : start + count]))
            start = start + count
        return x + torch.cat(outputs).mean(0) * weights.sum()


class ChangedBehindTheList(Joined):
    """What the numbers were taken from is other numbers when the loop begins."""

    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        counted = self.scattered(ids).sum(0)
        counts = counted.tolist()
        self.cap(counted)
        outputs, start = [], 0
        for i, count in enumerate(counts):
            if count > 0:
                outputs.append(self.experts[i](rows[start : start + count]))
            start = start + count
        return x + torch.cat(outputs).mean(0) * weights.sum() + counted.sum()

    def cap(self, counts):
        counts.clamp_(max=1)


class NumberedByZip(Ranged):
    numbers = range(E)

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in zip(self.numbers, self.experts, strict=False):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        return y


class NumberedByZipFromOne(NumberedByZip):
    numbers = range(1, E + 1)


class NumberedByZipBackwards(NumberedByZip):
    numbers = range(E - 1, -1, -1)


class ChangedBehindTheMask(Ranged):
    """What the masks were made from is other numbers when the loop begins."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        ids = ids.clone()
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        self.change(ids)
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y

    def change(self, ids):
        ids.fill_(1)


class NumberKept(Ranged):
    """A function that is made before the loop and called after it reads what the loop goes by."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        e = 0
        last = lambda: e  # noqa: E731
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y * last()


class CountsInBytes(Ranged):
    """256 rows are none in eight bits."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = mask.sum(dim=(-1, -2), dtype=torch.uint8).nonzero()
        for e in hit:
            k, t = torch.where(mask[e].squeeze(0))
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class CountsOthers(Ranged):
    """Skips experts that no token has in its first slot."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids[:, :1].flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] == 0:
                continue
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class LeastCounts(CountsOthers):
    """Skips experts with one token only."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] > 1:
                t, k = torch.where(ids == e)
                y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class FirstRows(Ranged):
    """A capacity: the tokens of an expert beyond it are dropped."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            if t.numel() > 3:
                t, k = t[:3], k[:3]
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class OddRows(Ranged):
    """Something else depends on how many rows there are."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = self.experts[e](x[t]) * weights[t, k, None]
            if t.numel() > 3:
                out = out * 2
            y.index_add_(0, t, out)
        return y


@pytest.mark.parametrize("block", [FirstRows, FirstPlaces])
def test_a_capacity_is_named(block):
    (site,) = explain(block())(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "routing") and "takes the first so many" in site.detail


def test_another_question_about_the_number_of_rows():
    (site,) = explain(OddRows())(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "data-dependent") and "otherwise than by skipping" in site.detail


class ZippedWithOthers(Zipped):
    """Each expert beside the mask of another."""

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, ids = torch.topk(self.gate(x), self.top_k)
        masks = (ids.unsqueeze(-1) == torch.arange(self.num_experts)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(self.masks(masks), self.experts, strict=False):
            t, k = torch.where(mask)
            y[t] += weights[t, k, None] * expert(x[t])
        return y.view(shape)

    def masks(self, masks):
        return masks.roll(1, 0)


class ZippedLater(ZippedWithOthers):
    def masks(self, masks):
        return masks[1:]


class FromOne(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts, start=1):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        return y


class Neighbour(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e - 1](x[t]) * weights[t, k, None])
        return y


class Carried(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        scale = 1.0
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            scale = scale * 0.5
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None] * scale)
        return y


class Feeds(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t] + y[t]) * weights[t, k, None])
        return y


class Overwrites(Ranged):
    def moe(self, x, ids, weights):
        y = x.clone()
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](y[t]) * weights[t, k, None])
        return y


class Itself(Ranged):
    """What is added onto is what is read, under another name."""

    def moe(self, x, ids, weights):
        x = x.clone()
        y = x
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Alias(Ranged):
    def moe(self, x, ids, weights):
        x = x.clone()
        y = x.view(-1, H)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Reversed(Sorted):
    """The rows of the last expert are those of the first."""

    def moe(self, x, ids, weights):
        counts = F.one_hot(ids.reshape(-1), self.num_experts).sum(0)
        order = ids.reshape(-1).argsort(stable=True)
        rows = x[order // K]
        outputs = []
        start = 0
        for e, n in enumerate(counts.flip(0)):
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start : start + n]))
            start = start + n
        return (torch.cat(outputs) * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


class Overlapping(Sorted):
    def moe(self, x, ids, weights):
        counts = F.one_hot(ids.reshape(-1), self.num_experts).sum(0)
        order = ids.reshape(-1).argsort(stable=True)
        rows = x[order // K]
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            outputs.append(self.experts[e](rows[0:end]).sum(0, keepdim=True))
            start = end
        return torch.cat(outputs).sum(0) + weights.sum() * torch.ones_like(x)


class Doubled(Sorted):
    def moe(self, x, ids, weights):
        counts = F.one_hot(ids.reshape(-1), self.num_experts).sum(0)
        rows = x[ids.reshape(-1).argsort(stable=True) // K]
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            outputs.append(self.experts[e](rows[start:end]))
            outputs.append(rows[start:end])
            start = end
        return torch.cat(outputs).sum(0) + weights.sum() * torch.ones_like(x)


class ManyTokens(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            if t.numel() > 7:
                y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Idle(Ranged):
    """Experts without tokens count."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        first = torch.zeros(1, dtype=torch.int64)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                y.index_add_(0, first, x[first])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Constant(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            with torch.no_grad():
                out = self.experts[e](x[t])
            y.index_add_(0, t, out * weights[t, k, None])
        return y


class Averaged(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = self.experts[e](x[t])
            y.index_add_(0, t, (out - out.mean(0, keepdim=True)) * weights[t, k, None])
        return y


class TwoRoutings(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        other = ids.flip(0)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            u, _ = torch.where(other == e)
            y.index_add_(0, u, self.experts[e](x[t]) * weights[t, k, None])
        return y


class TwoOrders(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts)
        by_slot, by_token = mask.permute(2, 1, 0), mask.permute(2, 0, 1)
        for e in range(self.num_experts):
            k, t = torch.where(by_slot[e])
            u, _ = torch.where(by_token[e])
            y.index_add_(0, u, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Popular(Ranged):
    """Only experts with more than one token."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 1).nonzero()
        for e in hit:
            k, t = torch.where(mask[e].squeeze(0))
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class AllButOne(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit[1:]:
            k, t = torch.where(mask[e].squeeze(0))
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class Leaks(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = self.experts[e](x[t])
            y.index_add_(0, t, out * weights[t, k, None])
        return y + out.sum()


class Counts(Mlp):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = Mlp(), scale

    def forward(self, x):
        return self.inner(x) * self.scale


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def adapted():
    block = Hit()
    for expert in block.experts:
        expert.down_proj = Lora(expert.down_proj)
    return block


def one_adapted():
    block = Hit()
    block.experts[1].down_proj = Lora(block.experts[1].down_proj)
    return block


def replaced_forward():
    block = Hit()
    stock = block.experts[1].forward
    block.experts[1].forward = lambda x: stock(x) * 3
    return block


def hooked():
    block = Hit()
    block.experts[1].register_forward_hook(lambda module, args, out: out * 3)
    return block


def inner_hook():
    block = Hit()
    block.experts[1].act_fn.register_forward_hook(lambda module, args, out: out * 3)
    return block


class ChangedThroughOut(ChangedBehindTheMask):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        ids = ids.clone()
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        torch.clamp(ids, max=1, out=ids)
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class ChangedThroughAView(ChangedBehindTheMask):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        ids = ids.clone()
        flat = ids.view(-1)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        self.change(flat)
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class ChangedThroughSelf(ChangedBehindTheMask):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        ids = self.kept = ids.clone()
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        self.change_kept()
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y

    def change_kept(self):
        self.kept.fill_(1)


class ChangedByAFlag(ChangedBehindTheMask):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        ids = ids.clone()
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        F.threshold(ids, 1, 0, True)
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class ListChangedThroughOut(Joined):
    def moe(self, x, ids, weights):
        rows = x[ids.view(-1).argsort() // ids.shape[1]]
        counted = self.scattered(ids).sum(0)
        counts = counted.tolist()
        torch.clamp(counted, max=1, out=counted)
        outputs, start = [], 0
        for i, count in enumerate(counts):
            if count > 0:
                outputs.append(self.experts[i](rows[start : start + count]))
            start = start + count
        return x + torch.cat(outputs).mean(0) * weights.sum() + counted.sum()


class CappedInAList(Joined):
    """Ops for lists of tensors leave no trace in what Dynamo knows of these."""

    def counted(self, ids):
        counts = self.scattered(ids).sum(0)
        torch._foreach_clamp_max_([counts], 2)
        return counts


_library = torch.library.Library("mok_test_lists", "DEF")
_library.define("cap_(Tensor(a!) counts) -> ()")
_library.impl("cap_", lambda counts: None, "Meta")
_library.impl("cap_", lambda counts: counts.copy_(counts.clamp(max=2)) is None or None, "CPU")


class CappedByAnOp(Joined):
    """So do ops that come with a schema and nothing else."""

    def counted(self, ids):
        counts = self.scattered(ids).sum(0)
        torch.ops.mok_test_lists.cap_(counts[:4])
        return counts


class DoubledByAnOp(Ranged):
    """A token's experts are no longer all different, so that one of them overwrites the other."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        self.change(ids)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, k, None]
        return y

    def change(self, ids):
        torch.ops.mok_test_lists.cap_(ids)


class DoubledInAList(DoubledByAnOp):
    def change(self, ids):
        torch._foreach_clamp_max_([ids], 1)


MISCOUNTED = [
    Capped, CappedInPlace, CappedInPart, CappedInNumpy, OneLess, FirstSlots, TwiceTheSame, TwiceInPlace, SomeBins,
    NoNumbersOfOthers, CheckedForMore, CappedList, FewBins, BinsOfSums, CappedBins,
    CappedInAList, CappedByAnOp,
]  # fmt: skip
ALTERED = [
    *MISCOUNTED, ListInBytes, ChangedBehindTheList, ListChangedThroughOut, NumberedByZipFromOne, NumberedByZipBackwards,
    OtherToken, OtherSlot, NumberLeft, NumberKept, CountsInBytes, CountsOthers, LeastCounts, FirstRows,
    ZippedWithOthers, ZippedLater, FromOne, SortedAndCounted, SortedFirst, SortedInBytes,
    StartsLater, StopsEarly, ByNumber, OneIsSpecial, Neighbour, Carried, Feeds, Overwrites,
    Itself, Alias, Overlapping, Doubled, ManyTokens, Idle, Constant, Averaged, TwoRoutings, TwoOrders, Popular,
    AllButOne, Leaks, adapted, one_adapted, replaced_forward, hooked, inner_hook,
    lambda: Hit([Mlp(act=nn.SiLU() if i != 3 else nn.Tanh()) for i in range(E)]),
    lambda: Hit([Counts() for _ in range(E)]),
    lambda: Hit([Scaled(i) for i in range(E)]),
    lambda: Hit([Mlp(bias=i == 0) for i in range(E)]),
]  # fmt: skip


@pytest.mark.parametrize("make", ALTERED)
def test_what_is_something_else_stays(make):
    block = make()
    twin = copy.deepcopy(block) if make not in (replaced_forward,) else block
    traced = Traced(block)
    x = tokens(2, 9)
    wanted, found = twin(x), traced(x)
    assert_close(found, wanted)
    if make is not Constant:
        seed = torch.randn(2, 9, H)
        (a,), (b,) = torch.autograd.grad(wanted, x, seed), torch.autograd.grad(found, x, seed)
        assert_close(b, a)
    assert not any(site.detail == LOOP for site in traced.report.sites), traced.report


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("names", [("gate_proj",), ("gate_proj", "up_proj", "down_proj")], ids=len)
def test_low_rank_paths_are_named(names, scale):
    """Whether something works on them, or they are added as they are."""

    class Scaled(Lora):
        def forward(self, x):
            path = self.b(self.a(x))
            return self.base(x) + (path if scale == 1 else path * scale)

    block = Hit()
    for expert in block.experts:
        for name in names:
            setattr(expert, name, Scaled(getattr(expert, name)))
    (site,) = explain(block)(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "activation") and "LoRA" in site.detail, site


@pytest.mark.parametrize("make", MISCOUNTED)
def test_a_loop_through_rows_that_others_were_counted_for_says_so(make):
    block, x = make(), tokens(2, 9)
    (site,) = explain(block)(x).sites
    assert site.status == "missed" and "those of all rows" in site.detail, site


# All counts of all rows.
COUNTS = {
    "scattered": lambda ids: ids.new_zeros(ids.shape[0], E).scatter_(1, ids, 1).sum(0),
    "booleans": lambda ids: torch.zeros(ids.shape[0], E, dtype=torch.bool).scatter(1, ids, True).sum(0),
    "added": lambda ids: torch.zeros(E, dtype=torch.int64).scatter_add_(0, ids.view(-1), torch.ones_like(ids.view(-1))),
    "one-hot": lambda ids: F.one_hot(ids, E).sum((0, 1)),
    "one-hot, one after the other": lambda ids: F.one_hot(ids.view(-1), E).permute(1, 0).sum(1).to(torch.int32),
    "checked": lambda ids: F.one_hot(ids % E, E).sum((0, 1)),
    "compared": lambda ids: (ids == torch.arange(E)[:, None, None]).sum((1, 2)),
    "histogram": lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E - 1).int(),
    "numpy": lambda ids: ids.new_zeros(ids.shape[0], E).scatter_(1, ids, 1).sum(0).cpu().numpy(),
    "written elsewhere": lambda ids: ids.new_zeros(ids.shape[0], 2 * E)[:, :E].zero_().scatter_(1, ids, 1).sum(0),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_counts_of_all_rows(counts, dynamic):
    class Given(Joined):
        def counted(self, ids):
            return COUNTS[counts](ids)

    check(Given(), dynamic=dynamic)


@pytest.mark.parametrize("counts", [name for name in COUNTS if name != "numpy"])
def test_counts_of_all_rows_as_numbers(counts):
    class Given(Listed):
        def counted(self, ids):
            return COUNTS[counts](ids)

    check(Given())


def test_counts_made_in_the_header():
    class Given(Joined):
        def moe(self, x, ids, weights):
            rows = x[ids.view(-1).argsort() // ids.shape[1]]
            marks = self.scattered(ids)
            outputs, start = [], 0
            for i, count in enumerate(marks.sum(0, dtype=torch.int32).tolist()):
                if count > 0:
                    outputs.append(self.experts[i](rows[start : start + count]))
                start = start + count
            return x + torch.cat(outputs).mean(0) * weights.sum()

    check(Given())


class ForInference(Ranged):
    @torch.inference_mode()
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_method_in_inference_mode(mode, fullgraph):
    block, x = ForInference(), tokens(2, 9)
    with mode():
        traced = Traced(block, fullgraph=fullgraph)
        found, wanted = traced(x), block(x)
    assert_close(found, wanted)
    assert not found.requires_grad and not wanted.requires_grad
    assert traced.counts() == (1, 0) and len(traced.graphs) == 1


def test_a_method_out_of_inference_mode_keeps_its_gradients():
    class Never(Ranged):
        moe = torch.inference_mode(False)(inspect.unwrap(ForInference.moe))

    block, x = Never(), tokens(2, 9)
    compare(block, Traced(block), x)


def test_experts_beside_their_numbers():
    check(NumberedByZip())


@pytest.mark.parametrize("make", [DoubledByAnOp, DoubledInAList])
def test_experts_that_were_made_alike_out_of_sight(make):
    block, x = make(), tokens(2, 9).detach()
    with torch.no_grad():
        traced = Traced(block, verify=False)
        assert_close(traced(x), block(x))
    assert traced.report.fused == 0


CHANGED = [ChangedBehindTheMask, ChangedThroughOut, ChangedThroughAView, ChangedThroughSelf, ChangedByAFlag]


@pytest.mark.parametrize("make", [Unscaled, SkipsFirst, Fewer, Reversed, *CHANGED])
def test_what_can_be_said_exactly_may_be_fused(make):
    block, x = make(), tokens(2, 9)
    compare(block, Traced(block), x)


def test_dropout_in_training_is_left_alone():
    block, x = Ranged([Plain(dropout=0.5) for _ in range(E)]), tokens(2, 9)
    traced = Traced(block.train())
    torch.manual_seed(3)
    wanted = block(x)
    torch.manual_seed(3)
    assert torch.equal(traced(x), wanted) and traced.report.fused == 0
    check(block.eval())


def test_a_changed_constant_is_seen():
    block = FORMS["stacked"]()
    traced = check(block)
    block.limit = 0.1
    compare(block, traced, tokens(2, 9))
    assert traced.report.fused == 2


def test_train_and_eval_differ():
    block, x = Ranged([Plain(dropout=0.5) for _ in range(E)]), tokens(2, 9)
    traced = Traced(block.eval())
    assert_close(traced(x), block(x))
    assert traced.report.fused == 1
    block.train()
    torch.manual_seed(3)
    wanted = block(x)
    torch.manual_seed(3)
    assert_close(traced(x), wanted)


@pytest.mark.parametrize("first", ["backend", "transformers"])
def test_either_may_be_imported_first(first):
    """The backend is asked for before or after transformers comes; a reset of Dynamo in between changes nothing."""
    pytest.importorskip("transformers")
    steps = ["import torch; torch.compile(torch.nn.Linear(1, 1), backend='mok'); torch._dynamo.reset()", "import hf"]
    program = [
        *(steps if first == "backend" else steps[::-1]),
        "import torch",
        "from mok_compile import explain",
        "model, ids = hf.make('mixtral')",
        "if hasattr(model, 'set_experts_implementation'): model.set_experts_implementation('eager')",
        "report = explain(model)(input_ids=ids)",
        "assert (report.fused, report.missed) == (2, 0), report",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(program)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reset_of_dynamo_leaves_the_doors_open():
    """The backend is looked up once in a process; classes made after a reset are found all the same."""
    torch.compile(nn.Linear(1, 1), backend="mok")
    torch._dynamo.reset()

    class Later(Hit):
        forward = Ranged.moe  # any loop: only that the class is seen

    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1))
    assert hasattr(Later.__dict__["forward"], "__wrapped__")


def test_longcat():
    """Zero experts, in the classes of transformers 4 and 5."""
    module = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    sizes = {"hidden_size": H, "expert_ffn_hidden_size": 12, "moe_intermediate_size": 12, "n_routed_experts": 5}
    more = {"zero_expert_num": 3, "moe_topk": K, "num_experts_per_tok": K, "routed_scaling_factor": 1.3}
    block = module.LongcatFlashMoE(module.LongcatFlashConfig(**sizes, **more))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    check(block)


LISTS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe"]


@pytest.mark.parametrize("family", LISTS)
def test_transformers_4(family):
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("4."):
        pytest.skip("transformers 5 has no lists of experts")
    import hf

    model, ids = hf.make(family)
    wanted, wanted_grads = hf.step(copy.deepcopy(model), ids)
    traced = Traced(model)
    found, found_grads = hf.step(model, ids, traced)
    assert traced.counts() == (2, 0) and len(traced.graphs) == 1, traced.report
    assert_close(found, wanted)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)
    assert not any(grad.any() for name, grad in found_grads.items() if name not in wanted_grads)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_router_logits_of_models(family):
    """What the model returns, and its loss."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("4."):
        pytest.skip("transformers 5 has no lists of experts")
    import hf

    model, ids = hf.make(family, output_router_logits=True, router_aux_loss_coef=0.1)
    traced = Traced(model)
    wanted, wanted_grads = hf.step(copy.deepcopy(model), ids)
    found, found_grads = hf.step(model, ids, traced)
    # Dynamo does not get through transformers' own recorder: each layer may be a graph of its own.
    assert {site.op for site in traced.report.sites} == {"moe"}, traced.report
    assert_close(found, wanted)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 2e-4, name)
    with torch.no_grad():
        torch._dynamo.reset()
        wanted, found = model(input_ids=ids).router_logits, Traced(model)(input_ids=ids).router_logits
    for a, b in zip(wanted, found, strict=True):
        assert_close(b, a)


# Experts that are not alike


class Limits:
    limit = 1.0


class Limited(Mlp):
    """Each expert holds an object of its own."""

    def __init__(self):
        super().__init__()
        self.limits = Limits()

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)).clamp(max=self.limits.limit) * self.up_proj(x))


class Factor(Mlp):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * self.scale)


def noted(number):
    """What no code reads."""
    expert = Mlp()
    expert.number, expert.limits = number, Limits()
    return expert


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda e: Limited(), "each has a limits of its own (Limits)"),
        (lambda e: Factor(1.0 + e), "scale is 1.0 and 2.0"),
        (lambda e: Mlp(act=nn.SiLU() if e else nn.GELU()), "act_fn: one is GELU, the other SiLU"),
        (lambda e: Mlp(act=nn.GELU("none" if e else "tanh")), "act_fn: approximate is 'tanh' and 'none'"),
    ],
)
def test_in_what_experts_differ_is_named(make, difference):
    model = Ranged([make(e) for e in range(E)])
    (site,) = explain(model)(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "layout"), site
    assert f"experts 0 and 1 are not alike: {difference}" in site.detail


def test_what_no_code_reads_makes_no_difference():
    model = Ranged([noted(e) for e in range(E)])
    traced = check(model)
    model.experts[1].number = 7
    compare(model, traced, tokens(2, 9))


def test_what_is_read_by_a_name_put_together_does():
    class Reads(Mlp):
        def forward(self, x):
            return super().forward(x) * getattr(self, "num" + "ber")

    model = Ranged([Reads() for _ in range(E)])
    for number, expert in enumerate(model.experts):
        expert.number = 1.0 + number
    traced = Traced(model)
    compare(model, traced, tokens(2, 9))
    assert traced.report.fused == 0
