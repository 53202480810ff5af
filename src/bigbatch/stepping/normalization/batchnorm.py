r"""BatchNorm in a step that runs in micro-batches: one update of the running statistics, from the whole batch.

Torch's layer does $r \leftarrow (1 - m)\,r + m\,s$ at each forward, so K micro-batches make K updates. Here the
running statistics are set to 0 before each forward: what the layer leaves in them is $m\,s_k$, which costs no pass
over the input. The $s_k$ are merged by Chan's formula (sums of squares lose all digits when the mean is large), and $r$
is updated once at the end, as by the big batch. This is exact for layers whose input passes no other train-mode
BatchNorm; deeper ones see inputs that were normalised by micro-batch, and are off by about 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bigbatch.errors import OptionError
from bigbatch.stepping.compiled import is_compiled, without_compiled_code
from bigbatch.stepping.precision import at_least_float32
from bigbatch.stepping.undo import Undo

_TORCH_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward)


def layers_of(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers of a model."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def uses_batch_statistics(layer: _BatchNorm, policy: str) -> bool:
    """Whether the layer normalises by the batch it sees, so that its micro-batches are not the big batch."""
    return layer.running_mean is None or (layer.training and policy != "frozen")


def _can_be_merged(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm | _InstanceNorm) or type(module).forward not in _TORCH_FORWARDS:
        return False
    return module.running_mean is not None and bool(module.track_running_stats)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm layers use their running statistics and leave them as they are."""
    layers = [layer for layer in layers_of(model) if layer.training and layer.running_mean is not None]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


@dataclass
class Merged:
    """Statistics of one call of a layer in each forward, over the micro-batches so far.

    Attributes:
        count: Values per channel.
        mean: Per channel.
        squares: Sum of squared differences from the mean; for InstanceNorm, count times the variance.
    """

    count: float
    mean: torch.Tensor
    squares: torch.Tensor

    def add(self, count: float, mean: torch.Tensor, squares: torch.Tensor, *, pools_samples: bool = True) -> None:
        """Merge in those of other values, by the formula of Chan, Golub and LeVeque (1979).

        Args:
            pools_samples: False: the mean of variances of samples, as InstanceNorm has it.
        """
        total = self.count + count
        difference = mean - self.mean
        self.mean += difference * (count / total)
        self.squares += squares
        if pools_samples:
            self.squares += difference.square() * (self.count * count / total)
        self.count = total


class _Layer:
    """A layer whose running statistics are merged."""

    def __init__(self, module: Any):
        self.module = module
        # BatchNorm has one mean over all samples, and those of two micro-batches differ; InstanceNorm has one for each
        # sample, and its statistics are their plain average.
        self.pools_samples = isinstance(module, _BatchNorm)
        self.before = [module.running_mean.clone(), module.running_var.clone()]
        self.tracked_before = None if module.num_batches_tracked is None else module.num_batches_tracked.clone()
        self.counts: list[int] = []  # values per channel in each call of the current forward
        self.merged: list[Merged] = []

    def clear(self) -> None:
        # Through .data: backward checks that the statistics it was given are the same version, and does not use them.
        self.module.running_mean.data.zero_()
        self.module.running_var.data.zero_()
        if self.module.num_batches_tracked is not None:
            self.module.num_batches_tracked.data.zero_()

    def called(self, x: torch.Tensor) -> None:
        """Before a call: what an earlier call of the same forward left must be read first."""
        if self.counts:
            self.read()
            self.clear()
        self.counts.append(_values_per_channel(x) if self.pools_samples else _num_instances(self.module, x))

    def read(self) -> None:
        """After a call: merge what it left in the running statistics."""
        call, count = len(self.counts) - 1, self.counts[-1]
        momentum = _momentum(self.module, 1) or 1.0  # with 0 nothing was written, and nothing will be
        wide = at_least_float32(self.module.running_mean.dtype)
        mean = self.module.running_mean.to(wide) / momentum
        squares = self.module.running_var.to(wide) / momentum * (count - 1 if self.pools_samples else count)
        if call == len(self.merged):
            self.merged.append(Merged(count, mean, squares))
        else:
            self.merged[call].add(count, mean, squares, pools_samples=self.pools_samples)

    def restore(self) -> None:
        with torch.no_grad():
            self.module.running_mean.copy_(self.before[0])
            self.module.running_var.copy_(self.before[1])
            if self.tracked_before is not None:
                self.module.num_batches_tracked.copy_(self.tracked_before)

    def commit(self) -> None:
        self.restore()
        for merged in self.merged:
            update_running_statistics(self.module, merged)


def update_running_statistics(module: Any, merged: Merged) -> None:
    """Take the statistics of one call into the running ones, as the layer would have done.

    Args:
        module: A BatchNorm or InstanceNorm layer that has them.
    """
    pools_samples = isinstance(module, _BatchNorm)
    tracked: torch.Tensor | None = module.num_batches_tracked
    with torch.no_grad():
        if tracked is not None and pools_samples:
            tracked.add_(1)
        averages_all = module.momentum is None  # and only then the count is read, for it may be on a device
        if averages_all and tracked is None:
            return  # torch cannot tell the how manyth batch it is either, and leaves them as they are
        momentum = _momentum(module, tracked.item() if averages_all and tracked is not None else 1)
        variance = merged.squares / max(merged.count - 1 if pools_samples else merged.count, 1)
        module.running_mean.lerp_(merged.mean.to(module.running_mean.dtype), momentum)
        module.running_var.lerp_(variance.to(module.running_var.dtype), momentum)


