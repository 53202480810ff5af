r"""BatchNorm over all micro-batches of a step: loss, gradient and running statistics of the big batch.

The forwards of the micro-batches run in lock-step. A layer takes the mean and the sum of squared differences of its
micro-batch, and waits for the others; those of the batch follow by Chan's formula,

$$ \mu = \sum_k \frac{n_k}{N} \mu_k, \qquad N \sigma^2 = \sum_k M_k + n_k (\mu_k - \mu)^2, $$

as operations that autograd sees. So all micro-batches are one graph, and one backward gives what the big batch gives.
Proof and measurements are those of the design notes on exactness; nothing of it is an approximation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bigbatch.errors import BatchError, LossError, OptionError, warn
from bigbatch.memory.offloading import Host, host_of
from bigbatch.memory.saved_on_host import Parcel, SavedOnHost
from bigbatch.memory.switching import computing, has_forward_of_its_own
from bigbatch.stepping.checks import check_one_process
from bigbatch.stepping.compiled import is_compiled
from bigbatch.stepping.normalization.batchnorm import (
    Merged,
    layers_of,
    update_running_statistics,
    uses_batch_statistics,
)
from bigbatch.stepping.normalization.lockstep import Lockstep, this_worker
from bigbatch.stepping.precision import at_least_float32
from bigbatch.units import format_names

_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class _Request(NamedTuple):
    """What a micro-batch brings to a layer: values per channel, their mean and squared differences, shape ``(C,)``."""

    layer: _BatchNorm
    num_values: int
    mean: torch.Tensor
    squares: torch.Tensor
    x: torch.Tensor


class _Call(NamedTuple):
    """One call of a layer by all micro-batches, without graphs: for running statistics, and to run it again."""

    merged: Merged
    variance: torch.Tensor
    means: torch.Tensor  # of the micro-batches, shape (K, C)


class PooledBatchNorm:
    """The BatchNorm layers of a model over all micro-batches of a step.

    Use: ``running`` around ``forwards`` and the backward, then ``commit`` or ``forget``.

    Args:
        model: Whose layers.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._layers = layers_of(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: dict[_BatchNorm, list[_Call]] = {}
        self._lockstep: Lockstep | None = None
        self._saved: SavedOnHost | None = None
        self._has_looked_for_state = False
        self.host: Host | None = None

    def is_needed(self) -> bool:
        """Whether some layer normalises by the batch it gets now."""
        return any(uses_batch_statistics(layer, "exact") for layer in self._layers)

    @property
    def failed(self) -> int | None:
        """Number of the micro-batch whose forward raised; None when it was another thing that did."""
        return self._lockstep.failed if self._lockstep else None

    @property
    def is_forward(self) -> bool:
        """Whether forwards are running, and not backward."""
        return self._lockstep is not None and self._lockstep.is_running

    @contextlib.contextmanager
    def running(self, device: torch.device, batch: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within the block the layers meet.

        Args:
            device: Of the model.
            batch: The tensors of the micro-batches.

        Raises:
            OptionError: Some layer cannot; the message says which and why.
        """
        layers = [layer for layer in self._layers if uses_batch_statistics(layer, "exact")]
        self._check(layers)
        self._calls, self.host = {}, host_of(device)
        if self.host is not None:
            stay = [*self._model.parameters(), *self._model.buffers(), *batch]
            self._saved = SavedOnHost(self.host, stay)
        self._lockstep = Lockstep(device, self, depth_first=self.host is not None)
        try:
            with contextlib.ExitStack() as stack:
                for layer in layers:
                    stack.enter_context(computing(layer, partial(_forward, self)))
                yield
        finally:
            self._saved = self._lockstep = None

    def forwards(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the forwards of all micro-batches return; they run side by side.

        Raises:
            LossError: They came to different layers.
        """
        assert self._lockstep is not None
        before = self._has_looked_for_state or _activations_on(self._model)
        found = self._lockstep.run([partial(self._listened, function) for function in functions])
        if before is not True:
            self._has_looked_for_state = True
            _warn_of_state(_activations_on(self._model) - before)
        return found

    def _listened(self, function: Callable[[], Any]) -> Any:
        with self._saved.listening() if self._saved else contextlib.nullcontext():
            return function()

    def commit(self) -> None:
        """The step counts: update running statistics once for each call of a layer, as the big batch would."""
        calls, self._calls = self._calls, {}
        for layer, of_layer in calls.items():
            if layer.training and layer.track_running_stats and layer.running_mean is not None:
                for call in of_layer:
                    update_running_statistics(layer, call.merged)

    def forget(self) -> None:
        """The step does not count."""
        self._calls = {}

    def meet(self, requests: list[_Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the whole batch, of what the micro-batches have brought."""
        layer, total = requests[0].layer, sum(request.num_values for request in requests)
        if any(request.layer is not layer for request in requests):
            raise self.differ(dict(enumerate(requests)))
        if total == 1:
            raise BatchError(
                f"The BatchNorm layer {self._names[layer]!r} got one value per channel in the whole batch, which has "
                f'no variance. Give a batch of at least 2 samples, or batch_norm="frozen".'
            )
        means = torch.stack([request.mean for request in requests])
        counts = torch.tensor([[request.num_values] for request in requests], dtype=means.dtype, device=means.device)
        near = means[0].detach()  # differences from it keep the digits that products with a large mean would lose
        mean = near + ((means - near) * (counts / total)).sum(0)
        between = counts * (means - mean).square()
        squares = (torch.stack([request.squares for request in requests]) + between).sum(0)
        variance = squares / total
        merged = Merged(total, mean.detach(), squares.detach())
        self._calls.setdefault(layer, []).append(_Call(merged, variance.detach(), means.detach()))
        return mean, variance

    def differ(self, found: dict[int, _Request | None]) -> Exception:
        """The error of micro-batches that came to different layers, or to the end of the forward."""
        (first, there), *others = found.items()
        where = there and there.layer
        other, here = next((n, r) for n, r in others if (r and r.layer) is not where)
        return LossError(
            f"Micro-batch {first + 1} came to {self._place(there)} when micro-batch {other + 1} came to "
            f'{self._place(here)}. With batch_norm="exact" all of them go through the same BatchNorm layers in the '
            f"same order. Where the path depends on samples or on chance (early exit, layer drop), give "
            f'batch_norm="merge" or "frozen".'
        )

    def _place(self, request: _Request | None) -> str:
        return "the end of its forward" if request is None else f"the layer {self._names[request.layer]!r}"

    def pause(self, request: _Request) -> Any:
        """Free what the paused forward holds and the host has."""
        return self._saved.give_up(request.x) if self._saved else None

    def go_on(self, paused: Any) -> None:
        """Give it back."""
        for returned in paused or ():
            returned.come_back()

    def recorded(self, layer: _BatchNorm, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the whole batch, for a call that is made again inside backward.

        Args:
            mean: Of the micro-batch. It tells the calls apart where there were several, because what is recomputed is
                a part of the forward, and may begin with any of them.

        Raises:
            LossError: It is that of several calls, whose batches are not the same.
        """
        calls = self._calls[layer]
        call = calls[0]
        if len(calls) > 1:
            distances = [float((call.means - mean).abs().amax(1).min()) for call in calls]
            call, *others = [call for call, far in zip(calls, distances, strict=True) if far == min(distances)]
            if any(not torch.equal(call.merged.mean, other.merged.mean) for other in others):
                raise LossError(
                    f"The layer {self._names[layer]!r} is called several times and recomputed in backward, and in two "
                    f"of its calls a micro-batch brought the same input, so they cannot be told apart. Do not "
                    f'recompute what calls it, or give batch_norm="merge".'
                )
        return call.merged.mean, call.variance

    def _check(self, layers: Sequence[_BatchNorm]) -> None:
        check_ranks()
        own = [
            self._names[layer]
            for layer in layers
            if type(layer).forward not in _FORWARDS or has_forward_of_its_own(layer)
        ]
        if own:
            raise OptionError(
                f'batch_norm="exact" takes the place of the forward of BatchNorm, but {format_names(own)} '
                f"{'has' if len(own) == 1 else 'have'} a forward of "
                f'{"its" if len(own) == 1 else "their"} own. Take torch\'s layer, or give batch_norm="merge".'
            )
        if is_compiled(self._model):
            raise OptionError(
                'batch_norm="exact" stops inside the layers, where compiled code cannot. Do not compile this model, or '
                'give batch_norm="merge".'
            )
        for module in self._model.modules():
            if isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
                raise OptionError(
                    f'batch_norm="exact" does not merge the running statistics of {type(module).__name__} layers, and '
                    f"{self._names[module]!r} has some. Make it with track_running_stats=False, or give "
                    f'batch_norm="merge".'
                )


def check_ranks() -> None:
    """Raise ``DistributedError`` in a process group of several ranks: their statistics are not joined."""
    check_one_process('batch_norm="exact"', 'statistics of ranks are not joined yet (batch_norm="merge" merges them)')


class _Gradient:
    """The part of the gradient of a layer's input that is there first, until the other part is.

    In between, the layers of all micro-batches meet, so there are as many of these as micro-batches: they wait on the
    host. Autograd would keep them on the device.
    """

    def __init__(self, host: Host | None):
        self._host = host
        self._kept: torch.Tensor | Parcel | None = None

    def put(self, gradient: torch.Tensor) -> None:
        self._kept = gradient if self._host is None else Parcel(gradient, self._host)

    def take(self) -> torch.Tensor | None:
        kept, self._kept = self._kept, None
        return kept.get() if isinstance(kept, Parcel) else kept


def _forward(pooled: PooledBatchNorm, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer computes in lock-step, and when backward runs it again."""
    worker = this_worker()
    if worker is None and torch._C._current_graph_task_id() == -1:
        return type(layer).forward(layer, x)  # called by somebody else meanwhile
    layer._check_input_dim(x)
    gradient = _Gradient(pooled.host)
    mean, squares = _Statistics.apply(x, gradient)  # pyright: ignore[reportGeneralTypeIssues]
    if worker is None:
        mean, variance = pooled.recorded(layer, mean.detach())
    else:
        mean, variance = worker.meet(_Request(layer, x.numel() // x.shape[1], mean, squares, x))
    normalise: Any = _Normalise.apply
    return normalise(x, mean, variance, layer.weight, layer.bias, layer.eps, gradient, pooled)


class _Statistics(torch.autograd.Function):
    """Mean and sum of squared differences per channel, by torch's own kernel (Welford), in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: _Gradient) -> Any:
        # The dtype of the result is that of the running statistics it is given.
        unused = [x.new_zeros(x.shape[1], dtype=at_least_float32(x.dtype)) for _ in range(2)]
        mean, variance = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0) if x.numel() else unused
        ctx.save_for_backward(x, mean)
        ctx.gradient, ctx.count = gradient, x.numel() // x.shape[1]
        ctx.set_materialize_grads(False)
        return mean, variance * ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor | None, of_squares: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean = ctx.saved_tensors
        direct = ctx.gradient.take()
        if of_mean is None and of_squares is None:
            return direct, None
        shift = mean.new_zeros(mean.shape) if of_mean is None else of_mean / ctx.count
        slope = mean.new_zeros(mean.shape) if of_squares is None else 2 * of_squares
        if x.dtype == mean.dtype and x.numel():  # slope * (x - mean) + shift in one pass; without a gradient here
            found = torch.native_batch_norm(x, slope, shift, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
        else:
            found = (x - _per_channel(mean, x)).mul_(_per_channel(slope, x)).add_(_per_channel(shift, x))
        return (found if direct is None else found.add_(direct)).to(x.dtype), None


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, by torch's kernels for layers in eval mode."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        gradient: _Gradient,
        pooled: PooledBatchNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, mean, variance, weight)
        ctx.eps, ctx.gradient, ctx.pooled = eps, gradient, pooled
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide = None if bias is None else bias.to(mean.dtype)
        return torch.native_batch_norm(x, _wide(weight, mean), wide, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.pooled.is_forward:
            raise LossError(
                "The loss runs a backward through BatchNorm in its forward (torch.autograd.grad, a gradient penalty). "
                'With batch_norm="exact" the other micro-batches are not there yet, and their part would be missing. '
                'Give batch_norm="merge" or "frozen".'
            )
        x, mean, variance, weight = ctx.saved_tensors
        wide, needed = _wide(weight, mean), ctx.needs_input_grad
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, wide, mean, variance, None, None, False, ctx.eps, [needed[0], True, True]
        )
        if needed[0]:
            ctx.gradient.put(of_x)
        inverse = (variance + ctx.eps).rsqrt()
        of_mean, of_variance = -of_bias * wide * inverse, -0.5 * of_weight * wide * inverse.square()
        of_weight = of_weight.to(weight.dtype) if needed[3] else None
        of_bias = of_bias.to(ctx.bias_dtype) if needed[4] else None
        # That of x is handed to _Statistics, which adds its own.
        return None, of_mean, of_variance, of_weight, of_bias, None, None, None


def _wide(weight: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(mean) if weight is None else weight.to(mean.dtype)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _activations_on(model: nn.Module) -> set[tuple[str, str, int]]:
    """Tensors with a graph that modules keep as attributes: by module, attribute and identity."""
    return {
        (name, attribute, id(value))
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }


def _warn_of_state(found: set[tuple[str, str, int]]) -> None:
    if found:
        name, attribute, _ = min(found)
        warn(
            f'The module {name!r} keeps an activation in its attribute {attribute!r}. With batch_norm="exact" the '
            f"forwards of the micro-batches take turns at each BatchNorm layer, so a later layer that reads it may get "
            f"that of another micro-batch. Hand it on as an argument; if it is only looked at, all is well."
        )
