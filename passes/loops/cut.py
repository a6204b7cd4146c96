"""Cuts a function at its loop over experts.

The loop asks which experts were hit, so no tracer gets through it. `cut` makes two functions of such a function, out of
its own statements: the *form*, which asks `run` for the loop's result first and goes through the loop only if there is
none, and the *probe*, which goes through the loop's body once, for an expert that stands for all.

What is cut out is read off the syntax, strictly: anything unusual and the function is left alone. What it computes is
for `mok_compile.passes.loops.iteration` to prove.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import copy
import dis
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Calls of statements before a loop that prepare it: which experts are hit, which tokens are theirs. This only bounds
# what is cut out with the loop; what it means is proven.
_PREPARES = {
    "arange", "argsort", "argwhere", "bincount", "bool", "cpu", "cumsum", "flatten", "greater", "gt", "int", "len",
    "long", "ne", "nonzero", "numpy", "one_hot", "permute", "reshape", "sum", "t", "tolist", "transpose", "unique",
    "unsqueeze", "view",
}  # fmt: skip
# Of these, those that make the counts of a loop that appends, and those at which the graph breaks there.
_COUNTING = {"bincount", "cpu", "numpy", "sum", "tolist"}
_BREAKING = {"bincount", "tolist"}
# Python's own functions that write into nothing.
_HARMLESS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "getattr", "hasattr", "int", "isinstance", "len", "list",
    "max", "min", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "zip",
}  # fmt: skip
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
ADDS = ("index_add_", "scatter_add_", "scatter_reduce_")
# What a loop calls and does that adds with ``total[rows] += ...``.
PLACES = {"where", "nonzero"}
_STORES = {dis.opmap["FOR_ITER"], dis.opmap["STORE_SUBSCR"]}
_RUN, _ONCE, _RESULT = "__mok_run__", "__mok_once__", "__mok_result__"
_NUMBERS, _BEFORE = "__mok_numbers__", "__mok_before__"
# Builtins that the probe gets its own versions of: the expert's number is no int there, and no tensor is just that.
SHADOWED = ("enumerate", "int", "isinstance", "len", "type", "zip")


@dataclass(frozen=True, eq=False)
class Cut:
    """`form` has the function's signature; `probe` takes self, the values of `live`, and by keyword the stand-ins.

    `place`: where the loop is; `live`: local variables that it reads; `total`: the one that it adds the experts'
    outputs onto, in place, or that it `fills` with them, or the list that it `appends` them to; `start`: the one that
    says where an expert's rows start, if there is one; `reads`: attributes of self that it reads; `asks`: whether a
    branch may depend on the data; `limits`: whether it takes the first so many of something.
    The probe returns total and start.
    """

    place: Place
    form: Callable
    probe: Callable
    live: tuple[str, ...]
    total: str
    appends: bool
    fills: bool
    start: str | None
    reads: tuple[str, ...]
    asks: bool
    limits: bool


@dataclass(frozen=True)
class Uncut:
    """A loop over experts that cannot be cut out: where it is, which attributes of self it reads, a reason code and a
    sentence."""

    place: Place
    reads: tuple[str, ...]
    reason: str
    detail: str


@dataclass(frozen=True)
class Place:
    """The lines of a loop, those of it and what prepares it, and the variable that holds self there."""

    file: str
    lines: range
    around: range
    owner: str


class Stop(Exception):
    """Why a function is not cut at `loop`: reason code and sentence, if not the loop's own statements tell. No `loop`
    where none adds onto one variable."""

    def __init__(self, loop: ast.For | None = None, reason: str = "", detail: str = "") -> None:
        super().__init__(detail)
        self.loop, self.reason, self.detail = loop, reason, detail


def may_cut(function: Callable) -> bool:
    """Whether `function` can hold a loop over experts at all, judged by its code object alone."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    names = {*function.__code__.co_names, *function.__code__.co_varnames}
    lists = {"append", "cat"} <= names and any("expert" in name for name in names)
    if lists or not set(ADDS).isdisjoint(names):
        return True
    stores = {*function.__code__.co_code[::2]} >= _STORES
    return stores and (any(name in PLACES or "expert" in name for name in names) or compares(function))


