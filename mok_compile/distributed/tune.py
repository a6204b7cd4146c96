"""``python -m mok_compile tune``: what it checks, the processes that it starts, what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import ProcessException

from mok_compile import build, engines
from mok_compile.distributed import tuned
from mok_compile.distributed.sharding import Sharding
from mok_compile.distributed.sweep import Differs, Job, Progress, Times, grid, sweep
from mok_compile.distributed.tuned import DEFAULT, Best, Key
from mok_compile.engines import Problem

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class TuneError(RuntimeError):
    """Nothing could be measured; the message says what is missing and where."""


def prepare(job: Job, ranks: int | None) -> tuple[Job, int]:
    """The job with the settings of this machine's GPUs, and the number of ranks (all GPUs where None). Builds the
    kernels if need be. TuneError where it cannot run."""
    if job.top_k > job.experts:
        raise TuneError(f"K is {job.top_k}, more than the {job.experts} experts that a token can go to")
    if odd := [f"{name} is {n}" for name, n in (("H", job.hidden), ("I", job.inner)) if n % 8]:
        raise TuneError(f"{' and '.join(odd)}: the kernels of the engine sm90 take multiples of 8")
    if not torch.cuda.is_available():
        raise TuneError("no NVIDIA GPU was found here; run it on the machine that the model will run on")
    there = torch.cuda.device_count()
    ranks = there if ranks is None else ranks
    if there < ranks:
        raise TuneError(
            f"{ranks} ranks need as many GPUs, and {there} can be seen here; ask for fewer (--ranks), or look at the "
            "variable CUDA_VISIBLE_DEVICES"
        )
    if ranks < 2:
        raise TuneError(f"it takes at least two ranks, as {ranks} reads nothing from another; GPUs here: {there}")
    engine, local = engines.get("sm90"), Sharding(job.experts, ranks).per_rank
    # Built once here, so that the ranks need not wait for one that builds.
    if reason := engine.usable() or build.failure("sm90"):
        raise TuneError(f"the engine sm90 cannot run here: {reason}")
    for index in range(ranks):
        device, dtype = torch.device("cuda", index), job.spec.dtype
        problem = Problem(job.hidden, job.inner, local, job.top_k, dtype, torch.float32, device, stacked=True)
        if reason := engine.supports(job.spec, problem):
            raise TuneError(f"GPU {index} ({torch.cuda.get_device_name(index)}) cannot run it: {reason}")
    processors = min(torch.cuda.get_device_properties(i).multi_processor_count for i in range(ranks))
    return replace(job, sms=grid(processors)), ranks


def measure(job: Job, ranks: int, progress: Progress) -> list[Times]:
    """Runs `sweep` in one process for each rank; `progress`, a function of a module, is called in that of rank 0.
    Differs if a setting has changed bits, TuneError if a rank has failed otherwise."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        multiprocessing.spawn(_rank, (job, ranks, store.port, said, progress), nprocs=ranks)
    except ProcessException as error:
        if said.empty():
            raise TuneError(f"a rank has ended: {error}") from error
        rank, differs, text = said.get()
        raise (Differs(text) if differs else TuneError(f"rank {rank} of {ranks}: {text}")) from error
    return said.get()


def _rank(rank: int, job: Job, ranks: int, port: int, said, progress: Progress) -> None:
    """A process: says what was measured (rank 0), or why it could not be."""
    try:
        device = None
        if job.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        backend = BACKENDS[job.device]
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device)
        times = sweep(job, progress) if rank == 0 else sweep(job)
    except Exception as error:
        said.put((rank, isinstance(error, Differs), f"{error}" or repr(error)))
        raise
    if rank == 0:
        said.put(times)
    dist.destroy_process_group()


def key(job: Job, ranks: int) -> Key:
    """What the best setting of a job is stored for."""
    shape = (job.hidden, job.inner, job.experts, job.top_k, job.dtype)
    return Key(torch.cuda.get_device_name(0), ranks, *shape, tuned.library())


def is_for(key: Key, hidden: int, inner: int, experts: int, top_k: int) -> bool:
    """Whether something is stored for a shape, on whatever GPUs."""
    return (key.hidden, key.inner, key.experts, key.top_k) == (hidden, inner, experts, top_k)


def text(job: Job, ranks: int, gpu: str, times: Sequence[Times], best: Best) -> str:
    """The table: a line for each setting, forward and backward for each number of tokens; * marks what was chosen."""
    tokens = list(dict.fromkeys(t.tokens for t in times))
    lines = [
        f"{_shape(job.hidden, job.inner, job.experts, job.top_k, job.dtype)}, on {ranks} x {gpu}",
        "milliseconds of the slowest rank in the best round; every setting gave the same bits",
        "   SMs" + "".join(f"{f'{n} tokens: forward':>26}{'backward':>12}" for n in tokens),
    ]
    for sms in dict.fromkeys(t.sms for t in times):
        row = f"{sms:6}"
        for t in (t for n in tokens for t in times if (t.tokens, t.sms) == (n, sms)):
            row += f"{t.forward:25.3f}{'*' if sms == best.sms else ' '}"
            row += f"{t.backward:11.3f}{'*' if sms == best.backward_sms else ' '}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def stored_text(stored: dict[Key, Best]) -> str:
    """What is stored, a line each."""
    if not stored:
        return f"nothing is stored in {tuned.path()}: sms={DEFAULT.sms}, backward_sms={DEFAULT.backward_sms} everywhere"
    current, lines = tuned.library(), [str(tuned.path())]
    for k, best in stored.items():
        old = "" if k.library == current else ", not used: the kernels have changed since"
        shape = _shape(k.hidden, k.inner, k.experts, k.top_k, k.dtype)
        tokens = ", ".join(map(str, best.tokens))
        lines.append(
            f"{shape}, on {k.ranks} x {k.gpu}: sms={best.sms} backward_sms={best.backward_sms} (tokens {tokens}){old}"
        )
    return "\n".join(lines)


def _shape(hidden: int, inner: int, experts: int, top_k: int, dtype: str) -> str:
    return f"H {hidden}, I {inner}, {experts} experts, {top_k} per token, {dtype}"
