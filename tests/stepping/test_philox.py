"""The counter-based generator beside its authors' known answers, and beside itself in plain Python."""

from __future__ import annotations

import pytest
import torch

from bigbatch.stepping.dropout import philox as module
from bigbatch.stepping.dropout.philox import keep_mask, philox

CPU = torch.device("cpu")
# philox4x32 10 in tests/kat_vectors of Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def plain(counter, key):
    """The definition, in whole numbers of Python."""
    a, b, c, d = counter
    for number in range(10):
        first, second = ((k + number * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (high >> 32) ^ b ^ first, high % 2**32, (low >> 32) ^ d ^ second, low % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_it_gives_the_known_answers(counter, key, expected):
    words = [int(word, 16) for word in expected.split()]

    assert plain(counter, key) == words
    assert [int(word) for word in philox(counter, key)] == words


def test_many_counters_at_once_are_those_one_by_one():
    blocks, samples = torch.randint(2**32, (5,)), torch.randint(2**32, (3, 1))
    key = (0xDEADBEEF, 0xFFFFFFF0)

    found = torch.stack(philox((blocks, samples, 7, 9), key), dim=-1)

    for i in range(3):
        for j in range(5):
            assert found[i, j].tolist() == plain((int(blocks[j]), int(samples[i]), 7, 9), key)


@pytest.mark.parametrize("at_a_time", [1, 3, 10, 1000])
@pytest.mark.parametrize("num_elements", [1, 4, 7, 22])
def test_a_mask_does_not_depend_on_how_many_are_computed_at_a_time(monkeypatch, at_a_time, num_elements):
    whole = keep_mask(0.6, 5, (6, num_elements), (1, 2), 2**63 + 11, CPU)
    monkeypatch.setitem(module._AT_A_TIME, "cpu", at_a_time)

    assert torch.equal(keep_mask(0.6, 5, (6, num_elements), (1, 2), 2**63 + 11, CPU), whole)
    for i in range(6):
        expected = [plain((j, 5 + i, 1, 2), (11, 2**31)) for j in range(-(-num_elements // 4))]
        words = [word < round(0.6 * 2**32) for block in expected for word in block]
        assert whole[i].tolist() == words[:num_elements]


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_that_is_kept_is_the_probability(keep):
    mask = keep_mask(keep, 0, (100, 4000), (0, 0), 3, CPU)

    deviation = (keep * (1 - keep) / mask.numel()) ** 0.5
    assert abs(float(mask.double().mean()) - keep) <= 4 * deviation
    rows = mask.double().mean(1)  # no sample is unlike the others
    assert float((rows - keep).abs().max()) <= 5 * (keep * (1 - keep) / 4000) ** 0.5


@pytest.mark.parametrize(
    "changed", [dict(words=(1, 0)), dict(words=(0, 1)), dict(key=2), dict(key=1 + 2**32), dict(first=1)]
)
def test_another_key_or_counter_gives_another_mask(changed):
    given = dict(first=0, words=(0, 0), key=1)
    one, other = (
        keep_mask(0.5, g["first"], (1, 10_000), g["words"], g["key"], CPU).double() - 0.5
        for g in (given, given | changed)
    )

    assert abs(float((one * other).mean())) / 0.25 < 0.05  # not correlated; five standard deviations
