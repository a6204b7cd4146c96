"""What the sm90 engine's kernel for routers and its Python side must agree on, and which routers it takes."""

import math
import operator
import re
from dataclasses import replace

import pytest
import torch
from routers import CASES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mok_compile import build, engines, moe, ops  # noqa: F401  moe and ops register the ops
from mok_compile.engines import get, sm90, sm90_router
from mok_compile.router import Groups, Step
from mok_compile.spec import ExpertsSpec

CUDA = build.csrc() / "cuda"
HEADER = (CUDA / "sm90" / "arguments.h").read_text(encoding="utf-8")
MIXTRAL = CASES["mixtral"].spec
BF16, FP32 = torch.bfloat16, torch.float32


def enumerators(name: str) -> list[str]:
    body = re.search(rf"enum (?:class )?{name} : int {{(.*?)}}", HEADER, re.DOTALL).group(1)
    return [e.strip() for e in re.sub(r"//[^\n]*", "", body).split(",") if e.strip()]


def number(name: str) -> int:
    return int(re.search(rf"{name} = (\d+)", HEADER).group(1))


def test_the_kernel_counts_steps_and_dtypes_alike():
    assert [op.replace(" ", "_").replace("_", "") for op in sm90_router.OPS] == [
        name.removeprefix("k").lower() for name in enumerators("Op")
    ]
    assert [str(d) for d in sm90_router.DTYPES] == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert enumerators("Dtype")[:3] == ["kBFloat16", "kFloat16", "kFloat32"]


def test_the_most_of_everything():
    assert number("kMaxRouted") == sm90_router.MAX_EXPERTS
    assert number("kMaxChosen") == sm90_router.MAX_TOP_K == sm90_router.MAX_GROUPS
    assert number("kMaxSteps") == sm90_router.MAX_STEPS


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_program_tells_the_dtypes_of_its_results(name, dtype):
    spec = CASES[name].spec
    correction = FP32 if spec.corrected else None
    scale = FP32 if Step("expert_scale") in spec.weights else None
    made = sm90_router.program(spec, dtype, correction, scale)
    assert made.values == spec.scores_dtype(dtype)
    assert made.weights == spec.weights_dtype(made.values, scale)
    header = re.search(r"kHeader = (\d+), kStep = (\d+)", (CUDA / "tensors.h").read_text(encoding="utf-8"))
    start, step = map(int, header.groups())
    assert len(made.numbers) == start + step * (len(spec.scores) + len(spec.weights))
    assert sm90_router.unsupported(dtype, 8, spec) is None
    chosen = sm90_router.program(spec, dtype, correction, weighs=False)
    assert (chosen.values, len(chosen.numbers)) == (made.values, start + step * len(spec.scores))


def test_operands_of_a_dtype_that_the_kernel_does_not_know():
    assert sm90_router.program(CASES["kolibri"].spec, BF16, torch.float64, None) is None
    assert sm90_router.program(CASES["gemma4"].spec, BF16, None, torch.float64) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.float64}, "routers in torch.float64"),
        ({"experts": 2048}, "at most 32 of 1024 experts"),
        ({"router": replace(MIXTRAL, top_k=33)}, "at most 32 of 1024 experts"),
        ({"router": replace(MIXTRAL, groups=Groups(64, 2, 1, 0.0))}, "at most 32 groups"),
        ({"router": replace(MIXTRAL, groups=Groups(4, 2, 3, 0.0))}, "one or two best"),
        ({"router": replace(MIXTRAL, weights=(Step("sqrt"),) * 9)}, "at most 8 steps"),
        ({"router": replace(MIXTRAL, scores=(Step("cast", ("float64",)),))}, "does not compute in torch.float64"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_router_that_is_not_taken(change, why):
    asked = {"x": BF16, "experts": 128, "router": MIXTRAL} | change
    assert why in sm90_router.unsupported(**asked)


def test_without_the_gpu_no_router_is_taken():
    weight = torch.empty(8, 64, dtype=BF16)
    assert get("sm90").router_tokens(MIXTRAL, weight) == 0
    assert "GPUs of compute capability (9, 0)" in get("sm90").supports_router(MIXTRAL, weight)
    assert engines.router("sm90", MIXTRAL, weight).name == engines.PORTABLE


@pytest.fixture
def anywhere(monkeypatch):
    """Every device counts as one that the kernels run on."""
    monkeypatch.setattr(sm90, "_unrouted", lambda device, *asked: sm90_router.unsupported(*asked))


@pytest.mark.parametrize(
    ("dtype", "experts", "top_k", "taken"),
    [
        (BF16, 128, 8, True),
        (torch.float16, 1024, 32, True),
        (FP32, 128, 8, True),
        (torch.float64, 128, 8, False),
        (BF16, 1025, 8, False),
    ],
)
def test_what_is_asked_of_a_fake_weight(anywhere, dtype, experts, top_k, taken):
    router = replace(MIXTRAL, top_k=top_k)
    with FakeTensorMode():
        weight = torch.empty(experts, 60, dtype=dtype)
    assert (get("sm90").supports_router(router, weight) is None) == taken
    assert get("sm90").router_tokens(router, weight) == (math.inf if taken else 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_the_graph_of_a_training_step(anywhere, name, dtype):
    """The choice is one op; the product's and the scores' derivatives stay visible."""
    spec, tokens, experts, hidden, inner = CASES[name].spec, 2048, 8, 64, 32

    def new(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def step(x, gate, bias, correction, scale, up, down):
        how = (spec.to_json(), ExpertsSpec("silu(gate) * up", "concat", str(dtype)[6:]).to_json(), "sm90")
        y, logits, weights, _ = torch.ops.mok.moe(x, x, gate, bias, correction, scale, [up], [down], [], [], *how)
        return torch.autograd.grad(y.sum() + logits.sum() + weights.sum(), (x, gate, up, down))

    with FakeTensorMode() as mode:
        bias = new(experts) if CASES[name].bias else None
        correction = new(experts, dtype=FP32).detach() if spec.corrected else None
        scale = new(experts) if spec.scaled else None
        operands = (new(tokens, hidden), new(experts, hidden), bias, correction, scale)
        with mode:
            banks = new(experts, 2 * inner, hidden), new(experts, hidden, inner)
            graph = make_fx(step)(*operands, *banks).graph
    targets = [node.target for node in graph.nodes]
    (route,) = (node for node in graph.nodes if node.target is torch.ops.mok.route.default)
    assert torch.ops.mok.route_infer.default not in targets and torch.ops.aten.topk.default not in targets
    assert targets.count(torch.ops.aten.scatter.src) + targets.count(torch.ops.aten.scatter.value) == 1
    assert route.args[-1] == "sm90" and targets.count(torch.ops.mok.experts_backward.default) == 1


@pytest.mark.parametrize("tokens", [1, 257, 16384])
def test_the_graph_of_inference(anywhere, tokens):
    """In 16 bits one op is the whole router, whatever the number of tokens."""
    with FakeTensorMode(), torch.no_grad():
        x, gate = (torch.empty(n, 64, dtype=BF16) for n in (tokens, 8))
        up, down = (torch.empty(8, *s, dtype=BF16) for s in ((64, 64), (64, 32)))
        how = (MIXTRAL.to_json(), ExpertsSpec("silu(gate) * up", "concat", "bfloat16").to_json(), "sm90")

        def run(x):
            return torch.ops.mok.moe(x, x, gate, None, None, None, [up], [down], [], [], *how)[0]

        targets = [node.target for node in make_fx(run)(x).graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t is not operator.getitem] == [
        torch.ops.mok.route_infer.default,
        torch.ops.mok.experts.default,
    ]
