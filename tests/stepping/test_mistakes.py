"""Control of the matrix: each classic mistake is far outside its tolerances, in a named cell where it shows.

The mistakes are loops as people write them, without bigbatch. Each is run in a cell of the matrix, where the careful
loop and bigbatch are inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from tests.models import LOSSES, NETWORKS, NUM_SAMPLES, Loss, make_batch, num_labels, num_samples
from tests.reference import (
    Gradients,
    RecordingSGD,
    accumulate_by_hand,
    assert_same_gradients,
    big_batch_gradients,
    cut_batch,
    gradient_error,
    gradients,
    micro_batch_sizes,
)

pytest.importorskip("transformers")

Batch = dict[str, Tensor]
TOLERANCE = 1e-12
# A mistake is called seen when it is this far out: 100 times the tolerance that the matrix has for float32.
SEEN = 1e-3


class Cell:
    """A cell of the matrix with what a loop needs: the model, the loss, and the micro-batches.

    Args:
        name: ``network-loss-micro_batch_size``.
    """

    def __init__(self, name: str):
        network, loss, size = name.split("-")
        self.micro_batch_size = int(size)
        self.loss: Loss = LOSSES[loss]
        self.model = NETWORKS[network].make()
        self.batch = make_batch(NETWORKS[network], padded=self.loss.padded)
        self.parts: list[Batch] = cut_batch(self.batch, micro_batch_sizes(NUM_SAMPLES, self.micro_batch_size))

    def truth(self) -> Gradients:
        return big_batch_gradients(self.model, self.loss.plain, self.batch)

    def by_hand(self, share: Callable[[Batch], float], parts: list[Batch] | None = None) -> Gradients:
        """The plain loop with a share of one's own for each micro-batch."""
        parts = self.parts if parts is None else parts
        accumulate_by_hand(self.model, self.loss.plain, parts, [share(part) for part in parts])
        return gradients(self.model)

    def careful_share(self, part: Batch) -> float:
        return self.loss.weight_of(part) / self.loss.weight_of(self.batch)

    def skip_empty(self, share: Callable[[Batch], float]) -> Callable[[Batch], float]:
        """The share, except that a micro-batch without anything valid is left out, so that nothing is NaN."""
        return lambda part: share(part) if self.careful_share(part) else 0.0


def divided_by_k(cell: Cell) -> Gradients:
    return cell.by_hand(cell.skip_empty(lambda part: 1 / len(cell.parts)))


def samples_instead_of_what_the_mean_is_over(cell: Cell) -> Gradients:
    return cell.by_hand(cell.skip_empty(lambda part: num_samples(part) / NUM_SAMPLES))


def labels_instead_of_next_labels(cell: Cell) -> Gradients:
    """The first label of each row is never predicted, but counted."""
    return cell.by_hand(cell.skip_empty(lambda part: float(num_labels(part)) / float(num_labels(cell.batch))))


def never_divided(cell: Cell) -> Gradients:
    return cell.by_hand(lambda part: 1.0)


def divided_twice(cell: Cell) -> Gradients:
    return cell.by_hand(lambda part: cell.careful_share(part) / len(cell.parts))


def divided_by_full_micro_batches(cell: Cell) -> Gradients:
    """The rest counts like a full micro-batch."""
    return cell.by_hand(lambda part: cell.micro_batch_size / NUM_SAMPLES)


def rest_dropped(cell: Cell) -> Gradients:
    return cell.by_hand(cell.careful_share, cell.parts[:-1])


def one_micro_batch_seen_every_time(cell: Cell) -> Gradients:
    return cell.by_hand(cell.careful_share, [cell.parts[0]] * len(cell.parts))


def cleared_inside(cell: Cell) -> Gradients:
    for part in cell.parts:
        cell.model.zero_grad()
        (cell.loss.plain(cell.model, part) * cell.careful_share(part)).backward()
    return gradients(cell.model)


def never_cleared(cell: Cell) -> Gradients:
    """The gradient of the step before is still there."""
    cell.by_hand(cell.careful_share)
    return cell.by_hand(cell.careful_share)


