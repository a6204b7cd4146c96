"""MoE blocks as functions, without graphs and without autograd: for training stacks that bring their own.

    y, context = forward(x, ids, weights, Weights((up,), (down,)), spec)
    grads = backward(dy, context)

With a process group the experts are spread over its ranks (`mok_compile.distributed`): each rank passes its own tokens
and its own experts, ids count all experts, and every rank calls the function. `experts` is the same with autograd.

Shapes (legend in `mok_compile.spec`): x [T, H]; ids [T, K] integer, weights [T, K] floating; the experts' weights as in
`Weights`, with the dtype of x. Ids outside [0, E) mean that the slot has no expert. Nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from mok_compile import engines, forward_mode, ops, reference  # noqa: F401  registers the ops
from mok_compile.engines import Problem
from mok_compile.spec import ExpertsSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mok_compile.distributed.routes import Routes


@dataclass(frozen=True)
class Weights:
    """The experts' weights. up: one [E, 2I, H] (or [E, I, H] ungated; or gate and up, each [E, I, H], for the layout
    ``separate``); down: [E, H, I]; biases the same without the last dimension, or none. Any strides: pass
    ``w.transpose(1, 2)`` of what is stored [E, in, out]. Without a group also one matrix per expert instead."""

    up: Sequence[torch.Tensor]
    down: Sequence[torch.Tensor]
    up_bias: Sequence[torch.Tensor] = ()
    down_bias: Sequence[torch.Tensor] = ()

    @property
    def lists(self) -> tuple[list[torch.Tensor], ...]:
        return list(self.up), list(self.down), list(self.up_bias), list(self.down_bias)


@dataclass(frozen=True)
class Context:
    """What `backward` needs of a `forward`. Serves more than one, as long as x and the weights stay as they are."""

    operands: tuple
    saved: tuple[torch.Tensor, ...]
    how: tuple
    parallel: bool


@dataclass(frozen=True)
class Gradients:
    """Shaped and typed as what they are gradients of; None where none was asked for."""

    x: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    up: tuple[torch.Tensor, ...] | None = None
    down: tuple[torch.Tensor, ...] | None = None
    up_bias: tuple[torch.Tensor, ...] | None = None
    down_bias: tuple[torch.Tensor, ...] | None = None


OPERANDS = tuple(field.name for field in fields(Gradients))


def forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Weights,
    spec: ExpertsSpec,
    *,
    engine: str = "auto",
    group: ProcessGroup | None = None,
    num_experts: int | None = None,
    transport: str = "auto",
) -> tuple[torch.Tensor, Context]:
    """y [T, H] in the spec's dtype, and what `backward` needs.

    With `group`, `num_experts` is the number of experts of all ranks together; this rank holds those that DTensor's
    ``Shard(0)`` gives it, stacked. Errors: ValueError or TypeError, which name the argument; with `group` on all ranks.
    RuntimeError where the communication fails.
    """
    operands = (x, ids, weights, *experts.lists)
    how = _how(operands, spec, engine, group, num_experts, transport)
    op = torch.ops.mok.experts if group is None else torch.ops.mok.experts_parallel
    with torch.no_grad():
        y, *saved = op(*operands, *how)
    return y, Context(operands, tuple(saved), how, group is not None)


def inference(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Weights,
    spec: ExpertsSpec,
    *,
    engine: str = "auto",
    group: ProcessGroup | None = None,
    num_experts: int | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """y [T, H], with nothing kept for a backward pass; arguments and errors as for `forward`."""
    operands = (x, ids, weights, *experts.lists)
    how = _how(operands, spec, engine, group, num_experts, transport)
    forward_mode.refuse("mok_compile.functional.inference", operands)
    op = torch.ops.mok.experts_infer if group is None else torch.ops.mok.experts_parallel_infer
    with torch.no_grad():
        return op(*operands, *how)


def backward(dy: torch.Tensor, context: Context, needs: Sequence[str] = OPERANDS) -> Gradients:
    """The gradients of the operands that `needs` names (of `OPERANDS`), for dy [T, H], that of y.

    With a group they are those of one process that has the tokens of all ranks and the sum of their losses; every rank
    calls it. ValueError for a name that is none of `OPERANDS`.
    """
    unknown = [name for name in needs if name not in OPERANDS]
    if unknown:
        raise ValueError(f"needs: {', '.join(unknown)}: not of {', '.join(OPERANDS)}")
    op = torch.ops.mok.experts_parallel_backward if context.parallel else torch.ops.mok.experts_backward
    x, ids, weights, *lists = context.operands
    tensors = {"x": [x], "weights": [weights], **dict(zip(OPERANDS[2:], lists, strict=True))}
    wanted = [name in needs and bool(tensors[name]) for name in OPERANDS]
    with torch.no_grad():
        flat = iter(op(dy, x, ids, weights, *lists, *context.saved, *context.how, wanted))
    found = {name: tuple(next(flat) for _ in tensors[name]) for name in OPERANDS if name in needs}
    return Gradients(**{name: t[0] if name in ("x", "weights") else t for name, t in found.items()})


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Weights,
    spec: ExpertsSpec,
    *,
    engine: str = "auto",
    group: ProcessGroup | None = None,
    num_experts: int | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """y [T, H] with autograd; arguments as for `forward`."""
    operands = (x, ids, weights, *experts.lists)
    how = _how(operands, spec, engine, group, num_experts, transport)
    op = torch.ops.mok.experts if group is None else torch.ops.mok.experts_parallel
    return op(*operands, *how)[0]


def schedule(ids: torch.Tensor, num_experts: int, group: ProcessGroup | None = None) -> reference.Schedule | Routes:
    """Where the slots of ids [T, K] go: what `forward` works out by itself, to look at the load of experts and ranks.

    Without `group` a `mok_compile.reference.Schedule`: ``order`` [S] int32, the slots sorted by expert, and ``offsets``
    [E] int32, the ends of the experts' rows. With it a `mok_compile.distributed.routes.Routes`: ``counts`` [ranks, E]
    on the host, ``sent`` and ``received`` by this rank; every rank calls it, and it waits for the device.
    """
    if group is None:
        return reference.schedule(ids, num_experts)
    from mok_compile.distributed.peers import Peers
    from mok_compile.distributed.routes import Routes
    from mok_compile.distributed.sharding import Sharding

    peers = Peers(group.group_name, group.size(), ids.device)
    peers.agree("schedule", f"schedule of {num_experts} experts", None, [])
    return Routes.exchange(ids, Sharding(num_experts, group.size()), peers)


def _how(
    operands: tuple,
    spec: ExpertsSpec,
    engine: str,
    group: ProcessGroup | None,
    num_experts: int | None,
    transport: str,
) -> tuple:
    """The arguments of the op behind its tensors."""
    x, ids, weights, _, down, *_ = operands
    if not down:
        raise ValueError("experts.down is empty")
    problem = Problem.of(x, ids, weights, down)
    if group is None:
        return spec.to_json(), engines.choose(spec, problem, engine).name
    from mok_compile.distributed.ops import call_of

    if num_experts is None:
        raise ValueError("num_experts, the number of experts of all ranks, is needed with a group")
    return call_of(spec, problem, engine, transport, group.group_name, group.size(), num_experts)
