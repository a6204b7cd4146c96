"""Honest caches: what our part of a compiled graph depends on becomes part of Inductor's and AOTAutograd's keys.

Neither cache looks into a custom op: without this a changed gradient formula would be served stale
(https://github.com/pytorch/pytorch/issues/144344). The key goes in as the uuid of a post-grad pass, which both caches
read, also for a backward graph that is compiled later.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from mok_compile import _layout
from mok_compile._version import __version__
from mok_compile.options import Options
from mok_compile.passes.fusing.infer import drop_derivatives, drop_saved_outputs


def salt(options: Options) -> str:
    """A hash over our sources, built libraries and options (the dump folder changes no code and is left out)."""
    choices = {k: v for k, v in options.to_dict().items() if k != "mok.dump"}
    return hashlib.sha256(f"{_sources()} {json.dumps(choices, sort_keys=True)}".encode()).hexdigest()


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256(__version__.encode())
    for path in _files():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files() -> Iterator[Path]:
    package = Path(__file__).parent
    roots = {package, Path(_layout.folder("passes")), Path(_layout.folder("csrc"))}
    found = {
        Path(folder) / name
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith((".py", ".h", ".cuh", ".cpp", ".cu", ".so"))
    }
    return iter(sorted(found))


class AfterPartition(CustomGraphPass):
    """Our post-grad pass, before the user's own ones; carries the salt."""

    def __init__(self, key: str, users: Any) -> None:
        self.key = key
        self.users = list(users) if isinstance(users, (list, tuple)) else [users] if users is not None else []

    def __call__(self, graph: fx.Graph) -> None:
        drop_saved_outputs(graph)
        drop_derivatives(graph)
        for user_pass in self.users:
            user_pass(graph)

    def uuid(self) -> Any | None:
        """None (no caching) where one of the user's passes has no identity of its own."""
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.users]
        return None if None in ids else (self.key, *ids)
