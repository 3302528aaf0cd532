"""``python -m forebay``."""

import sys

from forebay.cli import main

sys.exit(main())
