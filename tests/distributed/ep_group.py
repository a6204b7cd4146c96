"""Groups of gloo processes that stay up for many cases, each process with its own rank."""

import os
import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


class Group:
    """`ranks` processes that form the default process group and run functions of a module by name."""

    def __init__(self, ranks):
        context = mp.get_context("spawn")
        port = _free_port()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks, port), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case, *args):
        """What `case(*args)`, a function of an importable module, returns on each rank. AssertionError with the
        traceback of every rank that raised; `last` then holds what the others return."""
        for pipe in self.pipes:
            pipe.send((case, args))
        results = [self._result(rank) for rank in range(len(self.pipes))]
        self.last = [value for _, value in results]
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        assert not failed, "\n".join(failed)
        return self.last

    def _result(self, rank):
        if not self.pipes[rank].poll(TIMEOUT.total_seconds() * 3):
            return False, "no answer"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return False, "the process has ended"

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe, rank, ranks, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            break
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            pipe.send((True, case(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
