"""What the second forward of a loss of the whole batch costs: seconds and bytes beside the big batch at once.

    python benchmarks/whole_batch.py [--rounds 9] [--batch-size 256] [--encoder small] [--json]

An encoder with dropout embeds two views of each sample, and InfoNCE compares all of them: a small transformer, one view
after the other, or MiniLM, both at once, with halves of passages of 32 tokens (the task ``contrastive``). Contenders
take turns in one process on one thread; a ratio is that of the least times (by hand, of two contenders that do the
same), and the processor time of the process is what is counted. Bytes are those of all tensors that are alive beside
parameters and batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch as bb
from bigbatch.memory.measure import count_peak_bytes
from bigbatch.tasks.contrastive import Halves, SentenceEncoder

WIDTH, NUM_TOKENS, NUM_BLOCKS = 128, 16, 4


class Encoder(nn.Module):
    """A small transformer, pooled."""

    recomputable = tuple(f"blocks.{i}" for i in range(NUM_BLOCKS))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(NUM_BLOCKS)
        )
        self.log_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1)

    def embed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """One view after the other."""
        return self(a), self(b)


class MiniLM(SentenceEncoder):
    """A sentence encoder that was trained before, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(3.0))
        self.recomputable = tuple(f"inner.encoder.layer.{i}" for i in range(len(self.inner.encoder.layer)))
        for layer in self.train().modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.1

    def embed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both views at once."""
        first, second = self(torch.cat((a, b))).chunk(2)
        return first, second


def views(encoder: str, num_samples: int) -> tuple[Tensor, Tensor]:
    """Of each sample two, as rows of two tensors."""
    if encoder == "minilm":
        halves = Halves(train=True)
        return halves.first[:num_samples], halves.second[:num_samples]
    x = torch.randn(num_samples, NUM_TOKENS, WIDTH)
    return x, x + 0.5 * torch.randn_like(x)


def forward(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model.embed(*batch)


def plain(model: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T * model.log_scale.exp()
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def contenders(model: Encoder | MiniLM, batch: tuple[Tensor, Tensor], sizes: list[int]) -> dict[str, Callable[[], Any]]:
    """Each makes the gradients of one step; the first is the big batch at once."""
    of_all = bb.WholeBatchLoss(forward, lambda z, _: bb.info_nce(*z, scale=model.log_scale.exp()))
    found: dict[str, Callable[[], Any]] = {
        "by hand, at once": lambda: plain(model, *forward(model, batch)).backward(),
        "by hand, again": lambda: plain(model, *forward(model, batch)).backward(),
    }
    for size in [len(batch[0]), *sizes]:
        found[f"WholeBatchLoss, {size}"] = lambda size=size: bb.accumulate(model, of_all, batch, micro_batch_size=size)

    def recomputed() -> None:
        with bb.apply(bb.Plan(micro_batch_size=len(batch[0]), recompute=model.recomputable), model):
            bb.accumulate(model, of_all, batch)

    def naive(size: int) -> None:
        for a, b in zip(batch[0].split(size), batch[1].split(size), strict=True):
            (plain(model, *forward(model, (a, b))) * (len(a) / len(batch[0]))).backward()

    found["at once, all blocks recomputed"] = recomputed
    for size in sizes:
        found[f"plain accumulation, {size} (wrong)"] = lambda size=size: naive(size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--encoder", choices=("small", "minilm"), default="small")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, n = Encoder() if wanted.encoder == "small" else MiniLM(), wanted.batch_size
    batch = views(wanted.encoder, n)
    runs = contenders(model, batch, [n // 2, n // 4, n // 16])
    rows: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        with count_peak_bytes(torch.device("cpu"), track=[]) as meter:
            run()
        rows[name] = {"bytes": meter.peak_bytes, "seconds": float("inf")}
        model.zero_grad()
    for _ in range(wanted.rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            rows[name]["seconds"] = min(rows[name]["seconds"], time.process_time() - began)
            model.zero_grad()
    by_hand = [row for name, row in rows.items() if name.startswith("by hand")]
    seconds, num_bytes = min(row["seconds"] for row in by_hand), by_hand[0]["bytes"]
    for row in rows.values():
        row["times"], row["of_bytes"] = row["seconds"] / seconds, row["bytes"] / num_bytes
    if wanted.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'':36}{'seconds':>9}{'times':>7}{'MiB':>8}{'share':>7}")
    for name, row in rows.items():
        print(f"{name:36}{row['seconds']:9.3f}{row['times']:7.2f}{row['bytes'] / 2**20:8.1f}{row['of_bytes']:7.2f}")


if __name__ == "__main__":
    main()
