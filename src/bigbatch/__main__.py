"""``python -m bigbatch``."""

from __future__ import annotations

import sys

from bigbatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
