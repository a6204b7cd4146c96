"""Between Dynamo and what it traces: for whom that is, what is known of a module, how it is made to start over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import GuardBuilder, install_guard

from mok_compile.options import Options, split

_module: list[torch.nn.Module] = []
_give_ups: list[Callable[[], None]] = []  # of what is done while Dynamo traces for us
_at_end: list[Callable[[Any, Exception | None], None]] = []
_theirs: list[Callable] = []  # Dynamo's own method


def our_options() -> Options | None:
    """The options of the compile that Dynamo is tracing for, if our backend is to get the graph and is enabled."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return options_of(InstructionTranslator.current_tx().output.compiler_fn)


def options_of(compiler: Callable | None) -> Options | None:
    """The options in what Dynamo calls a compiler, if that is our backend and is enabled."""
    found = backend_of(compiler)
    return None if found is None else found[1]


def backend_of(compiler: Callable | None) -> tuple[Callable, Options] | None:
    """The backend in what Dynamo calls a compiler, with its options, if that is ours and is enabled."""
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    # Around DistributedDataParallel Dynamo calls a splitter of graphs, which has ours.
    splitter = getattr(compiler, "__self__", None)
    if hasattr(splitter, "backend_compile_fn"):
        return backend_of(splitter.backend_compile_fn)
    backend = getattr(compiler, "compiler_fn", compiler)
    if getattr(backend, "compiler_name", None) != "mok":
        return None
    options = getattr(backend, "options", None)  # of `explain`, which has parsed them already
    if not isinstance(options, Options):
        try:
            options, _ = split((getattr(compiler, "kwargs", None) or {}).get("options"))
        except (TypeError, ValueError):
            return (
                None  # the backend says so once it gets the graph: an error from here would look like one of Dynamo's
            )
    return (backend, options) if options.enabled else None


def trace_again(reason: str) -> NoReturn:
    """Has Dynamo trace the frame once more from the start, whatever way the new trace goes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Dynamo expects a new trace to meet the same instructions as the one that it has a record of.
    InstructionTranslator.current_tx().speculation_log.clear()
    # The one exception that Dynamo lets a backend ask for a new trace with.
    raise torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason=reason)


def watch(at_end: Callable[[Any, Exception | None], None]) -> None:
    """From now on, Dynamo calls `at_end(translator, None)` when it is through with a frame, and `at_end(translator,
    error)` when it gives one up."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if at_end not in _at_end:
        _at_end.append(at_end)
    if InstructionTranslator.run is not _run:
        _theirs[:] = [InstructionTranslator.run]
        InstructionTranslator.run = _run


def _run(translator: Any) -> None:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        _theirs[0](translator)
    except torch._dynamo.exc.RestartAnalysis:
        raise
    except GuardOnDataDependentSymNode:
        for give_up in (mine := tuple(_give_ups)):
            give_up()
        if mine:
            trace_again("a number is needed that only the data tells")
        raise
    except Exception as error:
        for told in _at_end:
            told(translator, error)
        raise
    for told in _at_end:
        told(translator, None)


@contextlib.contextmanager
def instead_of_errors(give_up: Callable[[], None]) -> Iterator[None]:
    """While this lasts, Dynamo traces the frame once more, after `give_up()`, where it would end the compile since a
    number is needed that only the data tells, as in ``if n:`` (for ``if n > 0:`` it breaks the graph)."""
    _give_ups.append(give_up)
    try:
        yield
    finally:
        _give_ups.remove(give_up)


def constant_of_module(function: Callable) -> Callable:
    """Makes ``function(module, *constants)`` one that Dynamo calls while it traces and takes the result of for a
    constant, as long as it is this very module. Elsewhere it is called as it is.

    `torch._dynamo.assume_constant_result` itself takes no modules for arguments in torch 2.10 and 2.11:
    https://github.com/pytorch/pytorch/issues/117685.
    """

    @torch._dynamo.assume_constant_result
    def answer(*constants: Any) -> Any:
        return function(_module.pop(), *constants)

    @functools.wraps(function)
    def ask(module: torch.nn.Module, *constants: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return function(module, *constants)
        comptime(_note)
        return answer(*constants)

    return ask


def variable_of(context: Any, name: str) -> Any:
    """What Dynamo knows of the local variable `name` of the function that calls `comptime`."""
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize()


def _note(context: Any) -> None:
    module = variable_of(context, "module")
    if module.source is not None:
        install_guard(module.source.make_guard(GuardBuilder.ID_MATCH))
    _module[:] = [module.value]
