"""A torch.compile backend that fuses Mixture-of-Experts blocks: `torch.compile(model, backend="mok")`.

torch may import this package while torch itself is still being imported (`TORCH_LOGS="+mok_compile"` does), so nothing
here imports torch: the public names are looked up when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

from mok_compile import _layout  # noqa: F401  makes mok_compile.passes importable
from mok_compile._version import __version__

if TYPE_CHECKING:
    from mok_compile.explaining import explain
    from mok_compile.report import Report, Site

# No submodule may have the name of a public attribute: importing it would replace the attribute by the module.
_LAZY = {"Report": "report", "Site": "report", "explain": "explaining"}

__all__ = ["Report", "Site", "__version__", "explain"]


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_LAZY})
