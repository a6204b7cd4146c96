"""Loops over experts that stay loops: the same reason in the report, the counters, the log and under mok.strict."""

import logging

import pytest
import torch
from loops import E, H, Hit, I, K, Mlp, Plain, Ranged
from test_module_lists import fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from mok_compile import backend, explain


@pytest.fixture
def compiled(monkeypatch):
    """Compiles for the real backend, without Inductor."""
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, gm, inputs: gm.forward)
    return lambda model, **options: torch.compile(model, backend="mok", options=options or None)


def with_hook():
    block = Hit()
    block.experts[2].register_forward_hook(lambda module, args, out: None)
    return block


def of_two_makes():
    return Ranged([Mlp(act=nn.GELU() if e else nn.SiLU()) for e in range(E)])


class First(Ranged):
    """The first rows of each expert."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            t, k = t[:3], k[:3]
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class FirstByNumber(Ranged):
    """The same, asking for numbers below a limit."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            kept = torch.arange(len(t)) < 3
            t, k = t[kept], k[kept]
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class FirstByMask(Ranged):
    """The others weigh nothing."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            kept = torch.arange(len(t)) < 3
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None] * kept[:, None])
        return y


class CountsInABuffer(Ranged):
    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.zeros(E))

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            self.load[e] += len(t)
            if len(t):
                y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        return y


class CountsOnItself(Ranged):
    seen = 0

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if len(t):
                self.seen += len(t)
                y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        return y


class CountsInAList(Ranged):
    def moe(self, x, ids, weights):
        y, sizes = torch.zeros_like(x), []
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            sizes.append(t.numel())
            y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        self.sizes = sizes
        return y


class CountsInAVariable(Ranged):
    def moe(self, x, ids, weights):
        y, total = torch.zeros_like(x), 0
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            total = total + t.numel()
            y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
        return y / total


class Best(Ranged):
    """The best expert alone, which no top-k chooses, and a loop that adds in no known way."""

    def forward(self, x):
        shape = x.shape
        weights, ids = self.gate(x.view(-1, H)).softmax(-1).max(-1)
        return self.moe(x.view(-1, H), ids, weights).view(shape)

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(ids == e)[0]
            y = torch.index_add(y, 0, t, expert(x[t]) * weights[t, None])
        return y


class InTwoLists(nn.Module):
    """No name speaks of experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.small, self.large = nn.ModuleList(Plain() for _ in range(2)), nn.ModuleList(Mlp() for _ in range(E - 2))

    def forward(self, x):
        shape, x = x.shape, x.view(-1, H)
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            mlp = self.small[e] if e < 2 else self.large[e - 2]
            t, k = torch.where(ids == e)
            if len(t):
                y[t] += mlp(x[t]) * weights[t, k, None]
        return y.view(shape)


