"""Graphs that break somewhere in a block: `explain` says where, and does not take every break for one of the loop."""

import logging

import pytest
import torch
from loops import E, H, Mlp
from test_missed_loops import compiled  # noqa: F401  a fixture
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from mok_compile import backend, explain
from mok_compile.report import Site


def places(mask, limit):
    """Where each token stands in the buffer of its expert, [tokens, E]; none beyond `limit`."""
    place = (mask.cumsum(0) - 1) * mask
    return place, mask * (place < limit)


class Gate(nn.Module):
    """Top-1 with a buffer for each expert; as many columns as are needed, if it `asks` how many these are."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.score = asks, nn.Linear(H, E, bias=False)

    def forward(self, x):
        best, ids = self.score(x).softmax(-1).topk(1)
        limit = x.shape[0] // 2
        place, mask = places(F.one_hot(ids[:, 0], E).float(), limit)
        columns = max(place.max().long() + 1, limit) if self.asks else x.shape[0]
        slots = F.one_hot((place * mask).sum(-1).long(), columns)[:, :limit]
        return best[:, :, None] * mask[:, :, None] * slots[:, None]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, H, 24)), nn.Parameter(torch.randn(E, 24, H))

    def forward(self, x):
        return torch.einsum("eci,eih->ech", F.relu(torch.einsum("ech,ehi->eci", x, self.up)), self.down)


class OneByOne(nn.Module):
    """Experts that each have rows of their own: a loop that any tracer gets through."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        return torch.stack([expert(rows) for expert, rows in zip(self.experts, x, strict=True)])


class Buffers(nn.Module):
    def __init__(self, asks, experts):
        super().__init__()
        self.gate, self.experts = Gate(asks), experts

    def forward(self, x):
        combine = self.gate(x)
        rows = torch.einsum("th,tec->ech", x, (combine > 0).to(x.dtype))
        return torch.einsum("ech,tec->th", self.experts(rows), combine)


@pytest.mark.parametrize("experts", [Stack, OneByOne])
@pytest.mark.parametrize("asks", [False, True])
def test_a_capacity_is_said_wherever_the_graph_breaks(asks, experts):
    report = explain(Buffers(asks, experts()))(torch.randn(8, H))
    (site,) = report.sites
    assert (site.status, site.reason) == ("missed", "routing"), report
    assert "cumsum(0)" in site.detail and "loop" not in site.detail


def test_a_break_at_a_number_that_only_the_data_tells_is_noted():
    report = explain(Buffers(True, Stack()), {"mok.capture": True})(torch.randn(8, H))
    assert any(note.startswith("graph break:") and "slots = F.one_hot(" in note for note in report.notes), report


class Distant(nn.Module):
    """Every expert on every token, in code that asks its router for bad numbers first."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), OneByOne()

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        if weights.isnan().any():
            return x
        table = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
        return torch.einsum("eth,te->th", self.experts(x.expand(E, -1, -1)), table)


def test_a_break_beside_the_experts_is_none_of_their_loop():
    (site,) = explain(Distant())(torch.randn(8, H)).sites
    assert (site.status, site.reason) == ("missed", "split")
    assert site.detail.endswith("test_breaks.py:93: if weights.isnan().any():"), site.detail


class Untraced(nn.Module):
    """Experts whose products are in a function that Dynamo is kept from."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, H, 24)), nn.Parameter(torch.randn(E, 24, H))

    @torch._dynamo.disable
    def products(self, x, w, counts):
        return torch.cat([rows @ mine for rows, mine in zip(x.split(counts.tolist()), w, strict=True)])

    def forward(self, x, counts):
        return self.products(F.relu(self.products(x, self.up, counts)), self.down, counts)


