"""The reference against a loop over tokens and experts in float64, on everything a spec can say."""

import itertools

import pytest
import torch
from harness import assert_close, relative_error
from naive import Problem

from mok_compile import ops  # noqa: F401  registers the ops
from mok_compile.spec import ExpertsSpec

GATED = ("silu(gate) * up", "clamp(gate, -inf, 0.9) * sigmoid(clamp(gate, -inf, 0.9) * 1.702) * (up + 1.0)")
UNGATED = ("square(relu(up))", "gelu(up)")
CASES = [
    *itertools.product(("concat", "interleaved", "separate"), GATED, ("output", "input"), (False, True)),
    *itertools.product(("single",), UNGATED, ("output", "input"), (False, True)),
    ("concat", "gate * silu(up)", "output", True),
    ("concat", "silu(gate)", "output", True),
    ("interleaved", "up", "output", False),
]


def check(problem, tolerance=1e-12):
    wanted, wanted_grads = problem.gradients(problem.naive)
    found, found_grads = problem.gradients(problem.op)
    assert_close(found, wanted, tolerance, "y")
    for name, grad in wanted_grads.items():
        reference = torch.zeros_like(problem.leaves[name]) if grad is None else grad
        assert_close(found_grads[name], reference, tolerance, name)


@pytest.mark.parametrize(("layout", "activation", "weight_on", "bias"), CASES)
@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
def test_against_a_loop_over_tokens(layout, activation, weight_on, bias, lists):
    check(Problem(layout, activation, weight_on, bias, lists))


@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (3, 3), (4, 1), (16, 2)])
def test_sizes_at_the_edges(tokens, experts, k, lists):
    check(Problem(bias=True, tokens=tokens, experts=experts, k=k, lists=lists))


def test_no_tokens():
    for lists in (False, True):
        problem = Problem(bias=True, tokens=0, lists=lists)
        y, grads = problem.gradients(problem.op)
        assert y.shape == (0, 6)
        for name, tensor in problem.leaves.items():
            assert grads[name].shape == tensor.shape
            assert not grads[name].any()


@pytest.mark.parametrize("expert", [0, 2, 3])
def test_all_tokens_on_one_expert(expert):
    problem = Problem(bias=True, k=1)
    problem.ids.fill_(expert)
    check(problem)
    _, grads = problem.gradients(problem.op)
    idle = [e for e in range(4) if e != expert]
    for name in ("up 0", "down 0", "up_bias 0", "down_bias 0"):
        assert grads[name][expert].any()
        assert torch.equal(grads[name][idle], torch.zeros_like(grads[name][idle])), name


def test_idle_experts_first_middle_last_and_in_a_row():
    problem = Problem(tokens=9, experts=9)
    problem.ids = torch.tensor([[1, 5], [5, 6], [6, 1]]).repeat(3, 1)
    check(problem)
    _, grads = problem.gradients(problem.op)
    for name in ("up 0", "down 0"):
        busy = grads[name].flatten(1).any(1)
        assert busy.nonzero().flatten().tolist() == [1, 5, 6]


def test_one_expert_twice_for_a_token():
    problem = Problem(bias=True)
    problem.ids[:, 1] = problem.ids[:, 0]
    check(problem)


@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_ids_outside_the_range_have_no_route(weight_on, lists):
    problem = Problem(bias=True, weight_on=weight_on, lists=lists)
    problem.ids[0, 0], problem.ids[2, 1], problem.ids[3] = 4, -1, torch.tensor([17, -(2**40)])
    check(problem)
    y, grads = problem.gradients(problem.op)
    assert not y[3].any()
    assert not grads["x 0"][3].any()
    outside = (problem.ids < 0) | (problem.ids >= 4)
    assert not grads["weights 0"][outside].any()
    assert grads["weights 0"][~outside].all()


def test_nothing_routed_at_all():
    problem = Problem(bias=True)
    problem.ids.fill_(4)
    y, grads = problem.gradients(problem.op)
    assert not y.any()
    assert not any(g.any() for g in grads.values())


