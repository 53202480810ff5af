"""What autograd saves lies on the host, each storage once, and comes back with its numbers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bigbatch.memory.measure import LiveBytes
from bigbatch.memory.offloading import MeteredHost
from bigbatch.memory.saved_on_host import SavedOnHost


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_are_the_same_and_each_storage_goes_once():
    host, w = MeteredHost(), leaf(16, 16)
    x = torch.randn(64, 16, dtype=torch.float64)

    def loss() -> Tensor:
        h = (x @ w).tanh()  # saved as an output
        halves = h.view(2, 32, 16).unbind()  # parts of one storage, each saved
        return (halves[0] * halves[1].transpose(0, 1).reshape(32, 16)).sum() + (h * h).sum()

    (expected,) = torch.autograd.grad(loss(), w)
    with SavedOnHost(host, [x, w]).listening():
        value = loss()
    assert host._bytes == 1.5 * x.nbytes, "h once, and the half that reshape copied."
    (found,) = torch.autograd.grad(value, w)

    assert torch.equal(found, expected)
    del value
    gc.collect()
    assert host._bytes == 0


def test_an_in_place_change_makes_another_copy():
    host, w = MeteredHost(), leaf(64, 64)
    with SavedOnHost(host, [w]).listening():
        h = w * 2
        out = F.relu(h.exp_())  # exp saves its result
        out = F.relu_(out * out).exp()
    (found,) = torch.autograd.grad(out.sum(), w)

    (expected,) = torch.autograd.grad(((w * 2).exp() ** 2).exp().sum(), w)
    torch.testing.assert_close(found, expected)


def test_a_small_one_that_was_changed_in_place_is_an_error_as_without_us():
    x = leaf(3)
    with SavedOnHost(MeteredHost(), []).listening():
        h = x * 2
        out = (h * h).sum()
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation: shape .* version 1 instead of 0"):
        out.backward()


def test_an_activation_is_given_up_and_comes_back():
    host, w = MeteredHost(), leaf(8, 8)
    saved = SavedOnHost(host, [w])
    live = LiveBytes()
    with live:
        x = torch.randn(64, 8, dtype=torch.float64)
        with saved.listening():
            h = (x @ w).tanh()
            cast = (w * 1.0).float()
            out = F.linear(h.float(), cast)
        numbers, version, before = h.tolist(), h._version, live.current_bytes()
        returned = saved.give_up(out)
        assert h.untyped_storage().nbytes() == 0
        assert live.current_bytes() <= before - 64 * 8 * 8
        for one in returned:
            one.come_back()
        assert live.current_bytes() == before
    assert h.tolist() == numbers
    assert h._version == version, "Autograd must not take it for changed."


def test_weights_in_another_dtype_are_not_given_up():
    """Other forwards share them. Here they have the dimensions of an activation."""
    w = torch.randn(32, 32, requires_grad=True)
    saved = SavedOnHost(MeteredHost(), [w])
    with saved.listening():
        cast = w.double()
        h = torch.randn(32, 32, dtype=torch.float64) @ cast
        out = h * h

    saved.give_up(out)

    assert cast.untyped_storage().nbytes() == cast.nbytes
    assert h.untyped_storage().nbytes() == 0


def test_nothing_is_kept_alive():
    with SavedOnHost(MeteredHost(), []).listening():
        h = leaf(32, 32) * 2
        out = h.exp() * h
    seen = [weakref.ref(h.untyped_storage()), weakref.ref(out.untyped_storage())]
    gc.disable()
    try:
        del h, out
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
