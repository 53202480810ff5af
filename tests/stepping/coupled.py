"""Losses that look across samples, each in the plain way and as it is given to bigbatch. The plain way imports none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb
from tests.reference import Gradients, gradients, slice_batch

NUM_SAMPLES = 23


class Encoder(nn.Module):
    """With dropout, a temperature, and a router of a mixture."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 8), nn.GELU())
        self.head = nn.Linear(8, 4)
        self.router = nn.Linear(8, 3)
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_batch(num_samples: int = NUM_SAMPLES) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    a = torch.randn(num_samples, 6, generator=draw, dtype=torch.float64)
    noise = torch.randn(num_samples, 6, generator=draw, dtype=torch.float64)
    return {
        "a": a,
        "b": a + 0.5 * noise,
        "y": torch.randint(0, 4, (num_samples,), generator=draw),
        "t": torch.randn(num_samples, generator=draw, dtype=torch.float64),
    }


@dataclass(frozen=True)
class Coupled:
    """A loss that looks across samples.

    Attributes:
        outputs: ``outputs(model, batch)``: a dict of what is per sample.
        plain: ``plain(model, outputs, batch)``: the loss, as one writes it without bigbatch.
        ours: The same with the losses of bigbatch; None: as it is.
        sums: Names of outputs that are sums over the samples, with ``outputs`` giving the sum.
    """

    outputs: Callable[[Any, Any], dict[str, Tensor]]
    plain: Callable[[Any, Any, Any], Tensor]
    ours: Callable[[Any, Any, Any], Tensor] | None = None
    sums: tuple[str, ...] = ()

    def loss_fn(self, model: nn.Module) -> bb.WholeBatchLoss:
        """As it is given to bigbatch."""

        def forward(model: Any, micro_batch: Any) -> dict[str, Any]:
            found = self.outputs(model, micro_batch)
            return {name: bb.Sum(value) if name in self.sums else value for name, value in found.items()}

        loss = self.ours or self.plain
        return bb.WholeBatchLoss(forward, lambda outputs, batch: loss(model, outputs, batch))

    def reference(self, model: nn.Module, batch: dict[str, Tensor], sizes: Sequence[int]) -> tuple[Tensor, Gradients]:
        """Loss and gradients of the big batch, whose random numbers are drawn for these samples in turn.

        The first comes last. All graphs are alive at once, and one backward goes through the plain loss.
        """
        model.zero_grad()
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        parts = [
            self.outputs(model, slice_batch(batch, start, start + n))
            for start, n in (*zip(starts[1:], sizes[1:], strict=True), (0, sizes[0]))
        ]
        parts = [parts[-1], *parts[:-1]]
        whole = {
            name: sum(part[name] for part in parts) if name in self.sums else torch.cat([part[name] for part in parts])
            for name in parts[0]
        }
        loss = self.plain(model, whole, batch)
        loss.backward()
        found = gradients(model)
        model.zero_grad()
        return loss.detach(), found

    def naive(self, model: nn.Module, batch: dict[str, Tensor], sizes: Sequence[int]) -> Gradients:
        """What people do: the mean over the losses of micro-batches, by their samples."""
        model.zero_grad()
        start = 0
        for n in sizes:
            part = slice_batch(batch, start, start + n)
            (self.plain(model, self.outputs(model, part), part) * (n / sum(sizes))).backward()
            start += n
        found = gradients(model)
        model.zero_grad()
        return found


def two_views(model: Any, b: Any) -> dict[str, Tensor]:
    return {"a": model(b["a"]), "b": model(b["b"])}


def one_view(model: Any, b: Any) -> dict[str, Tensor]:
    return {"z": model(b["a"])}


def scores(model: Any, b: Any) -> dict[str, Tensor]:
    return {"p": model(b["a"]).sum(1)}


def _normal(o: Any) -> tuple[Tensor, Tensor]:
    return F.normalize(o["a"], dim=1), F.normalize(o["b"], dim=1)


