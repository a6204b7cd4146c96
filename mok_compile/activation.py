"""What an expert computes between its two projections, as a small expression in ``gate`` and ``up``.

``gate`` and ``up`` are the first and the second half of the up projection as the model stores it (an ungated expert
has only ``up``). Any pointwise function of the two can be written down, so a gate nobody has met before needs no code
here; engines look at `GatedForm` to see whether they have a kernel for it.
"""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass
from typing import Union

import torch

Value = Union["Expr", float]


@dataclass(frozen=True)
class Expr:
    """A node of the expression: a leaf (``gate``, ``up``) or a function of `args`; constants are plain floats."""

    op: str
    args: tuple[Value, ...] = ()

    def __str__(self) -> str:
        return _print(self)

    @functools.cached_property
    def leaves(self) -> frozenset[str]:
        """Names of the leaves that the value depends on."""
        if self.op in LEAVES:
            return frozenset([self.op])
        return frozenset().union(*(a.leaves for a in self.args if isinstance(a, Expr)))


LEAVES = ("gate", "up")
GATE, UP = Expr("gate"), Expr("up")


def _dsigmoid(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _dsilu(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _dgelu(x: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return cdf + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _dgelu_tanh(x: torch.Tensor) -> torch.Tensor:
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


def _dtanh(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(x)
    return 1 - t * t


# name -> (value, derivative); both take and return tensors. Boundary values follow torch's own derivatives.
UNARY = {
    "sigmoid": (torch.sigmoid, _dsigmoid),
    "silu": (torch.nn.functional.silu, _dsilu),
    "gelu": (torch.nn.functional.gelu, _dgelu),
    "gelu_tanh": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), _dgelu_tanh),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype)),
    "square": (torch.square, lambda x: 2 * x),
    "tanh": (torch.tanh, _dtanh),
    "exp": (torch.exp, torch.exp),
    "erf": (torch.erf, lambda x: torch.exp(-x * x) * (2 / math.sqrt(math.pi))),
    "softplus": (torch.nn.functional.softplus, torch.sigmoid),
    "sqrt": (torch.sqrt, lambda x: 0.5 / torch.sqrt(x)),
    "rsqrt": (torch.rsqrt, lambda x: -0.5 * torch.rsqrt(x) / x),
    "reciprocal": (torch.reciprocal, lambda x: -torch.square(torch.reciprocal(x))),
}
BINARY = ("add", "mul")


def unary(op: str, x: Value) -> Value:
    """`op` applied to `x`; `op` is a key of `UNARY`."""
    if op not in UNARY:
        raise ValueError(f"unknown activation function {op!r}; known: {', '.join(sorted(UNARY))}")
    if not isinstance(x, Expr):
        return float(UNARY[op][0](torch.tensor(x, dtype=torch.float64)))
    return Expr(op, (x,))


def clamp(x: Value, low: float | None, high: float | None) -> Value:
    """`x` limited to [low, high]; None means no limit on that side."""
    low = -math.inf if low is None else float(low)
    high = math.inf if high is None else float(high)
    if not isinstance(x, Expr):
        return min(max(x, low), high)
    if low == -math.inf and high == math.inf:
        return x
    return Expr("clamp", (x, low, high))


def add(a: Value, b: Value) -> Value:
    """a + b, in canonical order."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return a + b
    if b == 0.0 and not isinstance(b, Expr):
        return a
    if a == 0.0 and not isinstance(a, Expr):
        return b
    return Expr("add", _ordered(a, b))


def mul(a: Value, b: Value) -> Value:
    """a * b, in canonical order; ``x * sigmoid(x)`` becomes ``silu(x)``."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return a * b
    if b == 1.0 and not isinstance(b, Expr):
        return a
    if a == 1.0 and not isinstance(a, Expr):
        return b
    if b == Expr("sigmoid", (a,)):
        return Expr("silu", (a,))
    if a == Expr("sigmoid", (b,)):
        return Expr("silu", (b,))
    if isinstance(a, Expr) and a == b:
        return Expr("square", (a,))
    return Expr("mul", _ordered(a, b))


