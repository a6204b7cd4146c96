"""Decoding with Hugging Face's `generate`, static cache, under CUDA graphs: a model of the Qwen3-30B-A3B shape.

    python benchmarks/generate.py

Candidates take turns: `eager`, `inductor` and `mok`, the latter two as transformers compiles decoding
(`CompileConfig(backend=..., mode="reduce-overhead")`, prefill in eager mode). `ms` is the time of a token, the median
of the steps between the first and the last tokens of all turns; for several sequences, which `generate` cannot stream,
the median of whole calls over their tokens, prefill included. The experts' routing is the model's own on random
weights. A line of JSON for each batch; it says how many of the chosen tokens are eager's.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import time

import torch
import transformers
from step_model import VOCABULARY, build
from torch._dynamo.utils import counters
from transformers.generation.streamers import BaseStreamer

from mok_compile.backend import mok  # noqa: F401  its name is then known where the package is not installed

PROMPT = 128


class Clock(BaseStreamer):
    """When each token was there: `generate` hands it over on the host, which waits for the device."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    given = parser.parse_args()
    model = build(given.layers).eval()
    ways = {"eager": model, "inductor": copy.deepcopy(model), "mok": copy.deepcopy(model)}

    def generate(way, ids):
        config = transformers.GenerationConfig(
            max_new_tokens=given.tokens,
            min_new_tokens=given.tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            disable_compile=way == "eager",
            compile_config=transformers.CompileConfig(backend=way, mode="reduce-overhead") if way != "eager" else None,
        )
        clock = Clock() if len(ids) == 1 else None  # streamers take one sequence only
        begin = time.perf_counter()
        tokens = ways[way].generate(ids, generation_config=config, streamer=clock)
        torch.cuda.synchronize()
        if clock is None:
            return tokens, [(time.perf_counter() - begin) / given.tokens]
        times = clock.times[2:]  # the prompt, and the token of the prefill
        return tokens, [b - a for a, b in itertools.pairwise(times)]

    for batch in map(int, given.batches.split(",")):
        generator = torch.Generator("cuda").manual_seed(batch)
        ids = torch.randint(0, VOCABULARY, (batch, PROMPT), device="cuda", generator=generator)
        found, seconds = {}, {way: [] for way in ways}
        for turn in range(given.turns + 1):
            for way in ways:
                counters.clear()
                found[way], steps = generate(way, ids)
                if turn:
                    seconds[way] += steps
                elif way == "mok" and not (counters["mok"]["fused"] and not counters["mok"]["missed"]):
                    raise RuntimeError(f"not every block is fused: {dict(counters['mok'])}")
        new = {way: tokens[:, PROMPT:] for way, tokens in found.items()}
        row = {
            "what": "generate", "layers": given.layers, "batch": batch, "prompt": PROMPT, "tokens": given.tokens,
            "ms": {way: round(1e3 * statistics.median(s), 4) for way, s in seconds.items()},
            "as_eager": {way: round(float((t == new["eager"]).float().mean()), 3) for way, t in new.items()},
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        with open(os.path.join(given.out, "h200_generate.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
