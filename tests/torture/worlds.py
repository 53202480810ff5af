"""Networks, optimizers and batches whose steps are attacked, and everything in them that a step may move."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bigbatch as bb

BATCH_SIZE = 12
MICRO_BATCH_SIZE = 4
NUM_CLASSES = 4
NUM_TOKENS = 5
VOCABULARY = 11

Batch = dict[str, Tensor]


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, and dropout before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


class Transformer(nn.Module):
    """Two blocks with attention and dropout; the head is the embedding."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.mixers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.embedding(x))
        for i in range(2):
            q, k, v = self.mixers[i](self.norms[2 * i](h)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            h = h + self.dropout(self.outs[i](mixed))
            h = h + self.dropout(self.mlps[i](self.norms[2 * i + 1](h)))
        return self.head(h)


class LowRank(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(features, features).requires_grad_(False)
        self.down = nn.Linear(features, 2, bias=False)
        self.up = nn.Linear(2, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, NUM_CLASSES)
    )


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, NUM_CLASSES))


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(6), nn.Tanh(), nn.LayerNorm(6), LowRank(6), nn.Linear(6, NUM_CLASSES))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def token_loss(model: nn.Module, batch: Batch) -> bb.Ratio:
    """A mean over the tokens that count; how many is known after the last forward."""
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum", ignore_index=-100)
    return bb.Ratio(losses, (batch["y"] != -100).sum())


def two_losses(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Two terms with denominators of their own, so that gradients are parked and put together at the end."""
    logits = model(batch["x"])
    first = (batch["y"] == 0).float()
    return {
        "all": F.cross_entropy(logits, batch["y"]),
        "first": bb.Ratio((F.cross_entropy(logits, batch["y"], reduction="none") * first).sum(), first.sum() + 1),
    }


def two_views(model: nn.Module, batch: Batch) -> dict[str, Any]:
    a, b = model(batch["x"]), model(batch["x"] + 0.1)
    return {"a": a, "b": b, "share": bb.Sum(a.softmax(1).sum(0))}


def contrast(outputs: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """In chunks of rows, beside a balance of sums."""
    balance = (outputs["share"] / len(batch["y"])).square().sum()
    return {"contrast": bb.info_nce(outputs["a"], outputs["b"], chunk_size=5), "balance": balance}


def inputs(*shape: int) -> Callable[[torch.Generator], Batch]:
    def make(draw: torch.Generator) -> Batch:
        return {
            "x": torch.randn(BATCH_SIZE, *shape, generator=draw),
            "y": torch.randint(0, NUM_CLASSES, (BATCH_SIZE,), generator=draw),
        }

    return make


def tokens(draw: torch.Generator) -> Batch:
    x = torch.randint(0, VOCABULARY, (BATCH_SIZE, NUM_TOKENS), generator=draw)
    lengths = torch.randint(1, NUM_TOKENS + 1, (BATCH_SIZE, 1), generator=draw)
    return {"x": x, "y": torch.where(torch.arange(NUM_TOKENS) < lengths, x, -100)}


@dataclass(frozen=True)
class Net:
    """What is trained.

    Attributes:
        make: Makes the model.
        loss_fn: As a ``Step`` takes it.
        make_batch: Draws a batch.
        options: Of the step.
        ema: Whether a moving average of the weights is kept.
        scaled: Whether it runs in fp16 with a ``GradScaler``.
    """

    make: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    make_batch: Callable[[torch.Generator], Batch]
    options: Mapping[str, Any] = field(default_factory=dict)
    ema: bool = False
    scaled: bool = False


NETS = {
    "mlp": Net(mlp, class_loss, inputs(6), ema=True),
    "batchnorm": Net(ConvNet, class_loss, inputs(1, 8, 8)),
    "transformer": Net(Transformer, token_loss, tokens),
    "lora": Net(low_rank, two_losses, inputs(6)),
    "lstm": Net(Recurrent, class_loss, inputs(5, 3), ema=True),
    "contrastive": Net(ConvNet, bb.WholeBatchLoss(two_views, contrast), inputs(1, 8, 8)),
    "pairs": Net(mlp, bb.WholeBatchLoss(two_views, contrast), inputs(6)),
    "masks": Net(with_dropout, bb.WholeBatchLoss(two_views, contrast), inputs(6)),
    "scaled": Net(mlp, class_loss, inputs(6), scaled=True),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw loop": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """A network with an optimizer, as it is before the first step."""

    net_name: str
    optimizer_name: str

    @functools.cached_property
    def net(self) -> Net:
        return NETS[self.net_name]

    @functools.cached_property
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.net.make()

    @functools.cached_property
    def batches(self) -> tuple[Batch, Batch, Batch]:
        draw = torch.Generator().manual_seed(1)
        first, second, third = (self.net.make_batch(draw) for _ in range(3))
        return first, second, third


class World:
    """A run of a case from its beginning, on copies of its own."""

    def __init__(self, case: Case):
        self.case = case
        self.model = copy.deepcopy(case.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[case.optimizer_name](trained)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if case.net.ema else None
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
            if case.net.scaled
            else None
        )
        self.num_steps = 0
        self.result: Any = None
        torch.manual_seed(7)

    def state(self) -> dict[str, Any]:
        """Everything that a step may move, by name; tensors are copies."""
        found: dict[str, Any] = {"rng": torch.get_rng_state(), "num_steps": self.num_steps, "loss": self.result}
        found |= {f"parameter {name}": p.detach().clone() for name, p in self.model.named_parameters()}
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        found |= {f"gradient {name}": None if g is None else g.clone() for name, g in gradients.items()}
        found |= {f"grad_dtype {name}": p.grad_dtype for name, p in self.model.named_parameters()}
        found |= {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}
        for part in ("optimizer", "scheduler", "ema", "scaler"):
            kept = getattr(self, part)
            if kept is not None:
                found |= {f"{part} {name}": value for name, value in flat(kept.state_dict())}
        return found


def flat(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of nested dicts and lists by path; tensors are copies."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in flat(inner, f"{path}.{key}")]
    if isinstance(value, list | tuple):
        return [leaf for i, inner in enumerate(value) for leaf in flat(inner, f"{path}.{i}")]
    return [(path, value.detach().clone() if isinstance(value, Tensor) else value)]


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    names = [name for name in found if name in expected and not same(found[name], expected[name])]
    return names + sorted(found.keys() ^ expected.keys())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if callable(a) and callable(b):
        return True  # the function of a scheduler
    return type(a) is type(b) and a == b