def compares(function: types.FunctionType) -> bool:
    """Whether `function` asks what is equal to something, as in ``ids == e``."""
    return any(step.opname == "COMPARE_OP" and "==" in step.argrepr for step in dis.get_instructions(function))


def cut(function: types.FunctionType, run: Callable) -> Cut | Uncut | None:
    """`function` cut at its loop over experts, or why it is not; None if it has no such loop.

    `run(cut)` is what the form asks, as a function of the owner and the values of `live`: that returns what the loop
    would add onto `total`, or None.
    """
    tree = _source(function)
    if tree is None or not tree.args.args:
        return None
    try:
        return _cut(function, tree, run)
    except Stop as stop:
        from mok_compile.passes.loops.uncut import uncut

        return uncut(function, tree, stop)


def _cut(function: types.FunctionType, tree: ast.FunctionDef, run: Callable) -> Cut:
    found = [(body, i) for body, i in loops_in(tree.body) if _adds_onto(body[i]) is not None]
    # Rows of something else may be filled in before.
    adding = [(body, i) for body, i in found if not any(map(fills_rows, ast.walk(body[i])))]
    found = adding or found
    # Around the loop over the experts there may be one over a token's slots, which Dynamo goes through.
    found = [(body, i) for body, i in found if not any(_holds(body[i], inner) for inner, _ in found)]
    owner = tree.args.args[0].arg
    if not found:
        raise Stop
    body, at = found[0]
    loop = body[at]
    if len(found) > 1:
        raise Stop(loop, "data-dependent", f"there are {len(found)} loops that add something up, where one is known")
    if not _has_builtins(function):
        raise Stop(loop, "data-dependent", "`len`, `zip` or the like mean something else here than in Python")
    total, appends = _adds_onto(loop)
    fills = any(map(fills_rows, ast.walk(loop)))
    if appends:
        body[:at] = [part for statement in body[:at] for part in _in_parts(statement)]
        at = body.index(loop)
    reached = _reached(tree.body, loop)
    region = [*_preparation(reached, body, at, owner, appends, _meanings(function)), loop]
    inside, outside = Names(statements_in(region)), Names(reached - set(statements_in(region)))
    known = outside.stored | {a.arg for a in _arguments(tree.args)}
    # What the loop goes by is set at the start of each turn, whatever it was before.
    targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    targets -= Names([*statements_in(region[:-1]), loop.iter]).loaded
    live = tuple(sorted((inside.loaded & known) - {owner} - targets))
    # A variable that one turn hands to the next, or that is read after the loop, is more than this loop may have.
    carried = Names(statements_in([loop])).stored & (known | Names(statements_in(region[:-1])).stored)
    carried -= targets
    # So is one that a function inside of this one reads, whenever that is called.
    local = {*function.__code__.co_varnames} - ({*function.__code__.co_cellvars} & _enclosed(tree, loop))
    leaks = inside.stored - local | inside.stored & Names(_after(tree.body, loop)).loaded
    starts = carried - {total}
    start = starts.pop() if len(starts) == 1 else None
    surely = {a.arg for a in _arguments(tree.args)} | _assigned(tree.body, loop)
    if not is_plain(loop, total):
        raise Stop(loop)
    if owner in inside.stored or carried - {total, start} or leaks - {total}:
        handed = sorted(carried - {total, start} | leaks - {total} | {owner} & inside.stored)
        raise Stop(loop, "interior-use", f"the loop hands on more than its sum: {', '.join(handed)}")
    if fills and (appends or any(map(adds_rows, ast.walk(loop)))):
        raise Stop(loop, "data-dependent", f"the loop fills rows of `{total}` in and adds onto them")
    if total not in live or not set(live) <= surely:
        raise Stop(loop, "data-dependent", "what the loop reads may not be there yet")
    if appends and (total not in local or not _only_joined(tree, loop, total)):
        raise Stop(loop, "data-dependent", f"the list `{total}` is not only concatenated")
    place = place_of(function, tree, region)
    method = "append" if appends else "copy_" if fills else "add_"
    made = _rebuild(tree, body, region, owner, live, total, method, start)
    form, probe = (_compile(function, node) for node in made)
    reads = tuple(sorted(inside.attributes(owner)))
    result = Cut(place, form, probe, live, total, appends, fills, start, reads, _asks(loop), _limits(loop))
    cell = form.__closure__[form.__code__.co_freevars.index(_RUN)]
    cell.cell_contents = run(result)
    return result


