"""The transport of GPUs that reach each other's memory (NVLink): no host synchronisation, each token once per rank.

The kernels of the sm90 engine read the tokens that they need from the other ranks' windows, and write back one row per
token and rank: the sum over the token's experts there, in slot order, rounded once; the token's rank adds these up in
order of the ranks. With `exact` every route comes back on its own instead and is combined as in one process, to the
same bits. See csrc/cuda/sm90/exchange.h for the steps and `Options` for what can be set.
"""

from __future__ import annotations

import functools
import socket
import zlib
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist

from mok_compile import build, ops
from mok_compile.distributed import tuned
from mok_compile.distributed.peers import Peers
from mok_compile.distributed.transports import Call, Operands, Saved, unknown_size
from mok_compile.distributed.windows import Shape, Windows, windows_for
from mok_compile.engines import Problem, get, sm90
from mok_compile.grouped import empty_as

MAX_RANKS = 72  # kMaxRanks in csrc/cuda/sm90/exchange.h


@dataclass(frozen=True)
class Options:
    """What can be set, also as text: ``"peer_memory room=1.5 exact=1"``.

    room: rows that a rank can take from all ranks, as a multiple of an even share (more of them are an error on all
    ranks, nothing is dropped). max_tokens: tokens that a rank can have; without it, as many as the largest rank has in
    the first call. timeout: seconds that a rank waits for another. exact: every route comes back on its own, for the
    bits of one process. sms, backward_sms: how many of the GPU's processors read from other ranks before they take part
    in the products; 0 for what ``python -m mok_compile tune`` has stored for the shape, else 16. None of these changes
    the result, except that `exact` changes how it is rounded.
    """

    room: float = 2.0
    max_tokens: int = 0
    timeout: float = 300.0
    exact: bool = False
    sms: int = 0
    backward_sms: int = 0

    @staticmethod
    @functools.lru_cache
    def parse(text: str) -> Options:
        """From the words after the transport's name. ValueError for what is no option or no value of it."""
        kinds = {f.name: type(f.default) for f in fields(Options)}
        given = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if name not in kinds or not equals:
                raise ValueError(f"peer_memory: {word!r} is none of {', '.join(f'{n}=...' for n in kinds)}")
            try:
                given[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
            except ValueError as error:
                raise ValueError(f"peer_memory: {name}={value!r}: {error}") from None
        found = Options(**given)
        if not 0 < found.room < 1e6 or not 0 < found.timeout < 1e6 or found.max_tokens < 0:
            raise ValueError(
                f"peer_memory: room and timeout are positive and below a million, max_tokens not negative: {text!r}"
            )
        if not all(0 <= n <= tuned.MAX_SMS for n in (found.sms, found.backward_sms)):
            raise ValueError(
                f"peer_memory: sms and backward_sms are from 1 to {tuned.MAX_SMS}, or 0 for what is tuned: {text!r}"
            )
        return found

    def settled(self, operands: Operands, call: Call) -> Options:
        """With `sms` and `backward_sms` as stored for the call's shape where they are 0. Ranks need not agree on them:
        they only say how many CTAs of this rank read, which no other rank sees and no result depends on."""
        if self.sms and self.backward_sms:
            return self
        x, ids, inner = operands.x, operands.ids, operands.down[0].shape[-1]
        sizes = (x.shape[1], inner, call.sharding.num_experts, ids.shape[1])
        best = tuned.best_for(x.device, call.sharding.ranks, *sizes, x.dtype)
        return replace(self, sms=self.sms or best.sms, backward_sms=self.backward_sms or best.backward_sms)


class PeerMemory:
    name = "peer_memory"

    def supports(self, call: Call, problem: Problem) -> str | None:
        if problem.device.type != "cuda" or problem.dtype not in sm90.DTYPES:
            return f"it brings bfloat16 and float16 on GPUs, not {problem.dtype} on {problem.device.type}"
        # First, since all ranks take part in it: also one whose kernels were not built, and whose engine is another.
        unreachable = _reachable(Peers(call.group, call.sharding.ranks, problem.device))
        if unreachable is not None:
            return unreachable
        if call.engine != "sm90":
            return f"it is part of the engine sm90, and the experts run on {call.engine}"
        if call.spec.weight_on != "output":
            return "it weights the experts' outputs, and these experts' inputs are weighted"
        if call.sharding.ranks > MAX_RANKS:
            return f"it connects at most {MAX_RANKS} ranks"
        return None

    def saved(self, operands: Operands, call: Call) -> Saved:
        x = operands.x
        columns = operands.down[0].shape[-1] * (2 if call.spec.gated else 1)
        rows, h, plan = unknown_size(), unknown_size(), unknown_size()
        return Saved(x.new_empty(rows, x.shape[1]), x.new_empty(h, columns), x.new_empty(plan, dtype=torch.int32))

    def forward(self, operands: Operands, call: Call, *, save: bool) -> tuple[torch.Tensor, Saved | None]:
        block = _Block.of(operands, call)
        with block.windows.exchange() as group, torch.cuda.device(operands.x.device):
            return self._forward(block, operands, call, group, save)

    def _forward(self, block: _Block, operands: Operands, call: Call, group: list[int], save: bool):
        x, ids, weights = sm90.aligned(operands.x), sm90.ids_of(operands.ids), operands.weights.contiguous()
        tokens, top_k = block.windows.tokens, ids.shape[1]
        rows = x.new_empty(tokens - block.windows.capacity, x.shape[1])  # of the other ranks
        h = x.new_empty(block.room, block.columns) if save else None
        order, offsets = sm90.int32(x, tokens * top_k), sm90.int32(x, block.experts)
        all_ids = order.new_empty(tokens, top_k)
        all_weights = x.new_empty(tokens, top_k, dtype=torch.float32)
        y = x.new_empty(x.shape, dtype=call.spec.dtype)
        stream, kernels, number = sm90.stream_of(x), torch.ops.mok_sm90, _number(operands, call, "forward")
        kernels.publish(x, ids, weights, top_k, call.sharding.num_experts, number, group, stream)
        if block.experts:
            plan = sm90.int32(x, kernels.plan_scratch(tokens, block.experts, top_k))
            counts = sm90.int32(x, kernels.sort_scratch(tokens, block.experts, top_k))
            a, out = sm90.empty_panels(x, block.room, block.inner), x.new_empty(block.room, x.shape[1])
            kernels.forward_parallel(
                rows, all_ids, all_weights, operands.up, operands.down[0], block.up_bias, block.down_bias,
                block.layout, block.transposed, block.activation, h, order, offsets, plan, counts, a, out, x,
                call.sharding.first(block.windows.rank), group, stream,
            )  # fmt: skip
            del a, out
        else:
            kernels.finish(all_ids, None, None, 0, group, stream)
        _sum(block, call, ids, weights, y, None, group, stream)
        if not save:
            return y, None
        plan = torch.cat([order, offsets, all_ids.view(-1), all_weights.view(-1).view(torch.int32)])
        return y, Saved(rows, h, plan)

    def backward(
        self, dy: torch.Tensor, operands: Operands, saved: Saved, call: Call, needs: list[bool]
    ) -> list[torch.Tensor]:
        block = _Block.of(operands, call)
        with block.windows.exchange() as group, torch.cuda.device(operands.x.device):
            return self._backward(block, dy, operands, saved, call, needs, group)

    def _backward(
        self,
        block: _Block,
        dy: torch.Tensor,
        operands: Operands,
        saved: Saved,
        call: Call,
        needs: list[bool],
        group: list[int],
    ) -> list[torch.Tensor]:
        x, ids, windows = sm90.aligned(operands.x), sm90.ids_of(operands.ids), block.windows
        need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needs
        tokens, top_k = windows.tokens, ids.shape[1]
        slots = tokens * top_k
        if saved.plan.numel() != 3 * slots + block.experts:
            raise RuntimeError(
                "mok::experts_parallel: between this block's forward and backward pass its windows were made anew"
            )
        order, offsets, all_ids, all_weights = saved.plan.split([slots, block.experts, slots, slots])
        all_ids, all_weights = all_ids.view(tokens, top_k), all_weights.view(torch.float32).view(tokens, top_k)
        dy = sm90.aligned(dy.to(x.dtype))
        other_dy = torch.empty_like(saved.rows)
        dx = empty_as(operands.x).contiguous() if need_x else None
        dweights = torch.empty(ids.shape, dtype=operands.weights.dtype, device=x.device) if need_weights else None
        up_grads = [empty_as(w) for w in operands.up] if need_up else []
        down_grads = [empty_as(w) for w in operands.down] if need_down else []
        up_bias_grads = [b.new_empty(b.shape) for b in operands.up_bias] if need_up_bias else []
        down_bias_grads = [b.new_empty(b.shape) for b in operands.down_bias] if need_down_bias else []
        stream, kernels, number = sm90.stream_of(x), torch.ops.mok_sm90, _number(operands, call, "backward")
        kernels.publish(dy, None, None, top_k, call.sharding.num_experts, number, group, stream)
        # What the other ranks need is not known here: gradients of tokens and routing weights are always sent.
        if block.experts:
            plan = sm90.int32(x, kernels.plan_scratch(tokens, block.experts, top_k))
            dh = sm90.empty_dh(x, block.room, block.inner, call.spec)
            score = x.new_empty(kernels.score_rows(block.inner), slots, dtype=torch.float32)
            scores = x.new_empty(tokens, top_k, dtype=torch.float32)
            size = sm90.scratch_size(block.room, block.hidden, block.inner)
            scratch = up_grads[0] if up_grads and up_grads[0].numel() >= size else x.new_empty(size)
            alone = block.down_bias is None
            kernels.backward_parallel(
                other_dy, saved.rows, all_ids, all_weights, operands.up, operands.down[0],
                block.layout, block.transposed, block.activation, saved.h, order, offsets, plan, dh, scratch, score,
                scores, up_grads, down_grads[0] if need_down else None, up_bias_grads,
                down_bias_grads[0] if need_down_bias else None, dy, x, alone, group, stream,
            )  # fmt: skip
            del scratch
            if not alone:
                first = windows.rank * windows.capacity
                missing = dy.new_zeros(windows.capacity - dy.shape[0], dy.shape[1])
                all_dy = torch.cat([other_dy[:first], dy, missing, other_dy[first:]])
                scores += sm90.bias_score(all_dy, all_ids, block.down_bias)
                kernels.finish(all_ids, scores, plan, block.room, group, stream)
        else:
            kernels.finish(all_ids, None, None, 0, group, stream)
        _sum(block, call, ids, None, dx, dweights, group, stream)
        of_experts = [*up_grads, *down_grads, *up_bias_grads, *down_bias_grads]
        _poison(of_experts, windows)
        return [*(g for g in (dx, dweights) if g is not None), *of_experts]


@dataclass(frozen=True)
class _Block:
    """A call as the kernels take it. `room`: sorted rows that there is memory for; `columns`: those of h."""

    windows: Windows
    experts: int
    hidden: int
    inner: int
    columns: int
    room: int
    half: bool
    layout: int
    transposed: bool
    activation: list[float]
    up_bias: list[torch.Tensor]
    down_bias: torch.Tensor | None

    @staticmethod
    def of(operands: Operands, call: Call) -> _Block:
        x, ids, down = operands.x, operands.ids, operands.down
        options, sharding, spec = Options.parse(call.options).settled(operands, call), call.sharding, call.spec
        peers = Peers(call.group, sharding.ranks, x.device)
        problem, transposed = _problem(operands, call, peers.rank)
        shape = Shape(peers.group, x.device, x.shape[-1], ids.shape[-1], options.exact)
        windows = windows_for(shape, peers, x.shape[0], lambda: _describe(operands, call), problem, options)
        experts, hidden, inner = down[0].shape
        room = min(windows.tokens * ids.shape[1], int(options.room * windows.capacity * ids.shape[1]) + 127)
        layout, activation = sm90.numbers_of(spec)
        biases = [sm90.aligned(b) for b in operands.up_bias]
        down_bias = sm90.aligned(operands.down_bias[0]) if operands.down_bias else None
        columns = 2 * inner if spec.gated else inner
        return _Block(
            windows, experts, hidden, inner, columns, max(128, room // 128 * 128), x.dtype == torch.float16,
            layout, transposed, activation, biases, down_bias,
        )  # fmt: skip


def _number(operands: Operands, call: Call, phase: str) -> int:
    """What ranks must have in common in an exchange, as a number."""
    return _hash(
        phase, operands.x.shape[1], operands.ids.shape[1], operands.x.dtype, replace(call, options="", group="")
    )


@functools.lru_cache(maxsize=1024)
def _hash(*facts: object) -> int:
    return zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF


def _poison(grads: list[torch.Tensor], windows: Windows) -> None:
    """A NaN into each gradient of the experts if this rank has seen a fault: they were made from what was not there.
    One element, since it is for the optimiser's and the reader's notice, and passes over all weights cost time."""
    failed = torch.where(windows.state[1] != 0, float("nan"), 0.0)
    for grad in grads:
        if grad.numel():
            first = grad[(0,) * grad.dim()]
            first.add_(failed.to(grad.dtype))


def _sum(block: _Block, call: Call, ids, weights, y, dweights, group: list[int], stream: int) -> None:
    """Waits, on the device, for all ranks and fills what is given of y [T, H] and dweights [T, K]."""
    windows, exact = block.windows, block.windows.shape.exact
    position = torch.empty(ids.shape, dtype=torch.int32, device=ids.device) if exact and y is not None else None
    sharding = call.sharding
    torch.ops.mok_sm90.sum(
        ids, weights if exact else None, windows.shape.hidden, sharding.num_experts, sharding.per_rank, block.half,
        y, dweights, position, windows.own.data_ptr(), group, stream,
    )  # fmt: skip


def _problem(operands: Operands, call: Call, rank: int) -> tuple[str | None, bool]:
    """Why this rank's arguments cannot be used, or None; whether its weights are stored as [E, in, out]."""
    x, ids, weights, up, down = operands.x, operands.ids, operands.weights, operands.up, operands.down
    expected = call.sharding.size(rank)
    if operands.local_experts != expected:
        return f"its weights must be those of {expected} experts, got {operands.local_experts}", False
    if ids.dim() == 2 and ids.shape[1] > sm90.MAX_TOP_K:
        return f'it takes at most {sm90.MAX_TOP_K} slots per token; transport="collectives" takes more', False
    lists = operands.lists
    if expected == 0:  # the tokens are checked all the same
        lists = tuple([t.new_empty(1, *t.shape[1:]) for t in tensors] for tensors in lists)
    try:
        ops.check(x, ids, weights, *lists, call.spec)
    except (TypeError, ValueError) as error:
        return str(error), False
    found = sm90.storage(up, down[0]) if expected else sm90.Storage(False, [])
    if isinstance(found, str):
        return f'{found}; transport="collectives" takes them as they are', False
    return None, found.transposed


def _describe(operands: Operands, call: Call) -> str:
    x, ids = operands.x, operands.ids
    return (
        f"{call.sharding.num_experts} experts, x [T, {', '.join(map(str, x.shape[1:]))}] {x.dtype}, "
        f"ids [T, {', '.join(map(str, ids.shape[1:]))}], {call.options or 'no options'}, {call.spec}"
    )


_answers: dict[dist.ProcessGroup, str | None] = {}


def _reachable(peers: Peers) -> str | None:
    """Why the GPUs of a group's ranks cannot reach each other's memory, the same on all ranks, or None. Asked once
    for a group, by all its ranks."""
    if peers.group not in _answers:
        _answers[peers.group] = _ask(peers)
    return _answers[peers.group]


def _ask(peers: Peers) -> str | None:
    library = 0
    if get("sm90").usable() is None and build.failure("sm90") is None:
        library = zlib.crc32(build.target("sm90").source_hash().encode())
    host = zlib.crc32(socket.gethostname().encode())
    said = peers.gather(torch.tensor([host, library], dtype=torch.int64, device=peers.device)).tolist()
    if any(lib == 0 for _, lib in said):
        return "a rank has no kernels of the engine sm90"
    if len({lib for _, lib in said}) != 1:
        return "the ranks have kernels of different versions"
    if len({where for where, _ in said}) != 1:
        return "the ranks are on different machines"
    return None


transport = PeerMemory()
