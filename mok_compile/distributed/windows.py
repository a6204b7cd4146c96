"""Windows: memory of every rank of a group that the kernels of all its ranks read and write.

A window is made once for all blocks of one shape, by all ranks together, and holds one exchange at a time (one pass of
one block, or a turn of it, see csrc/cuda/sm90/exchange.h). Every rank must run the passes of a window in the same
order; streams wait for each other here. Kernels cannot raise: a fault is written into memory of the host and raised at
the next call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from mok_compile.distributed.peers import Peers
from mok_compile.engines.sm90 import MAX_SLOTS

# In the order of `Fault` in csrc/cuda/sm90/exchange.h, from 1 on: (phase, what happened).
FAULTS = (
    (
        "dispatch",
        "rank {peer} did not publish its tokens within {timeout:g} s: it has stopped, or does not call the block",
    ),
    ("combine", "rank {peer} did not send its results within {timeout:g} s: it has stopped, or is stuck"),
    (
        "dispatch",
        "rank {peer} has {have} tokens, and there is room for {room}: say how many there can be with "
        'transport="peer_memory max_tokens=..."',
    ),
    (
        "dispatch",
        "{have} rows came to rank {rank}, and there is room for {room}: raise it, as a multiple of an "
        'even share, with transport="peer_memory room=..."',
    ),
    ("experts", "a wait inside the kernels of rank {rank} took too long (place {have}): please report this"),
    ("dispatch", "rank {peer} cannot take part: the error that it raised says why"),
    (
        "dispatch",
        "rank {peer} runs another block or another pass than rank {rank}: every rank has to run the forward and the "
        "backward of the same blocks in the same order",
    ),
)
TOKENS, REFUSED = 3, 6  # of these, what a host finds by itself
STEP = 128  # what numbers of tokens are rounded up to


@dataclass(frozen=True)
class Shape:
    """What a window is for: exchanges of a group's ranks, on one device, of rows of `hidden` numbers of 16 bits and
    `top_k` slots per token; with `exact`, results come back one row for each route. `ring`: bytes for the tokens that
    come from other ranks, 0 for as many as there can be. The group itself, not its name: a new group of that name may
    have its ranks elsewhere."""

    group: dist.ProcessGroup
    device: torch.device
    hidden: int
    top_k: int
    exact: bool
    ring: int = 0

    def turns(self, tokens: int, ranks: int) -> tuple[int, int]:
        """How a pass of up to `tokens` on each of the `ranks` is cut: tokens of a rank in a turn, a multiple of `STEP`,
        and turns. ValueError if the ring has no room for that many of each other rank."""
        step = 2 * self.hidden * (ranks - 1) * STEP  # bytes
        if 0 < self.ring < step:
            raise ValueError(
                f"mok::experts_parallel: a ring of {self.ring / 1e6:g} MB has no room for {STEP} tokens of each of the "
                f"{ranks - 1} other ranks: it takes at least {-(-step // 10**6)} MB"
            )
        steps = max(1, -(-tokens // STEP))
        turns = -(-steps // (self.ring // step)) if self.ring and step else 1
        return -(-steps // turns) * STEP, turns


@dataclass
class Windows:
    """The windows of all ranks, as this rank sees them. `capacity`: tokens that a rank can have in one of a pass'
    `turns`; `sms`: how many SMs read from other ranks, in forward and in backward."""

    shape: Shape
    rank: int
    ranks: int
    capacity: int
    turns: int
    timeout: float
    sms: tuple[int, int]
    own: torch.Tensor
    addresses: torch.Tensor
    state: torch.Tensor
    report: torch.Tensor
    last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = field(default=None, repr=False)
    captured: bool = False

    @staticmethod
    def make(shape: Shape, peers: Peers, tokens: int, timeout: float, sms: tuple[int, int]) -> Windows:
        """By all ranks together, for up to `tokens` on each; waits for the device. RuntimeError where a GPU cannot
        reach another one's memory."""
        capacity, turns = shape.turns(tokens, peers.ranks)
        ops, device, slots = torch.ops.mok_sm90, shape.device, peers.ranks * capacity * shape.top_k
        if slots > MAX_SLOTS:
            raise ValueError(
                f"mok::experts_parallel: {peers.ranks} ranks of up to {capacity} tokens with {shape.top_k} experts "
                f"each have {slots} routes, and peer memory takes {MAX_SLOTS} at a time: a ring of fewer megabytes "
                'cuts them into turns (transport="peer_memory ring=..."), transport="collectives" takes any number'
            )
        size = ops.window_bytes(peers.ranks, capacity, shape.hidden, shape.top_k, shape.exact, turns)
        with torch.cuda.device(device), peers.during("setting up", f"sharing {size} bytes of GPU memory"):
            # Not symmetric_memory.empty: that cuts a pool, and says nothing of where in it the tensor begins.
            own = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
            handle = symmetric_memory.rendezvous(own, peers.group)
            if handle.buffer_ptrs[peers.rank] != own.data_ptr():
                raise RuntimeError("torch put the shared memory elsewhere than it says")
            own.zero_()
            torch.cuda.synchronize(device)
            peers.gather(torch.zeros(1, device=device)).cpu()  # nobody starts before all are zero
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        state = torch.zeros(ops.group_state(), dtype=torch.int32, device=device)
        report = torch.zeros(ops.fault_numbers(), dtype=torch.int32, pin_memory=True)
        return Windows(shape, peers.rank, peers.ranks, capacity, turns, timeout, sms, own, addresses, state, report)

    @property
    def numbers(self) -> list[int]:
        """For the kernels, see `group_of` in csrc/cuda/tensors.h."""
        return [*self._what, int(self.timeout * 1e9), self._own, *self.sms, self.turns]

    @functools.cached_property
    def _what(self) -> tuple[int, ...]:
        shape, tensors = self.shape, (self.addresses, self.state, self.report)
        sizes = (self.rank, self.ranks, self.capacity, shape.hidden, shape.top_k, int(shape.exact))
        return *sizes, *(t.data_ptr() for t in tensors)

    @functools.cached_property
    def _own(self) -> int:
        return self.own.data_ptr()

    @property
    def tokens(self) -> int:
        """Of all ranks in a turn, as far as there is room."""
        return self.ranks * self.capacity

    @property
    def most(self) -> int:
        """Tokens that a rank can have."""
        return self.turns * self.capacity

    def fault(self) -> str | None:
        """What the kernels of this rank have reported so far, which is what those of all ranks report."""
        kind, rank, peer, exchange, have, room = self.report.tolist()
        if kind == 0:
            return None
        phase, what = FAULTS[kind - 1]
        said = what.format(rank=rank, peer=peer, have=have, room=room, timeout=self.timeout)
        return f"mok::experts_parallel, {phase}, noticed by rank {rank} of {self.ranks} in exchange {exchange}: {said}"

    @contextlib.contextmanager
    def exchange(self) -> Iterator[tuple[list[int], int]]:
        """Those of one pass, on the current stream of the windows' device, which becomes the current one; gives
        `numbers` and the stream. RuntimeError for a fault of an earlier one, whose results have NaNs."""
        said = self.fault()
        if said is not None:
            release(self.shape)
            raise RuntimeError(said)
        with torch.cuda.device(self.shape.device):
            stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
            self.captured |= capturing
            if self.last is not None and self.last[0] != stream and not capturing:
                stream.wait_event(self.last[1])
            try:
                yield self.numbers, stream.cuda_stream
            except BaseException:
                self.refuse(REFUSED)
                raise
            if not capturing:
                event = self.last[1] if self.last is not None else torch.cuda.Event()
                event.record(stream)
                self.last = stream, event

    def refuse(self, fault: int, have: int = 0, room: int = 0) -> None:
        """Lets the other ranks know that this one does not go on: they need not wait for it. Ends the windows."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.shape.device):  # there is an error to be raised
            stream = torch.cuda.current_stream().cuda_stream
            torch.ops.mok_sm90.fail(fault, have, room, self.numbers, stream)
        release(self.shape)


_windows: dict[Shape, Windows] = {}
# Graphs hold the addresses of the windows that they were captured with: their replay must find memory there.
_captured: list[Windows] = []


def windows_for(
    shape: Shape, peers: Peers, tokens: int, describe: Callable[[], str], problem: Callable[[], str | None], options
) -> Windows:
    """The windows of `shape`. The first call makes them: then every rank must call, with any number of `tokens`; what
    `describe` says must be the same on all, and none may have a `problem`. ValueError, on all ranks, if the ranks do
    not fit together."""
    found = _windows.get(shape)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "mok::experts_parallel: the first call of a block shares memory between the ranks, which cannot be "
                "captured in a CUDA graph; run the block once before"
            )
        said = peers.agree("setting up", describe(), problem(), [max(tokens, options.max_tokens or 0)])
        sms = (options.sms, options.backward_sms)
        found = _windows[shape] = Windows.make(shape, peers, max(most for most, *_ in said), options.timeout, sms)
    elif tokens > found.most:
        found.refuse(TOKENS, tokens, found.most)
        raise ValueError(
            f"mok::experts_parallel: rank {found.rank} has {tokens} tokens, and there is room for {found.most}, as "
            'many as the largest rank had in the first call: set transport="peer_memory max_tokens=..."'
        )
    # This call's: blocks that share a window may differ in them.
    found.sms, found.timeout = (options.sms, options.backward_sms), options.timeout
    return found


def release(shape: Shape | None = None) -> None:
    """Forgets the windows of `shape`, or all: the next call of a block makes new ones, together with all ranks. Call it
    on all ranks, between steps. Waits for the device, whose kernels may still use them. Windows that CUDA graphs were
    captured with stay in memory; after a fault a replay gives NaN."""
    for found in list(_windows) if shape is None else [shape]:
        windows = _windows.pop(found, None)
        if windows is None:
            continue
        if windows.captured or torch.cuda.is_current_stream_capturing():
            _captured.append(windows)
        else:
            with contextlib.suppress(RuntimeError):  # an error of the device shows wherever it is used next
                torch.cuda.synchronize(found.device)


def faults() -> list[str]:
    """What the kernels of this process have reported, without waiting for the device."""
    return [said for windows in _windows.values() if (said := windows.fault()) is not None]
