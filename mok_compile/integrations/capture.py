"""Ops whose output shape only the data tells (`nonzero`, boolean masks, `.item()`), kept in the graph for the matcher.

Dynamo breaks the graph at such an op, unless its flags say otherwise or the user wants one graph. A loop that picks an
expert's rows by a mask would so be cut into pieces in which nothing is left to fuse. While Dynamo traces for our
backend, and only then, the flags are on: for all frames with ``mok.capture``, for others once it meets a method that
fills rows by an expert's mask, as the training of DeepSeek's model files does. A graph in which such sizes are left
after fusion is traced once more with the flags as the user has them: what is not fused compiles as it always did.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mok_compile import ops
from mok_compile.integrations.tracing import instead_of_errors, options_of, our_options, trace_again

_FLAGS = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
# Dynamo compiles one frame at a time, under a lock; the flags of an outer compile hold for those inside.
_on: list[contextlib.ExitStack] = []
_given_up: list[bool] = []  # holds True for the rest of a compile in which the flags were of no use


def may_fill(function: Any) -> bool:
    """Whether `function` can hold ``y[ids == e] = expert(x[ids == e])`` in a loop, judged by its code object."""
    plain = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
    names = {*function.__code__.co_names, *function.__code__.co_varnames} if plain else set()
    if not any("expert" in name for name in names):
        return False
    steps = list(dis.get_instructions(function))
    equal = any(step.opname == "COMPARE_OP" and "==" in step.argrepr for step in steps)
    return equal and {"FOR_ITER", "STORE_SUBSCR"} <= {step.opname for step in steps}


def install(cls: type, name: str, function: types.FunctionType) -> None:
    """Gives the method of `cls` its traced form."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            ask_for_masks()
        return function(self, *args, **kwargs)

    setattr(cls, name, method)


def given_up() -> bool:
    """Whether the flags were of no use in the compile that is under way."""
    return bool(_given_up)


@torch._dynamo.assume_constant_result
def ask_for_masks() -> None:
    """Switches the flags on, by a new trace, where that may be of use."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    settings = InstructionTranslator.current_tx().output.shape_env.settings
    if settings.allow_dynamic_output_shape_ops or _given_up or our_options() is None:
        return
    _begin_now()
    trace_again("a loop picks its experts' rows by masks")


def watch() -> None:
    """Switches the flags on at the start of a compile for our backend and back at its end."""
    from torch._dynamo.callback import callback_handler

    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
    if _forget not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_forget)


def trace_again_if_open(gm: fx.GraphModule) -> None:
    """Has Dynamo trace the frame once more, without the flags, if sizes that only the data tells are left in `gm`.

    Does nothing where the flags are not on because of us.
    """
    if not _on or not any(_open(node) for module in gm.modules() for node in _nodes(module)):
        return
    _give_up()
    trace_again("sizes that only the data tells are left")


def _begin(*_) -> None:
    compile_frame = _compile_frame()
    if compile_frame is None or compile_frame.get("one_graph"):  # with one graph the flags are on
        return
    options = options_of(compile_frame.get("compiler_fn"))
    if options is None or not options.capture or all(getattr(torch._dynamo.config, name) for name in _FLAGS):
        return
    _begin_now()


def _begin_now() -> None:
    # Not those that are on by now: `counts` may be who puts them back.
    flags = {name: on for name, on in _FLAGS.items() if not getattr(torch._dynamo.config, name)}
    _on.append(contextlib.ExitStack())
    _on[-1].enter_context(torch._dynamo.config.patch(flags))
    _on[-1].enter_context(instead_of_errors(_give_up))


def _give_up() -> None:
    _end()
    _given_up.append(True)


def _end() -> None:
    while _on:
        _on.pop().close()


def _forget(*_) -> None:
    _end()
    _given_up.clear()


def _compile_frame() -> dict[str, Any] | None:
    """The variables of Dynamo's `_compile` below us: a start callback is not told for whom the compile is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return frame.f_locals
        frame = frame.f_back
    return None


def _nodes(module: torch.nn.Module) -> list[fx.Node]:
    return list(module.graph.nodes) if isinstance(module, fx.GraphModule) else []


def _open(node: fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if ops.is_ours(node.target):  # what it hands to its backward pass may have such sizes
        return False
    example = node.meta.get("example_value")
    return any(free_unbacked_symbols(leaf) for leaf in tree_leaves(example) if isinstance(leaf, _SIZED))


_SIZED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
