"""Training step of a four-layer model of the Qwen3-30B-A3B shape, its experts spread over the GPUs of a host.

    torchrun --standalone --nproc-per-node 2 benchmarks/ep_step.py

Each rank has its own sequences; forward and backward, no optimiser, no reduction of the gradients that all ranks have
(the same for all). Candidates: `mok` is ExpertParallel under backend="mok", over peer memory; `mok-nccl` the same
over all-to-all collectives; `nccl` the model under Inductor with its experts as torchtitan spreads them (ep_h200.py).
One line of JSON a candidate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import types

import torch
import torch.distributed as dist
from ep_h200 import Nccl, measure
from step_model import VOCABULARY, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeForCausalLM

from mok_compile.distributed import plan
from mok_compile.distributed.sharding import Sharding


def spread(model: Qwen3MoeForCausalLM, ranks: int) -> None:
    """The experts as torchtitan spreads them: this rank's rows of the weights, all-to-all around grouped_mm."""
    sharding, rank = Sharding(model.config.num_experts, ranks), dist.get_rank()
    own = slice(sharding.first(rank), sharding.first(rank + 1))
    run = torch.compiler.disable(Nccl(sharding))

    def forward(self, x, ids, weights):
        return run(x, ids, weights, self.gate_up_proj, self.down_proj)

    for layer in model.model.layers:
        bank = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            setattr(bank, name, torch.nn.Parameter(getattr(bank, name).data[own].clone()))
        bank.forward = types.MethodType(forward, bank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", default="mok,mok-nccl,nccl")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", default="benchmarks/results/ep_step.jsonl", help="lines are added to this file")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    ids = torch.randint(0, VOCABULARY, (given.batch, given.length), device="cuda", generator=_generator(rank))
    for name in given.candidates.split(","):
        model = build(given.layers)
        if name == "nccl":
            spread(model, ranks)
        else:
            how = {"transport": "collectives"} if name == "mok-nccl" else {}
            parallelize_module(model, mesh["ep"], plan(model, **how))
        torch._dynamo.reset()
        run = torch.compile(model, backend="inductor" if name == "nccl" else "mok")
        losses = []

        def step(run=run, model=model, losses=losses):
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        step()
        step()
        torch.cuda.reset_peak_memory_stats()
        ms = statistics.median(measure(step, 3) for _ in range(4))
        row = {
            "candidate": name, "ep": ranks, "layers": given.layers, "tokens": ids.numel(), "ms": round(ms, 2),
            "tokens_per_s_per_gpu": round(ids.numel() / ms * 1e3), "loss": round(losses[0].item(), 4),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2), "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }  # fmt: skip
        if rank == 0:
            with open(given.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        del model, run, step
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def _generator(rank: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(rank)


if __name__ == "__main__":
    main()
