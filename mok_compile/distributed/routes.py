"""Where the slots of all ranks go: the schedule of one expert-parallel block.

A *route* is a slot (token, k) whose id names an expert. Each rank sorts its routes by expert, hence by rank; the rank
that holds the experts gets them in the order of the ranks they come from. An expert thus meets its rows in the order
in which one process would, that has the tokens of all ranks one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok_compile import reference
from mok_compile.distributed.peers import Peers
from mok_compile.distributed.sharding import Sharding


@dataclass(frozen=True)
class Routes:
    """``order`` [S]: this rank's slots sorted by expert, those without a route last. ``counts`` [ranks, E] int64, on
    the host: how many routes each rank has to each expert."""

    order: torch.Tensor
    counts: torch.Tensor
    sharding: Sharding
    rank: int

    @staticmethod
    def exchange(ids: torch.Tensor, sharding: Sharding, peers: Peers) -> Routes:
        """The schedule, from the ids [T, K] of every rank. Waits for the device: sizes of messages are host numbers."""
        plan = reference.schedule(ids, sharding.num_experts)
        own = torch.diff(plan.offsets, prepend=plan.offsets.new_zeros(1))
        with peers.during("dispatch", "exchanging the counts of routes"):
            counts = peers.gather(own).cpu().long()
        return Routes(plan.order, counts, sharding, peers.rank)

    @property
    def _by_rank(self) -> torch.Tensor:
        """[from rank, to rank, expert of that rank]"""
        ranks, experts = self.counts.shape
        padded = self.counts.new_zeros(ranks, ranks * self.sharding.per_rank)
        padded[:, :experts] = self.counts
        return padded.view(ranks, ranks, self.sharding.per_rank)

    @property
    def sent(self) -> list[int]:
        """Routes from here to each rank."""
        return self._by_rank[self.rank].sum(1).tolist()

    @property
    def received(self) -> list[int]:
        """Routes from each rank to here."""
        return self._by_rank[:, self.rank].sum(1).tolist()

    @property
    def slots(self) -> torch.Tensor:
        """[V] int64: this rank's slots that have a route, in the order in which they are sent."""
        return self.order[: sum(self.sent)].long()

    def local_ids(self, device: torch.device) -> torch.Tensor:
        """[R, 1] int32: the expert of each received row, counted from this rank's first one."""
        per_expert = self._by_rank[:, self.rank].reshape(-1)
        experts = torch.arange(self.sharding.per_rank, dtype=torch.int32).repeat(self.counts.shape[0])
        return experts.repeat_interleave(per_expert)[:, None].to(device)

    def local_offsets(self, device: torch.device) -> torch.Tensor:
        """[E of this rank] int32: the ends of its experts' rows, once sorted by expert."""
        per_expert = self._by_rank[:, self.rank].sum(0)[: self.sharding.size(self.rank)]
        return per_expert.cumsum(0).int().to(device)

    def __str__(self) -> str:
        return f"routes to the ranks {self.sent}, from the ranks {self.received}"
