"""Memory amounts and times, from a person and for a person."""

from __future__ import annotations

import pytest

import bigbatch as bb
from bigbatch.units import format_bytes, format_seconds, parse_bytes

UNITS = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}


@pytest.mark.parametrize(("unit", "size"), UNITS.items())
@pytest.mark.parametrize("write", ["{}{}", "{} {}", "  {}  {} "])
def test_a_text_is_its_number_times_its_unit(unit, size, write):
    assert parse_bytes(write.format(3, unit)) == 3 * size


@pytest.mark.parametrize(("unit", "size"), UNITS.items())
def test_the_case_of_a_unit_does_not_matter(unit, size):
    assert parse_bytes(f"2{unit.lower()}") == parse_bytes(f"2{unit.upper()}") == 2 * size


def test_thousands_and_powers_of_two_differ():
    """Control: one taken for the other would be 7 % off in GB."""
    assert parse_bytes("8GiB") - parse_bytes("8GB") == 589_934_592


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1.5KiB", 1536), (".5 MiB", 524288), ("2.kB", 2000), ("0.0015kB", 2), ("007B", 7), ("0.1GiB", 107374182)],
)
def test_a_fraction_is_rounded_to_whole_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize("num_bytes", [1, 4096, 2**40, 10**15])
def test_a_whole_number_is_bytes(num_bytes):
    assert parse_bytes(num_bytes) == num_bytes


NOT_AN_AMOUNT = [
    "",
    "8",
    "GiB",
    "8 G",
    "8 gigabytes",
    "8GiB 2",
    "-8GiB",
    "+8GiB",
    "1e3MB",
    "1,5GiB",
    "8 G iB",
    "1.2.3MB",
]
NOT_POSITIVE = [0, -1, "0B", "0.0GiB", "0.4B"]
NOT_A_KIND = [1.5, 8e9, True, False, None, b"8GiB", ["8GiB"]]


@pytest.mark.parametrize("amount", [*NOT_AN_AMOUNT, *NOT_POSITIVE, *NOT_A_KIND], ids=repr)
def test_what_is_no_amount_is_refused_by_its_value(amount):
    with pytest.raises(bb.OptionError, match=r"is no amount of memory\. Write .*\"8GiB\" \(8 x 2\*\*30\)") as caught:
        parse_bytes(amount)

    assert str(caught.value).startswith(repr(amount))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 2**10, "1023.00 KiB"),
        (2**20, "1.00 MiB"),
        (67_108_864, "64.00 MiB"),
        (10**9, "953.67 MiB"),
        (9.37 * 2**30, "9.37 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (2**50, "1024.00 TiB"),
        (-1536, "-1.50 KiB"),
        (12.4, "12 B"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_they_fill(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [1, 999, 1024, 12345, 2**20 + 1, 64 * 2**20, 10**9, 123_456_789_012, 2**45])
def test_what_is_written_can_be_read_again(num_bytes):
    """Two digits after the point: within half of the last one of what it was."""
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005)
    assert num_bytes <= parse_bytes(format_bytes(num_bytes, at_least=True)) <= 1.01 * num_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 ms"),
        (0.0032, "3.2 ms"),
        (0.25, "250.0 ms"),
        (1, "1.0 s"),
        (12.34, "12.3 s"),
        (60, "1:00"),
        (75, "1:15"),
        (75.6, "1:16"),
        (3599, "59:59"),
        (3599.7, "1:00:00"),
        (3600, "1:00:00"),
        (7384, "2:03:04"),
        (360_000, "100:00:00"),
    ],
)
def test_a_time_is_written_as_a_clock_from_a_minute_on(seconds, text):
    assert format_seconds(seconds) == text
