"""What one layer of expert parallelism takes, on paper.

The layer that is modelled: tokens are pulled by the ranks of their experts, in the order of first use, into a flat
buffer that is kept for the backward; rows already summed over a rank's experts are pushed back; both beside the
products of the other SMs, in steps of two waves of tiles. A rank's forward takes the longer of
    pull of the first step + products + push of the last step
    all that passes its link in one direction + products of the last step,
its backward the same, for dy and dx. The slowest rank, the schedule and the barriers make the layer's time. What leaves
an NVLink domain goes through the network card (NIC), at the same time as the rest through NVLink.
Not in it: clocks that drop when links and tensor cores work at once, congestion between switches, the gradients of the
routing weights (4 bytes a route), zeros written for the weights of experts without rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from ep_routing import Traffic
from shapes import SHAPES, Shape

from mok_compile.distributed import windows

# One H200. Tiles: those of forward for experts of many rows (docs/kernels/sm90.md).
SMS, TILE_ROWS, TILE_COLUMNS = 132, 128, 192
READ = 4.65e12  # bytes/s of weights streamed from HBM, measured (docs/kernels/sm90.md, "floor")
BYTES = 2  # bfloat16
# Bulk copies between four H200s, 4 KB rows at random, measured a direction: with 8 CTAs on every GPU 325 GB/s, one GPU
# alone 372; with 16 CTAs 335; with 8 CTAs beside multiplying SMs 295.
NVLINK = 325e9
BARRIER = 1.6e-6  # all GPUs of an NVLink domain, measured on four
# Between domains nothing was measured: a 400 Gb/s card for each GPU, and the usual round trip of a small message.
NIC, NIC_BARRIER = 50e9, 10e-6
# The sort of a block: 18 us for 131072 slots, 12 us for 16384 (docs/kernels/sm90.md, "Kernel times"). A rank sorts the
# slots of all ranks; its own are in the time of the block.
SORT_SLOT = 6e-6 / (131072 - 16384)
RING = 400_000_000  # bytes for tokens of other ranks, where a layer is said to be cut into turns
WAVES = 2  # of tiles in a step of the overlap, in each matmul

PASSES = ("forward", "both")


@dataclass(frozen=True)
class Fabric:
    """GPUs and what connects them. `domain`: how many reach each other by NVLink; `nvlink` and `nic`: bytes/s of one
    GPU in one direction; `speed`: of its tensor cores, against an H200's; `read`: bytes/s of HBM."""

    name: str
    domain: int
    nvlink: float = NVLINK
    nic: float = NIC
    speed: float = 1.0
    read: float = READ


FABRICS = {
    "h200": Fabric("h200", 8),
    # 72 GPUs in one domain, which no H200 has. By the data sheets, against the H200's: NVLink 900 to 450 GB/s a
    # direction, dense bf16 2500 to 989 TFLOP/s, HBM 8 to 4.8 TB/s. No kernel of ours runs there.
    "nvl72": Fabric("nvl72", 72, NVLINK * 900 / 450, NIC, 2500 / 989, READ * 8 / 4.8),
}


@dataclass(frozen=True)
class Cost:
    """Seconds that one expert takes for n rows, divided by H * I: `fixed` + n * `per_row`, through the times of the
    `measured` shape at T = 2048 and T = 16384. `passes`: how often weights, or their gradients, cross HBM at least."""

    measured: str
    fixed: float
    per_row: float
    passes: int

    def seconds(self, rows: torch.Tensor, shape: Shape, fabric: Fabric, sms: int) -> torch.Tensor:
        """Of experts with `rows` rows, on `sms` SMs. Fewer than one row: a row now and then."""
        size = shape.hidden * shape.inner
        read = self.passes * 3 * size * BYTES / fabric.read
        visited = rows.double().clamp(min=1)
        products = (self.fixed + self.per_row * visited) * size * SMS / sms / fabric.speed
        return rows.double().clamp(max=1) * products.clamp(min=read)


def fit(rows: list[dict]) -> dict[str, dict[str, Cost]]:
    """Costs by shape and pass, from rows of h200.py; of a point that was measured several times the last counts."""
    times = {(r["shape"], r["tokens"]): r for r in rows if r.get("candidate") == "op" and r["routing"] == "balanced"}
    costs = {}
    for name in {name for name, tokens in times if tokens == 16384 and (name, 2048) in times}:
        shape, costs[name] = SHAPES[name], {}
        few, many = (tokens * shape.top_k / shape.experts for tokens in (2048, 16384))
        for which, key, passes in (("forward", "fwd_ms", 1), ("both", "both_ms", 3)):
            each = [times[name, t][key] / 1e3 / shape.experts / shape.hidden / shape.inner for t in (2048, 16384)]
            per_row = (each[1] - each[0]) / (many - few)
            costs[name][which] = Cost(name, each[0] - per_row * few, per_row, passes)
    return costs


