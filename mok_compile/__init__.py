"""A torch.compile backend that fuses Mixture-of-Experts blocks: `torch.compile(model, backend="mok")`.

torch may import this package while torch itself is still being imported (`TORCH_LOGS="+mok_compile"` does), so nothing
here imports torch: the public names are looked up when they are first used.
"""

from typing import TYPE_CHECKING

from mok_compile import _layout  # noqa: F401  makes mok_compile.passes importable
from mok_compile._lazy import lazy
from mok_compile._version import __version__

if TYPE_CHECKING:
    from mok_compile.explaining import explain
    from mok_compile.report import Report, Site

__getattr__, __dir__ = lazy(__name__, {"Report": "report", "Site": "report", "explain": "explaining"})

__all__ = ["Report", "Site", "__version__", "explain"]
