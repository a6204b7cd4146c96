"""The meaning of a `RouterSpec` in plain PyTorch, on every device.

The calls are eager's own, in eager's order and dtypes: that is what makes expert ids equal eager's bit for bit, ties
included, which torch.topk resolves by rules of its own on each device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mok_compile.router import Groups, RouterSpec, Step

aten = torch.ops.aten


@dataclass(frozen=True)
class Routed:
    """logits [T, E]; values [T, K]: the chosen experts' scores; ids [T, K] int64."""

    logits: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """logits [T, E], weights [T, K] and ids [T, K] int64: what a router makes of tokens."""

    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    router: RouterSpec,
) -> Routed:
    """Chooses the experts. x [T, H], weight [E, H], bias [E], correction: E numbers of any shape."""
    logits = torch.nn.functional.linear(x, weight, bias)
    scores = _chain(router.scores, logits)[-1]
    choice = scores if correction is None else scores + correction.reshape(-1)
    if router.groups is not None:
        choice = _within(choice, router.groups)
    values, ids = torch.topk(choice, router.top_k, -1, sorted=router.ordered)
    if choice is not scores and not router.masked:
        values = scores.gather(-1, ids)
    return Routed(logits, values, ids)


def weigh(
    values: torch.Tensor, ids: torch.Tensor, expert_scale: torch.Tensor | None, router: RouterSpec
) -> torch.Tensor:
    """Routing weights [T, K] of the chosen experts. values, ids: of `route`; expert_scale [E]."""
    for step in router.weights:
        values = values * expert_scale[ids] if step.op == "expert_scale" else apply(step, values)
    return values


def route_and_weigh(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    router: RouterSpec,
) -> Routing:
    """`route` and `weigh`."""
    routed = route(x, weight, bias, correction, router)
    return Routing(routed.logits, weigh(routed.values, routed.ids, expert_scale, router), routed.ids)


def logits_gradient(routed: Routed, dvalues: torch.Tensor, router: RouterSpec) -> torch.Tensor:
    """The gradient [T, E] of the logits that belongs to the gradient `dvalues` of `routed.values`."""
    chain = _chain(router.scores, routed.logits)
    if router.masked:  # what took the place of a score hands no gradient on to it
        # Not where values differ from the scores: these are computed anew, by other kernels perhaps.
        fill = router.groups.fill
        hidden = (routed.values == fill) & (chain[-1].gather(-1, routed.ids) != fill)
        dvalues = dvalues.masked_fill(hidden, 0)
    grad = torch.zeros_like(chain[-1]).scatter(-1, routed.ids, dvalues)
    for step, x, y in zip(reversed(router.scores), chain[-2::-1], chain[:0:-1], strict=True):
        grad = _derivative(step, grad, x, y)
    return grad


def apply(step: Step, x: torch.Tensor) -> torch.Tensor:
    """`step` of x, along its last dimension; any but ``expert_scale``."""
    if step.op != "normalise":
        function, args, kwargs = call_of(step)
        return function(x, *args, **kwargs)
    total = x.sum(-1, keepdim=True)
    if step.args:
        how, eps = step.args
        total = total + eps if how == "add" else total.clamp(min=eps)
    return x / total


def call_of(step: Step) -> tuple[Callable, tuple, dict]:
    """The function that a step before the choice calls, and its arguments after the first one."""
    if step.op == "cast":
        return torch.Tensor.to, (step.dtype,), {}
    if step.op == "softmax":
        return torch.softmax, (-1,), {"dtype": step.dtype} if step.args else {}
    function = torch.nn.functional.softplus if step.op == "softplus" else getattr(torch, step.op)
    return function, step.args, {}


def _chain(steps: tuple[Step, ...], x: torch.Tensor) -> list[torch.Tensor]:
    """x and what it is after each step."""
    chain = [x]
    for step in steps:
        chain.append(apply(step, chain[-1]))
    return chain


def _within(choice: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`choice` [T, E] with `groups.fill` in all but the best groups."""
    grouped = choice.unflatten(-1, (groups.count, -1))
    best = grouped.amax(-1) if groups.best == 1 else torch.topk(grouped, groups.best, -1)[0].sum(-1)
    chosen = torch.topk(best, groups.chosen, -1, sorted=groups.ordered)[1]
    others = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    return grouped.masked_fill(others.unsqueeze(-1), groups.fill).flatten(-2)


def _derivative(step: Step, grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of x for the gradient `grad` of y = step(x)."""
    match step.op:
        case "cast" | "add":
            return grad.to(x.dtype)
        case "softmax":
            return aten._softmax_backward_data(grad, y, -1, y.dtype).to(x.dtype)
        case "sigmoid":
            return aten.sigmoid_backward(grad, y)
        case "tanh":
            return aten.tanh_backward(grad, y)
        case "softplus":
            return grad * torch.sigmoid(x)
        case "sqrt":
            return grad / (2 * y)
        case "mul":
            return grad * step.args[0]
    return grad / step.args[0]
