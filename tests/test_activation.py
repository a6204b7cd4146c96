"""Activation expressions: text and back, canonical form, values and derivatives, the family that kernels know."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_compile import activation as act
from mok_compile.activation import GATE, UP, Expr, GatedForm, gated_form, parse

numbers = st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 3))


def grow(children):
    values = st.one_of(children, numbers)
    return st.one_of(
        st.builds(act.unary, st.sampled_from(["sigmoid", "silu", "gelu", "relu", "tanh", "square", "erf"]), children),
        st.builds(act.add, children, values),
        st.builds(act.mul, children, values),
        st.builds(act.clamp, children, st.floats(-3, -0.1), st.floats(0.1, 3)),
    )


expressions = st.recursive(st.sampled_from([GATE, UP]), grow, max_leaves=8).filter(lambda e: isinstance(e, Expr))


@settings(max_examples=150, deadline=None)
@given(expressions)
def test_text_and_back(expr):
    assert parse(str(expr)) == expr


@settings(max_examples=100, deadline=None)
@given(expressions)
def test_derivatives_are_those_of_autograd(expr):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(40, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    value = act.evaluate(expr, gate, up)
    wanted = torch.autograd.grad(value.sum(), [gate, up], allow_unused=True)
    found_value, *found = act.derivatives(expr, gate.detach(), up.detach())
    assert torch.equal(found_value, value.detach())
    for name, d, reference in zip(("gate", "up"), found, wanted, strict=True):
        assert (d is None) == (name not in expr.leaves)
        torch.testing.assert_close(
            torch.zeros_like(gate) if d is None else d,
            torch.zeros_like(gate) if reference is None else reference,
            rtol=1e-9,
            atol=1e-9,
        )


@pytest.mark.parametrize("name", sorted(act.UNARY))
def test_derivative_of_each_function(name):
    x = torch.linspace(0.05, 3, 50, dtype=torch.float64)
    x = x if name in ("sqrt", "rsqrt", "reciprocal") else torch.cat([-x, x])
    x.requires_grad_()
    value, derivative = act.UNARY[name]
    (wanted,) = torch.autograd.grad(value(x).sum(), x)
    torch.testing.assert_close(derivative(x.detach()), wanted, rtol=1e-9, atol=1e-12)


def test_derivatives_at_the_edges():
    """relu at 0 and clamp at its limits, as torch has it."""
    for text in ("relu(up)", "clamp(up, -1.0, 1.0)", "square(relu(up))"):
        x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
        (wanted,) = torch.autograd.grad(act.evaluate(parse(text), None, x).sum(), x)
        assert torch.equal(act.derivatives(parse(text), None, x.detach())[2], wanted)


def test_canonical_form():
    sigmoid = act.unary("sigmoid", GATE)
    assert act.mul(GATE, sigmoid) == act.mul(sigmoid, GATE) == act.unary("silu", GATE)
    assert act.mul(UP, GATE) == act.mul(GATE, UP)
    assert act.mul(GATE, GATE) == act.unary("square", GATE)
    assert act.mul(1.0, UP) is UP
    assert act.add(UP, 0.0) is UP
    assert act.add(2.0, 3) == 5.0
    assert act.clamp(UP, None, None) is UP
    assert act.clamp(9.0, None, 7.0) == 7.0
    assert str(act.mul(act.add(UP, 1.0), act.unary("silu", GATE))) == "silu(gate) * (up + 1.0)"
    assert act.unary("relu", -2.0) == 0.0


@pytest.mark.parametrize(
    "text", ["", "2.0", "gate +", "foo(gate)", "x * up", "clamp(gate, 1.0)", "gate ** 2", "silu()"]
)
def test_text_that_is_no_expression(text):
    with pytest.raises(ValueError, match=r"expression|unknown activation"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("silu(gate) * up", GatedForm("silu")),
        ("gate * silu(up)", GatedForm("silu", gate_leaf="up")),
        ("gelu_tanh(gate) * up", GatedForm("gelu_tanh")),
        ("square(relu(up))", GatedForm("relu2", gate_leaf="up", gated=False)),
        ("sigmoid(gate) * up", GatedForm("sigmoid")),
        ("gate * up", GatedForm("identity")),
        ("up", GatedForm("identity", gate_leaf="up", gated=False)),
        (
            "silu(clamp(gate, -inf, 7.0)) * clamp(up, -7.0, 7.0)",
            GatedForm("silu", gate_max=7.0, up_min=-7.0, up_max=7.0),
        ),
        (
            "clamp(gate, -inf, 7.0) * sigmoid(clamp(gate, -inf, 7.0) * 1.702) * (clamp(up, -7.0, 7.0) + 1.0)",
            GatedForm("swish", 1.702, gate_max=7.0, up_min=-7.0, up_max=7.0, up_offset=1.0),
        ),
        ("tanh(gate) * up", None),
        ("silu(gate) + up", None),
        ("silu(gate) * silu(up)", None),
        ("silu(gate) * gate * up", None),
        ("silu(gate + 1.0) * up", None),
        ("silu(gate) * up * 2.0", None),
    ],
)
def test_the_family_that_kernels_know(text, form):
    assert gated_form(parse(text)) == form


def test_gated_form_says_what_it_is():
    """The formula in `GatedForm`'s own words gives the numbers of the expression."""
    text = "clamp(gate, -inf, 0.7) * sigmoid(clamp(gate, -inf, 0.7) * 1.702) * (clamp(up, -0.7, 0.7) + 1.0)"
    form = gated_form(parse(text))
    gate, up = torch.randn(2, 100, dtype=torch.float64)
    g = gate.clamp(form.gate_min, form.gate_max)
    by_hand = g * torch.sigmoid(form.alpha * g) * (up.clamp(form.up_min, form.up_max) + form.up_offset)
    torch.testing.assert_close(act.evaluate(parse(text), gate, up), by_hand)


def test_substitute():
    expr = parse("silu(gate) * up")
    assert act.substitute(expr, {GATE: UP, UP: GATE}) == parse("gate * silu(up)")
    assert act.substitute(expr, {GATE: UP}) == parse("silu(up) * up")
    assert math.isclose(act.substitute(1.5, {}), 1.5)