def info_nce(model: Any, o: Any, batch: Any) -> Tensor:
    a, b = _normal(o)
    logits = a @ b.T * model.log_scale.exp()
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def siglip(model: Any, o: Any, batch: Any) -> Tensor:
    a, b = _normal(o)
    logits = a @ b.T * model.log_scale.exp() + model.bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def sup_con(model: Any, o: Any, batch: Any) -> Tensor:
    z, y = torch.cat(_normal(o)), batch["y"].repeat(2)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = (z @ z.T * model.log_scale.exp()).masked_fill(itself, -torch.inf).log_softmax(1)
    alike = (y[:, None] == y) & ~itself
    return -(torch.where(alike, log_p, 0.0).sum(1) / alike.sum(1)).mean()


def triplet(model: Any, o: Any, batch: Any) -> Tensor:
    """Batch-hard: the farthest of its label, and the nearest of the others."""
    z, y = o["z"], batch["y"]
    distance = (z[:, None] - z).square().sum(2).add(1e-12).sqrt()
    alike = y[:, None] == y
    hardest = distance.masked_fill(~alike, 0.0).amax(1) - distance.masked_fill(alike, torch.inf).amin(1)
    return F.relu(hardest + 1).mean()


def barlow_twins(model: Any, o: Any, batch: Any) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0) for z in (o["a"], o["b"]))
    difference = a.T @ b / len(a) - torch.eye(a.shape[1])
    return difference.diag().square().sum() + 0.1 * (difference - difference.diag().diag()).square().sum()


def dice(model: Any, o: Any, batch: Any) -> Tensor:
    return 1 - (2 * o["both"] + 1) / (o["found"] + o["true"] + 1)


def dice_sums(model: Any, b: Any) -> dict[str, Tensor]:
    p, t = model(b["a"]).sum(1).sigmoid(), (b["t"] > 0).double()
    return {"both": (p * t).sum(), "found": p.sum(), "true": t.sum()}


def auc(model: Any, o: Any, batch: Any) -> Tensor:
    p, positive = o["p"], batch["t"] > 0
    pairs = F.softplus(p[None, :] - p[:, None]) * (positive[:, None] & ~positive[None, :])
    return pairs.sum() / (positive.sum() * (~positive).sum())


def mixture(model: Any, b: Any) -> dict[str, Tensor]:
    inner = model.body(b["a"])
    share = model.router(inner).softmax(1)
    used = F.one_hot(share.argmax(1), 3).double()
    error = (model.head(inner).sum(1) * share.amax(1) - b["t"]).square().sum()
    return {"share": share.sum(0), "used": used.sum(0), "error": error, "n": torch.tensor(float(len(share)))}


def balance(model: Any, o: Any, batch: Any) -> Tensor:
    return o["error"] / o["n"] + 3 * (o["share"] * o["used"]).sum() / o["n"] ** 2


def pearson(model: Any, o: Any, batch: Any) -> Tensor:
    p, t = o["p"] - o["p"].mean(), batch["t"] - batch["t"].mean()
    return 1 - (p * t).sum() / (p.norm() * t.norm())


LOSSES = {
    "InfoNCE": Coupled(
        two_views, info_nce, lambda m, o, b: bb.info_nce(o["a"], o["b"], scale=m.log_scale.exp(), chunk_size=5)
    ),
    "SigLIP": Coupled(
        two_views,
        siglip,
        lambda m, o, b: bb.siglip(o["a"], o["b"], scale=m.log_scale.exp(), bias=m.bias, chunk_size=7),
    ),
    "SupCon": Coupled(
        two_views,
        sup_con,
        lambda m, o, b: bb.sup_con(
            torch.cat([o["a"], o["b"]]), b["y"].repeat(2), scale=m.log_scale.exp(), chunk_size=10
        ),
    ),
    "batch-hard triplet": Coupled(one_view, triplet),
    "Barlow Twins": Coupled(two_views, barlow_twins),
    "soft Dice": Coupled(dice_sums, dice, sums=("both", "found", "true")),
    "pairwise AUC": Coupled(scores, auc),
    "mixture balance": Coupled(mixture, balance, sums=("share", "used", "error", "n")),
    "Pearson": Coupled(scores, pearson),
}
