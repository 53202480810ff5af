r"""BatchNorm over micro-batches as operations that autograd sees.

A call of a layer is made of three: ``Statistics`` of each micro-batch, ``Pool`` once for all of them, ``Normalise`` of
each. With $g$ the gradient of the output, $\hat x$ the normalised input and $N$ the values per channel of the whole
batch, the gradient of the input is

$$ \frac{w}{\sigma} \Bigl( g - \frac1N \sum g - \frac{\hat x}{N} \sum g \hat x \Bigr), $$

with sums over the whole batch. So backward mirrors forward: ``Normalise`` takes the two sums of its micro-batch,
``Pool`` makes of those of all what they have in common, and ``Statistics`` the gradient. What goes backward between
them is these sums and factors, and not the gradients of mean and variance; so nothing else may stand between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.memory.offloading import Host
from bigbatch.memory.saved_on_host import Parcel
from bigbatch.stepping.distributed.meetings import Meetings
from bigbatch.stepping.normalization.batchnorm import Merged
from bigbatch.stepping.precision import at_least_float32


class Call:
    r"""One call of a layer by all micro-batches, without graphs.

    Args:
        layer: Which.
        counts: Values per channel, by micro-batch.
        place: Number of the layer.
        meetings: With other ranks; None: there are none.

    Attributes:
        total: Values per channel, of the whole batch.
        places: Where the ranks are, by rank; they must be the same.
        has_graph: Some micro-batch needs a gradient.
        means: Of the micro-batches, shape ``(K, C)``.
        mean, variance: Of the whole batch, shape ``(C,)``.
        scale: $w / \sigma$, shape ``(C,)``.
        merged: The same for running statistics.
    """

    means: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor
    scale: torch.Tensor
    merged: Merged

    def __init__(self, layer: _BatchNorm, counts: Sequence[int], place: int = 0, meetings: Meetings | None = None):
        self.counts = counts
        self.place, self.meetings = place, meetings
        self.places = [place]
        self.has_graph = False
        self.total = sum(counts)
        self.eps = layer.eps
        self.weight: torch.Tensor | None = None if layer.weight is None else layer.weight.detach()
        self.bias: torch.Tensor | None = None if layer.bias is None else layer.bias.detach()

    def pool(self, means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of the whole batch; see ``pooled``."""
        mean, variance = pooled(self.counts, means, variances)
        if self.meetings is not None:
            said, rows = self.meetings.gather(self.place, self.total, torch.stack((mean, variance)))
            self.places, counts = [int(row[0]) for row in said], [int(row[1]) for row in said]
            self.total = sum(counts)
            mean, variance = pooled(counts, rows[:, 0], rows[:, 1])
        self.means, self.mean, self.variance = means, mean.detach(), variance.detach()
        self.merged = Merged(self.total, self.mean, self.variance * self.total)
        self.weight, self.bias = _like(self.weight, mean), _like(self.bias, mean)
        inverse = (variance + self.eps).rsqrt()
        self.scale = inverse if self.weight is None else inverse * self.weight
        return mean, variance


