"""The main job, on a model small enough for a laptop: compile a Qwen3-MoE with backend="mok", see what was fused,
compare with eager, train it.

    python examples/quickstart.py          (or: make demo)

Nothing is downloaded. Takes one to two minutes on two cores, nearly all of it C++ compilation by Inductor; the first
run on a machine builds the kernels of this project too (about half a minute). Exit status 1 if anything is wrong.
"""

import argparse
import copy
import logging
import sys
import threading
import time
from contextlib import contextmanager

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS = 2
failures = []


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    steps = arguments.parse_args().steps

    print("1. A small Qwen3-MoE: random weights, stock transformers code, no model edits")
    model = build()
    batch = make_batch()
    count = sum(p.numel() for p in model.parameters())
    tokens = batch["input_ids"].numel()
    print(f"   {LAYERS} layers, 8 experts, top-2, {count / 1e6:.1f} M parameters, {tokens} tokens\n")

    print("2. What will be fused? mok_compile.explain runs the model once and compiles nothing")
    import mok_compile  # for this report only: compiling needs no import

    with stage("tracing; the first time on this machine, building the kernels"):
        report = mok_compile.explain(model, {"mok.verify": True})(**batch)
    print(indent(str(report)))
    check(report.fused == LAYERS and report.missed == 0, f"all {LAYERS} MoE blocks are fused")

    print('\n3. One step, eager against torch.compile(model, backend="mok")')
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="mok")
    loss_eager = step(eager, batch)
    with stage("compiling forward and backward"):
        loss = step(compiled, batch)
    check(relative(loss, loss_eager) < 1e-5, f"loss {loss:.6f}, eager {loss_eager:.6f}")
    worst, name = max(
        (relative(p.grad, q.grad), name)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True)
    )
    check(worst < 1e-4, f"gradients of {len(list(model.parameters()))} parameters agree to {worst:.0e} ({name})")
    fused = torch._dynamo.utils.counters["mok"]["fused"]
    check(fused == LAYERS, f'counters["mok"]["fused"] is {fused}')

    print(f"\n4. {steps} steps of training the compiled model; eager mode repeats each from the same weights")
    train(eager, compiled, batch, steps)

    print()
    if failures:
        print("quickstart FAILED: " + "; ".join(failures), file=sys.stderr)
        return 1
    print("Everything is as it should be.")
    return 0


def build() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=128,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def make_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def train(eager: torch.nn.Module, compiled: torch.nn.Module, batch: dict[str, torch.Tensor], steps: int) -> None:
    """Trains `compiled`, with a line every few steps. Eager mode takes its weights before each step: of two models left
    to themselves, one rounding may send a token to another expert, and their ways part."""
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    rows, seconds = [], [0.0, 0.0]
    print("   step   loss eager   loss compiled")
    for number in range(1, steps + 1):
        with torch.no_grad():
            for mine, weight in zip(eager.parameters(), compiled.parameters(), strict=True):
                mine.copy_(weight)
        losses = []
        for i, model in enumerate((eager, compiled)):
            model.zero_grad()
            start = time.perf_counter()
            losses.append(step(model, batch))
            seconds[i] += time.perf_counter() - start
        optimizer.step()
        rows.append(losses)
        if number == 1 or number % max(1, steps // 5) == 0:
            print(f"   {number:4d}   {losses[0]:10.6f}   {losses[1]:13.6f}", flush=True)
    worst = max(relative(b, a) for a, b in rows)
    check(worst < 1e-3, f"the losses agree to {worst:.0e}")
    check(rows[-1][1] < rows[0][1], f"the loss falls from {rows[0][1]:.2f} to {rows[-1][1]:.2f}")
    times = [1000 * s / steps for s in seconds]
    print(f"        {times[0]:.0f} ms a step eager, {times[1]:.0f} ms compiled (a toy size: benchmarks/ has real ones)")


def relative(value, expected) -> float:
    """Relative difference of two numbers, or of two tensors in the 2-norm."""
    value, expected = torch.as_tensor(value).double(), torch.as_tensor(expected).double()
    return ((value - expected).norm() / expected.norm()).item()


def check(good: bool, text: str) -> None:
    print(f"   {'ok' if good else 'NO':4} {text}")
    if not good:
        failures.append(text)


def indent(text: str) -> str:
    return "\n".join("   " + line for line in text.splitlines())


@contextmanager
def stage(text: str):
    """Says what is going on and, on a terminal, for how long already. Log messages get lines of their own."""
    start, done, log, said = time.perf_counter(), threading.Event(), logging.getLogger("mok_compile"), []

    def end_line(record: logging.LogRecord) -> bool:
        said.append(record)
        print(flush=True)
        return True

    def tick() -> None:
        while not done.wait(0.5):
            print(f"\r   ... {text}: {time.perf_counter() - start:.0f} s", end="", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    print(f"   ... {text}", end="", flush=True)
    log.addFilter(end_line)
    if sys.stdout.isatty():
        clock.start()
    try:
        yield
    finally:
        done.set()
        log.removeFilter(end_line)
        again = clock.is_alive() or said
        if clock.is_alive():
            clock.join()
        if again:
            print(f"\r   ... {text}", end="")
        print(f": {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
