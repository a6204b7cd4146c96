"""Training step of a four-layer model of the Qwen3-30B-A3B shape, its experts spread over the GPUs of a host.

    torchrun --standalone --nproc-per-node 2 benchmarks/ep_step.py

Each rank has its own sequences; forward and backward, no optimiser, no reduction of the gradients that all ranks have
(the same for all). Candidates: `mok` is ExpertParallel under backend="mok", over peer memory; `mok-nccl` the same
over all-to-all collectives; `nccl` the model under Inductor with its experts as torchtitan spreads them (ep_h200.py);
`hf` the model under Inductor with the expert parallelism of transformers itself (`DistributedConfig`). Before it had
`ep_size` that meant that every rank runs the sequences of all ranks: they count once, so that a step has as many tokens
for a GPU as with the others. Since then tokens go by all-to-all, and FSDP spreads the rest of the model. If Inductor
cannot compile it, it runs without (`compiled`). One line of JSON a candidate; `loss` is the mean over the ranks, which
hardly depends on the candidate. A candidate that fails on all ranks leaves a line with its error.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import types

import torch
import torch.distributed as dist
import transformers
from ep_h200 import Nccl, measure
from step_model import VOCABULARY, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeForCausalLM

from mok_compile.backend import mok  # the object: its name is known only where the package is installed
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


def of_transformers(model: Qwen3MoeForCausalLM, ranks: int) -> tuple[Qwen3MoeForCausalLM, bool]:
    """The model with the experts spread by transformers, loaded as a checkpoint is, but from memory; and whether every
    rank has to run the sequences of all."""
    from transformers.distributed import DistributedConfig

    shared = not hasattr(DistributedConfig, "ep_size")
    sizes = {"tp_size": ranks, "enable_expert_parallel": True} if shared else {"fsdp_size": ranks, "ep_size": ranks}
    found = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict={name: tensor.cpu() for name, tensor in model.state_dict().items()},
        dtype=model.dtype,
        distributed_config=DistributedConfig(**sizes),
    )
    return found.train(), shared


def sequences(rank: int, given: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(rank)
    return torch.randint(0, VOCABULARY, (given.batch, given.length), device="cuda", generator=generator)


def run(name: str, given: argparse.Namespace) -> dict[str, object]:
    """What was measured of a candidate, on all ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    model, ids = build(given.layers), sequences(dist.get_rank(), given)
    tokens, backend = ids.numel(), mok
    if name == "hf":
        backend = "inductor"
        model, shared = of_transformers(model, ranks)
        if shared:
            ids = torch.cat([sequences(rank, given) for rank in range(ranks)])
    elif name == "nccl":
        backend = "inductor"
        spread(model, ranks)
    else:
        how = {"transport": "collectives"} if name == "mok-nccl" else {}
        parallelize_module(model, mesh["ep"], plan(model, **how))
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend)

    def step() -> torch.Tensor:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    facts: dict[str, object] = {"compiled": True}
    try:
        loss = step()
    except Exception as error:
        if name != "hf":
            raise
        facts, call = {"compiled": False, "why": said(error)}, model
        model.zero_grad(set_to_none=True)
        loss = step()
    dist.all_reduce(loss)
    step()
    torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(measure(step, 3) for _ in range(4))
    return {
        "candidate": name, "ep": ranks, "layers": given.layers, "tokens": tokens, "ms": round(ms, 2),
        "tokens_per_s_per_gpu": round(tokens / ms * 1e3), "loss": round(loss.item() / ranks, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2), **facts,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip


def said(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", default="mok,mok-nccl,nccl,hf")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", default="benchmarks/results/ep_step.jsonl", help="lines are added to this file")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    for name in given.candidates.split(","):
        try:
            row = run(name, given)
        except Exception as error:  # the other candidates are still wanted
            row = {"candidate": name, "error": said(error)}
        if dist.get_rank() == 0:
            with open(given.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
