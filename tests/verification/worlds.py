"""Models and losses to verify: some that add up, and as many that do not, each with what must be said of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb

NUM_SAMPLES = 9
NUM_TOKENS = 4


@dataclass(frozen=True)
class World:
    """A model, a loss and options, and how the verdict must read; ``found`` is None where it is equal."""

    loss_fn: Callable[[Any, Any], Any]
    found: str | None = None
    model: Callable[[], nn.Module] = lambda: mlp()
    options: dict[str, Any] = field(default_factory=dict)


def batch() -> dict[str, Tensor]:
    """Features, targets, and labels of which some are ignored: in one sample all of them."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (NUM_SAMPLES, NUM_TOKENS), generator=generator)
    labels[0, 1:] = labels[2] = labels[5, 2:] = -100
    return {
        "x": torch.randn(NUM_SAMPLES, NUM_TOKENS, 6, generator=generator),
        "y": torch.randn(NUM_SAMPLES, generator=generator),
        "kind": torch.arange(NUM_SAMPLES) % 3,
        "labels": labels,
    }


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


class OnVectors(nn.Module):
    """One vector for each sample through layers such as BatchNorm, which take two dimensions."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.inner = mlp(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mean(1))[:, None]


class Centered(nn.Module):
    """Takes the mean of the batch away, as no layer of torch does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Detached(nn.Module):
    """Nothing before ``head`` gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).detach())


class InFloat32(nn.Module):
    """Casts by itself, as the norm layers of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.inner(x) * F.softmax(torch.ones(3), dim=0, dtype=torch.float32)


def logits(model: nn.Module, b: Any) -> Tensor:
    return model(b["x"]).mean(1)


def squared(model: nn.Module, b: Any) -> Tensor:
    return (logits(model, b).sum(1) - b["y"]).square()


def sample_mean(model: nn.Module, b: Any) -> Tensor:
    return squared(model, b).mean()


