"""Measuring a block over the ranks of a group with one setting after the other, and which of them is the best.

`sweep` runs on every rank. Settings are numbers of SMs that read from other ranks; the forward pass only depends on the
one, the backward pass on the other, so both are measured with the same number and chosen on their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mok_compile import functional
from mok_compile.distributed import windows
from mok_compile.distributed.sharding import Sharding
from mok_compile.distributed.tuned import MAX_SMS, Best
from mok_compile.spec import ExpertsSpec

GRID = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
ALIKE = 0.01  # of the times; what differs by less counts as equal
MEASURED = 0.02  # seconds that a measurement takes at least
MOST_CALLS = 50
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Job:
    """A block (H, I, E of all ranks, K), the numbers of tokens that each rank has, and what is measured on it:
    `transport` with each of `sms` in its place, in `rounds` turns, for `budget` seconds at most beyond the first."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    dtype: str = "bfloat16"
    sms: tuple[int, ...] = GRID
    rounds: int = 5
    budget: float = 60.0
    transport: str = "peer_memory sms={0} backward_sms={0}"
    engine: str = "auto"
    device: str = "cuda"

    @property
    def spec(self) -> ExpertsSpec:
        """SwiGLU experts: what they compute hardly matters here."""
        return ExpertsSpec("silu(gate) * up", "concat", self.dtype)


@dataclass(frozen=True)
class Times:
    """Milliseconds of a pass on the slowest rank, in the best round."""

    tokens: int
    sms: int
    forward: float
    backward: float


class Differs(RuntimeError):
    """A setting has changed bits."""


def grid(processors: int) -> tuple[int, ...]:
    """The settings for a GPU of so many SMs."""
    return tuple(n for n in GRID if n <= min(MAX_SMS, processors)) or (1,)


def choose(times: Sequence[Times]) -> Best:
    """For all numbers of tokens together: the smallest geometric mean of what a pass takes, relative to the fastest one
    with as many tokens. Of settings that are `ALIKE` the one of fewest SMs: the others multiply from the start."""
    tokens = tuple(sorted({t.tokens for t in times}))

    def best(what: str) -> int:
        costs: dict[int, float] = {}
        for count in tokens:
            found = {t.sms: getattr(t, what) for t in times if t.tokens == count}
            for sms, ms in found.items():
                costs[sms] = costs.get(sms, 0.0) + math.log(ms / min(found.values())) / len(tokens)
        return min(sms for sms, cost in costs.items() if cost <= min(costs.values()) + math.log1p(ALIKE))

    return Best(best("forward"), best("backward"), tokens)


def sweep(job: Job, progress: Progress = lambda *a: None) -> list[Times]:
    """On every rank of the default process group, with the same `job`; all return the same. Differs, on all ranks, if
    outputs or gradients of a rank depend on the setting."""
    results, settings = [], len(job.sms)
    total = len(job.tokens) * (job.rounds + 1) * settings
    for place, tokens in enumerate(job.tokens):
        windows.release()  # made for the largest number of tokens of the first call
        block = _Block(job, tokens)
        allowed, start = job.budget / len(job.tokens), time.perf_counter()
        first, found, last = None, {sms: Times(tokens, sms, math.inf, math.inf) for sms in job.sms}, 0.0
        for turn in range(job.rounds + 1):  # the first one warms up
            begin = time.perf_counter()
            if turn > 1 and _slowest(block.device, begin - start + last) > allowed:
                break
            for i, sms in enumerate(job.sms):
                progress((place * (job.rounds + 1) + turn) * settings + i, total, f"{tokens} tokens, {sms} SMs")
                run = block.run(job.transport.format(sms))
                if first is None:
                    first = run.results()
                _compare(first, run.results(), f"{job.transport.format(sms)}, {tokens} tokens")
                if turn:
                    best = found[sms]
                    times = min(best.forward, run.time(run.forward)), min(best.backward, run.time(run.backward))
                    found[sms] = Times(tokens, sms, *times)
            last = time.perf_counter() - begin
        results += found.values()
    if said := windows.faults():
        raise RuntimeError(said[0])
    progress(total, total, "")
    return results


class _Block:
    """This rank's part of a block, and its tokens, routed evenly."""

    def __init__(self, job: Job, tokens: int) -> None:
        self.job = job
        self.device = torch.device("cuda", torch.cuda.current_device()) if job.device == "cuda" else torch.device("cpu")
        rank, dtype = dist.get_rank(), job.spec.dtype
        generator = torch.Generator(self.device).manual_seed(rank)

        def new(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, device=self.device, generator=generator) * scale).to(dtype)

        held = Sharding(job.experts, dist.get_world_size()).size(rank)
        self.x, self.dy = new(tokens, job.hidden), new(tokens, job.hidden)
        scores = torch.rand(tokens, job.experts, device=self.device, generator=generator)
        self.weights, self.ids = scores.topk(job.top_k, 1)
        self.bank = functional.Weights(
            (new(held, 2 * job.inner, job.hidden, scale=job.hidden**-0.5),),
            (new(held, job.hidden, job.inner, scale=job.inner**-0.5),),
        )

    def run(self, transport: str) -> _Run:
        return _Run(self, transport)


class _Run:
    """Both passes of a block with one setting."""

    def __init__(self, block: _Block, transport: str) -> None:
        self.block, self.transport = block, transport
        self.y, self.context = self._forward()

    def _forward(self) -> tuple[torch.Tensor, functional.Context]:
        b = self.block
        how = {"group": dist.group.WORLD, "num_experts": b.job.experts, "engine": b.job.engine}
        return functional.forward(b.x, b.ids, b.weights, b.bank, b.job.spec, transport=self.transport, **how)

    def forward(self) -> None:
        self._forward()

    def backward(self) -> functional.Gradients:
        return functional.backward(self.block.dy, self.context)

    def results(self) -> dict[str, torch.Tensor]:
        grads = self.backward()
        return {"y": self.y, "x": grads.x, "weights": grads.weights, "up": grads.up[0], "down": grads.down[0]}

    def time(self, call: Callable[[], object]) -> float:
        """Milliseconds a call, of the slowest rank."""
        calls = max(1, min(MOST_CALLS, math.ceil(MEASURED / self._seconds(call, 1))))
        return self._seconds(call, calls) / calls * 1e3

    def _seconds(self, call: Callable[[], object], calls: int) -> float:
        device = self.block.device
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        return _slowest(device, time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(device: torch.device, seconds: float) -> float:
    """The largest of what the ranks give, the same on all."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _compare(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], setting: str) -> None:
    """Bit for bit, on all ranks. Differs, on all ranks."""
    same = [torch.equal(w.view(torch.uint8), found[name].view(torch.uint8)) for name, w in wanted.items()]
    device = next(iter(wanted.values())).device
    own = torch.tensor(same, dtype=torch.int32, device=device)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    said = [
        f"rank {rank}: {', '.join(name for name, well in zip(wanted, row.tolist(), strict=True) if not well)}"
        for rank, row in enumerate(ranks)
        if not row.all()
    ]
    if said:
        raise Differs(f"{setting}: other bits than with the first setting, on {'; '.join(said)}. Please report this")
