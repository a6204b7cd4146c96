"""Routers whose experts take the number of each expert's tokens as Python numbers, as those of Granite MoE and Aria do.

Dynamo breaks the graph where a tensor becomes numbers, unless a flag says to keep them as symbols. When it meets such a
router while it traces for our backend, the frame is traced once more with the flag on, until the end of this compile.
If nothing was fused for all that, it is traced a last time without: it compiles as it always did.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import torch

from mok_compile.integrations.tracing import instead_of_errors, our_options, trace_again

_FLAG = "capture_scalar_outputs"
# Counts that become numbers when slices are taken by them, beside the sort that those slices are of.
_COUNTED, _SORTED = {"histc", "bincount"}, {"topk", "sort", "argsort"}


class _State:
    """Of the compile that is under way: how the flag is put back, and whether it was of no use."""

    patch: contextlib.ExitStack | None = None
    given_up = False


def may_count(function: Any) -> bool:
    """Whether `function` is a router of this kind, judged by its code object."""
    plain = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
    names = {*function.__code__.co_names, *function.__code__.co_varnames} if plain else set()
    numbered = "tolist" in names and any(name == "topk" or "expert" in name for name in names)
    return numbered or not (_COUNTED.isdisjoint(names) or _SORTED.isdisjoint(names))


def install(cls: type, name: str, function: types.FunctionType) -> None:
    """Gives the method of `cls` its traced form."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            _ask_for_symbols()
        return function(self, *args, **kwargs)

    setattr(cls, name, method)


def watch() -> None:
    """Puts the flag back at the end of each compile."""
    from torch._dynamo.callback import callback_handler

    if _end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_end)


@torch._dynamo.assume_constant_result
def _ask_for_symbols() -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    symbols = InstructionTranslator.current_tx().output.shape_env.settings.allow_scalar_outputs
    if symbols or _State.given_up or our_options() is None:
        return
    _State.patch = contextlib.ExitStack()
    _State.patch.enter_context(torch._dynamo.config.patch({_FLAG: True}))
    _State.patch.enter_context(instead_of_errors(_give_up))
    trace_again("a router counts its tokens")


def trace_again_if_for_nothing(fused: int) -> None:
    """Has Dynamo trace the frame once more without the flag if nothing was fused with it."""
    if _State.patch is not None and not fused:
        _give_up()
        trace_again("no block of experts was fused")


def _give_up() -> None:
    _put_back()
    _State.given_up = True


def _put_back() -> None:
    if _State.patch is not None:
        _State.patch.close()
        _State.patch = None


def _end(*_) -> None:
    _put_back()
    _State.given_up = False
