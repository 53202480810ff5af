"""Small models of many kinds with their optimizers, losses, batches and options, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bigbatch as bb

NUM_CLASSES = 5
NUM_TOKENS = 8
VOCABULARY = 30


def mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, NUM_CLASSES))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.first(x)))


def cnn() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
    return nn.Sequential(*stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, NUM_CLASSES))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norms[1](x)))


class Transformer(nn.Module):
    """With dropout, and a head that is the embedding."""

    def __init__(self, width: int = 16, dropout: float = 0.1, num_blocks: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(NUM_TOKENS, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(a, b, bias=False) for a, b in ((base.in_features, rank), (rank, base.out_features))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters() -> nn.Module:
    """Nothing before the first block needs a gradient, nor does what goes into it."""
    model = Transformer(dropout=0.0).requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    return model


def half_frozen() -> nn.Module:
    model = Transformer(dropout=0.0)
    model.head.weight = nn.Parameter(torch.randn(VOCABULARY, 16))
    model.embed.requires_grad_(False)
    model.position.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def features(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 16), torch.randint(0, NUM_CLASSES, (num_samples,))


def images(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 3, 8, 8), torch.randint(0, NUM_CLASSES, (num_samples,))


def tokens(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (num_samples, NUM_TOKENS)), torch.randint(
        0, VOCABULARY, (num_samples, NUM_TOKENS)
    )


def samples(num_samples: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*features(num_samples), strict=True))


def transposed_and_shared(num_samples: int) -> dict[str, Tensor]:
    ids, labels = tokens(num_samples)
    return dict(x=ids.T.contiguous(), y=labels, shared=torch.randn(7, 7))


def with_names(num_samples: int) -> dict[str, Tensor]:
    ids, labels = tokens(num_samples)
    return dict(x=ids, labels=labels)


def half(num_samples: int) -> tuple[Tensor, Tensor]:
    x, labels = features(num_samples)
    return x.bfloat16(), labels


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2).float(), batch[1].flatten())


def squares(model: nn.Module, batch: Any) -> Tensor:
    """torch leaves its mean in a storage that is as large as the outputs."""
    return F.mse_loss(model(batch[0]), batch[0][:, :NUM_CLASSES])


def ratio(model: nn.Module, batch: Any) -> Any:
    total = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return bb.Ratio(total, (batch[1] > 3).sum())


def two_ratios(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0]).flatten(0, 1)
    fit = F.cross_entropy(logits, batch[1].flatten(), reduction="sum")
    return dict(fit=bb.Ratio(fit, (batch[1] > 3).sum()), size=bb.Ratio(logits.square().sum(), (batch[1] > 5).sum()))


def terms(model: nn.Module, batch: Any) -> Any:
    logits = model(batch[0]).flatten(0, 1)
    penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    fit = F.cross_entropy(logits, batch[1].flatten())
    return dict(fit=fit, size=bb.Sum(logits.square().sum()), penalty=bb.Constant(penalty))


def _two_views(model: nn.Module, batch: Any) -> Any:
    return model(torch.cat([batch[0], batch[0].roll(1, 1)])).chunk(2)


contrast = bb.WholeBatchLoss(_two_views, lambda z, batch: bb.info_nce(z[0], z[1], chunk_size=3))


def _pooled(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch[0]).flatten(1).float()
    return dict(z=logits, share=bb.Sum(logits.softmax(1).sum(0)))


def _all_pairs(outputs: Any, batch: Any) -> dict[str, Tensor]:
    similarity = outputs["z"] @ outputs["z"].T
    alike = (batch[1][:, :1] == batch[1][:, 0]).float()
    fit = F.binary_cross_entropy_with_logits(similarity, alike)
    return dict(fit=fit, balance=outputs["share"].square().mean() / len(similarity) ** 2)


all_pairs = bb.WholeBatchLoss(_pooled, _all_pairs)


def of_names(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def of_transposed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch["x"].T).flatten(0, 1), batch["y"].flatten())
    return loss + 0 * batch["shared"].mean()


def collate(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])


def trainable(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(trainable(model), lr=0.01, momentum=0.9)


def adamw(**how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.optim.AdamW(trainable(model), **how)


plain_adamw = adamw()


def by(kind: Any, **how: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(trainable(model), **how)


def two_groups(model: nn.Module) -> Any:
    matrices, others = ([p for p in trainable(model) if (p.dim() > 1) is large] for large in (True, False))
    return torch.optim.AdamW([dict(params=matrices), dict(params=others, weight_decay=0.0)], foreach=True)


def muon(model: nn.Module) -> Any:
    matrices, others = ([p for p in trainable(model) if (p.dim() == 2) is large] for large in (True, False))
    return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


def averaged(model: nn.Module) -> dict[str, Any]:
    return dict(ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))


@dataclass(frozen=True, eq=False)
class World:
    """A model with all that a step needs.

    Attributes:
        options: Of the step; a function makes them for the model.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Any] = plain_adamw
    loss_fn: Callable[[Any, Any], Any] = cross_entropy
    make_batch: Callable[[int], Any] = tokens
    options: Any = None

    def make(self, num_samples: int = 10, **more: Any) -> tuple[bb.Step, Any]:
        """A step, and a batch for it."""
        torch.manual_seed(0)
        model = self.make_model()
        optimizer = self.make_optimizer(model)
        options = {**self.options_of(model), **more}
        return bb.Step(model, self.loss_fn, optimizer, **options), self.make_batch(num_samples)

    def options_of(self, model: nn.Module) -> dict[str, Any]:
        """Options of a step for this model."""
        made: Any = self.options
        return made if isinstance(made, dict) else made(model) if made else {}


