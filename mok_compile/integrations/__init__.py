"""Bridges to other libraries and to code that no tracer gets through, opened when the backend is first asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint


class _Lasting(list):
    """Callbacks of which `torch._dynamo.reset()`, which clears them, leaves ours: the backend that was looked up before
    is not looked up again."""

    def clear(self) -> None:
        kept = [callback for callback in self if callback is _open]
        super().clear()
        self += kept


def watch() -> None:
    """Opens the doors, now and before each compile of Dynamo: what they lead to may be imported later than we are."""
    from torch._dynamo.callback import callback_handler

    if _open not in callback_handler.start_callbacks:
        callback_handler.start_callbacks = _Lasting([*callback_handler.start_callbacks, _open])
    _open()


def _open(*_) -> None:
    from mok_compile.integrations import breaks, capture, counts, loops, missed, proofs, tracing, transformers

    capture.watch()
    counts.watch()
    missed.watch()
    proofs.watch()
    tracing.watch(missed.tell)
    tracing.watch(breaks.tell)
    transformers.open_eager()
    loops.open_doors()
    _be_fetched_anew()


def _be_fetched_anew() -> None:
    """Has the next ``torch.compile(..., backend="mok")`` fetch the backend again, which opens the doors: the start of a
    compile is too late for the very frame that is compiled, whose code is the old one."""
    from torch._dynamo.backends import registry

    entries, fetched = getattr(registry, "_BACKENDS", {}), getattr(registry, "_COMPILER_FNS", {})
    if getattr(fetched.get("mok"), "compiler_name", None) == "mok":
        del fetched["mok"]
        entries["mok"] = EntryPoint("mok", "mok_compile.backend:mok", "torch_dynamo_backends")
