"""Expert loops that Python runs outside of any graph: named, since nothing of them is left to fuse.

The loop asks which experts were hit, so the graph breaks there. What Dynamo still hands over is the router, whose
expert numbers leave the graph: that is what is looked for, in graphs without any experts of their own.
"""

from __future__ import annotations

from torch import fx

from mok_compile import ops
from mok_compile.passes.view import name_of

_ROUTING = ("router", "moe", "expert", "gate", "mixture")


def loop_behind(graph: fx.Graph) -> fx.Node | None:
    """The top-k of a router whose expert numbers leave `graph`; None where there is none."""
    if not any(word in str(entry).lower() for node in graph.nodes for entry in _modules(node) for word in _ROUTING):
        return None
    for node in graph.nodes:
        leave = name_of(node) == "topk" and any(_leaves(user) for user in node.users if _picks_indices(user))
        if leave and not _reaches_block(node):
            return node
    return None


def _reaches_block(node: fx.Node) -> bool:
    """Whether a loop that became the op depends on `node`: that graph did not break there."""
    seen, pending = {node}, [node]
    while pending:
        new = [user for user in pending.pop().users if user not in seen]
        if any(ops.is_block(user.target) for user in new):
            return True
        seen.update(new)
        pending += new
    return False


def _modules(node: fx.Node) -> list:
    return list((node.meta.get("nn_module_stack") or {}).values())


def _picks_indices(node: fx.Node) -> bool:
    return name_of(node) == "getitem" and node.args[1] == 1


def _leaves(node: fx.Node) -> bool:
    """Whether `node`, or something that holds the same integers in another form, is an output of the graph."""
    seen, pending = set(), [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            example = user.meta.get("example_value")
            integer = getattr(example, "dtype", None) is not None and not example.dtype.is_floating_point
            if integer and user not in seen:
                seen.add(user)
                pending.append(user)
    return False
