"""Meaning-changing edits of the graphs of MoE blocks: what our passes make of a mutant computes what the mutant does.

    python tests/mutants.py 5000             so many mutants of all cases
    python tests/mutants.py biased:137       one of them, with its graph

A mutant is (case, seed). Its graph is the one that Dynamo captured for the case, with one or two random edits; it is
run as it is and after the passes, on the same inputs, and everything that a user could see must be the same: outputs,
their dtypes, gradients, what is left in the inputs. Whether a mutant is fused is not asked. An edit may well be void
or make the graph fail; such mutants are told apart, so that they are not taken for evidence.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch._dynamo
from corpus import CASES, Case
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from mok_compile.options import Options
from mok_compile.passes.fusing.fuse import fuse

F = torch.nn.functional


@dataclass(frozen=True)
class Program:
    """A captured graph and the tensors it is called with, all of them as they were before the first run."""

    case: Case
    graph: fx.Graph
    root: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]


@functools.cache
def capture(case: Case) -> Program:
    """What Dynamo hands to a backend for `case`."""
    found = []

    def backend(gm, inputs):
        found.append((gm, tuple(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args = case.make()
    torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(*args)
    torch._dynamo.reset()
    ((gm, inputs),) = found
    inputs = tuple(i.detach().clone().requires_grad_(i.requires_grad) for i in inputs)
    return Program(case, gm.graph, gm, inputs)


def copy_of(graph: fx.Graph) -> fx.Graph:
    new, names = fx.Graph(), {}
    new.output(new.graph_copy(graph, names))
    return new


class _Examples(fx.Interpreter):
    """Gives every node the example value that Dynamo would."""

    def run_node(self, node):
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]


def trace(gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> None:
    """Fresh example values for all nodes of `gm`; raises what the graph raises."""
    # Sizes that only the data tells are symbols, as in Dynamo; all others are numbers.
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode, modes_kept():
        _Examples(gm).run(*used(tuple(map(mode.from_tensor, inputs))))


class modes_kept:
    """Puts back what a graph that raises half-way leaves switched: gradients, autocast."""

    def __enter__(self):
        self.gradients, self.autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        self.dtype, self.nesting = torch.get_autocast_dtype("cpu"), nesting()

    def __exit__(self, *_):
        torch.set_grad_enabled(self.gradients)
        torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_dtype("cpu", self.dtype)
        while nesting() > self.nesting:
            torch.autocast_decrement_nesting()


def nesting() -> int:
    """How many autocast contexts are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def used(leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Arguments that a graph may write into: no leaves."""
    return tuple(t.clone() for t in leaves)


@dataclass
class Outcome:
    """All that can be seen of one run."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    reads: list[bool] = field(default_factory=list)


def finite(outcome: Outcome) -> bool:
    """Whether all numbers are: memory that was read before it was written shows as NaN."""
    seen = (t for t in (*outcome.outputs, *outcome.gradients) if t is not None)
    return all(bool(torch.isfinite(t).all()) for t in seen)


def steady(case: Case, gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...], wanted: Outcome) -> bool:
    """Whether rounding leaves the outcome alone: no ties, no sums that cancel, no division by nearly nothing."""
    generator = torch.Generator().manual_seed(7)

    def nudged(t):
        if not t.dtype.is_floating_point:
            return t
        noise = torch.randn(t.shape, generator=generator).to(t.dtype) * torch.finfo(t.dtype).eps
        return (t.detach() * (1 + noise)).requires_grad_(t.requires_grad)

    return not differences(case, run(gm, tuple(map(nudged, inputs))), wanted)


