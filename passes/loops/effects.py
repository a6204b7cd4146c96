"""What running a loop's code once leaves behind: in modules, other objects, classes, globals, and random numbers.

A proof runs the code that the fused op then replaces. Code that leaves something behind, a counter that is one higher,
must run as often as in eager, so it is no block; and what the proof's own run has left is undone.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import pickle
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.graph.source import INSIDE
from mok_compile.passes.loops.reach import CONTAINERS, Reach, codes_of, is_constant

_OPEN = (list, dict, set, deque)  # containers that can change


class Effects:
    """What `owner` and all that `reach` finds are now, to compare with what they are later."""

    def __init__(self, owner: torch.nn.Module, reach: Reach) -> None:
        self._globals = [(vars(sys.modules[m]), name, vars(sys.modules[m])[name]) for m, name in reach.globals]
        objects = {id(value): value for value in (*owner.modules(), *reach.objects(owner))}
        self._attributes = [(value.__dict__, dict(value.__dict__)) for value in objects.values()]
        bases = {base for cls in reach.classes for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"}
        self._classes = [(cls, dict(vars(cls))) for cls in bases - {object}]
        held = [attribute for _, attributes in (*self._attributes, *self._classes) for attribute in attributes.values()]
        found = _containers([*held, *(value for _, _, value in self._globals)])
        self._contents = [(value, _copy(value)) for value in found]
        reached = list(reach.held(owner))
        if any(map(_moves_unseen, reached)):
            raise Break("mutation", "the loop can read an iterator, or draw numbers of numpy's, unseen")
        drawn = [random, *(value for value in reached if isinstance(value, random.Random))]
        self._draws = [(source.getstate, source.setstate) for source in drawn]
        self._draws += map(_seeded, _generators())  # draws of fake tensors move nothing, but seeds do
        if "numpy.random" in sys.modules:
            numbers = sys.modules["numpy.random"]
            self._draws.append((numbers.get_state, numbers.set_state))
        self._drawn = [get() for get, _ in self._draws]

    def undo(self) -> bool:
        """Puts back what has changed; whether anything has."""
        changed = False
        for (get, put), before in zip(self._draws, self._drawn, strict=True):
            changed |= pickle.dumps(get()) != pickle.dumps(before)  # of numpy's, an array is part
            put(before)
        for now, before in self._attributes:
            if _differ(now, before):
                changed = True
                now.clear()
                now.update(before)
        for cls, before in self._classes:
            if _differ(vars(cls), before):
                changed = True
                for name in vars(cls).keys() - before.keys():
                    delattr(cls, name)
                for name in [name for name, value in before.items() if vars(cls).get(name) is not value]:
                    setattr(cls, name, before[name])
        for space, name, before in self._globals:
            if not _same(space.get(name), before):
                changed, space[name] = True, before
        for now, before in self._contents:
            if _differ(now, before):
                changed = True
                now.clear()
                now.extend(before) if isinstance(now, (list, deque)) else now.update(before)
        return changed


@contextlib.contextmanager
def speechless(reach: Reach) -> Iterator[None]:
    """While this lasts, a ``print`` or a warning of the code of `reach`, in this thread, is a Break("mutation")."""
    here, says = threading.get_ident(), (print, warnings.warn)

    def kept(function: Callable) -> Callable:
        @functools.wraps(function)
        def said(*args, **kwargs):
            caller = sys._getframe(1).f_code.co_filename
            if threading.get_ident() == here and not caller.startswith(INSIDE):
                raise Break("mutation", "the loop prints or warns, which one op for all experts would not")
            return function(*args, **kwargs)

        return said

    spaces = [(f.__globals__, name) for f in reach.functions for code in codes_of(f.__code__) for name in code.co_names]
    found = {
        (id(space), name): (space, name, space[name])
        for space, name in spaces
        if any(space.get(name) is f for f in says)
    }
    held = [(vars(builtins), "print", print), (vars(warnings), "warn", warnings.warn), *found.values()]
    for space, name, function in held:
        space[name] = kept(function)
    try:
        yield
    finally:
        for space, name, function in held:
            space[name] = function


def _generators() -> Iterator[torch.Generator]:
    """Torch's own, of the CPU and of GPUs in use."""
    yield torch.default_generator
    if torch.cuda.is_initialized():
        yield from torch.cuda.default_generators


def _seeded(generator: torch.Generator) -> tuple[Callable[[], bytes], Callable[[bytes], None]]:
    """How to get and to set the state of `generator`, as what can be compared."""

    def put(state: bytes) -> None:
        generator.set_state(torch.tensor([*state], dtype=torch.uint8))

    return lambda: bytes(generator.get_state().tolist()), put


def _moves_unseen(value: Any) -> bool:
    """Whether reading `value` may leave something behind that nobody can compare or put back."""
    return hasattr(type(value), "__next__") or type(value).__module__.startswith("numpy.random")


def _copy(container: Any) -> dict | set | list:
    """The entries of a container, without what else its class may hold."""
    kind = dict if isinstance(container, dict) else set if isinstance(container, set) else list
    return kind(container)


def _differ(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return True
    if isinstance(b, dict):
        return a.keys() != b.keys() or not all(_same(a[name], value) for name, value in b.items())
    return a != b if isinstance(b, set) else not all(map(_same, a, b))


def _same(a: Any, b: Any) -> bool:
    return a is b or (is_constant(b) and type(a) is type(b) and a == b)


def _containers(values: list) -> Iterator[Any]:
    """All containers that can change among `values`, and in these, each once."""
    seen: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in seen or not isinstance(value, CONTAINERS):
            continue
        seen.add(id(value))
        values += value.values() if isinstance(value, dict) else value
        if isinstance(value, _OPEN):
            yield value
