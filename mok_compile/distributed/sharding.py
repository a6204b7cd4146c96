"""Which rank of an expert-parallel group holds which experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """E experts over the ranks of a group, in the way of DTensor's ``Shard(0)``: rank r holds `per_rank` experts from
    r * `per_rank` on. Where E is no multiple of the ranks, the last ones hold fewer, or none."""

    num_experts: int
    ranks: int

    @property
    def per_rank(self) -> int:
        return -(-self.num_experts // self.ranks)

    def first(self, rank: int) -> int:
        """The first expert of a rank; E where it has none."""
        return min(rank * self.per_rank, self.num_experts)

    def size(self, rank: int) -> int:
        """How many experts a rank holds."""
        return self.first(rank + 1) - self.first(rank)
