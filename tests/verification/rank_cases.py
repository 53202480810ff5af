"""What the workers verify."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bigbatch as bb
from tests.stepping.rank_cases import mean_over_samples, mean_over_tokens, share_of, tokens, words, wrapped
from tests.stepping.rank_models import error_of


def shared(group: Any, num_samples: int = 11) -> dict[str, torch.Tensor]:
    return share_of(tokens(num_samples), group)


def made(wrap: str, group: Any) -> nn.Module:
    if wrap != "inside":
        return wrapped(words(), wrap, group)
    model = words()
    model.hidden = wrapped(model.hidden, "ddp", group)
    return model


def verified(group: Any, wrap: str, weight: str) -> dict[str, Any]:
    model = made(wrap, group)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = bb.verify(model, mean_over_tokens, shared(group), weight=weight)
    untouched = all(p.grad is None and p.equal(before[name]) for name, p in model.named_parameters())
    names = [name for name, _ in words().named_parameters() if name in found.differences]
    return {
        "equal": found.equal,
        "worst": found.worst[1],
        "findings": found.findings,
        "notes": found.notes,
        "names": names,
        "untouched": untouched,
    }


def verified_on_one(group: Any) -> bool | None:
    """Rank 1 alone; a collective in it would wait for ever."""
    model = made("ddp", group)
    if group.rank() == 0:
        return None
    return bb.verify(model, mean_over_tokens, shared(group), weight="tokens").equal


def verified_with_sync_batch_norm(group: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(layers, process_group=group)
    nn.SyncBatchNorm.convert_sync_batchnorm(layers, group)  # after wrapping, which refuses them without a card
    x = torch.randn(5 + 4 * group.rank(), 3)
    loss_fn = lambda m, b: m(b).square().mean()  # noqa: E731
    merge, exact = (bb.verify(model, loss_fn, x, batch_norm=policy) for policy in ("merge", "exact"))
    return {"merge": merge.equal, "finding": merge.findings[0], "exact": exact.equal}


def verified_loss_of_whole_batch(group: Any) -> bool:
    loss_fn = bb.WholeBatchLoss(lambda m, b: m(b["x"]).mean(1), lambda out, b: (out.T @ out).square().mean())
    return bb.verify(made("ddp", group), loss_fn, shared(group)).equal


def sharded(group: Any) -> str:
    model = wrapped(words(), "fsdp2", group)
    return error_of(lambda: bb.verify(model, mean_over_samples, shared(group)))