def place_of(function: types.FunctionType, tree: ast.FunctionDef, region: list[ast.stmt]) -> Place:
    first, loop = min(statement.lineno for statement in region), region[-1]
    lines, around = range(loop.lineno, loop.end_lineno + 1), range(first, loop.end_lineno + 1)
    return Place(function.__code__.co_filename, lines, around, tree.args.args[0].arg)


def _enclosed(tree: ast.FunctionDef, loop: ast.stmt) -> set[str]:
    """The names in functions inside of `tree`, but for sums over generators in `loop`, which are over at once."""
    summed = {generator for node in ast.walk(loop) if (generator := _summed(node)) is not None}
    pending: list[ast.AST] = [*tree.body]
    found = set()
    while pending:
        node = pending.pop()
        if node in summed:
            continue
        if isinstance(node, _SCOPES):
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        pending += ast.iter_child_nodes(node)
    return found


def _summed(node: ast.AST) -> ast.GeneratorExp | None:
    """The generator that `node` is Python's sum of."""
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sum"
    return node.args[0] if call and node.args and isinstance(node.args[0], ast.GeneratorExp) else None


def _has_builtins(function: types.FunctionType) -> bool:
    """Whether the names that the probe gets its own versions of mean Python's in `function`."""
    own = {*function.__code__.co_varnames, *function.__code__.co_freevars}
    meant = {name: function.__globals__.get(name, getattr(builtins, name)) for name in SHADOWED}
    return own.isdisjoint(SHADOWED) and all(value is getattr(builtins, name) for name, value in meant.items())


