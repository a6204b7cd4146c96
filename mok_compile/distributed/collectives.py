"""The transport of all process groups: all-to-all collectives, one row for each route, one phase after the other.

This is the meaning of ``mok::experts_parallel``, its test oracle, and what runs where no faster transport does. The
sizes of the messages are host numbers, so every call waits for the device once or twice; there is no capacity and no
dropped token.

The bits of one process: an expert gets the rows that it would get in one process over the tokens of all ranks, in the
same order; its outputs come back unrounded and unweighted, and the engine combines them here as it does its own.
"""

from __future__ import annotations

import torch

from mok_compile import engines, ops, reference
from mok_compile.distributed.peers import Peers
from mok_compile.distributed.routes import Routes
from mok_compile.distributed.transports import Call, Operands, Saved, row_spec, unknown_size
from mok_compile.engines import Problem
from mok_compile.grouped import empty_as


class Collectives:
    name = "collectives"

    def supports(self, call: Call, problem: Problem) -> str | None:
        return f"it has no options, got {call.options!r}" if call.options else None

    def saved(self, operands: Operands, call: Call) -> Saved:
        x, sharding = operands.x, call.sharding
        rows = unknown_size()
        columns = operands.down[0].shape[-1] * (2 if call.spec.gated else 1)
        plan = operands.ids.numel() + sharding.ranks * sharding.num_experts + rows
        return Saved(x.new_empty(rows, x.shape[1]), x.new_empty(rows, columns), x.new_empty(plan, dtype=torch.int32))

    def forward(self, operands: Operands, call: Call, *, save: bool) -> tuple[torch.Tensor, Saved | None]:
        x, weights, spec = operands.x, operands.weights, call.spec
        peers = Peers(call.group, call.sharding.ranks, x.device)
        peers.agree("dispatch", f"forward of {_describe(operands, call)}", _problem(operands, call, peers.rank), [])
        routes = Routes.exchange(operands.ids, call.sharding, peers)
        rows = _dispatch(x, routes, operands.ids.shape[1], peers)
        if spec.weight_on == "input":
            row_weights = _dispatch_weights(weights, routes, peers)
        else:
            row_weights = torch.ones(rows.shape[0], 1, dtype=weights.dtype, device=x.device)
        out, h, order = _experts(rows, row_weights, operands, routes, call, save)
        with peers.during("combine", str(routes)):
            back = peers.exchange(out, routes.received, routes.sent)
        engine = engines.combiner(call.engine)
        back = _padded(back, operands.ids.numel())
        y = engine.combine(back, routes.order, operands.ids, weights, call.sharding.num_experts, spec)
        if not save:
            return y, None
        plan = torch.cat([routes.order, routes.counts.reshape(-1).to(x.device, torch.int32), order])
        return y, Saved(rows, h, plan)

    def backward(
        self, dy: torch.Tensor, operands: Operands, saved: Saved, call: Call, needs: list[bool]
    ) -> list[torch.Tensor]:
        x, ids, weights = operands.x, operands.ids, operands.weights
        peers = Peers(call.group, call.sharding.ranks, x.device)
        described = f"backward of {_describe(operands, call)}"
        wanted = peers.agree("reverse combine", described, None, [int(n) for n in needs])
        need_x, need_weights = (any(numbers[i] for numbers in wanted) for i in range(2))
        slots = ids.numel()
        order, counts, local_order = saved.plan.split(
            [slots, call.sharding.ranks * call.sharding.num_experts, saved.rows.shape[0]]
        )
        routes = Routes(order, counts.cpu().long().view(call.sharding.ranks, -1), call.sharding, peers.rank)
        with peers.during("reverse combine", str(routes)):
            rows = dy.index_select(0, routes.slots // ids.shape[1]).to(x.dtype)
            dout = peers.exchange(rows, routes.sent, routes.received)
        row_weights = _dispatch_weights(weights, routes, peers)
        flat = _experts_backward(
            dout, row_weights, operands, saved, local_order, routes, call, [need_x, need_weights, *needs[2:]]
        )
        grads = []
        if need_x:
            with peers.during("reverse dispatch", str(routes)):
                dx = _padded(peers.exchange(flat.pop(0), routes.received, routes.sent), slots)
            if needs[0]:
                grads.append(reference.combine(dx, None, ids.shape, order.long(), x.dtype))
        if need_weights:
            with peers.during("reverse dispatch", str(routes)):
                dweights = peers.exchange(flat.pop(0).reshape(-1), routes.received, routes.sent)
            if needs[1]:
                grads.append(weights.new_zeros(slots).index_copy_(0, routes.slots, dweights).view(weights.shape))
        return [*grads, *flat]


def _dispatch(x: torch.Tensor, routes: Routes, k: int, peers: Peers) -> torch.Tensor:
    """[R, H]: the tokens of the routes to this rank."""
    with peers.during("dispatch", str(routes)):
        return peers.exchange(x.index_select(0, routes.slots // k), routes.sent, routes.received)


def _dispatch_weights(weights: torch.Tensor, routes: Routes, peers: Peers) -> torch.Tensor:
    """[R, 1]: the routing weights of the routes to this rank."""
    with peers.during("dispatch", str(routes)):
        return peers.exchange(weights.reshape(-1)[routes.slots], routes.sent, routes.received)[:, None]


def _experts(
    rows: torch.Tensor, weights: torch.Tensor, operands: Operands, routes: Routes, call: Call, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What this rank's experts make of `rows`, the pre-activations, and the order in which these are sorted."""
    engine = engines.get(call.engine)
    spec = row_spec(call.spec, engines.combiner(call.engine).row_dtype(rows.dtype))
    if operands.local_experts == 0:  # then nothing came
        columns = operands.down[0].shape[-1] * (2 if call.spec.gated else 1)
        empty = torch.empty(0, dtype=torch.int32, device=rows.device)
        return rows.new_empty(0, rows.shape[1], dtype=spec.dtype), rows.new_empty(0, columns), empty
    ids = routes.local_ids(rows.device)
    out, h, order, _ = engine.forward(rows, ids, weights, *operands.lists, spec, save=save)
    return out, h, order


def _experts_backward(
    dout: torch.Tensor,
    weights: torch.Tensor,
    operands: Operands,
    saved: Saved,
    order: torch.Tensor,
    routes: Routes,
    call: Call,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Gradients of `saved.rows`, `weights` and this rank's experts, only those that `needs` asks for."""
    if operands.local_experts == 0:
        groups = ([saved.rows], [weights], *operands.lists)
        return [empty_as(t) for group, need in zip(groups, needs, strict=True) if need for t in group]
    spec = row_spec(call.spec, saved.rows.dtype)
    ids, offsets = routes.local_ids(dout.device), routes.local_offsets(dout.device)
    given = (saved.rows, ids, weights, *operands.lists, saved.h, order, offsets)
    return engines.get(call.engine).backward(dout, *given, spec, needs)


def _padded(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """`rows` in sorted order, with zeros for the slots that have no route."""
    return torch.cat([rows, rows.new_zeros(slots - rows.shape[0], rows.shape[1])])


def _problem(operands: Operands, call: Call, rank: int) -> str | None:
    """Why this rank's arguments do not fit together, or None."""
    expected = call.sharding.size(rank)
    stacked = all(t.dim() == 3 for t in (*operands.up, *operands.down))
    if not operands.down or not stacked or operands.local_experts != expected:
        shapes = [tuple(t.shape) for t in (*operands.up, *operands.down)][:3]
        held = f"{expected} of the {call.sharding.num_experts} experts, stacked"
        return f"its weights must be those of {held}, got {shapes}"
    lists = operands.lists
    if expected == 0:  # the tokens are checked all the same
        lists = [[t.new_empty(1, *t.shape[1:]) for t in tensors] for tensors in lists]
    try:
        ops.check(operands.x, operands.ids, operands.weights, *lists, call.spec)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _describe(operands: Operands, call: Call) -> str:
    """What must be the same on all ranks, in words."""
    x, ids, weights = operands.x, operands.ids, operands.weights
    back = engines.combiner(call.engine).row_dtype(x.dtype)
    return (
        f"{call.sharding.num_experts} experts, x [T, {', '.join(map(str, x.shape[1:]))}] {x.dtype}, "
        f"ids [T, {', '.join(map(str, ids.shape[1:]))}], weights {weights.dtype}, rows of {back} back, {call.spec}"
    )


transport = Collectives()
