"""One writer in a folder at a time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bigbatch.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed there
    fcntl = None


class FolderLock:
    """Held from when it is made until ``release``, or until the process ends in whatever way.

    Raises:
        CheckpointError: Another process holds it.
        OSError: The folder cannot be written to.
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return
        try:
            # A lock of the process, and not of the open file: the workers that load data must not hold it too, because
            # they outlive a run that is killed by some seconds.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise CheckpointError(
                f"Another run writes its checkpoints to {folder}. Wait for its end, or give another --run-dir.",
                path=folder,
            ) from None

    def release(self, *, remove: bool = False) -> None:
        """Let others have it; ``remove``: and remove the folder, if nothing else is in it."""
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        os.close(self._file)