def _source(function: types.FunctionType) -> ast.FunctionDef | None:
    """The syntax tree of `function`, if it is certain to be that of the code that runs."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__name__:
        return None
    tree.decorator_list = []  # `function` is what they were given
    ast.increment_lineno(tree, first - 1)
    theirs, ours = function.__code__, _compile(function, copy.deepcopy(tree)).__code__
    same = all(getattr(theirs, name) == getattr(ours, name) for name in ("co_code", "co_names", "co_varnames"))
    return tree if same and _constants(theirs) == _constants(ours) else None


def _constants(code: types.CodeType) -> list:
    """The constants of `code`; strings without their indentation, which `dedent` has changed."""
    constants = (c for c in code.co_consts if not isinstance(c, types.CodeType))
    return [" ".join(c.split()) if isinstance(c, str) else (type(c), c) for c in constants]


def _compile(function: types.FunctionType, tree: ast.FunctionDef) -> types.FunctionType:
    """`tree` as a function with the globals, closure and defaults of `function`."""
    count = len(tree.args.posonlyargs + tree.args.args)
    free = function.__code__.co_freevars
    for argument in _arguments(tree.args):
        argument.annotation = None
    tree.args.defaults, tree.returns = [], None
    tree.args.kw_defaults = [None] * len(tree.args.kwonlyargs)
    parameters = [ast.arg(name) for name in (*free, _RUN)]
    outer = ast.FunctionDef(
        name="factory",
        args=ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[]),
        body=[tree, ast.Return(ast.Name(tree.name, ast.Load()))],
        decorator_list=[],
        type_params=[],
    )
    # Python compiles calls of what a module imports in a form of its own: said again here, but never run.
    imported = _imported(function.__code__)
    says = [ast.If(ast.Constant(False), [ast.Import([ast.alias(n) for n in imported])], [])] if imported else []
    module = ast.fix_missing_locations(ast.Module([*says, outer], []))
    flags = function.__code__.co_flags & sum(getattr(__future__, n).compiler_flag for n in __future__.all_feature_names)
    namespace: dict = {}
    code = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    exec(code, function.__globals__, namespace)
    made = namespace["factory"](*[None] * len(parameters))
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    closure = tuple(cells.get(name) or types.CellType() for name in made.__code__.co_freevars)
    defaults = function.__defaults__ if count == function.__code__.co_argcount else None
    result = types.FunctionType(made.__code__, function.__globals__, function.__name__, defaults, closure)
    result.__kwdefaults__, result.__module__ = function.__kwdefaults__, function.__module__
    result.__qualname__ = function.__qualname__
    return result


def _imported(code: types.CodeType) -> list[str]:
    """Names whose attributes `code` calls as those of imported modules, if it calls any: as plain functions, where
    those of other names are methods. Star imports count as no import there, so that the values cannot tell."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    methods = set()
    for before, step in itertools.pairwise(steps):
        # From Python 3.12 on, the lowest bit of LOAD_ATTR's argument says whether it loads a method.
        flagged = sys.version_info >= (3, 12) and step.opname == "LOAD_ATTR" and step.arg & 1
        method = step.opname == "LOAD_METHOD" or flagged
        if method and (before.opname in ("LOAD_GLOBAL", "LOAD_DEREF") or "LOAD_FAST" in before.opname):
            methods.add(before.argval[-1] if isinstance(before.argval, tuple) else before.argval)
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    return sorted(name for name in names - methods if name.isidentifier())


def _rebuild(
    tree: ast.FunctionDef,
    body: list[ast.stmt],
    region: list[ast.stmt],
    owner: str,
    live: Iterable[str],
    total: str,
    method: str,
    start: str | None,
) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """The trees of form and probe. `method`: of the total, which takes the result."""
    *preparation, loop = (copy.deepcopy(statement) for statement in region)
    turn = copy.deepcopy(loop)
    turn.iter = ast.Call(ast.Name(_ONCE, ast.Load()), [turn.iter], [])
    edge = ast.Constant(None) if start is None else ast.Name(start, ast.Load())
    returned = ast.Tuple([ast.Name(total, ast.Load()), edge], ast.Load())
    arguments = [ast.arg(name) for name in (owner, *live)]
    keywords = [ast.arg(name) for name in (_ONCE, _NUMBERS, _BEFORE, *SHADOWED)]
    probe = ast.FunctionDef(
        name=tree.name,
        args=ast.arguments(
            posonlyargs=[], args=arguments, kwonlyargs=keywords, kw_defaults=[None] * len(keywords), defaults=[]
        ),
        body=[
            *(_StandsIn().visit(statement) for statement in (*copy.deepcopy(preparation), turn)),
            ast.Return(returned),
        ],
        decorator_list=[],
        type_params=[],
    )
    values = ast.Tuple([ast.Name(name, ast.Load()) for name in live], ast.Load())
    ask = ast.Call(ast.Name(_RUN, ast.Load()), [ast.Name(owner, ast.Load()), values], [])
    add = ast.Call(ast.Attribute(ast.Name(total, ast.Load()), method, ast.Load()), [ast.Name(_RESULT, ast.Load())], [])
    missing = ast.Compare(ast.Name(_RESULT, ast.Load()), [ast.Is()], [ast.Constant(None)])
    instead = [
        ast.Assign([ast.Name(_RESULT, ast.Store())], ask),
        ast.If(missing, [*preparation, loop], [ast.Expr(add)]),
    ]
    for statement in instead:
        ast.copy_location(statement, region[-1])
        ast.fix_missing_locations(statement)
    body[:] = [new for s in body if s not in region[:-1] for new in (instead if s is region[-1] else [s])]
    return tree, ast.copy_location(probe, region[-1])


