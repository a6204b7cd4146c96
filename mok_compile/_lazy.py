"""Public names of a package that are looked up when they are first used, so that importing it imports no torch."""

import importlib
import sys
from collections.abc import Callable


def lazy(package: str, names: dict[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of `package`, whose `names` are defined in these of its submodules.

    No submodule may have the name of a public attribute: importing it would replace the attribute by the module.
    """
    module = sys.modules[package]

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *names})
