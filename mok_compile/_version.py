"""The version of this package, and the check of torch's. setup.py runs this file, so it imports nothing heavy."""

import re

__version__ = "0.1.0"

MIN_TORCH = (2, 10)


def require_torch(found: str | None = None) -> None:
    """Raise ImportError unless torch is new enough; `found` is its version, by default the installed one's.

    Only major and minor count: a development build of the oldest supported release passes.
    """
    needed = "mok-compile needs torch >= {}.{}".format(*MIN_TORCH)
    if found is None:
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":  # torch is there but broken, and its own message says how
                raise
            raise ImportError(f"{needed}, which is not installed", name="torch") from None
        found = torch.__version__
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or tuple(map(int, release.groups())) < MIN_TORCH:
        raise ImportError(f"{needed}, but torch {found} is installed", name="torch")