class _StandsIn(ast.NodeTransformer):
    """Calls of stand-ins: for ``a.tolist()``, since fake tensors have a method of their own for it, which asks each
    entry, and for ``0 if e == 0 else ends[e - 1]``, which is no computation with an expert's number."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        first, other = node.body, node.orelse
        test = node.test
        if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name) or len(test.ops) != 1:
            return node
        if isinstance(test.ops[0], (ast.Gt, ast.NotEq)):
            first, other = other, first
        elif not isinstance(test.ops[0], ast.Eq):
            return node
        number, ends = test.left.id, other.value if isinstance(other, ast.Subscript) else None
        zeros = [ast.unparse(n) for n in (first, *test.comparators)] == ["0", "0"]
        if not zeros or not isinstance(ends, ast.Name) or ast.unparse(other.slice) != f"{number} - 1":
            return node
        call = ast.Call(ast.Name(_BEFORE, ast.Load()), [ends, ast.Name(number, ast.Load())], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        method = node.func if isinstance(node.func, ast.Attribute) and node.func.attr == "tolist" else None
        if method is None or node.args or node.keywords:
            return node
        return ast.copy_location(ast.Call(ast.Name(_NUMBERS, ast.Load()), [method.value], []), node)


def loops_in(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    for i, statement in enumerate(body):
        if isinstance(statement, ast.For):
            yield body, i
        if isinstance(statement, (ast.If, ast.With, ast.For)):
            yield from loops_in(statement.body)
            yield from loops_in(getattr(statement, "orelse", []))


def _holds(loop: ast.For, body: list[ast.stmt]) -> bool:
    """Whether the statements of `body` are inside of `loop`."""
    return not set(body).isdisjoint(statements_in(loop.body))


def _adds_onto(loop: ast.stmt) -> tuple[str, bool] | None:
    """The variable that every ``index_add_``, or the like, or ``[rows] +=`` in the loop adds onto, or else that every
    ``append`` appends to, and whether it is the latter."""
    methods = [
        (node.func.value.id if isinstance(node.func.value, ast.Name) else None, node.func.attr)
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    added = {name if method in ADDS else None for name, method in methods if method in (*ADDS, "index_add")}
    added |= {node.target.value.id for node in ast.walk(loop) if adds_rows(node)}
    added |= {node.targets[0].value.id for node in ast.walk(loop) if fills_rows(node)}
    listed = {name for name, method in methods if method == "append"}
    names = [*added, *listed]
    return (names[0], bool(listed)) if len(names) == 1 and names[0] is not None else None


def _only_joined(tree: ast.FunctionDef, loop: ast.stmt, listed: str) -> bool:
    """Whether nothing outside of `loop` tells the list `listed` of one tensor for each expert from one of all rows:
    it is concatenated, asked whether there is anything in it, and appended to."""
    inside = set(ast.walk(loop))
    nodes = [node for node in ast.walk(tree) if node not in inside]
    fine: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, (ast.If, ast.IfExp)):
            asked = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
            fine |= {asked, *(asked.args if _is_length(asked) else [])}
        elif isinstance(node, ast.Compare) and _is_length(node.left):
            asked = " ".join(ast.unparse(node).split()[1:])
            fine |= {*node.left.args} if asked in ("== 0", "!= 0", "> 0") else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            where = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            joined = node.func.attr in ("cat", "concat") and all(ast.unparse(dim) == "0" for dim in where)
            fine |= {*node.args[:1]} if joined else {node.func.value} if node.func.attr == "append" else set()
    named = (node for node in nodes if isinstance(node, ast.Name) and node.id == listed)
    return all(node in fine or isinstance(node.ctx, ast.Store) for node in named)


def _is_length(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def adds_rows(node: ast.AST) -> bool:
    """Whether `node` is ``total[rows] += ...``."""
    rows = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Subscript)
    return rows and isinstance(node.target.value, ast.Name)


def fills_rows(node: ast.AST) -> bool:
    """Whether `node` is ``total[rows] = ...``."""
    rows = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript)
    return rows and isinstance(node.targets[0].value, ast.Name) and not isinstance(node.targets[0].slice, ast.Slice)


def _limits(loop: ast.For) -> bool:
    """Whether `loop` takes the first so many entries of something, as in ``rows[:capacity]``, or asks which ones these
    are, as in ``torch.arange(n) < capacity``."""
    slices = (node.slice for node in ast.walk(loop) if isinstance(node, ast.Subscript))
    if any(isinstance(s, ast.Slice) and (s.lower, s.step) == (None, None) and s.upper is not None for s in slices):
        return True
    compared = (part for node in ast.walk(loop) if isinstance(node, ast.Compare) for part in ast.walk(node))
    return any(getattr(part, "attr", None) == "arange" for part in compared)


def _asks(loop: ast.For) -> bool:
    return any(isinstance(statement, ast.If) for statement in statements_in(loop.body))


def _assigned(body: list[ast.stmt], loop: ast.stmt | None = None) -> set[str]:
    """Variables that have a value for certain when `loop` is reached, or the end of `body`."""
    found: set[str] = set()
    for statement in body:
        if statement is loop:
            return found
        branches = [getattr(statement, inner, []) for inner in ("body", "orelse")]
        on_the_way = next((branch for branch in branches if loop in statements_in(branch)), None)
        entered = isinstance(statement, ast.For) and on_the_way is statement.body
        if isinstance(statement, ast.With) or entered or not any(branches):
            found |= Names([statement]).stored
        if on_the_way is not None:
            return found | _assigned(on_the_way, loop)
        if isinstance(statement, ast.With):
            found |= _assigned(statement.body)
        elif isinstance(statement, ast.If):
            through = [b for b in branches if not (b and isinstance(b[-1], (ast.Raise, ast.Return)))]
            found |= set.intersection(*map(_assigned, through)) if through else set()
    return found


def _reached(body: list[ast.stmt], loop: ast.stmt) -> set[ast.stmt]:
    """All statements that can run when `loop` does: not those of the other branch."""
    found = set()
    for statement in body:
        found.add(statement)
        branches = [getattr(statement, inner, []) for inner in ("body", "orelse", "finalbody")]
        taken = [b for b in branches if loop in statements_in(b)] if isinstance(statement, ast.If) else []
        for branch in taken or branches:
            found |= _reached(branch, loop)
    return found


def _after(body: list[ast.stmt], loop: ast.stmt) -> list[ast.stmt]:
    """All statements that can run once `loop` is over."""
    for i, statement in enumerate(body):
        branches = [getattr(statement, inner, []) for inner in ("body", "orelse", "finalbody")]
        if isinstance(statement, (ast.For, ast.While)) and any(loop in statements_in(branch) for branch in branches):
            own = set(statements_in([loop]))
            return [s for s in statements_in(body[i:]) if s not in own]  # the whole of its next turn comes after this
        inner = [s for branch in branches if loop in statements_in(branch) for s in _after(branch, loop)]
        if statement is loop or inner or any(loop in statements_in(branch) for branch in branches):
            return [*inner, *statements_in(body[i + 1 :])]
    return []


def _preparation(
    reached: set[ast.stmt], body: list[ast.stmt], at: int, owner: str, counts: bool, known: Mapping[str, Any]
) -> list[ast.stmt]:
    """The statements before a loop that serve it alone, in order; only those that make `counts` in Python, if set.
    `known`: what names mean."""
    prepares = _counts if counts else _prepares
    taken, passed = [body[at]], []
    set_by_turns = Names(statements_in(body[at].body)).stored
    for i, statement in reversed(list(enumerate(body[:at]))):
        names, skipped = Names(statements_in([statement])), Names(statements_in(passed))
        # Counts have one name all the way; what runs before knows another value by it.
        before = body[:i] if counts else []
        rest = Names(reached - set(statements_in([*before, *taken, statement])))
        # What one turn hands to the next starts outside.
        serves = names.stored & Names(statements_in(taken)).loaded and not names.stored & (rest.loaded | set_by_turns)
        moves = not (names.stored & (skipped.loaded | skipped.stored) or names.loaded & skipped.stored)
        if serves and moves and prepares(statement):
            taken.insert(0, statement)
        elif _may_write(statement, owner, known):
            break  # what was computed before, maybe from another view of what this writes into, stays before
        else:
            passed.append(statement)
    while counts and _called(taken[0]).isdisjoint(_BREAKING) and taken[0] is not body[at]:
        del taken[0]
    return taken[:-1]


def _prepares(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):
        return _no_grad(statement) and all(map(_prepares, statement.body))
    return _assigns_names(statement) and _called(statement) <= _PREPARES and not _is_arithmetic(statement)


def _counts(statement: ast.stmt) -> bool:
    """Whether `statement` prepares the counts of a loop that appends, and not its rows."""
    return not _called(statement).isdisjoint(_COUNTING) and _prepares(statement)


def _in_parts(statement: ast.stmt) -> list[ast.stmt]:
    """``a = f(b).tolist()`` as ``a = f(b)`` and ``a = a.tolist()``, of which the loop takes the second along."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    names = call is not None and [type(target) for target in statement.targets] == [ast.Name]
    if not names or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return [statement]
    if call.func.attr != "tolist" or call.args or call.keywords or isinstance(call.func.value, ast.Name):
        return [statement]
    counts = ast.copy_location(ast.Name(statement.targets[0].id, ast.Load()), call)
    method = ast.copy_location(ast.Attribute(counts, "tolist", ast.Load()), call)
    then = ast.Assign(copy.deepcopy(statement.targets), ast.copy_location(ast.Call(method, [], []), call))
    statement.value = call.func.value
    return [statement, ast.copy_location(then, statement)]