def test_nan_where_no_route_leads():
    """A token without any expert may hold anything, and so may routing weights of slots without route."""
    problem = Problem(bias=True)
    problem.ids[2] = 4
    problem.ids[4, 1] = -1
    clean, clean_grads = problem.gradients(problem.op)
    with torch.no_grad():
        problem.x[2] = float("nan")
        problem.weights[2] = float("inf")
        problem.weights[4, 1] = float("nan")
    y, grads = problem.gradients(problem.op)
    assert torch.equal(y, clean)
    for name, grad in grads.items():
        assert torch.equal(grad, clean_grads[name]), name


def test_nan_stays_in_its_token():
    problem = Problem(bias=True)
    clean = problem.op().detach()
    with torch.no_grad():
        problem.x[3] = float("nan")
    y = problem.op().detach()
    assert y[3].isnan().all()
    others = [t for t in range(7) if t != 3]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_dtypes_of_ids(dtype):
    problem = Problem()
    wanted = problem.op().detach()
    problem.ids = problem.ids.to(dtype)
    assert torch.equal(problem.op().detach(), wanted)


def test_strides():
    """Non-contiguous x, ids, weights and expert weights; a weight view that does not start where its memory does."""
    problem = Problem(bias=True)
    wanted, wanted_grads = problem.gradients(problem.op)
    problem.x = problem.x.detach().t().contiguous().t().requires_grad_()
    problem.ids = problem.ids.t().contiguous().t()
    problem.weights = problem.weights.detach().repeat(1, 2)[:, ::2].copy_(problem.weights.detach()).requires_grad_()
    problem.up = [w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in problem.up]
    moved = torch.empty(problem.down[0].numel() + 1, dtype=torch.float64)[1:].view(problem.down[0].shape)
    problem.down = [moved.copy_(problem.down[0].detach()).requires_grad_()]
    found, found_grads = problem.gradients(problem.op)
    assert_close(found, wanted, 1e-12)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 1e-12, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision(dtype):
    """Close to the float64 loop on the same numbers, also when activations are as small as 1e-5."""
    eps = torch.finfo(dtype).eps
    for scale in (1.0, 3e-3):
        problem = Problem(bias=False, dtype=dtype, tokens=20, hidden=16, inner=12)
        with torch.no_grad():
            problem.x.mul_(scale)
        wanted, wanted_grads = problem.gradients(problem.naive)
        found, found_grads = problem.gradients(problem.op)
        assert found.dtype == dtype
        assert relative_error(found, wanted) < 4 * eps
        for name, grad in wanted_grads.items():
            assert found_grads[name].dtype == dtype
            assert relative_error(found_grads[name].double(), grad.double()) < 32 * eps, name


def test_same_bits_every_time():
    problem = Problem(bias=True, dtype=torch.bfloat16, tokens=32, hidden=16, inner=12)
    y, grads = problem.gradients(problem.op)
    for _ in range(4):
        again, again_grads = problem.gradients(problem.op)
        assert torch.equal(again, y)
        assert all(torch.equal(again_grads[n], g) for n, g in grads.items())


def test_spec_says_what_it_is():
    spec = ExpertsSpec("silu(gate) * up", "concat", "bfloat16")
    assert ExpertsSpec.from_json(spec.to_json()) == spec
    assert spec.dtype == torch.bfloat16
    assert spec.gated
    assert str(spec) == "silu(gate) * up (concat) -> bfloat16"
    on_input = ExpertsSpec("square(relu(up))", "single", "float32", "input")
    assert ExpertsSpec.from_json(on_input.to_json()) == on_input
    assert ExpertsSpec.from_json(on_input.to_json().replace("'", '"')) == on_input  # plain JSON
    assert not on_input.gated
    assert len({spec, ExpertsSpec("silu(gate) * up", "concat", "bfloat16"), on_input}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("silu(gate) * up", "stacked", "float32"), "layout 'stacked' is not one of concat"),
        (("silu(gate) * up", "concat", "float33"), "out_dtype 'float33'"),
        (("silu(gate) * up", "concat", "float32", "both"), "weight_on 'both'"),
        (("swoosh(gate)", "concat", "float32"), "unknown activation function 'swoosh'"),
    ],
)
def test_specs_that_mean_nothing(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertsSpec(*fields)
