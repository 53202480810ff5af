"""Bytes, seconds and lists: text where a person writes or reads them, values everywhere else."""

from __future__ import annotations

import math
import re

from bigbatch.errors import OptionError

_BYTES = {
    "B": 1,
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
}
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _BYTES.items()}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*")


def parse_bytes(amount: int | str) -> int:
    """Bytes of an amount as a person writes it.

    >>> parse_bytes("8GiB"), parse_bytes("8 GB"), parse_bytes("0.5 MiB"), parse_bytes(1000)
    (8589934592, 8000000000, 524288, 1000)

    Args:
        amount: A whole number of bytes, or a text with its unit: B, kB, MB, GB, TB (powers of 1000)
            or KiB, MiB, GiB, TiB (powers of 1024), in any case.

    Raises:
        OptionError: It is neither, or not more than zero.
    """
    parsed = _parse(amount)
    if parsed is None or parsed <= 0:
        raise OptionError(
            f"{amount!r} is no amount of memory. Write a positive whole number of bytes, or a text with a unit: "
            f'"8GiB" (8 x 2**30), "8GB" (8 x 10**9), "512MiB".'
        )
    return parsed


def _parse(amount: object) -> int | None:
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    unit = _BY_LOWER_CASE.get(match[2].lower()) if match else None
    return round(float(match[1]) * unit) if match and unit else None


def format_bytes(num_bytes: float, *, at_least: bool = False) -> str:
    """An amount of memory for a person, in powers of 1024.

    >>> format_bytes(8 * 2**30), format_bytes(1536), format_bytes(12)
    ('8.00 GiB', '1.50 KiB', '12 B')
    >>> format_bytes(1537), format_bytes(1537, at_least=True)
    ('1.50 KiB', '1.51 KiB')

    Args:
        at_least: Round up: who takes the text as a budget has enough.
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(num_bytes) >= _BYTES[unit]:
            hundredths = 100 * num_bytes / _BYTES[unit]
            return f"{(math.ceil(hundredths) if at_least else hundredths) / 100:.2f} {unit}"
    return f"{math.ceil(num_bytes) if at_least else num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time for a person.

    >>> format_seconds(0.0032), format_seconds(75), format_seconds(7384)
    ('3.2 ms', '1:15', '2:03:04')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(number: int, noun: str) -> str:
    """How many there are.

    >>> format_count(1, "epoch"), format_count(1200, "step")
    ('1 epoch', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_share(share: float, digits: int = 0) -> str:
    """A part of a whole in per cent.

    >>> format_share(0.63), format_share(0.0123, digits=1)
    ('63 %', '1.2 %')
    """
    return f"{100 * share:.{digits}f} %"


def format_names(names: list[str], most: int = 3) -> str:
    """Some names for a person, and how many more there are.

    >>> format_names(["a", "b"]), format_names(["a", "b", "c", "d"], most=2)
    ("['a', 'b']", "['a', 'b'] and 2 more")
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{names[:most]}{more}"
