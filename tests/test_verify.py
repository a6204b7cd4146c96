"""mok.verify: a rule that lies is caught, whatever it lies about, and what it refuses stays as it was."""

from dataclasses import replace

import pytest
import torch
from blocks import HIDDEN, Biased, Moe, Sentinel, Separate, Stack, Ungated, grouped, routing, tokens
from harness import Fused, check_fused, check_refused, compare
from routers import Routed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mok_compile import activation as act
from mok_compile import engines
from mok_compile import routing as router_functions
from mok_compile.engines import portable
from mok_compile.passes.blocks import site
from mok_compile.passes.facts import rules
from mok_compile.passes.fusing.substitute import Substitution
from mok_compile.passes.fusing.verify import largest_error

aten = torch.ops.aten


def lie(monkeypatch, op, change):
    """Replaces the fact that the rule of `op` derives."""
    honest = rules.RULES[op]

    def rule(facts, value, *args, **kwargs):
        fact = honest(facts, value, *args, **kwargs)
        return change(fact) if fact is not None else None

    monkeypatch.setitem(rules.RULES, op, rule)


def test_wrong_activation(monkeypatch):
    lie(monkeypatch, aten.silu.default, lambda f: replace(f, expr=act.unary("sigmoid", f.expr.args[0])))
    check_refused(Moe(), tokens(), reason="verify", detail="relative error")


def test_halves_swapped(monkeypatch):
    swap = {"first": "second", "second": "first"}
    half = rules.half_of
    monkeypatch.setattr(rules, "half_of", lambda fact, part: half(fact, swap.get(part, part)))
    check_refused(Moe(), tokens(), reason="verify")


def test_forgotten_weights(monkeypatch):
    lie(monkeypatch, aten.mul.Tensor, lambda f: replace(f, weight=None) if hasattr(f, "weight") else f)
    check_refused(Moe(), tokens(), reason="verify")


def test_forgotten_bias(monkeypatch):
    monkeypatch.setattr(rules, "with_bias", lambda fact, bias: fact)
    check_refused(Biased(), tokens(), reason="verify")


def test_lie_about_gradients_only(monkeypatch):
    """The numbers of the forward pass are right; only the gradients show that a detach was ignored."""

    class Detached(Moe):
        def activate(self, h):
            return super().activate(h.detach())

    monkeypatch.setitem(rules.RULES, aten.detach.default, lambda facts, value, a: facts.of(a))
    compiled = check_refused(Detached(), tokens(), reason="verify", detail="gradient of")
    assert compiled.report.sites[0].status == "missed"


def test_wrong_operand(monkeypatch):
    honest = site.block_at

    def swapped(*args):
        found = honest(*args)
        object.__setattr__(found, "spec", replace(found.spec, layout="interleaved"))
        return found

    monkeypatch.setattr(site, "block_at", swapped)
    check_refused(Moe(), tokens(), reason="verify")


# The substitution lies about one operand of the op, or the engine about one result.


def double_gradient(sub, block, node):
    twice = sub._emit(block, torch.mul, node, 2.0)
    return sub._emit(block, torch.sub, twice, sub._emit(block, torch.detach, node))


def on(position, change):
    """Changes one operand; in a list of weights or biases, the last one."""

    def edit(sub, block, args):
        args = list(args)
        if isinstance(args[position], list):
            args[position] = [*args[position][:-1], change(sub, block, args[position][-1])]
        else:
            args[position] = change(sub, block, args[position])
        return args

    return edit


def call(function, *more):
    return lambda sub, block, node: sub._emit(block, function, node, *more)


def spec(old, new):
    def change(sub, block, text):
        assert old in text
        return text.replace(old, new)

    return on(7, change)