def _called(statement: ast.stmt) -> set[str | None]:
    """The names of what `statement` calls."""
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", None) for f in calls}


def _is_arithmetic(statement: ast.Assign | ast.AugAssign) -> bool:
    """Whether it makes weights, which the loop takes as they are: how they are made is nothing to be proven."""
    node = statement if isinstance(statement, ast.AugAssign) else statement.value
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(getattr(node, "op", None), _ARITHMETIC)


def _may_write(statement: ast.stmt, owner: str, known: Mapping[str, Any]) -> bool:
    """Whether `statement` may write into a tensor: with an in-place operator, into an item, or by a call of what is
    neither a method of tensors nor a function of Python's or torch's that would say so. `known`: what names mean."""
    nodes = list(ast.walk(statement))
    written = any(isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load) for n in nodes)
    written = written or any(isinstance(n, ast.AugAssign) for n in nodes)
    return written or any(isinstance(n, ast.Call) and not _only_computes(n, owner, known) for n in nodes)


def _only_computes(call: ast.Call, owner: str, known: Mapping[str, Any]) -> bool:
    root, path = call.func, []
    while isinstance(root, ast.Attribute):
        path.insert(0, root.attr)
        root = root.value
    name = root.id if isinstance(root, ast.Name) else ""
    told = any(keyword.arg in (None, "out", "inplace") for keyword in call.keywords)
    if told or (name == owner and len(path) < 2):
        return False
    meant = known.get(name)
    if not isinstance(meant, types.ModuleType):
        if path:
            return path[-1] == "append" or (hasattr(torch.Tensor, path[-1]) and not path[-1].endswith("_"))
        return name in _HARMLESS and known.get(name, getattr(builtins, name)) is getattr(builtins, name)
    for attribute in path:
        parent, meant = meant, getattr(meant, attribute, None)
    if not path or path[-1].endswith("_"):
        return False
    if isinstance(meant, type):
        return meant.__module__.partition(".")[0] == "torch"
    if parent is torch.nn.functional:
        return not any(isinstance(a, ast.Constant) and a.value is True for a in call.args)  # as relu(x, True)
    return parent is torch and (hasattr(torch._C._VariableFunctions, path[-1]) or hasattr(torch.functional, path[-1]))


