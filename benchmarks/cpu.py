"""The CPU engine against what else runs an MoE block on this machine, with the machine's own ceilings beside.

    python benchmarks/cpu.py                        # everything; about a quarter of an hour on two cores
    python benchmarks/cpu.py --tokens 1,256 --dtypes bfloat16 --shapes 2048,1024,64,8

The block is Hugging Face's Qwen3 MoE (router included for all). Candidates take turns, and each figure is the best of
its turns, so that other work on the machine disturbs all alike. A candidate that needs more than --budget seconds for
one call is not asked for larger T. Writes a table (.md), everything (.json) and, with matplotlib, a plot (.png).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import threading
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from mok_compile import ops  # noqa: F401  defines mok::experts
from mok_compile.engines import cpu
from mok_compile.engines.buffers import pool
from mok_compile.spec import ExpertsSpec, dtype_name

SHAPES = ((2048, 1024, 64, 8), (2048, 768, 128, 8), (1024, 2048, 8, 2))
OURS, PORTABLE = "mok cpu", "mok portable"
HF = {"HF eager": "eager", "HF grouped_mm": "grouped_mm", "HF grouped_mm + Inductor": "inductor"}
CANDIDATES = (OURS, PORTABLE, *HF)


clock = time.perf_counter


def seconds(f) -> float:
    start = clock()
    f()
    return clock() - start


def take_turns(calls: dict, turns: int, budget: float) -> dict[str, float]:
    """The best time of each call, after one that compiles and warms up."""
    for f in calls.values():
        f()
    best = {name: seconds(f) for name, f in calls.items()}
    spent = dict(best)
    for _ in range(turns - 1):
        for name, f in calls.items():
            if spent[name] < budget:
                t = seconds(f)
                spent[name] += t
                best[name] = min(best[name], t)
    return best


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """This machine's matmul rate (FLOP/s) and read bandwidth (bytes/s)."""
    a, b, x = torch.randn(3072, 3072).to(dtype), torch.randn(3072, 3072).to(dtype), torch.ones(2**27)
    t = take_turns({"matmul": lambda: a @ b, "read": x.sum}, 6, 10.0)
    return {"matmul": 2 * 3072**3 / t["matmul"], "read": x.numel() * 4 / t["read"]}


