"""Where in a model the blocks of a graph are: the graph knows modules by the way to them from its own frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mok_compile.report import Site
from mok_compile.table import NOWHERE, parts


def name_places(sites: Sequence[Site], paths: Mapping[torch.nn.Module, str] | None = None) -> None:
    """Has the locations of `sites`, of the graph that Dynamo hands over now, start at the model whose modules `paths`
    names; those of blocks in the very frame of a module say its class at least."""
    owner = _owner()
    for site in sites if owner is not None else ():
        path, cls, source = parts(site.location)
        inner = "" if path == NOWHERE else path
        if not inner and not cls:
            cls = type(owner).__name__
        elif type(_at(owner, inner)).__name__ != cls:
            continue  # of another module that the frame knows
        path = ".".join(filter(None, ((paths or {}).get(owner, ""), inner)))
        site.location = f"{path or NOWHERE} [{cls}] {source}".rstrip()


def _owner() -> torch.nn.Module | None:
    """The module whose method, or function, the frame is that Dynamo compiles."""
    from torch._dynamo import symbolic_convert

    translator = getattr(symbolic_convert.tls, "current_tx", None)
    frame = getattr(getattr(translator, "output", None), "root_tx", None)
    return next((v for v in getattr(frame, "f_locals", {}).values() if isinstance(v, torch.nn.Module)), None)


def _at(owner: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return owner.get_submodule(path)
    except AttributeError:
        return None
