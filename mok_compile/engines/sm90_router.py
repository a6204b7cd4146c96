"""The sm90 engine's routers: which ones its kernels run, and their launches. csrc/cuda/sm90/route.cuh is a whole router
of few tokens in 16 bits, csrc/cuda/sm90/choose.cu all but the logits, of any number of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mok_compile.router import RouterSpec, Step

# In the order of `Dtype` and `RouteStep::Op` in csrc/cuda/sm90/arguments.h.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = (
    *("cast", "softmax", "sigmoid", "softplus", "sqrt", "tanh", "mul", "add"),
    *("normalise", "normalise add", "normalise clamp", "expert_scale", "div"),
)
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS, MAX_STEPS = 1024, 32, 32, 8
# Up to here a product of the kernel's own is faster than the matrix library's (docs/kernels/sm90.md).
MAX_TOKENS = 256


@dataclass(frozen=True)
class Program:
    """A router as the kernel takes it, and the dtypes of its results."""

    numbers: tuple[float, ...]
    values: torch.dtype
    weights: torch.dtype


def unsupported(x: torch.dtype, experts: int, router: RouterSpec) -> str | None:
    """Why the kernels do not run this router for tokens of that dtype, None if they do."""
    if x not in DTYPES:
        return f"it has no kernels for routers in {x}"
    if experts > MAX_EXPERTS or router.top_k > MAX_TOP_K:
        return f"it routes to at most {MAX_TOP_K} of {MAX_EXPERTS} experts"
    groups = router.groups
    if groups is not None and (groups.count > MAX_GROUPS or groups.best > min(2, experts // groups.count)):
        return f"it knows at most {MAX_GROUPS} groups of experts, as good as their one or two best"
    for steps in (router.scores, router.weights):
        if len(steps) > MAX_STEPS:
            return f"it takes at most {MAX_STEPS} steps"
        for step in steps:
            if step.dtype is not None and step.dtype not in DTYPES:
                return f"it does not compute in {step.dtype}"
    return None


@functools.lru_cache(maxsize=256)
def program(
    router: RouterSpec,
    x: torch.dtype,
    correction: torch.dtype | None,
    scale: torch.dtype | None = None,
    *,
    weighs: bool = True,
) -> Program | None:
    """The kernels' numbers for operands of these dtypes (None: absent), without the steps after the choice unless it
    `weighs`; None if they do not know one of the dtypes."""
    if any(dtype not in (None, *DTYPES) for dtype in (correction, scale)):
        return None
    values, scores = _encoded(router.scores, x, None)
    choice = values if correction is None else torch.promote_types(values, correction)
    after = router.weights if weighs else ()
    weights, late = _encoded(after, values, scale)
    groups = router.groups
    chosen = (0, 0, 0, 0.0) if groups is None else (groups.count, groups.chosen, groups.best, groups.fill)
    counts = (len(router.scores), len(after))
    header = (DTYPES.index(choice), router.top_k, *chosen, router.masked, *counts)
    return Program(tuple(map(float, (*header, *scores, *late))), values, weights)


def _encoded(steps: tuple[Step, ...], dtype: torch.dtype, scale: torch.dtype | None) -> tuple[torch.dtype, list[float]]:
    """The dtype that a chain leads to, and its steps in numbers."""
    numbers: list[float] = []
    for step in steps:
        op, value = step.op, 0.0
        dtype = torch.promote_types(dtype, scale) if op == "expert_scale" else step.dtype or dtype
        if op in ("mul", "add", "div"):
            value = step.args[0]
        elif op == "normalise" and step.args:
            op, value = f"normalise {step.args[0]}", step.args[1]
        numbers += [OPS.index(op), value, DTYPES.index(dtype)]
    return dtype, numbers


def launch(x, weight, bias, correction, scale, router: RouterSpec, how: Program, stream: int):
    """(logits, values, weights, ids). x [T, R] and weight [E, R] without gaps, at multiples of 16 bytes."""
    shape = (x.shape[0], router.top_k)
    logits = x.new_empty(x.shape[0], weight.shape[0])
    values, weights = x.new_empty(shape, dtype=how.values), x.new_empty(shape, dtype=how.weights)
    ids = x.new_empty(shape, dtype=torch.int64)
    torch.ops.mok_sm90.route(
        x, weight, bias, correction, scale, list(how.numbers), logits, values, weights, ids, stream
    )
    return logits, values, weights, ids


def choose(logits, correction, router: RouterSpec, how: Program, stream: int):
    """(values, ids) of logits [T, E] without gaps, by a program that does not weigh."""
    shape = (logits.shape[0], router.top_k)
    values, ids = logits.new_empty(shape, dtype=how.values), logits.new_empty(shape, dtype=torch.int64)
    torch.ops.mok_sm90.choose(logits, correction, None, list(how.numbers), values, None, ids, stream)
    return values, ids


def choose_and_weigh(logits, correction, scale, router: RouterSpec, how: Program, stream: int):
    """(weights, ids) of logits [T, E] without gaps."""
    shape = (logits.shape[0], router.top_k)
    weights, ids = logits.new_empty(shape, dtype=how.weights), logits.new_empty(shape, dtype=torch.int64)
    torch.ops.mok_sm90.choose(logits, correction, scale, list(how.numbers), None, weights, ids, stream)
    return weights, ids
