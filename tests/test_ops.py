"""The `mok::` ops: schema, fake, autograd, FLOPs, and what they say of arguments that do not fit."""

import gc
import weakref

import pytest
import torch
from naive import Problem
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from mok_compile import engines, ops  # noqa: F401  registers the ops
from mok_compile.engines import portable

SHAPES = [
    {"layout": "concat", "bias": True},
    {"layout": "interleaved", "weight_on": "input"},
    {"layout": "separate", "bias": True, "lists": True},
    {"layout": "single", "activation": "gelu(up)", "lists": True},
    {"tokens": 0},
    {"tokens": 1, "experts": 1, "k": 1},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_opcheck(shape):
    problem = Problem(dtype=torch.float32, **shape)
    args = (*problem.operands, problem.spec.to_json(), "portable")
    opcheck(torch.ops.mok.experts.default, args)
    detached = [[t.detach() for t in a] if isinstance(a, list) else a.detach() for a in problem.operands]
    opcheck(torch.ops.mok.experts_infer.default, (*detached, problem.spec.to_json(), "portable"))
    y, *saved = (t.detach() for t in problem.call())
    bias = bool(problem.up_bias)
    for needs in ([True] * 4 + [bias] * 2, [True, False, True, False, False, bias]):
        opcheck(
            torch.ops.mok.experts_backward.default,
            (torch.ones_like(y), *detached, *saved, problem.spec.to_json(), "portable", needs),
        )


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_gradcheck(shape):
    problem = Problem(tokens=4, hidden=3, inner=2, experts=3, **shape)
    leaves = list(problem.leaves.values())
    assert torch.autograd.gradcheck(lambda *_: problem.op(), leaves)


def test_infer_gives_the_same():
    problem = Problem(bias=True)
    with torch.no_grad():
        assert torch.equal(
            torch.ops.mok.experts_infer(*problem.operands, problem.spec.to_json(), "portable"), problem.op()
        )


def test_an_engines_direct_function_comes_first(monkeypatch):
    problem = Problem(bias=True)
    args = (*problem.operands, problem.spec.to_json(), "portable")
    y, *saved = torch.ops.mok.experts(*args)
    asked = []

    def direct(op, made):
        def function(*arguments):
            asked.append((op, len(arguments)))
            return made

        monkeypatch.setitem(engines.direct, ("portable", op), function)

    def outputs():
        with torch.no_grad():
            made = [*torch.ops.mok.experts(*args), torch.ops.mok.experts_infer(*args)]
            needs = [True] * 6
            backward = torch.ops.mok.experts_backward(torch.ones_like(y), *args[:7], *saved, *args[7:], needs)
        return [*made, *backward]

    expected = outputs()
    for op in ("experts", "experts_infer", "experts_backward"):
        direct(op, [])
    assert all(map(torch.equal, outputs(), expected))  # it refused
    assert asked == [("experts", 9), ("experts_infer", 9), ("experts_backward", 14)]
    counts = {"experts": 4, "experts_infer": 1, "experts_backward": 6}
    for op, count in counts.items():
        direct(op, [torch.full((2,), float(i)) for i in range(count)])
    assert [t[0].item() for t in outputs()] == [float(i) for count in counts.values() for i in range(count)]


class Spy:
    """An engine that writes down what it is asked for."""

    name = "spy"

    def __init__(self):
        self.needs = []

    def __getattr__(self, name):
        return getattr(portable.engine, name)

    def backward(self, *args):
        self.needs.append(args[-1])
        return portable.engine.backward(*args)


@pytest.fixture
def spy(monkeypatch):
    spy = Spy()
    monkeypatch.setattr(engines, "get", lambda name: spy)
    return spy


NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")


@pytest.mark.parametrize(
    "frozen", [("up", "down"), ("up",), ("x",), ("weights", "x"), ("up_bias", "down_bias"), NAMES[1:]]
)
@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
def test_frozen_operands_cost_no_gradient_work(spy, frozen, lists):
    """The engine is told what is needed, and computes no other gradient."""
    problem = Problem(bias=True, lists=lists)
    for name, tensor in problem.leaves.items():
        tensor.requires_grad_(name.split()[0] not in frozen)
    _, grads = problem.gradients(problem.op)
    assert spy.needs == [[name not in frozen for name in NAMES]]
    assert set(grads) == set(problem.leaves)
    _, wanted = problem.gradients(problem.naive)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted[name] is None else wanted[name])


def test_all_frozen():
    problem = Problem()
    for tensor in problem.leaves.values():
        tensor.requires_grad_(False)
    assert not problem.op().requires_grad


def test_one_frozen_expert_of_a_list():
    problem = Problem(lists=True)
    problem.up[2].requires_grad_(False)
    _, grads = problem.gradients(problem.op)
    _, wanted = problem.gradients(problem.naive)
    assert "up 2" not in grads
    assert len(grads) == 2 + 3 + 4
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name])


