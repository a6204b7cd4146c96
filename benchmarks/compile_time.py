"""What the passes add to the time of a compile: backend="mok" against backend="inductor", fresh and warm caches.

    python benchmarks/compile_time.py                              2, 8 and 32 layers, inference and training
    python benchmarks/compile_time.py --layers 2 8 --repeat 3      some of them, each three times (the minimum counts)
    python benchmarks/compile_time.py --profile 32                 cProfile of the passes alone on a graph of 32 layers

Every measurement is a process of its own that starts with an empty Inductor cache ("fresh"), or with the one that the
process before it filled ("warm"). Seconds of the first call include Dynamo, our passes, AOTAutograd, Inductor and C++
compilation; those of the passes are the time inside `fuse`. The kernels of the engine are built before.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "compile_time.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--mode", nargs="+", choices=("inference", "training"), default=["inference", "training"])
    parser.add_argument(
        "--repeat", type=int, default=1, help="the minimum of so many runs counts (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="results go here (default: benchmarks/results)")
    parser.add_argument("--profile", type=int, metavar="LAYERS", help="profile the passes and do nothing else")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        backend, layers, mode = args.worker
        print(json.dumps(measure(backend, int(layers), mode == "training")))
        return 0
    if args.profile:
        profile(args.profile)
        return 0
    run("mok", 1, "inference", tempfile.mkdtemp())  # builds the kernels where they are not there yet
    rows = []
    for mode in args.mode:
        for layers in args.layers:
            rows.append(compare(layers, mode, args.repeat))
            print(line(rows[-1]) if len(rows) > 1 else f"{HEAD}\n{line(rows[-1])}", flush=True)
            args.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1) + "\n")
    return 0


def compare(layers: int, mode: str, repeat: int) -> dict:
    best: dict[tuple[str, str], dict] = {}
    for _ in range(repeat):
        for backend in ("inductor", "mok"):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("fresh", "warm"):
                    found = run(backend, layers, mode, cache)
                    key = backend, state
                    best[key] = {k: min(v, best[key][k]) for k, v in found.items()} if key in best else found
    row = {"mode": mode, "layers": layers}
    for (backend, state), found in best.items():
        row |= {f"{backend} {state}": found["first"]}
        if backend == "mok":
            row |= {f"passes {state}": found["passes"], f"passes cpu {state}": found["passes_cpu"]}
    row["fused"] = best["mok", "fresh"]["fused"]
    return row


def run(backend: str, layers: int, mode: str, cache: str) -> dict:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--worker", backend, str(layers), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def build(layers: int):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        max_position_embeddings=64,
        use_cache=False,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config), torch.randint(0, 128, (2, 32))


def measure(backend: str, layers: int, training: bool) -> dict:
    """Seconds of the first call (with backward if `training`) and of the passes in it."""
    import torch

    import mok_compile.backend as ours

    model, ids = build(layers)
    inner, spent, spent_cpu = ours.fuse, [], []

    def timed(*args, **kwargs):
        start, start_cpu = time.perf_counter(), time.process_time()
        found = inner(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        spent_cpu.append(time.process_time() - start_cpu)
        return found

    ours.fuse = timed
    compiled = torch.compile(model.train(training), backend=backend)
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        loss = compiled(input_ids=ids, labels=ids).loss
        if training:
            loss.backward()
    first = time.perf_counter() - start
    fused = torch._dynamo.utils.counters["mok"]["fused"]
    assert fused == (layers if backend == "mok" else 0), fused
    return {"first": first, "passes": sum(spent), "passes_cpu": sum(spent_cpu), "fused": fused}


HEAD = (
    "| mode | layers | Inductor, s | mok, s | passes, s | of Inductor's | a layer, ms (CPU time) "
    "| warm: Inductor, s | mok, s | passes, s |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict) -> str:
    share, per_layer = row["passes fresh"] / row["inductor fresh"], 1000 / row["layers"]
    cells = (
        row["mode"],
        row["layers"],
        f"{row['inductor fresh']:.1f}",
        f"{row['mok fresh']:.1f}",
        f"{row['passes fresh']:.2f}",
        f"{100 * share:.1f} %",
        f"{row['passes fresh'] * per_layer:.0f} ({row['passes cpu fresh'] * per_layer:.0f})",
        f"{row['inductor warm']:.1f}",
        f"{row['mok warm']:.1f}",
        f"{row['passes warm']:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def profile(layers: int) -> None:
    import torch

    from mok_compile.options import Options
    from mok_compile.passes.fuse import fuse

    model, ids = build(layers)
    profiler = cProfile.Profile()

    def backend(gm, inputs):
        profiler.enable()
        fuse(gm, inputs, Options())
        profiler.disable()
        return gm.forward

    torch.compile(model, backend=backend)(input_ids=ids, labels=ids)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


def conditions() -> dict:
    import torch
    import transformers

    return {
        "model": "Qwen3-MoE, H=64 I=32 E=8 K=2, 2 x 32 tokens, float32",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "note": "shared machine: read ratios, and the passes' CPU time, rather than seconds",
    }


if __name__ == "__main__":
    sys.exit(main())
