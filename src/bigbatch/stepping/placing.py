"""Where in a batch an error came from."""

from __future__ import annotations

from bigbatch.batch.logical import Pieces
from bigbatch.batch.sizes import smallest_without_single
from bigbatch.errors import BatchError

_CALLED_SO = "The loss is called as loss_fn(model, micro_batch), in this order."


def is_of_a_single_value(error: BaseException | None) -> bool:
    """Whether BatchNorm refused one value per channel."""
    return isinstance(error, ValueError) and "Expected more than 1 value per channel" in str(error)


def say_where(error: Exception, sizes: list[int], pieces: Pieces, *, is_first_step: bool = False) -> None:
    """Add the micro-batch that an error came from to it.

    Args:
        error: Gets a note.
        sizes: Of the micro-batches so far; the last one failed.
        pieces: All of them.
        is_first_step: Nothing has run yet; then arguments may be swapped, and the note says how the loss is called.
    """
    first, size = (sum(sizes[:-1]), sizes[-1]) if sizes else (0, 0)
    place = f"micro-batch {len(sizes)}{f' of {pieces.count}' if pieces.count else ''}"
    place += f", samples {first} to {first + size - 1}" if size else ""
    if is_of_a_single_value(error):
        several = pieces.num_samples > 1
        needed = f"micro_batch_size of at least {smallest_without_single(pieces.num_samples)}"
        raise BatchError(
            f"A BatchNorm layer got one value per channel, which has no variance ({place}). Give a "
            f'{needed if several else "batch of at least 2 samples"}, or batch_norm="frozen". Torch says: {error}'
        ) from error
    error.add_note(f"In {place}.")
    if is_first_step and len(sizes) == 1 and isinstance(error, TypeError | AttributeError):
        error.add_note(_CALLED_SO)
