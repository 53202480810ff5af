"""What the policies for BatchNorm give and cost: docs/batch-norm.md is what this writes.

    python -m benchmarks.batch_norm accuracy            # digits, K = 1, 4, 16, 64, three seeds: a few minutes
    python -m benchmarks.batch_norm cost                # bytes and traffic as N grows from 16 to 256
    python -m benchmarks.batch_norm time                # seconds beside naive accumulation
    python -m benchmarks.batch_norm accuracy cost time --write docs/batch-norm.md

Everything runs in one process on one thread, on a CPU. Bytes are counted, not read from an allocator: every live tensor
storage but those of model and batch, less what lies in a store of its own that stands for host memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bigbatch as bb
from bigbatch.memory.measure import LiveBytes
from bigbatch.memory.offloading import MeteredHost, pretend_host

Batch = tuple[Tensor, Tensor]

BATCH_SIZE, NUM_STEPS, SEEDS = 64, 80, (0, 1, 2)
PIECES = (1, 4, 16, 64)
POLICIES = ("native", "merge", "exact", "frozen")


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


# Accuracy and running statistics.


class Data(NamedTuple):
    """Images of 8 x 8 and their digits, to train and to test."""

    train: Batch
    test: Batch


def digits(noise: float) -> Data:
    """The digits of scikit-learn; with noise, each image also has a brightness and a contrast of its own."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.as_tensor(found.images, dtype=torch.float64).unsqueeze(1) / 16
    y = torch.as_tensor(found.target)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    if noise:
        contrast, brightness = torch.rand(2, len(x), 1, 1, 1, generator=generator, dtype=torch.float64)
        x = x * (0.5 + contrast) + brightness
        x = x + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return Data((x[:1400], y[:1400]), (x[1400:], y[1400:]))


def small_cnn() -> nn.Sequential:
    """Four BatchNorm layers, float64."""
    layers: list[nn.Module] = []
    for num_in, num_out, stride in ((1, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1)):
        layers += [nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).double()


class Trained(NamedTuple):
    """What a run came to.

    Attributes:
        accuracy: On the test images, with running statistics.
        statistics_error: Relative distance of the running variances from those of the training images.
        weights: All of them, as one vector.
    """

    accuracy: float
    statistics_error: float
    weights: Tensor


def train(data: Data, policy: str, num_pieces: int, seed: int) -> Trained:
    """Train a model whose steps have ``num_pieces`` micro-batches."""
    torch.manual_seed(seed)
    model = small_cnn()
    step = bb.Step(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        micro_batch_size=BATCH_SIZE // num_pieces,
        batch_norm=policy,
    )
    generator = torch.Generator().manual_seed(seed)
    x, y = data.train
    for _ in range(NUM_STEPS):
        chosen = torch.randperm(len(x), generator=generator)[:BATCH_SIZE]
        step((x[chosen], y[chosen]))
    error = _statistics_error(model, x)
    with torch.no_grad():
        right = model.eval()(data.test[0]).argmax(1) == data.test[1]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return Trained(float(right.double().mean()), error, weights)


def _statistics_error(model: nn.Module, x: Tensor) -> float:
    """Of the running variances, against those that the layers see when all images come at once."""
    there = copy.deepcopy(model)
    for layer in (m for m in there.modules() if isinstance(m, nn.BatchNorm2d)):
        layer.momentum = 1.0
    with torch.no_grad():
        there.train()(x)
    pairs = [
        (float((layer.running_var - true.running_var).norm()), float(true.running_var.norm()))
        for layer, true in zip(model.modules(), there.modules(), strict=True)
        if isinstance(layer, nn.BatchNorm2d)
    ]
    return statistics.mean(difference / norm for difference, norm in pairs)


def accuracy_table() -> list[str]:
    """Rows of a table: accuracy, error of the running statistics, distance from the weights of the big batch."""
    rows = [
        "| images | micro-batches (of) | policy | accuracy, % | running variances off by | weights off by |",
        "|---|---|---|---|---|---|",
    ]
    for name, noise in (("digits", 0.0), ("noisy digits", 0.5)):
        data = digits(noise)
        big = [train(data, "native", 1, seed) for seed in SEEDS]
        for num_pieces in PIECES:
            for policy in POLICIES:
                if num_pieces == 1 and policy in ("merge", "exact"):
                    continue  # one micro-batch is the big batch
                runs = big if (num_pieces, policy) == (1, "native") else None
                runs = runs or [train(data, policy, num_pieces, seed) for seed in SEEDS]
                named = policy if num_pieces > 1 or policy == "frozen" else "any"
                rows.append(_row(name, num_pieces, named, runs, big))
                print(rows[-1], flush=True)
    return rows


