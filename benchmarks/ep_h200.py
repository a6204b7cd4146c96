"""One MoE block spread over the GPUs of a host, against one GPU's share of the work and against NCCL.

    torchrun --standalone --nproc-per-node 2 benchmarks/ep_h200.py --shapes qwen3-30b-a3b --tokens 2048,16384

Candidates, each with T tokens on every rank: `mok` is mok::experts_parallel over peer memory, `mok-exact` the same with
every route sent on its own, `mok-nccl` the same op over all-to-all collectives (same kernels for the experts, nothing
overlapped, the host waits), `nccl` all-to-all collectives of torch around grouped_mm compiled by Inductor, the way
torchtitan does it, and `one` mok::experts with this rank's experts and T tokens on one GPU: what a rank does, but
no communication. Behind a name of ours may stand options of the transport, as in `mok ring=20`. Passes: `forward`,
and `both` with the backward. Times: CUDA events over several calls, after a barrier; of the ranks the slowest, of the
rounds the median. Candidates take turns. One line of JSON a measurement; `link` is the time that the rows of the most
loaded rank take on the link at the measured rate.

With fewer GPUs than ranks these share them, over gloo (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 must be set): kernels
then wait for one another's turns, so times say nothing and are left out; memory is what it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from shapes import SHAPES, Shape

from mok_compile import functional
from mok_compile.distributed import windows
from mok_compile.distributed.sharding import Sharding
from mok_compile.spec import ExpertsSpec

SPEC = ExpertsSpec("silu(gate) * up", "concat", "bfloat16")
LINK = 325e9  # bytes/s a direction that eight CTAs move, all GPUs at once; docs/kernels/sm90.md


def routing(tokens: int, shape: Shape, kind: str, seed: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(tokens, shape.experts, device="cuda", generator=g)
    if kind == "zipf-shuffled":  # Gumbel top-k of probabilities 1 / rank, popular experts anywhere
        places = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(0)).cuda() + 1
        scores = -torch.log(-torch.log(scores)) - torch.log(places)
    return scores.topk(shape.top_k, 1).indices


def experts(rows, offsets, up, down):
    h = torch._grouped_mm(rows, up.transpose(1, 2), offs=offsets)
    gate, more = h.chunk(2, -1)
    return torch._grouped_mm(torch.nn.functional.silu(gate) * more, down.transpose(1, 2), offs=offsets)


class Nccl:
    """All-to-all, grouped_mm under Inductor, all-to-all."""

    def __init__(self, sharding: Sharding):
        self.sharding, self.experts = sharding, torch.compile(experts, dynamic=True)

    def __call__(self, x, ids, weights, up, down):
        ranks, per_rank, top_k = self.sharding.ranks, self.sharding.per_rank, ids.shape[1]
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(ranks * per_rank, dtype=torch.int64, device="cuda").scatter_add_(
            0, flat, torch.ones_like(flat)
        )
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts)
        send, receive = counts.view(ranks, -1).sum(1).tolist(), there.view(ranks, -1).sum(1).tolist()
        rows = collectives.all_to_all_single_autograd(x[order // top_k], receive, send, dist.group.WORLD)
        local = torch.arange(per_rank, device="cuda").repeat(ranks).repeat_interleave(there)
        by_expert = local.argsort(stable=True)
        offsets = there.view(ranks, -1).sum(0).cumsum(0).int()
        out = self.experts(rows[by_expert], offsets, up, down)
        back = torch.empty_like(out).index_copy(0, by_expert, out)
        back = collectives.all_to_all_single_autograd(back, send, receive, dist.group.WORLD)
        weighted = back * weights.reshape(-1)[order][:, None].to(back.dtype)
        return torch.zeros_like(x).index_add(0, order // top_k, weighted)


def weights_of(shape: Shape) -> list[torch.Tensor]:
    """Up and down of this rank's experts."""
    local = Sharding(shape.experts, dist.get_world_size()).size(dist.get_rank())
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    return [(torch.randn(local, *size, device="cuda") * 0.02).bfloat16() for size in sizes]