def token_mean(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"]).flatten(0, 1), b["labels"].flatten())


def next_token_mean(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b["x"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())


_CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def class_weighted(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(logits(model, b), b["kind"], weight=_CLASS_WEIGHTS)


def class_weighted_ratio(model: nn.Module, b: Any) -> bb.Ratio:
    loss = F.cross_entropy(logits(model, b), b["kind"], weight=_CLASS_WEIGHTS, reduction="sum")
    return bb.Ratio(loss, _CLASS_WEIGHTS[b["kind"]].sum())


_CRITERION = nn.CrossEntropyLoss(weight=_CLASS_WEIGHTS, reduction="sum")


def focal(model: nn.Module, b: Any) -> bb.Ratio:
    """Clamps the number of positives in each micro-batch, and not in all."""
    positive = (b["y"] > 1).double()
    loss = F.binary_cross_entropy_with_logits(logits(model, b).sum(1), positive, reduction="sum")
    return bb.Ratio(loss, positive.sum().clamp(min=1))


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


def contrastive(model: nn.Module, b: Any) -> Tensor:
    z = F.normalize(logits(model, b), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def pairwise(model: nn.Module, b: Any) -> Tensor:
    score = logits(model, b).sum(1)
    wrong = F.softplus(score[:, None] - score[None, :])
    return (wrong * (b["y"][:, None] > b["y"][None, :])).mean()


def dice(model: nn.Module, b: Any) -> Tensor:
    p, t = logits(model, b).sum(1).sigmoid(), (b["y"] > 0).double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def balance(model: nn.Module, b: Any) -> Tensor:
    share = logits(model, b).softmax(1).mean(0)
    return sample_mean(model, b) + 0.1 * 3 * share.square().sum()


def rooted(model: nn.Module, b: Any) -> Tensor:
    return sample_mean(model, b).sqrt()


def correlation(model: nn.Module, b: Any) -> Tensor:
    p, t = logits(model, b).sum(1), b["y"]
    p, t = p - p.mean(), t - t.mean()
    return 1 - (p * t).sum() / (p.norm() * t.norm() + 1e-3)


def _counting() -> Callable[[Any, Any], Tensor]:
    calls = itertools.count(1)
    return lambda model, b: sample_mean(model, b) * (1 + 0.1 * next(calls))


GOOD = {
    "mean over samples": World(sample_mean),
    "tokens": World(token_mean, options={"weight": "tokens"}),
    "next tokens": World(next_token_mean, options={"weight": "next_tokens"}),
    "a function as weight": World(token_mean, options={"weight": lambda b: (b["labels"] != -100).sum()}),
    "class weights as a ratio": World(class_weighted_ratio),
    "a criterion in float32": World(lambda m, b: bb.Sum(_CRITERION(logits(m, b), b["kind"]))),
    "sum": World(lambda m, b: bb.Sum(squared(m, b).sum())),
    "penalty inside a mean": World(lambda m, b: sample_mean(m, b) + penalty(m)),
    "penalty as a constant": World(lambda m, b: (bb.Sum(squared(m, b).sum()), bb.Constant(penalty(m)))),
    "two means": World(
        lambda m, b: {"a": sample_mean(m, b), "b": token_mean(m, b)},
        options={"weight": {"a": "samples", "b": "tokens"}},
    ),
    "groups": World(sample_mean, model=lambda: OnVectors(nn.GroupNorm(2, 8))),
    "BatchNorm, frozen": World(
        sample_mean, model=lambda: OnVectors(nn.BatchNorm1d(8)), options={"batch_norm": "frozen"}
    ),
    "BatchNorm, eval": World(sample_mean, model=lambda: OnVectors(nn.BatchNorm1d(8)).eval()),
    "dropout": World(sample_mean, model=lambda: mlp(nn.Dropout(0.5))),
    "dropout, a function": World(lambda m, b: F.dropout(squared(m, b), 0.5).mean()),
    "casts to float32": World(sample_mean, model=InFloat32),
    "bf16": World(sample_mean, options={"precision": "bf16"}),
    "contrastive, of the whole batch": World(
        bb.WholeBatchLoss(logits, lambda z, b: bb.info_nce(z, z.roll(1, 0), scale=10.0, chunk_size=2))
    ),
    "sums of the whole batch": World(
        bb.WholeBatchLoss(
            lambda m, b: {"share": bb.Sum(logits(m, b).softmax(1).sum(0)), "loss": squared(m, b)},
            lambda outputs, b: {"fit": outputs["loss"].mean(), "balance": outputs["share"].square().sum() / 81},
        )
    ),
}

_COUPLED = r"couples samples: .*give loss_fn=bb\.WholeBatchLoss\(forward, loss\)"
WRONG = {
    "tokens by samples": World(token_mean, r'over tokens .* was weighed by samples: give weight="tokens"'),
    "next tokens by tokens": World(
        next_token_mean,
        r'over next tokens .* was weighed by tokens: give weight="next_tokens"',
        options={"weight": "tokens"},
    ),
    "samples by tokens": World(
        sample_mean, r'over samples, but was weighed by tokens: give weight="samples"', options={"weight": "tokens"}
    ),
    "class weights": World(class_weighted, r"over something .*return bb\.Ratio\(numerator, denominator\)"),
    "a clamped denominator": World(
        focal,
        r"denominators do not add up: those of the micro-batches are \d together, that of the whole batch is \d\.",
    ),
    "too few parameters to tell": World(
        lambda m, b: (m.weight[0, 0] * b["x"].mean() - 1).square(),
        "too few parameters to tell more",
        model=lambda: nn.Linear(1, 1, bias=False),
    ),
    "sum as a mean": World(lambda m, b: squared(m, b).sum(), r"is a sum over .*return bb\.Sum\(loss\)"),
    "divides by K itself": World(
        lambda m, b: sample_mean(m, b) / (NUM_SAMPLES / len(b["y"])), r"the number of micro-batches.*return bb\.Sum"
    ),
    "mean as a sum": World(
        lambda m, b: bb.Sum(sample_mean(m, b)), r'over samples, but was returned as a bb\.Sum: give weight="samples"'
    ),
    "penalty inside a sum": World(
        lambda m, b: bb.Sum(squared(m, b).sum() + penalty(m)), r"weight penalty, .*return .* as bb\.Constant"
    ),
    "samples as a constant": World(
        lambda m, b: bb.Constant(sample_mean(m, b)), r"over samples, but was returned as a bb\.Constant"
    ),
    "one of two means": World(
        lambda m, b: {"a": sample_mean(m, b), "b": token_mean(m, b)},
        r"The term 'b' .*give weight=\{\"b\": \"tokens\"\}",
    ),
    "contrastive": World(contrastive, "The loss " + _COUPLED),
    "pairwise": World(pairwise, "The loss " + _COUPLED),
    "Dice": World(dice, "The loss " + _COUPLED),
    "balance beside a mean": World(balance, "The loss " + _COUPLED),
    "root of a mean": World(rooted, "The loss " + _COUPLED),
    "correlation": World(correlation, "The loss " + _COUPLED),
    "BatchNorm": World(
        sample_mean,
        r"BatchNorm: the layer \['inner\.1'\] sees.* cosine of 0\.\d.* GroupNorm.*batch_norm=\"frozen\".*bb\.plan\(",
        model=lambda: OnVectors(nn.BatchNorm1d(8)),
    ),
    "BatchNorm without statistics": World(
        sample_mean,
        r"BatchNorm: .*\['inner\.1'\]",
        model=lambda: OnVectors(nn.BatchNorm1d(8, track_running_stats=False)),
    ),
    "SyncBatchNorm": World(
        sample_mean, "SyncBatchNorm joins ranks, not micro-batches", model=lambda: OnVectors(nn.SyncBatchNorm(8))
    ),
    "a layer of one's own across samples": World(
        sample_mean, r"The model couples samples: '1', a Centered,", model=lambda: mlp(Centered())
    ),
    "rows that depend on others": World(
        bb.WholeBatchLoss(
            lambda m, b: logits(m, b) - logits(m, b).mean(0), lambda z, b: z.square().sum(1).sqrt().mean()
        ),
        "The output of forward has rows that depend on the samples beside them",
    ),
    "a mean as a sum of the whole batch": World(
        bb.WholeBatchLoss(lambda m, b: {"a": bb.Sum(logits(m, b).mean(0))}, lambda o, b: o["a"].square().sum()),
        "The output 'a' of forward is a bb.Sum, but .*return a plain sum",
    ),
    "a layer across samples, of the whole batch": World(
        bb.WholeBatchLoss(logits, lambda z, b: (z.T @ z).square().mean()),
        r"The model couples samples: '1', a Centered,",
        model=lambda: mlp(Centered()),
    ),
    "a counter": World(_counting(), r"not deterministic: .*changes from call to call"),
    "noise": World(
        lambda m, b: (squared(m, b) * torch.rand(len(b["y"]))).mean(),
        r"not deterministic: .*random numbers .*into the batch",
    ),
}
