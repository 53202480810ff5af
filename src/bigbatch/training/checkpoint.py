"""Checkpoints: folders of files that are whole or not there, and where no changed byte goes unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import CheckpointError
from bigbatch.training.locking import FolderLock
from bigbatch.training.on_disk import Files, Trouble, files_of_ranks, on_disk, sha256, sync_folder
from bigbatch.units import format_bytes
from bigbatch.values import check_positive

_log = logging.getLogger("bigbatch")

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_FORMAT = "bigbatch checkpoint"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Part:
    """One file of a checkpoint.

    Attributes:
        write: Writes it to a path.
        num_bytes: What it needs, at least.
    """

    write: Callable[[Path], Any]
    num_bytes: int


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every file was read and is as it was written.

    Attributes:
        path: Its folder.
        step: Optimizer steps that the run had made.
        about: What the writer noted beside the files.
        refused: Newer ones that cannot be used, and why.
    """

    path: Path
    step: int
    about: Mapping[str, Any]
    refused: tuple[tuple[Path, str], ...] = ()


class Checkpoints:
    """The checkpoints of one run: ``folder/step-00000123/``, each with a manifest of its files.

    A checkpoint is written to a folder beside its place, all of it is brought to the disk, and then it is renamed; so
    under its name it is whole, whenever the process or the machine dies. Only one process at a time writes here.

    Args:
        folder: Made when it is not there.
        keep: So many are kept; older ones are removed when a new one is in its place. Newer ones than the one that is
            saved are removed too: the run went back behind them.

    Raises:
        CheckpointError: The folder cannot be written to, or another process writes there.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2):
        check_positive("keep", keep)
        self.folder = Path(folder)
        self.keep = keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"No checkpoint can be written to {self.folder}: {error.strerror}. Give another --run-dir.",
                path=self.folder,
            ) from error
        # Nobody else writes here, so what is unfinished was left by a process that died.
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, parts: Mapping[str, Part], *, about: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, and then remove those that are too many.

        Args:
            step: Optimizer steps that the run has made.
            parts: By the names of the files.
            about: Plain values for the manifest.

        Raises:
            CheckpointError: It cannot be written; those from before are as they were. When the disk is full it has
                ``needed_bytes`` and ``free_bytes``.
        """
        return self.finish(self.begin(step, parts), step, parts, about=about)

    def begin(self, step: int, parts: Mapping[str, Part]) -> Path:
        """The folder of a checkpoint that is not finished, into which other ranks may write too; then ``finish`` it.

        Raises:
            CheckpointError: It cannot be made.
        """
        place = self.folder / name_of(step)
        unfinished = self._aside(place)
        try:
            unfinished.mkdir()
        except OSError as error:
            raise self._cannot_write(place, error, parts) from error
        return unfinished

    def finish(
        self,
        unfinished: Path,
        step: int,
        parts: Mapping[str, Part],
        *,
        about: Mapping[str, Any] | None = None,
        by_ranks: Sequence[Files | Trouble] = (),
    ) -> Path:
        """Write what is left of a checkpoint, and give it its name, as ``save`` does.

        Args:
            unfinished: What ``begin`` gave.
            by_ranks: The files that each rank has written there and brought to the disk, or why it could not.

        Raises:
            CheckpointError: It cannot be written, or not by a rank, or this one does not see the files of another;
                those from before are as they were.
        """
        place = self.folder / name_of(step)
        try:
            files = files_of_ranks(unfinished, by_ranks)
            for name, part in parts.items():
                part.write(unfinished / name)
                files[name] = on_disk(unfinished / name)
            text = _manifest_text({"step": step, "about": dict(about or {}), "files": files})
            (unfinished / MANIFEST).write_text(text, encoding="utf-8")
            on_disk(unfinished / MANIFEST)
            sync_folder(unfinished)
            if place.exists():
                os.replace(place, self._aside(place))
            os.replace(unfinished, place)
            sync_folder(self.folder)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            raise self._cannot_write(place, error, parts) from error
        self._prune(step)
        return place

    def close(self) -> None:
        """Let others write here. A folder in which nothing was saved is removed."""
        self._lock.release(remove=not any(True for _ in paths_in(self.folder)))

    def _aside(self, place: Path) -> Path:
        return self.folder / f"{_UNFINISHED}{place.name}-{uuid.uuid4().hex[:8]}"

    def _prune(self, step: int) -> None:
        kept = [path for path in paths_in(self.folder) if step_of(path) <= step][-self.keep :]
        for path in paths_in(self.folder):
            if path not in kept:
                self._remove(path)
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        try:
            # Under another name first: removing takes a while, and half a checkpoint must not look like one.
            os.replace(path, self._aside(path))
        except OSError as error:
            _log.warning("The old checkpoint %s cannot be removed: %s.", path, error.strerror)

    def _cannot_write(self, place: Path, error: Exception, parts: Mapping[str, Part]) -> CheckpointError:
        trouble = Trouble.of(error)
        if trouble.number not in _DISK_IS_FULL:
            return CheckpointError(f"The checkpoint {place} cannot be written: {trouble.why}.", path=place)
        needed_bytes = sum(part.num_bytes for part in parts.values())
        free_bytes = shutil.disk_usage(self.folder).free
        return CheckpointError(
            f"The checkpoint {place} cannot be written: the disk is full. It needs {format_bytes(needed_bytes)} "
            f"({needed_bytes:,} bytes), and {format_bytes(free_bytes)} ({free_bytes:,} bytes) are free. Those from "
            f"before are untouched. Make room, and go on with --resume auto.",
            path=place,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def name_of(step: int) -> str:
    """Name of the checkpoint after that step.

    >>> name_of(123)
    'step-00000123'
    """
    return f"step-{step:08}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint, or -1 when it is called otherwise."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def paths_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, good or not, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=step_of)