def pooled(counts: Sequence[int], means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Mean and variance of all values together, by Chan's formula: $N \sigma^2 = \sum_k n_k (v_k + (\mu_k - \mu)^2)$.

    Args:
        counts: Values per channel of each part.
        means: Of the parts, shape ``(K, C)``.
        variances: Of the parts, biased, shape ``(K, C)``.
    """
    total = sum(counts)
    if not total:
        return torch.zeros_like(means[0]), torch.zeros_like(means[0])
    near = means[counts.index(max(counts))]
    if len(set(counts)) == 1:
        # Differences from one of them keep the digits that products with a large mean would lose.
        mean = near + (means - near).mean(0)
        return mean, (variances + (means - mean).square()).mean(0)
    shares = means.new_tensor(counts).div_(total).unsqueeze(1)
    mean = near + ((means - near) * shares).sum(0)
    return mean, ((variances + (means - mean).square()) * shares).sum(0)


class Part:
    """What a micro-batch keeps of a call from one of its operations to the next.

    In backward the gradient of its output is there first, until the layers of all micro-batches have met; so there are
    as many of these as micro-batches, and they wait on the host. Autograd would keep them on the device.

    Args:
        host: Where to; None: they stay.

    Attributes:
        call: Set when the micro-batches have met.
    """

    call: Call

    def __init__(self, host: Host | None):
        self._host = host
        self._kept: torch.Tensor | Parcel | None = None

    def put(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of the output."""
        self._kept = gradient if self._host is None else Parcel(_dense(gradient), self._host)

    def take(self) -> torch.Tensor | None:
        """It, once."""
        kept, self._kept = self._kept, None
        return kept.get() if isinstance(kept, Parcel) else kept


class Statistics(torch.autograd.Function):
    """Mean and variance per channel, biased, by torch's own kernel (Welford), in float32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Part) -> Any:
        """Two tensors of shape ``(C,)``."""
        ctx.save_for_backward(x)
        ctx.part = part
        ctx.set_materialize_grads(False)
        wide = at_least_float32(x.dtype)
        if not x.numel():
            return x.new_zeros(x.shape[1], dtype=wide), x.new_zeros(x.shape[1], dtype=wide)
        # The dtype of the result is that of the running statistics it is given.
        unused = [None if wide == x.dtype else x.new_zeros(x.shape[1], dtype=wide) for _ in range(2)]
        return torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, shift: torch.Tensor | None, slope: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """``scale * gradient + slope * normalised + shift``."""
        (x,), part = ctx.saved_tensors, ctx.part
        call, gradient = part.call, part.take()
        if shift is None or slope is None:
            return None if gradient is None else (gradient * _per_channel(call.scale, x)).to(x.dtype), None
        if x.dtype == shift.dtype and x.numel():  # in one pass
            found = torch.native_batch_norm(x, slope, shift, call.mean, call.variance, False, 0.0, call.eps)[0]
        else:
            steepness = torch.mul(slope, (call.variance + call.eps).rsqrt())
            found = (x - _per_channel(call.mean, x)).mul_(_per_channel(steepness, x)).add_(_per_channel(shift, x))
        if gradient is not None:
            found.addcmul_(gradient, _per_channel(call.scale, x))
        return found.to(x.dtype), None


class Pool(torch.autograd.Function):
    """Mean and variance of the whole batch, of those of its micro-batches."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        token: torch.Tensor | None,
        *statistics: torch.Tensor,
    ) -> Any:
        """Two tensors of shape ``(C,)``, and the next token.

        Args:
            token: Of the meeting of ranks before this one.
            statistics: All means, then all variances.
        """
        half = len(statistics) // 2
        ctx.save_for_backward(weight, bias)
        ctx.call, ctx.half = call, half
        ctx.set_materialize_grads(False)
        mean, variance = call.pool(torch.stack(statistics[:half]), torch.stack(statistics[half:]))
        return mean, variance, None if token is None else token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_bias: Any, of_weight: Any, of_token: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of the sums over all micro-batches, the gradients of weight and bias, and the factors for ``Statistics``."""
        (weight, bias), call, needed = ctx.saved_tensors, ctx.call, ctx.needs_input_grad
        of_all = (of_bias, of_weight)
        if call.meetings is not None:  # also when nothing of this rank needs it: the others do
            of_all = tuple(call.meetings.sum_up(of_all))
        shift, slope = [None if one is None else call.scale * one / -call.total for one in of_all]
        return (
            None,
            of_weight.to(weight.dtype) if needed[1] and of_weight is not None else None,
            of_bias.to(bias.dtype) if needed[2] and of_bias is not None else None,
            of_token,
            *[shift] * ctx.half,
            *[slope] * ctx.half,
        )


class Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, by torch's kernels for layers in eval mode.

    Its gradient of ``x`` is left to ``Statistics``, which has the rest of it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, part: Part, check: Any) -> Any:
        """Shape and dtype of ``x``; ``check`` is called before backward."""
        ctx.save_for_backward(x)
        ctx.part, ctx.check = part, check
        call = part.call
        return torch.native_batch_norm(x, call.weight, call.bias, mean, variance, False, 0.0, call.eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The sums of the gradient, and of it times the normalised input."""
        ctx.check()
        (x,), call = ctx.saved_tensors, ctx.part.call
        if ctx.needs_input_grad[0]:
            ctx.part.put(gradient)
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, call.weight, call.mean, call.variance, None, None, False, call.eps, [False, True, True]
        )
        return None, of_bias, of_weight, None, None


def _like(values: torch.Tensor | None, mean: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values.to(mean.dtype)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Without a dimension that is there once in memory, such as the gradient of a mean."""
    return gradient.contiguous() if 0 in gradient.stride() else gradient
