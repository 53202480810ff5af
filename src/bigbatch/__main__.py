"""``python -m bigbatch``, and the command ``bigbatch``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from bigbatch.cli.main import main
from bigbatch.errors import DistributedError
from bigbatch.training.rank import Rank


def run() -> NoReturn:
    """Run the command line, and end the process with what it returns."""
    try:
        code = main()
    except Exception as error:
        if not _is_one_of_several():
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if _is_one_of_several():
        # Threads of torch's process group may want the interpreter when it is no more; then the process would end with
        # SIGABRT ("terminate called without an active exception"), after all went well.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_one_of_several() -> bool:
    try:
        return Rank.of().world_size > 1
    except DistributedError:  # was told already
        return False


if __name__ == "__main__":
    run()
