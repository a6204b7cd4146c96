"""What must hold of the modules that a loop over experts calls, and of those that it is in."""

from __future__ import annotations

import dis
import types
from typing import Any

import torch

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.loops.likeness import HOOKS
from mok_compile.passes.loops.reach import INTERNAL, Reach, codes_of


def _hooked(module: torch.nn.Module) -> bool:
    return any(getattr(module, name) for name in HOOKS)


def check_quiet(owner: torch.nn.Module, reads: tuple[str, ...]) -> None:
    """Nobody listens to what the loop calls."""
    for name in reads:
        found = getattr(owner, name, None)
        for module in found.modules() if isinstance(found, torch.nn.Module) else ():
            if _hooked(module):
                raise Break("hooks", f"a hook sits on {name}, inside the block")


def check_types(reach: Reach) -> None:
    """No code asks of what type a tensor is, or whether it is a fake one: in a proof it is another than in eager
    mode."""
    for function in reach.functions:
        if function.__globals__.get("__name__", "").partition(".")[0] == "torch":
            continue
        name = function.__qualname__
        if not _FAKES.isdisjoint(known for code in codes_of(function.__code__) for known in _names_in(code)):
            raise Break("data-dependent", f"{name} asks whether a tensor is a fake one, which it is in a proof")
        if any(_asks_for_type(code, function) for code in codes_of(function.__code__)):
            raise Break("data-dependent", f"{name} asks for the type of something, and a proof has but stand-ins")


# What code names that tells fake tensors from others.
_FAKES = {"fake_mode", "fake_device", "FakeTensor", "is_fake", "maybe_get_fake_mode"}


def _names_in(code: types.CodeType) -> list[str]:
    return [*code.co_names, *(c for c in code.co_consts if isinstance(c, str))]


def _asks_for_type(code: types.CodeType, function: types.FunctionType) -> bool:
    """Whether `code` uses Python's own `type`, or reads ``__class__``, of anything but `self`."""
    asked = {"__class__"} if "type" in function.__globals__ else {"__class__", "type"}
    if asked.isdisjoint(_names_in(code)):
        return False
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP", "PRECALL", "PUSH_NULL")]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type" and "type" in asked:
            own = _is_self(steps[i + 1]) and steps[i + 2].opname.startswith("CALL")
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "__class__":
            own = _is_self(steps[i - 1])
        else:
            own = step.opname != "LOAD_CONST" or step.argval != "__class__"
        if not own:
            return True
    return False


def _is_self(step: dis.Instruction) -> bool:
    return step.opname.startswith("LOAD_FAST") and step.argval == "self"


def check_calm(expert: torch.nn.Module) -> None:
    """`expert` is nothing but its class and its parameters, each of them in one place."""
    places = [module for _, module in expert.named_modules(remove_duplicate=False) if _tensors(module)]
    if len({*map(id, places)}) < len(places):
        raise Break("layout", "a part of an expert is in two places of it")
    for module in expert.modules():
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            raise Break("hooks", "an expert has a forward of its own (a wrapper, or a compiled one)")
        for tensor in _tensors(module):
            if type(tensor) not in (torch.nn.Parameter, torch.nn.Buffer, torch.Tensor):
                raise Break("subclass", f"an expert's weights are {type(tensor).__name__}")


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(False), *module.buffers(False)]


_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, tuple, list, dict, set, frozenset)


def difference(a: torch.nn.Module, b: torch.nn.Module, reach: Reach) -> str | None:
    """In what two experts differ besides the numbers in their parameters, as far as code can read it; None if in
    nothing."""
    if a is b:
        return None
    if type(a) is not type(b):
        return f"one is {_named(a)}, the other {_named(b)}"
    for tensors in ("_parameters", "_buffers"):
        mine, theirs = getattr(a, tensors), getattr(b, tensors)
        for name in dict.fromkeys((*mine, *theirs)):
            if name not in mine or name not in theirs or not _same_kind(mine[name], theirs[name]):
                return f"{name} is not of one shape and kind"
    if list(a._modules) != list(b._modules):
        return f"{_named(a)} holds other modules"
    for name, child in a._modules.items():
        other = b._modules[name]
        if child is not other:
            found = "only one has it" if child is None or other is None else difference(child, other, reach)
            if found is not None:
                return f"{name}: {found}"
    for name in dict.fromkeys((*a.__dict__, *b.__dict__)):
        if name in _OWN or not (name in INTERNAL or name in reach.names or reach.is_dynamic(a)):
            continue
        if name not in a.__dict__ or name not in b.__dict__:
            return f"only one has {name}"
        x, y = a.__dict__[name], b.__dict__[name]
        if not _same_value(x, y, a, b):
            plain = isinstance(x, _PLAIN) and isinstance(y, _PLAIN)
            return f"{name} is {x!r} and {y!r}" if plain else f"each has a {name} of its own ({_named(x)})"
    return None


def _named(value: Any) -> str:
    return type(value).__name__


def _same_kind(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _same_value(x: Any, y: Any, a: torch.nn.Module, b: torch.nn.Module) -> bool:
    if x is y:
        return True
    if isinstance(x, types.MethodType) and isinstance(y, types.MethodType):
        return x.__func__ is y.__func__ and (x.__self__ is y.__self__ or (x.__self__ is a and y.__self__ is b))
    return isinstance(x, _PLAIN) and type(x) is type(y) and x == y
