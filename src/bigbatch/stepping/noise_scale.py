r"""The gradient noise scale: how large a batch still pays, from the micro-batches of the steps that are made anyway.

With $B$ samples cut into $K$ micro-batches of $b_i$, let $c_i$ be what micro-batch $i$ adds to the gradient
$g = \sum_i c_i$. A sample's gradient has mean $G$ and covariance $\Sigma$, so $E|c_i|^2 = (b_i/B)^2 (|G|^2 +
\mathrm{tr}\Sigma / b_i)$, and

$$ S = \frac{B}{K - 1} \Big( \sum_i \frac{B}{b_i} |c_i|^2 - |g|^2 \Big), \qquad N = |g|^2 - \frac{S}{B} $$

are unbiased for $\mathrm{tr}\Sigma$ and $|G|^2$, for any sizes. (The usual formula has one small and one large batch,
and is wrong by a factor when the sizes differ and it is given their mean.) The noise scale is $S / N$: at a batch of so
many samples, noise and signal in the gradient are equally large. A ratio of averages is not the average of ratios, so
the two are averaged over steps one by one. Source: McCandlish, Kaplan, Amodei (2018), https://arxiv.org/abs/1812.06162.

With several ranks the micro-batches are those of all: each rank adds up its own $|c_i|^2 / b_i$, these are summed, and
$g$ is the reduced gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bigbatch.errors import DistributedError, LossError, OptionError
from bigbatch.stepping.checks import parameters_of
from bigbatch.stepping.norms import total_norm

if TYPE_CHECKING:
    from bigbatch.stepping.after_backward import Accumulation
    from bigbatch.stepping.micro_batch_loop import Accumulator

_log = logging.getLogger("bigbatch")

# Steps over which is averaged: the noise scale grows by and by as the loss falls. The first ones count alike.
_STEPS = 100


class Contributions:
    """Squared norms of what each micro-batch adds to the gradient, within a block; no gradient is kept or copied.

    A hook on each parameter sees the gradient of the backward that runs, before it is added to ``.grad``.

    Args:
        parameters: Whose gradients count.
        sizes: Of the micro-batches so far; grows while they run.

    Attributes:
        is_complete: All micro-batches of the step are seen: none was kept from an attempt that ran out of memory.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], sizes: list[int]):
        self._parameters = [p for p in parameters if p.requires_grad]
        self._sizes = sizes
        self.is_complete = not sizes
        self._current = 0
        self._norms: list[torch.Tensor] = []
        self._squares: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Contributions:
        self._handles = [p.register_hook(self._note) for p in self._parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, gradient: torch.Tensor) -> None:
        if len(self._sizes) != self._current:
            self._close()
        entries = gradient.coalesce()._values() if gradient.is_sparse else gradient
        self._norms.append(torch.linalg.vector_norm(entries.detach(), dtype=torch.promote_types(entries.dtype, _WIDE)))

    def _close(self) -> None:
        """One number for each micro-batch: those of its parameters are added up when it is over."""
        if self._norms:
            self._squares[self._current] = total_norm(self._norms, self._norms[0].device).double().square()
        self._norms, self._current = [], len(self._sizes)

    def weighted_sum(self, device: torch.device) -> torch.Tensor:
        r"""$\sum_i |c_i|^2 / b_i$, float64, shape ``()``; micro-batches without a gradient add nothing."""
        self._close()
        found = [squares.to(device) / self._sizes[k - 1] for k, squares in self._squares.items() if k]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


_WIDE = torch.float32


class _Seen(NamedTuple):
    """The micro-batches of a step, over all ranks.

    Attributes:
        num_samples, num_micro_batches: In it.
        parts: What ``Contributions.weighted_sum`` gives, of the unscaled gradient.
        is_known: Whether the size of each is known.
    """

    num_samples: int
    num_micro_batches: int
    parts: torch.Tensor
    is_known: bool


class _Averages(NamedTuple):
    """Over steps: of the noise, the trace of the covariance of one sample's gradient, and of the squared signal."""

    noise: torch.Tensor | float = 0.0
    signal: torch.Tensor | float = 0.0
    num_steps: int = 0

    def with_step(self, noise: torch.Tensor, signal: torch.Tensor) -> _Averages:
        share = 1 / min(self.num_steps + 1, _STEPS)
        return _Averages(
            self.noise + (noise - self.noise) * share, self.signal + (signal - self.signal) * share, self.num_steps + 1
        )

    @property
    def ratio(self) -> torch.Tensor:
        """Infinite where the signal is lost in the noise: then all that is known is that the batch is too small."""
        noise, signal = torch.as_tensor(self.noise).clamp(min=0.0), torch.as_tensor(self.signal)
        return torch.where(signal > 0, noise / signal, torch.inf)