class PeakMemory:
    """Peak of the process's resident memory above its start, in bytes, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.peak, self.start, self.running = 0, self.resident(), True
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def __exit__(self, *args) -> None:
        self.running = False
        self.thread.join()

    @staticmethod
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def sample(self) -> None:
        while self.running:
            self.peak = max(self.peak, self.resident() - self.start)
            time.sleep(0.001)


class Setup:
    """One block of one dtype, and the candidates' ways to run it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        H, I, E, K = shape
        self.config = Qwen3MoeConfig(
            hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True
        )
        self.block = Qwen3MoeSparseMoeBlock(self.config).to(dtype)
        for p in self.block.parameters():
            torch.nn.init.normal_(p, std=0.02)
        self.spec = ExpertsSpec("silu(gate) * up", "concat", dtype_name(dtype)).to_json()
        self.compiled = torch.compile(self.block, fullgraph=True, dynamic=False)

    def ours(self, x: torch.Tensor, engine: str) -> torch.Tensor:
        _, weights, ids = self.block.gate(x[0])
        experts = self.block.experts
        op = torch.ops.mok.experts if torch.is_grad_enabled() else torch.ops.mok.experts_infer
        y = op(x[0], ids, weights, [experts.gate_up_proj], [experts.down_proj], [], [], self.spec, engine)
        return y[0] if torch.is_grad_enabled() else y

    def run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name == OURS:
            return self.ours(x, "cpu")
        if name == PORTABLE:
            return self.ours(x, "portable")
        self.config._experts_implementation = "grouped_mm" if HF[name] == "inductor" else HF[name]
        return (self.compiled if HF[name] == "inductor" else self.block)(x)

    def infer(self, name: str, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.run(name, x)

    def step(self, name: str, x: torch.Tensor) -> None:
        self.block.zero_grad()
        x = x.clone().requires_grad_()
        self.run(name, x).sum().backward()
        self.block.zero_grad()


def measure(setup: Setup, shape, dtype, T: int, train: bool, candidates, top: dict, args) -> dict:
    H, I, _, K = shape
    x = (0.5 * torch.randn(1, T, H)).to(dtype)
    call = setup.step if train else setup.infer
    times = take_turns({name: lambda name=name: call(name, x) for name in candidates}, args.turns, args.budget)
    with torch.no_grad():
        hit = setup.block.gate(x[0])[2].unique().numel()
    flops = 6 * T * K * H * I * (3 if train else 1)
    # Weights are read once forward and once backward, and their gradients are written.
    traffic = hit * 3 * H * I * dtype.itemsize * (3 if train else 1)
    row = {"shape": shape, "dtype": dtype_name(dtype), "T": T, "train": train, "seconds": times}
    row["floor"] = max(flops / top["matmul"], traffic / top["read"])
    if train:
        row["peak_bytes"] = {}
        for name in candidates:
            if times[name] <= args.budget:
                pool.release()  # what earlier steps left for this one belongs to it
                with PeakMemory() as memory:
                    setup.step(name, x)
                row["peak_bytes"][name] = memory.peak
    others = [t for name, t in times.items() if name in HF]
    row["speedup"] = min(others) / times[OURS] if others else None
    row["of_floor"] = row["floor"] / times[OURS]
    return row


def table(rows: list[dict], conditions: dict) -> str:
    lines = ["# CPU engine: measured", "", *(f"- {k}: {v}" for k, v in conditions.items()), ""]
    lines += [
        "Milliseconds, best of the turns. Floor: the larger of FLOPs / matmul rate and bytes of the experts hit / read"
    ]
    lines += ["bandwidth. Speed-up: over the best Hugging Face path of the same row.", ""]
    head = ["H, I, E, K", "dtype", "T", "pass", *CANDIDATES, "floor", "speed-up", "of floor", "peak MB: ours / HF"]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        times = [f"{r['seconds'][c] * 1e3:.1f}" if c in r["seconds"] else "-" for c in CANDIDATES]
        peak = r.get("peak_bytes", {})
        theirs = min((v for k, v in peak.items() if k in HF), default=None)
        memory = f"{peak[OURS] / 1e6:.0f} / {theirs / 1e6:.0f}" if theirs else "-"
        cells = [
            ", ".join(map(str, r["shape"])),
            r["dtype"],
            r["T"],
            "training step" if r["train"] else "forward",
            *times,
        ]
        speedup = f"{r['speedup']:.2f}" if r["speedup"] else "-"
        cells += [f"{r['floor'] * 1e3:.1f}", speedup, f"{r['of_floor']:.2f}", memory]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    groups = {}
    for r in rows:
        groups.setdefault((tuple(r["shape"]), r["dtype"], r["train"]), []).append(r)
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 3.6 * lines), squeeze=False)
    for axis, ((shape, dtype, train), group) in zip(axes.flat, groups.items(), strict=False):
        for name in CANDIDATES:
            points = [(r["T"], r["seconds"][name] * 1e3) for r in group if name in r["seconds"]]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name, lw=2.5 if name == OURS else 1.2)
        axis.plot([r["T"] for r in group], [r["floor"] * 1e3 for r in group], "k--", lw=1, label="floor")
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axis.set_title(f"{shape} {dtype}, {'training step' if train else 'forward'}", fontsize=9)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser.add_argument("--shapes", nargs="+", type=lambda t: tuple(numbers(t)), default=SHAPES, metavar="H,I,E,K")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 64, 256, 1024, 4096], help="T of the forward passes")
    parser.add_argument("--train-tokens", type=numbers, default=[256, 1024], help="T of the training steps")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for one candidate in one row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu"), help="path without suffix")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and its time on the processor: for a machine that is busy with other work",
    )
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock, args.threads = time.thread_time, 1
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    rows, conditions = [], {}
    for dtype in (getattr(torch, name) for name in args.dtypes):
        top = ceilings(dtype)
        conditions |= {
            "date": datetime.date.today().isoformat(),
            "processor": f"{processor()}, {os.cpu_count()} cores, {args.threads} threads, engine level {cpu.level()}",
            "clock": "processor time of one thread" if args.cpu_time else "wall clock",
            "torch": f"{torch.__version__}, transformers {transformers.__version__}",
            f"ceilings {dtype_name(dtype)}": f"{top['matmul'] / 1e9:.0f} GFLOP/s, read {top['read'] / 1e9:.1f} GB/s",
            "load average at the start": conditions.get("load average at the start", f"{os.getloadavg()[0]:.1f}"),
        }
        for shape in args.shapes:
            torch._dynamo.reset()
            setup = Setup(shape, dtype)
            for train in (False, True):
                candidates = list(args.candidates)
                for T in args.train_tokens if train else args.tokens:
                    row = measure(setup, shape, dtype, T, train, candidates, top, args)
                    rows.append(row)
                    candidates = [c for c in candidates if c == OURS or row["seconds"][c] <= args.budget]
                    print(json.dumps(row), flush=True)
                    Path(args.out + ".json").write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1))
                    Path(args.out + ".md").write_text(table(rows, conditions))
    plot(rows, Path(args.out + ".png"))


if __name__ == "__main__":
    main()