WORLDS: dict[str, World] = {
    "mlp, sgd": World(mlp, sgd, make_batch=features),
    "mlp, squares": World(mlp, sgd, squares, features),
    "mlp, muon": World(mlp, muon, make_batch=features),
    "mlp, float64 sums": World(mlp, sgd, make_batch=features, options=dict(accumulation_dtype="float64")),
    "mlp, 16 bits": World(lambda: mlp().bfloat16(), sgd, make_batch=half),
    "mlp, collated": World(mlp, make_batch=samples, options=dict(collate=collate)),
    "cnn": World(cnn, sgd, make_batch=images),
    "cnn, native": World(cnn, make_batch=images, options=dict(batch_norm="native")),
    "cnn, frozen statistics": World(cnn, make_batch=images, options=dict(batch_norm="frozen")),
    "transformer": World(Transformer),
    "transformer, loop": World(Transformer, adamw(foreach=False)),
    "transformer, foreach": World(Transformer, adamw(foreach=True)),
    "transformer, fused": World(Transformer, adamw(fused=True)),
    "transformer, amsgrad": World(Transformer, adamw(amsgrad=True)),
    "transformer, groups": World(Transformer, two_groups),
    "transformer, adafactor": World(Transformer, by(torch.optim.Adafactor)),
    "transformer, nadam": World(Transformer, by(torch.optim.NAdam)),
    "transformer, rmsprop": World(Transformer, by(torch.optim.RMSprop)),
    "transformer, lr in a tensor": World(Transformer, by(torch.optim.Adam, lr=torch.tensor(0.1), fused=True)),
    "transformer, bf16": World(Transformer, options=dict(precision="bf16")),
    "transformer, fp16": World(Transformer, options=dict(precision="fp16", max_grad_norm=0.1)),
    "transformer, scaler": World(Transformer, options=lambda _: dict(precision=torch.amp.GradScaler("cpu"))),
    "transformer, clipped": World(Transformer, options=dict(max_grad_norm=1.0)),
    "transformer, average": World(Transformer, options=averaged),
    "transformer, no undo": World(Transformer, options=dict(on_out_of_memory="raise")),
    "transformer, tokens": World(Transformer, adamw(), of_names, with_names, dict(weight="tokens")),
    "transformer, ratio": World(Transformer, adamw(), ratio),
    "transformer, two ratios": World(Transformer, adamw(), two_ratios),
    "transformer, terms": World(Transformer, adamw(), terms, options=dict(weight=dict(fit="samples"))),
    "transformer, other dimensions": World(
        Transformer, adamw(), of_transposed, transposed_and_shared, dict(batch_dims={"x": 1, "shared": None})
    ),
    "mlp, contrast, collated": World(mlp, sgd, contrast, samples, dict(collate=collate)),
    "transformer, all pairs, fp16": World(
        # A scale at which the first step is not skipped.
        Transformer,
        sgd,
        all_pairs,
        options=lambda _: dict(precision=torch.amp.GradScaler("cpu", init_scale=8.0)),
    ),
    "lstm": World(Recurrent),
    "adapters": World(adapters),
    "half frozen": World(half_frozen),
}
