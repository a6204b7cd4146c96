"""The CPU engine against the float64 oracle, at every instruction set, and what it promises about bits."""

import math
import os
import platform
import sys

import pytest
import torch
from cpu_cases import ACTIVATIONS, ROUTINGS, UNGATED, WEIGHTS, Case, at_level, check, grid, levels, make, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok_compile import build, engines, ops  # noqa: F401  defines mok::experts
from mok_compile.activation import parse
from mok_compile.engines import Problem, cpu
from mok_compile.spec import LAYOUTS, ExpertsSpec

if build.unavailable("cpu"):
    pytest.skip(build.unavailable("cpu"), allow_module_level=True)

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
CASES = grid(full=False)


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("part", range(8))
def test_grid(part):
    for case in CASES[part::8]:
        check(case, at=levels())


@pytest.mark.exhaustive
def test_full_grid():
    for case in grid(full=True):
        check(case, at=levels())


def test_check_notices_a_wrong_answer(monkeypatch):
    case = Case()
    real = engines.get("cpu").backward

    def wrong(*args):
        grads = real(*args)
        grads[-1][-1, 0] *= 1.1  # one row of one expert's gradient
        return grads

    monkeypatch.setattr(type(engines.get("cpu")), "backward", lambda self, *args: wrong(*args))
    with pytest.raises(AssertionError, match="ddown"):
        check(case)


@pytest.mark.parametrize("level", cpu.LEVELS)
def test_levels_can_be_forced(level, monkeypatch):
    monkeypatch.setenv("MOK_CPU_ISA", level)
    assert cpu.level() == (level if level in [*levels()] else cpu.LEVELS[torch.ops.mok_cpu.best_level()])


@pytest.mark.skipif("MOK_CXXFLAGS" in os.environ, reason="flags of one's own may emulate the tile registers")
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="no AMX there")
def test_tile_configuration_is_whole_in_the_library():
    """The processor reads 64 bytes; a compiler that is told of fewer need not write the others. Seen on any machine."""
    config = bytes([1, 0, *14 * [0], *8 * [64, 0], *16 * [0], *8 * [16], *8 * [0]])
    assert len(config) == 64 and config in build.load("cpu").read_bytes()


def test_unknown_level(monkeypatch):
    monkeypatch.setenv("MOK_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match="MOK_CPU_ISA='mmx' is not one of scalar, avx2"):
        cpu.level()


BITS = [
    Case(T=150, H=96, I=80, E=7, K=3, bias=True, routing="skewed"),
    Case(T=150, H=96, I=80, E=7, K=3, bias=True, weight_on="input", layout="interleaved", routing="sentinels"),
    Case(T=700, H=70, I=66, E=2, K=1, dtype=F32),
    Case(T=40, H=1100, I=1061, E=3, K=2, dtype=BF16),
]


@pytest.mark.parametrize("case", BITS, ids=str)
def test_same_bits_for_any_number_of_threads(case):
    inputs = make(case)
    before = torch.get_num_threads()
    try:
        for level in levels():
            with at_level(level):
                results = []
                for threads in (1, 2, 7):
                    torch.set_num_threads(threads)
                    results += [run("cpu", case, inputs), run("cpu", case, inputs)]
            assert all(same_bits(results[0], r) for r in results[1:]), level
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", (BF16, F32, F16), ids=str)
@pytest.mark.parametrize("weights", ("stacked", "transposed"))
def test_a_token_does_not_feel_the_others(dtype, weights):
    case = Case(T=600, H=1100, I=530, E=4, K=2, dtype=dtype, weights=weights)
    inputs = make(case)
    tokens = [slice(0, 1), slice(0, 9), slice(100, 107), slice(595, 600), slice(3, 600, 60), slice(0, 300)]
    for level in levels():
        with at_level(level):
            whole = forward(case, inputs)
            for part in tokens:
                assert torch.equal(forward(case, inputs.tokens(part)), whole[part]), (level, part)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("weights", ("stacked", "transposed"))
@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_nor_do_its_gradients(dtype, weights, weight_on):
    case = Case(T=300, H=600, I=1100, E=4, K=2, dtype=dtype, weights=weights, weight_on=weight_on)
    inputs = make(case)
    needs = [True, True, False, False, False, False]
    for level in levels():
        with at_level(level):
            whole = run("cpu", case, inputs, needs)
            for part in (slice(0, 1), slice(100, 107), slice(3, 300, 6)):
                some = run("cpu", case, inputs.tokens(part), needs)
                assert torch.equal(some["dx"][0], whole["dx"][0][part]), (level, part)
                assert torch.equal(some["dweights"][0], whole["dweights"][0][part]), (level, part)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
def test_more_rows_than_are_packed_at_a_time(dtype):
    check(Case(T=1100, H=400, I=24, E=2, K=1, dtype=dtype, routing="one_expert"), at=levels())


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("H,I", ((640, 480), (700, 450)))  # rows of whole cache lines and others
def test_gradients_larger_than_the_cache(H, I, dtype):
    case = Case(T=7, H=H, I=I, E=12, K=2, dtype=dtype)
    assert 3 * case.E * H * I * dtype.itemsize > 2**24  # `past_cache` in csrc/cpu/ops.cpp
    check(case, at=levels())


def forward(case, inputs, save=False):
    return engines.get("cpu").forward(*inputs.operands(), case.spec, save=save)[0]


def test_inference_has_the_bits_of_training():
    case = Case(T=33, bias=True)
    inputs = make(case)
    assert torch.equal(forward(case, inputs, save=True), forward(case, inputs, save=False))


@pytest.mark.parametrize("case", [*BITS[:2], Case(T=0), Case(routing="none", bias=True)], ids=str)
def test_every_output_is_written(case):
    """With deterministic algorithms on, torch fills new tensors with NaN."""
    inputs = make(case)
    plain = run("cpu", case, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().item()
        assert same_bits(run("cpu", case, inputs), plain)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_idle_experts_have_exact_zeros(layout, weights):
    activation = UNGATED["silu"] if layout == "single" else ACTIVATIONS["swiglu"]
    case = Case(layout=layout, activation=activation, weights=weights, routing="none", bias=True)
    for name, value in run("cpu", case, make(case)).items():
        assert name in ("order", "offsets") or not value.any(), name


def test_only_what_is_needed_is_computed():
    case = Case(bias=True, weight_on="input")
    inputs = make(case)
    everything = run("cpu", case, inputs)
    for wanted in range(1, 64):
        needs = [bool(wanted >> i & 1) for i in range(6)]
        some = run("cpu", case, inputs, needs)
        assert all(torch.equal(some[name], everything[name]) for name in some)
        assert len(some) == 3 + sum(needs)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, torch.int16, torch.uint8))