def run(gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Outcome:
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory without values is filled: the same in each run
    try:
        return _run(gm, inputs)
    finally:
        torch.use_deterministic_algorithms(False)


def _run(gm: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> Outcome:
    leaves = tuple(i.detach().clone().requires_grad_(i.requires_grad) for i in inputs)
    given = used(leaves)
    with modes_kept():
        outputs = [t for t in tree_leaves(gm.forward(*given)) if isinstance(t, torch.Tensor)]
    generator = torch.Generator().manual_seed(5)
    loss = sum((o * torch.randn(o.shape, generator=generator).to(o.dtype)).sum() for o in outputs if o.requires_grad)
    wanted = [t for t in leaves if t.requires_grad]
    grads = [None] * len(wanted)
    if isinstance(loss, torch.Tensor):
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return Outcome([o.detach() for o in outputs], list(grads), [g.detach() for g in given])


def differences(case: Case, found: Outcome, wanted: Outcome) -> list[str]:
    largest = max((float(g.double().norm()) for g in wanted.gradients if g is not None), default=0.0)
    said = _differences(case, "output", found.outputs, wanted.outputs)
    said += _differences(case, "gradient", found.gradients, wanted.gradients, 1e-2 * largest)
    return said + _differences(case, "input", found.inputs, wanted.inputs)


def _differences(case: Case, name: str, found: list, wanted: list, floor: float = 0.0) -> list[str]:
    """What differs by more than rounding, the norm of a tensor counting as `floor` at least: sums may cancel."""
    said = []
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None:
            present = a if b is None else b
            if present is not None and present.any():
                said.append(f"{name} {i}: only one side has one")
        elif a.dtype != b.dtype or a.shape != b.shape:
            said.append(f"{name} {i}: {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}")
        else:
            size = b.double().norm().clamp(min=max(floor, 1e-6))
            if not (error := float((a.double() - b.double()).norm() / size)) <= case.tolerance:
                said.append(f"{name} {i}: relative error {error:.1e}")
    return said


# The edits. Each takes the graph and a source of randomness, changes the graph and says what it did, or raises Void.


class Void(Exception):
    """There is nothing to change in this way."""


def is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and not is_state(node)


def is_state(node: fx.Node) -> bool:
    autocast = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
    return node.target in (torch._C._set_grad_enabled, *autocast)


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    example = node.meta.get("example_value")
    return example if isinstance(example, torch.Tensor) else None


def writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.removesuffix(".default")
    in_place = name.endswith("_") and not name.endswith("__")
    return is_call(node) and (in_place or node.target in (operator.setitem, operator.iadd, operator.imul))


def pick(rng: random.Random, things) -> object:
    things = list(things)
    if not things:
        raise Void
    return rng.choice(things)


def tensors(graph: fx.Graph, floating: bool | None = None) -> list[fx.Node]:
    nodes = [n for n in graph.nodes if tensor_of(n) is not None and n.users]
    return [n for n in nodes if floating is None or tensor_of(n).dtype.is_floating_point == floating]


def order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = tensor_of(a), tensor_of(b)
    return x is not None and y is not None and same_shape(x.shape, y.shape) and x.dtype == y.dtype


def same_shape(a: tuple, b: tuple) -> bool:
    """Whether two shapes are equal for certain: of sizes that only the data tells, nobody may ask."""
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def swap_operands(graph: fx.Graph, rng: random.Random) -> str:
    two = [n for n in graph.nodes if is_call(n) and [type(a) for a in n.args[:2]] == [fx.Node, fx.Node]]
    node = pick(rng, two)
    node.args = (node.args[1], node.args[0], *node.args[2:])
    return f"swapped the operands of {node.name}"


def other_operand(graph: fx.Graph, rng: random.Random) -> str:
    place = order(graph)
    reads = [(n, a) for n in graph.nodes if is_call(n) or n.op == "output" for a in n.all_input_nodes]
    choices = {(n, a): [b for b in graph.nodes if b is not a and place[b] < place[n] and alike(a, b)] for n, a in reads}
    node, old = pick(rng, (read for read, others in choices.items() if others))
    new = rng.choice(choices[node, old])
    node.replace_input_with(old, new)
    return f"{node.name} reads {new.name} instead of {old.name}"


def constant(graph: fx.Graph, rng: random.Random) -> str:
    """Another number, dimension, flag or dtype."""
    spots = []
    for node in graph.nodes:
        if is_call(node):
            map_aggregate((node.args, node.kwargs), lambda a, n=node: spots.append(n) if _changeable(a) else a)
    node = pick(rng, spots)
    target = rng.randrange(spots.count(node))
    count = -1
    said = ""

    def change(a):
        nonlocal count, said
        if not _changeable(a):
            return a
        count += 1
        if count != target:
            return a
        new = _changed(a, rng)
        said = f"{a} became {new} in {node.name}"
        return new

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), change)
    return said