def newest(folder: Path) -> Found | None:
    """The newest checkpoint in a folder that is as it was written; None when there is none at all.

    Raises:
        CheckpointError: There are some, and none of them can be used.
    """
    refused: list[tuple[Path, str]] = []
    for path in reversed(paths_in(folder)):
        try:
            found = verified(path)
        except CheckpointError as error:
            refused.append((path, error.why))
        else:
            return Found(found.path, found.step, found.about, tuple(refused))
    if refused:
        raise CheckpointError(
            f"No checkpoint in {folder} can be used. {' '.join(f'{path.name}: {why}.' for path, why in refused)} "
            f"Bring one back from a copy, or remove that folder to begin again.",
            path=folder,
        )
    return None


def verified(path: str | Path, *, by_size: str | None = None) -> Found:
    """The checkpoint in that folder, after every byte of it was read and found to be as it was written.

    Args:
        by_size: Of the files with this ending, only the sizes are compared.

    Raises:
        CheckpointError: It is not; the message names every file that is missing, unknown, cut or changed.
    """
    path = Path(path)
    try:
        manifest = _manifest(path)
        problems = [*_problems(path, manifest["files"], by_size)]
    except OSError as error:
        problems = [f"{Path(error.filename or path).name} cannot be read: {error.strerror}"]
        manifest = {}
    except _NoManifest as error:
        problems, manifest = [str(error)], {}
    if not problems and step_of(path) not in (-1, manifest["step"]):
        problems = [f"it is the checkpoint of step {manifest['step']}"]
    if problems:
        why = "; ".join(problems)
        raise CheckpointError(f"The checkpoint {path} cannot be used: {why}.", path=path, why=why)
    return Found(path, manifest["step"], manifest["about"])


class _NoManifest(Exception):
    pass


def _manifest(path: Path) -> dict[str, Any]:
    """What the manifest says, if it is exactly what was written."""
    if not path.is_dir():
        raise _NoManifest("there is no such folder")
    if not (path / MANIFEST).is_file():
        raise _NoManifest(f"{MANIFEST} is missing")
    found = (path / MANIFEST).read_bytes()
    try:
        manifest = json.loads(found)
        values = {name: manifest[name] for name in ("step", "about", "files")}
        unchanged = _manifest_text(values, version=manifest["version"]).encode() == found
    except (ValueError, KeyError, TypeError):
        unchanged, manifest = False, {}
    if not unchanged:
        raise _NoManifest(f"{MANIFEST} has changed since it was written")
    if manifest["version"] != FORMAT_VERSION:
        raise _NoManifest(f"it has format {manifest['version']}, and this bigbatch reads format {FORMAT_VERSION}")
    return manifest


def _manifest_text(values: Mapping[str, Any], *, version: Any = FORMAT_VERSION) -> str:
    """The manifest, with a digest of itself."""
    values = {"format": _FORMAT, "version": version, **values}
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return json.dumps({**values, "sha256": digest}, indent=2) + "\n"


def _problems(path: Path, files: Files, by_size: str | None) -> Iterator[str]:
    there = {entry.name for entry in path.iterdir()} - {MANIFEST}
    yield from (f"{name} is missing" for name in sorted(files.keys() - there))
    yield from (f"{name} does not belong to it" for name in sorted(there - files.keys()))
    for name in sorted(files.keys() & there):
        file = path / name
        num_bytes = file.stat().st_size
        if not file.is_file():
            yield f"{name} is no file"
        elif num_bytes != files[name]["bytes"]:
            yield f"{name} has {num_bytes:,} bytes and was written with {files[name]['bytes']:,}"
        elif file.suffix != by_size and sha256(file) != files[name]["sha256"]:
            yield f"{name} has changed since it was written (its sha256 is another one)"
