"""Stock Hugging Face models: every block fused, the losses and gradients of eager."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from harness import Fused, assert_close, relative_error
from hf import FAMILIES, make, step

from mok_compile import ops  # noqa: F401  registers the ops

# transformers asks there where a tensor lies, which no Dynamo before torch 2.11 follows
BFLOAT16 = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.11"), reason="the graph breaks in transformers"
)
ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo" / "zoo.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_training_step(family):
    """fp32, every gradient, mok.verify on; our passes alone."""
    model, ids = make(family)
    wanted, wanted_grads = step(model, ids)
    fused = Fused(model)
    found, found_grads = step(model, ids, fused)
    assert fused.counts() == (2, 0), fused.report
    assert_close(found, wanted, 1e-5, "loss")
    assert found_grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)
    assert len(fused.graphs) == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_inference(family):
    """Two lengths with dynamic shapes: as many graphs as without us, each with its block fused."""
    model, ids = make(family, num_hidden_layers=1)
    model.eval()
    plain, fused = [], Fused(model, dynamic=True)
    compiled = torch.compile(model, backend=lambda gm, inputs: plain.append(gm) or gm.forward, dynamic=True)
    with torch.no_grad():
        wanted = [compiled(input_ids=i).logits for i in (ids, ids[:, :5])]
        torch._dynamo.reset()
        found = [fused(input_ids=i).logits for i in (ids, ids[:, :5])]
    assert len(fused.graphs) == len(plain)
    assert fused.counts() == (len(plain), 0), fused.report
    for a, b in zip(found, wanted, strict=True):
        assert_close(a.flatten(0, 1), b.flatten(0, 1), 1e-5)


LAYOUTS = {"gpt_oss": "interleaved"}


@BFLOAT16
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_error_is_eagers(family):
    """One block on fixed routing against float64: at most 1.1 times the error that eager's own rounding makes."""
    model, _ = make(family, torch.bfloat16)
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    exact = copy.deepcopy(experts).double()
    exact.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(192, 32, generator=generator).bfloat16().requires_grad_()
    weights, ids = torch.rand(192, 6, generator=generator).topk(2, -1)
    dtype = torch.bfloat16 if family in ("qwen3_moe", "olmoe", "gpt_oss") else torch.float32
    weights = weights.to(dtype).requires_grad_()
    seed = torch.randn(192, 32, generator=generator)

    def run(module, call, convert):
        a, w = convert(x.detach()).requires_grad_(), convert(weights.detach()).requires_grad_()
        module.zero_grad(set_to_none=True)
        y = call(a, ids, w)
        y.backward(seed.to(y.dtype))
        return {"y": y.detach(), "x": a.grad, "weights": w.grad, **{n: p.grad for n, p in module.named_parameters()}}

    fused = Fused(experts)
    oracle = run(exact, exact, lambda t: t.double())
    eager = run(experts, experts, lambda t: t.clone())
    mine = run(experts, fused, lambda t: t.clone())
    assert fused.counts() == (1, 0), fused.report
    assert [s.layout for s in fused.specs] == [LAYOUTS.get(family, "concat")]
    for name, reference in oracle.items():
        assert mine[name].dtype == eager[name].dtype
        limit = 1.1 * rms_error(eager[name], reference)
        assert rms_error(mine[name], reference) <= limit, name
        if name != "weights":  # whose rows have two numbers
            worst = relative_error(eager[name].double(), reference)
            assert relative_error(mine[name].double(), reference) <= 1.6 * worst, name


def rms_error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("masked", [False, True])
def test_router_logits_and_auxiliary_loss(family, masked):
    model, ids = make(family, output_router_logits=True, router_aux_loss_coef=0.1)
    more = {}
    if masked:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        more = {"attention_mask": mask}
    wanted, wanted_grads = step(model, ids, **more)
    fused = Fused(model)
    found, found_grads = step(model, ids, fused, **more)
    assert fused.counts() == (2, 0), fused.report
    assert_close(found, wanted, 1e-5)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)


def test_gradient_checkpointing():
    """The blocks sit in the bodies of checkpoints, one graph for each layer."""
    model, ids = make("qwen3_moe")
    wanted, wanted_grads = step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fused = Fused(model)
    found, found_grads = step(model, ids, fused)
    assert fused.counts() == (2, 0), fused.report
    assert_close(found, wanted, 1e-5)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)


def test_hook_on_the_experts_module_is_not_bypassed():
    model, ids = make("qwen3_moe")
    seen = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(lambda module, args, out: seen.append(out.detach().norm()))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        fused = Fused(model)
        found = fused(input_ids=ids).logits
    assert len(seen) == 4
    assert_close(torch.stack(seen[2:]), torch.stack(seen[:2]), 1e-5)
    assert_close(found.flatten(0, 1), wanted.flatten(0, 1), 1e-5)
    assert fused.report.fused + fused.report.missed == 2


@pytest.mark.skipif(not ZOO.exists(), reason="the model zoo is not here")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BFLOAT16)], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "ernie4_5_moe", "qwen2_moe", "hunyuan_v1_moe", "minimax"])
def test_families_of_the_zoo(family, dtype):
    spec = importlib.util.spec_from_file_location("zoo", ZOO)
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    if family not in zoo.families():
        pytest.skip("not in this transformers")
    model, inputs = zoo.make(family, dtype=dtype)
    fused = Fused(model, fullgraph=False)
    with torch.no_grad():
        wanted, found = zoo.first_tensor(model(**inputs)), zoo.first_tensor(fused(**inputs))
    assert fused.counts() == (len(zoo.moe_blocks(model)), 0), fused.report
    if dtype == torch.float32:
        assert_close(found.flatten(0, 1), wanted.flatten(0, 1), 1e-4)
