"""Where the time of a block goes on one H100 or H200: wall clock, host, GPU.

    python benchmarks/h200_host.py --shape qwen3-30b-a3b --tokens 1,2048 --candidates op,mok,hf

Candidates and passes are those of `h200.py`. `wall_ms`: a call among twenty that follow each other, the best of five
times; `host_ms`: the same until the last of them has returned; `alone_ms`: a single call on an idle GPU until it has
returned; `gpu_us`: the sum of a call's kernels and copies, `launches` their number, as torch.profiler sees them. Where
wall and host are equal the host is what one waits for. One line of JSON a measurement.
"""

import argparse
import json
import os
import time

import h200
import torch
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

CALLS, TIMES, PROFILED = 20, 5, 5


def measure(run):
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    wall = host = alone = float("inf")
    for _ in range(TIMES):
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        wall = min(wall, (time.perf_counter() - start) / CALLS)
        host = min(host, (returned - start) / CALLS)
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        alone = min(alone, time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {
        **{f"{name}_ms": round(s * 1e3, 3) for name, s in (("wall", wall), ("host", host), ("alone", alone))},
        "gpu_us": round(sum(e.device_time for e in events) / PROFILED),
        "launches": len(events) / PROFILED,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", default="1,2048")
    parser.add_argument("--candidates", default="op,mok,mok-graphs,hf,hf-graphs")
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    options = parser.parse_args()
    torch.manual_seed(0)
    weights = h200.Weights(*SHAPES[options.shape])
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16"}
    for tokens in map(int, options.tokens.split(",")):
        for name in options.candidates.split(","):
            passes = h200.candidate(name, weights, tokens, "balanced")
            for what, run in zip(("inference", "training"), passes, strict=True):
                row = {"shape": options.shape, "tokens": tokens, "candidate": name, "pass": what}
                row |= measure(run) | facts
                print(json.dumps(row), flush=True)
                with open(os.path.join(options.out, "h200_host.jsonl"), "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
