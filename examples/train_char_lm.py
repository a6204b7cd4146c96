"""Trains a small MoE language model on characters, eager and with backend="mok" side by side from the same weights.

    python examples/train_char_lm.py                   loss curves of both, and a plot of them in char_lm.png
    python examples/train_char_lm.py --compare         backend="inductor" too, and how the step times compare

The text is the language reference that ships with CPython (pydoc_data.topics); nothing is downloaded. All runs see the
same batches in the same order, one step each in turn, so that whatever else the machine does meets all of them alike.
Exit status 1 if the loss does not fall or the curves differ.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from pydoc_data.topics import topics

import torch
import transformers
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TOLERANCE = 1e-2  # relative; both sum in other orders, and training amplifies the last bits


def main() -> int:
    args = parse()
    data, characters = load_text()
    model = build(args, characters)
    size = f"H={args.hidden} I={args.intermediate} E={args.experts} K={args.top_k}, {args.layers} layers"
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(data):,} characters of {characters} kinds; {count / 1e6:.1f} M parameters ({size})")
    print(f"{args.steps} steps of {args.batch} x {args.context} characters, {torch.get_num_threads()} threads")

    runs = {"eager": copy.deepcopy(model), "mok": torch.compile(copy.deepcopy(model), backend="mok")}
    if args.compare:
        runs["inductor"] = torch.compile(copy.deepcopy(model), backend="inductor")
    print("compiling in the first step: about a minute for each compiled run on two cores")
    losses, seconds = train(runs, data, args)

    fused = torch._dynamo.utils.counters["mok"]["fused"]
    first, last = average(losses["mok"][:5]), average(losses["mok"][-5:])
    worst = max(abs(a - b) / a for a, b in zip(losses["eager"], losses["mok"], strict=True))
    good = {
        f"{fused} of {args.layers} MoE blocks fused": fused == args.layers,
        f"the loss falls from {first:.3f} to {last:.3f} nats per character": last < first,
        f"the curves agree to {worst:.1e}": worst < TOLERANCE,
    }
    for text, holds in good.items():
        print(f"{'ok' if holds else 'NO':4} {text}")
    result = speed(seconds)
    plot(losses, args.out)
    print(f"curves: {args.out}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"conditions": conditions(args), "ms": result, "losses": losses}, file, indent=1)
    if not all(good.values()):
        print("train_char_lm FAILED: " + "; ".join(t for t, holds in good.items() if not holds), file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=128, help="width of one expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )
    parser.add_argument("--compare", action="store_true", help='train with backend="inductor" as well')
    parser.add_argument("--out", default="char_lm.png", help="the plot (default: %(default)s)")
    parser.add_argument("--json", help="file for losses, step times and conditions")
    return parser.parse_args()


def load_text() -> tuple[torch.Tensor, int]:
    """The text as numbers, and how many kinds of characters it has."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


def build(args: argparse.Namespace, characters: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=characters,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        moe_intermediate_size=args.intermediate,
        max_position_embeddings=args.context,
        use_cache=False,
        pad_token_id=None,
    )
    return Qwen3MoeForCausalLM(config).to(getattr(torch, args.dtype))


def train(runs: dict, data: torch.Tensor, args: argparse.Namespace) -> tuple[dict, dict]:
    """Losses and seconds of each step (forward and backward, without the optimizer) of each run."""
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in runs.items()}
    losses, seconds = {name: [] for name in runs}, {name: [] for name in runs}
    random = torch.Generator().manual_seed(0)
    progress = tqdm(range(args.steps), unit="step", disable=None)
    for _ in progress:
        starts = torch.randint(0, len(data) - args.context, (args.batch, 1), generator=random)
        batch = data[starts + torch.arange(args.context)]
        for name, model in runs.items():
            start = time.perf_counter()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(loss.item())
            optimizers[name].step()
            optimizers[name].zero_grad()
        progress.set_postfix({name: f"{values[-1]:.3f}" for name, values in losses.items()})
    return losses, seconds


def speed(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Prints and returns the median milliseconds of a step; ratios are medians over steps of the same batch."""
    warm = {name: values[2:] or values for name, values in seconds.items()}  # the first steps compile
    for name, values in warm.items():
        ratio = statistics.median(a / b for a, b in zip(values, warm["mok"], strict=True))
        versus = "" if name == "mok" else f"; mok is {ratio:.2f} times as fast"
        print(f"{name:8} {1000 * statistics.median(values):7.1f} ms for forward and backward{versus}")
    return {name: round(1000 * statistics.median(values), 2) for name, values in warm.items()}


def plot(losses: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles = {
        "eager": {"linewidth": 5, "color": "0.8"},
        "inductor": {"linewidth": 2.5, "color": "tab:blue", "linestyle": ":"},
        "mok": {"linewidth": 1.2, "color": "tab:red"},
    }
    for name in [n for n in styles if n in losses]:
        axes.plot(range(1, len(losses[name]) + 1), losses[name], label=name, **styles[name])
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per character)")
    axes.set_title("Character model, small Qwen3-MoE: same weights, same batches")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def conditions(args: argparse.Namespace) -> dict:
    shown = {name: value for name, value in vars(args).items() if name not in ("out", "json")}
    return shown | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load average": round(os.getloadavg()[0], 1),
    }


def average(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
