"""The two doors into Hugging Face's experts registry, and loops that stay outside of any graph."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

moe = pytest.importorskip("transformers.integrations.moe")

import hf  # noqa: E402

from mok_compile import explain, integrations  # noqa: E402
from mok_compile.integrations import transformers as doors  # noqa: E402

REGISTRY = moe.ALL_EXPERTS_FUNCTIONS


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    REGISTRY._global_mapping.pop("mok", None)


def tiny(family, **more):
    implementation = more.pop("experts_implementation", None)
    model, ids = hf.make(family, **more)
    if implementation:
        model.set_experts_implementation(implementation)
    return model, {"input_ids": ids}


def loss(model, inputs):
    return model(**inputs).logits.float().square().mean()


def close(a, b):
    return (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_that_loop_in_eager_are_fused(family):
    model, inputs = tiny(family, experts_implementation="eager")
    report = explain(model)(**inputs)
    assert (report.fused, report.missed) == (model.config.num_hidden_layers, 0)


def test_the_loop_stays_in_eager_and_under_other_backends():
    model, inputs = tiny("mixtral", experts_implementation="eager")
    integrations.watch()
    assert "eager" in REGISTRY
    with_door = model(**inputs).logits
    door = REGISTRY._global_mapping.pop("eager")
    try:
        assert torch.equal(with_door, model(**inputs).logits)
    finally:
        REGISTRY.register("eager", door)
    names = []

    def stock(gm, inputs):
        names.extend(getattr(node.target, "__name__", str(node.target)) for node in gm.graph.nodes)
        return gm.forward

    assert torch.equal(torch.compile(model, backend=stock)(**inputs).logits, with_door)
    assert names and not any("grouped_mm" in name for name in names)


def test_switched_off_the_loop_stays_a_loop():
    model, inputs = tiny("mixtral", experts_implementation="eager")
    report = explain(model, {"mok.enabled": False})(**inputs)
    assert report.fused == 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_the_op_as_an_implementation(family):
    """Value and gradients in eager mode and under another backend; the model can still be copied."""
    plain, inputs = tiny(family)
    model = copy.deepcopy(plain)
    doors.register()
    model.set_experts_implementation("mok")
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        expected, found = loss(plain, inputs), loss(run, inputs)
        assert close(found, expected)
        expected.backward()
        found.backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or close(q.grad, p.grad)
        plain.zero_grad()
    assert set(copy.deepcopy(model).state_dict()) == set(plain.state_dict())


def test_the_op_as_an_implementation_is_counted():
    model, inputs = tiny("mixtral")
    doors.register()
    model.set_experts_implementation("mok")
    report = explain(model)(**inputs)
    assert [site.detail for site in report.sites] == ["the model calls the op itself"] * model.config.num_hidden_layers


def test_a_gate_that_is_no_function_of_the_halves_takes_the_grouped_form(caplog):
    model, inputs = tiny("mixtral")
    expected = model(**inputs).logits
    doors.register()
    model.set_experts_implementation("mok")
    experts = next(m for m in model.modules() if hasattr(m, "_apply_gate"))
    gate = type(experts)._apply_gate
    experts._apply_gate = lambda h: gate(experts, h).cumsum(-1).diff(dim=-1, prepend=torch.zeros(h.shape[0], 1))
    with caplog.at_level("WARNING", "mok_compile"):
        found = model(**inputs).logits
    assert close(found, expected) and "cannot express" in caplog.text


def test_a_loop_of_someone_else_is_named():
    class Router(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1).topk(2, -1)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router(8, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            weights, ids = self.router(x)
            y = torch.zeros_like(x)
            for e in ids.unique().tolist():
                tokens, slots = torch.where(ids == e)
                y.index_add_(0, tokens, self.experts[e](x[tokens]) * weights[tokens, slots, None])
            return y

    from mok_compile.backend import transform
    from mok_compile.options import split

    def light(gm, inputs):
        transform(gm, inputs, split(None)[0])
        return gm.forward

    block, x = Block(), torch.randn(6, 8)
    assert torch.equal(torch.compile(block, backend=light)(x), block(x))
    assert counters["mok"]["missed:data-dependent"] == 1


@pytest.mark.parametrize("loop", [True, False])
def test_experts_of_a_model_that_is_the_block_itself(loop):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(8, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            weights, ids = self.gate(x).softmax(-1).topk(2, -1)
            y = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                if loop:
                    tokens, slots = torch.where(ids == e)
                    y.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, slots, None])
                else:
                    y = y + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
            return y

    report = explain(Block())(torch.randn(6, 8))
    (site,) = report.sites
    assert (site.status, site.reason) == ("missed", "data-dependent" if loop else "no-match")
    assert site.location.startswith("(no module) [Block] ")
    assert [note.startswith("graph break: ") for note in report.notes] == [True] * loop


@pytest.mark.parametrize("implementation", ["grouped_mm", "mok"])
def test_a_checkpointed_layer_whose_graph_breaks_is_named(implementation):
    """torch runs such a layer in eager mode, as a whole. Only experts that call the op themselves are fused there."""
    doors.register()
    model, inputs = tiny("mixtral", experts_implementation=implementation)
    wanted = gradients_of(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.self_attn.forward = breaking(layer.self_attn.forward)
    report = explain(model)(**inputs)
    blocks = len(model.model.layers)
    if implementation == "mok":
        assert (report.fused, report.missed) == (blocks, 0), report
        assert {site.op for site in report.sites} == {"experts"} and all(site.spec for site in report.sites)
    else:
        assert [site.reason for site in report.sites] == ["split"] * blocks, report
        assert "checkpointed" in report.sites[0].detail
        assert any("graph_break()" in note for note in report.notes), report.notes
    found = gradients_of(model, inputs)
    assert all(close(found[name], grad) for name, grad in wanted.items())


def breaking(forward):
    def broken(*args, **kwargs):
        torch._dynamo.graph_break()
        return forward(*args, **kwargs)

    return broken


def gradients_of(model, inputs):
    model.zero_grad()
    loss(model, inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
