"""What ``python -m mok_compile tune`` has found: how many SMs read from other ranks best, by GPU, ranks and shape.

One JSON file in the package's cache folder, beside the kernels. Nothing in it changes a result, so one that is missing,
old or damaged costs time at most.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mok_compile import build
from mok_compile.engines import warn_once
from mok_compile.spec import dtype_name

MAX_SMS = 64  # more than this does not read faster


@dataclass(frozen=True)
class Key:
    """What a choice is for. `library`: the kernels that it was measured with, by their sources."""

    gpu: str
    ranks: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: str
    library: str


@dataclass(frozen=True)
class Best:
    """SMs that read from other ranks, in forward and in backward, and the numbers of tokens (of each rank) that they
    were chosen for."""

    sms: int
    backward_sms: int
    tokens: tuple[int, ...] = ()


DEFAULT = Best(16, 16)


def path() -> Path:
    """The file. It need not exist."""
    return build.cache_dir() / "tuned.json"


def library() -> str:
    """The kernels of this installation, as a key has them."""
    return build.target("sm90").source_hash()


def read() -> dict[Key, Best]:
    """All that is stored; nothing, with one warning, if the file cannot be used."""
    where = path()
    try:
        return dict(map(_entry, json.loads(where.read_text(encoding="utf-8"))["tuned"]))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warn_once(f"mok-compile: {where} is not what tune writes and has no effect ({error!r})")
        return {}


def remember(key: Key, best: Best) -> None:
    """Stores `best`, in place of what was stored for `key`. OSError if the file cannot be written."""
    with _changing() as stored:
        stored[key] = best


def forget(keys: Iterable[Key]) -> None:
    """Removes what is stored for `keys`. OSError if the file cannot be written."""
    with _changing() as stored:
        for key in keys:
            stored.pop(key, None)


@functools.cache
def best_for(
    device: torch.device, ranks: int, hidden: int, inner: int, experts: int, top_k: int, dtype: torch.dtype
) -> Best:
    """What is stored for this GPU and these kernels, else `DEFAULT`; a process looks once."""
    shape = (ranks, hidden, inner, experts, top_k, dtype_name(dtype))
    return read().get(Key(torch.cuda.get_device_name(device), *shape, library()), DEFAULT)


@contextlib.contextmanager
def _changing() -> Iterator[dict[Key, Best]]:
    """What is stored, to be changed by one process at a time; readers see the old file or the new one."""
    with build._lock(path().with_suffix(".lock")):
        stored = read()
        yield stored
        new = path().with_suffix(".tmp")
        entries = [{**asdict(key), **asdict(best)} for key, best in stored.items()]
        new.write_text(json.dumps({"tuned": entries}, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path())
        best_for.cache_clear()


def _entry(found: Mapping[str, Any]) -> tuple[Key, Best]:
    """TypeError, KeyError or ValueError for what `remember` does not write."""
    values = {f.name: found[f.name] for kind in (Key, Best) for f in fields(kind)}
    texts = ("gpu", "dtype", "library")
    numbers = [value for name, value in values.items() if name not in (*texts, "tokens")] + values["tokens"]
    if not all(isinstance(values[name], str) for name in texts) or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"names are texts and sizes are positive integers: {values}")
    best = Best(values.pop("sms"), values.pop("backward_sms"), tuple(values.pop("tokens")))
    if max(best.sms, best.backward_sms) > MAX_SMS:
        raise ValueError(f"sms and backward_sms are from 1 to {MAX_SMS}: {best}")
    return Key(**values), best