def test_dtypes_of_ids(dtype):
    case = Case(routing="sentinels")
    inputs = make(case)
    expected = run("cpu", case, inputs)
    inputs.ids = inputs.ids.to(dtype)  # -1 becomes 255: no expert either
    found = run("cpu", case, inputs)
    assert all(torch.equal(found[k], expected[k]) for k in found if k not in ("order",))


def test_huge_ids_are_no_expert():
    case = Case()
    inputs = make(case)
    inputs.ids[:, 1] = -1
    expected = run("cpu", case, inputs)
    inputs.ids[:, 1] = 2**32
    assert same_bits(run("cpu", case, inputs), expected)


@pytest.mark.parametrize("dtype", (BF16, F16))
def test_dtype_of_routing_weights(dtype):
    case = Case(T=33)
    inputs = make(case)
    inputs.weights = inputs.weights.to(dtype)
    check(case, inputs)
    assert run("cpu", case, inputs)["dweights"].dtype == dtype


def test_tensors_without_contiguous_rows():
    case = Case(T=33, bias=True)
    inputs = make(case)
    expected = run("cpu", case, inputs)
    for name in ("x", "dy", "ids", "weights"):
        t = getattr(inputs, name)
        setattr(inputs, name, t.t().contiguous().t())
        assert not getattr(inputs, name).is_contiguous()
    inputs.x = torch.stack([inputs.x, inputs.x], -1)[..., 0]
    assert same_bits(run("cpu", case, inputs), expected)


def test_inputs_are_not_written():
    case = Case(T=33, bias=True)
    inputs, before = make(case), make(case)
    run("cpu", case, inputs)
    for a, b in zip(inputs.operands(), before.operands(), strict=True):
        for s, t in zip(*((v if isinstance(v, list) else [v]) for v in (a, b)), strict=True):
            assert torch.equal(s, t)


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("dtype", (BF16, F32, F16), ids=str)
@pytest.mark.parametrize("where", ("x", "up", "down", "weights", "dy"))
def test_nan_and_infinity_go_where_eager_sends_them(value, dtype, where):
    case = Case(T=40, dtype=dtype, activation=ACTIVATIONS["swiglu"])
    inputs = make(case)
    tensor = getattr(inputs, where)
    tensor = tensor[0] if isinstance(tensor, list) else tensor
    tensor[(1,) * tensor.dim()] = value
    expected = run("portable", case, inputs)
    for level in levels():
        with at_level(level):
            found = run("cpu", case, inputs)
        for name, t in found.items():
            assert torch.equal(t.isfinite(), expected[name].isfinite()), f"{level} {name}"


