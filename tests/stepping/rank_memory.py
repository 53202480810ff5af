"""What the workers run to count the bytes of a rank: really alive in a step, against those of a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import bigbatch as bb
from benchmarks.planner.meter import held_by, peak_of
from tests.reference import big_batch_gradients, gradient_error
from tests.stepping.rank_cases import gradients_of

WORDS, TOKENS = 211, 16


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Words, blocks, a head. Odd sizes, so that shards of 2 and 4 ranks are padded."""

    def __init__(self, width: int = 49, num_blocks: int = 5):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 1.0  # FSDP2 warns of a view


def language(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    return Language(**how)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch_of(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (num_samples, TOKENS), generator=draw)
    return ids, ids.roll(1, 1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stays": {"reshard_after_forward": False},
    "16 bits": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def sharded(model: Any, group: Any, way: str = "plain") -> Any:
    how = {"mesh": DeviceMesh.from_group(group, "cpu"), **WAYS[way]}
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def ddp_case(group: Any, micro: int, reduce: str, width: int, as_view: bool) -> dict[str, Any]:
    """Bytes of a real step of all ranks: buckets as the allocator saw them made, and its peak in the step.

    The weights are the same without ``init_sync``, whose copies a thread of gloo may hold a little longer.
    """
    model = language(width=width)
    plain = bb.plan(model, loss_fn, batch_of(6), optimizer=adamw(model), micro_batch_size=micro, calibrate=False)
    wrap = {"process_group": group, "gradient_as_bucket_view": as_view, "init_sync": False}
    to_be = bb.plan(
        model,
        loss_fn,
        batch_of(6),
        optimizer=adamw(model),
        world_size=group.size(),
        batch_size=6 * group.size(),
        micro_batch_size=micro,
        reduce=reduce,
        calibrate=False,
    )
    model, bucket_bytes = held_by(lambda: DistributedDataParallel(model, **wrap))
    optimizer, batch = adamw(model), batch_of(6, seed=group.rank())
    found = bb.plan(model, loss_fn, batch, optimizer=optimizer, micro_batch_size=micro, reduce=reduce, calibrate=False)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=micro, reduce=reduce)
    measured = peak_of(lambda: step(batch), model, optimizer, batch)
    return {
        "buckets": bucket_bytes,
        "of parameters": sum(p.nbytes for p in model.parameters()),
        "measured": measured.peak_bytes + bucket_bytes,
        "planned": found.peak_bytes,
        "to be": to_be.peak_bytes,
        "without": plain.peak_bytes,
        "Step.measure": step.measure(batch, micro),
    }


def measured_bytes(step: bb.Step, batch: Any, micro: int) -> int:
    """The least of several peaks: a thread of gloo may hold what was sent a little longer, into the next module."""
    return min(step.measure(batch, micro) for _ in range(5))


def fsdp_case(
    group: Any,
    micro: int,
    num_samples: int,
    reduce: str,
    recompute: str = "none",
    way: str = "plain",
    make: Any = sgd,
    **how: Any,
) -> dict[str, Any]:
    """Bytes that are really alive in a step of all ranks, and the gradient, against the plan and the big batch."""
    model, batch = language(**how), batch_of(num_samples)
    options = {"micro_batch_size": micro, "recompute": recompute, "reduce": reduce, "calibrate": False}
    alone, to_be = None, None
    if way == "plain" and micro < num_samples:
        alone = bb.plan(model, loss_fn, batch, optimizer=make(model), **options).peak_bytes
        spread = {"world_size": group.size(), "batch_size": num_samples * group.size(), "sharding": "fsdp2"}
        to_be = bb.plan(model, loss_fn, batch, optimizer=make(model), **options, **spread).peak_bytes
    expected = big_batch_gradients(language(**how), loss_fn, batch)
    model = sharded(model, group, way)
    optimizer = make(model)
    plan = bb.plan(model, loss_fn, batch, optimizer=optimizer, **options)
    step = bb.Step(model, loss_fn, optimizer, plan=plan)
    measured = measured_bytes(step, batch, micro)
    bb.accumulate(model, loss_fn, batch, micro_batch_size=micro, reduce=reduce)
    return {
        "planned": plan.peak_bytes,
        "measured": measured,
        "to be": to_be,
        "alone": alone,
        "reduce": plan.reduce,
        "recompute": plan.recompute,
        "gradient": gradient_error(gradients_of(model), expected),
    }


def budget_case(group: Any, budget: float, width: int = 49) -> dict[str, Any]:
    """A step that plans for FSDP2 at its first batch: what it chose, and the bytes that it really takes.

    Args:
        budget: Of what the whole batch takes at once.
    """
    model = sharded(language(width=width), group)
    optimizer, batch = sgd(model), batch_of(16, seed=group.rank())
    direct = bb.plan(model, loss_fn, batch, optimizer=optimizer, micro_batch_size=16, recompute="none", calibrate=False)
    step = bb.Step(model, loss_fn, optimizer, memory_budget=int(budget * (direct.peak_bytes or 0)))
    try:
        plan = step.fit(batch)
    except bb.BudgetError as error:
        return {"error": str(error), "smallest": error.smallest_bytes}
    result = step(batch)
    measured = measured_bytes(step, batch, plan.micro_batch_size)
    return {
        "plan": plan,
        "sizes": result.micro_batch_sizes,
        "share": measured / (step.budget_bytes or 1),
        "reduce": step.accumulator.ranks.reducer.when,
        "error": "",
    }


def refused_case(group: Any, way: str) -> str:
    """What a step with a budget says of a model that is sharded so."""
    model = sharded(language(), group, way)
    step = bb.Step(model, loss_fn, sgd(model), memory_budget="1GiB")
    try:
        step.fit(batch_of(4))
    except bb.OptionError as error:
        return str(error)
    return "no error"
