"""Transports: who brings the tokens to the experts of other ranks and back, and runs these on the way.

A transport is a module-level object with the methods of `Transport`. ``collectives`` runs on every process group and
is the meaning of the op. A transport may run its phases one after the other (dispatch, experts, combine; in the
backward reverse combine, experts, reverse dispatch) or all in one kernel: the op only sees forward and backward.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import torch
from torch._library.fake_impl import allocate_size

from mok_compile.distributed.sharding import Sharding
from mok_compile.engines import Problem, warn_once
from mok_compile.spec import ExpertsSpec, dtype_name

# Best first; the last one runs everything.
TRANSPORTS = ("peer_memory", "collectives")


@dataclass(frozen=True)
class Call:
    """What a call of ``mok::experts_parallel`` says beside its tensors: what the block computes, the engine that runs
    a rank's experts, the group's name, its number of ranks, the number of experts of all ranks together, and what was
    set of the transport."""

    spec: ExpertsSpec
    engine: str
    group: str
    sharding: Sharding
    options: str = ""
    known: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # a transport's own notes


@dataclass(frozen=True)
class Operands:
    """The tensors of a call, as for ``mok::experts``: x, ids and weights of this rank's tokens, ids counting the
    experts of all ranks; the experts' weights are this rank's own."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    up_bias: list[torch.Tensor]
    down_bias: list[torch.Tensor]

    @property
    def lists(self) -> tuple[list[torch.Tensor], ...]:
        return self.up, self.down, self.up_bias, self.down_bias

    @property
    def local_experts(self) -> int:
        return self.down[0].shape[0]


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward: ``rows`` [R, H], tokens that came here; ``h`` [R, N], the
    pre-activations of this rank's experts; ``plan`` [P] int32, the schedule. R and P are the transport's choice."""

    rows: torch.Tensor
    h: torch.Tensor
    plan: torch.Tensor


class Transport(Protocol):
    """What a transport provides."""

    name: str

    def supports(self, call: Call, problem: Problem) -> str | None:
        """None if it runs such calls on this group, else why not (one sentence). `problem` is that of one rank's
        experts, with one slot for each row."""

    def saved(self, operands: Operands, call: Call) -> Saved:
        """Empty tensors of the shapes that `forward` saves; runs on fake tensors."""

    def forward(self, operands: Operands, call: Call, *, save: bool) -> tuple[torch.Tensor, Saved | None]:
        """y [T, H] in the spec's dtype, and what the backward needs if `save` is set. Every rank calls it."""

    def backward(
        self, dy: torch.Tensor, operands: Operands, saved: Saved, call: Call, needs: list[bool]
    ) -> list[torch.Tensor]:
        """Gradients of x, weights, up, down, up_bias, down_bias (flattened), only those that `needs` asks for. Every
        rank calls it, whatever it needs itself."""


@cache
def get(text: str) -> Transport:
    """The transport whose name is the first word of `text`. ValueError if there is none."""
    name = text.partition(" ")[0]
    if name not in TRANSPORTS:
        raise ValueError(f"unknown transport {name!r}; transports: {', '.join(TRANSPORTS)}")
    return importlib.import_module(f"mok_compile.distributed.{name}").transport


def options_of(text: str) -> str:
    """What `text` says after the transport's name."""
    return text.partition(" ")[2]


def choose(call: Call, problem: Problem, wanted: str = "auto") -> str:
    """The best transport for a call, or the `wanted` one: its name, then what is set of it. On a GPU a warning says
    once why a better one is passed over. ValueError if the `wanted` one cannot run it."""
    for text in TRANSPORTS if wanted == "auto" else (wanted,):
        options = options_of(text)
        reason = get(text).supports(call if options == call.options else replace(call, options=options), problem)
        if reason is None:
            return text
        if wanted == "auto" and problem.device.type == "cuda":
            warn_once(f"mok-compile: transport {text} cannot run a block of expert parallelism: {reason}")
    raise ValueError(f"transport {wanted!r} cannot run this block: {reason}")


@cache
def row_spec(spec: ExpertsSpec, dtype: torch.dtype) -> ExpertsSpec:
    """`spec` for rows that are combined elsewhere: what an expert makes of one row, in `dtype`."""
    return replace(spec, out_dtype=dtype_name(dtype))


def unknown_size() -> torch.SymInt:
    """A size that only the data tells. Dynamo's flag about such sizes is passed by: it protects code that would branch
    on them, and these are only handed from the forward to the backward pass."""
    context = torch.library.get_ctx()
    if context._shape_env is None:
        return context.new_dynamic_size()  # raises what torch wants to see
    return allocate_size(context._shape_env)