@pytest.mark.parametrize("name", sorted({*ACTIVATIONS, *UNGATED} - {"odd"}))  # odd is a difference: it cancels
def test_activations_at_large_and_tiny_arguments(name):
    """Relative error in float32, over the whole range of arguments, of values and derivatives."""
    text = (ACTIVATIONS | UNGATED)[name]
    top = 0.6 if name == "geglu_tanh" else 1.9  # beyond, 1 + tanh cancels in the oracle itself
    values = torch.cat([s * torch.logspace(-30, top, 120) for s in (-1, 1)])
    # One-hot products hand the arguments to the activation as they are.
    layout, gated = ("concat", True) if name in ACTIVATIONS else ("single", False)
    H = I = len(values)
    case = Case(T=1, H=H, I=I, E=1, K=1, dtype=F32, layout=layout, activation=text)
    inputs = make(case)
    eye = torch.eye(I)
    inputs.x = values[None]
    inputs.up = [(torch.cat([eye, eye.roll(77, 0)]) if gated else eye)[None]]
    inputs.down = [eye[None]]
    inputs.weights.fill_(1)
    inputs.dy.fill_(1)
    exact = run("portable", case, inputs.map(torch.Tensor.double))
    for level in levels():
        with at_level(level):
            found = run("cpu", case, inputs)
        for what in ("y", "dup"):
            f, x = found[what].double(), exact[what]
            ordinary = (x.abs() > 1e-20) & (x.abs() < 1e37)
            assert ordinary.any() and ((f - x).abs() <= 3e-5 * x.abs())[ordinary].all(), f"{level} {what}"


def test_program():
    operations, limits = cpu._program(parse("clamp(gate, -inf, 7.0) * 2.0 + up"))
    assert [cpu.OPS[i] for i in operations] == ["gate", "clamp", "constant", "mul", "up", "add"]
    assert limits[2:6] == [-math.inf, 7.0, 2.0, 0.0]


def problem(**changes) -> Problem:
    facts = {"hidden": 64, "intermediate": 32, "num_experts": 4, "top_k": 2, "dtype": BF16, "weights_dtype": F32}
    return Problem(**facts | {"device": torch.device("cpu"), "stacked": True} | changes)


def test_supports_says_why_not():
    spec, supports = Case().spec, engines.get("cpu").supports
    assert supports(spec, problem()) is None
    assert "not on meta" in supports(spec, problem(device=torch.device("meta")))
    assert "torch.float64" in supports(spec, problem(dtype=torch.float64))
    assert "float32" in supports(spec, problem(weights_dtype=torch.float64))
    deep = "up"
    for _ in range(cpu.MAX_STACK):
        deep = f"(gate + tanh({deep} * gate))"
    assert "nested" in supports(ExpertsSpec(deep, "concat", "bfloat16"), problem())


def test_through_autograd():
    case = Case(T=33, bias=True, weights="list")
    inputs = make(case)
    leaves = inputs.map(lambda t: t.clone().requires_grad_())
    y = torch.ops.mok.experts(*leaves.operands(), case.spec.to_json(), "cpu")[0]
    y.backward(inputs.dy)
    expected = run("cpu", case, inputs)
    assert torch.equal(y, expected["y"])
    assert torch.equal(leaves.x.grad, expected["dx"][0]) and torch.equal(leaves.up[2].grad, expected["dup"][2])
    assert torch.equal(leaves.weights.grad, expected["dweights"][0])


sizes = st.integers(0, 80)
cases = st.builds(
    Case,
    T=st.integers(0, 70),
    H=sizes,
    I=sizes,
    E=st.integers(1, 9),
    K=st.integers(1, 4),
    dtype=st.sampled_from((BF16, F32, F16)),
    layout=st.sampled_from(LAYOUTS[:3]),
    activation=st.sampled_from([*ACTIVATIONS.values()]),
    weight_on=st.sampled_from(("output", "input")),
    bias=st.booleans(),
    weights=st.sampled_from(WEIGHTS),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(cases)
def test_any_shape_and_routing(case):
    """Against float64, within what the dtype's roundings may add up to, whatever the case."""
    inputs = make(case)
    exact = run("portable", case, inputs.map(torch.Tensor.double))
    plain = run("portable", case, inputs)
    for level in levels():
        with at_level(level):
            found = run("cpu", case, inputs)
        for name, t in found.items():
            x = exact[name].double()
            error, norm = (t.double() - x).norm().item(), x.norm().item()
            theirs = (plain[name].double() - x).norm().item()
            allowed = 8 * torch.finfo(case.dtype).eps * norm + 2 * theirs
            assert error <= allowed, f"{level} {name}: {error:.2e} of {norm:.2e}, plain {theirs:.2e}"
