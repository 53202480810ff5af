"""What the workers run of dropout by sample and of the gradient noise scale, to be compared with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.stepping.rank_cases import (
    CLASSES,
    WIDTH,
    Words,
    gradients_of,
    mean_over_samples,
    mean_over_tokens,
    plain_name,
    share_of,
    tokens,
    whole,
    wrapped,
)
from tests.stepping.rank_models import error_of


class Dropping(Words):
    """Drops embeddings, and what a recomputed block gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dropout = nn.Dropout(0.3)
        self.hidden.append(nn.Dropout(0.4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_dropout(self.embed(ids))
        hidden: Any = checkpoint(self.hidden, embedded, use_reentrant=False)
        return self.head(hidden) * self.scale


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return Dropping().double()


def seeded(rank: int) -> None:
    """Another seed on each rank, as a run has it."""
    torch.manual_seed(7 + 100 * rank)


def dropped(model: nn.Module, share: Any, **options: Any) -> dict[str, Any]:
    """Gradient, loss and exactness of a share, when the seed is set."""
    result = bb.accumulate(model, mean_over_tokens, share, weight="tokens", **options)
    return {"gradient": gradients_of(model), "loss": float(result.loss), "exactness": result.exactness}


def dropout_case(group: Any, num_samples: int, wrap: str, last_is_empty: bool, **options: Any) -> dict[str, Any]:
    model = wrapped(dropping(), wrap, group)
    share = share_of(tokens(num_samples), group, last_is_empty=last_is_empty)
    seeded(group.rank())
    return dropped(model, share, **options)


def coupled(model: nn.Module, share: Any, **options: Any) -> dict[str, Any]:
    """The same of a loss that looks across samples."""
    loss_fn = bb.WholeBatchLoss(lambda m, b: m(b["x"]).mean(1), lambda out, b: (out.T @ out / len(out)).square().sum())
    result = bb.accumulate(model, loss_fn, share, dropout="per-sample", **options)
    return {"gradient": gradients_of(model), "loss": float(result.loss)}


def coupled_case(group: Any, num_samples: int) -> dict[str, Any]:
    model = wrapped(dropping(), "ddp", group)
    share = share_of(tokens(num_samples), group)
    seeded(group.rank())
    return coupled(model, share, micro_batch_size=2)


def dealt_case(group: Any, num_samples: int) -> dict[str, Any]:
    """Shares that are dealt in turn, as ``DistributedSampler`` does."""
    model = wrapped(dropping(), "ddp", group)
    share = {name: value[group.rank() :: group.size()] for name, value in tokens(num_samples).items()}
    seeded(group.rank())
    return dropped(model, share, micro_batch_size=2, dropout="per-sample")


def dropping_steps(model: nn.Module, shares: list[Any], **options: Any) -> dict[str, Any]:
    """Weights after some steps; ``torch.initial_seed`` is the seed of the masks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = bb.Step(model, mean_over_tokens, optimizer, weight="tokens", dropout="per-sample", **options)
    retries = sum(step(share).retries for share in shares)
    return {"weights": {plain_name(name): whole(p) for name, p in model.named_parameters()}, "retries": retries}


def dropout_steps_case(group: Any) -> dict[str, Any]:
    """Three steps, in the second of which memory runs out on the last rank: all make it again, with the same masks."""
    model = wrapped(dropping(), "ddp", group)
    seeded(group.rank())
    calls = iter(range(100))

    def fails_once(module: Any, args: Any) -> None:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")

    if group.rank() == group.size() - 1:
        model.register_forward_pre_hook(fails_once)
    return dropping_steps(model, [share_of(tokens(9), group) for _ in range(3)], micro_batch_size=2)


class Linear(nn.Module):
    """Two parameters, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x * self.scale) * self.scale


def linear() -> nn.Module:
    torch.manual_seed(0)
    return Linear().double()


def noisy(step: int, num_samples: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = 1.0 + torch.randn(num_samples, WIDTH, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (num_samples,), generator=draw)
    return {"x": x, "labels": labels}


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def late_entropy(model: nn.Module, batch: Any) -> Any:
    total = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
    return bb.Ratio(total, len(batch["x"]))


NOISE_LOSSES = {"mean": entropy, "ratio": late_entropy}
NUM_NOISE_STEPS = 4


def micro_batches(batch: Any, sizes: list[int]) -> list[Any]:
    parts = [value.split(sizes) for value in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


def noise_scales(model: nn.Module, sizes: list[list[int]], rank: int | None, loss: str, **options: Any) -> list[float]:
    """After each step, of the micro-batches of one rank or, with None, of all of them in one process."""
    step = bb.Step(model, NOISE_LOSSES[loss], torch.optim.SGD(model.parameters(), lr=0.1), noise_scale=True, **options)
    found = []
    for i in range(NUM_NOISE_STEPS):
        every = micro_batches(noisy(i, sum(map(sum, sizes))), [size for own in sizes for size in own])
        first = 0 if rank is None else sum(map(len, sizes[:rank]))
        mine = every if rank is None else every[first : first + len(sizes[rank])]
        batch = bb.LogicalBatch(mine) if mine else {name: value[:0] for name, value in every[0].items()}
        found.append(float(step(batch).noise_scale))
    return found


def noise_case(group: Any, sizes: list[list[int]], loss: str, **options: Any) -> list[float]:
    model = DistributedDataParallel(linear(), process_group=group)
    return noise_scales(model, sizes, group.rank(), loss, **options)


def noise_refused_case(group: Any) -> dict[str, str]:
    def made(wrap: str, loss_fn: Any, **options: Any) -> str:
        model = wrapped(Words().double(), wrap, group)
        step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), noise_scale=True, **options)
        return error_of(lambda: step(share_of(tokens(8), group)))

    def with_constant(model: nn.Module, batch: Any) -> Any:
        loss = mean_over_samples(model, batch)
        return {"mean": loss, "constant": bb.Constant(0.0 * loss)}

    return {
        "fsdp2": made("fsdp2", mean_over_samples, weight="samples"),
        "constant": made("ddp", with_constant, weight="samples"),
    }
