"""What the code of modules can read while it runs, bounded by the names in its code objects.

A proof that ran this code holds as long as nothing of that changes. Names are collected without asking on which object
they are looked up: what is reached is never less than what is read. Where code can put a name together at run time, all
attributes count as read.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

CONTAINERS = (list, tuple, dict, set, collections.deque)
CALLS = frozenset({"forward", "__call__"})
# Where code holds one of these names, it can read attributes whose names it does not hold.
DYNAMIC = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "_modules", "children", "named_children", "modules", "named_modules"}
)
# What every module has. Parameters, buffers and submodules are gone through by name.
INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
_MODULES = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class Reach:
    """What `function`, called with `owner`, can read.

    `names`: of attributes; `globals`: (module name, global name) of values that are no functions, classes or modules;
    `classes`: of all objects that are reached; `types`: those that the code names itself; `cells`: of closures, with
    such values; `functions`: all code; `caches`: what keeps the results of some of it.
    """

    def __init__(self, owner: torch.nn.Module, function: types.FunctionType) -> None:
        self.names: set[str] = set(CALLS)
        self.owner = owner
        # Of the owner itself: `function` stands for its forward, of which the rest is Dynamo's to trace.
        self.calls_owner = not CALLS.isdisjoint(name for code in codes_of(function.__code__) for name in code.co_names)
        self.globals: set[tuple[str, str]] = set()
        self.functions: set[types.FunctionType] = set()
        self.types: set[type] = set()
        self.cells: list[types.CellType] = []
        self.caches: set[functools._lru_cache_wrapper] = set()
        self._shared: dict[type, tuple[int, tuple[str, ...]]] = {}
        self._add(function)
        while True:
            known = self._size()
            held = tuple(self.held(owner))
            objects = tuple(filter(is_object, held))
            self.classes = {type(value) for value in objects}
            self._called = {type(value) for value in objects if value is not owner or self.calls_owner} | self.types
            for value in held:
                self._add_code(value)
            for _, _, method in tuple(self.methods()):
                self._add_functions(method)
            for function in tuple(self.functions):
                self._follow(function)
            if known == self._size():
                return

    def _size(self) -> tuple[int, ...]:
        return len(self.names), len(self.functions), len(self.types), len(self.cells)

    def methods(self) -> Iterator[tuple[type, str, Any]]:
        """Class, name and what is there: the code that calls, reads and operators on objects of that class can run."""
        for cls in self.classes | self.types:
            for name in (self.names if cls in self._called else self.names - CALLS) | _implied(cls):
                held = class_attribute(cls, name)
                if held is not None and not _is_state(held):
                    yield cls, name, held

    def attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of `value` that can be read: of the instance, submodules, state of the class."""
        own = getattr(value, "__dict__", {})
        modules = own.get("_modules", {}) if isinstance(value, torch.nn.Module) else {}
        dynamic = self.is_dynamic(value)
        every = isinstance(value, _MODULES) or dynamic
        for name, module in modules.items():
            if module is not None and (every or name in self.names or not name.isidentifier()):
                yield name, module
        internal = INTERNAL if isinstance(value, torch.nn.Module) else frozenset()
        for name in [name for name in own if name in self.names or (dynamic and name not in internal)]:
            yield name, own[name]
        for name in self.shared(type(value)):
            if name not in own and name not in modules:
                yield name, class_attribute(type(value), name)

    def is_dynamic(self, value: Any) -> bool:
        """Whether all attributes of `value` can be read, by names that are put together. Of the block itself its loop
        reads what it names."""
        return value is not self.owner and not isinstance(value, _MODULES) and not DYNAMIC.isdisjoint(self.names)

    def shared(self, cls: type) -> tuple[str, ...]:
        """Names of the state that objects of class `cls` have from their class."""
        known, names = self._shared.get(cls, (-1, ()))
        if known != len(self.names):
            found = self.names if cls is type(self.owner) or DYNAMIC.isdisjoint(self.names) else self.names | _own(cls)
            names = tuple(name for name in sorted(found) if _is_state(class_attribute(cls, name)))
            self._shared[cls] = len(self.names), names
        return names

    def objects(self, owner: torch.nn.Module) -> Iterator[Any]:
        """`owner` and all objects that can be reached from it, from a global or from a closure, each once."""
        return (value for value in self.held(owner) if is_object(value))

    def held(self, owner: torch.nn.Module) -> Iterator[Any]:
        """The same with all else that is no constant: functions, containers."""
        starts = [getattr(sys.modules[module], name) for module, name in self.globals]
        pending, seen, alive = [owner, *starts, *self.enclosed()], set(), []
        while pending:
            value = pending.pop()
            if id(value) in seen or is_constant(value) or isinstance(value, torch.Tensor):
                continue
            seen.add(id(value))
            alive.append(value)  # an id must not be used again
            yield value
            if is_object(value):
                pending += [attribute for _, attribute in self.attributes(value)]
            elif isinstance(value, CONTAINERS):
                pending += value.values() if isinstance(value, dict) else value
            elif isinstance(value, functools.partial):
                pending += (value.func, value.args, value.keywords)
            elif isinstance(value, types.MethodType):
                pending += (value.__func__, value.__self__)
            else:
                pending += [getattr(value, name) for name in slots_of(type(value)) & self.names if hasattr(value, name)]

    def _add_functions(self, value: Any) -> None:
        """Takes in what reading or calling `value` can run."""
        for function in _functions_of(value):
            self._add(function)
            if isinstance(value, functools._lru_cache_wrapper):
                self.caches.add(value)

    def _add(self, function: types.FunctionType) -> None:
        if function in self.functions:
            return
        self.functions.add(function)
        for code in codes_of(function.__code__):
            self.names.update(code.co_names)
            self.names.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self._add_code(value)
            if _is_state(value):
                self.cells.append(cell)

    def _add_code(self, value: Any) -> None:
        """Takes in a function or a class that code names."""
        self._add_functions(value)
        if isinstance(value, type) and value.__module__.partition(".")[0] not in ("torch", "builtins"):
            self.types.add(value)

    def enclosed(self) -> list[Any]:
        """What the cells hold, but for modules: those are reached from their owner."""
        return [c.cell_contents for c in self.cells if not isinstance(c.cell_contents, (torch.nn.Module, torch.Tensor))]

    def _follow(self, function: types.FunctionType) -> None:
        """Takes in the globals that `function` can read."""
        space = function.__globals__
        module = space.get("__name__")
        if getattr(sys.modules.get(module), "__dict__", None) is not space:
            return
        for name in {name for code in codes_of(function.__code__) for name in code.co_names} & space.keys():
            self._take(module, name, space[name], set())

    def _take(self, module: str, name: str, value: Any, seen: set[str]) -> None:
        """Takes in the global `name` of `module`; where that is a module, what code can read of it."""
        if not isinstance(value, types.ModuleType):
            self._add_code(value)
            if _is_state(value):
                self.globals.add((module, name))
            return
        other = value.__name__
        if other in seen or other.partition(".")[0] == "torch" or sys.modules.get(other) is not value:
            return
        seen.add(other)
        for attribute in self.names & vars(value).keys():
            self._take(other, attribute, vars(value)[attribute], seen)