class WithACapacity(Ranged):
    """As Switch Transformers route, top-1 with places in buffers; what is in the way is the dropout."""

    def __init__(self):
        super().__init__([Plain(0.5) for _ in range(E)], top_k=1)

    def forward(self, x):
        shape, x = x.shape, x.view(-1, H)
        scores = self.gate(x).softmax(-1)
        mask = F.one_hot(scores.argmax(-1), E)
        mask = mask * (mask.cumsum(0) <= 2)
        return self.moe(x, mask, scores.max(-1).values).view(shape)

    def moe(self, x, mask, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(mask[:, e])[0]
            if len(t) > 0:
                y.index_add_(0, t, expert(x[t]) * weights[t, None])
        return y


class EachToken(Ranged):
    def moe(self, x, ids, weights):
        rows = []
        for t in range(len(x)):
            rows.append(sum(weights[t, k] * self.experts[ids[t, k]](x[t]) for k in range(K)))
        return torch.stack(rows)


class Merged(Mlp):
    """An adapter that is added to the weight wherever that is used."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, H)), nn.Parameter(torch.randn(I, 2))

    def forward(self, x):
        up = F.linear(x, self.up_proj.weight + self.b @ self.a)
        return self.down_proj(F.silu(self.gate_proj(x)) * up)


LOOPS = {
    "a hook": (with_hook, "hooks", "hook"),
    "two makes": (of_two_makes, "layout", "experts 0 and 1 are not alike"),
    "dropout": (lambda: Ranged([Plain(0.5) for _ in range(E)]), "dropout", "dropout"),
    "the first rows": (First, "routing", "t, k = t[:3], k[:3]"),
    "the first rows by number": (FirstByNumber, "routing", "takes the first so many"),
    "the first rows by mask": (FirstByMask, "routing", "kept = torch.arange(len(t)) < 3"),
    "a norm first": (lambda: Ranged([nn.Sequential(nn.LayerNorm(H), Mlp()) for _ in range(E)]), "no-match", "_norm of"),
    "a norm inside": (lambda: Ranged([Mlp(act=nn.LayerNorm(I)) for _ in range(E)]), "no-match", "native_layer_norm"),
    "weights that are computed": (
        lambda: Ranged([Merged() for _ in range(E)]),
        "no-match",
        "up = F.linear(x, self.up_proj.weight + self.b @ self.a)",
    ),
    "counts in a buffer": (CountsInABuffer, "mutation", "writes self.load"),
    "counts on itself": (CountsOnItself, "mutation", "writes self.seen"),
    "counts in a list": (CountsInAList, "interior-use", "sizes, y"),
    "counts in a variable": (CountsInAVariable, "interior-use", "total"),
    "top-1 by max": (Best, "data-dependent", "nothing is known to be added up"),
    "a capacity": (WithACapacity, "data-dependent", "in an unusual way"),
    "two lists": (InTwoLists, "data-dependent", "the loop"),
    "token by token": (EachToken, "interior-use", "the loop hands on"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_one_reason_everywhere(name, compiled, caplog):
    make, reason, detail = LOOPS[name]
    model = make()
    (site,) = explain(model)(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", reason) and detail in site.detail, site
    assert site.location.startswith(f"(no module) [{type(model).__name__}] ") and ".py:" in site.location
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "mok_compile"):
        compiled(model)(tokens(2, 9))
    assert dict(counters["mok"]) == {"found": 1, "fused": 0, "missed": 1, f"missed:{reason}": 1}
    lines = [r.getMessage() for r in caplog.records if r.name == "mok_compile"]
    assert lines == [f"1 MoE block: 0 fused, 1 missed ({reason})"]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a block was left unfused") as error:
        compiled(model, **{"mok.strict": True})(tokens(2, 9))
    assert isinstance(error.value.inner_exception, backend.StrictError)
    told = " ".join(str(error.value).split())
    assert detail in told and f"MISSED {type(model).__name__} " in told


class Layers(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_class_that_is_made_after_a_compile(compiled):
    """As in a notebook: its method is the frame that is compiled."""
    compiled(Hit())(tokens(2, 9))

    class Later(Hit):
        def forward(self, x):
            weights, ids = torch.topk(self.gate(x).softmax(-1), K)
            y = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                if len(t):
                    y.index_add_(0, t, expert(x[t]) * weights[t, k, None])
            return y

    counters.clear()
    model, x = Later(), tokens(9)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert dict(counters["mok"]) == {"found": 1, "fused": 1, "missed": 0}


@pytest.mark.parametrize("name", ["a hook", "two makes", "counts on itself", "two lists"])
def test_layers_whose_code_is_compiled_once(name):
    """Each has the reason, whether its loop was traced or not."""
    make, reason, detail = LOOPS[name]
    sites = explain(Layers(make() for _ in range(3)))(tokens(2, 9)).sites
    assert [site.location.partition(" ")[0] for site in sites] == ["layers.0", "layers.1", "layers.2"]
    assert all((site.status, site.reason) == ("missed", reason) and detail in site.detail for site in sites), sites


def test_each_layer_has_its_own_reason():
    sites = explain(Layers([of_two_makes(), Ranged([Plain(0.5) for _ in range(E)]), Ranged()]))(tokens(2, 9)).sites
    assert [site.reason for site in sites] in (["layout", "dropout", None], ["layout", "dropout", "data-dependent"])
    if sites[2].reason:
        assert "compiled for another module" in sites[2].detail


def test_a_function_that_is_explained():
    block = of_two_makes()
    (site,) = explain(lambda x: block(x) * 2)(tokens(2, 9)).sites
    assert site.reason == "layout"


def test_a_loop_that_ends_up_in_the_graph(compiled):
    """A break before the loop is none in it."""

    class Says(Ranged):
        def moe(self, x, ids, weights):
            y = torch.zeros_like(x)
            torch._dynamo.graph_break()
            for e in range(self.num_experts):
                y = y + self.experts[e](x) * (weights * (ids == e)).sum(-1, keepdim=True)
            return y

    model, x = Says(), tokens(2, 9)
    assert torch.allclose(compiled(model)(x), model(x), atol=1e-6)
    assert "missed:mutation" not in counters["mok"] and counters["mok"]["missed"] <= 1


class Types(nn.Module):
    """A layer for each type of token, which no choice makes: nothing is said of it, though the graph breaks there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, x, types):
        y = torch.zeros_like(x)
        for e, layer in enumerate(self.layers):
            rows = torch.where(types == e)[0]
            if len(rows) > 0:
                self.last = e
                y = y.index_copy(0, rows, layer(x[rows]))
        return y


