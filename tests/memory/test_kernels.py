"""What kernels need while they run, and what their fakes leave out, against the real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbatch.memory.fake_kernels import as_the_kernel_returns
from bigbatch.memory.kernels import Kernel, Workspaces, watching_kernels
from bigbatch.memory.trace import FakeRecorder

LSTM = torch.ops.aten.mkldnn_rnn_layer.default
CONVOLUTION = torch.ops.aten.convolution.default


def kernel(*dimensions: int, func: str = "f") -> Kernel:
    return Kernel(func, "", (len(dimensions),), dimensions)


def workspace_of(known: Workspaces, *shape: int) -> float:
    """Of ``aten.neg`` of a tensor of this shape."""
    return known.of(torch.ops.aten.neg.default, (torch.empty(shape, device="meta"),), {})


def neg(*shape: int) -> Kernel:
    return Kernel.of(torch.ops.aten.neg.default, (torch.empty(shape, device="meta"),), {})


def test_workspace_is_on_the_line_of_two_sizes():
    known = Workspaces([(neg(2, 5), 100.0)], [(neg(8, 5), 400.0)])

    assert [workspace_of(known, size, 5) for size in (1, 2, 8, 32)] == [50.0, 100.0, 400.0, 1600.0]


def test_a_kernel_of_another_shape_has_none():
    known = Workspaces([(neg(2, 5), 100.0)], [(neg(8, 5), 400.0)])

    assert workspace_of(known, 4, 6) == workspace_of(known, 4, 5, 1) == 0.0


def test_dimensions_that_do_not_grow_together_are_another_kernel():
    known = Workspaces([(neg(2, 20), 100.0)], [(neg(8, 80), 400.0)])

    assert workspace_of(known, 4, 40) == 200.0
    assert workspace_of(known, 4, 80) == 0.0


def test_what_gets_less_with_more_samples_is_taken_at_its_most():
    known = Workspaces([(neg(2, 5), 100.0)], [(neg(8, 5), 40.0)])

    assert [workspace_of(known, size, 5) for size in (1, 32)] == [100.0, 100.0]


def test_the_call_that_needs_most_counts_among_equal_ones():
    known = Workspaces([(neg(2), 10.0), (neg(2), 30.0)], [(neg(4), 60.0), (neg(4), 20.0)])

    assert workspace_of(known, 4) == 60.0


def test_sizes_that_call_a_kernel_not_equally_often_are_not_compared():
    known = Workspaces([(neg(1), 10.0), (neg(1), 10.0)], [(neg(4), 60.0)])

    assert workspace_of(known, 4) == 60.0
    assert workspace_of(known, 1) == 0.0


def test_nothing_is_known_where_nothing_is_needed():
    assert not Workspaces([(neg(2), 0.0)], [(neg(4), 0.0)])
    assert not Workspaces()


@pytest.mark.parametrize("num_samples", [3, 5, 13, 16])
def test_a_convolution_is_known_at_sizes_that_were_not_run(num_samples):
    layer = nn.Conv2d(8, 16, 3, padding=1)

    def calls(size: int) -> list[tuple[Kernel, float]]:
        x = torch.randn(size, 8, 32, 32, requires_grad=True)
        layer(x).sum().backward()
        with watching_kernels(torch.device("cpu")) as found:
            layer(x).sum().backward()
        return [(kernel, num_bytes) for kernel, num_bytes in found if "convolution" in kernel.func]

    known = Workspaces(calls(2), calls(8))

    for seen, num_bytes in calls(num_samples):
        expected = max(pair.at(seen) for pair in known._seen[seen[:3]])
        assert num_bytes > 100_000
        assert expected == pytest.approx(num_bytes, rel=0.05)


def test_outside_of_the_block_the_profiler_is_off():
    with watching_kernels(torch.device("cpu")) as found:
        torch.zeros(3).neg()
    number = len(found)
    torch.zeros(3).neg()

    assert [kernel.func for kernel, _ in found][-1] == "aten.neg.default"
    assert len(found) == number
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def lstm_arguments(length: int, num_samples: int, width: int, hidden: int) -> tuple:
    x, state = torch.zeros(length, num_samples, width), torch.zeros(num_samples, hidden)
    weights = [torch.zeros(4 * hidden, size) for size in (width, hidden)] + [torch.zeros(4 * hidden)] * 2
    return x, *weights, state, state, False, [], 2, hidden, 1, True, False, True, True


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("shape", [(7, 1, 8, 8), (16, 5, 8, 12), (33, 20, 24, 16)])
def test_what_an_lstm_keeps_is_what_the_real_one_keeps(shape):
    real = LSTM(*lstm_arguments(*shape))
    with FakeTensorMode():
        arguments = lstm_arguments(*shape)
        fake = LSTM(*arguments)

    assert fake[3].nbytes == 0  # when this fails, torch has mended it
    assert as_the_kernel_returns(LSTM, arguments, fake)[3].nbytes == real[3].nbytes > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_without_a_gradient_an_lstm_keeps_nothing():
    with FakeTensorMode(), torch.no_grad():
        arguments = lstm_arguments(7, 2, 8, 8)
        fake = LSTM(*arguments)

        assert as_the_kernel_returns(LSTM, arguments, fake)[3].nbytes == 0


def test_other_results_are_left_alone():
    result = torch.zeros(2)

    assert as_the_kernel_returns(torch.ops.aten.neg.default, (result,), result) is result


def test_the_recorder_counts_a_workspace_where_the_kernel_is_called():
    with FakeTensorMode() as mode:
        x = torch.empty(4, 5)
    recorder = FakeRecorder(nn.Module(), frozenset())
    recorder.workspaces = Workspaces([(neg(2, 5), 100.0)], [(neg(8, 5), 400.0)])
    with mode, recorder:
        y = x.neg()
        y.abs()

    assert recorder.most_in_kernels == max(2 * 80 + 200, 3 * 80)
    assert recorder.peak_bytes() == 3 * 80
