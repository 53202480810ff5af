"""The table of cards: found however they are spelled, dense numbers that agree with each other."""

from __future__ import annotations

import pytest

import bigbatch as bb
from bigbatch.planning.cards import CARDS, Card, card_from, find_card, parse_peak

SPELLINGS = {
    "rtx4090": ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "4090", "geforce-rtx-4090"],
    "rtx3060": ["rtx3060", "NVIDIA GeForce RTX 3060", "RTX 3060 12GB"],
    "rtx4060ti-16gb": ["NVIDIA GeForce RTX 4060 Ti", "rtx4060ti 16gb"],
    "t4": ["t4", "Tesla T4"],
    "v100-16gb": ["Tesla V100-SXM2-16GB", "V100 16GB"],
    "a10g": ["NVIDIA A10G", "a10g"],
    "a100-40gb": ["NVIDIA A100-SXM4-40GB", "A100_40GB"],
    "a100-80gb": ["NVIDIA A100-SXM4-80GB", "a100-80GB", "A100 80 GB"],
    "l4": ["NVIDIA L4"],
    "l40s": ["NVIDIA L40S"],
    "h100-sxm": ["NVIDIA H100 80GB HBM3", "H100", "h100 SXM5"],
    "h200": ["NVIDIA H200"],
    "mi250x": ["AMD Instinct MI250X", "AMD Instinct MI250X/MI250"],
    "mi300x": ["AMD Instinct MI300X", "MI300X OAM"],
    "cpu": ["CPU"],
}


@pytest.mark.parametrize(("name", "spelling"), [(name, text) for name, texts in SPELLINGS.items() for text in texts])
def test_a_card_is_found_however_it_is_spelled(name, spelling):
    assert find_card(spelling).name == name


@pytest.mark.parametrize("name", CARDS)
def test_each_card_is_found_by_its_own_name(name):
    assert find_card(name) is CARDS[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A100", "Did you mean a100-40gb or a100-80gb?"),
        ("v100", "Did you mean v100-16gb or v100-32gb?"),
        ("NVIDIA H100 PCIe", "Did you mean h100-sxm"),
        ("rtx4091", r"Did you mean rtx409\d|rtx4090"),
        ("", "It has rtx3060, rtx3090, "),
        ("zzzzzz", "It has rtx3060, rtx3090, "),
    ],
)
def test_another_card_is_answered_with_those_that_are_close(name, message):
    """A card of the same family has other peaks: an A100 of 40 GB is not taken for one of 80."""
    with pytest.raises(bb.OptionError, match=message) as caught:
        find_card(name)

    assert repr(name) in str(caught.value)
    assert '--device-peak "165TFLOPS,1008GB/s"' in str(caught.value)


# Multiprocessors, GHz, and multiply-adds of one in a cycle: on CUDA cores in float32, on tensor cores in 16 bits with
# sums in float32, dense; bits of the memory bus and Gbit/s of a pin.
CHIPS = {
    "rtx3060": (28, 1.777, 128, 256, 192, 15),
    "rtx3090": (82, 1.695, 128, 256, 384, 19.5),
    "rtx4060ti-16gb": (34, 2.535, 128, 256, 128, 18),
    "rtx4070": (46, 2.475, 128, 256, 192, 21),
    "rtx4080": (76, 2.505, 128, 256, 256, 22.4),
    "rtx4090": (128, 2.520, 128, 256, 384, 21),
    "rtx5090": (170, 2.407, 128, 256, 512, 28),
    "t4": (40, 1.590, 64, 512, 256, 10),
    "v100-16gb": (80, 1.530, 64, 512, 4096, 1.75),
    "a100-40gb": (108, 1.410, 64, 1024, 5120, 2.43),
    "a100-80gb": (108, 1.410, 64, 1024, 5120, 3.186),
    "l4": (58, 2.040, 128, 512, 192, 12.5),
    "l40s": (142, 2.520, 128, 512, 384, 18),
    "h100-sxm": (132, 1.830, 128, 2048, 5120, 5.23),
}


