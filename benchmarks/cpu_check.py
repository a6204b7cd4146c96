"""Checks and times the CPU engine's instruction sets on this machine: needs only torch and the engine's library.

    PYTHONPATH=.:tests/cpu python benchmarks/cpu_check.py [--full] [--no-check]

For machines that have what the development machine lacks (AMX), without network or compiler: put a prebuilt library
into mok_compile/lib (`mok_compile.build.prebuild`) and run this there. Exits with an error if any level is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import cpu_cases
import torch

from mok_compile import engines
from mok_compile.engines import cpu
from mok_compile.spec import ExpertsSpec, dtype_name


def best(f, turns: int = 5) -> float:
    f()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def check(full: bool) -> None:
    """The grid against float64; the same bits for any number of threads and for any other tokens."""
    grid = cpu_cases.grid(full)
    for case in grid:
        cpu_cases.check(case, at=cpu_cases.levels())
    threads = torch.get_num_threads()
    for dtype in (torch.bfloat16, torch.float32):
        case = cpu_cases.Case(T=600, H=1100, I=530, E=4, K=2, dtype=dtype, bias=True)
        inputs = cpu_cases.make(case)
        for level in cpu_cases.levels():
            with cpu_cases.at_level(level):
                runs = []
                for n in (1, 2, 7, threads):
                    torch.set_num_threads(n)
                    runs.append(cpu_cases.run("cpu", case, inputs))
                assert all(torch.equal(r[k], runs[0][k]) for r in runs for k in r), f"{level}: threads"
                forward = engines.get("cpu").forward
                for part in (slice(0, 1), slice(9, 16), slice(3, 600, 60), slice(0, 300)):
                    y = forward(*inputs.tokens(part).operands(), case.spec, save=False)[0]
                    assert torch.equal(y, runs[0]["y"][part]), f"{level}: other tokens"
    print(f"right: {len(grid)} cases at {', '.join(cpu_cases.levels())}", flush=True)


def ceilings(dtype: torch.dtype) -> tuple[float, float]:
    """Matmul rate (FLOP/s) and read bandwidth (bytes/s)."""
    a, x = torch.randn(4096, 4096).to(dtype), torch.ones(2**28)
    return 2 * 4096**3 / best(lambda: a @ a), x.numel() * 4 / best(x.sum)


def times(name: str, operands: tuple, dy: torch.Tensor, spec: ExpertsSpec) -> dict[str, float]:
    """Milliseconds of the forward and, for many tokens, of the backward pass."""
    os.environ["MOK_CPU_ISA"] = cpu.LEVELS[-1] if name == "portable" else name
    engine = engines.get("portable" if name == "portable" else "cpu")
    found = {"forward": round(1e3 * best(lambda: engine.forward(*operands, spec, save=False), 3), 2)}
    if len(dy) >= 256:
        saved = engine.forward(*operands, spec, save=True)[1:]
        needs = [True] * 4 + [False] * 2
        found["backward"] = round(1e3 * best(lambda: engine.backward(dy, *operands, *saved, spec, needs), 2), 1)
    os.environ.pop("MOK_CPU_ISA")
    return found


def measure(shape: tuple[int, int, int, int], dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    H, I, E, K = shape
    matmul, read = ceilings(dtype)
    facts = {"threads": torch.get_num_threads(), "matmul GFLOP/s": round(matmul / 1e9), "read GB/s": round(read / 1e9)}
    print(json.dumps({"shape": shape, "dtype": dtype_name(dtype), **facts}), flush=True)
    up, down = torch.randn(E, 2 * I, H).mul_(0.02).to(dtype), torch.randn(E, H, I).mul_(0.02).to(dtype)
    spec = ExpertsSpec("silu(gate) * up", "concat", dtype_name(dtype))
    for T in tokens:
        x, dy = torch.randn(T, H).to(dtype), torch.randn(T, H).to(dtype)
        ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
        floor = max(6 * T * K * H * I / matmul, ids.unique().numel() * 3 * H * I * dtype.itemsize / read)
        operands = (x, ids, torch.rand(T, K), [up], [down], [], [])
        row = {name: times(name, operands, dy, spec) for name in (*cpu_cases.levels()[1:], "portable")}
        print(json.dumps({"T": T, "ms": row, "forward floor": round(1e3 * floor, 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the full grid")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, best level {cpu.level()}", flush=True)
    if not args.no_check:
        check(args.full)
    for dtype in (torch.bfloat16, torch.float32):
        measure((2048, 1024, 64, 8), dtype, (1, 16, 256, 1024))


if __name__ == "__main__":
    main()
