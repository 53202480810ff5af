"""What a step that is not exactly that of the big batch says about it."""

from __future__ import annotations

EXACT_WITH_WHOLE_BATCH_LOSS = (
    'Give batch_norm="frozen", take a layer such as GroupNorm (bb.to_group_norm), or a larger micro-batch: all samples '
    "in one are exact."
)
"""What to do about BatchNorm in train mode, where ``batch_norm="exact"`` is refused."""

EXACT_BATCH_NORM = 'Larger micro-batches come closer; GroupNorm, batch_norm="exact" or "frozen" is exact.'
"""What to do about BatchNorm in train mode elsewhere."""

_IN_A_FUNCTION = (
    "F.batch_norm, called by no BatchNorm layer of the model, normalised each micro-batch by its own mean and "
    "variance, where the big batch has one for all samples; batch_norm= has no effect on it. bb.verify names the "
    'module. nn.BatchNorm layers with batch_norm="exact", or another normalisation, such as GroupNorm, are exact.'
)

_WHY = {
    "same in distribution": (
        "random numbers were drawn in the forward (dropout), in another order than the big batch would draw them. "
        'Expectation and variance of the gradient are the same; dropout="per-sample" is exact.'
    ),
    "approximate": (
        "BatchNorm normalised each micro-batch by its own mean and variance, where the big batch has one for "
        "all samples. bb.verify and bigbatch train --check measure how far that turns the gradient."
    ),
}


def why_not_exact(exactness: str, *, is_of_whole_batch: bool, in_function: bool) -> str | None:
    """Why a step is only that, and what to do; None for one that is exact.

    Args:
        exactness: As in ``StepResult``.
        is_of_whole_batch: Whether the loss is a ``WholeBatchLoss``.
        in_function: Whether no layer, but ``F.batch_norm`` sees micro-batches.
    """
    if exactness != "approximate":
        return _WHY.get(exactness)
    if in_function:
        return _IN_A_FUNCTION
    return f"{_WHY[exactness]} {EXACT_WITH_WHOLE_BATCH_LOSS if is_of_whole_batch else EXACT_BATCH_NORM}"
