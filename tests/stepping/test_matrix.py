"""Every kind of network, loss, cut and recompute: the gradient is that of the one big batch in float64.

The errors are measured as in DESIGN.md. ``test_mistakes.py`` is the control: it shows each classic mistake outside the
tolerances that are used here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import bigbatch as bb
from tests.models import (
    LOSSES,
    NETWORKS,
    NUM_SAMPLES,
    PADDING_SAMPLE,
    Loss,
    Network,
    make_batch,
    makes_sense,
    num_even,
    num_labels,
)
from tests.reference import (
    Gradients,
    RecordingSGD,
    assert_same_gradients,
    big_batch_gradients,
    big_batch_loss,
    cut_batch,
    gradients,
    micro_batch_sizes,
)

# The zoo imports transformers, which is in the extra "hf".
pytest.importorskip("transformers")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
CELLS = [
    pytest.param(network, loss, id=f"{network.name}-{loss.name}")
    for network, loss in itertools.product(NETWORKS.values(), LOSSES.values())
    if makes_sense(network, loss)
]
SIZES = [1, 3, 4, NUM_SAMPLES - 1, NUM_SAMPLES, 2 * NUM_SAMPLES]
RECOMPUTE = ["none", "all", "every_second"]
# Networks whose blocks hold layers. In the others a block is one layer.
DEEP = ["mlp", "cnn", "transformer", "gpt2", "llama"]
UNEVEN_CUTS = [[NUM_SAMPLES - 1, 1], [1, NUM_SAMPLES - 1], [1, 5, 2], [2, 1, 1, 4]]


def recomputed(network: Network, choice: str) -> tuple[Any, ...]:
    """The entry ``recompute`` of the plan."""
    if choice == "pairs":
        return tuple(network.blocks[start : start + 2] for start in range(0, len(network.blocks), 2))
    return {"none": (), "all": network.blocks, "every_second": network.blocks[::2]}[choice]


@functools.cache
def truth(network: Network, loss: Loss) -> tuple[Gradients, float]:
    """Gradients and loss of the big batch, in float64."""
    model, batch = network.make(), make_batch(network, padded=loss.padded)
    return big_batch_gradients(model, loss.plain, batch), big_batch_loss(model, loss.plain, batch)


def run_step(
    network: Network, loss: Loss, batch: Any, dtype: torch.dtype, micro_batch_size: int, recompute: tuple[Any, ...]
) -> tuple[Gradients, bb.StepResult]:
    """The gradients that one optimizer step was taken with."""
    model = network.make(dtype)
    optimizer = RecordingSGD(model)
    plan = bb.Plan(micro_batch_size=micro_batch_size, recompute=recompute)
    result = bb.Step(model, loss.ours, optimizer, plan=plan, **loss.options)(batch)
    return optimizer.seen[-1], result


def run_accumulate(
    network: Network, loss: Loss, batch: Any, dtype: torch.dtype, micro_batch_size: int | None = None
) -> tuple[Gradients, bb.StepResult]:
    """The gradients that ``bb.accumulate`` leaves in ``.grad``."""
    model = network.make(dtype)
    result = bb.accumulate(model, loss.ours, batch, micro_batch_size=micro_batch_size, **loss.options)
    return gradients(model), result


def assert_is_the_big_batch(
    network: Network, loss: Loss, found: Gradients, result: bb.StepResult, dtype: torch.dtype, sizes: Iterable[int]
) -> None:
    """Gradients, reported loss, the cut, and the claim."""
    expected_gradients, expected_loss = truth(network, loss)
    assert_same_gradients(found, expected_gradients, tolerance=TOLERANCE[dtype])
    assert float(result.loss) == pytest.approx(expected_loss, rel=TOLERANCE[dtype])
    assert result.micro_batch_sizes == tuple(sizes)
    assert result.exactness == "exact"
    assert not result.skipped


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("micro_batch_size", SIZES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_gradient_is_that_of_the_big_batch(network, loss, recompute, micro_batch_size, dtype):
    batch = make_batch(network, dtype, padded=loss.padded)

    found, result = run_step(network, loss, batch, dtype, micro_batch_size, recomputed(network, recompute))

    assert_is_the_big_batch(network, loss, found, result, dtype, micro_batch_sizes(NUM_SAMPLES, micro_batch_size))


@pytest.mark.parametrize("micro_batch_size", SIZES)
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_accumulate_leaves_the_same_gradient(network, loss, micro_batch_size):
    batch = make_batch(network, padded=loss.padded)

    found, result = run_accumulate(network, loss, batch, torch.float64, micro_batch_size)

    assert_is_the_big_batch(
        network, loss, found, result, torch.float64, micro_batch_sizes(NUM_SAMPLES, micro_batch_size)
    )


@pytest.mark.parametrize("micro_batch_size", [3, 4])
@pytest.mark.parametrize(
    ("network", "loss"), [cell for cell in CELLS if cell.values[0].is_chain and cell.values[1].name != "mean"]
)
def test_neighbours_recomputed_as_one_change_nothing(network, loss, micro_batch_size):
    batch = make_batch(network, padded=loss.padded)

    found, result = run_step(network, loss, batch, torch.float64, micro_batch_size, recomputed(network, "pairs"))

    assert_is_the_big_batch(
        network, loss, found, result, torch.float64, micro_batch_sizes(NUM_SAMPLES, micro_batch_size)
    )


@pytest.mark.parametrize("sizes", UNEVEN_CUTS, ids=str)
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_a_very_uneven_cut_that_comes_ready_changes_nothing(network, loss, sizes):
    micro_batches = cut_batch(make_batch(network, padded=loss.padded), sizes)

    found, result = run_accumulate(network, loss, bb.LogicalBatch(micro_batches), torch.float64)

    assert_is_the_big_batch(network, loss, found, result, torch.float64, sizes)


def weight_of_all(loss: Loss, batch: dict[str, torch.Tensor]) -> Any:
    """What a loader that cuts in its workers knows: the weight of the whole batch."""
    if loss.name == "two_means":
        return dict(fit=float((batch["labels"] != -100).sum()), size=float(num_even(batch)))
    if loss.options.get("weight") == "tokens":
        return float(num_labels(batch))
    return None if loss.weigh is None else loss.weight_of(batch)


@pytest.mark.parametrize("sizes", UNEVEN_CUTS, ids=str)
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_micro_batches_may_come_one_by_one_with_their_total_weight(network, loss, sizes):
    batch = make_batch(network, padded=loss.padded)
    one_by_one = iter(cut_batch(batch, sizes))

    found, result = run_accumulate(
        network, loss, bb.LogicalBatch(one_by_one, weight=weight_of_all(loss, batch)), torch.float64
    )

    assert_is_the_big_batch(network, loss, found, result, torch.float64, sizes)


@pytest.mark.parametrize("micro_batch_size", SIZES)
def test_a_parameter_without_a_gradient_keeps_none(micro_batch_size):
    """The fourth expert of the mixture sees no sample; the third sees one, so most micro-batches do not reach it."""
    network, loss = NETWORKS["mixture"], LOSSES["mean"]

    found, _ = run_accumulate(network, loss, make_batch(network), torch.float64, micro_batch_size)

    assert {name for name, gradient in found.items() if gradient is None} == {"experts.3.weight", "experts.3.bias"}
    assert found["experts.2.weight"].abs().max() > 0


@pytest.mark.parametrize("sizes", [[1] * NUM_SAMPLES, [1, 5, 2]], ids=str)
@pytest.mark.parametrize("read_once", [False, True], ids=["list", "iterator"])
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_the_first_micro_batch_may_hold_nothing_that_counts(network, loss, read_once, sizes):
    """It gives no hint of how large the denominators will be."""
    batch = {
        name: tensor.roll(-PADDING_SAMPLE, dims=0) for name, tensor in make_batch(network, padded=loss.padded).items()
    }
    expected = big_batch_gradients(network.make(), loss.plain, batch)
    micro_batches = cut_batch(batch, sizes)

    found, _ = run_accumulate(
        network, loss, bb.LogicalBatch(iter(micro_batches) if read_once else micro_batches), torch.float64
    )

    assert_same_gradients(found, expected, tolerance=TOLERANCE[torch.float64])


@pytest.mark.parametrize("micro_batch_size", [3, NUM_SAMPLES])
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_a_gradient_that_was_there_is_added_to_and_not_corrected(network, loss, micro_batch_size):
    """Denominators that are known late multiply the gradient of this call only."""
    model, batch = network.make(), make_batch(network, padded=loss.padded)
    loss.plain(model, make_batch(network, padded=loss.padded, seed=1)).backward()
    before = gradients(model)
    expected = {
        name: added if before[name] is None else before[name] if added is None else before[name] + added
        for name, added in truth(network, loss)[0].items()
    }

    bb.accumulate(model, loss.ours, batch, micro_batch_size=micro_batch_size, **loss.options)

    assert_same_gradients(gradients(model), expected, tolerance=TOLERANCE[torch.float64])


@pytest.mark.parametrize("micro_batch_size", [3, NUM_SAMPLES])
@pytest.mark.parametrize(("network", "loss"), CELLS)
def test_frozen_parameters_stay_without_a_gradient(network, loss, micro_batch_size):
    model, batch = network.make(), make_batch(network, padded=loss.padded)
    model.get_submodule(network.blocks[0]).requires_grad_(False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    expected = big_batch_gradients(model, loss.plain, batch)

    bb.accumulate(model, loss.ours, batch, micro_batch_size=micro_batch_size, **loss.options)

    found = gradients(model)
    assert frozen
    assert all(found[name] is None for name in frozen)
    assert_same_gradients(found, expected, tolerance=TOLERANCE[torch.float64])


def first_layer(network: Network, model: torch.nn.Module) -> torch.nn.Module:
    """The first layer inside the first block, which is called anew when the block is recomputed."""
    layers = [module for module in model.get_submodule(network.blocks[0]).modules() if not list(module.children())]
    return layers[0]


@pytest.mark.parametrize(
    ("network", "recompute", "forwards"),
    [
        pytest.param(NETWORKS[name], recompute, forwards, id=f"{name}-{recompute}")
        for name in DEEP
        for recompute, forwards in (("none", 1), ("all", 2), ("every_second", 2), ("pairs", 2))
        if recompute != "pairs" or NETWORKS[name].is_chain
    ],
)
def test_the_plan_recomputes_what_it_says(network, recompute, forwards):
    """Control of the matrix: its columns are not all the same run. The first block is in each of the choices."""
    loss = LOSSES["next_tokens" if network.shifts_inside else "mean"]
    model, calls = network.make(), []
    first_layer(network, model).register_forward_pre_hook(lambda *_: calls.append(1))
    plan = bb.Plan(micro_batch_size=2, recompute=recomputed(network, recompute))

    bb.Step(model, loss.ours, RecordingSGD(model), plan=plan, **loss.options)(make_batch(network))

    assert len(calls) == forwards * NUM_SAMPLES / 2