def _row(name: str, num_pieces: int, policy: str, runs: list[Trained], big: list[Trained]) -> str:
    percent = [100 * run.accuracy for run in runs]
    distance = max(
        float((run.weights - one.weights).norm() / one.weights.norm()) for run, one in zip(runs, big, strict=True)
    )
    error = statistics.mean(run.statistics_error for run in runs)
    return (
        f"| {name} | {num_pieces} ({BATCH_SIZE // num_pieces}) | {policy} | {statistics.mean(percent):.1f} "
        f"± {statistics.stdev(percent):.1f} | {100 * error:.0f} % | {distance:.1e} |"
    )


# Bytes and traffic.


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


def resnet(width: int) -> nn.Sequential:
    """Fifteen BatchNorm layers."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    blocks = [Block(width) for _ in range(7)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def images(num_samples: int) -> Batch:
    """Noise with a drift, 16 x 16."""
    drift = torch.linspace(-1, 1, num_samples).view(-1, 1, 1, 1)
    return torch.randn(num_samples, 3, 16, 16) + drift, torch.randint(10, (num_samples,))


def activation_bytes(num_samples: int, micro_batch_size: int | None, policy: str, host: MeteredHost | None) -> int:
    """The most bytes of a forward and backward beyond model and batch."""
    torch.manual_seed(0)
    model, batch = resnet(16), images(num_samples)
    live = LiveBytes()
    live.track(model, batch)
    resident = live.current_bytes()
    with pretend_host(host) if host else contextlib.nullcontext(), live:
        bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size, batch_norm=policy)
    return live.peak_bytes() - resident


def cost_table() -> list[str]:
    """Rows of a table: bytes on the device and on the host, and the traffic, by the size of the batch."""
    rows = [
        "| N | big batch | one micro-batch of 8 | exact, device | / big batch | / micro-batch | host | traffic |",
        "|---|---|---|---|---|---|---|---|",
    ]
    one = activation_bytes(8, None, "native", None)
    for num_samples in (16, 32, 64, 128, 256):
        host = MeteredHost()
        big = activation_bytes(num_samples, None, "native", None)
        found = activation_bytes(num_samples, 8, "exact", host)
        rows.append(
            f"| {num_samples} | {_mib(big)} | {_mib(one)} | {_mib(found)} | {found / big:.3f} | {found / one:.2f} "
            f"| {_mib(host.most_bytes)} | {_mib(host.moved_bytes)} |"
        )
        print(rows[-1], flush=True)
    return rows


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


# Time.


def time_table(rounds: int = 7) -> list[str]:
    """Rows of a table: how much longer than naive accumulation, processor time, in turns in one process."""
    rows = ["| width | K | merge | exact | exact, saved tensors moved | big batch |", "|---|---|---|---|---|---|"]
    for width, num_pieces in ((16, 4), (16, 16), (32, 4), (32, 16)):
        ratios = _ratios(width, num_pieces, rounds)
        rows.append(f"| {width} | {num_pieces} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios.values()) + " |")
        print(rows[-1], flush=True)
    return rows


def _ratios(width: int, num_pieces: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of the time of each way over that of naive accumulation in the same round."""
    torch.manual_seed(0)
    model, batch = resnet(width), images(128)
    copies = {name: copy.deepcopy(model) for name in ("native", "merge", "exact", "moved", "big")}
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(rounds):
        for name, mine in copies.items():
            mine.zero_grad(set_to_none=True)
            size = None if name == "big" else 128 // num_pieces
            policy = {"moved": "exact", "big": "native"}.get(name, name)
            with pretend_host(MeteredHost()) if name == "moved" else contextlib.nullcontext(), _timed(seconds[name]):
                bb.accumulate(mine, loss_fn, batch, micro_batch_size=size, batch_norm=policy)
    naive = seconds.pop("native")
    return {
        name: statistics.median(mine / theirs for mine, theirs in zip(found[1:], naive[1:], strict=True))
        for name, found in seconds.items()
    }


@contextlib.contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    start = time.process_time()
    yield
    into.append(time.process_time() - start)


TABLES: dict[str, Callable[[], list[str]]] = {"accuracy": accuracy_table, "cost": cost_table, "time": time_table}


def write_into(page: Path, name: str, rows: list[str]) -> None:
    """Put a table between its two marks in a page."""
    marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    text = page.read_text()
    pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
    table = marks[0] + "\n".join(rows) + "\n" + marks[1]
    page.write_text(re.sub(pattern, lambda _: table, text, flags=re.DOTALL))


def main(arguments: list[str] | None = None) -> Any:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=sorted(TABLES))
    parser.add_argument("--write", type=Path, help="a page with marks for the tables, such as docs/batch-norm.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("bigbatch").setLevel(logging.ERROR)
    for name in given.tables:
        start = time.perf_counter()
        rows = TABLES[name]()
        if given.write:
            write_into(given.write, name, rows)
        print(f"{name}: {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
