"""What ``noise_scale=True`` finds where the answer is known, and what it costs.

``python benchmarks/noise_scale.py`` prints two tables; docs/noise-scale.md says what is in them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import bigbatch as bb

NUM_PARAMETERS, TRACE, KNOWN = 200, 112.0, 136.0
CUTS = ((32, 32, 32, 32), (30, 30, 30, 6), (32, 32, 32, 1))


class Linear(nn.Module):
    """The mean of ``z @ weight``: the gradient of a sample is its ``z``, whose covariance is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_PARAMETERS, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.weight


def samples(num_samples: int) -> Tensor:
    """Gradients with a known covariance, and a noise scale of 136."""
    deviations = torch.linspace(0.2, 1.0, NUM_PARAMETERS, dtype=torch.float64)
    deviations *= (TRACE / deviations.square().sum()).sqrt()
    true = math.sqrt(TRACE / KNOWN / NUM_PARAMETERS)
    return true + torch.randn(num_samples, NUM_PARAMETERS, dtype=torch.float64) * deviations


def for_equal_sizes(batches: Sequence[Sequence[Tensor]]) -> float:
    """The usual formula, for a small and a large batch."""
    noise = signal = 0.0
    for parts in batches:
        size = sum(map(len, parts))
        small = sum(float(part.mean(0).square().sum()) for part in parts) / len(parts)
        large = float(torch.cat(list(parts)).mean(0).square().sum())
        one = (small - large) / (len(parts) / size - 1 / size)
        noise, signal = noise + one, signal + large - one / size
    return noise / signal


def accuracy(num_seeds: int, num_steps: int) -> None:
    """Print how far off the noise scale is, by cut and seed."""
    print(f"noise scale {KNOWN:.0f}, {num_steps} steps, {num_seeds} seeds: error in per cent (mean, largest)")
    for sizes in CUTS:
        ours, usual = [], []
        for seed in range(num_seeds):
            torch.manual_seed(seed)
            model = Linear()
            step = bb.Step(
                model, lambda m, z: m(z).mean(), torch.optim.SGD(model.parameters(), lr=0.0), noise_scale=True
            )
            batches = [samples(sum(sizes)).split(list(sizes)) for _ in range(num_steps)]
            for parts in batches:
                step(bb.LogicalBatch(list(parts)))
            ours.append((step.noise_scale.value or 0.0) / KNOWN - 1)
            usual.append(for_equal_sizes(batches) / KNOWN - 1)
        cut = ", ".join(map(str, sizes))
        print(f"  {cut:16}  ours {_text(ours)}   formula for equal sizes {_text(usual)}")


def _text(errors: Sequence[float]) -> str:
    return f"{statistics.mean(errors):+7.1%} {max(map(abs, errors)):7.1%}"


def cost(rows: Sequence[int], num_pairs: int) -> None:
    """Print the time of a step that measures over that of one that does not, pair by pair."""
    print(f"time of a step of 4 micro-batches with over without, median of {num_pairs} pairs in turns")
    for num_rows in rows:
        steps = [_network_step(num_rows, noise_scale=noise_scale) for noise_scale in (False, True)]
        batch = torch.randn(4 * num_rows, 256), torch.randint(0, 10, (4 * num_rows,))
        for step in steps:
            step(batch)
        ratios = [_seconds(steps[1], batch) / _seconds(steps[0], batch) for _ in range(num_pairs)]
        print(f"  {num_rows:5} rows in a micro-batch: {statistics.median(ratios):.3f}")


def _network_step(num_rows: int, *, noise_scale: bool) -> bb.Step:
    torch.manual_seed(0)
    widths = (256, 1024, 1024, 1024, 10)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return bb.Step(model, loss_fn, optimizer, micro_batch_size=num_rows, noise_scale=noise_scale)


def _seconds(step: Callable[[object], object], batch: object) -> float:
    start = time.process_time()
    step(batch)
    return time.process_time() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 512, 2048])
    parser.add_argument("--pairs", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    accuracy(given.seeds, given.steps)
    cost(given.rows, given.pairs)
