"""A graph as readable Python: one line a node, with shapes, dtypes, module paths and source lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import inplace_methods, magic_methods
from torch.fx.node import _get_qualified_name, map_arg
from torch.utils._dtype_abbrs import dtype_abbrs

from mok_compile.passes.blocks.site import module_of
from mok_compile.passes.graph.source import source_of


@dataclass(frozen=True)
class Entry:
    """A node: its code, and where it comes from. `module` and `source` are empty where that is not known."""

    node: str
    op: str
    code: str
    module: str
    source: str


@dataclass(frozen=True)
class Function:
    """A graph, or a subgraph of it (`name` is its path, empty for the graph itself)."""

    name: str
    entries: tuple[Entry, ...]

    def lines(self) -> Iterator[str]:
        """The code; a comment wherever module or source line change."""
        arguments = [entry for entry in self.entries if entry.op == "placeholder"]
        yield f"def {self.name.replace('.', '_') or 'forward'}("
        yield from (f"    {entry.code}," for entry in arguments)
        yield "):"
        module = source = ""
        for entry in self.entries:
            if entry.op == "placeholder":
                continue
            if entry.module and entry.module != module:
                module = entry.module
                yield ""
                yield f"    # {module}"
            if entry.source and entry.source != source:
                source = entry.source
                yield f"    # {source}"
            yield f"    {entry.code}"


@dataclass(frozen=True)
class Listing:
    """A graph and its subgraphs."""

    functions: tuple[Function, ...]

    @property
    def text(self) -> str:
        return "\n\n\n".join("\n".join(function.lines()) for function in self.functions) + "\n"


def listing(gm: fx.GraphModule) -> Listing:
    """The listing of `gm` as it is now, subgraphs last."""
    modules = [(name, m) for name, m in gm.named_modules() if isinstance(m, fx.GraphModule)]
    return Listing(tuple(Function(name, tuple(map(_entry, module.graph.nodes))) for name, module in modules))


def _entry(node: fx.Node) -> Entry:
    path, cls = module_of(node)
    source = source_of(node)
    where = ""
    if source is not None and node.op not in ("placeholder", "output"):
        where = f"{source} in {source.function}: {source.code}"
    return Entry(node.name, node.op, _code(node), f"{path} [{cls}]" if path else "", where)


def _code(node: fx.Node) -> str:
    kind = annotation(node.meta.get("example_value"))
    left = f'{node.name}: "{kind}"' if kind else node.name
    if node.op == "placeholder":
        return left
    if node.op == "output":
        return f"return {_show(node.args[0])}"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    args = [_show(a) for a in node.args]
    keywords = [f"{k}={_show(v)}" for k, v in node.kwargs.items()]
    if node.op in ("call_method", "call_module"):
        callee = f"{args.pop(0)}.{node.target}" if node.op == "call_method" else f"self.{node.target}"
        return f"{left} = {callee}({', '.join(args + keywords)})"
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator" and not keywords:
        form = magic_methods.get(name)
        if form is not None:
            return f"{left} = {form.format(*args)}"
        if name in inplace_methods:
            statement = inplace_methods[name].format(*args)
            return statement if name == "setitem" else f"{statement}; {left} = {args[0]}"
    if node.target is getattr and len(args) == 2:
        return f"{left} = {args[0]}.{node.args[1]}"
    return f"{left} = {_callee(node.target)}({', '.join(args + keywords)})"


def _callee(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    try:
        return _get_qualified_name(target)
    except Exception:  # a callable without a name of its own
        return str(target)


def _show(arg: Any) -> str:
    if isinstance(arg, slice):
        ends = ["" if end is None else _show(end) for end in (arg.start, arg.stop)]
        return ":".join(ends if arg.step is None else [*ends, _show(arg.step)])
    if isinstance(arg, tuple) and any(isinstance(a, slice) for a in arg):
        return ", ".join(map(_show, arg))
    return repr(map_arg(arg, lambda node: _Name(node.name)))


class _Name(str):
    """Prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def annotation(example: Any) -> str:
    """``bf16[24, 64]`` for a tensor, ``Sym(s0)`` for a symbolic number, empty for anything else."""
    if isinstance(example, torch.Tensor):
        core = f"{dtype_abbrs[example.dtype]}[{', '.join(map(str, example.shape))}]"
        plain = type(example) in (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
        return core if plain else f"{type(example).__name__}({core})"
    if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({example})"
    return ""