def _meanings(function: types.FunctionType) -> dict[str, Any]:
    """What the names in `function` mean, as far as they are not its own variables, which have None."""
    found = {**function.__globals__, **dict.fromkeys(function.__code__.co_varnames)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing in it yet
            found[name] = cell.cell_contents
    return found | dict.fromkeys(function.__code__.co_cellvars)


def _no_grad(statement: ast.With) -> bool:
    return [ast.unparse(item) for item in statement.items] == ["torch.no_grad()"]


def _assigns_names(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign):
        return isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name)
    targets = [e for t in statement.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return all(isinstance(t, ast.Name) for t in targets)


_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
# What tells a stand-in from what it stands for, and has none itself.
_TELLS_APART = ("id",)
_FORBIDDEN = (*_SCOPES, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred)


def is_plain(statement: ast.stmt, total: str) -> bool:
    """Whether `statement` only computes: names nothing but local variables, and calls for no effect but in-place ops of
    tensors, or to append to `total`."""
    nodes = list(ast.walk(statement))
    if {node for node in nodes if isinstance(node, _FORBIDDEN)} - set(map(_summed, nodes)):
        return False
    if any(isinstance(node, ast.Name) and node.id in _TELLS_APART for node in nodes):
        return False
    if isinstance(statement, ast.For):
        targets = statement.target.elts if isinstance(statement.target, ast.Tuple) else [statement.target]
        names = all(isinstance(t, ast.Name) for t in targets)
        nested = any(isinstance(n, (ast.For, ast.While)) for s in statement.body for n in ast.walk(s))
        return names and not nested and not statement.orelse and all(is_plain(s, total) for s in statement.body)
    if isinstance(statement, ast.If):
        return all(is_plain(s, total) for s in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.With):
        return _no_grad(statement) and all(is_plain(s, total) for s in statement.body)
    if adds_rows(statement):
        return statement.target.value.id == total
    if fills_rows(statement):
        return statement.targets[0].value.id == total
    if isinstance(statement, ast.Expr):
        call = statement.value
        method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        appends = method == "append" and isinstance(call.func.value, ast.Name) and call.func.value.id == total
        return isinstance(call, ast.Constant) or appends or (method.endswith("_") and not method.endswith("__"))
    return isinstance(statement, (ast.Continue, ast.Pass)) or _assigns_names(statement)


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    more = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of `body`, those inside of others too."""
    for statement in body:
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            yield from statements_in(getattr(statement, inner, []))


class Names:
    """The variables that statements read and write; compound statements count with their headers only."""

    def __init__(self, statements: Iterable[ast.stmt]) -> None:
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self._nodes: list[ast.AST] = []
        pending: list[ast.AST] = list(statements)
        while pending:
            node = pending.pop()
            self._nodes.append(node)
            if isinstance(node, ast.Name):
                (self.loaded if isinstance(node.ctx, ast.Load) else self.stored).add(node.id)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.loaded.add(node.target.id)
            if isinstance(node, ast.GeneratorExp):
                inner = Names([node.elt, *(part for g in node.generators for part in (g.target, g.iter, *g.ifs))])
                self.loaded |= inner.loaded - inner.stored  # whose variables are its own
                self._nodes += inner._nodes
                continue
            pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]

    def attributes(self, owner: str) -> set[str]:
        """Attributes of `owner` that are read."""
        return {
            node.attr
            for node in self._nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
        }
