"""What the code of modules can read while it runs, bounded by the names in its code objects.

A proof that ran this code holds as long as nothing of that changes. Names are collected without asking on which object
they are looked up: what is reached is never less than what is read, unless a name is put together at run time.
"""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

CONTAINERS = (list, tuple, dict, set, collections.deque)
CALLS = frozenset({"forward", "__call__"})
_MODULES = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class Reach:
    """What `function`, called with `owner`, can read.

    `names`: of attributes; `globals`: (module name, global name) of values that are no functions, classes or modules;
    `classes`: of all objects that are reached.
    """

    def __init__(self, owner: torch.nn.Module, function: types.FunctionType) -> None:
        self.names: set[str] = set(CALLS)
        # Of the owner itself: `function` stands for its forward, of which the rest is Dynamo's to trace.
        self.calls_owner = not CALLS.isdisjoint(name for code in _codes(function.__code__) for name in code.co_names)
        self.globals: set[tuple[str, str]] = set()
        self._functions: set[types.FunctionType] = set()
        self._shared: dict[type, tuple[int, tuple[str, ...]]] = {}
        self._add(function)
        while True:
            known = len(self.names), len(self._functions)
            objects = tuple(self.objects(owner))
            self.classes = {type(value) for value in objects}
            called = {type(value) for value in objects if value is not owner or self.calls_owner}
            for cls in self.classes:
                for name in tuple(self.names) if cls in called else self.names - CALLS:
                    self._add_all(_functions_of(_static(cls, name)))
            for function in tuple(self._functions):
                self._follow(function)
            if known == (len(self.names), len(self._functions)):
                return

    def attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of `value` that can be read: of the instance, submodules, state of the class."""
        own = getattr(value, "__dict__", {})
        modules = own.get("_modules", {}) if isinstance(value, torch.nn.Module) else {}
        every = isinstance(value, _MODULES)
        for name, module in modules.items():
            if module is not None and (every or name in self.names or not name.isidentifier()):
                yield name, module
        for name in [name for name in own if name in self.names]:
            yield name, own[name]
        for name in self.shared(type(value)):
            if name not in own and name not in modules:
                yield name, _static(type(value), name)

    def shared(self, cls: type) -> tuple[str, ...]:
        """Names of the state that objects of class `cls` have from their class."""
        known, names = self._shared.get(cls, (-1, ()))
        if known != len(self.names):
            names = tuple(name for name in sorted(self.names) if _is_state(_static(cls, name)))
            self._shared[cls] = len(self.names), names
        return names

    def objects(self, owner: torch.nn.Module) -> Iterator[Any]:
        """`owner` and all objects that can be reached from it or from a global, each once."""
        starts = [getattr(sys.modules[module], name) for module, name in self.globals]
        pending, seen = [owner, *starts], set()
        while pending:
            value = pending.pop()
            if id(value) in seen or not is_object(value):
                continue
            seen.add(id(value))
            yield value
            pending += [attribute for _, attribute in self.attributes(value)]

    def _add_all(self, functions: Iterable[types.FunctionType]) -> None:
        for function in functions:
            self._add(function)

    def _add(self, function: types.FunctionType) -> None:
        if function in self._functions:
            return
        self._functions.add(function)
        for code in _codes(function.__code__):
            self.names.update(code.co_names)
            self.names.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        for cell in function.__closure__ or ():
            try:
                self._add_all(_functions_of(cell.cell_contents))
            except ValueError:  # an empty cell
                continue

    def _follow(self, function: types.FunctionType) -> None:
        """Takes in the globals that `function` can read."""
        space = function.__globals__
        module = space.get("__name__")
        if getattr(sys.modules.get(module), "__dict__", None) is not space:
            return
        for name in {name for code in _codes(function.__code__) for name in code.co_names} & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] != "torch":
                    found = (vars(value).get(attribute) for attribute in tuple(self.names))
                    self._add_all(f for v in found if isinstance(v, types.FunctionType) for f in _functions_of(v))
            elif isinstance(value, (types.FunctionType, type)):
                self._add_all(_functions_of(value))
            elif _is_state(value):
                self.globals.add((module, name))


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


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _static(cls: type, name: str) -> Any:
    """What `cls` holds under `name`, other than what all modules or all objects have."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name] if base not in (torch.nn.Module, object) else None
    return None


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The Python functions that reading or calling `value` can run; of torch, those of its modules alone."""
    value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if not isinstance(value, types.FunctionType):
        return
    package = (value.__module__ or "").split(".")
    if package[0] != "torch" or package[:3] == ["torch", "nn", "modules"]:
        yield value
