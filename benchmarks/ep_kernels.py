"""What each step of an exchange takes on this rank: the kernels of a forward and backward pass of
mok::experts_parallel over peer memory.

    torchrun --standalone --nproc-per-node 2 benchmarks/ep_kernels.py --shapes qwen3-30b-a3b --tokens 2048,16384

The least of four passes, in microseconds, on rank 0: kernels that wait take as long as another rank is late, the least
is what is left without that. Ranks may share a GPU, as for ep_h200.py: what they read from one another then comes from
the same memory instead of over the link. A line of JSON for a shape and number of tokens.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from ep_h200 import make, start, weights_of
from h200_kernels import kernels_of
from shapes import SHAPES

from mok_compile.distributed import windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="2048,16384", help="of each rank")
    parser.add_argument("--out", default="benchmarks/results/ep_kernels.jsonl", help="lines are added to this file")
    given = parser.parse_args()
    conditions = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in given.shapes.split(","):
        shape = SHAPES[name]
        weights = weights_of(shape)
        for tokens in map(int, given.tokens.split(",")):
            windows.release()
            _, both = make("mok", shape, tokens, "balanced", weights)
            both()
            torch.cuda.synchronize()
            dist.barrier()
            row = {"model": name, "ep": ranks, "tokens": tokens, **kernels_of(both, least=True), **conditions}
            if rank == 0:
                print(json.dumps(row), flush=True)
                with open(given.out, "a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
