"""A disk that is full after every 64 kB of a save: the error says so, and the checkpoint before still loads.

``python -m tests.torture.disk_full`` prints a table; the exit code is 1 when something is wrong. It mounts a small disk
in memory, so it needs root.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

import bigbatch as bb
from bigbatch.training import resuming
from bigbatch.training.checkpoint import Checkpoints, newest
from tests.torture.saved_runs import mark, marked_run, marks_in

_STEP_BYTES = 64 * 1024


def attempt(run, folder: Path, free_bytes: int, needed_bytes: int) -> str:
    """Save step 2 beside step 1 when so much is free."""
    checkpoints = Checkpoints(folder / "checkpoints")
    mark(run, 1)
    checkpoints.save(1, resuming.parts_of(run), about=resuming.about(run))
    filler = folder / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - free_bytes)))
    mark(run, 2)
    try:
        checkpoints.save(2, resuming.parts_of(run), about=resuming.about(run))
        expected, kind = 2, "fits"
    except bb.CheckpointError as error:
        told = error.needed_bytes == needed_bytes and error.free_bytes is not None and error.path is not None
        expected, kind = 1, "full, told with path and bytes" if told else f"wrong: {error}"
    checkpoints.close()
    filler.unlink()
    found = newest(folder / "checkpoints")
    if found is None or found.step != expected or found.refused or marks_in(found.path) != {expected}:
        kind = "wrong: the checkpoint before is gone"
    if any((folder / "checkpoints").glob(".unfinished-*")):
        kind = "wrong: something was left behind"
    shutil.rmtree(folder / "checkpoints")
    return kind


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=4.0)
    wanted = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run = marked_run(wanted.megabytes)
    mark(run, 1)
    needed_bytes = sum(part.num_bytes for part in resuming.parts_of(run).values())
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        size = 3 * needed_bytes + 2**20
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        try:
            for free_bytes in range(0, needed_bytes + 4 * _STEP_BYTES, _STEP_BYTES):
                outcomes[attempt(run, Path(folder), free_bytes, needed_bytes)] += 1
        finally:
            subprocess.run(["umount", folder], check=True)
    print(f"a checkpoint of {needed_bytes:,} bytes, with 0, 64 KiB, 128 KiB, ... free")
    for kind, count in outcomes.items():
        print(f"{kind:<40} {count:>5}")
    return 0 if set(outcomes) <= {"fits", "full, told with path and bytes"} and len(outcomes) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
