"""For whom Dynamo traces, asked from within what it traces, and how it is made to start over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from mok_compile.options import Options, split


def our_options() -> Options | None:
    """The options of the compile that Dynamo is tracing for, if our backend is to get the graph and is enabled."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return options_of(InstructionTranslator.current_tx().output.compiler_fn)


def options_of(compiler: Callable | None) -> Options | None:
    """The options in what Dynamo calls a compiler, if that is our backend and is enabled."""
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    backend = getattr(compiler, "compiler_fn", compiler)
    if getattr(backend, "compiler_name", None) != "mok":
        return None
    options = getattr(backend, "options", None)  # of `explain`, which has parsed them already
    if not isinstance(options, Options):
        options, _ = split((getattr(compiler, "kwargs", None) or {}).get("options"))
    return options if options.enabled else None


def trace_again(reason: str) -> NoReturn:
    """Has Dynamo trace the frame once more from the start, whatever way the new trace goes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Dynamo expects a new trace to meet the same instructions as the one that it has a record of.
    InstructionTranslator.current_tx().speculation_log.clear()
    # The one exception that Dynamo lets a backend ask for a new trace with.
    raise torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason=reason)
