"""What the passes add to the time of a compile: backend="mok" against backend="inductor", fresh and warm caches.

    python benchmarks/compile_time.py                              2, 8 and 32 layers, inference and training
    python benchmarks/compile_time.py --layers 2 8 --repeat 3      some of them, each three times (the minimum counts)
    python benchmarks/compile_time.py --passes-only                the passes alone, without Inductor
    python benchmarks/compile_time.py --profile 32                 cProfile of the passes alone on a graph of 32 layers

Every measurement is a process of its own that starts with an empty Inductor cache ("fresh"), or with the one that the
process before it filled ("warm"). What is measured is the first call (in training with its backward): Dynamo, our
passes, AOTAutograd, Inductor and C++ compilation; the passes are the time inside `fuse`. Seconds are CPU seconds of the
process and its compilers, which other work on the machine changes little; wall-clock seconds are in the JSON too. The
kernels of the engine are built before.
"""

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
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
    parser.add_argument("--passes-only", action="store_true", help="without Inductor")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        backend, layers, mode = args.worker
        print(json.dumps(measure(backend, int(layers), mode == "training")))
        return 0
    if args.profile:
        profile(args.profile)
        return 0
    stored = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.passes_only:
        alone = {str(layers): passes_alone(layers, args.repeat) for layers in args.layers}
        args.json.write_text(json.dumps(stored | {"conditions": conditions(), "passes alone": alone}, indent=1) + "\n")
        return 0
    run("mok", 1, "inference", tempfile.mkdtemp())  # builds the kernels where they are not there yet
    rows = {(row["mode"], row["layers"]): row for row in stored.get("rows", [])}
    print(HEAD)
    for mode in args.mode:
        for layers in args.layers:
            rows[mode, layers] = compare(layers, mode, args.repeat)
            print(line(rows[mode, layers]), flush=True)
            result = stored | {"conditions": conditions(), "rows": [rows[key] for key in sorted(rows)]}
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def passes_alone(layers: int, repeat: int) -> dict:
    """CPU seconds of the passes on the graph of a model, the best of `repeat` processes; nothing is compiled."""
    best = min(run("passes", layers, "training", "")["passes_cpu"] for _ in range(repeat))
    print(f"{layers:3} layers: {best:.2f} s, {1000 * best / layers:.0f} ms a layer", flush=True)
    return {"s": round(best, 3), "ms a layer": round(1000 * best / layers, 1)}


def compare(layers: int, mode: str, repeat: int) -> dict:
    best: dict[tuple[str, str], dict] = {}
    for _ in range(repeat):
        for backend in ("inductor", "mok"):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("fresh", "warm"):
                    found = run(backend, layers, mode, cache)
                    key = backend, state
                    best[key] = {k: min(v, best[key][k]) for k, v in found.items()} if key in best else found
    row = {"mode": mode, "layers": layers, "fused": best["mok", "fresh"]["fused"]}
    for (backend, state), found in best.items():
        row |= {f"{backend} {state} cpu": found["cpu"], f"{backend} {state} wall": found["wall"]}
        if backend == "mok":
            row |= {f"passes {state} cpu": found["passes_cpu"], f"passes {state} wall": found["passes_wall"]}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def run(backend: str, layers: int, mode: str, cache: str) -> dict:
    environment = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})
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
    from mok_compile.options import Options

    model, ids = build(layers)
    inner, spent, spent_cpu = ours.fuse, [], []

    def passes_only(gm, inputs):
        ours.transform(gm, inputs, Options())
        return gm.forward

    def timed(*args, **kwargs):
        start, start_cpu = time.perf_counter(), time.process_time()
        found = inner(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        spent_cpu.append(time.process_time() - start_cpu)
        return found

    ours.fuse = timed
    if backend == "passes":
        compiled = torch.compile(model.train(training), backend=passes_only)
    else:
        compiled = torch.compile(model.train(training), backend=backend)
    start, start_cpu = time.perf_counter(), cpu_seconds()
    with torch.set_grad_enabled(training):
        loss = compiled(input_ids=ids, labels=ids).loss
        if training and backend != "passes":
            loss.backward()
    wall, cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    fused = torch._dynamo.utils.counters["mok"]["fused"]
    assert fused == (0 if backend == "inductor" else layers), fused
    return {"wall": wall, "cpu": cpu, "passes_wall": sum(spent), "passes_cpu": sum(spent_cpu), "fused": fused}


def cpu_seconds() -> float:
    """Of this process and the ones that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


HEAD = (
    "| mode | layers | Inductor, s | mok, s | passes, s | of Inductor's | a layer, ms "
    "| warm: Inductor, s | mok, s | passes, s |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict) -> str:
    fresh, warm = (
        {name: row[f"{name} {state} cpu"] for name in ("inductor", "mok", "passes")} for state in ("fresh", "warm")
    )
    cells = (
        row["mode"],
        row["layers"],
        f"{fresh['inductor']:.1f}",
        f"{fresh['mok']:.1f}",
        f"{fresh['passes']:.2f}",
        f"{100 * fresh['passes'] / fresh['inductor']:.1f} %",
        f"{1000 * fresh['passes'] / row['layers']:.0f}",
        f"{warm['inductor']:.1f}",
        f"{warm['mok']:.1f}",
        f"{warm['passes']:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def profile(layers: int) -> None:
    import torch

    from mok_compile.options import Options
    from mok_compile.passes.fusing.fuse import fuse

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
        "note": "CPU seconds of the process and its compilers; shared machine",
    }


if __name__ == "__main__":
    sys.exit(main())
