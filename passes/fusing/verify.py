"""``mok.verify``: each fused op against the nodes it would replace, on the real inputs of the compile.

While old and new nodes stand side by side, the graph is interpreted once (inputs that it writes are copied first, the
random state is put back). Eager's kernels choose the experts on both sides. Where the graph computes gradients, those
of all operands are compared too. If several nodes compute an operand alike (``x.view(-1, n)`` in the router and again
in the experts), each gets a share of its gradient, not always the same one for block and op: then the gradient of what
they compute it from is compared.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mok_compile.moe import eager_choice
from mok_compile.passes.fusing.substitute import Insertion
from mok_compile.passes.graph.view import Cell, Value, View, target_of

# Largest difference of a row, relative to its norm, that rounding explains.
TOLERANCE = {torch.bfloat16: 0.15, torch.float16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-9}

# A gradient so small beside the block's others is what rounding left of one that cancels.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Comparison:
    """Worst relative error of a row, over the output and the operands' gradients; `where` it is."""

    worst: float
    where: str
    tolerance: float

    @property
    def failed(self) -> bool:
        return not self.worst <= self.tolerance

    @property
    def detail(self) -> str:
        return f"relative error {self.worst:.1e} in {self.where}, more than {self.tolerance:.0e}"


def verify(
    gm: fx.GraphModule, view: View, insertions: Sequence[Insertion], inputs: Sequence[Any]
) -> dict[Insertion, Comparison]:
    """Runs `gm`, which holds blocks and their insertions side by side, and compares each pair."""
    written = {node for node, cell in view.cells.items() if isinstance(cell, Cell) and cell.storage.writers}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    copies = [
        writable_copy(given) if node in written else concrete(given)
        for node, given in zip(placeholders, inputs, strict=True)
    ]
    with aside(inputs), eager_choice():
        run = _Run(gm, view, insertions)
        run.run(*copies)
    return run.compared


def arguments_of(bodies: Sequence[fx.Node], gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, tuple]:
    """The real arguments that `bodies`, the calls of checkpointed regions in `gm`, are run on."""
    with aside(inputs):
        run = _Arguments(gm, bodies)
        run.run(*(_kept(concrete(given)) for given in inputs))
    return run.found


class _Arguments(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, bodies: Sequence[fx.Node]) -> None:
        super().__init__(gm)
        self.bodies, self.found = bodies, {}

    def run_node(self, node: fx.Node) -> Any:
        if node not in self.bodies:
            return super().run_node(node)
        body, *arguments = (self.env[arg] if isinstance(arg, fx.Node) else arg for arg in node.args)
        self.found[node] = tuple(map(_kept, arguments))
        return body(*arguments)


def writable_copy(given: torch.Tensor) -> torch.Tensor:
    """A copy that may be written into, as a value that gradients flow through may be."""
    return given.detach().requires_grad_(given.requires_grad).clone()


def _kept(given: Any) -> Any:
    """A copy, but of parameters: they are too large to be copied on the suspicion that something writes into them."""
    return (
        writable_copy(given) if isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter) else given
    )


@contextlib.contextmanager
def aside(inputs: Sequence[Any]) -> Iterator[None]:
    """For a run on trial: the random state is put back, and hooks on saved tensors, such as those of a checkpoint
    around the compiled call, see none of what the run saves."""
    devices = {t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    autograd, hooks = torch._C._autograd, []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        hooks.append(pair)
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def concrete(given: Any) -> Any:
    """The number that a symbolic one stands for in this compile."""
    return given.node.hint if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)) else given


