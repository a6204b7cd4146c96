"""Expert loops that Python runs outside of any graph: named, since nothing of them is left to fuse.

The loop asks which experts were hit, so the graph breaks there. What Dynamo still hands over is the router, whose
expert numbers leave the graph: that is what is looked for, in graphs without any experts of their own. Loops in methods
are known better (`mok_compile.integrations.missed`).
"""

from __future__ import annotations

from torch import fx

from mok_compile import ops
from mok_compile.passes.graph.view import name_of

# Words of code that has to do with routing, and what makes a choice there.
ROUTING = ("router", "moe", "expert", "gate", "mixture")
CHOICES = ("topk", "max", "argmax")
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "einsum")


def loop_behind(graph: fx.Graph) -> fx.Node | None:
    """The choice of a router whose expert numbers leave `graph`; None where there is none."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or name_of(node) not in CHOICES:
            continue
        indices = [node] if name_of(node) == "argmax" else [user for user in node.users if _picks_indices(user)]
        if any(map(_leaves, indices)) and not _reaches_block(node) and _routes(node):
            return node
    return None


def _routes(choice: fx.Node) -> bool:
    """Whether `choice` is among what a product gives that is a router's by its names; by those around the choice, where
    there is no product. The names of the model do not count: its head chooses the next token."""
    pending, seen, products = list(choice.all_input_nodes), set(), []
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            product = node.op in ("call_function", "call_method") and name_of(node) in _PRODUCTS
            products += [node] if product else []
            pending += [] if product else node.all_input_nodes
    weights = [w.name for node in products for w in node.all_input_nodes if w.op in ("placeholder", "get_attr")]
    named = [str(entry) for node in products or [choice] for entry in _modules(node)[1 if products else 0 :]]
    return any(word in name.lower() for name in (*named, *weights) for word in ROUTING)


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