@pytest.mark.parametrize("name", CHIPS)
def test_peaks_follow_from_the_chip(name):
    """Against an independent count: cores x 2 x clock, and pins x rate. Sparse peaks are twice as much."""
    units, clock, cuda, tensor, bus, rate = CHIPS[name]
    card = CARDS[name]

    assert card.flops["fp32"] == pytest.approx(units * cuda * 2 * clock * 1e9, rel=0.09)
    assert card.flops["fp16"] == pytest.approx(units * tensor * 2 * clock * 1e9, rel=0.03)
    assert card.bytes_per_second == pytest.approx(bus / 8 * rate * 1e9, rel=0.01)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_fewer_bits_are_never_slower(card):
    assert card.flops_per_second("fp32") <= card.flops_per_second("tf32") <= card.flops_per_second("fp16")
    assert card.flops_per_second("bf16") in (card.flops_per_second("fp16"), card.flops_per_second("fp32"))


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "v100-32gb"])
def test_bf16_before_ampere_is_no_faster_than_float32(name):
    """Control: their tensor cores have no bf16, and the peak of fp16 would promise eight times too much."""
    card = CARDS[name]

    assert card.flops_per_second("bf16") == card.flops["fp32"] < card.flops["fp16"] / 7


def test_memory_is_what_the_driver_shows():
    """Error correction takes a sixteenth of GDDR6: a plan for the 16 GiB that are printed on a T4 would not fit."""
    assert CARDS["t4"].memory_bytes == 15 * 2**30
    assert (CARDS["rtx3090"].memory_bytes, CARDS["a100-80gb"].memory_bytes) == (24 * 2**30, 80 * 2**30)


PEAKS = [
    ("165TFLOPS,1008GB/s", 165e12, 1008e9),
    ("165 tflops, 1008 gb/s", 165e12, 1008e9),
    ("1.98PFLOP/s,3.35TB/s", 1.98e15, 3.35e12),
    ("500GFLOPS , 50GiB/s", 500e9, 50 * 2**30),
]


@pytest.mark.parametrize(("text", "flops", "bandwidth"), PEAKS)
def test_peaks_as_a_person_writes_them(text, flops, bandwidth):
    card = parse_peak(text)

    assert card.flops_per_second("bf16") == card.flops_per_second("fp32") == pytest.approx(flops)
    assert card.bytes_per_second == pytest.approx(bandwidth)


def test_peaks_as_numbers():
    assert card_from(flops=1e12, bandwidth=1e11) == Card(
        "custom", None, {"fp32": 1e12, "tf32": 1e12, "bf16": 1e12, "fp16": 1e12}, 1e11
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("165TFLOPS", "'165TFLOPS' is no peak of a device"),
        ("165TFLOPS,1008GB/s,3", "is no peak of a device"),
        ("165,1008GB/s", "'165' is no speed"),
        ("165TOPS,1008GB/s", "'165TOPS' is no speed"),
        ("0TFLOPS,1008GB/s", "'0TFLOPS' is no speed"),
        ("165TFLOPS,1008", "'1008' is no bandwidth"),
        ("165TFLOPS,1008GB", "'1008GB' is no bandwidth"),
        ("165TFLOPS,0GB/s", "'0GB' is no amount of memory"),
    ],
)
def test_peaks_that_are_none_are_refused(text, message):
    with pytest.raises(bb.OptionError, match=message):
        parse_peak(text)


@pytest.mark.parametrize("number", [0, -1.0, True, float("inf"), float("nan")])
def test_numbers_that_are_no_peaks_are_refused(number):
    with pytest.raises(bb.OptionError, match="is no speed"):
        card_from(flops=number, bandwidth=1e9)
    with pytest.raises(bb.OptionError, match="is no bandwidth"):
        card_from(flops=1e12, bandwidth=number)