class NoiseScale:
    """Noise and signal in the gradients of the steps so far.

    Args:
        accumulator: Runs the micro-batches.
        optimizers: Whose parameters count.
        wanted: The option ``noise_scale``; without it nothing is measured.
    """

    def __init__(self, accumulator: Accumulator, optimizers: Sequence[torch.optim.Optimizer], *, wanted: bool):
        self._accumulator = accumulator
        self._wanted = wanted
        self._kept = self._pending = _Averages()
        self._is_too_few = self._said = False
        if wanted and accumulator.two_passes is not None:
            raise OptionError(
                "noise_scale=True measures how the gradients of samples differ, and of a WholeBatchLoss a sample alone "
                "has none. Leave noise_scale out."
            )
        if wanted:
            accumulator.listening = lambda sizes: Contributions(parameters_of(optimizers), sizes)

    def check_ranks(self) -> None:
        """Raise ``DistributedError`` where no rank sees the gradient of a micro-batch of its own."""
        ranks = self._accumulator.ranks
        if self._wanted and ranks.are_several and ranks.reducer.is_sharded:
            raise DistributedError(
                "noise_scale=True needs the gradient of each micro-batch, and FSDP2 sums those of all ranks before "
                "anybody sees them. Wrap the model in DistributedDataParallel, or leave noise_scale out."
            )

    @property
    def value(self) -> float | None:
        """Samples; None when no step was measured. Waits for the device."""
        return float(self._kept.ratio) if self._kept.num_steps else None

    def measure(self, done: Accumulation, norm: torch.Tensor) -> torch.Tensor | None:
        """The noise scale with a step that is about to be made; it counts when ``keep`` is called.

        Args:
            done: The micro-batches.
            norm: Of the gradient of all ranks: unscaled, and not clipped.

        Raises:
            LossError: The parts of this loss cannot be told apart.
        """
        if not self._wanted:
            return None
        self._pending = self._kept
        seen = self._over_ranks(self._seen(done, norm.device))
        self._is_too_few = seen.num_micro_batches < 2 or not seen.is_known
        if not self._is_too_few and done.contributions.is_complete:
            whole = norm.double().square()
            noise = (seen.num_samples * seen.parts - whole) * (seen.num_samples / (seen.num_micro_batches - 1))
            self._pending = self._kept.with_step(noise, whole - noise / seen.num_samples)
        return self._pending.ratio if self._pending.num_steps else None

    def _seen(self, done: Accumulation, device: torch.device) -> _Seen:
        """Of this rank."""
        sizes, shares = done.sizes, done.shares
        several = self._accumulator.ranks.are_several or len(sizes) > 1
        if several and (shares.num_backwards > 1 or shares.has_constants):
            raise LossError(_CANNOT_BE_TOLD_APART)
        parts, is_known = torch.zeros((), dtype=torch.float64, device=device), all(sizes)
        if is_known:
            factor: Any = shares.factor_of_contributions
            scaler = self._accumulator.precision.scaler
            if scaler is not None:
                factor = factor / scaler.scale(torch.ones((), device=device))
            parts = done.contributions.weighted_sum(device) * factor**2
        return _Seen(sum(sizes), len(sizes), parts, is_known)

    def _over_ranks(self, own: _Seen) -> _Seen:
        ranks = self._accumulator.ranks
        if not ranks.are_several:
            return own
        rows = ranks.tell([float(number) for number in own])
        num_samples, num_micro_batches, parts, num_known = (sum(column) for column in zip(*rows, strict=True))
        return _Seen(int(num_samples), int(num_micro_batches), own.parts.new_tensor(parts), num_known == len(rows))

    def keep(self) -> None:
        """The step that was measured last was made."""
        self._kept = self._pending
        if self._is_too_few and not self._said:
            self._said = True
            _log.warning(
                "noise_scale: a step of one micro-batch says nothing about noise; it takes two, of known sizes. Give a "
                "smaller micro_batch_size. Such steps are left out."
            )

    def state_dict(self) -> dict[str, Any] | None:
        """The averages; None when nothing is measured."""
        if not self._wanted:
            return None
        return {**self._kept._asdict(), "noise": float(self._kept.noise), "signal": float(self._kept.signal)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what ``state_dict`` gave."""
        if state is not None:
            self._kept = self._pending = _Averages(**state)


_CANNOT_BE_TOLD_APART = (
    "noise_scale=True needs the gradient of each micro-batch from one backward, and in equal parts by samples. This "
    "loss has several denominators that are known late, or a Constant, which counts in the first micro-batch alone. "
    "Give means with weight={term: ...} instead of several Ratios; put a penalty into the optimizer's weight_decay, or "
    "return bb.Sum(penalty * len(micro_batch) / batch_size). Or leave noise_scale out."
)