X, IDS, WEIGHTS, UP, DOWN, UP_BIAS, DOWN_BIAS = range(7)
FORWARD = {
    "layout": spec("concat", "interleaved"),
    "activation": spec("silu", "gelu"),
    "half": spec("silu(gate) * up", "silu(up) * gate"),
    "out_dtype": spec("'out_dtype': 'float32'", "'out_dtype': 'float64'"),
    "other tokens": on(X, call(torch.roll, 1, 0)),
    "other ids": on(IDS, call(torch.flip, [0])),
    "ids of other slots": on(IDS, call(torch.flip, [1])),
    "one expert too far": on(IDS, call(torch.add, 1)),
    "weights scaled": on(WEIGHTS, call(torch.mul, 1.01)),
    "weights of other tokens": on(WEIGHTS, call(torch.roll, 1, 0)),
    "experts moved": on(UP, call(torch.roll, 1, 0)),
    "rows of the down projection moved": on(DOWN, call(torch.roll, 1, 1)),
    "no up bias": lambda sub, block, args: [*args[:UP_BIAS], [], *args[DOWN_BIAS:]],
    "no down bias": lambda sub, block, args: [*args[:DOWN_BIAS], [], *args[DOWN_BIAS + 1 :]],
    "biases moved": on(DOWN_BIAS, call(torch.roll, 1, 0)),
}
BACKWARD = {
    f"{what} {name}": on(position, change)
    for name, position in (("x", X), ("weights", WEIGHTS), ("up", UP), ("down", DOWN), ("bias", UP_BIAS))
    for what, change in (("detached", call(torch.detach)), ("gradient doubled", double_gradient))
}


class GivenBiased(Biased):
    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


def sabotage(monkeypatch, edit):
    honest = Substitution._emit

    def emit(self, block, target, *args, **kwargs):
        if target is torch.ops.mok.experts.default:
            args = edit(self, block, args)
        return honest(self, block, target, *args, **kwargs)

    monkeypatch.setattr(Substitution, "_emit", emit)


@pytest.mark.parametrize("edit", FORWARD.values(), ids=FORWARD)
def test_wrong_substitution(monkeypatch, edit):
    sabotage(monkeypatch, edit)
    check_refused(GivenBiased(), tokens(), *routing(), reason="verify", detail="relative error")


@pytest.mark.parametrize("edit", BACKWARD.values(), ids=BACKWARD)
def test_wrong_gradients_of_a_substitution(monkeypatch, edit):
    sabotage(monkeypatch, edit)
    check_refused(GivenBiased(), tokens(), *routing(), reason="verify", detail="in the gradient")


def test_right_again_without_sabotage():
    check_fused(GivenBiased(), tokens(), *routing())


