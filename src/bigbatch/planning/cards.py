"""What common cards can do, from their makers' data sheets: for a plan where there is no device to measure on."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from bigbatch.errors import OptionError
from bigbatch.units import parse_bytes

TERA, GIGA, MIB = 10**12, 10**9, 2**20


@dataclass(frozen=True)
class Card:
    """Peaks of a device.

    Attributes:
        name: As in the table, or "custom".
        memory_bytes: What the driver shows as its memory, in bytes: with error correction on GDDR6 this is a sixteenth
            less than what is sold. The driver and the context of a process take some hundred MiB of it.
            None when it was not given.
        flops: Dense peak by dtype ("fp32", "tf32", "bf16", "fp16"), in operations per second, sums in float32.
        bytes_per_second: Of its memory.
    """

    name: str
    memory_bytes: int | None
    flops: dict[str, float]
    bytes_per_second: float

    def flops_per_second(self, dtype: str) -> float:
        """Peak for a dtype; that of float32 where the card has no faster way to compute in it (bf16 before Ampere)."""
        return self.flops.get(dtype, self.flops["fp32"])


def _card(name: str, mib: int, fp32: float, tf32: float | None, half: float, bandwidth: float, **more: float) -> Card:
    """A row of the table: MiB of memory, peaks in 10**12 operations per second, bandwidth in 10**9 bytes per second."""
    teraflops = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half} | more
    flops = {dtype: float(round(peak * TERA)) for dtype, peak in teraflops.items() if peak}
    return Card(name, mib * MIB, flops, bandwidth * GIGA)


# Dense: data sheets since Ampere print twice as much, which holds for weights of which every second one is zero.
# GeForce cards halve the rate of their tensor cores when sums are in float32, as in PyTorch by default: the
# architecture papers print both ("FP16 Tensor TFLOPS with FP32 Accumulate").
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_CARDS = (
    # 28 multiprocessors at 1.777 GHz, 128 operations of a tensor core and cycle with float32 sums (_GA102, appendix).
    _card("rtx3060", 12288, 12.7, 12.7, 25.5, 360),
    _card("rtx3090", 24576, 35.6, 35.6, 71.2, 936),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    # 34, 46, 76 and 128 multiprocessors at 2.535, 2.475, 2.505 and 2.520 GHz.
    _card("rtx4060ti-16gb", 16380, 22.1, 22.1, 44.1, 288),
    _card("rtx4070", 12282, 29.1, 29.1, 58.3, 504),
    _card("rtx4080", 16376, 48.7, 48.7, 97.5, 716.8),
    _card("rtx4090", 24564, 82.6, 82.6, 165.2, 1008),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    _card("rtx5090", 32607, 104.8, 104.8, 209.5, 1792),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    _card("t4", 15360, 8.1, None, 0, 320, fp16=65),
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf (SXM2)
    _card("v100-16gb", 16384, 15.7, None, 0, 900, fp16=125),
    _card("v100-32gb", 32768, 15.7, None, 0, 900, fp16=125),
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    _card("a10g", 23028, 35, 35, 70, 600),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    _card("a100-40gb", 40960, 19.5, 156, 312, 1555),
    _card("a100-80gb", 81920, 19.5, 156, 312, 2039),
    # https://www.nvidia.com/en-us/data-center/l4/
    _card("l4", 23034, 30.3, 60, 121, 300),
    # https://www.nvidia.com/en-us/data-center/l40s/
    _card("l40s", 46068, 91.6, 183, 362, 864),
    # https://resources.nvidia.com/en-us-hopper-architecture/nvidia-tensor-core-gpu-datasheet
    _card("h100-sxm", 81559, 66.9, 494.7, 989.4, 3350),
    # https://www.nvidia.com/en-us/data-center/h200/
    _card("h200", 143771, 66.9, 494.7, 989.4, 4800),
    # https://www.nvidia.com/en-us/data-center/hgx/ (eight of them, a card is an eighth)
    _card("b200", 183359, 75, 1125, 2250, 8000),
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html
    # One of its two dies, because PyTorch sees each as a device of its own.
    _card("mi250x", 65520, 47.9, None, 191.5, 1638),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    _card("mi300x", 196592, 163.4, 653.7, 1307.4, 5300),
)
# A rough desktop: eight cores of 3 GHz with two AVX2 multiply-adds a cycle, two channels of DDR4-3200.
_CPU = Card("cpu", None, {"fp32": 8 * 3e9 * 2 * 8 * 2}, 2 * 25.6 * GIGA)
CARDS = {card.name: card for card in (*_CARDS, _CPU)}

_MAKERS_WORDS = re.compile(r"nvidia|geforce|tesla|amd|instinct|radeon|graphics|oam|[^a-z0-9]")
# What the driver calls a card, in letters and digits, where that is more than its name here.
_ALSO = {
    "rtx306012gb": "rtx3060",
    "rtx4060ti": "rtx4060ti-16gb",
    "v100sxm216gb": "v100-16gb",
    "v100sxm232gb": "v100-32gb",
    "a100sxm440gb": "a100-40gb",
    "a100sxm480gb": "a100-80gb",
    "h100": "h100-sxm",
    "h100sxm5": "h100-sxm",
    "h10080gbhbm3": "h100-sxm",
    "mi250xmi250": "mi250x",
}


def find_card(name: str) -> Card:
    """A card by its name, however it is spelled; what ``torch.cuda.get_device_name()`` says goes too.

    >>> find_card("NVIDIA GeForce RTX 4090").name, find_card("4090").name, find_card("A100 80GB").name
    ('rtx4090', 'rtx4090', 'a100-80gb')

    Raises:
        OptionError: It is not in the table; the message has the names that are close.
    """
    plain = _plain(name)
    by_plain = {_plain(known): known for known in CARDS} | _ALSO
    for spelling in (plain, f"rtx{plain}"):
        if spelling in by_plain:
            return CARDS[by_plain[spelling]]
    raise OptionError(
        f"There is no card {name!r} in the table. {_close(plain)} Or say what it can do: "
        f'--device-peak "165TFLOPS,1008GB/s".'
    )


def _plain(name: str) -> str:
    return _MAKERS_WORDS.sub("", name.lower())


def _close(plain: str) -> str:
    family = re.match(r"[a-z]*\d+", plain)
    same = [name for name in CARDS if family and _plain(name).startswith(family[0])]
    close = same or difflib.get_close_matches(plain, CARDS, n=3)
    return f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(CARDS)}."


def card_from(*, flops: float | str, bandwidth: float | str) -> Card:
    """A card of one's own numbers.

    >>> card_from(flops="165TFLOPS", bandwidth="1008GB/s").bytes_per_second
    1008000000000

    Args:
        flops: Operations per second in the dtype of the training: a number, or a text in GFLOPS, TFLOPS or PFLOPS.
        bandwidth: Bytes per second of its memory: a number, or a text such as "3.35TB/s".

    Raises:
        OptionError: One of them is no such number, or not more than zero.
    """
    per_second = _flops(flops)
    # Whatever dtype is asked for, it is what the user said.
    return Card("custom", None, dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), per_second), _bandwidth(bandwidth))


def parse_peak(text: str) -> Card:
    """The card of ``--device-peak``.

    >>> parse_peak("165TFLOPS, 1008GB/s").flops_per_second("bf16")
    165000000000000.0

    Raises:
        OptionError: It is not two peaks with a comma between them.
    """
    parts = text.split(",")
    if len(parts) != 2:
        raise OptionError(
            f'{text!r} is no peak of a device. Write operations and bytes per second: "165TFLOPS,1008GB/s".'
        )
    return card_from(flops=parts[0], bandwidth=parts[1])


_FLOPS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([gtp])flop(?:s|/s)?\s*", re.IGNORECASE)
_POWERS = {"g": 10**9, "t": 10**12, "p": 10**15}


def _flops(amount: float | str) -> float:
    match = _FLOPS.fullmatch(amount) if isinstance(amount, str) else None
    found = float(match[1]) * _POWERS[match[2].lower()] if match else amount
    if isinstance(found, str | bool) or not 0 < found < float("inf"):
        raise OptionError(f'{amount!r} is no speed. Write operations per second: "165TFLOPS", or 165e12.')
    return found


def _bandwidth(amount: float | str) -> float:
    if isinstance(amount, str):
        unit, slash, second = amount.strip().partition("/")
        if not slash or second.strip().lower() != "s":
            raise OptionError(f'{amount!r} is no bandwidth. Write bytes per second: "1008GB/s", "3.35TB/s".')
        return parse_bytes(unit)
    if isinstance(amount, bool) or not 0 < amount < float("inf"):
        raise OptionError(f'{amount!r} is no bandwidth. Write bytes per second: "1008GB/s", or 1008e9.')
    return amount