class Decoder(nn.Module):
    """A loop over layers that speaks of routing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, x, output_router_logits=False):
        for number, layer in enumerate(self.layers):
            if number == 2:
                torch._dynamo.graph_break()
            x = F.relu(layer(x))
        return x


@pytest.mark.parametrize("make", [Types, Decoder])
def test_other_loops_are_none(make, compiled):
    model, x = make(), tokens(9)
    more = (torch.arange(9) % E,) if make is Types else ()
    assert torch.allclose(compiled(model, **{"mok.strict": True})(x, *more), model(x, *more))
    assert not counters["mok"]["found"] and not explain(model)(x, *more).sites


def add_up(x, ids, weights, experts):
    """A loop in a function, which no door leads to."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        t = torch.where(ids == e)[0]
        y = y.index_add(0, t, expert(x[t]) * weights[t, None])
    return y


class InAFunction(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.gate, self.choose = nn.Linear(H, E, bias=False), choose
        self.experts = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        ids = self.choose(scores)
        return add_up(x, ids, scores.gather(1, ids[:, None])[:, 0], self.experts)


@pytest.mark.parametrize(
    "choose",
    [lambda s: s.argmax(-1), lambda s: s.max(-1).indices, lambda s: s.topk(1).indices[:, 0]],
    ids=["argmax", "max", "topk"],
)
def test_a_loop_in_a_function_is_told_with_its_router(choose, compiled):
    model = InAFunction(choose)
    (site,) = explain(model)(tokens(9)).sites
    assert (site.status, site.reason) == ("missed", "data-dependent")
    torch._dynamo.reset()
    compiled(model)(tokens(9))
    assert dict(counters["mok"]) == {"found": 1, "fused": 0, "missed": 1, "missed:data-dependent": 1}


class GatedMixtureForTokens(nn.Module):
    """Speaks of gates and experts, but what chooses is the head."""

    def __init__(self, choose):
        super().__init__()
        self.gate_proj, self.expert = nn.Linear(H, H), Mlp()
        self.head, self.choose = nn.Linear(H, 50), choose

    def forward(self, x):
        return self.choose(self.head(self.expert(x) * self.gate_proj(x).sigmoid()))


@pytest.mark.parametrize("choose", [lambda s: s.argmax(-1), lambda s: s.max(-1), lambda s: s.topk(3)])
def test_a_choice_of_the_next_token_is_no_router(choose, compiled):
    compiled(GatedMixtureForTokens(choose), **{"mok.strict": True})(tokens(9))
    assert not counters["mok"]["found"]


def test_blocks_in_one_of_torchs_own_modules(compiled):
    """Dynamo looks at no frame of Sequential, so that its blocks are known by their own frames alone."""
    model, x = nn.Sequential(Ranged(), Ranged()), tokens()
    report = explain(model)(x)
    assert (report.fused, report.missed) == (2, 0), report
    assert [site.location.split()[0] for site in report.sites] == ["0", "1"]
    torch._dynamo.reset()
    compiled(model)(x)
    assert (counters["mok"]["fused"], counters["mok"]["missed"]) == (2, 0)


@pytest.mark.parametrize("norm", [nn.Softmax(-1), nn.LayerNorm(H)], ids=["softmax", "layer norm"])
def test_a_norm_at_the_end_of_each_expert_is_told(norm):
    block = Ranged([nn.Sequential(nn.Linear(H, 24), nn.ReLU(), nn.Linear(24, H), norm) for _ in range(E)])
    (site,) = explain(block)(tokens(9)).sites
    assert (site.status, site.reason) == ("missed", "post-norm"), site
