"""Where the package's parts are: `passes/` and `csrc/` lie inside it once installed, but beside it in a checkout."""

import os
import sys
from importlib.util import spec_from_file_location

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def folder(name: str) -> str:
    """The path of `passes` or `csrc`."""
    inside = os.path.join(_PACKAGE, name)
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(_PACKAGE), name)


class _PassesOfCheckout:
    """Finds `mok_compile.passes` in a checkout.

    An editable install brings a finder of its own. Without one, Python still takes the package from the checkout
    whenever that is the current folder, even past a regular install, and would not find the passes there.
    """

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname == "mok_compile.passes":
            return spec_from_file_location(fullname, os.path.join(folder("passes"), "__init__.py"))
        return None


if os.path.dirname(folder("passes")) != _PACKAGE:
    # First: an editable install of another checkout would otherwise lend its passes to this package.
    sys.meta_path.insert(0, _PassesOfCheckout)
