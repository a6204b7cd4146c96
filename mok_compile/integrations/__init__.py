"""Bridges to other libraries and to code that no tracer gets through, opened when the backend is first asked for."""

from __future__ import annotations


def watch() -> None:
    """Opens the doors, now and before each compile of Dynamo: what they lead to may be imported later than we are."""
    from torch._dynamo.callback import callback_handler

    from mok_compile.integrations import capture

    if _open not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_open)
    capture.watch()
    _open()


def _open(*_) -> None:
    from mok_compile.integrations import loops, transformers

    transformers.open_eager()
    loops.open_doors()
