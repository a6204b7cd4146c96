"""The experts of a Hugging Face model spread over processes, each with its own tokens.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

On CPUs with gloo, or with NCCL where every process has a GPU. The first step is compared with one process that has all
tokens; then the model learns, everything but the experts kept alike by summing gradients over the ranks. Takes about a
minute on two cores with --compile, less without. Exit status 1 if anything is wrong.
"""

import argparse
import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mok_compile.distributed import plan

SENTENCES = 4  # of each rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help='compile the model with backend="mok"')
    arguments = parser.parse_args()

    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = build().to(device)
    alone = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    parallelize_module(model, mesh["ep"], plan(model))
    if arguments.compile:
        model.compile(backend="mok", dynamic=True)

    everything = sentences(SENTENCES * ranks).to(device)
    mine = everything[SENTENCES * rank : SENTENCES * (rank + 1)]
    first = step(model, mine, ranks)
    alone(input_ids=everything, labels=everything).loss.backward()
    worst = max(difference(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for _ in range(arguments.steps):
        last = step(model, mine, ranks)
        optimizer.step()

    good = {
        f"gradients of {ranks} processes are those of one: relative difference {worst:.1e}": worst < 1e-4,
        f"the loss falls from {first:.2f} to {last:.2f}": last < first,
    }
    for text, holds in good.items():
        if rank == 0:
            print(f"{'ok' if holds else 'NO':4} {text}", flush=True)
    dist.destroy_process_group()
    if not all(good.values()):
        print("expert_parallel FAILED: " + "; ".join(t for t, holds in good.items() if not holds), file=sys.stderr)
        return 1
    return 0


def step(model: torch.nn.Module, ids: torch.Tensor, ranks: int) -> float:
    """The mean loss of all ranks, and its gradients. Those of the experts hold the sum over the ranks already; the
    others are summed here."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss / ranks
    loss.backward()
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def difference(parameter: torch.Tensor, wanted: torch.Tensor) -> float:
    """Between the gradients of a parameter, relative to the largest number."""
    found = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
    return float((found - wanted.grad).abs().max() / wanted.grad.abs().max().clamp(min=1e-8))


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        use_cache=False,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).train()


def sentences(count: int) -> torch.Tensor:
    """[count, 16]: numbers that count up, each from another start."""
    start = torch.arange(count)[:, None] * 5
    return (start + torch.arange(16)) % 31 + 1


if __name__ == "__main__":
    sys.exit(main())
