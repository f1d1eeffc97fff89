"""``python -m fedssl`` is ``fedssl``."""

import sys

from fedssl.cli import main

sys.exit(main())
