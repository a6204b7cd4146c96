"""The portable engine against Hugging Face + Inductor on the CPU: one MoE block, in turns, ratios within one run.

    python benchmarks/portable.py                                   the table of results/portable.json
    python benchmarks/portable.py --shape 2048 1024 64 8 --dtype bf16 --tokens 256

The block is Qwen3-MoE's with its router, compiled with backend="inductor" and with backend="mok", mok.engine=portable.
Both take turns, and each figure is the best of --rounds turns, so that other work on the machine meets both alike. With
--threads 1 CPU time is measured, which other work changes little. It answers one question: does falling back to the
portable engine cost anything? Native engines have benchmarks of their own.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from torch._dynamo.utils import counters
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

RESULTS = Path(__file__).parent / "results" / "portable.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD = "| H, I, E, K | dtype | T | pass | Inductor, ms | mok portable, ms | ratio |\n|---|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", type=int, nargs=4, metavar=("H", "I", "E", "K"), default=[1024, 512, 32, 4])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    print(HEAD)
    for dtype in args.dtype:
        for tokens in args.tokens:
            for training in (False, True):
                rows.append(compare(args.shape, dtype, tokens, training, args.rounds))
                print(line(rows[-1]), flush=True)
                args.json.write_text(json.dumps({"conditions": conditions(args), "rows": rows}, indent=1) + "\n")
    return 0


def compare(shape: list[int], dtype: str, tokens: int, training: bool, rounds: int) -> dict:
    torch.manual_seed(0)
    torch._dynamo.reset()
    hidden, intermediate, experts, top_k = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config).to(DTYPES[dtype])
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, tokens, hidden).to(DTYPES[dtype]).requires_grad_(training)
    before = counters["mok"]["fused"]
    candidates = {
        "inductor": torch.compile(block, backend="inductor", fullgraph=True, dynamic=False),
        "mok": torch.compile(
            block, backend="mok", fullgraph=True, dynamic=False, options={"mok.engine": "portable", "mok.strict": True}
        ),
    }

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def call(candidate) -> float:
        start = clock()
        with torch.set_grad_enabled(training):
            y = candidate(x)
            if training:
                y.backward(torch.ones_like(y))
        seconds = clock() - start
        block.zero_grad()
        x.grad = None
        return seconds

    for candidate in candidates.values():  # compiles
        call(candidate)
    assert counters["mok"]["fused"] == before + 1
    seconds = {name: [] for name in candidates}
    for turn in range(rounds):
        for name in sorted(candidates, reverse=bool(turn % 2)):
            seconds[name].append(call(candidates[name]))
    best = {name: 1000 * min(values) for name, values in seconds.items()}
    return {
        "shape": shape,
        "dtype": dtype,
        "tokens": tokens,
        "pass": "forward + backward" if training else "forward",
        "inductor_ms": round(best["inductor"], 2),
        "mok_ms": round(best["mok"], 2),
        "ratio": round(best["mok"] / best["inductor"], 3),
    }


def line(row: dict) -> str:
    shape = ", ".join(map(str, row["shape"]))
    cells = (shape, row["dtype"], row["tokens"], row["pass"], row["inductor_ms"], row["mok_ms"], f"{row['ratio']:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


def conditions(args: argparse.Namespace) -> dict:
    return {
        "rounds": args.rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "time": "CPU" if torch.get_num_threads() == 1 else "wall clock",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "load average": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
