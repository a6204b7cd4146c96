"""Engines: who runs a fused block. `choose` picks one at compile time, `get` finds it again at run time.

An engine is a module-level object with the methods of `Engine`; `ENGINES` lists them, best first. A new engine is one
file here and one entry in that list (see docs/new_engine.md).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from mok_compile.router import RouterSpec
from mok_compile.spec import ExpertsSpec

if TYPE_CHECKING:
    from mok_compile.routing import Routed, Routing

log = logging.getLogger("mok_compile")

# Best first; the last one runs everything.
ENGINES = ("sm90", "cpu", "portable")
PORTABLE = ENGINES[-1]
# The engine made for each type of device.
NATIVE = {"cuda": "sm90", "cpu": "cpu"}


# (engine, name of a ``mok::`` op) to a function that runs most calls of the op by itself, given the very arguments; for
# the others an empty list. Engines enter theirs when they first run.
direct: dict[tuple[str, str], Callable[..., list[torch.Tensor]]] = {}


def directly(engine: str, op: str, *arguments) -> list[torch.Tensor]:
    """The results of the op, if the engine called `engine` runs this call by itself; else none."""
    function = direct.get((engine, op))
    return function(*arguments) if function else []


@dataclass(frozen=True)
class Problem:
    """The facts an engine decides on: sizes (legend in `mok_compile.spec`), dtypes, device. Nothing about T: one choice
    serves every number of tokens."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    device: torch.device
    stacked: bool
    row_major: bool = True  # the weights lie in memory as [E, out, in], not as the transpose of something

    @staticmethod
    def of(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, down: list[torch.Tensor]) -> Problem:
        """The problem of an ``mok::experts`` call; works on fake tensors."""
        stacked = down[0].dim() == 3
        return Problem(
            hidden=int(x.shape[1]),
            intermediate=int(down[0].shape[-1]),
            num_experts=int(down[0].shape[0]) if stacked else len(down),
            top_k=int(ids.shape[1]),
            dtype=x.dtype,
            weights_dtype=weights.dtype,
            device=x.device,
            stacked=stacked,
            row_major=down[0].is_contiguous(),
        )


class Engine(Protocol):
    """What an engine provides. Tensors as for the ``mok::`` ops (see `mok_compile.ops`)."""

    name: str

    def usable(self) -> str | None:
        """None if the engine can run on this machine at all, else why not (one sentence)."""

    def supports(self, spec: ExpertsSpec, problem: Problem) -> str | None:
        """None if the engine runs this block, else why not (one sentence). Must not build or load anything slow when
        the answer is no."""

    def forward(self, x, ids, weights, up, down, up_bias, down_bias, spec, *, save):
        """(y, h, order, offsets); with ``save`` False only y matters and the others may be None."""

    def backward(
        self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs
    ) -> list[torch.Tensor]:
        """Gradients of x, weights, up, down, up_bias, down_bias (flattened), only those that `needs` asks for."""


class RouterEngine(Engine, Protocol):
    """An engine that has kernels for routers too. What it has none for is run by torch's own, as in eager."""

    def supports_router(self, router: RouterSpec, weight: torch.Tensor) -> str | None:
        """None if the engine runs this router with this weight [E, H] (which may be a fake tensor), else why not."""

    def route(self, x, weight, bias, correction, router) -> Routed:
        """Chooses the experts; in float32 and float64 the same ones as `mok_compile.routing.route`, perhaps with
        those of exactly equal scores in another order."""


class FewRouterEngine(Engine, Protocol):
    """An engine that has kernels for a whole router, routing weights included, where no gradient is asked for; perhaps
    only where tokens are few."""

    def router_tokens(self, router: RouterSpec, weight: torch.Tensor) -> float:
        """The number of tokens up to which the kernels are worth their call, infinity if they always are, 0 if there is
        none for this router with this weight [E, H] (which may be a fake tensor)."""

    def route_few(self, x, weight, bias, correction, expert_scale, router) -> Routing:
        """Chooses the experts and weighs them."""


class RowEngine(Engine, Protocol):
    """An engine that also combines rows which other ranks' experts have computed, to the bits of its own forward."""

    def row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which `combine` wants what an expert makes of a row of `dtype`: the one in which its own forward
        multiplies it with the routing weight."""

    def combine(self, rows, order, ids, weights, num_experts, spec) -> torch.Tensor:
        """y [T, H] in the spec's dtype from rows [S, H] in sorted order, zero where a slot has no route; order [S]
        int32 is the slot at each sorted position, ids and weights are [T, K]."""


@dataclass(frozen=True)
class Choice:
    """The engine that runs a block and, for each better one, why not it. `reason` is the code ``engine`` or ``arch``
    where the engine asked for, or the device's own, had to be passed over."""

    name: str
    passed_over: dict[str, str]
    reason: str | None = None


@cache
def get(name: str) -> Engine:
    """The engine called `name`. ValueError if there is none."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; engines: {', '.join(ENGINES)}")
    return importlib.import_module(f"mok_compile.engines.{name}").engine


def choose(spec: ExpertsSpec, problem: Problem, wanted: str = "auto") -> Choice:
    """The engine for a block. `wanted` is ``"auto"`` or an engine's name. Where that one (or, for ``"auto"``, the
    device's own) cannot run the block, the portable engine does, with one warning: never an error, never silent."""
    native = NATIVE.get(problem.device.type) if wanted == "auto" else wanted
    passed_over, code = {}, None
    for name in ENGINES if wanted == "auto" else (wanted, "portable"):
        engine = get(name)
        unusable = engine.usable()
        reason = unusable or engine.supports(spec, problem)
        if reason is None:
            return Choice(name, passed_over, code)
        passed_over[name] = reason
        if name == native:
            code = "arch" if unusable and wanted == "auto" else "engine"
            if unusable or wanted != "auto":  # a build that fails says so itself
                warn_once(f"mok-compile: engine {name} cannot run a block, the portable engine does: {reason}")
    raise AssertionError("the portable engine runs everything")


def router(name: str, spec: RouterSpec, weight: torch.Tensor) -> RouterEngine:
    """The engine that runs a router: the one called `name` if it has kernels for it, else the portable one."""
    engine = get(name)
    asked = getattr(engine, "supports_router", None)
    return engine if asked is not None and asked(spec, weight) is None else get(PORTABLE)


def router_tokens(name: str, spec: RouterSpec, weight: torch.Tensor) -> float:
    """The number of tokens up to which the engine called `name` has kernels for the whole router; 0: none."""
    asked = getattr(get(name), "router_tokens", None)
    return 0 if asked is None else asked(spec, weight)


def combiner(name: str) -> RowEngine:
    """The engine that combines the rows of the engine called `name`: itself if it can, else the portable one."""
    engine = get(name)
    return engine if hasattr(engine, "combine") else get(PORTABLE)


@cache
def warn_once(message: str) -> None:
    """Logs a warning the first time it is said in this process."""
    log.warning(message)