def nothing_valid_still_run(cell: Cell) -> Gradients:
    """A micro-batch without anything to average over: 0 / 0, times a share of 0."""
    for part in cell.parts:
        (cell.loss.plain(cell.model, part) * cell.careful_share(part)).backward()
    return gradients(cell.model)


def weights_made_whole_numbers(cell: Cell) -> Gradients:
    total = sum(int(cell.loss.weight_of(part)) for part in cell.parts)
    return cell.by_hand(lambda part: int(cell.loss.weight_of(part)) / total)


def penalty_in_every_micro_batch(cell: Cell) -> Gradients:
    for part in cell.parts:
        cell.loss.plain(cell.model, part).backward()
    return gradients(cell.model)


def penalty_divided_with_the_mean(cell: Cell) -> Gradients:
    """Right for the penalty, but the sum of the losses is not to be divided."""
    for part in cell.parts:
        (cell.loss.plain(cell.model, part) / len(cell.parts)).backward()
    return gradients(cell.model)


def ratio_weighed_by_samples(cell: Cell) -> Gradients:
    for part in cell.parts:
        if bool((part["labels"] != -100).any()):
            (cell.loss.plain(cell.model, part) * num_samples(part) / NUM_SAMPLES).backward()
    return gradients(cell.model)


def ratio_weighed_by_labels(cell: Cell) -> Gradients:
    """One denominator for what has another one, or two."""
    for part in cell.parts:
        if float(num_labels(part)):
            (cell.loss.plain(cell.model, part) * float(num_labels(part)) / float(num_labels(cell.batch))).backward()
    return gradients(cell.model)


def missing_gradients_made_zero(cell: Cell) -> Gradients:
    found = cell.by_hand(cell.careful_share)
    return {
        name: torch.zeros_like(parameter) if found[name] is None else found[name]
        for name, parameter in cell.model.named_parameters()
    }


def clipped_in_every_micro_batch(cell: Cell) -> Gradients:
    for part in cell.parts:
        (cell.loss.plain(cell.model, part) * cell.careful_share(part)).backward()
        nn.utils.clip_grad_norm_(cell.model.parameters(), CLIP)
    return gradients(cell.model)


