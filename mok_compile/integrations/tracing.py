"""For whom Dynamo traces, asked from within what it traces."""

from __future__ import annotations

from collections.abc import Callable

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
