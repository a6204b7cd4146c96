"""Why a function is not cut at its loop over experts, read off the syntax: so that the loop is named at least."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mok_compile.passes.blocks.loops import ROUTING
from mok_compile.passes.loops.cut import (
    ADDS,
    PLACES,
    Names,
    Stop,
    Uncut,
    adds_rows,
    fills_rows,
    is_plain,
    loops_in,
    place_of,
    statements_in,
)

_CHOICES = {"topk", "argmax"}  # a function named `max` makes too many others
_UNKNOWN = (
    "nothing is known to be added up in the loop: what is, is spelled as index_add_, scatter_add_, out[rows] += ..., "
    "out[rows] = ..., or as a list that is concatenated"
)


def may_be_named(function: Any) -> bool:
    """Whether `function` can hold a loop over experts that is spelled in an unknown way, judged by its code object."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    steps = {*function.__code__.co_code[::2]}
    return dis.opmap["FOR_ITER"] in steps and _speaks_of_routing(function)


def uncut(function: types.FunctionType, tree: ast.FunctionDef, stop: Stop) -> Uncut | None:
    """What `stop` says of the loop over experts in `function`; None if there is nothing that looks like one."""
    owner = tree.args.args[0].arg
    loops = [body[i] for body, i in loops_in(tree.body)] if stop.loop is None else [stop.loop]
    for loop in loops:
        reads = Names(statements_in([loop])).attributes(owner)
        if _is_over_experts(function, loop, reads):
            why = (stop.reason, stop.detail) if stop.reason else _why(loop, owner)
            return Uncut(place_of(function, tree, [loop]), tuple(sorted(reads)), *why)
    return None


def _is_over_experts(function: types.FunctionType, loop: ast.For, reads: Iterable[str]) -> bool:
    """Whether `loop`, which `reads` these attributes of self, looks like one over experts: it names them, or it picks
    rows by a number in code that makes a choice or speaks of routing."""
    if any("expert" in name for name in reads):
        return True
    return bool(reads) and any(map(_picks_rows(loop), ast.walk(loop))) and _speaks_of_routing(function)


def _picks_rows(loop: ast.For) -> Callable[[ast.AST], bool]:
    """Whether a node of `loop` asks which rows are those of a turn: ``ids == e`` or ``where(mask[e])``, no branch."""
    targets = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    tests = {node.test for node in ast.walk(loop) if isinstance(node, (ast.If, ast.IfExp, ast.While))}

    def by_turn(node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in targets for part in ast.walk(node))

    def picks(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return isinstance(node.ops[0], ast.Eq) and node not in tests and by_turn(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in PLACES:
            return False
        return node.func.attr == "nonzero" or (len(node.args) == 1 and by_turn(node.args[0]))

    return picks


def _speaks_of_routing(function: types.FunctionType) -> bool:
    """Whether `function` makes a choice, or has a name in it of what does."""
    names = {*function.__code__.co_names, *function.__code__.co_varnames, *function.__qualname__.split(".")}
    return not names.isdisjoint(_CHOICES) or any(word in name.lower() for name in names for word in ROUTING)


def _why(loop: ast.For, owner: str) -> tuple[str, str]:
    """What `loop` does that no known one does: reason code and sentence."""
    written = next(_written(loop, owner), None)
    if written is not None:
        return "mutation", f"the loop writes {written}, which one op for all experts would not"
    onto = sorted(_added_onto(loop))
    if len(onto) > 1:
        return "interior-use", f"the loop keeps more than the sum of its experts' outputs: {', '.join(onto)}"
    if not onto:
        return "data-dependent", _UNKNOWN
    odd = [statement for statement in statements_in(loop.body) if not is_plain(statement, onto[0])]
    innermost = [s for s in odd if not any(other is not s and other in statements_in([s]) for other in odd)]
    what = ast.unparse((innermost or [loop])[0]).splitlines()[0]
    return "data-dependent", f"the loop does what no known one does: {what}"


def _written(loop: ast.For, owner: str) -> Iterator[str]:
    """The attributes of self that `loop` writes to."""
    for node in ast.walk(loop):
        if not isinstance(node, (ast.Attribute, ast.Subscript)) or not isinstance(node.ctx, ast.Store):
            continue
        while isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name)
        ):
            node = node.value
        if isinstance(node, ast.Attribute) and node.value.id == owner:
            yield ast.unparse(node)


def _added_onto(loop: ast.For) -> set[str]:
    """The variables that something is added onto in `loop`, or appended to."""
    found: set[str] = set()
    for node in ast.walk(loop):
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and isinstance(method.value, ast.Name) and method.attr in (*ADDS, "append"):
            found.add(method.value.id)
        if adds_rows(node):
            found.add(node.target.value.id)
        if fills_rows(node):
            found.add(node.targets[0].value.id)
    return found
