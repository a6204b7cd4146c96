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

MAX_RANKS = 72  # kMaxRanks in csrc/cuda/sm90/exchange.h


@dataclass(frozen=True)
class Options:
    """What can be set, also as text: ``"peer_memory room=1.5 exact=1"``.

    room: rows that a rank can take from all ranks, as a multiple of an even share (more of them are an error on all
    ranks, nothing is dropped). max_tokens: tokens that a rank can have; without it, as many as the largest rank has in
    the first call. timeout: seconds that a rank waits for another. exact: every route comes back on its own, for the
    bits of one process. ring: megabytes for the tokens that come from other ranks, 0 for as many as there are; where
    that does not suffice, a pass is cut into turns, and backward reads again what forward has read. sms, backward_sms:
    how many of the GPU's processors read from other ranks before they take part in the products; 0 for what
    ``python -m mok_compile tune`` has stored for the shape, else 16. None of these changes the result, except that
    `exact` changes how it is rounded, and gradients of weights are rounded anew in each turn.
    """

    room: float = 2.0
    max_tokens: int = 0
    timeout: float = 300.0
    exact: bool = False
    ring: int = 0
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
        if not 0 < found.room < 1e6 or not 0 < found.timeout < 1e6:
            raise ValueError(f"peer_memory: room and timeout are positive and below a million: {text!r}")
        if found.max_tokens < 0 or not 0 <= found.ring < 1e6:
            raise ValueError(f"peer_memory: max_tokens and ring are not negative, ring is below a million: {text!r}")
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
        sizes = (x.shape[-1], inner, call.sharding.num_experts, ids.shape[-1])
        return _tuned(self, tuned.best_for(x.device, call.sharding.ranks, *sizes, x.dtype))


@functools.lru_cache
def _tuned(options: Options, best: tuned.Best) -> Options:
    sms, backward_sms = options.sms or best.sms, options.backward_sms or best.backward_sms
    return replace(options, sms=sms, backward_sms=backward_sms)


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
        windows, how = _ready(operands, call, "forward")
        with windows.exchange() as (group, stream):
            arguments = (*_tensors(operands), how.activation, save, how.numbers, group, stream)
            y, *saved = _launched(torch.ops.mok_sm90.forward_parallel, arguments, operands, call, windows)
        return y, Saved(*saved) if save else None

    def backward(
        self, dy: torch.Tensor, operands: Operands, saved: Saved, call: Call, needs: list[bool]
    ) -> list[torch.Tensor]:
        windows, how = _ready(operands, call, "backward")
        with windows.exchange() as (group, stream):
            if saved.plan.numel() != how.kept:
                raise RuntimeError(
                    "mok::experts_parallel: between this block's forward and backward pass its windows were made anew"
                )
            dy = sm90.aligned(dy.to(operands.x.dtype))
            kept = (saved.rows, saved.h, saved.plan)
            arguments = (dy, *_tensors(operands), how.activation, *kept, needs, how.numbers, group, stream)
            return _launched(torch.ops.mok_sm90.backward_parallel, arguments, operands, call, windows)


@dataclass(frozen=True)
class _How:
    """A call as the kernels take it, beside its tensors: see `Exchange` in csrc/cuda/exchange_ops.h. `kept`: ints that
    forward keeps of the schedule."""

    activation: list[float]
    numbers: list[int]
    kept: int


def _ready(operands: Operands, call: Call, phase: str) -> tuple[Windows, _How]:
    """The windows of a call, which the first call makes, and how the kernels take it."""
    x, ids = operands.x, operands.ids
    options, (hidden, top_k) = Options.parse(call.options).settled(operands, call), (x.shape[-1], ids.shape[-1])
    peers = Peers(call.group, call.sharding.ranks, x.device)
    windows = windows_for(
        Shape(peers.group, x.device, hidden, top_k, options.exact, options.ring * 1_000_000),
        peers, x.shape[0], lambda: _describe(operands, call), lambda: _problem(operands, call, peers.rank), options,
    )  # fmt: skip
    key = (phase, hidden, top_k, x.dtype, windows.capacity, windows.turns, windows.rank)
    how = call.known.get(key)
    if how is None:
        how = call.known[key] = _how(operands, call, phase, windows, options)
    return windows, how


def _how(operands: Operands, call: Call, phase: str, windows: Windows, options: Options) -> _How:
    sharding, rank, top_k = call.sharding, windows.rank, operands.ids.shape[-1]
    slots, local = windows.tokens * top_k, sharding.size(rank)
    room = min(slots, int(options.room * windows.capacity * top_k) + 127)
    layout, activation = sm90.numbers_of(call.spec)
    numbers = [
        *(sharding.num_experts, sharding.per_rank, sharding.first(rank), local),
        *(max(128, room // 128 * 128), _number(operands, call, phase), layout, sm90.NUMBERS[call.spec.dtype]),
    ]
    return _How(activation, numbers, windows.turns * (-(-(3 * slots + local) // 4) * 4))


def _tensors(operands: Operands) -> tuple:
    """The tensors of a call as the kernels take them, from x to down_bias; what is wrong with them stays so."""
    ids = operands.ids
    slots = sm90.ids_of(ids) if ids.dtype in ops.IDS else ids, operands.weights.contiguous()
    up_bias = [sm90.aligned(b) for b in operands.up_bias]
    down_bias = sm90.aligned(operands.down_bias[0]) if operands.down_bias else None
    return sm90.aligned(operands.x), *slots, operands.up, operands.down[0], up_bias, down_bias


def _launched(op, arguments: tuple, operands: Operands, call: Call, windows: Windows) -> list[torch.Tensor]:
    """What `op` gives. ValueError if the arguments do not fit: the op only sees that, which costs next to nothing."""
    try:
        return sm90.launched(op, *arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        problem = _problem(operands, call, windows.rank)
        if problem is None:
            raise
        raise ValueError(f"mok::experts_parallel on rank {windows.rank} of {windows.ranks}: {problem}") from None


def _number(operands: Operands, call: Call, phase: str) -> int:
    """What ranks must have in common in an exchange, as a number."""
    facts = (phase, operands.x.shape[-1], operands.ids.shape[-1], operands.x.dtype, replace(call, options="", group=""))
    return zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF


def _problem(operands: Operands, call: Call, rank: int) -> str | None:
    """Why this rank's arguments cannot be used, or None."""
    x, ids, weights, up, down = operands.x, operands.ids, operands.weights, operands.up, operands.down
    expected = call.sharding.size(rank)
    if operands.local_experts != expected:
        return f"its weights must be those of {expected} experts, got {operands.local_experts}"
    if ids.dim() == 2 and ids.shape[1] > sm90.MAX_TOP_K:
        return f'it takes at most {sm90.MAX_TOP_K} slots per token; transport="collectives" takes more'
    lists = operands.lists
    if expected == 0:  # the tokens are checked all the same
        lists = tuple([t.new_empty(1, *t.shape[1:]) for t in tensors] for tensors in lists)
    try:
        ops.check(x, ids, weights, *lists, call.spec)
    except (TypeError, ValueError) as error:
        return str(error)
    found = sm90.storage(up, down[0]) if expected else sm90.Storage(False, [])
    return f'{found}; transport="collectives" takes them as they are' if isinstance(found, str) else None


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