def _changeable(a) -> bool:
    return isinstance(a, (bool, int, float, torch.dtype, slice))


def _changed(a, rng: random.Random):
    if isinstance(a, bool):
        return not a
    if isinstance(a, int):
        return a + rng.choice([-1, 1, 1, -2 * a])
    if isinstance(a, float):
        return rng.choice([a * 1.5, -a, a + 0.5, 0.0])
    if isinstance(a, torch.dtype):
        kinds = [torch.float64, torch.float32, torch.bfloat16] if a.is_floating_point else [torch.int32, torch.int64]
        return rng.choice([k for k in (*kinds, torch.float16, torch.int16) if k != a])
    start, stop, step = a.start, a.stop, a.step
    return rng.choice([slice((start or 0) + 1, stop, step), slice(start, stop, (step or 1) + 1),
                       slice(start, (stop or 0) - 1, step), slice(1 if start == 0 else 0, stop, step)])  # fmt: skip


KIN = [
    ["silu", "tanh", "sigmoid", "relu", "gelu", "softplus", "exp", "square", "abs", "sin", "hardswish", "elu"],
    ["sum", "mean", "amax", "prod", "logsumexp"],
    ["add", "sub", "mul", "div", "maximum", "true_divide"],
    ["softmax", "log_softmax", "cumsum", "cumprod"],
    ["index_add", "index_copy"],
    ["scatter", "scatter_add"],
    ["floor_divide", "remainder", "mul", "add"],
    ["add_", "sub_", "mul_", "copy_", "div_"],
    ["ge", "gt", "le", "lt", "eq", "ne"],
    ["zeros_like", "ones_like", "empty_like"],
]  # fmt: skip
SPELLED = {operator.add: "add", operator.mul: "mul", operator.sub: "sub", operator.truediv: "div",
           operator.floordiv: "floor_divide", operator.ge: "ge", operator.lt: "lt", operator.iadd: "add_",
           operator.imul: "mul_"}  # fmt: skip


def other_function(graph: fx.Graph, rng: random.Random) -> str:
    def name(node):
        if isinstance(node.target, str):
            return node.target
        return SPELLED.get(node.target, getattr(node.target, "__name__", ""))

    def kin(node):
        return [k for family in KIN if name(node) in family for k in family if k != name(node)]

    node = pick(rng, (n for n in graph.nodes if is_call(n) and kin(n)))
    new, old = rng.choice(kin(node)), name(node)
    if node.op == "call_method" or new.endswith("_"):
        node.op, node.target = "call_method", new
        if not hasattr(torch.Tensor, new):
            raise Void
    else:
        node.target = getattr(torch, new, None) or getattr(F, new)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
    return f"{node.name} calls {new} instead of {old}"


