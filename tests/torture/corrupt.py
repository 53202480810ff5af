"""Change a checkpoint in every way that a disk or a person does, and see whether a run would go on from it.

``python -m tests.torture.corrupt --bits 1000 --blocks 300 --truncations 300`` prints a table; the exit code is 1 when a
change goes unnoticed, when anything in the run changed before it was noticed, or when the older checkpoint is not
found. The control loads the changed file without the manifest.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

import bigbatch as bb
from bigbatch.training.checkpoint import Checkpoints, newest, paths_in, verified
from bigbatch.training.loop import Run
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
from tests.training.test_resume import full_task, state_of

_BLOCK = 512


@dataclass
class Row:
    """Counts of one kind of harm."""

    tried: int = 0
    noticed: int = 0
    state_changed: int = 0
    older_found: int = 0
    loads_without_manifest: int = 0
    without_manifest: int = 0


def flips(files: list[Path], count: int, generator: random.Random) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    for _ in range(count):
        file = generator.choice(files)
        bit = generator.randrange(8 * file.stat().st_size)

        def flip(file: Path, bit: int = bit) -> None:
            data = bytearray(file.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)

        yield file, flip


def blocks(files: list[Path], count: int, generator: random.Random) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    while count:
        file = generator.choice(files)
        data = file.read_bytes()
        start = generator.randrange(len(data)) // _BLOCK * _BLOCK
        zeroed = data[:start] + bytes(len(data[start : start + _BLOCK])) + data[start + _BLOCK :]
        if zeroed != data:  # a block of zeros does not change when it is zeroed
            count -= 1
            yield file, lambda file, zeroed=zeroed: file.write_bytes(zeroed)


def truncations(
    files: list[Path], count: int, generator: random.Random
) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    for _ in range(count):
        file = generator.choice(files)
        length = generator.randrange(file.stat().st_size)
        yield file, lambda file, length=length: os.truncate(file, length)


def whole_files(files: list[Path], older: Path) -> Iterator[tuple[str, Path, Callable[[Path], object]]]:
    for file in files:
        yield "missing file", file, lambda file: file.unlink()
        yield "renamed file", file, lambda file: file.rename(file.with_suffix(".old"))
        yield "file of the older one", file, lambda file: shutil.copy(older / file.name, file)
    for name in ("extra", "model.safetensors.tmp", ".hidden"):
        yield "extra file", files[0], lambda file, name=name: (file.parent / name).write_text("")
    yield "extra file", files[0], lambda file: (file.parent / "folder").mkdir()


class Bench:
    """Two checkpoints, a run that would go on from the newer one, and the counts."""

    def __init__(self, folder: Path):
        checkpoints = Checkpoints(folder)
        Run(full_task(), micro_batch_size=5).train(Saver(checkpoints, every=6))
        checkpoints.close()
        self.folder = folder
        self.older, self.newer = paths_in(folder)
        self.files = sorted(self.newer.iterdir())
        self.safe = folder.parent / "safe"
        shutil.copytree(self.newer, self.safe)
        self.run = Run(full_task(), micro_batch_size=5)
        self.before = state_of(self.run)
        self.rows: dict[str, Row] = {}

    def attack(self, kind: str, file: Path, harm: Callable[[Path], object]) -> None:
        row = self.rows.setdefault(kind, Row())
        harm(file)
        row.tried += 1
        try:
            resume(self.run, verified(self.newer))
        except bb.CheckpointError:
            row.noticed += 1
        now = state_of(self.run)
        row.state_changed += any(not torch.equal(now[name], value) for name, value in self.before.items())
        found = newest(self.folder)
        row.older_found += found is not None and found.path == self.older and len(found.refused) == 1
        if file.suffix != ".json" and file.exists():
            row.without_manifest += 1
            row.loads_without_manifest += loads(file)
        shutil.rmtree(self.newer)
        shutil.copytree(self.safe, self.newer)


def loads(file: Path) -> bool:
    try:
        warnings.simplefilter("ignore")  # torch wonders about some of them
        load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--truncations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(arguments)
    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    generator = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "checkpoints")
        for kind, attacks in (
            ("flipped bit", flips(bench.files, wanted.bits, generator)),
            ("zeroed block", blocks(bench.files, wanted.blocks, generator)),
            ("truncation", truncations(bench.files, wanted.truncations, generator)),
        ):
            for file, harm in attacks:
                bench.attack(kind, file, harm)
        for kind, file, harm in whole_files(bench.files, bench.older):
            bench.attack(kind, file, harm)
        resume(bench.run, verified(bench.newer))  # and unharmed it is good
    print(f"{'':<22} {'tried':>6} {'noticed':>8} {'state changed':>14} {'older found':>12}  loads without the manifest")
    for kind, row in bench.rows.items():
        control = f"{row.loads_without_manifest} of {row.without_manifest}"
        print(
            f"{kind:<22} {row.tried:>6} {row.noticed:>8} {row.state_changed:>14} {row.older_found:>12}  {control:>26}"
        )
    good = all(row.noticed == row.older_found == row.tried and not row.state_changed for row in bench.rows.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
