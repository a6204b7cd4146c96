"""What each kernel of a training step of a block takes on one H100 or H200, on a cool card and after half a second of
load: a warm card holds its power, not its clock, and products then take a tenth longer.

    python benchmarks/h200_kernels.py --shapes qwen3-30b-a3b --tokens 2048,16384

Medians of four steps, in microseconds. Writes a line of JSON per shape, number of tokens and state.
"""

import argparse
import collections
import json
import os
import re
import statistics
import time

import torch
from shapes import SHAPES
from torch.profiler import ProfilerActivity, profile

from mok_compile.engines import get
from mok_compile.spec import ExpertsSpec

STEPS, WARM = 4, 0.5  # steps that are profiled; seconds of load


def step_of(shape, tokens):
    """A forward and backward pass of the engine, with all gradients."""
    hidden, inner, experts, top_k = SHAPES[shape]
    engine, spec = get("sm90"), ExpertsSpec("silu(gate) * up", "concat", "bfloat16")

    def normal(*shape, scale):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, scale)

    x, dy = normal(tokens, hidden, scale=1.0), normal(tokens, hidden, scale=1.0)
    up, down = [normal(experts, 2 * inner, hidden, scale=0.02)], [normal(experts, hidden, inner, scale=0.02)]
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices
    operands = (x, ids, torch.rand(tokens, top_k, device="cuda"), up, down, [], [])

    def step():
        _, *saved = engine.forward(*operands, spec, save=True)
        engine.backward(dy, *operands, *saved, spec, [True] * 4 + [False] * 2)

    return step


def kernels_of(step, least=False):
    """Kernel, by its place in a step and its name -> median (or `least`) microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    launches = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and "mok" in e.name]
    times = collections.defaultdict(list)
    for i, launch in enumerate(sorted(launches, key=lambda e: e.time_range.start)):
        inner = re.search(r"persistent<mok::sm90::(\w+)", launch.name)
        name = inner.group(1) if inner else re.search(r"(\w+)(<|\()", launch.name).group(1)
        times[f"{i % (len(launches) // STEPS)} {name}"].append(launch.device_time)
    chosen = min if least else statistics.median
    return {name: round(chosen(values), 1) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="2048,16384")
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    options = parser.parse_args()

    def emit(**row):
        print(json.dumps(row), flush=True)
        with open(os.path.join(options.out, "h200_kernels.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")

    emit(what="conditions", gpu=torch.cuda.get_device_name(), torch=torch.__version__, dtype="bfloat16", unit="us")
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            step = step_of(shape, tokens)
            step()
            torch.cuda.synchronize()
            emit(shape=shape, tokens=tokens, card="cool", **kernels_of(step))
            start = time.time()
            while time.time() - start < WARM:
                step()
                torch.cuda.synchronize()
            emit(shape=shape, tokens=tokens, card="warm", **kernels_of(step))


if __name__ == "__main__":
    main()