def _momentum(module: Any, num_tracked: float) -> float:
    if module.momentum is not None:
        return module.momentum
    # None is a cumulative average, which InstanceNorm does not have.
    return 1.0 / num_tracked if isinstance(module, _BatchNorm) else 0.0


class MergedStatistics:
    """Running statistics of the logical batch, merged from its micro-batches.

    Use: ``start``, then for each micro-batch ``before_forward`` and ``after_forward``, then ``commit`` or ``restore``.

    Args:
        model: Whose layers are merged. Layers with momentum 0, and subclasses with a forward of their own, are left
            to themselves.
    """

    def __init__(self, model: nn.Module):
        # Walking through all modules takes longer than a small micro-batch, so the ones that matter are kept.
        self._candidates = [module for module in model.modules() if _can_be_merged(module)]
        self._layers: dict[nn.Module, _Layer] = {}
        self._handles: list[Any] = []
        self._counts_by_shape: dict[Any, dict[nn.Module, list[int]]] = {}
        self._model = model
        self._compiled = is_compiled(model)

    def buffers(self) -> frozenset[int]:
        """Ids of the buffers that this puts back."""
        tensors = (tensor for layer in self._candidates for tensor in layer._buffers.values())
        return frozenset(id(tensor) for tensor in tensors if tensor is not None)

    @property
    def is_active(self) -> bool:
        """Whether statistics of this step are merged."""
        return bool(self._layers)

    def start(self) -> None:
        """Begin a step: remember the running statistics and listen to the layers."""
        self._layers = {module: _Layer(module) for module in self._candidates if module.training}
        if not self._compiled:
            self._listen()

    def _listen(self) -> None:
        self._handles = [layer.register_forward_pre_hook(self._before_call) for layer in self._layers]

    def _before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # A call inside backward is a recomputation: it must not count twice (pytorch/pytorch#96136).
        if torch._C._current_graph_task_id() == -1:
            self._layers[module].called(args[0])

    def before_forward(self, dry_run: Callable[[], Any], shape_of: Callable[[], Any]) -> None:
        """Clear what the layers will write.

        Args:
            dry_run: Runs the forward of the micro-batch without compiled code: hooks are not seen by code that was
                compiled before them, so the sizes of a compiled model are found by one such run per shape.
            shape_of: What tells micro-batches apart that give layers other sizes.
        """
        for layer in self._layers.values():
            layer.counts = []
            layer.clear()
        if self._compiled and self._layers:
            self._count_without_compiled_code(dry_run, shape_of())

    def _count_without_compiled_code(self, dry_run: Callable[[], Any], shape: Any) -> None:
        if shape not in self._counts_by_shape:
            undo = Undo(self._model)
            undo.take(next(self._model.parameters()).device)
            self._listen()
            try:
                with torch.no_grad(), without_compiled_code(self._model):
                    dry_run()
            finally:
                self._stop_listening()
                undo.restore()
            self._counts_by_shape[shape] = {module: layer.counts for module, layer in self._layers.items()}
            for layer in self._layers.values():
                layer.clear()
        for module, layer in self._layers.items():
            layer.counts = list(self._counts_by_shape[shape][module])
            if len(layer.counts) > 1:
                raise OptionError(
                    f"A {type(module).__name__} is called {len(layer.counts)} times in one forward of a compiled "
                    'model, whose statistics cannot be told apart. Give batch_norm="native" or "frozen", or do not '
                    "compile it."
                )

    def after_forward(self) -> None:
        """Merge what the layers wrote."""
        for layer in self._layers.values():
            if layer.counts:
                layer.read()

    @property
    def statistics(self) -> list[float]:
        """What of this rank is merged with that of others: for each layer its calls, then the numbers of each call."""
        numbers: list[float] = []
        for layer in self._layers.values():
            numbers.append(len(layer.merged))
            for call in layer.merged:
                both = torch.cat([call.mean.flatten(), call.squares.flatten()])
                numbers += [call.count, *both.double().tolist()]
        return numbers

    def merge(self, rows: list[list[float]]) -> None:
        """Take the statistics of all ranks, by rank, in the place of one's own; a row of zeros is that of no sample."""
        sources = [iter(row) for row in rows]
        for layer in self._layers.values():
            like = layer.module.running_mean.to(at_least_float32(layer.module.running_mean.dtype))
            layer.merged = []
            for source in sources:
                for call in range(int(next(source, 0.0))):
                    count = next(source)
                    numbers = like.new_tensor([next(source) for _ in range(2 * like.numel())])
                    mean, squares = numbers.view(2, *like.shape)
                    if call == len(layer.merged):
                        layer.merged.append(Merged(count, mean.clone(), squares.clone()))
                    else:
                        layer.merged[call].add(count, mean, squares, pools_samples=layer.pools_samples)

    def commit(self) -> None:
        """Update the running statistics once for each call of a layer in the forward of the big batch."""
        self._finish(_Layer.commit)

    def restore(self) -> None:
        """Put the running statistics back as they were."""
        self._finish(_Layer.restore)

    def _finish(self, finish: Callable[[_Layer], None]) -> None:
        self._stop_listening()
        for layer in self._layers.values():
            finish(layer)
        self._layers = {}

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _values_per_channel(x: torch.Tensor) -> int:
    return x.numel() // x.shape[1]


def _num_instances(module: Any, x: torch.Tensor) -> int:
    return 1 if x.dim() == module._get_no_batch_dim() else x.shape[0]
