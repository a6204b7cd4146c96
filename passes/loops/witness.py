"""``mok.verify`` for blocks that were Python loops: the op against the loop itself.

No graph holds the loop, so under ``mok.verify`` its local variables are kept in the graph until the backend gets it: a
*witness*, ``mok_loop::witness(y, live)``, holds them beside what the op made. Here the graph is interpreted once on the
real inputs; at each witness the loop's own code runs in eager mode on the same values. Outputs and gradients of both
are compared, and the witnesses are taken out again.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from mok_compile.passes.fusing.traced import OPEN, is_traced
from mok_compile.passes.fusing.verify import TOLERANCE, Comparison, aside, concrete, largest_error, writable_copy
from mok_compile.passes.graph.record import lib
from mok_compile.passes.loops.cut import SHADOWED, Cut

log = logging.getLogger("mok_compile")
MARK = "mok_witness"

lib.define("witness(Tensor y, Tensor[] tensors, SymInt[] sizes) -> Tensor")
lib.impl("witness", lambda y, tensors, sizes: y.view_as(y), "CompositeImplicitAutograd")


@dataclass(frozen=True, eq=False)
class Witness:
    """The loop of `cut` in a module; `live` are its local variables, with a `Tensor` or `Size` for each that the graph
    computes."""

    cut: Cut
    owner: weakref.ref[torch.nn.Module]
    live: tuple


@dataclass(frozen=True)
class Tensor:
    """The tensor at `place` among those of a witness."""

    place: int


@dataclass(frozen=True)
class Size:
    """The size at `place` among those of a witness."""

    place: int


@dataclass(frozen=True)
class Verdict:
    """What came of comparing the op of `call` with the loop in `owner`."""

    call: fx.Node
    owner: torch.nn.Module
    comparison: Comparison


def question(gm: fx.GraphModule, inputs: Sequence[Any] | None) -> list[Verdict]:
    """Asks all witnesses of `gm`, where its real `inputs` are known, and removes them."""
    bodies = [
        body for body in gm.modules() if isinstance(body, fx.GraphModule) and any(map(_is_witness, body.graph.nodes))
    ]
    verdicts: list[Verdict] = []
    if bodies and inputs is not None:
        try:
            with aside(inputs), _without_dropout(gm):
                _Run(gm, verdicts).run(*(writable_copy(i) if _may_be_written(i) else concrete(i) for i in inputs))
        except Exception:  # a bug of ours must not end the user's compile
            log.warning("mok-compile: a loop over experts could not be compared; please report", exc_info=True)
    for body in bodies:
        for node in filter(_is_witness, list(body.graph.nodes)):
            node.replace_all_uses_with(node.args[0])
            body.graph.erase_node(node)
        body.recompile()
    return verdicts


def _is_witness(node: fx.Node) -> bool:
    return node.target is torch.ops.mok_loop.witness.default


def _may_be_written(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter)


def _without_dropout(gm: fx.GraphModule) -> contextlib.AbstractContextManager:
    """Where dropout works behind experts, op and loop are compared with nothing dropped: they draw in another order."""
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    drawn = any(OPEN in node.meta for body in bodies for node in body.graph.nodes)
    return _Kept() if drawn else contextlib.nullcontext()


class _Kept(TorchDispatchMode):
    """Draws of dropout drop nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_((*args, 0.5)[1])  # which dropout then divides by; 0.5 is left out, being the default
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is torch.ops.aten.native_dropout_backward.default:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, verdicts: list[Verdict]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.verdicts = verdicts

    def run_node(self, node: fx.Node) -> Any:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *arguments = fx.node.map_arg(node.args, self.env.__getitem__)
            return _Run(body, self.verdicts).run(*arguments)
        result = super().run_node(node)
        witness: Witness | None = node.meta.get(MARK)
        owner = None if witness is None else witness.owner()
        call = _call_of(node.args[0]) if owner is not None else None
        if call is not None and self._holds(owner, call):
            self.verdicts.append(Verdict(call, owner, self._compare(node, call, witness, owner)))
        return result

    def _holds(self, owner: torch.nn.Module, call: fx.Node) -> bool:
        """Whether the weights of `call` are those that `owner` has now: others may have been in their place while it
        was traced (`torch.func.functional_call`), which its own code cannot be run with. Then they are no parameters of
        its own, or were computed outside of it."""
        own = {id(t) for t in (*owner.parameters(), *owner.buffers())}
        within = _modules(call)
        pending = [node for bank in call.args[3:7] for node in bank]
        while pending:
            node = pending.pop()
            if node.op in ("placeholder", "get_attr"):
                leaf = self.env[node]
                learnt = isinstance(leaf, torch.nn.Parameter) or getattr(leaf, "requires_grad", False)
                if learnt and id(leaf) not in own:
                    return False
            elif _modules(node)[: len(within)] != within:
                return False
            pending += node.all_input_nodes
        return True

    def _compare(self, node: fx.Node, call: fx.Node, witness: Witness, owner: torch.nn.Module) -> Comparison:
        y, tensors, sizes = fx.node.map_arg(node.args, self.env.__getitem__)
        wanted = _loop(witness, owner, tensors, sizes)
        computed = (self.env[operand] for operand in call.all_input_nodes)  # perhaps in 16 bits: autocast
        dtypes = [t.dtype for t in (y, wanted, *computed) if t.dtype in TOLERANCE]
        low = any(dtype.itemsize < 4 for dtype in dtypes)
        errors = {"the output": largest_error(wanted, y.to(wanted.dtype), low)}
        leaves = {f"operand {i}": t for i, t in enumerate(tensors)} | dict(owner.named_parameters())
        leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        if wanted.requires_grad and not y.requires_grad:
            errors["the gradient, which only the loop has,"] = float("inf")
        elif y.requires_grad and leaves:
            seed = torch.randn_like(wanted)
            for name, a, b in zip(leaves, *(_gradients(out, leaves, seed) for out in (wanted, y)), strict=True):
                errors[f"the gradient of {name}"] = largest_error(a, b, low)
        where = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        return Comparison(errors[where], where, max(TOLERANCE[dtype] for dtype in dtypes))


