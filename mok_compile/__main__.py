"""``python -m mok_compile``"""

import sys

from mok_compile.cli import main

sys.exit(main())
