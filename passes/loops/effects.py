"""What running a loop's code once leaves behind: in modules, other objects, classes, globals, closures, and random
numbers.

A proof runs the code that the fused op then replaces. Code that leaves something behind, a counter that is one higher,
must run as often as in eager, so it is no block; and what the proof's own run has left is undone.
"""

from __future__ import annotations

import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.loops.reach import CONTAINERS, Reach, is_constant, slots_of

_OPEN = (list, dict, set, deque)  # containers that can change
_NOTHING = object()  # in a slot


class Effects:
    """What `owner` and all that `reach` finds are now, to compare with what they are later."""

    def __init__(self, owner: torch.nn.Module, reach: Reach) -> None:
        self._globals = [(vars(sys.modules[m]), name, vars(sys.modules[m])[name]) for m, name in reach.globals]
        objects = {id(value): value for value in (*owner.modules(), *reach.objects(owner))}
        self._attributes = [(v.__dict__, dict(v.__dict__)) for v in (*objects.values(), *reach.functions)]
        classes = reach.classes | reach.types
        bases = {base for cls in classes for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"}
        self._classes = [(cls, dict(vars(cls))) for cls in bases - {object}]
        reached = list(reach.held(owner))
        slots = [(value, name) for value in reached for name in slots_of(type(value))]
        self._slots = [(value, name, getattr(value, name, _NOTHING)) for value, name in slots]
        self._cells = [
            (cell, cell.cell_contents) for f in reach.functions for cell in f.__closure__ or () if _is_full(cell)
        ]
        held = [attribute for _, attributes in (*self._attributes, *self._classes) for attribute in attributes.values()]
        held += [value for *_, value in (*self._globals, *self._slots, *self._cells)]
        defaults = [value for f in reach.functions for value in (f.__defaults__, f.__kwdefaults__)]
        self._contents = [(value, _copy(value)) for value in _containers([*held, *defaults])]
        self._memory = list(_memories(reached))
        self._caches = [(cache, cache.cache_info()) for cache in reach.caches]
        if any(map(_moves_unseen, reached)):
            raise Break("mutation", "the loop can read an iterator, or draw numbers of numpy's, unseen")
        drawn = [random, *(value for value in reached if isinstance(value, random.Random))]
        self._draws = [(source.getstate, source.setstate) for source in drawn]
        self._draws += map(_seeded, _generators())  # draws of fake tensors move nothing, but seeds do
        self._draws.append((torch.is_grad_enabled, torch._C._set_grad_enabled))
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
        for cell, before in self._cells:
            if not _is_full(cell) or not _same(cell.cell_contents, before):
                changed, cell.cell_contents = True, before
        for value, name, before in self._slots:
            if not _same(getattr(value, name, _NOTHING), before):
                changed = True
                object.__delattr__(value, name) if before is _NOTHING else object.__setattr__(value, name, before)
        for value, before in self._memory:
            with memoryview(value) as view:
                if view.tobytes() != before:
                    changed, view.cast("B")[:] = True, before
        for cache, before in self._caches:
            now = cache.cache_info()
            if now.currsize != before.currsize or (now.misses > before.misses and now.currsize == now.maxsize):
                changed = True
                cache.cache_clear()  # of what may be computed from stand-ins
        for now, before in self._contents:
            if _differ(now, before):
                changed = True
                now.clear()
                now.extend(before) if isinstance(now, (list, deque)) else now.update(before)
        return changed


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


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _memories(values: list) -> Iterator[tuple[Any, bytes]]:
    """Those of `values` whose memory can be written into past everything else, such as arrays; with what is there."""
    for value in values:
        try:
            view = memoryview(value)
        except (TypeError, ValueError, BufferError):
            continue
        with view:
            if not view.readonly and not view.c_contiguous:
                raise Break("mutation", "the loop can write into an array, unseen")
            if not view.readonly:
                yield value, view.tobytes()


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