def is_constant(value: Any) -> bool:
    """Whether `value` is a number, a string, or the like, or a plain container of these, but no dictionary."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_constant, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device))


def is_object(value: Any) -> bool:
    """Whether `value` is a module or a plain object with attributes of its own."""
    if isinstance(value, torch.nn.Module):
        return True
    other = (torch.Tensor, types.ModuleType, type, functools.partial, enum.Enum, *CONTAINERS)
    plain = hasattr(value, "__dict__") and not isinstance(value, other) and not hasattr(type(value), "__get__")
    return plain and type(value).__module__.partition(".")[0] != "torch"


def _is_state(value: Any) -> bool:
    """Whether `value` is something else than code: no function, class or module of Python, and not None."""
    return value is not None and not isinstance(value, (type, types.ModuleType)) and not hasattr(type(value), "__get__")


def slots_of(cls: type) -> set[str]:
    """The attributes that objects of class `cls` have in slots."""
    slots = (vars(base).get("__slots__", ()) for base in cls.__mro__ if base.__module__ != "builtins")
    return {name for names in slots for name in ((names,) if isinstance(names, str) else names)}


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code` and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def class_attribute(cls: type, name: str) -> Any:
    """What `cls` holds under `name`, other than what all modules or all objects have."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name] if base not in (torch.nn.Module, object) else None
    return None


def _implied(cls: type) -> frozenset[str]:
    """Special methods of `cls` that run without being named: operators, calls, the reading of attributes."""
    return frozenset(n for b in _bases(cls) for n in _SPECIAL & vars(b).keys() if inspect.isfunction(vars(b)[n]))


def _own(cls: type) -> frozenset[str]:
    """What `cls` has besides special names."""
    return frozenset(name for base in _bases(cls) for name in vars(base) if not name.startswith("__"))


def _bases(cls: type) -> Iterator[type]:
    return (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))


_SPECIAL = frozenset(
    {"__getattr__", "__getattribute__", "__getitem__", "__iter__", "__next__", "__len__", "__contains__", "__bool__"}
)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that reading or calling `value` can run; of torch, those of its modules alone."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    if not isinstance(value, types.FunctionType):
        return
    for function in {value, inspect.unwrap(value)}:
        package = str(function.__globals__.get("__name__")).split(".")
        if package[0] not in ("torch", "mok_compile") or package[:3] == ["torch", "nn", "modules"]:
            yield function