FLOAT = {
    "mul(2)": lambda v: v * 2.0,
    "neg": lambda v: -v,
    "add(0.25)": lambda v: v + 0.25,
    "roll(1, 0)": lambda v: v.roll(1, 0),
    "roll(1, -1)": lambda v: v.roll(1, -1),
    "flip(0)": lambda v: v.flip(0),
    "flip(-1)": lambda v: v.flip(-1),
    "detach": lambda v: v.detach(),
    "clamp(max=0.3)": lambda v: v.clamp(max=0.3),
    "clamp(-0.2, 0.4)": lambda v: v.clamp(-0.2, 0.4),
    "abs": lambda v: v.abs(),
    "tanh": lambda v: torch.tanh(v),
    "relu": lambda v: torch.relu(v),
    "softmax(-1)": lambda v: torch.softmax(v, -1),
    "normalize": lambda v: F.normalize(v, dim=-1),
    "centred": lambda v: v - v.mean(-1, keepdim=True),
    "dropout(0.5)": lambda v: F.dropout(v, 0.5, True),
    "dropout(0)": lambda v: F.dropout(v, 0.0, True),
    "noise": lambda v: v + torch.rand_like(v),
    "bfloat16 and back": lambda v: v.to(torch.bfloat16).to(torch.float32).type_as(v),
    "cumsum(0)": lambda v: v.cumsum(0),
    "sorted(0)": lambda v: torch.sort(v, 0)[0],
    "masked_fill": lambda v: v.masked_fill(v > 0.5, 0.0),
    "where": lambda v: torch.where(v > 0, v, 0.5 * v),
    "first to zero": lambda v: torch.cat([torch.zeros_like(v[:1]), v[1:]]),
    "first repeated": lambda v: torch.cat([v[:1], v[:-1]]),
    "times its sum": lambda v: v * v.sum(),
    "flattened transpose": lambda v: v.transpose(0, -1).reshape(v.shape),
    "transpose": lambda v: v.transpose(0, 1),
    "transpose(1, 2)": lambda v: v.transpose(1, 2),
    "square": lambda v: v * v,
    "int and back": lambda v: v.int().type_as(v),
    "gradient of another": lambda v: (v.square() - v).detach() + v,
    "triu": lambda v: torch.triu(v),
    "repeated halves": lambda v: torch.cat([v.chunk(2, -1)[0]] * 2, -1),
    "swapped halves": lambda v: torch.cat(v.chunk(2, -1)[::-1], -1),
    "interleaved": lambda v: v.view(*v.shape[:-1], 2, -1).transpose(-1, -2).reshape(v.shape),
}
INTEGER = {
    "add(1)": lambda v: v + 1,
    "sub(1)": lambda v: v - 1,
    "remainder(2)": lambda v: v % 2,
    "next of four": lambda v: (v + 1) % 4,
    "clamp(max=1)": lambda v: v.clamp(max=1),
    "clamp(max=3)": lambda v: v.clamp(max=3),
    "clamp(min=1)": lambda v: v.clamp(min=1),
    "roll(1, 0)": lambda v: v.roll(1, 0),
    "flip(0)": lambda v: v.flip(0),
    "flip(-1)": lambda v: v.flip(-1),
    "sorted": lambda v: torch.sort(v, -1)[0],
    "sorted down": lambda v: torch.sort(v, -1, descending=True)[0],
    "argsort": lambda v: torch.argsort(v, -1),
    "floor_divide(2)": lambda v: v // 2,
    "mul(2)": lambda v: v * 2,
    "three minus": lambda v: 3 - v,
    "flattened transpose": lambda v: v.transpose(0, -1).reshape(v.shape),
    "first repeated": lambda v: v[..., :1].expand(v.shape),
    "int32": lambda v: v.to(torch.int32),
    "int8": lambda v: v.to(torch.int8),
    "cumsum": lambda v: v.cumsum(0, dtype=torch.int32),
    "flags": lambda v: (v > 0).to(torch.int64),
    "float16 and back": lambda v: v.to(torch.float16).to(torch.int64),
    "bitwise_xor(1)": lambda v: v ^ 1,
}
SAME = {
    "clone": lambda v: v.clone(),
    "contiguous": lambda v: v.contiguous(),
    "reshape": lambda v: v.reshape(v.shape),
    "all rows": lambda v: v[:],
    "same dtype": lambda v: v.to(v.dtype),
    "expand": lambda v: v.expand(v.shape),
}


def insert(graph: fx.Graph, rng: random.Random) -> str:
    """A function behind a value, for all its users or one."""
    node = pick(rng, tensors(graph))
    changes = FLOAT if tensor_of(node).dtype.is_floating_point else INTEGER
    return _insert(graph, rng, node, changes)


def _insert(graph: fx.Graph, rng: random.Random, node: fx.Node, changes: dict[str, Callable]) -> str:
    what = rng.choice(list(changes))
    users = [u for u in node.users if not is_state(u)]
    chosen = users if rng.random() < 0.5 or len(users) == 1 else [rng.choice(users)]
    new = apply(graph, changes[what], node, after=node)
    for user in chosen:
        user.replace_input_with(node, new)
    return f"{what} between {node.name} and {', '.join(u.name for u in chosen)}"