class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), Untraced()

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        order = ids.flatten().argsort()
        counts = F.one_hot(ids.flatten(), E).sum(0)
        rows = self.experts(x[order // 2], counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, rows)


def test_a_function_that_dynamo_is_kept_from():
    (site,) = explain(Sorted())(torch.randn(8, H)).sites
    assert (site.status, site.reason) == ("missed", "split")
    assert site.detail.endswith(": return self.products(F.relu(self.products(x, self.up, counts)), self.down, counts)")


class Checked(nn.Module):
    """Asks in the middle of a block in which every expert sees every token."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.gate = asks, nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(1)
        table = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        if self.asks and table.isnan().any():
            table = torch.zeros_like(table)
        return (table[:, None] * outputs).sum(-1)


def test_a_choice_and_outputs_that_leave_the_graph_apart():
    assert explain(Checked(False))(torch.randn(8, H)).fused == 1
    (site,) = explain(Checked(True))(torch.randn(8, H)).sites
    assert (site.status, site.reason) == ("missed", "split")
    assert "have come together" in site.detail and "topk(1)" in site.detail


class Breaking(nn.Module):
    """A loop that does break the graph, and keeps more than a sum."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        ids = self.gate(x).argmax(-1)
        rows = [(ids == e).nonzero()[:, 0] for e in range(E)]
        parts = [expert(x[mine]) for expert, mine in zip(self.experts, rows, strict=True)]
        return torch.cat(parts), torch.cat(rows)


def test_a_loop_that_does_break_the_graph_is_named_with_its_line():
    (site,) = explain(Breaking())(torch.randn(8, H)).sites
    assert (site.status, site.reason) == ("missed", "data-dependent")
    assert site.detail.endswith(": rows = [(ids == e).nonzero()[:, 0] for e in range(E)]"), site.detail


class Dispatched(nn.Module):
    """Rows by where a table of weights is not zero, split by counts: the graph breaks before the loop is reached."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Mlp() for _ in range(E))

    def route(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return torch.zeros(len(x), E, requires_grad=True).scatter(1, ids, weights)

    def forward(self, x):
        table = self.route(x)
        expert, token = table.t().nonzero().unbind(1)
        parts = x[token].split((table > 0).sum(0).tolist())
        outputs = [self.experts[e](parts[e]) for e in range(E)]
        return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * table[token, expert, None])


def test_a_break_in_a_function_with_a_loop_need_not_be_one_of_the_loop():
    (site,) = explain(Dispatched())(torch.randn(8, H)).sites
    assert (site.status, site.reason) == ("missed", "split")
    assert site.detail.endswith(": return torch.zeros(len(x), E, requires_grad=True).scatter(1, ids, weights)")


class RouterApart(nn.Module):
    """A router that is compiled for itself, since the loop in the method that calls it breaks the graph."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = Choice(), nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        weights, ids = self.router(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            print(end="")
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)

    def forward(self, x):
        return self.gate(x).softmax(-1).topk(2)


@pytest.mark.parametrize(
    ("make", "reason", "line"),
    [
        (Distant, "split", "if weights.isnan().any():"),
        (Sorted, "split", "return self.products("),
        (Dispatched, "split", "return torch.zeros("),
        (lambda: Checked(True), "split", ""),
        (Breaking, "data-dependent", "rows = [(ids == e)"),
        (RouterApart, "data-dependent", "print(end="),
    ],
)
def test_one_reason_everywhere(make, reason, line, compiled, caplog):  # noqa: F811
    """Where the graph breaks between router and experts, as `explain` says."""
    model, x = make(), torch.randn(8, H)
    (site,) = explain(model)(x).sites
    assert (site.status, site.reason) == ("missed", reason) and line in site.detail
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "mok_compile"):
        compiled(model)(x)
    assert dict(counters["mok"]) == {"found": 1, "fused": 0, "missed": 1, f"missed:{reason}": 1}
    lines = [r.getMessage() for r in caplog.records if r.name == "mok_compile"]
    assert lines == [f"1 MoE block: 0 fused, 1 missed ({reason})"]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a block was left unfused") as error:
        compiled(model, **{"mok.strict": True})(x)
    assert isinstance(error.value.inner_exception, backend.StrictError)
    assert line in " ".join(str(error.value).split())


@pytest.mark.parametrize(
    "file, theirs",
    [
        ("transformers/models/mixtral/modeling_mixtral.py:9", True),
        ("/home/me/.cache/huggingface/modules/transformers_modules/org/model/modeling.py:9", True),
        ("/src/switch_transformers/model.py:9", False),
        ("/src/annotated/transformers/switch.py:9", False),
    ],
)
def test_advice_for_transformers_is_for_its_own_code(file, theirs):
    cure = Site("missed", "no-match", "", f"mlp [Moe] {file}").cure
    assert ("experts_implementation" in cure) == theirs


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, H, 24))

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.up, offs=ends)


def test_a_grouped_matmul_that_torch_cannot_trace():
    """Of float32, in torch 2.13."""
    model, x, ends = Grouped(), torch.randn(2 * E, H), torch.arange(2, 2 * E + 2, 2, dtype=torch.int32)
    try:
        torch.compile(model, backend="eager")(x, ends)
    except torch._dynamo.exc.TorchRuntimeError:
        torch._dynamo.reset()
        (site,) = explain(model)(x, ends).sites
        assert (site.status, site.reason) == ("missed", "dtype") and "torch itself cannot trace" in site.detail, site
        assert "torch.float32" in site.detail and "test_breaks.py:" in site.location
    else:
        pytest.skip("this torch traces it")


def test_other_errors_of_the_model_are_its_own():
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        explain(lambda x: x @ torch.ones(7, 7))(torch.randn(3, 5))