def _ordered(a: Value, b: Value) -> tuple[Value, Value]:
    """Functions of gate before functions of up, constants last, so that equal formulas compare equal."""

    def key(v: Value) -> tuple:
        if not isinstance(v, Expr):
            return (2, repr(v))
        return (0 if "gate" in v.leaves else 1, _print(v))

    return (a, b) if key(a) <= key(b) else (b, a)


def substitute(expr: Value, leaves: dict[Expr, Expr]) -> Value:
    """`expr` with every sub-expression that is a key of `leaves` replaced, in canonical form again."""
    if not isinstance(expr, Expr):
        return expr
    if expr in leaves:
        return leaves[expr]
    if expr.op in LEAVES:
        return expr
    args = [substitute(a, leaves) for a in expr.args]
    if expr.op in BINARY:
        return {"add": add, "mul": mul}[expr.op](*args)
    return clamp(*args) if expr.op == "clamp" else unary(expr.op, *args)


def evaluate(expr: Expr, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """The value of `expr`, computed in the dtype of its inputs (any shape, the same for both)."""
    return _evaluate(expr, {"gate": gate, "up": up}, {})


def _evaluate(expr: Value, env: dict, memo: dict):
    if not isinstance(expr, Expr):
        return expr
    if expr.op in LEAVES:
        return env[expr.op]
    if expr not in memo:
        args = [_evaluate(a, env, memo) for a in expr.args]
        if expr.op == "add":
            memo[expr] = args[0] + args[1]
        elif expr.op == "mul":
            memo[expr] = args[0] * args[1]
        elif expr.op == "clamp":
            memo[expr] = args[0].clamp(args[1], args[2])
        else:
            memo[expr] = UNARY[expr.op][0](args[0])
    return memo[expr]


def derivatives(
    expr: Expr, gate: torch.Tensor | None, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(value, d value / d gate, d value / d up) of `expr`; None for a leaf that it does not depend on."""
    env, memo = {"gate": gate, "up": up}, {}
    value = _evaluate(expr, env, memo)

    def full(d):
        return d if d is None or isinstance(d, torch.Tensor) else torch.full_like(up, d)

    return value, full(_derivative(expr, "gate", env, memo)), full(_derivative(expr, "up", env, memo))


def _derivative(expr: Value, leaf: str, env: dict, memo: dict):
    """Not nested in `derivatives`: a function that calls itself by a name around it keeps all tensors there alive until
    the garbage collector comes."""
    if not isinstance(expr, Expr) or leaf not in expr.leaves:
        return None
    if expr.op == leaf:
        return 1.0
    args = [_evaluate(a, env, memo) for a in expr.args]
    inner = [_derivative(a, leaf, env, memo) for a in expr.args]
    if expr.op == "add":
        return inner[0] if inner[1] is None else inner[1] if inner[0] is None else inner[0] + inner[1]
    if expr.op == "mul":
        terms = [d * other for d, other in ((inner[0], args[1]), (inner[1], args[0])) if d is not None]
        return functools.reduce(lambda p, q: p + q, terms)
    if expr.op == "clamp":
        x = args[0]
        return inner[0] * ((x >= args[1]) & (x <= args[2])).to(x.dtype)
    return UNARY[expr.op][1](args[0]) * inner[0]


def _print(v: Value, inside: str = "") -> str:
    if not isinstance(v, Expr):
        return repr(v)
    if v.op in LEAVES:
        return v.op
    if v.op == "add":
        text = f"{_print(v.args[0])} + {_print(v.args[1], 'add')}"
        return f"({text})" if inside else text
    if v.op == "mul":
        text = f"{_print(v.args[0], 'mul')} * {_print(v.args[1], 'factor')}"
        return f"({text})" if inside == "factor" else text
    return f"{v.op}({', '.join(_print(a) for a in v.args)})"


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Expr:
    """The expression that `str(expr)` printed. ValueError if `text` is not one."""

    def build(node: ast.AST) -> Value:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            combine = add if isinstance(node.op, ast.Add) else mul
            return combine(build(node.left), build(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return mul(-1.0, build(node.operand))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return float(node.value)
        if isinstance(node, ast.Name) and node.id in LEAVES:
            return Expr(node.id)
        if isinstance(node, ast.Name) and node.id == "inf":
            return math.inf
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            args = [build(a) for a in node.args]
            if node.func.id == "clamp" and len(args) == 3:
                return clamp(*args)
            if len(args) == 1:
                return unary(node.func.id, args[0])
        raise ValueError(f"not an activation expression: {text!r}")

    try:
        expr = build(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an activation expression: {text!r}") from error
    if not isinstance(expr, Expr):
        raise ValueError(f"activation expression without gate or up: {text!r}")
    return expr


@dataclass(frozen=True)
class GatedForm:
    """The family of gates that kernels implement:

    ``kind(min(g, gate_max) clamped from below at gate_min) * (clamp(u, up_min, up_max) + up_offset)``

    where `kind` is one of silu, gelu, gelu_tanh, relu, relu2, sigmoid, identity or swish (``g * sigmoid(alpha * g)``),
    g is the half named by `gate_leaf` and u the other one. An ungated expert has only the first factor (`gated` False).
    """

    kind: str
    alpha: float = 1.0
    gate_min: float = -math.inf
    gate_max: float = math.inf
    up_min: float = -math.inf
    up_max: float = math.inf
    up_offset: float = 0.0
    gate_leaf: str = "gate"
    gated: bool = True


@functools.lru_cache(maxsize=256)
def gated_form(expr: Expr) -> GatedForm | None:
    """`expr` as a `GatedForm`, or None when it is not of that family (the portable engine then runs it)."""
    if len(expr.leaves) == 1:
        factor = _factor(expr)
        return factor and GatedForm(**factor, gate_leaf=next(iter(expr.leaves)), gated=False)
    if expr.op != "mul":
        return None
    for first, second in (expr.args, expr.args[::-1]):
        if (
            not all(isinstance(f, Expr) and len(f.leaves) == 1 for f in (first, second))
            or first.leaves == second.leaves
        ):
            return None
        linear = _linear(second)
        factor = _factor(first)
        if factor and linear:
            return GatedForm(**factor, **linear, gate_leaf=next(iter(first.leaves)))
    return None


def _factor(expr: Expr) -> dict | None:
    """The nonlinear factor: kind, alpha and the limits of its argument."""
    if expr.op == "square" and isinstance(expr.args[0], Expr) and expr.args[0].op == "relu":
        kind, alpha, inner = "relu2", 1.0, expr.args[0].args[0]
    elif expr.op in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid"):
        kind, alpha, inner = expr.op, 1.0, expr.args[0]
    elif expr.op == "mul":
        kind, swish = "swish", _swish(expr)
        if swish is None:
            return None
        alpha, inner = swish
    elif expr.op in LEAVES or expr.op == "clamp":
        kind, alpha, inner = "identity", 1.0, expr
    else:
        return None
    limits = _limits(inner)
    return limits and {"kind": kind, "alpha": alpha, "gate_min": limits[0], "gate_max": limits[1]}


def _swish(expr: Expr) -> tuple[float, Expr] | None:
    for x, gate in (expr.args, expr.args[::-1]):
        if not (isinstance(x, Expr) and isinstance(gate, Expr) and gate.op == "sigmoid"):
            continue
        scaled = gate.args[0]
        if (
            isinstance(scaled, Expr)
            and scaled.op == "mul"
            and scaled.args[0] == x
            and isinstance(scaled.args[1], float)
        ):
            return scaled.args[1], x
    return None


def _linear(expr: Expr) -> dict | None:
    """The other factor: clamp(u, low, high) + offset."""
    offset = 0.0
    if expr.op == "add" and isinstance(expr.args[1], float):
        expr, offset = expr.args
    if not isinstance(expr, Expr):
        return None
    limits = _limits(expr)
    return limits and {"up_min": limits[0], "up_max": limits[1], "up_offset": offset}


def _limits(expr: Value) -> tuple[float, float] | None:
    if not isinstance(expr, Expr):
        return None
    if expr.op in LEAVES:
        return -math.inf, math.inf
    if expr.op == "clamp" and isinstance(expr.args[0], Expr) and expr.args[0].op in LEAVES:
        return expr.args[1], expr.args[2]
    return None