def apply(graph: fx.Graph, function: Callable, node: fx.Node, after: fx.Node) -> fx.Node:
    """Adds the nodes of `function`, which is traced with the shape of `node` for constants, behind `after`."""
    like = tensor_of(node)

    class Tracer(fx.Tracer):
        pass

    tracer = Tracer()
    tracer.graph = fx.Graph()
    tracer.root = torch.nn.Module()
    start = tracer.graph.placeholder("v")
    proxy = _Shaped(start, tracer)
    proxy.like = like
    tracer.graph.output(function(proxy).node)
    environment = {start: node}
    last = node
    with graph.inserting_before(after.next):
        for n in tracer.graph.nodes:
            if n.op.startswith("call"):
                environment[n] = last = graph.node_copy(n, lambda a: environment[a])
    return last


class _Shaped(fx.Proxy):
    """A proxy that knows shape and dtype of what it stands for."""

    @property
    def shape(self):
        if not all(isinstance(n, int) for n in self.like.shape):
            raise Void  # such a size is no constant of the graph
        return tuple(self.like.shape)

    @property
    def dtype(self):
        return self.like.dtype


def permute_rows(graph: fx.Graph, rng: random.Random) -> str:
    """Rows picked by some index of the graph."""
    place = order(graph)
    indices = [n for n in tensors(graph, floating=False) if tensor_of(n).dim() == 1]
    indices = [n for n in indices if tensor_of(n).dtype in (torch.int32, torch.int64)]
    node, index, user = pick(
        rng,
        (
            (node, index, user)
            for node in tensors(graph)
            for index in indices
            for user in node.users
            if same_shape(tensor_of(node).shape[:1], tensor_of(index).shape)
            and place[user] > place[index]
            and user is not index
        ),
    )
    later = node if place[node] > place[index] else index
    with graph.inserting_after(later):
        new = graph.call_function(operator.getitem, (node, index))
    user.replace_input_with(node, new)
    return f"{user.name} reads {node.name}[{index.name}]"


WRITES = {
    "mul_(2)": lambda v: v.mul_(2),
    "add_(1)": lambda v: v.add_(1),
    "zero_()": lambda v: v.zero_(),
    "[0].zero_()": lambda v: v[0].zero_(),
    "view(-1).add_(1)": lambda v: v.view(-1).add_(1),
    "detach().mul_(2)": lambda v: v.detach().mul_(2),
    "clamp_(max=2)": lambda v: v.clamp_(max=2),
    "fill_diagonal_(0)": lambda v: v.fill_diagonal_(0),
    "neg_()": lambda v: v.neg_(),
}


def write(graph: fx.Graph, rng: random.Random) -> str:
    """Something is written into a value, at some place behind it."""
    place = order(graph)
    node = pick(rng, tensors(graph))
    last = len(place)
    if any(user.kwargs.get("offs") is node for user in node.users):
        last = max(place[u] for u in node.users)  # the fallback's backward pass reads them past autograd's checks
    after = pick(rng, (n for n in graph.nodes if place[node] <= place[n] < last and n.op != "output"))
    if after.op == "placeholder":
        after = [n for n in graph.nodes if n.op == "placeholder"][-1]
    what = rng.choice(list(WRITES))
    apply(graph, WRITES[what], node, after)
    return f"{node.name}.{what} behind {after.name}"


def move_write(graph: fx.Graph, rng: random.Random) -> str:
    place = order(graph)
    node = pick(rng, filter(writes, graph.nodes))
    first = max(place[a] for a in node.all_input_nodes)
    last = min([place[u] for u in node.users] or [len(place)])
    near = [n for n in graph.nodes if first <= place[n] < last and is_call(n) and n is not node]
    after = pick(rng, near)
    after.append(node)
    return f"{node.name} moved behind {after.name}"


def drop(graph: fx.Graph, rng: random.Random) -> str:
    node = pick(rng, (n for n in graph.nodes if is_call(n) and any(alike(n, a) for a in n.all_input_nodes)))
    by = pick(rng, (a for a in node.all_input_nodes if alike(node, a)))
    node.replace_all_uses_with(by)
    graph.erase_node(node)
    return f"dropped {node.name}, its users read {by.name}"


