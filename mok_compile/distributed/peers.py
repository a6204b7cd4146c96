"""The ranks of an expert-parallel group and what they say and send to each other, over any process group.

Whatever goes wrong on one rank is either said by all of them in the same words (`Peers.agree`) or ends, at the latest,
with the timeout of the process group, as an error that names rank, phase and counts.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

# Sizes that all ranks share whatever they call: a collective of different sizes can end a process instead of raising.
NUMBERS = 6
TEXT = 512  # bytes that a rank may say of itself in an error


class Peers:
    """This rank among those of the group called `name`; collectives run on `device`."""

    def __init__(self, name: str, ranks: int, device: torch.device) -> None:
        self.group = _resolve_process_group(name)
        self.rank, self.ranks, self.device = self.group.rank(), self.group.size(), device
        if self.ranks != ranks:
            raise ValueError(f"mok::experts_parallel: the call is for {ranks} ranks, group {name!r} has {self.ranks}")

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """What each rank gives, [ranks, *shape]; all give the same shape and dtype."""
        said = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(said, own.contiguous(), group=self.group)
        return torch.stack(said)

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """The first ``send[0]`` of `rows` go to rank 0, and so on; what comes, in the order of the ranks, is
        ``receive[r]`` rows from rank r."""
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.group)
        return received

    def agree(self, phase: str, call: str, problem: str | None, numbers: Sequence[int]) -> list[list[int]]:
        """The `numbers` of all ranks, once they agree on `call` and none has a `problem`; else ValueError on all of
        them, which names phase and ranks. At most `NUMBERS`; each rank's are followed by zeros."""
        with self.during(phase, "comparing the calls"):
            own = [problem is not None, zlib.crc32(call.encode()), *numbers, *[0] * (NUMBERS - len(numbers))]
            said = self.gather(torch.tensor(own, dtype=torch.int64, device=self.device)).tolist()
            if not any(failed for failed, *_ in said) and len({digest for _, digest, *_ in said}) == 1:
                return [rest for _, _, *rest in said]
            texts = self._texts(f"cannot take part: {problem}" if problem is not None else call)
        ranks = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise ValueError(f"mok::experts_parallel, {phase}: the {self.ranks} ranks do not fit together. {ranks}")

    @contextlib.contextmanager
    def during(self, phase: str, what: str) -> Iterator[None]:
        """Says in errors of the communication where they happened."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"mok::experts_parallel, {phase} on rank {self.rank} of {self.ranks}: {what} failed; a rank has "
                f"stopped, does not call the block, or is later than the process group's timeout. {error}"
            ) from error

    def _texts(self, own: str) -> list[str]:
        data = own.encode()[:TEXT].ljust(TEXT)
        texts = self.gather(torch.tensor(list(data), dtype=torch.uint8, device=self.device))
        return [bytes(row).decode(errors="replace").strip() for row in texts.tolist()]
