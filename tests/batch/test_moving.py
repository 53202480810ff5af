"""Micro-batches go to the device one at a time, the next one while this one computes.

The meta device stands for a device where there is no GPU: tensors are really sent, and hold nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.batch.logical import Piece
from bigbatch.batch.moving import on_device
from tests.batch.test_structure import every_container
from tests.reference import assert_same_gradients, big_batch_gradients, gradients

META, CPU = torch.device("meta"), torch.device("cpu")


def piece(micro_batch: Any, num_samples: int = 2) -> Piece:
    return Piece(micro_batch, num_samples, {None: float(num_samples)})


@every_container
def test_tensors_in_every_container_are_sent_and_types_kept(container):
    before = container.make(torch.arange(2), torch.ones(2))

    (after,) = on_device([piece(before)], META)

    assert type(after.micro_batch) is type(before)
    assert all(tensor.device == META for tensor in container.read(after.micro_batch))
    assert all(tensor.device == CPU for tensor in container.read(before)), "the batch of the user was changed"


def test_the_rest_is_passed_on_as_it_is():
    leaves = {"array": np.arange(2), "names": ["a", "b"], "none": None, "number": 3, "text": "train"}

    (after,) = on_device([piece({"x": torch.ones(2), **leaves})], META)

    assert all(after.micro_batch[name] is leaf for name, leaf in leaves.items())


def test_samples_and_weights_stay_on_the_host():
    before = [Piece(torch.ones(2), 2, {"a": 0.5}), Piece(torch.ones(1), 1, {"a": 0.25})]

    assert [(after.num_samples, after.weights) for after in on_device(before, META)] == [
        (2, {"a": 0.5}),
        (1, {"a": 0.25}),
    ]


def test_0d_and_shared_tensors_are_sent_too():
    (after,) = on_device([piece((torch.tensor(1.0), [torch.ones(3, 3)]))], META)

    assert after.micro_batch[0].device == META
    assert after.micro_batch[1][0].device == META


def test_what_is_there_already_is_not_copied():
    there = torch.ones(2, device=META)

    (after,) = on_device([piece((there, torch.ones(2)))], META)

    assert after.micro_batch[0] is there


@pytest.mark.parametrize("device", [None, CPU])
def test_on_the_host_nothing_is_touched(device):
    before = [piece((torch.ones(2), None)), piece([torch.ones(1)])]

    assert all(after is was for after, was in zip(on_device(before, device), before, strict=True))


def sent_to_a_packed_sequence() -> Any:
    return nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])


class Graph:
    """What a split of the user's own may make: it knows how to move."""

    def __init__(self, nodes: Tensor):
        self.nodes = nodes

    def to(self, *args: Any, **kwargs: Any) -> Graph:
        return Graph(self.nodes.to(*args, **kwargs))


def test_a_packed_sequence_is_sent():
    """It comes from split=, and the model is on the device."""
    (after,) = on_device([piece((sent_to_a_packed_sequence(), torch.ones(2)))], META)

    assert after.micro_batch[0].data.device == META


def test_an_object_that_can_move_is_sent():
    """As DataLoader's users do: graphs and images with a ``to`` of their own come from split= and collate=."""
    (after,) = on_device([piece((Graph(torch.ones(2, 3)), torch.ones(2)))], META)

    assert after.micro_batch[0].nodes.device == META


# ----- in which order


def noted(order: list[str], count: int) -> Iterator[Piece]:
    for number in range(count):
        order.append(f"cut {number}")
        yield piece(torch.full((2,), number))


def compute(order: list[str], pieces: Iterable[Piece]) -> None:
    for number, _ in enumerate(pieces):
        order.append(f"compute {number}")


def test_the_next_one_is_sent_before_this_one_computes():
    order: list[str] = []

    compute(order, on_device(noted(order, 3), META))

    assert order == ["cut 0", "cut 1", "compute 0", "cut 2", "compute 1", "compute 2"]


def test_on_the_host_the_next_one_is_cut_when_it_is_needed():
    """Control: there is nothing to send ahead."""
    order: list[str] = []

    compute(order, on_device(noted(order, 3), CPU))

    assert order == ["cut 0", "compute 0", "cut 1", "compute 1", "cut 2", "compute 2"]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("device", [CPU, META])
def test_none_is_lost_or_seen_twice(count, device):
    assert [after.num_samples for after in on_device([piece(torch.ones(n), n) for n in range(count)], device)] == [
        *range(count)
    ]


def test_an_error_of_the_loader_is_not_swallowed():
    def broken() -> Iterator[Piece]:
        yield piece(torch.ones(2))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(on_device(broken(), META))


def test_the_loss_gets_its_micro_batches_on_the_device_of_the_model():
    model = nn.Linear(3, 1, device=META)
    seen = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        seen.append([tensor.device.type for tensor in batch.values()])
        return (model(batch["x"]) - batch["y"]).square().mean()

    result = bb.accumulate(model, loss_fn, {"x": torch.ones(5, 3), "y": torch.ones(5, 1)}, micro_batch_size=2)

    assert seen == [["meta", "meta"]] * 3
    assert result.micro_batch_sizes == (2, 2, 1)
    assert model.weight.grad.device == META


# ----- CUDA


def on_cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_are_complete_when_they_are_used(pinned):
    """The copy runs on a stream of its own: the computing stream must wait for it, and its memory for that stream."""
    host = [torch.full((2048, 2048), float(number)) for number in range(8)]
    host = [tensor.pin_memory() for tensor in host] if pinned else host
    found = []

    for after in on_device([piece({"x": tensor}) for tensor in host], on_cuda()):
        busy = after.micro_batch["x"] @ torch.eye(2048, device=after.micro_batch["x"].device)
        found.append((busy.amin(), busy.amax()))
        del after, busy

    assert [(low.item(), high.item()) for low, high in found] == [(float(n), float(n)) for n in range(8)]


@pytest.mark.gpu
def test_two_micro_batches_lie_on_the_device_and_never_all():
    device, num_bytes = on_cuda(), 4 * 2**20
    host = [torch.ones(num_bytes // 4) for _ in range(16)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    for after in on_device([piece(tensor) for tensor in host], device):
        after.micro_batch.sum().item()
        del after

    # Three at the moment when the one before is let go of; all would be sixteen.
    assert torch.cuda.max_memory_allocated(device) - before <= 3 * num_bytes


@pytest.mark.gpu
def test_the_gradient_on_the_device_is_that_of_the_big_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    x, y = torch.randn(50, 64, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return (model(batch["x"]) - batch["y"][0]).square().mean()

    expected = big_batch_gradients(model, loss_fn, {"x": x, "y": (y, None)})
    model.to(on_cuda())
    bb.accumulate(model, loss_fn, {"x": x, "y": (y, None)}, micro_batch_size=7)

    found = {name: None if grad is None else grad.cpu() for name, grad in gradients(model).items()}
    assert_same_gradients(found, expected)


@pytest.mark.gpu
def test_a_batch_on_the_device_is_not_copied_there():
    there = torch.ones(4, device=on_cuda())

    (after,) = on_device([piece((there,))], on_cuda())

    assert after.micro_batch[0] is there
