"""Routers on one H100 or H200: their functions in eager mode and under Inductor, and the sm90 engine's kernels (up to
256 tokens one, with more a product and one); alone, and in front of the experts of Qwen3-30B-A3B.

    python benchmarks/h200_router.py

Microseconds a call inside a CUDA graph of several calls, each with weights of its own, so that they are not found in
the L2. Writes a line of JSON per measurement.
"""

import argparse
import json
import os
from dataclasses import dataclass

import torch
from shapes import SHAPES

from mok_compile import routing
from mok_compile.engines import get
from mok_compile.router import Groups, RouterSpec, Step
from mok_compile.spec import ExpertsSpec

LAYERS, REPLAYS = 8, 15
LOW, NORMALISE = Step("cast", ("bfloat16",)), Step("normalise")


def specs(top_k):
    """Routers as models have them in bfloat16."""
    groups = Groups(8, 4, 2, 0.0)
    sums = (Step("normalise", ("add", 1e-20)), Step("mul", (1.5,)))
    return {
        "softmax, normalised": RouterSpec(top_k, (Step("softmax", ("float32",)),), (NORMALISE, LOW)),
        "top k, softmax": RouterSpec(top_k, (), (Step("softmax"),)),
        "sigmoid, groups, correction": RouterSpec(top_k, (Step("sigmoid"),), sums, groups, True, False, False),
    }


@dataclass(frozen=True)
class Case:
    router: str
    hidden: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    dtype: str = "bfloat16"  # of tokens, weight and logits


CASES = (
    Case("softmax, normalised", 2048, 128, 8, (1, 8, 16, 64, 128, 256, 512, 2048, 16384)),
    Case("softmax, normalised", 2048, 512, 10, (1, 64, 256)),
    Case("softmax, normalised", 4096, 8, 2, (1, 64, 256)),
    Case("softmax, normalised", 2048, 64, 8, (2048, 16384)),
    Case("top k, softmax", 2880, 32, 4, (1, 64, 256, 2048, 16384)),
    Case("sigmoid, groups, correction", 4096, 128, 8, (1, 16, 64, 256)),
    Case("sigmoid, groups, correction", 7168, 256, 8, (2048, 16384)),
    Case("sigmoid, groups, correction", 7168, 256, 8, (1, 16, 128, 2048, 16384), "float32"),
    Case("sigmoid, groups, correction", 4096, 128, 8, (1, 2048, 16384), "float32"),
)


class Layer:
    """Random operands of one router."""

    def __init__(self, case, tokens, seed):
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape, scale=1.0):
            made = scale * torch.randn(shape, generator=generator, device="cuda")
            return made.to(getattr(torch, case.dtype))

        self.spec = specs(case.top_k)[case.router]
        weight = normal(case.experts, case.hidden, scale=case.hidden**-0.5)
        bias = normal(case.experts, scale=0.3) if case.router == "top k, softmax" else None
        correction = normal(case.experts, scale=0.1).float() if self.spec.corrected else None
        self.operands = normal(tokens, case.hidden), weight, bias, correction, None
        if tokens > 1:  # one compilation for all numbers of tokens but one
            torch._dynamo.mark_dynamic(self.operands[0], 0)


def functions(*args):
    routed = routing.route_and_weigh(*args)
    return routed.weights, routed.ids


def kernel(*args):
    routed = get("sm90").route_few(*args)
    return routed.weights, routed.ids


def graph_time(run):
    """Microseconds of one call; `run` takes the number of its layer."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            run(layer)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return round(sorted(times[3:])[REPLAYS // 2], 1)


def routers(emit):
    for case in CASES:
        torch._dynamo.reset()
        compiled = torch.compile(functions)
        for tokens in case.tokens:
            layers = [Layer(case, tokens, seed) for seed in range(LAYERS)]

            def time(route, layers=layers):
                return graph_time(lambda i: route(*layers[i].operands, layers[i].spec))

            times = {"eager": time(functions), "inductor": time(compiled), "kernel": time(kernel)}
            sizes = {
                "dtype": case.dtype,
                "hidden": case.hidden,
                "experts": case.experts,
                "top_k": case.top_k,
                "tokens": tokens,
            }
            emit(what="router", router=case.router, **sizes, **times)


def blocks(emit):
    hidden, inner, experts, top_k = SHAPES["qwen3-30b-a3b"]
    spec = ExpertsSpec("silu(gate) * up", "concat", "bfloat16")

    def normal(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5)

    ups, downs = ([normal(experts, *s) for _ in range(LAYERS)] for s in ((2 * inner, hidden), (hidden, inner)))
    torch._dynamo.reset()
    compiled = torch.compile(functions)
    for tokens in (1, 8, 16, 32, 64, 128, 256):
        layers = [
            Layer(Case("softmax, normalised", hidden, experts, top_k, ()), tokens, seed) for seed in range(LAYERS)
        ]
        fixed = [kernel(*layer.operands, layer.spec) for layer in layers]

        def time(route, layers=layers):
            def run(i):
                weights, ids = route(i)
                get("sm90").forward(layers[i].operands[0], ids, weights, [ups[i]], [downs[i]], [], [], spec, save=False)

            return graph_time(run)

        emit(
            what="block",
            model="qwen3-30b-a3b",
            tokens=tokens,
            experts_alone=time(lambda i, fixed=fixed: fixed[i]),
            inductor=time(lambda i, layers=layers: compiled(*layers[i].operands, layers[i].spec)),
            kernel=time(lambda i, layers=layers: kernel(*layers[i].operands, layers[i].spec)),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64

    def emit(**row):
        print(json.dumps(row), flush=True)
        with open(os.path.join(options.out, "h200_router.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\n")

    emit(what="conditions", gpu=torch.cuda.get_device_name(), torch=torch.__version__, dtype="bfloat16", unit="us")
    with torch.no_grad():
        routers(emit)
        blocks(emit)


if __name__ == "__main__":
    main()