def test_experts_of_a_list_without_token_get_zeros():
    problem = Problem(lists=True, bias=True)
    problem.ids.fill_(1)
    _, grads = problem.gradients(problem.op)
    for e in (0, 2, 3):
        for name in (f"up {e}", f"down {e}", f"up_bias {e}", f"down_bias {e}"):
            assert torch.equal(grads[name], torch.zeros_like(problem.leaves[name]))


def test_accumulation_and_retained_graph():
    problem = Problem(bias=True)
    y = problem.op()
    y.backward(torch.ones_like(y), retain_graph=True)
    once = {name: t.grad.clone() for name, t in problem.leaves.items()}
    y.backward(torch.ones_like(y))
    problem.op().backward(torch.ones_like(y))
    for name, tensor in problem.leaves.items():
        torch.testing.assert_close(tensor.grad, 3 * once[name])


def test_the_gradient_may_be_a_view_or_of_another_dtype_or_missing():
    problem = Problem(dtype=torch.float32)
    _, wanted = problem.gradients(problem.op, torch.ones(7, 6))
    _, expanded = problem.gradients(problem.op, torch.ones(()).expand(7, 6))
    _, strided = problem.gradients(problem.op, torch.ones(6, 7).t())
    for name, grad in wanted.items():
        assert torch.equal(expanded[name], grad)
        assert torch.equal(strided[name], grad)
    h = problem.call()[1]
    assert not h.requires_grad


def test_second_derivative_is_refused():
    problem = Problem()
    y = problem.op()
    (grad,) = torch.autograd.grad(y.sum(), problem.x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*mok\.enabled"):
        grad.sum().backward()


def test_infer_has_no_backward():
    problem = Problem()
    y = torch.ops.mok.experts_infer(*problem.operands, problem.spec.to_json(), "portable")
    with pytest.raises(RuntimeError, match="saves nothing"):
        y.sum().backward()


def test_vmap_is_refused():
    problem = Problem()
    x = torch.stack([problem.x.detach()] * 2)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
        torch.func.vmap(
            lambda x: torch.ops.mok.experts(x, *problem.operands[1:], problem.spec.to_json(), "portable")[0]
        )(x)


@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
def test_saved_tensors_do_not_depend_on_the_routing(lists):
    def saved(ids):
        problem, shapes = Problem(bias=True, lists=lists), []
        problem.ids = ids

        def pack(t):
            shapes.append((tuple(t.shape), t.dtype))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            problem.op()
        return shapes

    balanced = Problem().ids
    shapes = saved(balanced)
    for ids in (torch.zeros_like(balanced), torch.full_like(balanced, 99), torch.full_like(balanced, -1)):
        assert saved(ids) == shapes
    slots = balanced.numel()
    extra = sorted(s for s in shapes if s[1] == torch.int32 or s[0] == (slots, 10))
    assert ((slots, 10), torch.float64) in extra


def test_functional():
    """Nothing is written, nothing returned shares memory with an argument."""
    problem = Problem(bias=True, k=1)
    before = [t.detach().clone() for t in problem.leaves.values()]
    outputs = problem.call()
    outputs[0].sum().backward()
    for tensor, old in zip(problem.leaves.values(), before, strict=True):
        assert torch.equal(tensor, old)
    memory = {t.untyped_storage().data_ptr() for t in (*problem.leaves.values(), problem.ids)}
    assert not memory & {o.untyped_storage().data_ptr() for o in outputs}


@pytest.mark.parametrize("lists", [False, True], ids=["stacked", "lists"])
@pytest.mark.parametrize(
    ("layout", "activation", "columns"),
    [("concat", "silu(gate) * up", 10), ("separate", "silu(gate) * up", 10), ("single", "relu(up)", 5)],
)
def test_flops(layout, activation, columns, lists):
    problem = Problem(layout, activation, lists=lists)
    forward = 2 * problem.ids.numel() * 6 * (columns + 5)
    with FlopCounterMode(display=False) as counter:
        y = problem.op()
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.ops.mok.experts_infer(*problem.operands, problem.spec.to_json(), "portable")
    assert counter.get_total_flops() == forward


def broken(**changes):
    problem = Problem(dtype=torch.float32, bias=True)
    for name, change in changes.items():
        setattr(problem, name, change(getattr(problem, name)))
    return problem


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": lambda x: x[None]}, ValueError, r"expected x \[T, H\]"),
        ({"ids": lambda i: i[1:]}, ValueError, r"expected x \[T, H\]"),
        ({"ids": lambda i: i.reshape(-1)}, ValueError, r"expected x \[T, H\]"),
        ({"weights": lambda w: w[:, :1]}, ValueError, r"weights \(7, 1\)"),
        ({"ids": lambda i: i.float()}, TypeError, "ids must be integer"),
        ({"ids": lambda i: i > 0}, TypeError, "ids must be integer"),
        ({"weights": lambda w: w.long()}, TypeError, "weights floating"),
        ({"x": lambda x: x.bfloat16()}, TypeError, "one dtype; x is torch.bfloat16"),
        ({"x": lambda x: x.long()}, TypeError, "one dtype"),
        ({"down": lambda d: [d[0].double()]}, TypeError, "one dtype"),
        ({"up_bias": lambda b: [b[0].half()]}, TypeError, "one dtype"),
        ({"down": lambda d: [d[0].to("meta")]}, ValueError, "x is on cpu, others on meta"),
        ({"ids": lambda i: i.to("meta")}, ValueError, "one device"),
        ({"down": lambda d: []}, ValueError, "at least one expert"),
        ({"ids": lambda i: i[:, :0], "weights": lambda w: w[:, :0]}, ValueError, "one slot per token"),
        ({"down": lambda d: [d[0].transpose(1, 2)]}, ValueError, "must be 1 of shape"),
        ({"up": lambda u: [u[0][:, :-1]]}, ValueError, "up must be 1 of shape"),
        ({"up": lambda u: [u[0][:-1]]}, ValueError, "up must be 1 of shape"),
        ({"up": lambda u: u * 2}, ValueError, "up must be 1 of shape"),
        ({"up": lambda u: list(u[0])}, ValueError, "up must be 1 of shape"),
        ({"up_bias": lambda b: [b[0][0]]}, ValueError, "up_bias must be 1 of shape"),
        ({"down_bias": lambda b: [b[0][:, :-1]]}, ValueError, "down_bias must be 1 of shape"),
    ],
)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_arguments_that_do_not_fit(changes, error, message, fake):
    problem = broken(**changes)
    if fake:
        mode = torch._subclasses.FakeTensorMode()
        convert = lambda t: mode.from_tensor(t.detach())  # noqa: E731
        args = torch.utils._pytree.tree_map(convert, problem.operands)
    else:
        mode, args = torch.no_grad(), problem.operands
    with pytest.raises(error, match=message), mode:
        torch.ops.mok.experts(*args, problem.spec.to_json(), "portable")


