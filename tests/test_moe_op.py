"""`mok::moe` and `mok::route`: ids to the bit, gradients, schema, FLOPs, arguments that do not fit."""

import math
from dataclasses import replace

import pytest
import torch
from naive import Problem
from routers import CASES, EXPERTS
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from mok_compile import engines, ops, routing  # noqa: F401  registers the ops
from mok_compile.engines import portable
from mok_compile.router import Groups, RouterSpec, Step

HIDDEN = 6


class Router(Problem):
    """Random arguments of `mok::moe`."""

    def __init__(self, name, tokens=7, dtype=torch.float64, **shape):
        super().__init__(tokens=tokens, experts=EXPERTS, hidden=HIDDEN, dtype=dtype, **shape)
        self.case = CASES[name]
        generator = torch.Generator().manual_seed(3)

        def new(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.gate = new(EXPERTS, HIDDEN)
        self.bias = new(EXPERTS) if self.case.bias else None
        self.correction = new(EXPERTS).detach() if self.case.spec.corrected else None
        self.scale = new(EXPERTS) if any(s.op == "expert_scale" for s in self.case.spec.weights) else None

    @property
    def routing(self):
        return [self.x, self.gate, self.bias, self.correction]

    @property
    def arguments(self):
        lists = [self.up, self.down, self.up_bias, self.down_bias]
        how = (self.case.spec.to_json(), self.spec.to_json(), "portable")
        return (self.x, *self.routing, self.scale, *lists, *how)

    def spelled(self):
        """y, logits, weights, ids as the model spells them."""
        logits = torch.nn.functional.linear(self.x, self.gate, self.bias)
        ids, weights = self.case.spell(logits, self.correction, self.scale)
        lists = (self.up, self.down, self.up_bias, self.down_bias)
        y = torch.ops.mok.experts(self.x, ids, weights, *lists, self.spec.to_json(), "portable")[0]
        return y, logits, weights, ids


def gradients(problem, outputs):
    generator = torch.Generator().manual_seed(4)
    seeds = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    leaves = [t for t in (problem.x, problem.gate, problem.bias, problem.scale, *problem.up) if t is not None]
    grads = torch.autograd.grad(outputs, leaves, seeds, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_model(name, dtype, tokens):
    """Outputs to the bit: the same kernels run. Gradients of y, logits and weights as autograd's own."""
    problem = Router(name, tokens, dtype)
    found, wanted = torch.ops.mok.moe(*problem.arguments), problem.spelled()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for read in ((0, 1, 2), (0,), (1,), (2,)):
        pairs = zip(*(gradients(problem, [outputs[i] for i in read]) for outputs in (found, wanted)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_ties_are_resolved_as_topk_does(name):
    """Logits from a handful of values: most experts are equal to others."""
    problem = Router(name, 64, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in (problem.x, problem.gate, problem.correction):
            if t is not None:
                t.copy_(torch.randint(0, 2, t.shape, generator=generator))
        if problem.bias is not None:
            problem.bias.zero_()
    found, wanted = torch.ops.mok.moe(*problem.arguments), problem.spelled()
    assert len(wanted[1].unique()) <= HIDDEN + 1
    assert torch.equal(found[3], wanted[3])
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    problem = Router(name, tokens=4, inner=2)
    x, gate, bias, correction, scale, *rest = problem.arguments[:1] + problem.arguments[2:]

    def run(x, gate, bias, scale):
        return torch.ops.mok.moe(x, x, gate, bias, correction, scale, *rest)[:3]

    assert torch.autograd.gradcheck(run, (x, gate, bias, scale))


def test_gradient_of_a_choice_that_fell_on_a_masked_expert():
    """Where a group has fewer than K experts above the fill, masked ones are chosen: weight and gradient are zero."""
    problem = Router("deepseek_v2", 5)
    with torch.no_grad():
        problem.gate[:, 0] = torch.tensor([900.0, -900, *[0.0] * 6])  # the second of the best group becomes zero
        problem.x[:, 0] = 1.0
    found, wanted = torch.ops.mok.moe(*problem.arguments), problem.spelled()
    assert torch.equal(found[3], wanted[3])
    assert (found[2] == 0).any()
    for a, b in zip(gradients(problem, found[:3]), gradients(problem, wanted[:3]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_scores_that_are_computed_anew(name):
    """By another kernel, whose last bit may be different from that of the values."""
    problem = Router(name, 9, torch.float32)
    routed = routing.route(*problem.routing, problem.case.spec)
    dvalues = torch.randn(routed.values.shape, generator=torch.Generator().manual_seed(5))
    off = replace(routed, values=torch.nextafter(routed.values, routed.values + 1).detach())
    off.values[routed.values == 0] = 0
    wanted = routing.logits_gradient(routed, dvalues, problem.case.spec)
    assert wanted.any() and torch.equal(routing.logits_gradient(off, dvalues, problem.case.spec), wanted)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ["mixtral", "gemma4", "deepseek_v3", "deepseek_v2", "gpt_oss"])
def test_opcheck(name, tokens):
    problem = Router(name, tokens, torch.float32)
    opcheck(torch.ops.mok.route.default, (*problem.routing, problem.case.spec.to_json(), "portable"))
    opcheck(torch.ops.mok.moe.default, problem.arguments)


@pytest.mark.parametrize("name", CASES)
def test_meta(name):
    """Shapes and dtypes on the meta device are those of the real thing."""
    problem = Router(name, dtype=torch.bfloat16)
    real = torch.ops.mok.route(*problem.routing, problem.case.spec.to_json(), "portable")
    meta = [None if t is None else t.detach().to("meta") for t in problem.routing]
    fake = torch.ops.mok.route(*meta, problem.case.spec.to_json(), "portable")
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_specification_survives_json(case):
    assert RouterSpec.from_json(case.spec.to_json()) == case.spec


def test_specification_in_words():
    assert str(CASES["deepseek_v3"].spec) == (
        "sigmoid, top 2 of score + bias within 2 of 4 groups (by their best 2, others -inf), normalised (sum + 1e-20), "
        "* 2.5"
    )
    assert str(CASES["ernie"].spec) == "softmax, top 2 of score + bias, normalised (sum at least 1e-12)"


@pytest.mark.parametrize(
    "fields",
    [
        {"scores": (Step("normalise"),)},
        {"scores": (Step("expert_scale"),)},
        {"masked": True},
        {"masked": True, "corrected": True, "groups": Groups(2, 1, 1, 0.0)},
    ],
)
def test_specifications_without_meaning(fields):
    with pytest.raises(ValueError, match=r"no place|behind the mask"):
        RouterSpec(**{"top_k": 2, "scores": (), "weights": (), **fields})


def test_unknown_step():
    with pytest.raises(ValueError, match="'argmax' is not one of cast, softmax"):
        Step("argmax")


def test_flops():
    problem = Router("mixtral")
    experts = 2 * 7 * 2 * HIDDEN * 15
    with FlopCounterMode(display=False) as counter:
        torch.ops.mok.moe(*problem.arguments)
    assert counter.get_total_flops() == 2 * 7 * HIDDEN * EXPERTS + experts


def test_autocast_does_not_reach_inside():
    problem = Router("deepseek_v3", dtype=torch.float32)
    wanted = torch.ops.mok.moe(*problem.arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.ops.mok.moe(*problem.arguments)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


class WithKernels:
    """An engine with kernels for routers that choose one expert."""

    name = "kernels"
    asked = 0

    def __getattr__(self, name):
        return getattr(portable.engine, name)

    def supports_router(self, router, weight):
        return None if router.top_k == 1 else "it chooses one expert"

    def route(self, *arguments):
        self.asked += 1
        return routing.route(*arguments)


@pytest.mark.parametrize(("name", "calls"), [("llama4", 1), ("mixtral", 0)])
def test_an_engine_takes_the_routers_it_knows(monkeypatch, name, calls):
    """In 16 bits too, where the choice is otherwise left to the compiler."""
    engine = WithKernels()
    get = engines.get
    monkeypatch.setattr(engines, "get", lambda name: engine if name == "kernels" else get(name))
    problem = Router(name, dtype=torch.bfloat16)
    found = torch.ops.mok.moe(*problem.arguments[:-1], "kernels")
    assert engine.asked == calls
    for a, b in zip(found, torch.ops.mok.moe(*problem.arguments), strict=True):
        assert torch.equal(a, b)


class WithFewKernel:
    """An engine with kernels for whole routers, of at most four tokens unless said otherwise."""

    name = "few"
    asked = 0

    def __getattr__(self, name):
        return getattr(portable.engine, name)

    most = 4

    def router_tokens(self, router, weight):
        return self.most

    def route_few(self, *arguments):
        self.asked += 1
        return routing.route_and_weigh(*arguments)


@pytest.fixture
def few(monkeypatch):
    engine, get = WithFewKernel(), engines.get
    monkeypatch.setattr(engines, "get", lambda name: engine if name == "few" else get(name))
    return engine


def traced(problem):
    """Targets in the graph of `mok::moe` on the engine for few tokens."""
    make = torch.fx.experimental.proxy_tensor.make_fx(torch.ops.mok.moe.default)
    graph = make(*problem.arguments[:-1], "few").graph
    return {node.target for node in graph.nodes}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_routes_few_tokens_alone(few, name):
    problem = Router(name, 4, torch.bfloat16)
    with torch.no_grad():
        found, wanted = torch.ops.mok.moe(*problem.arguments[:-1], "few"), problem.spelled()
    assert few.asked == 1
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize(
    ("tokens", "dtype", "grad", "taken"),
    [
        (4, torch.bfloat16, False, True),
        (0, torch.float16, False, True),
        (5, torch.bfloat16, False, False),
        (4, torch.bfloat16, True, False),
        (4, torch.float32, False, False),
    ],
)
def test_who_routes_few_tokens(few, tokens, dtype, grad, taken):
    problem = Router("mixtral", tokens, dtype)
    with torch.set_grad_enabled(grad):
        targets = traced(problem)
    assert (torch.ops.mok.route_infer.default in targets) == taken
    assert few.asked == taken


def recorded(**how):
    """A compiled block on the engine "few", as a function of its tokens, and what AOTAutograd calls in each graph."""
    seen = []

    def backend(gm, inputs):
        from torch._functorch.aot_autograd import aot_module_simplified

        def record(gm, inputs):
            seen.append({node.target for node in gm.graph.nodes})
            return gm

        return aot_module_simplified(gm, inputs, fw_compiler=record)

    _, _, *rest = Router("mixtral", 3, torch.bfloat16).arguments[:-1]

    def run(x):
        return torch.ops.mok.moe(x, x, *rest, "few")

    torch._dynamo.reset()
    return torch.compile(run, backend=backend, fullgraph=True, **how), seen


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_engine_that_routes_any_number_of_tokens(few, dynamic):
    few.most = math.inf
    compiled, seen = recorded(dynamic=dynamic)
    with torch.no_grad():
        for tokens in (3, 1000) if dynamic else (1000,):
            compiled(torch.randn(tokens, HIDDEN).bfloat16())
    assert len(seen) == 1 and torch.ops.mok.route_infer.default in seen[0]
    assert few.asked == 1 + dynamic


def test_a_training_step_routes_as_before(few):
    problem = Router("mixtral", 4, torch.bfloat16)
    found = torch.ops.mok.moe(*problem.arguments[:-1], "few")
    assert few.asked == 0
    for a, b in zip(gradients(problem, found[:3]), gradients(problem, problem.spelled()[:3]), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("most", "taken"), [(4, True), (1 << 20, False)])
def test_a_symbolic_number_of_tokens_gets_no_guard(few, most, taken):
    """The kernel runs where the number is known to be small, whatever the example's was."""
    compiled, seen = recorded()
    with torch.no_grad():
        for tokens in (3, 2, 4) if taken else (3, 2, 9):
            x = torch.randn(tokens, HIDDEN).bfloat16()
            torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
            compiled(x)
    assert len(seen) == 1
    assert (torch.ops.mok.route_infer.default in seen[0]) == taken


def test_a_correction_that_is_a_parameter_takes_no_part_in_gradients(few):
    """Where it alone could learn, nothing but the experts' output has a gradient."""
    problem = Router("deepseek_v3", 4, torch.bfloat16)
    for tensor in (problem.x, problem.gate):
        tensor.requires_grad_(False)
    problem.correction.requires_grad_()
    y, logits, weights, _ = torch.ops.mok.moe(*problem.arguments[:-1], "few")
    assert y.requires_grad and not logits.requires_grad and not weights.requires_grad
    y.sum().backward()
    assert problem.up[0].grad.any() and problem.correction.grad is None


def test_what_saves_nothing_has_no_gradient(few):
    problem = Router("mixtral", 4, torch.bfloat16)
    logits, *_ = torch.ops.mok.route_infer(*problem.routing, problem.scale, problem.case.spec.to_json(), "few")
    with pytest.raises(RuntimeError, match="mok::route_infer saves nothing"):
        logits.sum().backward()


@pytest.mark.parametrize("where", ["x", "router_x", "router_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_mode_is_refused(few, where, dtype):
    arguments = list(Router("mixtral", 4, dtype).arguments[:-1])
    slot = ("x", "router_x", "router_weight").index(where)
    given = arguments[slot].detach()

    def call(tensor):
        return torch.ops.mok.moe(*arguments[:slot], tensor, *arguments[slot + 1 :], "few")[1]

    with torch.no_grad(), pytest.raises(RuntimeError, match="mok::moe has no forward-mode derivative"):
        torch.func.jvp(call, (given,), (given,))


@pytest.mark.parametrize("name", ["mixtral", "gemma4", "deepseek_v3", "deepseek_v2", "gpt_oss"])
def test_opcheck_of_few_tokens(few, name):
    problem = Router(name, 3, torch.bfloat16)
    operands = [None if t is None else t.detach() for t in (*problem.routing, problem.scale)]
    opcheck(torch.ops.mok.route_infer.default, (*operands, problem.case.spec.to_json(), "few"))


@pytest.mark.parametrize(
    ("dtype", "opaque"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_the_choice_is_out_of_the_compilers_reach_where_it_is_promised(dtype, opaque):
    problem = Router("mixtral", dtype=dtype)
    graph = torch.fx.experimental.proxy_tensor.make_fx(torch.ops.mok.moe.default)(*problem.arguments).graph
    targets = {node.target for node in graph.nodes}
    assert (torch.ops.mok.route.default in targets) == opaque
    assert (torch.ops.aten.topk.default in targets) != opaque
    assert torch.ops.mok.experts.default in targets


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": lambda x: x[None]}, ValueError, r"expected x \[T, H\]"),
        ({"gate": lambda g: g[:, :-1]}, ValueError, r"weight \[E, H\]"),
        ({"gate": lambda g: g.half()}, TypeError, "one floating dtype"),
        ({"x": lambda x: x.long(), "gate": lambda g: g.long()}, TypeError, "one floating dtype"),
        ({"bias": lambda b: torch.zeros(3)}, ValueError, r"bias must have shape \(8,\)"),
        ({"correction": lambda c: None}, ValueError, "correction must be 8 numbers, got None"),
        ({"correction": lambda c: c[1:]}, ValueError, r"correction must be 8 numbers, got \(7,\)"),
        ({"gate": lambda g: g[:6], "correction": lambda c: c[:6]}, ValueError, "6 experts are not 4 groups"),
        ({"gate": lambda g: g[:1], "correction": lambda c: c[:1]}, ValueError, "cannot choose 2 of 1"),
        ({"correction": lambda c: c.to("meta")}, ValueError, "on one device; x is on cpu, others on meta"),
        ({"gate": lambda g: g.to("meta")}, ValueError, "on one device; x is on cpu, others on meta"),
    ],
)
def test_arguments_that_do_not_fit(changes, error, message):
    problem = Router("deepseek_v3", dtype=torch.float32)
    for name, change in changes.items():
        setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(error, match=message), torch.no_grad():
        torch.ops.mok.route(*problem.routing, problem.case.spec.to_json(), "portable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: None, r"expert_scale must be 8 numbers, got None"),
        (lambda s: s[1:], r"expert_scale must be 8 numbers, got \(7,\)"),
        (lambda s: s[:, None], r"expert_scale must be 8 numbers, got \(8, 1\)"),
        (lambda s: s.to("meta"), "on one device; x is on cpu, others on meta"),
    ],
)
def test_a_scale_of_experts_that_does_not_fit(few, change, message, dtype):
    """A kernel would read past its end."""
    problem = Router("gemma4", 4, dtype)
    problem.scale = change(problem.scale)
    with torch.no_grad():
        with pytest.raises(ValueError, match=message):
            torch.ops.mok.moe(*problem.arguments[:-1], "few")
        with pytest.raises(ValueError, match=message):
            torch.ops.mok.route_infer(*problem.routing, problem.scale, problem.case.spec.to_json(), "few")
