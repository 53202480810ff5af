"""What a step that is not exactly that of the big batch says about it."""

from __future__ import annotations

WHY_NOT_EXACT = {
    "same in distribution": (
        "random numbers were drawn in the forward (dropout), in another order than the big batch would draw them. "
        'Expectation and variance of the gradient are the same; dropout="per-sample" is exact.'
    ),
    "approximate": (
        "BatchNorm normalised each micro-batch by its own mean and variance, where the big batch has one for "
        'all samples. Larger micro-batches come closer; GroupNorm, batch_norm="exact" or "frozen" is exact.'
    ),
}
