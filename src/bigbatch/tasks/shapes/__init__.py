"""Built-in shapes: well-known models to plan without weights and without data."""

from __future__ import annotations

from collections.abc import Callable

from bigbatch.errors import TaskError
from bigbatch.tasks.shapes.gpt2 import gpt2
from bigbatch.tasks.shapes.llama import llama_8b, llama_70b
from bigbatch.tasks.shapes.resnet import resnet50
from bigbatch.tasks.shapes.shape import Shape
from bigbatch.tasks.shapes.unet import unet
from bigbatch.tasks.shapes.vit import vit_l

__all__ = ["SHAPES", "Shape", "find_shape"]

SHAPES: dict[str, Callable[..., Shape]] = {
    "gpt2": gpt2,
    "llama-8b": llama_8b,
    "llama-70b": llama_70b,
    "resnet50": resnet50,
    "unet": unet,
    "vit-l": vit_l,
}
"""Makes each shape, for a size of its samples or, without one, for its usual size."""

# A size is a multiple of the first number, and at most the second.
_SIZES: dict[str, tuple[int, int | None]] = {"gpt2": (1, 1024), "unet": (16, None), "vit-l": (16, None)}


def find_shape(name: str, *, size: int | None = None) -> Shape:
    """The shape of that name.

    Args:
        name: One of ``SHAPES``.
        size: Tokens in a sample of text, or pixels on each side of an image; None: as in its publication.

    Raises:
        TaskError: There is no such shape, or it cannot have that size.
    """
    if name not in SHAPES:
        raise TaskError(f"There is no shape {name!r}; the built-in ones are {', '.join(SHAPES)}.")
    if size is None:
        return SHAPES[name]()
    unit, most = _SIZES.get(name, (1, None))
    if size < 1 or size % unit or (most is not None and size > most):
        needed = f"a multiple of {unit}" if unit > 1 else f"from 1 to {most}" if most else "at least 1"
        raise TaskError(f"{name} cannot have size={size}; it is {needed}.")
    return SHAPES[name](size)
