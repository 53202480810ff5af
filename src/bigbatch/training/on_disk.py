"""Files that are on the disk and not in its cache, what they are, and why they could not be written."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Files = dict[str, dict[str, Any]]
"""Size and digest of files, by name."""


class Trouble(Exception):
    """Why a file could not be written, as one rank can tell it to another.

    Attributes:
        number: Of the system's error; None: it is another one.
        why: In words.
    """

    def __init__(self, number: int | None, why: str):
        super().__init__(number, why)
        self.number = number
        self.why = why

    @classmethod
    def of(cls, error: BaseException, *, whose: str = "") -> Trouble:
        """What an error says, and of whom."""
        if isinstance(error, cls):
            return error
        number = _errno_of(error)
        return cls(number, whose + (os.strerror(number) if number else f"{type(error).__name__}: {error}"))


def on_disk(path: Path) -> dict[str, Any]:
    """Bring a file to the disk, and say what it is."""
    with path.open("rb+") as file:  # Windows wants it writable for fsync
        os.fsync(file.fileno())
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return {"bytes": num_bytes, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sha256(path: Path) -> str:
    """Digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk; Windows has no such thing."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_of_ranks(folder: Path, by_ranks: Sequence[Files | Trouble]) -> Files:
    """What all ranks have written to a folder, if this one sees it too.

    Raises:
        Trouble: A rank could not write, or its files are not here, or not with as many bytes.
    """
    files: Files = {}
    for rank, found in enumerate(by_ranks):
        if isinstance(found, Trouble):
            raise found
        for name, file in found.items():
            path = folder / name
            here = path.stat().st_size if path.exists() else None
            if here != file["bytes"]:
                what = "is not there" if here is None else f"has {here:,} bytes, of {file['bytes']:,}"
                raise Trouble(None, f"{name}, which rank {rank} has written, {what}. {ONE_FOLDER}")
        files |= found
    return files


ONE_FOLDER = "All ranks write to one folder: give a --run-dir on a file system that all hosts share"


def _errno_of(error: BaseException | None) -> int | None:
    """The number of the system's error, wherever it is: torch puts another error on top, safetensors has only text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None
