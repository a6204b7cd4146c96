"""What the sm90 engine's kernel for routers and its Python side must agree on, and which routers it takes."""

import re
from dataclasses import replace

import pytest
import torch
from routers import CASES

from mok_compile import build
from mok_compile.engines import get, sm90_router
from mok_compile.router import Groups, Step

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
    assert sm90_router.unsupported(dtype, 8, 64, spec) is None


def test_operands_of_a_dtype_that_the_kernel_does_not_know():
    assert sm90_router.program(CASES["kolibri"].spec, BF16, torch.float64, None) is None
    assert sm90_router.program(CASES["gemma4"].spec, BF16, None, torch.float64) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": FP32}, "routers in torch.float32"),
        ({"depth": 60}, "a multiple of 8 columns, not 60"),
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
    asked = {"x": BF16, "experts": 128, "depth": 64, "router": MIXTRAL} | change
    assert why in sm90_router.unsupported(**asked)


def test_without_the_gpu_no_router_is_taken():
    assert get("sm90").router_tokens(MIXTRAL, torch.empty(8, 64, dtype=BF16)) == 0