def nearest(costs: dict[str, dict[str, Cost]], shape: Shape) -> dict[str, Cost]:
    """The costs of the measured shape whose H and I are nearest, as ratios."""

    def distance(name: str) -> float:
        other = SHAPES[name]
        return abs(math.log(shape.hidden / other.hidden)) + abs(math.log(shape.inner / other.inner))

    return costs[min(sorted(costs), key=distance)]


@dataclass(frozen=True)
class Setup:
    """How a layer is run: `comm_sms` of every GPU move rows; with `unique` a token is sent once to a rank, else once
    for each of its experts there."""

    fabric: Fabric
    comm_sms: int = 8
    unique: bool = True

    def sms(self, ranks: int) -> int:
        """SMs that multiply."""
        return SMS - self.comm_sms if ranks > 1 else SMS


def columns(shape: Shape) -> tuple[int, int]:
    """Tiles side by side in the up and in the down matmul; an up tile is half gate, half up."""
    return math.ceil(shape.inner / (TILE_COLUMNS // 2)), math.ceil(shape.hidden / TILE_COLUMNS)


def tiles(per_expert: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks] tiles of the up and of the down matmul for rows `per_expert` [ranks, experts of a rank]."""
    blocks = ((per_expert + TILE_ROWS - 1) // TILE_ROWS).sum(1)
    up, down = columns(shape)
    return blocks * up, blocks * down


def step_rows(shape: Shape, sms: int) -> int:
    """The fewest rows whose tiles fill `WAVES` waves of each matmul."""
    return TILE_ROWS * math.ceil(WAVES * sms / min(columns(shape)))


def split(sent: torch.Tensor, domain: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sent` [ranks, ranks] by NVLink and by the network card; what stays on a rank is in neither."""
    ranks = torch.arange(sent.shape[0])
    near = ranks[:, None] // domain == ranks // domain
    return sent * (near & (ranks[:, None] != ranks)), sent * ~near


def busiest_port(sent: torch.Tensor) -> int:
    """The most that a rank sends or receives; what stays on a rank does not count."""
    moved = sent - sent.diag().diag()
    return int(torch.maximum(moved.sum(0), moved.sum(1)).max())


@dataclass(frozen=True)
class Moved:
    """[ranks] seconds: `pull` of what comes to a rank's experts; `link` of all that passes its port in one direction,
    which is the others' pulls from it and its pushes to them (the other direction carries as much); `by`: the slower
    way."""

    pull: torch.Tensor
    link: torch.Tensor
    by: list[str]


def move(sent: torch.Tensor, row_bytes: int, fabric: Fabric) -> Moved:
    """Of rows `sent` [ranks, ranks] and the same number of rows back."""
    near, far = (part * row_bytes for part in split(sent, fabric.domain))
    nvlink, nic = ((part.sum(0) + part.sum(1)) / rate for part, rate in ((near, fabric.nvlink), (far, fabric.nic)))
    pull = torch.maximum(near.sum(0) / fabric.nvlink, far.sum(0) / fabric.nic)
    by = ["NIC" if b > a else "NVLink" for a, b in zip(nvlink, nic, strict=True)]
    return Moved(pull, torch.maximum(nvlink, nic), by)


@dataclass(frozen=True)
class Time:
    """`seconds` of a pass and how they divide on its slowest rank: `compute` beside `link`, and `waits` for the
    schedule, the barriers and the steps that overlap with nothing. `limit` is what takes longest."""

    seconds: float
    compute: float
    link: float
    waits: float
    limit: str


def phase(compute: torch.Tensor, load: Traffic, moved: Moved, step: int, waits: float) -> Time:
    """One direction of a layer: `compute` [ranks] seconds, steps of `step` rows."""
    rows = load.rows.clamp(min=1)
    here = load.routes.diag()
    edge = moved.pull * (step / (rows - here).clamp(min=1)).clamp(max=1)
    first = (edge - compute * here / rows).clamp(min=0)  # the rank's own tokens are there already
    last = compute * (step / rows).clamp(max=1) * (moved.link > 0)
    products, passing = first + compute + edge, moved.link + last
    slowest = int(torch.maximum(products, passing).argmax())
    busy, link = compute[slowest].item(), moved.link[slowest].item()
    total = max(products[slowest].item(), passing[slowest].item()) + waits
    shares = {"compute": busy, moved.by[slowest]: link, "latency": total - max(busy, link)}
    return Time(total, busy, link, shares["latency"], max(shares, key=shares.get))


def latency(ranks: int, tokens: int, shape: Shape, fabric: Fabric) -> tuple[float, float]:
    """Seconds of the forward's schedule and barriers, and of the backward's barriers: one before the first pull, one
    after the last push. For the schedule every rank reads and sorts the ids of all others."""
    if ranks == 1:
        return 0.0, 0.0
    near = min(ranks, fabric.domain)
    slots = tokens * shape.top_k
    ids = 4 * slots * max((near - 1) / fabric.nvlink, (ranks - near) / fabric.nic)
    barriers = 2 * (BARRIER if ranks <= fabric.domain else NIC_BARRIER)
    return barriers + ids + (ranks - 1) * slots * SORT_SLOT, barriers


def join(forward: Time, backward: Time) -> Time:
    parts = (forward.compute + backward.compute, forward.link + backward.link, forward.waits + backward.waits)
    longest = max((forward, backward), key=lambda t: t.seconds)
    return Time(forward.seconds + backward.seconds, *parts, longest.limit)


@dataclass(frozen=True)
class Prediction:
    """One layer. Rows and bytes are the busiest rank's where they do not say "mean"; bytes are those of the dispatch,
    the combine sends as many the other way. The flat buffer has a place for every token of every other rank, of which
    the share `filled` comes to the busiest one. A ring of `RING` bytes cuts a pass into `turns`; each meets all
    experts, which makes the products of forward and backward `turns_slowdown` times longer. `ideal`: seconds of an even
    share of the rows on all SMs, with nothing to be sent."""

    shape: str
    fabric: str
    ranks: int
    tokens: int
    routing: str
    measured: str
    rows_mean: float
    rows: int
    route_bytes: int
    unique_bytes: int
    nic_bytes: int
    waves_up: float
    waves_down: float
    flat_bytes: int
    filled: float
    turns: int
    turns_slowdown: float
    forward: Time
    both: Time
    ideal: dict[str, float]

    def of_ideal(self, which: str) -> float:
        return self.ideal[which] / getattr(self, which).seconds


def predict(
    name: str, shape: Shape, routing: str, load: Traffic, tokens: int, setup: Setup, cost: dict[str, Cost]
) -> Prediction:
    """The Prediction for ranks of `tokens` tokens each, whose traffic is `load`."""
    fabric, ranks = setup.fabric, len(load.routes)
    sms, row_bytes = setup.sms(ranks), shape.hidden * BYTES
    sent = load.tokens if setup.unique else load.routes
    moved = move(sent, row_bytes, fabric)
    step = step_rows(shape, sms)
    waits = latency(ranks, tokens, shape, fabric)

    def compute(which: str, parts: int = 1) -> torch.Tensor:
        """[ranks] seconds, in so many parts one after the other"""
        return (cost[which].seconds(load.per_expert / parts, shape, fabric, sms) * parts).sum(1)

    work = {which: compute(which) for which in PASSES}
    forward = phase(work["forward"], load, moved, step, waits[0])
    backward = phase(work["both"] - work["forward"], load, moved, step, waits[1])

    flat = (ranks - 1) * tokens * row_bytes
    came = (sent - sent.diag().diag()).sum(0).max().item() * row_bytes
    _, turns = windows.Shape(None, None, shape.hidden, shape.top_k, False, RING).turns(tokens, ranks)
    worst = int(load.rows.argmax())
    waves = [t.double().mean().item() / sms for t in tiles(load.per_expert, shape)]
    rows_each = torch.tensor(ranks * tokens * shape.top_k / shape.experts)
    alone = {which: cost[which].seconds(rows_each, shape, fabric, SMS).item() for which in PASSES}
    return Prediction(
        shape=name,
        fabric=fabric.name,
        ranks=ranks,
        tokens=tokens,
        routing=routing,
        measured=cost["forward"].measured,
        rows_mean=load.rows.double().mean().item(),
        rows=int(load.rows.max()),
        route_bytes=busiest_port(load.routes) * row_bytes,
        unique_bytes=busiest_port(load.tokens) * row_bytes,
        nic_bytes=busiest_port(split(sent, fabric.domain)[1]) * row_bytes,
        waves_up=waves[0],
        waves_down=waves[1],
        flat_bytes=flat,
        filled=came / flat if flat else 0.0,
        turns=turns,
        turns_slowdown=(compute("both", turns)[worst] / work["both"][worst]).item(),
        forward=forward,
        both=join(forward, backward),
        ideal={which: t * shape.experts / ranks for which, t in alone.items()},
    )