def test_operands_of_another_layer(monkeypatch):
    """The second of two blocks gets the ids or the weights of the first."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GivenBiased(), GivenBiased(seed=1)

        def forward(self, x, a, b, c, d):
            return self.first(x, a, b), self.second(x, c, d)

    routes = [t for seed in (2, 3) for t in routing(seed=seed)]
    for position in (IDS, WEIGHTS, UP, DOWN, UP_BIAS, DOWN_BIAS):
        seen = []

        def first_again(sub, block, args, position=position, seen=seen):
            seen.append(args[position])
            return [*args[:position], seen[0], *args[position + 1 :]]

        with monkeypatch.context() as patch:
            sabotage(patch, first_again)
            torch._dynamo.reset()
            fused = Fused(Two())
            found = fused(tokens(), *routes)
        assert fused.counts() == (1, 1) and fused.reasons == ["verify"], position
        for a, b in zip(found, Two()(tokens(), *routes), strict=True):
            torch.testing.assert_close(a, b)


ENGINE_RESULTS = ["x", "weights", "up", "down", "up_bias", "down_bias"]


@pytest.mark.parametrize("wrong", range(len(ENGINE_RESULTS)), ids=ENGINE_RESULTS)
def test_an_engine_with_one_wrong_gradient(monkeypatch, wrong):
    engine = engines.get("portable")
    honest = type(engine).backward

    def backward(self, *args):
        grads = honest(self, *args)
        grads[wrong] = grads[wrong] * 1.01
        return grads

    monkeypatch.setattr(type(engine), "backward", backward)
    check_refused(GivenBiased(), tokens(), *routing(), reason="verify", detail="in the gradient")


def test_an_engine_with_one_wrong_row(monkeypatch):
    engine = engines.get("portable")
    honest = type(engine).forward

    def forward(self, *args, **kwargs):
        y, *saved = honest(self, *args, **kwargs)
        y = y.clone()
        y[-1, 0] += y.abs().mean() * 0.05
        return y, *saved

    monkeypatch.setattr(type(engine), "forward", forward)
    check_refused(GivenBiased(), tokens(), *routing(), reason="verify", detail="relative error")


def test_strict_says_what_verify_found(monkeypatch):
    sabotage(monkeypatch, FORWARD["activation"])
    fused = Fused(GivenBiased(), strict=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="verify"):
        fused(tokens(), *routing())


def test_inference_is_verified_too(monkeypatch):
    sabotage(monkeypatch, FORWARD["weights scaled"])
    with torch.no_grad():
        check_refused(GivenBiased(), tokens(grad=False), *routing(grad=False), reason="verify")


class Recomputed(GivenBiased):
    def forward(self, x, ids, weights):
        return checkpoint(super().forward, x, ids, weights, use_reentrant=False)


@pytest.mark.parametrize("edit", [FORWARD["activation"], BACKWARD["detached x"]], ids=["forward", "backward"])
def test_checkpointed_blocks_are_verified(monkeypatch, edit):
    assert check_fused(Recomputed(), tokens(), *routing()).report.sites[0].verify_error is not None
    sabotage(monkeypatch, edit)
    check_refused(Recomputed(), tokens(), *routing(), reason="verify")


def test_off_means_off(monkeypatch):
    """Without mok.verify the lie goes through: what the tests above prove is that verify caught it."""
    lie(monkeypatch, aten.silu.default, lambda f: replace(f, expr=act.unary("sigmoid", f.expr.args[0])))
    model, x = Moe(), tokens()
    fused = Fused(model, verify=False)
    with pytest.raises(AssertionError, match="relative error"):
        compare(model, fused, x)
    assert fused.counts() == (1, 0)
    assert fused.report.sites[0].verify_error is None


def test_one_of_two_blocks_is_withdrawn(monkeypatch):
    lie(monkeypatch, aten.pow.Tensor_Scalar, lambda f: replace(f, expr=f.expr.args[0]))
    model, x = Stack(Moe(), Ungated()), tokens()
    fused = Fused(model)
    compare(model, fused, x, tolerance=1e-4)
    assert fused.counts() == (1, 1), fused.report
    assert fused.reasons == ["verify"]
    assert fused.targets().count("mok.moe.default") == 1
    assert any("grouped_mm" in t for t in fused.targets())


def test_the_error_is_reported():
    fused = check_fused(Moe(), tokens())
    error = fused.report.sites[0].verify_error
    assert 0 < error < 1e-4
    assert "verified" in str(fused.report)


def test_verifying_changes_nothing():
    """Inputs that the graph writes, random state and gradients are as before."""

    class Writes(Moe):
        def forward(self, x):
            y = super().forward(x)
            x.add_(1)
            return y + torch.rand_like(y)

    model, x = Writes(), tokens(grad=False)
    fused = Fused(model)
    with torch.no_grad():
        outcomes = []
        for call in (model, fused):
            given = x.clone()
            torch.manual_seed(4)
            outcomes.append((call(given), given, torch.rand(3)))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)
    assert fused.counts() == (1, 0), fused.report
    assert all(p.grad is None for p in model.parameters())


def test_inputs_that_are_written_may_have_gradients():
    class Writes(Moe):
        def forward(self, x):
            y = super().forward(x)
            x.mul_(2)
            return y

    fused = Fused(Writes())
    x = tokens()
    fused(x * 1).sum().backward()
    assert fused.counts() == (1, 0) and x.grad.any()


def test_sentinels_are_no_difference():
    ids, weights = routing()
    ids[1, 0] = ids[4] = 5
    fused = check_fused(Sentinel(), tokens(), ids, weights)
    assert fused.report.sites[0].verify_error < 1e-4


class RouterOfItsOwn(Moe):
    """The router takes the tokens as they are, the experts a view that is the router's own inside of its linear."""

    def forward(self, x):
        scores = torch.sigmoid(F.linear(x, self.gate))
        weights, ids = torch.topk(scores, self.k, -1)
        self.hit = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True)
        ids, weights = (t.view(-1, self.k) for t in (ids, weights))
        return self.experts(x.view(x.shape[0] * x.shape[1], self.hidden), ids, weights).view(x.shape)

    def offsets(self, sorted_ids):
        return torch.cumsum(self.hit.sum((0, 1)), 0, dtype=torch.int32)