def test_unknown_engine():
    problem = Problem()
    with pytest.raises(ValueError, match=r"unknown engine 'warp'; engines: .*portable"):
        torch.ops.mok.experts(*problem.operands, problem.spec.to_json(), "warp")


def test_gradients_come_in_the_layout_of_their_weights():
    """A transposed weight gets a transposed gradient: autograd takes it over without a copy."""
    problem = Problem()
    problem.up = [problem.up[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()]
    _, grads = problem.gradients(problem.op)
    assert grads["up 0"].stride() == problem.up[0].stride()
    assert grads["down 0"].is_contiguous()


def test_autocast_does_not_reach_inside():
    problem = Problem(bias=True, dtype=torch.float32)
    wanted, wanted_grads = problem.gradients(problem.op)
    with torch.autocast("cpu", torch.bfloat16):
        found, found_grads = problem.gradients(problem.op)
    assert torch.equal(found, wanted)
    for name, grad in wanted_grads.items():
        assert torch.equal(found_grads[name], grad), name


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_outlives_its_use(backward):
    """Nothing waits for the garbage collector, which does not know how much memory tensors hold."""
    problem = Problem(lists=True, bias=True)
    gc.disable()
    try:
        y, *saved = problem.call()
        seen = [weakref.ref(t) for t in (y, *saved)]
        if backward:
            y.sum().backward()
        del y, saved
        assert not any(ref() is not None for ref in seen)
        grads = [weakref.ref(t.grad) for t in problem.leaves.values() if t.grad is not None]
        assert bool(grads) == backward
        for t in problem.leaves.values():
            t.grad = None
        assert not any(ref() is not None for ref in grads)
    finally:
        gc.enable()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("where", ["x", "weights", "up", "down"])
def test_forward_mode_is_refused(where, trained):
    """Torch itself would lose the tangent without a word."""
    problem = Problem(lists=True)
    for tensor in problem.leaves.values():
        tensor.requires_grad_(trained)
    slot = ("x", "ids", "weights", "up", "down").index(where)
    given = problem.operands[slot]
    one = (given[1] if isinstance(given, list) else given).detach()

    def call(tensor):
        operands = problem.operands
        operands[slot] = [given[0], tensor, *given[2:]] if isinstance(given, list) else tensor
        return torch.ops.mok.experts(*operands, problem.spec.to_json(), "portable")[0]

    with pytest.raises(RuntimeError, match="mok::experts has no forward-mode derivative"):
        torch.func.jvp(call, (one,), (one,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(one, one)
        with pytest.raises(RuntimeError, match="mok::experts has no forward-mode derivative"):
            call(dual)
        assert torch.equal(call(one), problem.op())  # nothing of it has a tangent


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_of_functions_are_refused(transform):
    problem = Problem()

    def call(x):
        return torch.ops.mok.experts(x, *problem.operands[1:], problem.spec.to_json(), "portable")[0].sum()

    with pytest.raises(RuntimeError, match=r"mok::experts has no .*torch\.func"):
        transform(call)(problem.x.detach())