def make(name: str, shape: Shape, tokens: int, kind: str, weights):
    """(forward, both): functions to be timed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = Sharding(shape.experts, ranks)
    up, down = weights
    g = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(tokens, shape.hidden, device="cuda", generator=g).bfloat16() * 0.5
    dy = torch.randn(tokens, shape.hidden, device="cuda", generator=g).bfloat16()
    scale = torch.rand(tokens, shape.top_k, device="cuda", generator=g)
    ids = routing(tokens, shape, kind, 100 + rank)
    if name == "nccl":
        run = Nccl(sharding)
        leaves = [t.detach().clone().requires_grad_() for t in (x, scale)] + [t.requires_grad_() for t in (up, down)]

        def forward():
            with torch.no_grad():
                return run(x, ids, scale, up, down)

        def both():
            torch.autograd.grad(run(leaves[0], ids, leaves[1], up, down), leaves, dy)

        return forward, both
    bank = functional.Weights((up.detach(),), (down.detach(),))
    how = {"engine": "sm90"}
    if name == "one":
        ids = routing(tokens, shape._replace(experts=up.shape[0]), kind, 100 + rank)
    else:
        transport, _, options = name.partition(" ")
        transport = {"mok": "peer_memory", "mok-exact": "peer_memory exact=1", "mok-nccl": "collectives"}[transport]
        transport = f"{transport} {options}".strip()
        how |= {"group": dist.group.WORLD, "num_experts": shape.experts, "transport": transport}
    op, arguments = functional.inference, (x, ids, scale, bank, SPEC)

    def forward():
        return op(*arguments, **how)

    def both():
        _, context = functional.forward(*arguments, **how)
        functional.backward(dy, context)

    return forward, both


def measure(run, calls: int) -> float:
    """Milliseconds a call, of the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)  # the host gets ahead of the device, as it is in a model
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    found = torch.tensor([begin.elapsed_time(end) / calls], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def link_time(shape: Shape, tokens: int, kind: str) -> float:
    """Milliseconds that a forward's rows take: each token once to each rank that needs it, and one row back."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    holders = routing(tokens, shape, kind, 100 + rank) // Sharding(shape.experts, ranks).per_rank
    wanted = torch.zeros(tokens, ranks, device="cuda").scatter_(1, holders, 1.0)
    sent = wanted.sum(0)
    counts = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(counts, sent)
    table = torch.stack(counts)
    table.fill_diagonal_(0)
    most = max(table.sum(0).max().item(), table.sum(1).max().item())
    return most * shape.hidden * 2 / LINK * 1e3


def start() -> dict[str, object]:
    """Joins the ranks, each with its GPU; the conditions of what is measured, with `gpus` where ranks share them."""
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    conditions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16"}
    if ranks <= gpus:
        dist.init_process_group("nccl", device_id=device)
        return conditions
    dist.init_process_group("gloo")  # NCCL takes one rank a GPU
    return {**conditions, "gpus": gpus}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,olmoe-1b-7b,wide,mixtral-8x7b")
    parser.add_argument("--tokens", default="2048,16384", help="of each rank")
    parser.add_argument("--candidates", default="mok,mok-exact,mok-nccl,nccl,one")
    parser.add_argument("--routing", default="balanced,zipf-shuffled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/ep_h200.jsonl", help="lines are added to this file")
    given = parser.parse_args()
    conditions = start()
    rank, ranks, shared = dist.get_rank(), dist.get_world_size(), "gpus" in conditions
    for name in given.shapes.split(","):
        shape = SHAPES[name]
        weights = weights_of(shape)
        for tokens in map(int, given.tokens.split(",")):
            for kind in given.routing.split(","):
                windows.release()  # they would have room for the tokens of the last size
                runs = {c: make(c, shape, tokens, kind, weights) for c in given.candidates.split(",")}
                times: dict[tuple[str, str], list[float]] = {}
                peaks: dict[tuple[str, str], float] = {}
                for turn in range(given.rounds + 1):
                    for c, pair in runs.items():
                        for phase, run in zip(("forward", "both"), pair, strict=True):
                            torch.cuda.reset_peak_memory_stats()
                            before = torch.cuda.memory_allocated()
                            ms = measure(run, 1 if turn == 0 else 5 if tokens > 4096 else 20)
                            if turn:
                                times.setdefault((c, phase), []).append(ms)
                                peaks[c, phase] = (torch.cuda.max_memory_allocated() - before) / 2**20
                link = link_time(shape, tokens, kind)
                for (c, phase), found in times.items():
                    ms = statistics.median(found)
                    flops = (6 if phase == "forward" else 18) * tokens * shape.top_k * shape.hidden * shape.inner
                    row = {
                        "candidate": c, "model": name, "shape": list(shape), "ep": ranks, "tokens": tokens,
                        "routing": kind, "pass": phase, "ms": round(ms, 4), "spread": round(max(found) - min(found), 4),
                        "tflops_per_gpu": round(flops / ms / 1e9, 1), "link_ms": round(link, 4),
                        "peak_mb": round(peaks[c, phase]), **conditions,
                    }  # fmt: skip
                    if shared:
                        row = {k: v for k, v in row.items() if k not in ("ms", "spread", "tflops_per_gpu", "link_ms")}
                    if rank == 0:
                        with open(given.out, "a", encoding="utf-8") as out:
                            out.write(json.dumps(row) + "\n")
                        speed = f"{ms:8.3f} ms {flops / ms / 1e9:6.1f} TFLOP/s  link {link:.3f}"
                        said = f"{row['peak_mb']:6} MB {'' if shared else speed}"
                        print(f"{name:14} T={tokens:5} {kind:13} {phase:7} {c:9} {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