def _gradients(out: torch.Tensor, leaves: dict[str, torch.Tensor], seed: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """A loop that no token goes through has none."""
    if not out.requires_grad:
        return [None] * len(leaves)
    seed = seed.to(out.dtype)
    return torch.autograd.grad(out, list(leaves.values()), seed, retain_graph=True, allow_unused=True)


def _modules(node: fx.Node) -> list[str]:
    """The modules, from the outermost on, in whose calls `node` was traced."""
    return list(node.meta.get("nn_module_stack") or ())


def _call_of(node: fx.Node) -> fx.Node | None:
    """The call of the op that `node` is computed from, with what experts without weights add to it."""
    pending = [node]
    while pending:
        found = pending.pop()
        if is_traced(found):
            return found
        pending += reversed(found.all_input_nodes)
    return None


def _loop(witness: Witness, owner: torch.nn.Module, tensors: list, sizes: list) -> torch.Tensor:
    """What the loop itself adds up, or puts into its list."""
    cut = witness.cut

    def value(told: Any) -> Any:
        if isinstance(told, Tensor):
            return tensors[told.place]
        if isinstance(told, Size):
            return sizes[told.place]
        return type(told)(map(value, told)) if type(told) in (list, tuple) else told

    live = [value(told) for told in witness.live]
    at = cut.live.index(cut.total)
    live[at] = [] if cut.appends else torch.zeros_like(live[at])
    plain = {name: getattr(builtins, name) for name in SHADOWED}
    same = {
        "__mok_once__": lambda items: items,
        "__mok_numbers__": lambda tensor: tensor.tolist(),
        "__mok_before__": lambda ends, number: 0 if number == 0 else ends[number - 1],
    }
    total, _ = cut.probe(owner, *live, **same, **plain)
    return torch.cat(total) if cut.appends else total
