"""Expert parallelism on paper: what a layer sends, how it fills the GPU, how long it should take and what limits it.

    python benchmarks/ep_model.py                                          # all shapes; some minutes
    python benchmarks/ep_model.py --shapes glm-5.2 --ep 8,16 --counts counts.npz
    python benchmarks/ep_model.py --measured benchmarks/results/ep_h200.jsonl

A prediction, not a measurement: `ep_cost.py` has the model and the rates it starts from, which were measured one by
one; what one GPU takes for a block comes from `results/h200_blocks.jsonl`. `--measured` sets it against layers that
were really run. Writes a table (.md), everything (.json) and, with matplotlib, a plot (.png).
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from ep_cost import FABRICS, NIC, PASSES, Cost, Prediction, Setup, fit, nearest, predict
from ep_routing import ROUTINGS, Routing, Zipf, counted, load_counts, traffic
from shapes import SHAPES, SPREAD, Shape

RESULTS = Path(__file__).parent / "results"
ONE_GPU = RESULTS / "h200_blocks.jsonl"


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@dataclass(frozen=True)
class Check:
    """A layer that was run, and its prediction, in milliseconds."""

    shape: str
    ranks: int
    tokens: int
    routing: str
    which: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def check(measured: list[dict], costs: dict[str, dict[str, Cost]], setup: Setup, how: Zipf) -> list[Check]:
    """Of rows {"shape": [H, I, E, K], "ep", "tokens", "routing", "pass", "ms", "candidate"} those whose candidate is
    "mok"; of a point that was measured several times the last counts."""
    checks, predictions, points = [], {}, {}
    for row in (r for r in measured if r.get("candidate") == "mok"):
        key = (Shape(*row["shape"]), row["ep"], row["tokens"], row["routing"])
        points[key, row["pass"]] = key, row
    for key, row in points.values():
        shape = key[0]
        if key not in predictions:
            ids = ROUTINGS[row["routing"]](shape.experts, shape.top_k, how).ids(row["ep"], row["tokens"], how.seed)
            name = next((name for name, known in SHAPES.items() if known == shape), str(tuple(shape)))
            load = traffic(ids, shape.experts)
            predictions[key] = predict(name, shape, row["routing"], load, row["tokens"], setup, nearest(costs, shape))
        p = predictions[key]
        ours = getattr(p, row["pass"]).seconds * 1e3
        checks.append(Check(p.shape, p.ranks, p.tokens, p.routing, row["pass"], row["ms"], ours))
    return checks


def one_gpu(rows: list[dict]) -> list[dict]:
    """The rows of h200.py that `fit` does not use, Zipf routing, as measured layers of one rank."""
    found = {}
    for r in rows:
        if r.get("candidate") == "op" and r["routing"] == "zipf" and r["tokens"] >= 2048:
            layer = {"shape": SHAPES[r["shape"]], "ep": 1, "tokens": r["tokens"], "routing": "zipf", "candidate": "mok"}
            for which, key in (("forward", "fwd_ms"), ("both", "both_ms")):
                found[r["shape"], r["tokens"], which] = {**layer, "pass": which, "ms": r[key]}
    return list(found.values())


def lines(head: list[str], body: list[list]) -> list[str]:
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *body)]


def mega(count: float) -> str:
    return f"{count / 1e6:.0f}"


def table(rows: list[Prediction]) -> list[str]:
    head = ["model", "fabric", "EP", "T", "routing", "rows mean", "rows worst", "dispatch MB route", "MB unique"]
    head += ["of it by NIC", "waves up", "waves down", "flat MB", "filled", "turns", "turns' compute"]
    head += ["forward ms", "limit", "fwd+bwd ms", "limit", "of ideal fwd", "of ideal fwd+bwd"]
    body = []
    for p in rows:
        cells = [p.shape, p.fabric, p.ranks, p.tokens, p.routing, f"{p.rows_mean:.0f}", p.rows, mega(p.route_bytes)]
        cells += [mega(p.unique_bytes), mega(p.nic_bytes), f"{p.waves_up:.1f}", f"{p.waves_down:.1f}"]
        cells += [mega(p.flat_bytes), f"{p.filled:.2f}", p.turns, f"x {p.turns_slowdown:.2f}"]
        for time in (p.forward, p.both):
            cells += [f"{time.seconds * 1e3:.2f}", time.limit]
        body.append([*cells, *(f"{p.of_ideal(which):.2f}" for which in PASSES)])
    return lines(head, body)


def summary(rows: list[Prediction], tokens: int, ranks: tuple[int, ...] = (2, 8, 16, 64)) -> list[str]:
    """The table of the documentation: balanced routing on H200, and what skew and one NVLink domain change."""
    found = {(p.shape, p.ranks, p.routing, p.fabric): p for p in rows if p.tokens == tokens}
    head = [
        "model",
        "EP",
        "dispatch MB: route / unique",
        "waves up / down",
        "buffer MB (filled)",
        "turns (products)",
        "forward ms",
    ]
    head += ["fwd+bwd ms", "limit", "of ideal", "Zipf: rows", "Zipf: of ideal", "one domain: of ideal"]
    body = []
    for (name, n, routing, fabric), p in found.items():
        skewed, domain = found.get((name, n, "zipf-shuffled", "h200")), found.get((name, n, "balanced", "nvl72"))
        if routing == "balanced" and fabric == "h200" and n in ranks and skewed and domain:
            cells = [name, n, f"{mega(p.route_bytes)} / {mega(p.unique_bytes)}"]
            cells += [f"{p.waves_up:.0f} / {p.waves_down:.0f}", f"{mega(p.flat_bytes)} ({p.filled:.2f})"]
            cells += [f"{p.turns} (x {p.turns_slowdown:.2f})"]
            cells += [f"{p.forward.seconds * 1e3:.2f}", f"{p.both.seconds * 1e3:.2f}", p.both.limit]
            cells += [f"{p.of_ideal('both'):.2f}", f"x {skewed.rows / skewed.rows_mean:.1f}"]
            body.append([*cells, f"{skewed.of_ideal('both'):.2f}", f"{domain.of_ideal('both'):.2f}"])
    return lines(head, body)


def check_table(checks: list[Check]) -> list[str]:
    body = []
    for c in checks:
        times = [f"{c.measured:.3f}", f"{c.predicted:.3f}", f"{c.ratio:.2f}"]
        body.append([c.shape, c.ranks, c.tokens, c.routing, c.which, *times])
    return lines(["model", "EP", "T", "routing", "pass", "measured ms", "predicted ms", "predicted / measured"], body)


def plot(rows: list[Prediction], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    names, routings, fabrics = (
        list(dict.fromkeys(getattr(p, f) for p in rows)) for f in ("shape", "routing", "fabric")
    )
    sizes, ranks = (sorted({getattr(p, field) for p in rows}) for field in ("tokens", "ranks"))
    size = (3.6 * len(names), 3.2 * len(sizes))
    figure, axes = plt.subplots(len(sizes), len(names), figsize=size, squeeze=False, sharey=True)
    for axis, (tokens, name) in zip(axes.flat, ((t, n) for t in sizes for n in names), strict=True):
        for color, routing in enumerate(routings):
            for style, fabric in zip(("-", "--", ":"), fabrics, strict=False):
                of = [p for p in rows if (p.shape, p.tokens, p.routing, p.fabric) == (name, tokens, routing, fabric)]
                points = [p.of_ideal("both") for p in of]
                places = [ranks.index(p.ranks) for p in of]
                axis.plot(places, points, style, marker=".", color=f"C{color}", label=f"{routing}, {fabric}")
        axis.set_xticks(range(len(ranks)), ranks)
        axis.set(xlabel="ranks", ylim=(0, 1.05))
        axis.set_title(f"{name}, T = {tokens}", fontsize=9)
    for row in axes:
        row[0].set_ylabel("speed, of the balanced ideal")
    axes.flat[-1].legend(fontsize=6)
    figure.suptitle("Predicted forward and backward of one layer", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def routings_of(shape: Shape, args: argparse.Namespace, how: Zipf) -> list[Routing]:
    chosen = [ROUTINGS[kind](shape.experts, shape.top_k, how) for kind in args.routing]
    for name, counts in (load_counts(args.counts) if args.counts else {}).items():
        if counts.numel() == shape.experts:
            chosen.append(counted(name, counts, shape.top_k))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser.add_argument("--shapes", type=words, default=list(SPREAD), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ep", type=numbers, default=[2, 4, 8, 16, 32, 64], help="numbers of ranks")
    parser.add_argument("--tokens", type=numbers, default=[2048, 16384], help="T of each rank")
    parser.add_argument("--routing", type=words, default=list(ROUTINGS))
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf routing")
    parser.add_argument("--counts", type=Path, help="routes per expert, .json or .npz, for shapes with as many experts")
    parser.add_argument("--fabrics", type=words, default=list(FABRICS))
    parser.add_argument("--nic", type=float, default=NIC / 1e9, help="GB/s of each GPU between NVLink domains")
    parser.add_argument("--comm-sms", type=int, default=8)
    parser.add_argument("--route", action="store_true", help="a token is sent once for each of its experts")
    parser.add_argument("--measured", type=Path, help="layers that were run, a line of JSON each, to be set beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS / "ep_model"), help="path without suffix")
    args = parser.parse_args()

    how, single = Zipf(args.exponent, args.seed), read_rows(ONE_GPU)
    costs = fit(single)
    fabrics = [replace(FABRICS[name], nic=args.nic * 1e9) for name in args.fabrics]
    setups = [Setup(fabric, args.comm_sms, not args.route) for fabric in fabrics]
    rows = []
    for name in args.shapes:
        shape = SHAPES[name]
        for routing in routings_of(shape, args, how):
            ids = routing.ids(max(args.ep), max(args.tokens), args.seed)
            for ranks in args.ep:
                for tokens in args.tokens:
                    load = traffic(ids[:ranks, :tokens], shape.experts)
                    for setup in setups:
                        rows.append(predict(name, shape, routing.name, load, tokens, setup, nearest(costs, shape)))
        print(*table([p for p in rows if p.shape == name]), "", sep="\n", flush=True)

    measured = one_gpu(single) + (read_rows(args.measured) if args.measured else [])
    checks = check(measured, costs, Setup(FABRICS["h200"], args.comm_sms, not args.route), how)
    print(*check_table(checks), sep="\n")
    conditions = {
        "date": datetime.date.today().isoformat(),
        "what": "prediction; nothing here was run, apart from the column of measured times",
        "from": f"{ONE_GPU.name} (last rows), seed {args.seed}, Zipf exponent {args.exponent}",
        "sent": "once for each expert" if args.route else "once to each rank",
        "communication SMs": args.comm_sms,
        "fabrics": {fabric.name: asdict(fabric) for fabric in fabrics},
        "torch": torch.__version__,
    }
    everything = {"conditions": conditions, "rows": [asdict(p) for p in rows], "checks": [asdict(c) for c in checks]}
    Path(args.out + ".json").write_text(json.dumps(everything, indent=1) + "\n")
    text = ["# Expert parallelism: predicted", "", *(f"- {k}: {v}" for k, v in conditions.items()), ""]
    text += ['docs/distributed.md, "Scale on paper", explains the columns.', ""]
    for tokens in args.tokens:
        text += [f"## {tokens} tokens a rank", "", *table([p for p in rows if p.tokens == tokens]), ""]
    text += ["## Predicted and measured", "", *check_table(checks), ""]
    Path(args.out + ".md").write_text("\n".join(text))
    plot(rows, Path(args.out + ".png"))


if __name__ == "__main__":
    main()