def stepped_in_every_micro_batch(cell: Cell) -> Gradients:
    """The later micro-batches are computed with other weights; what was taken from the weights is the gradient."""
    before = copy.deepcopy(cell.model.state_dict())
    optimizer = torch.optim.SGD(cell.model.parameters(), lr=0.1)
    for part in cell.parts:
        (cell.loss.plain(cell.model, part) * cell.careful_share(part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: (before[name] - parameter.detach()) / 0.1 for name, parameter in cell.model.named_parameters()}


def added_up_in_bf16(cell: Cell) -> Gradients:
    added: dict[str, Tensor] = {}
    for part in cell.parts:
        cell.model.zero_grad()
        (cell.loss.plain(cell.model, part) * cell.careful_share(part)).backward()
        for name, parameter in cell.model.named_parameters():
            added[name] = added.get(name, torch.zeros_like(parameter).bfloat16()) + parameter.grad.bfloat16()
    return dict(added)


CLIP = 0.05
MISTAKES = [
    (divided_by_k, "mlp-mean-3"),
    (divided_by_k, "transformer-tokens-4"),
    (divided_by_k, "gpt2-next_tokens-1"),
    (divided_by_k, "lstm-fractional-4"),
    (samples_instead_of_what_the_mean_is_over, "lstm-tokens-3"),
    (samples_instead_of_what_the_mean_is_over, "llama-next_tokens-4"),
    (samples_instead_of_what_the_mean_is_over, "cnn-fractional-4"),
    (labels_instead_of_next_labels, "gpt2-next_tokens-3"),
    (labels_instead_of_next_labels, "transformer-next_tokens-3"),
    (never_divided, "cnn-mean-4"),
    (divided_twice, "cnn-mean-4"),
    (divided_by_full_micro_batches, "mlp-mean-3"),
    (divided_by_full_micro_batches, "transformer-mean-7"),
    (rest_dropped, "lstm-mean-7"),
    (one_micro_batch_seen_every_time, "mlp-mean-4"),
    (cleared_inside, "transformer-mean-3"),
    (never_cleared, "transformer-mean-3"),
    (nothing_valid_still_run, "mixture-fractional-1"),
    (weights_made_whole_numbers, "mlp-fractional-3"),
    (penalty_in_every_micro_batch, "cnn-sum_and_penalty-3"),
    (penalty_divided_with_the_mean, "cnn-sum_and_penalty-3"),
    (ratio_weighed_by_samples, "mixture-class_weighted-3"),
    (ratio_weighed_by_labels, "lstm-class_weighted-3"),
    (ratio_weighed_by_labels, "transformer-two_ratios-3"),
    (missing_gradients_made_zero, "mixture-mean-4"),
    (stepped_in_every_micro_batch, "mlp-mean-4"),
    (added_up_in_bf16, "mlp-mean-1"),
]


@pytest.mark.parametrize(("mistake", "cell_name"), MISTAKES, ids=lambda value: getattr(value, "__name__", value))
def test_a_mistake_is_seen_where_bigbatch_is_exact(mistake: Callable[[Cell], Gradients], cell_name: str):
    cell = Cell(cell_name)
    expected = cell.truth()
    bb.accumulate(cell.model, cell.loss.ours, cell.batch, micro_batch_size=cell.micro_batch_size, **cell.loss.options)
    ours = gradients(cell.model)
    cell.model.zero_grad()

    wrong = mistake(cell)

    assert_same_gradients(ours, expected, tolerance=TOLERANCE)
    assert gradient_error(wrong, expected) > SEEN


@pytest.mark.parametrize("cell_name", sorted({name for _, name in MISTAKES if LOSSES[name.split("-")[1]].weigh}))
def test_the_careful_loop_is_inside_the_tolerance(cell_name):
    """The loop that the mistakes are made in is right without them."""
    cell = Cell(cell_name)

    assert_same_gradients(cell.by_hand(cell.careful_share), cell.truth(), tolerance=TOLERANCE)


def test_dividing_by_k_cannot_be_seen_in_an_even_cut_of_equal_samples():
    """Why the matrix has uneven cuts and padding: here the classic mistake is right."""
    cell = Cell("mlp-mean-4")

    assert_same_gradients(divided_by_k(cell), cell.truth(), tolerance=TOLERANCE)


def test_shares_computed_in_float32_are_seen_by_the_float64_matrix():
    """Dividing two integer tensors gives float32: too small to matter in training, and 10,000 times the tolerance."""
    cell = Cell("transformer-tokens-3")
    total = num_labels(cell.batch)

    wrong = cell.by_hand(lambda part: num_labels(part) / total)

    assert 1e4 * TOLERANCE < gradient_error(wrong, cell.truth()) < 1e-6


def clipped(found: Gradients) -> Gradients:
    """Scaled to the norm ``CLIP``, as ``clip_grad_norm_`` does."""
    norm = torch.stack([g.double().square().sum() for g in found.values() if g is not None]).sum().sqrt()
    return {name: None if g is None else g * (CLIP / (norm + 1e-6)).clamp(max=1) for name, g in found.items()}


@pytest.mark.parametrize("cell_name", ["mlp-mean-3", "transformer-tokens-3", "mixture-mean-1"])
def test_clipping_every_micro_batch_is_seen_where_bigbatch_is_exact(cell_name):
    cell = Cell(cell_name)
    expected = clipped(cell.truth())
    optimizer = RecordingSGD(cell.model)

    step = bb.Step(
        cell.model,
        cell.loss.ours,
        optimizer,
        micro_batch_size=cell.micro_batch_size,
        max_grad_norm=CLIP,
        **cell.loss.options,
    )
    result = step(cell.batch)
    wrong = clipped_in_every_micro_batch(Cell(cell_name))

    assert float(result.grad_norm) > 2 * CLIP
    assert_same_gradients(optimizer.seen[-1], expected, tolerance=TOLERANCE)
    assert gradient_error(wrong, expected) > SEEN