def twice(graph: fx.Graph, rng: random.Random) -> str:
    node = pick(rng, (n for n in graph.nodes if is_call(n) and any(alike(n, a) for a in n.all_input_nodes)))
    by = pick(rng, (a for a in node.all_input_nodes if alike(node, a)))
    with graph.inserting_after(node):
        new = graph.node_copy(node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    new.replace_input_with(by, node)
    return f"{node.name} applied twice"


def stale(graph: fx.Graph, rng: random.Random) -> str:
    """A reader of a value that is written in place gets the value of before."""
    place = order(graph)
    found = filter(writes, graph.nodes)
    pairs = [(node, u) for node in found for n in (node.args[0], node) for u in n.users if place[u] > place[node]]
    node, user = pick(rng, pairs)
    target = node.args[0]
    with graph.inserting_before(node):
        new = graph.call_method("clone", (target,))
    for old in (target, node):
        if old in user.all_input_nodes:
            user.replace_input_with(old, new)
    return f"{user.name} reads {target.name} as it was before {node.name}"


def keep(graph: fx.Graph, rng: random.Random) -> str:
    """A value becomes an output too."""
    node = pick(rng, (n for n in tensors(graph) if n.op != "placeholder"))
    output = next(iter(reversed(graph.nodes)))
    output.args = ((*output.args[0], node),)
    return f"{node.name} is returned too"


def without_grad(graph: fx.Graph, rng: random.Random) -> str:
    """Gradients are off for a stretch of the graph."""
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    start = rng.randrange(len(inner))
    stop = min(len(inner) - 1, start + rng.choice([0, 0, 1, 2, 5]))
    with graph.inserting_before(inner[start]):
        graph.call_function(torch._C._set_grad_enabled, (False,))
    with graph.inserting_after(inner[stop]):
        graph.call_function(torch._C._set_grad_enabled, (True,))
    return f"gradients are off from {inner[start].name} to {inner[stop].name}"


def autocast(graph: fx.Graph, rng: random.Random) -> str:
    """Autocast is on for a stretch of the graph."""
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    start = rng.randrange(len(inner))
    stop = min(len(inner) - 1, start + rng.choice([0, 1, 2, 5, 40]))
    with graph.inserting_before(inner[start]):
        enter = torch.amp.autocast_mode._enter_autocast
        mode = graph.call_function(enter, ("cpu", torch.bfloat16, True, None))
    with graph.inserting_after(inner[stop]):
        graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    return f"autocast from {inner[start].name} to {inner[stop].name}"


def exchange(graph: fx.Graph, rng: random.Random) -> str:
    """Two values change places for all later users."""
    place, nodes = order(graph), tensors(graph)
    pairs = [(a, b) for a in nodes for b in nodes if place[a] < place[b] and alike(a, b)]
    a, b = pick(rng, (p for p in pairs if any(place[u] > place[p[1]] for u in p[0].users)))
    swapped = {a: b, b: a}

    def other(x):
        return swapped.get(x, x) if isinstance(x, fx.Node) else x

    for user in [n for n in graph.nodes if place[n] > place[b]]:
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), other)
    return f"{a.name} and {b.name} changed places"


def spelled_alike(graph: fx.Graph, rng: random.Random) -> str:
    """Nothing but another spelling."""
    return _insert(graph, rng, pick(rng, tensors(graph)), SAME)


