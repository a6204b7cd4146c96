"""All that the proof of a loop depends on, written down so that two modules can be compared.

The layers of a model mostly hold blocks of one make. A loop that is proven in one of them is proven in all whose
description is the same: types, structure, constants and tensors (but for their numbers) of the module and of all that
its code can reach (`mok_compile.passes.loops.reach`), which tensors and objects are one and the same, the loop's local
variables, and the modes that are on.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from mok_compile.passes.loops.reach import (
    CONTAINERS,
    INTERNAL,
    Reach,
    class_attribute,
    is_constant,
    is_object,
    slots_of,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that is like itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    __hash__ = None


def describe(owner: torch.nn.Module, reach: Reach, live: tuple) -> list:
    """The description of what a proof for `owner` reads, with `live` as the loop's local variables; equal for modules
    that are alike."""
    return _Writer(owner, reach).written(live)


def describe_held(reach: Reach, held: list) -> list:
    """The description of what closures and classes hold for the code of `reach`, and of the objects in `held`."""
    writer = _Writer(None, reach)
    for value in reach.enclosed():
        writer._any(value)
    for cls in reach.types:
        for name in reach.shared(cls):
            writer._any(class_attribute(cls, name))
    for value in held:
        writer._any(value)
    return writer.told


class _Writer:
    def __init__(self, owner: torch.nn.Module | None, reach: Reach) -> None:
        self.owner, self.reach = owner, reach
        self.told: list = []
        self._numbers: dict[Any, int] = {}
        self._alive: list = []  # an id must not be used again

    def written(self, live: tuple) -> list:
        self.told += _modes()
        self._any(self.owner)
        for module, name in sorted(self.reach.globals):
            self.told.append(name)
            self._any(getattr(sys.modules[module], name))
        for value in live:
            self._local(value)
        return self.told

    def _number(self, key: Any) -> int:
        """Which one of those that were met so far `key` is."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _first(self, value: Any) -> bool:
        """Tells which object `value` is, and whether it is met for the first time."""
        known = len(self._numbers)
        number = self._number(id(value))
        self._alive.append(value)
        self.told.append(number)
        return number == known

    def _any(self, value: Any) -> None:
        told = self.told
        if isinstance(value, torch.Tensor):
            if self._first(value):
                told += (type(value), value.shape, value.dtype, value.device, value.requires_grad, value.layout)
        elif is_constant(value):
            told.append(_constant(value))
        elif is_object(value):
            told.append(type(value))
            if self._first(value):
                self._module(value) if isinstance(value, torch.nn.Module) else self._attributes(value)
        elif isinstance(value, CONTAINERS) and not isinstance(value, set):
            told.append(type(value))
            if self._first(value):
                told.append(len(value))
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    told.append(_constant(key) if is_constant(key) else _Itself(key))
                    self._any(item)
        elif isinstance(value, types.MethodType):
            told.append(_Itself(value.__func__))
            self._any(value.__self__)
        elif isinstance(value, functools.partial):
            if self._first(value):
                for part in (value.func, value.args, value.keywords):
                    self._any(part)
        else:
            told.append(_Itself(value))
            for name in slots_of(type(value)) & self.reach.names:
                self._any(getattr(value, name, None))

    def _module(self, module: torch.nn.Module) -> None:
        own, told = module.__dict__, self.told
        told += (*own, any(own[name] for name in HOOKS), module._compiled_call_impl is None)
        for store in ("_parameters", "_buffers", "_modules"):
            told.append(len(own[store]))
            for name, held in own[store].items():
                told.append(name)
                self._any(held)
        # Of the block itself only what the loop can read: a layer's number is no part of it.
        for name, value in own.items():
            if name not in INTERNAL and (module is not self.owner or name in self.reach.names):
                self._any(value)
        for name in self.reach.shared(type(module)):
            if name not in own:
                self._any(class_attribute(type(module), name))

    def _attributes(self, value: Any) -> None:
        for name, attribute in self.reach.attributes(value):
            self.told.append(name)
            self._any(attribute)

    def _local(self, value: Any) -> None:
        """A local variable: tensors are fake, and sizes may be symbols, which stand for themselves alone."""
        if isinstance(value, torch.Tensor):
            self.told += (type(value), value.dtype, value.device, len(value.shape))
            for size in value.shape:
                self._local(size)
            self.told.append(self._number(("memory", _memory(value))))
        elif isinstance(value, torch.SymInt):
            expr = value.node.expr
            self.told.append(_constant(int(expr)) if expr.is_number else ("size", self._number(expr)))
        elif isinstance(value, (list, tuple)):
            self.told += (type(value), len(value))
            for item in value:
                self._local(item)
        else:
            self.told.append(_constant(value) if is_constant(value) else _Itself(value))


def _memory(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass
        return id(tensor)


def _constant(value: Any) -> tuple:
    """`value` so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_constant, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_constant, value))
    return type(value), repr(value)


def _modes() -> tuple:
    """The modes of torch that a proof runs in."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*grad, *autocast, torch.get_default_dtype(), torch.get_default_device())
