"""What a graph computes for nobody, such as the product of an adapter that is switched off.

Compilers drop it, so it reads nothing. Kept is whatever might do more than compute: writes, random numbers, which move
the generator on, checks, sizes that only the data tells, and everything the view does not look into.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from mok_compile.passes.graph.view import View, name_of

# These may return what they are given, which leaves no value of their own: so does requires_grad_() too.
_NOTHING_TO_DO = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "reshape", "dropout")


def dead(graph: fx.Graph, view: View) -> list[fx.Node]:
    """The nodes of `graph` that nobody needs, each behind those that read it."""
    found: dict[fx.Node, None] = {}
    writers = {writer for node in graph.nodes for storage in view.storages(node) for writer in storage.writers}
    for node in reversed(graph.nodes):
        if node not in writers and found.keys() >= node.users.keys() and _only_computes(node, view):
            found[node] = None
    return list(found)


def _only_computes(node: fx.Node, view: View) -> bool:
    if node.op not in ("call_function", "call_method") or node not in view.cells:
        return False
    if node.target is operator.getitem and not view.made[node]:  # one of several results
        return True
    ops = [value.op for value in view.made[node]]
    return all(map(_is_plain, ops)) if ops else name_of(node) in _NOTHING_TO_DO


def _is_plain(op: torch._ops.OpOverload | str) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