EDITS: tuple[Callable[[fx.Graph, random.Random], str], ...] = (
    swap_operands, other_operand, other_operand, constant, constant, other_function, insert, insert, insert, insert,
    permute_rows, write, move_write, drop, twice, stale, keep, without_grad, autocast, exchange,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of one mutant. `state`: "void" (no such edit, or the mutant cannot run), "right" or "wrong"."""

    state: str
    edits: tuple[str, ...]
    fused: int = 0
    changed: bool = False
    problems: tuple[str, ...] = ()
    before: fx.Graph | None = None


def narrow_scatter(graph: fx.Graph) -> bool:
    """Whether rows are scattered by an expanded index of 32 bits: torch 2.13 returns wrong gradients for that."""
    scatters = (n for n in graph.nodes if "scatter" in str(n.target))
    return any(tensor_of(a).dtype == torch.int32 for n in scatters for a in n.all_input_nodes)


class _Complaints(logging.Handler):
    """What our passes log as a bug of theirs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.said.append(record.getMessage() + error)


def edited(program: Program, seed: int, edits, count: int) -> tuple[fx.Graph, list[str]]:
    """A copy of the program's graph with `count` random ones of `edits`."""
    rng = random.Random(f"{program.case.name}:{seed}")
    graph, said = copy_of(program.graph), []
    for _ in range(count):
        said.append(rng.choice(edits)(graph, rng))
        for node in reversed(graph.nodes):
            if not node.users and is_call(node) and not writes(node):
                graph.erase_node(node)
    return graph, said


@functools.cache
def unchanged(case: Case) -> Outcome:
    program = capture(case)
    return run(fx.GraphModule(program.root, copy_of(program.graph)), program.inputs)


def judge(case: Case, seed: int, edits=EDITS, count: int | None = None) -> Result:
    """Runs mutant `seed` of `case` as it is and fused."""
    program, said = capture(case), []
    if count is None:
        count = 2 if seed % 5 == 4 else 1
    try:
        graph, said = edited(program, seed, edits, count)
        gm = fx.GraphModule(program.root, graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace(gm, program.inputs)
            wanted = run(fx.GraphModule(program.root, copy_of(graph)), program.inputs)
        if not finite(wanted) or narrow_scatter(graph):
            return Result("void", tuple(said))
    except Exception:  # whatever a graph raises that makes no sense
        return Result("void", tuple(said))
    before = copy_of(graph)
    complaints, log = _Complaints(), logging.getLogger("mok_compile")
    log.addHandler(complaints)
    fused, problems = 0, []
    try:
        sites = fuse(gm, None, Options(engine="portable"))
        fused = sum(site.status == "fused" for site in sites)
        problems = differences(case, run(gm, program.inputs), wanted)
    except Exception as error:
        problems = [f"the mutant runs, fused it raises {error!r}"]
    finally:
        log.removeHandler(complaints)
    if problems and not steady(case, fx.GraphModule(program.root, before), program.inputs, wanted):
        return Result("void", tuple(said))
    problems += complaints.said
    base = unchanged(case)
    changed = len(base.outputs) != len(wanted.outputs) or bool(differences(case, wanted, base))
    return Result("wrong" if problems else "right", tuple(said), fused, changed, tuple(problems), before)


def explain(case: Case, seed: int, result: Result) -> str:
    """One wrong mutant for a reader: what was changed, what came out, the lines around the change, how to repeat it."""
    lines = [
        f"{case.name}:{seed} computes something else once it went through our passes ({result.fused} fused)",
        *(f"  edit    {edit}" for edit in result.edits),
        *(f"  wrong   {problem}" for problem in result.problems),
        f"  repeat  python tests/mutants.py {case.name}:{seed}",
        *(f"  | {line}" for line in around(result.before, " ".join(result.edits))),
    ]
    return "\n".join(lines)


def around(graph: fx.Graph, edits: str) -> Iterator[str]:
    """The lines of the graph near the nodes that an edit names."""
    lines = [line for line in str(graph).splitlines() if "%" in line or "return" in line]
    named = [i for i, line in enumerate(lines) if any(f"%{w.strip(',[]')} " in line for w in edits.split())]
    for i, line in enumerate(lines):
        if any(abs(i - n) <= 2 for n in named):
            yield line.strip()


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # failing mutants are expected
    by_name = {case.name: case for case in CASES}
    if ":" in arguments[0]:
        name, seed = arguments[0].split(":")
        result = judge(by_name[name], int(seed))
        print(result.state, result.fused, "fused", result.edits, *result.problems, sep="\n  ")
        print(result.before)
        return result.state == "wrong"
    total, first = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    cases = [by_name[n] for n in arguments[2:]] or CASES
    states = collections.Counter()
    for number in range(total):
        case, seed = cases[number % len(cases)], first + number // len(cases)
        result = judge(case, seed)
        kind = "fused" if result.fused else "left"
        states[f"{result.state} {kind} {'changed' if result.changed else 'same'}"] += 1
        if result.state == "wrong":
            print(explain(case, seed, result), flush=True)
    print(dict(states))
    return any(state.startswith("wrong") for state in states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
