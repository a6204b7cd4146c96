"""Large buffers of the CPU engine, kept between calls.

The gradients of one block are hundreds of megabytes. Allocators hand so much back to the system at once, and getting it
again - page faults, zeroing - costs more than the products that fill it. A buffer that its last tensor gave up is kept
here for the next call instead, and the system is told that it may take the pages whenever it is short of memory
(MADV_FREE). Buffers in use and kept together are never more than were once in use.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque

import torch

SMALLEST = 32 << 20  # bytes; malloc keeps smaller pieces itself (glibc's largest threshold for mapping)
_HAVE = all(hasattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_FREE", "MADV_HUGEPAGE"))


class Pool:
    """Buffers by their bytes: `lent` to tensors, `most` at once so far, and `kept`, longest unused first."""

    def __init__(self) -> None:
        self.lent = self.most = 0
        self.kept: list[mmap.mmap] = []
        # Tensors die anywhere, in the midst of `_take` too: their buffers wait here.
        self._returned: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """`torch.empty_like` for a tensor on the CPU."""
        like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        return self.empty_strided(like.shape, like.stride(), like.dtype)

    def empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """`torch.empty_strided` on the CPU, for strides without gaps."""
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._take(_size_class(size)) if size >= SMALLEST and _HAVE else None
        if buffer is None:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        loan = memoryview(buffer)
        # The tensor's storage holds the view; when that lets go, the buffer comes back.
        weakref.finalize(loan, self._give_back, buffer).atexit = False
        return torch.frombuffer(loan, dtype=dtype).as_strided(shape, strides)

    def release(self) -> None:
        """Gives what is kept, and not in use, back to the system."""
        with self._lock:
            self._count_returned()
            self.kept.clear()
            self.most = self.lent

    def _take(self, size: int) -> mmap.mmap | None:
        """A buffer of `size` bytes, or None if the system has none."""
        with self._lock:
            self._count_returned()
            fitting = [i for i, buffer in enumerate(self.kept) if len(buffer) == size]
            self.most = max(self.most, self.lent + size)
            if fitting:
                buffer = self.kept.pop(fitting[-1])
            else:
                while self.kept and self.lent + size + sum(map(len, self.kept)) > self.most:
                    del self.kept[0]
                try:
                    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                except OSError:
                    return None
                _advise(buffer, mmap.MADV_HUGEPAGE)
            self.lent += size
            return buffer

    def _count_returned(self) -> None:
        while self._returned:
            self.kept.append(self._returned.popleft())
            self.lent -= len(self.kept[-1])

    def _give_back(self, buffer: mmap.mmap) -> None:
        _advise(buffer, mmap.MADV_FREE)
        self._returned.append(buffer)


def _advise(buffer: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without it
        buffer.madvise(advice)


def _size_class(size: int) -> int:
    """`size` rounded up to a quarter of its power of two: what varies a little from call to call shares buffers."""
    step = max(1 << (size.bit_length() - 3), mmap.PAGESIZE)
    return -(-size // step) * step


pool = Pool()