class RowsTwice(Separate):
    """Gate and up each take the tokens from a view of their own."""

    def forward(self, x):
        self.x = x
        return super().forward(x)

    def gather(self, x, perm):
        return x[perm // self.k], self.x.reshape(-1, self.hidden)[perm // self.k]

    def project_up(self, rows, sorted_ids, offsets):
        pairs = zip(rows, (self.gate_proj, self.up_proj), strict=True)
        return [grouped(r, w.transpose(1, 2), offsets) for r, w in pairs]


@pytest.mark.parametrize("block", [RouterOfItsOwn, RowsTwice])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_operands_that_several_nodes_compute(block, dtype, tolerance, monkeypatch):
    """Op and block share their gradient out among these nodes in different ways; all of it is what counts."""
    x = tokens(dtype=dtype, grad=False).view(2, -1, HIDDEN).requires_grad_()
    fused = check_fused(block(dtype=dtype), x, tolerance=tolerance)
    assert fused.report.sites[0].op == "moe" and fused.report.sites[0].verify_error < tolerance
    for edit in (BACKWARD["detached x"], BACKWARD["gradient doubled x"]):
        with monkeypatch.context() as patch:
            sabotage(patch, edit)
            check_refused(block(dtype=dtype), x, reason="verify", detail="in the gradient of")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[3.0, 4.0]], [[3.0, 4.5]], 0.1),
        ([[float("nan"), 1.0]], [[float("nan"), 1.0]], 0.0),
        ([[float("nan"), 1.0]], [[0.0, 1.0]], float("inf")),
        ([[float("inf"), 1.0]], [[float("inf"), 1.0]], 0.0),
        ([[float("inf"), 1.0]], [[-float("inf"), 1.0]], float("inf")),
        ([[1.0, 1.0]], [[1.0], [1.0]], float("inf")),
    ],
)
def test_measure(old, new, error):
    assert largest_error(torch.tensor(old), torch.tensor(new), False) == pytest.approx(error)


def test_measure_without_one_side():
    assert largest_error(None, None, False) == 0.0
    assert largest_error(None, torch.zeros(2, 2), False) == 0.0
    assert largest_error(torch.ones(2, 2), None, False) == float("inf")
    assert largest_error(torch.ones(0, 2), torch.ones(0, 2), False) == 0.0


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_eagers_kernels_choose_on_both_sides(monkeypatch, grad):
    """An engine's own router may resolve a near tie otherwise, which is no fault of the block."""

    class Other:
        name = "other"

        def __getattr__(self, name):
            return getattr(portable.engine, name)

        def router_tokens(self, router, weight):
            return 1 << 20

        def route_few(self, *arguments):
            made = router_functions.route_and_weigh(*arguments)
            return replace(made, ids=(made.ids + 1) % arguments[1].shape[0])

        def supports_router(self, router, weight):
            return None

        def route(self, *arguments):
            made = router_functions.route(*arguments)
            return replace(made, ids=(made.ids + 1) % arguments[1].shape[0])

    get, other = engines.get, Other()
    monkeypatch.setattr(engines, "ENGINES", ("other", *engines.ENGINES))
    monkeypatch.setattr(engines, "get", lambda name: other if name == "other" else get(name))
    torch._dynamo.reset()
    model, x = Routed("mixtral", dtype=torch.bfloat16), torch.randn(14, 16).bfloat16()
    fused = Fused(model, engine="other")
    with torch.set_grad_enabled(grad):
        assert not torch.equal(fused(x), model(x))
    (site_,) = fused.report.sites
    assert (site_.op, site_.engine, site_.reason) == ("moe", "other", None)
    assert site_.verify_error < 0.05
