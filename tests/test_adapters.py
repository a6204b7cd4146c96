"""LoRA on experts: one block with one reason, whatever has one; what peft makes of stacked weights is fused."""

import pytest
import torch
from loops import E, H, Hit, I
from test_module_lists import adapted, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F

from mok_compile import explain

peft = pytest.importorskip("peft")


def config(*modules, parameters=None, dropout=0.0, **more):
    return peft.LoraConfig(
        target_modules=list(modules),
        target_parameters=parameters,
        r=2,
        lora_dropout=dropout,
        init_lora_weights=False,
        **more,
    )


@pytest.mark.parametrize(
    "modules", [("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj", "down_proj")], ids="-".join
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_reason_for_adapters_in_a_loop(modules, dropout):
    model = peft.get_peft_model(Hit(), config(*modules, dropout=dropout)).train()
    (site,) = explain(model)(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "activation") and "an adapter" in site.detail, site
    assert "lora_B(lora_A(dropout(x)))" in site.detail and "merge" in site.cure
    assert site.location.startswith("base_model.model [Hit] ")


def test_the_cure_works():
    model = peft.get_peft_model(Hit(), config("gate_proj", "down_proj"))
    merged = model.merge_and_unload()
    assert explain(merged)(tokens(2, 9)).fused == 1


def test_an_adapter_of_ones_own():
    (site,) = explain(adapted())(tokens(2, 9)).sites
    assert (site.status, site.reason) == ("missed", "activation") and "an adapter" in site.detail, site


class Grouped(nn.Module):
    """Adapters beside stacked weights."""

    def __init__(self, up, down):
        super().__init__()
        weight = lambda *size: nn.Parameter(torch.randn(*size, dtype=torch.bfloat16) * 0.1)  # noqa: E731
        self.up, self.down = weight(4, 16, 32), weight(4, 16, 16)
        self.adapters = nn.ParameterDict()
        if up:
            self.adapters |= {"up_a": weight(4, 16, 8), "up_b": weight(4, 8, 32)}
        if down:
            self.adapters |= {"down_a": weight(4, 16, 8), "down_b": weight(4, 8, 16)}

    def project(self, name, rows, ends):
        out = torch._grouped_mm(rows, getattr(self, name), offs=ends)
        if f"{name}_a" not in self.adapters:
            return out
        low = torch._grouped_mm(rows, self.adapters[f"{name}_a"], offs=ends)
        return out + 2.0 * torch._grouped_mm(low, self.adapters[f"{name}_b"], offs=ends)

    def forward(self, x, ids, weights):
        sorted_ids, order = torch.sort(ids.reshape(-1))
        ends = torch.histc(sorted_ids.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        gate, up = self.project("up", x[order // ids.shape[1]], ends).chunk(2, -1)
        rows = self.project("down", F.silu(gate) * up, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], rows)


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        weight = lambda *size: nn.Parameter(torch.randn(*size) * 0.1)  # noqa: E731
        self.up, self.down, self.a, self.b = weight(4, 16, 8), weight(4, 8, 16), weight(4, 16, 2), weight(4, 2, 8)

    def forward(self, x, ids, weights):
        product = lambda rows, weight: torch.einsum("tki,tkio->tko", rows, weight[ids])  # noqa: E731
        rows = x[:, None].expand(-1, ids.shape[1], -1)
        hidden = product(rows, self.up) + product(product(rows, self.a), self.b)
        return (product(F.silu(hidden), self.down) * weights[..., None]).sum(1)


@pytest.mark.parametrize(
    "make",
    [lambda: Grouped(True, False), lambda: Grouped(False, True), lambda: Grouped(True, True), Gathered],
    ids=["up", "down", "both", "gathered"],
)
def test_one_reason_beside_stacked_weights(make):
    model = make()
    x, ids, weights = torch.randn(8, 16), torch.rand(8, 4).topk(2).indices, torch.rand(8, 2)
    dtype = model.up.dtype
    (site,) = explain(model)(x.to(dtype), ids, weights.to(dtype)).sites
    assert (site.status, site.reason) == ("missed", "activation") and "an adapter" in site.detail, site


class Deep(nn.Module):
    """An MLP beside a projection is none."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.down_proj = nn.Linear(H, I), nn.Linear(I, H)
        self.a, self.b = nn.Linear(H, 2), nn.Linear(2, I)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x) + self.b(torch.tanh(self.a(x)))))


def test_what_is_no_adapter():
    (site,) = explain(Hit([Deep() for _ in range(E)]))(tokens(2, 9)).sites
    assert site.status == "missed" and "an adapter" not in site.detail, site


@pytest.fixture
def qwen():
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 1}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts, pad_token_id=0))
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, config("q_proj", parameters=parameters))


def test_adapters_of_stacked_parameters_are_fused(qwen, monkeypatch):
    ids = torch.randint(0, 32, (2, 8))
    report = explain(qwen)(input_ids=ids)
    assert [(site.status, site.location.partition(" ")[0]) for site in report.sites] == [
        ("fused", f"base_model.model.model.layers.{i}.mlp.experts.base_layer.base_layer") for i in range(2)
    ], report
    torch._dynamo.reset()
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, gm, inputs: gm.forward)
    loss, gradients = trained(qwen, qwen, ids)
    fused_loss, fused = trained(torch.compile(qwen, backend="mok"), qwen, ids)
    torch.testing.assert_close(fused_loss, loss)
    assert any("experts" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert torch._dynamo.utils.counters["mok"]["fused"] >= 1


def trained(call, model, ids):
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


class OnAllTokens(nn.Module):
    """Every expert sees every token; some have an adapter."""

    def __init__(self, adapted, stacked):
        super().__init__()
        self.gate, self.experts, self.stacked = nn.Linear(H, E, bias=False), Hit().experts, stacked
        for e in adapted:
            self.experts[e].up_proj = LowRank(self.experts[e].up_proj)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        table = torch.zeros(len(x), E).scatter(1, ids, weights.float())
        if self.stacked:
            return (torch.stack([expert(x) for expert in self.experts], 1) * table[..., None]).sum(1)
        return sum(expert(x) * table[:, e, None] for e, expert in enumerate(self.experts))


class LowRank(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.a = linear, nn.Parameter(torch.randn(2, linear.in_features))
        self.b = nn.Parameter(torch.randn(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("adapted", [(0,), (1, 2), tuple(range(E))])
def test_some_of_the_experts_alone(adapted, stacked):
    sites = explain(OnAllTokens(adapted, stacked))(torch.randn(9, H)).sites
    (site,) = (site for site in sites if site.status == "missed")
    assert site.reason == "activation" and "an adapter" in site.detail and "F.linear(x, self.a)" in site.detail, site