class _Run(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, view: View, insertions: Sequence[Insertion]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.view = view
        self.times = Counter(value for made in view.made.values() for value in set(made))
        self.by_final = {insertion.block.final: insertion for insertion in insertions}
        self.compared: dict[Insertion, Comparison] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        insertion = self.by_final.get(node)
        if insertion is not None:
            old = result if target_of(node) is node else self.env[target_of(node)]
            self.compared[insertion] = self._compare(insertion, old, self.env[insertion.result])
        return result

    def _compare(self, insertion: Insertion, old: torch.Tensor, new: torch.Tensor) -> Comparison:
        values = {node: self.env[node] for node in insertion.inputs}
        table, ids = insertion.table or (None, None)
        sources = {n: [n] if n is table else self._sources(n, insertion.block.final) for n in values}
        loud = {source for n, found in sources.items() if n not in insertion.quiet for source in found}
        given = {source: self.env[source] for found in sources.values() for source in found}
        # What the block adds its rows onto in place has become the result.
        operands = {n: t for n, t in given.items() if isinstance(t, torch.Tensor) and t.requires_grad and t is not old}
        # What the op makes beside its result too: routing weights that its router rounds.
        made = tree_leaves([self.env[node] for node in insertion.nodes])
        tensors = [t for t in (*values.values(), *made, old) if isinstance(t, torch.Tensor)]
        dtypes = [t.dtype for t in tensors if t.dtype in TOLERANCE]
        low = any(d.itemsize < 4 for d in dtypes)
        errors = {"the output": largest_error(old, new, low)}
        pairs = [(old, new)]
        for node, replacement in insertion.handed.items():
            pairs.append((self.env[node], self.env[replacement]))
            errors[node.name] = largest_error(*pairs[-1], low)
        if any(a.requires_grad != b.requires_grad for a, b in pairs):
            errors["the gradient, which only one side has,"] = float("inf")
        pairs = [(a, b) for a, b in pairs if a.requires_grad and b.requires_grad]
        if pairs and operands:
            seeds = [torch.randn_like(a) for a, _ in pairs]
            grads = [
                torch.autograd.grad(ys, list(operands.values()), seeds, retain_graph=True, allow_unused=True)
                for ys in zip(*pairs, strict=True)
            ]
            loudest = max(_loudness(g) for g in grads[0])
            for node, a, b in zip(operands, *grads, strict=True):
                if node not in loud and max(_loudness(a), _loudness(b)) <= ROUNDING * loudest:
                    continue
                if node is table:  # elsewhere its gradient meets zeros further up
                    a, b = (self._chosen(insertion, g, ids) for g in (a, b))
                errors[f"the gradient of {node.name}"] = largest_error(a, b, low)
        where = max(errors, key=lambda k: errors[k] if errors[k] == errors[k] else float("inf"))
        return Comparison(errors[where], where, max(TOLERANCE[d] for d in dtypes))

    def _chosen(self, insertion: Insertion, grad: torch.Tensor | None, ids: fx.Node) -> torch.Tensor | None:
        """The gradient of a table of routing weights, at the experts that were chosen."""
        if grad is None:
            return None
        return grad.movedim(insertion.block.weights.dim, -1).flatten(0, -2).gather(1, self.env[ids])

    def _sources(self, node: fx.Node, final: fx.Node) -> list[fx.Node]:
        """Where to compare the gradient of `node`: there, or where the nodes that compute the same value start from."""
        cell = self.view.cells.get(node)
        value = cell.value_at(self.view.positions[final]) if isinstance(cell, Cell) else None
        if value is None or self.times[value] == 1:
            return [node]
        found, pending, seen = [], [value], set[Value]()
        while pending:
            value = pending.pop()
            if value in seen or value.detached or not value.meta.dtype.is_floating_point:
                continue
            seen.add(value)
            holder = self.view.holder(value, final) if self.times[value] == 1 else None
            if holder is not None:
                found.append(holder)
            elif isinstance(value.op, str):  # not held any more, and nothing is known of where it comes from
                return [node]
            else:
                pending += value.inputs
        return found


def _loudness(grad: torch.Tensor | None) -> float:
    """The largest norm of a row."""
    return 0.0 if grad is None or grad.numel() == 0 else float(grad.detach().double().norm(dim=-1).max())


def largest_error(old: torch.Tensor | None, new: torch.Tensor | None, low: bool) -> float:
    """The largest norm of a row of old - new, relative to that row of old; NaN and Inf must be at the same places.

    `low`: the block computes in 16 bits.
    """
    if old is None or new is None:
        present = new if old is None else old
        return 0.0 if present is None or not present.any() else float("inf")
    if old.shape != new.shape or old.dtype != new.dtype:
        return float("inf")
    old, new = old.detach().double(), new.detach().double()
    if old.numel() == 0:
        return 0.0
    if not torch.equal(old.isnan(), new.isnan()):
        return float("inf")
    infinite = old.isinf() | new.isinf()
    if not torch.equal(old[infinite], new[infinite]):
        return float("inf")
    old, new = old.masked_fill(infinite | old.isnan(), 0), new.masked_fill(infinite | new.isnan(), 0)
    size = old.norm(dim=-1)
    # Cancellation leaves small rows nothing but rounding noise, in 16 bits even those of middling size.
    floor = size.square().mean().sqrt() if low else size.max() * 1e-3
    floor = floor.clamp(min=torch.finfo(torch.float32).tiny)
    return float(((old - new).norm(dim=-1) / size.clamp(min=floor)).max())
