"""How much longer a step takes in ``bb.Step`` than in a loop written by hand that does the same work.

``python benchmarks/overhead.py`` prints a table; README.md beside this file says what is in it and how it is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb

NUM_RESAMPLES = 2000
WARM_UP = 20
NUM_FEATURES, NUM_CLASSES = 64, 10
# All of the work is in one thread, which waits for nothing.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CONTROL, OURS = "by hand, again", "bigbatch"

Batch = tuple[Tensor, Tensor]
OneStep = Callable[[], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Work:
    """One model and batch.

    Attributes:
        widths: Of the hidden layers of an MLP.
        micro_batch_size: Samples in one micro-batch.
        num_micro_batches: K.
        bar: The ratio to stay under; None: only reported.
        as_far_as_resolved: The bar is so near 1 that what the control cannot tell from 1 is allowed for.
        max_grad_norm: Clip to this; None: do not.
        share_of_pairs: Part of the pairs that are run.
    """

    name: str
    widths: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    bar: float | None = None
    as_far_as_resolved: bool = False
    max_grad_norm: float | None = None
    share_of_pairs: float = 1.0

    def setup(self) -> Setup:
        """A fresh model, optimizer and batch; the same numbers each time."""
        torch.manual_seed(0)
        sizes = [NUM_FEATURES, *self.widths]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*hidden, nn.Linear(sizes[-1], NUM_CLASSES))
        num_samples = self.micro_batch_size * self.num_micro_batches
        batch = torch.randn(num_samples, NUM_FEATURES), torch.randint(0, NUM_CLASSES, (num_samples,))
        # The fused kernel takes the least time, so that it hides the least.
        return Setup(self, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)


@dataclass
class Setup:
    """What one contender trains."""

    work: Work
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch

    def micro_batches(self) -> Iterator[Batch]:
        """The batch, cut."""
        size = self.work.micro_batch_size
        return zip(self.batch[0].split(size), self.batch[1].split(size), strict=True)

    def finish(self, losses: list[Tensor], optimizer: Any = None) -> None:
        """What comes after the last backward of a step: the finite check, clipping, the optimizer."""
        loss = torch.stack(losses).mean()
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.work.max_grad_norm is None:
            norm = nn.utils.get_total_norm(gradients)
        else:
            norm = nn.utils.clip_grad_norm_(parameters, self.work.max_grad_norm)
        if not math.isfinite(float(norm + loss)):
            raise FloatingPointError("The loss or a gradient is not finite.")
        optimizer = optimizer or self.optimizer
        optimizer.step()
        optimizer.zero_grad()


def loss_fn(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_hand(setup: Setup) -> OneStep:
    """The loop that people write."""

    def step() -> None:
        losses = []
        for micro_batch in setup.micro_batches():
            loss = loss_fn(setup.model, micro_batch)
            (loss * (len(micro_batch[0]) / len(setup.batch[0]))).backward()
            losses.append(loss.detach())
        setup.finish(losses)

    return step


def by_hand_tuned(setup: Setup) -> OneStep:
    """The same with every trick: backward starts from the share, which was made once."""
    share = torch.tensor(1 / setup.work.num_micro_batches)

    def step() -> None:
        losses = []
        for micro_batch in setup.micro_batches():
            loss = loss_fn(setup.model, micro_batch)
            loss.backward(share)
            losses.append(loss.detach())
        setup.finish(losses)

    return step


def bigbatch(setup: Setup) -> OneStep:
    step = bb.Step(
        setup.model,
        loss_fn,
        setup.optimizer,
        micro_batch_size=setup.work.micro_batch_size,
        max_grad_norm=setup.work.max_grad_norm,
    )
    return lambda: step(setup.batch) and None


def accelerate(setup: Setup) -> OneStep:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setup.work.num_micro_batches)
    model, optimizer = accelerator.prepare(setup.model, setup.optimizer)

    def step() -> None:
        losses = []
        for micro_batch in setup.micro_batches():
            with accelerator.accumulate(model):
                loss = loss_fn(model, micro_batch)
                accelerator.backward(loss)  # divides by K
                losses.append(loss.detach())
                if accelerator.sync_gradients:
                    setup.finish(losses, optimizer)
                else:
                    # As its documentation has it: called each time, and without effect but the last.
                    optimizer.step()
                    optimizer.zero_grad()

    return step


def fabric(setup: Setup) -> OneStep:
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=1)
    model, optimizer = one.setup(setup.model, setup.optimizer)
    num = setup.work.num_micro_batches

    def step() -> None:
        losses = []
        for k, micro_batch in enumerate(setup.micro_batches(), start=1):
            with one.no_backward_sync(model, enabled=k < num):
                loss = loss_fn(model, micro_batch)
                one.backward(loss / num)
            losses.append(loss.detach())
        setup.finish(losses, optimizer)

    return step


class _OneIterable:
    """Lightning takes a list for several loaders at once."""

    def __init__(self, items: list[Any]):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def seconds_of_trainer_steps(setup: Setup, num_steps: int, clock: Clock) -> list[float]:
    """Time of each optimizer step inside one ``Trainer.fit`` of Lightning."""
    import lightning

    num = setup.work.num_micro_batches
    ends: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = setup.model, []

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss = loss_fn(self.model, batch)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setup.optimizer

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            if not math.isfinite(float(norm + torch.stack(self.losses).mean())):
                raise FloatingPointError("The loss or a gradient is not finite.")
            self.losses = []

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            if (batch_idx + 1) % num == 0:
                ends.append(clock())

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=num, **off)  # pyright: ignore
    trainer.fit(Module(), _OneIterable(list(setup.micro_batches()) * num_steps))
    assert len(ends) == trainer.global_step == num_steps
    return [after - before for before, after in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Ratio:
    """One contender against the loop by hand.

    Attributes:
        ratio: Median over the pairs of its time over that of the loop.
        low, high: 95 % interval of that median, by bootstrap over the pairs.
        step_seconds, by_hand_seconds: Medians.
    """

    work: str
    num_micro_batches: int
    contender: str
    ratio: float
    low: float
    high: float
    step_seconds: float
    by_hand_seconds: float
    num_pairs: int
    bar: float | None = None
    verdict: str = ""


def compare(work: Work, contenders: dict[str, Callable[[Setup], OneStep]], num_pairs: int, clock: Clock) -> list[Ratio]:
    """Time steps of all contenders in rounds, each in random order; the first one is what the others are held to."""
    setups = {name: work.setup() for name in contenders}
    steps = {name: make(setups[name]) for name, make in contenders.items()}
    names = list(steps)
    for _ in range(3):
        for step in steps.values():
            step()
    check_same_weights(setups)
    # The machine is not alone: the clock says how long to warm up, not a count of large steps.
    started = time.perf_counter()
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
        if time.perf_counter() - started > 5:
            break
    seconds: dict[str, list[float]] = {name: [] for name in names}
    shuffled = random.Random(0)
    for _ in range(num_pairs):
        shuffled.shuffle(names)
        for name in names:
            step = steps[name]
            step()  # In training, the step before was one of the same loop: its code is in the caches.
            before = clock()
            step()
            seconds[name].append(clock() - before)
    first, *others = seconds.values()
    return [ratio_of(work, name, other, first) for name, other in zip(list(seconds)[1:], others, strict=True)]


def check_same_weights(setups: dict[str, Setup]) -> None:
    """All contenders have done the same work."""
    first, *others = setups.items()
    for name, other in others:
        for a, b in zip(first[1].model.parameters(), other.model.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"{name} has other weights than {first[0]}"


def ratio_of(work: Work, contender: str, seconds: list[float], by_hand_seconds: list[float]) -> Ratio:
    ratios = torch.tensor([a / b for a, b in zip(seconds, by_hand_seconds, strict=True)], dtype=torch.float64)
    draws = torch.randint(len(ratios), (NUM_RESAMPLES, len(ratios)), generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].median(1).values
    low, high = (float(medians.quantile(q)) for q in (0.025, 0.975))
    middle = statistics.median(ratios.tolist())
    times = statistics.median(seconds), statistics.median(by_hand_seconds)
    return Ratio(work.name, work.num_micro_batches, contender, middle, low, high, *times, len(ratios))


def compare_trainer(work: Work, num_steps: int, clock: Clock, num_blocks: int = 8) -> Ratio:
    """Lightning's Trainer has its loop inside, so blocks of its steps alternate with blocks of the loop by hand."""
    ours, theirs = [], []
    loop = by_hand(work.setup())
    length = max(num_steps // num_blocks, 5)
    for _ in range(num_blocks):
        theirs += seconds_of_trainer_steps(work.setup(), length + WARM_UP, clock)[-length:]
        for _ in range(WARM_UP):
            loop()
        for _ in range(length):
            before = clock()
            loop()
            ours.append(clock() - before)
    return ratio_of(work, "Lightning Trainer", theirs, ours)


def judged(work: Work, ratios: list[Ratio]) -> list[Ratio]:
    """With a verdict on ours."""
    (control,) = (r for r in ratios if r.contender == CONTROL)
    resolution = max(abs(control.low - 1), abs(control.high - 1)) if work.as_far_as_resolved else 0.0
    return [
        dataclasses.replace(r, bar=work.bar, verdict="inside" if r.ratio <= work.bar + resolution else "MISSED")
        if r.contender == OURS and work.bar is not None
        else r
        for r in ratios
    ]


TINY, MEDIUM = (128, 128), (1024, 1024, 1024)
WORKS = (
    Work("tiny", TINY, 64, 1),
    Work("tiny", TINY, 64, 4, bar=1.15),
    Work("tiny", TINY, 64, 16, bar=1.15),
    Work("tiny, clipped", TINY, 64, 4, bar=1.15, max_grad_norm=0.1),
    Work("25 ms", MEDIUM, 128, 4, bar=1.01, as_far_as_resolved=True, share_of_pairs=0.25),
)
LOOPS = {"by hand": by_hand, CONTROL: by_hand, "by hand, tuned": by_hand_tuned, OURS: bigbatch}
PEERS = {"accelerate": ("accelerate", accelerate), "lightning": ("Lightning Fabric", fabric)}


def installed_peers() -> list[str]:
    """Those that can be imported, told to keep quiet."""
    found = [name for name in PEERS if importlib.util.find_spec(name)]
    if "lightning" in found:
        importlib.import_module("lightning")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they set their own when they are imported
        warnings.filterwarnings("ignore", module="lightning")
    return found


def run(num_pairs: int, clock: Clock, *, peers: bool) -> Iterator[Ratio]:
    """All comparisons, one after the other."""
    installed = installed_peers() if peers else []
    for work in WORKS:
        pairs = max(round(num_pairs * work.share_of_pairs), 3)
        yield from judged(work, compare(work, LOOPS, pairs, clock))
        if work.num_micro_batches != 4 or work.max_grad_norm is not None:
            continue
        contenders = {"by hand": by_hand, **{PEERS[name][0]: PEERS[name][1] for name in installed}}
        fewer = max(pairs // 2, 3)
        if installed:
            yield from compare(work, contenders, fewer, clock)
        if "lightning" in installed:
            yield compare_trainer(work, fewer, clock)


def row(r: Ratio) -> str:
    times = f"{r.step_seconds / r.num_micro_batches * 1e6:9.0f} {r.by_hand_seconds / r.num_micro_batches * 1e6:9.0f}"
    bar = f"<= {r.bar:.2f}: {r.verdict}" if r.bar is not None else ""
    interval = f"{r.low:.3f} to {r.high:.3f}"
    name = f"{r.work:14} {r.num_micro_batches:3} {r.contender:18}"
    return f"{name} {r.ratio:6.3f} {interval:16} {times} {r.num_pairs:6} {bar}"


HEADER = f"{'work':14} {'K':>3} {'':18} {'ratio':>6} {'95 %':16} {'µs/micro':>9} {'by hand':>9} {'pairs':>6} bar"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=400, help="pairs of steps that are timed (the 25 ms model: 1/4)")
    parser.add_argument("--quick", action="store_true", help="20 pairs: to see that it runs, not to believe it")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: less disturbed by a busy machine")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    if not options.json:
        print(HEADER)
    for ratio in run(20 if options.quick else options.pairs, CLOCKS[options.clock], peers=options.peers):
        found.append(asdict(ratio))
        if not options.json:
            print(row(ratio), flush=True)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
