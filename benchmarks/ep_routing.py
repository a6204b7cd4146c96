"""Routing of expert parallelism on paper: which token of which rank goes to which expert, and what that sends where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mok_compile.distributed.sharding import Sharding


@dataclass(frozen=True)
class Routing:
    """`draw(tokens, generator)` gives their experts, ids [tokens, K], K different ones for each token."""

    name: str
    draw: Callable[[int, torch.Generator], torch.Tensor]

    def ids(self, ranks: int, tokens: int, seed: int) -> torch.Tensor:
        """ids [ranks, tokens, K], the first ranks of which do not depend on how many there are."""
        generators = [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(ranks)]
        return torch.stack([self.draw(tokens, generator) for generator in generators])


def race(popularity: torch.Tensor, top_k: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """K different experts for each token, drawn one after the other by `popularity` [E]; ids [tokens, K]."""
    # Arrival times of an exponential race: the first K of them are such a draw (the Gumbel top-k).
    arrivals = torch.empty(tokens, popularity.numel()).exponential_(generator=generator)
    return arrivals.div_(popularity).topk(top_k, 1, largest=False).indices


def systematic(inclusion: torch.Tensor, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Experts for each token so that expert e is among them with probability `inclusion[e]` exactly; ids [tokens, K],
    K the sum of `inclusion` [E]. In an order of its own, each token takes the experts in whose interval one of K
    equally spaced points falls."""
    top_k = round(inclusion.sum().item())
    order = torch.rand(tokens, inclusion.numel(), generator=generator).argsort(1)
    ends = inclusion.double()[order].cumsum(1)
    ends[:, -1] = top_k  # whatever the rounding
    start = torch.rand(tokens, 1, generator=generator, dtype=torch.float64)
    points = torch.cat([-start, ends - start], 1).floor()
    return order[points.diff(dim=1) > 0].view(tokens, top_k)


@dataclass(frozen=True)
class Zipf:
    """Popularity 1 / place^`exponent`; `seed` of where a shuffled order puts the experts."""

    exponent: float = 1.0
    seed: int = 0


def balanced(experts: int, top_k: int, how: Zipf) -> Routing:
    """All experts alike, each token at random."""
    return Routing("balanced", lambda tokens, generator: race(torch.ones(experts), top_k, tokens, generator))


def zipf(experts: int, top_k: int, how: Zipf) -> Routing:
    """The experts in the order of their places: the first rank holds the hottest ones."""
    popularity = torch.arange(1, experts + 1).float() ** -how.exponent
    return Routing("zipf", lambda tokens, generator: race(popularity, top_k, tokens, generator))


def zipf_shuffled(experts: int, top_k: int, how: Zipf) -> Routing:
    """The same popularities, the experts in a random order."""
    places = torch.randperm(experts, generator=torch.Generator().manual_seed(how.seed))
    in_order = zipf(experts, top_k, how)
    return Routing("zipf-shuffled", lambda tokens, generator: places[in_order.draw(tokens, generator)])


ROUTINGS = {"balanced": balanced, "zipf-shuffled": zipf_shuffled, "zipf": zipf}


def counted(name: str, counts: torch.Tensor, top_k: int) -> Routing:
    """Experts as often as `counts` [E] says, which were counted in a real model. ValueError if an expert has more than
    one in K of all routes: no K different experts per token give that."""
    inclusion = counts.double() * top_k / counts.sum()
    if inclusion.max() > 1 + 1e-9:
        raise ValueError(f"{name}: expert {inclusion.argmax()} has {inclusion.max() / top_k:.0%} of the routes")
    return Routing(name, lambda tokens, generator: systematic(inclusion, tokens, generator))


def load_counts(path: Path) -> dict[str, torch.Tensor]:
    """Counts of routes per expert by name, from .npz (arrays [E] or [layers, E]) or .json (lists of that form, or an
    object of them by name). Each layer is a routing of its own."""
    if path.suffix == ".npz":
        import numpy

        with numpy.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
    else:
        content = json.loads(path.read_text())
        found = {
            k: torch.tensor(v) for k, v in (content if isinstance(content, dict) else {path.stem: content}).items()
        }
    layers = {}
    for name, counts in found.items():
        if counts.dim() == 1:
            layers[name] = counts
        else:
            layers |= {f"{name} {number}": layer for number, layer in enumerate(counts)}
    return layers


@dataclass(frozen=True)
class Traffic:
    """What the ranks send each other in one layer. `routes` and `tokens` [ranks, ranks] int64, from the row's rank to
    the column's: routes, and tokens with at least one; `per_expert` [ranks, experts of a rank] int64: rows there."""

    routes: torch.Tensor
    tokens: torch.Tensor
    per_expert: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """[ranks] int64: rows that a rank's experts get."""
        return self.per_expert.sum(1)


def traffic(ids: torch.Tensor, experts: int) -> Traffic:
    """From the ids [ranks, T, K] of all ranks' tokens, all in [0, E)."""
    ranks, tokens, _ = ids.shape
    sharding = Sharding(experts, ranks)
    owner = ids // sharding.per_rank
    per_expert = torch.bincount(ids.flatten(), minlength=sharding.per_rank * ranks)
    routes = torch.stack([torch.bincount(of_rank.flatten(), minlength=ranks) for of_rank in owner])
    hit = torch.zeros(ranks, tokens, ranks, dtype=torch.bool).scatter_(2, owner, True)
    return Traffic(routes, hit.sum(1), per_expert.view(ranks, sharding.per_rank))
