"""Cases for the workers: exact BatchNorm over the ranks, against the one big batch in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from bigbatch.memory.offloading import MeteredHost, pretend_host
from tests.reference import gradient_error
from tests.stepping.pooled_models import big_batch, buffers_error, images, loss_fn, resnet
from tests.stepping.rank_cases import Trouble, gradients_of, plain_name, whole


class Branches(nn.Module):
    """Layers beside one another, so that their order in backward is not that of the graph; one is recomputed."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Conv2d(3, 4, 3)
        self.left = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.BatchNorm2d(4))
        self.right = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None))
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        left = self.left(x)
        run = (lambda x: checkpoint(self.right, x, use_reentrant=False)) if self.recompute else self.right
        right: Any = run(x)
        return self.last((left + right.sin()).mean((2, 3)))


class Vectors(nn.Module):
    """Layers of one value per sample; the first sees the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.norm(x.mean((2, 3))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: resnet(4, 2),
    "branches": Branches,
    "recomputed branches": lambda: Branches(recompute=True),
    "vectors": Vectors,
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def make_plain(name: str) -> nn.Module:
    """The same without recompute, with which torch counts the batch twice (pytorch/pytorch#96136)."""
    return make(name.removeprefix("recomputed "))


def share_of(batch: Any, sizes: list[int], group: Any) -> Any:
    start = sum(sizes[: group.rank()])
    return tuple(value[start : start + sizes[group.rank()]] for value in batch)


def wrapped(model: nn.Module, group: Any, *, sync: bool = False) -> Any:
    found = Wrapped(model, process_group=group)
    if sync:  # afterwards, because DDP refuses these layers on a CPU, where torch's forward of them does not work
        found.module = nn.SyncBatchNorm.convert_sync_batchnorm(found.module, group)
    return found


def compared(model: Any, truth: nn.Module, big: Any, result: Any) -> dict[str, Any]:
    return {
        "gradient": gradient_error(gradients_of(model), big.gradients),
        "loss": abs(float(result.loss) - big.loss),
        "statistics": buffers_error(getattr(model, "module", model), big),
        "buffers": {plain_name(name): value.clone() for name, value in model.named_buffers()},
        "sizes": result.micro_batch_sizes,
        "exactness": result.exactness,
    }


def exact_case(
    group: Any,
    name: str,
    sizes: list[int],
    micro: list[int | None],
    *,
    sync: bool = False,
    policy: str = "exact",
    on_host: bool = False,
) -> dict[str, Any]:
    """A step in which each rank has ``sizes`` samples and micro-batches of ``micro``.

    Args:
        on_host: What is saved lies in a store, as on a card, where backward has another order.
    """
    batch, truth = images(sum(sizes), size=8), make_plain(name)
    big = big_batch(truth, batch)
    model = wrapped(make(name), group, sync=sync)
    share, size = share_of(batch, sizes, group), micro[group.rank()]
    with pretend_host(MeteredHost()) if on_host else contextlib.nullcontext():
        result = bb.accumulate(model, loss_fn, share, micro_batch_size=size, batch_norm=policy)
    return compared(model, truth, big, result)


def late_terms(model: Any, batch: Any) -> Any:
    """Two denominators known late, so that there are two backwards and more; the samples of class 0 count in one."""
    logits = model(batch[0])
    each = nn.functional.cross_entropy(logits, batch[1], reduction="none")
    zero = (batch[1] == 0).double()
    return {
        "all": bb.Ratio(each.sum(), torch.ones_like(each).sum()),
        "zero": bb.Ratio((each.square() * zero).sum(), zero.sum()),
        "sum": bb.Sum(logits.square().sum()),
    }


def plain_late_terms(model: Any, batch: Any) -> Tensor:
    terms = late_terms(model, batch)
    return torch.stack(
        [t.numerator / t.denominator if isinstance(t, bb.Ratio) else t.term for t in terms.values()]
    ).sum()


def late_case(group: Any, sizes: list[int]) -> dict[str, Any]:
    batch, truth = images(sum(sizes), size=8), make("branches")
    big = big_batch(truth, batch, plain_late_terms)
    model = wrapped(make("branches"), group)
    share = share_of(batch, sizes, group)
    result = bb.accumulate(model, late_terms, share, micro_batch_size=2, batch_norm="exact")
    return compared(model, truth, big, result)


def weighed_case(group: Any, sizes: list[int]) -> dict[str, Any]:
    """No sample of the last rank counts; they are in the statistics, so its gradient comes from the others alone."""
    x, y = images(sum(sizes), size=8)
    y[sum(sizes[:-1]) :] = -100
    truth = make("resnet")
    big = big_batch(truth, (x, y))
    model = wrapped(make("resnet"), group)
    result = bb.accumulate(
        model,
        loss_fn,
        share_of((x, y), sizes, group),
        micro_batch_size=2,
        batch_norm="exact",
        weight=lambda batch: (batch[1] != -100).sum(),
    )
    return compared(model, truth, big, result)


def some_parameters_case(group: Any, sizes: list[int], of: str) -> float:
    """The gradient of one part alone, and of no other."""
    batch = images(sum(sizes), size=8)
    big = big_batch(make("branches"), batch)
    model = wrapped(make("branches"), group)
    share = share_of(batch, sizes, group)
    bb.accumulate(
        model, loss_fn, share, micro_batch_size=2, batch_norm="exact", parameters=getattr(model.module, of).parameters()
    )
    expected = {name: g if name.startswith(of) else None for name, g in big.gradients.items()}
    return gradient_error(gradients_of(model), expected)


def steps_case(group: Any, splits: list[list[int]]) -> float:
    """Steps of AdamW with other shares in each, against one process: the worst difference of all that is saved."""
    model, truth = wrapped(make("resnet"), group), make("resnet")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, truth)]
    step = bb.Step(model, loss_fn, optimizers[0], micro_batch_size=3, batch_norm="exact", max_grad_norm=1.0)
    for sizes in splits:
        batch = images(sum(sizes), size=8)
        step(share_of(batch, sizes, group))
        loss_fn(truth, batch).backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
    pairs = zip(model.module.state_dict().values(), truth.state_dict().values(), strict=True)
    return max(
        float((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-9)) for ours, theirs in pairs
    )


class Fails(nn.Module):
    """Has trouble in the middle of the forward or backward of one micro-batch."""

    def __init__(self, trouble: Trouble):
        super().__init__()
        self.trouble = trouble

    def forward(self, x: Tensor) -> Tensor:
        if self.trouble.where == "forward":
            return x * self.trouble.happen()
        if x.requires_grad:
            x = x * 1.0
            x.register_hook(lambda gradient: gradient * self.trouble.happen())
        return x


def scaled_case(group: Any) -> list[Any]:
    """fp16 with a scaler: a good step, and one in which rank 1 alone overflows."""
    model = wrapped(make("resnet").float(), group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    now = {"overflows": False}

    def loss(model: Any, batch: Any) -> Tensor:
        return loss_fn(model, batch) * (1e30 if now["overflows"] and group.rank() == 1 else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bb.Step(model, loss, optimizer, micro_batch_size=2, batch_norm="exact", precision=scaler)
    x, y = images(7, size=8)
    share = share_of((x.float(), y), [4, 3], group)
    skipped = []
    for overflows in (False, True):
        now["overflows"] = overflows
        skipped.append(step(share).skipped)
    return [*skipped, scaler.get_scale(), {name: p.detach().clone() for name, p in model.state_dict().items()}]


def failing_case(
    group: Any, where: str, bad: list[int], kind: str, *, calm: int = 1, between: bool = True, **options: Any
) -> dict[str, Any]:
    """Three steps; in the second, something fails on the ranks ``bad``, between two layers or at the end."""
    trouble = Trouble(where, kind, armed=False)
    inner = make("resnet")
    inner.insert(4 if between else len(inner), Fails(trouble))
    model = wrapped(inner, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=2, batch_norm="exact", **options)
    said, sizes = "", [5, 4, 3][: group.size()]
    for i in range(3):
        trouble.armed, trouble.calm = i == 1 and group.rank() in bad, calm
        try:
            result = step(share_of(images(sum(sizes), size=8), sizes, group))
            said += f"{'skipped' if result.skipped else 'done'}, {result.retries} retries; "
        except bb.BigBatchError as error:
            said += f"{type(error).__name__}: {error}; "
        except Exception as error:
            said += f"own {type(error).__name__}: {error}; "
    return {
        "weights": {plain_name(name): whole(value) for name, value in model.state_dict().items()},
        "said": said,
        "happened": trouble.happened,
        "num_steps": step.num_steps,
        "size": step.micro_batch_size,
        "gradients": [name for name, p in model.named_parameters() if p.grad is not None],
    }


def truth_after(num_steps: int, *, between: bool = True) -> dict[str, Tensor]:
    """The state of ``failing_case`` on three ranks after as many steps of one process."""
    model, sizes = make("resnet"), [5, 4, 3]
    model.insert(4 if between else len(model), nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        loss_fn(model, images(sum(sizes), size=8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def killed_case(group: Any, where: str, victim: int) -> str:
    """A rank is killed between two layers; what the others are told."""
    trouble = Trouble(where, "kill", armed=False)
    inner = make("resnet")
    inner.insert(4, Fails(trouble))
    model = wrapped(inner, group)
    step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters()), micro_batch_size=2, batch_norm="exact")
    sizes = [5, 4, 3][: group.size()]
    share = share_of(images(sum(sizes), size=8), sizes, group)
    step(share)
    trouble.armed, trouble.calm = group.rank() == victim, 1
    try:
        step(share)
    except bb.DistributedError as error:
        return f"{error.rank}: {error}"
    return "no error"


def error_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except bb.BigBatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Skips(nn.Module):
    """Leaves a layer out on rank 1: the first, or the last."""

    def __init__(self, skips: str | None) -> None:
        super().__init__()
        self.a, self.b, self.head, self.skips = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Linear(3, 5), skips

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.skips == "a" else self.a(x)
        return self.head((x if self.skips == "b" else self.b(x)).mean((2, 3)))


def told_case(group: Any) -> dict[str, str]:
    """What cannot be, as each rank is told it; nothing is left behind, and the next step works."""
    model = wrapped(make("resnet"), group)
    share = share_of(images(8, size=8), [4, 4], group)
    sharded = fully_shard(make("resnet"), mesh=DeviceMesh.from_group(group, "cpu"))

    def accumulated(model: nn.Module, loss: Any = loss_fn, batch: Any = share, **options: Any) -> str:
        return error_of(
            lambda: bb.accumulate(model, loss, batch, **{"micro_batch_size": 2, "batch_norm": "exact", **options})
        )

    def other_terms(model: Any, batch: Any) -> Any:
        return {"here" if group.rank() else "there": loss_fn(model, batch)}

    def not_a_loss(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) if group.rank() else model(batch[0])

    one = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 5)).double()
    single = tuple(value[: 1 - group.rank()] for value in share)
    found = {
        "overlap": accumulated(model, reduce="overlap"),
        "sharded": accumulated(sharded),
        "another layer": accumulated(wrapped(Skips("a" if group.rank() else None).double(), group)),
        "the end": accumulated(wrapped(Skips("b" if group.rank() else None).double(), group)),
        "other terms": accumulated(model, other_terms),
        "no loss": accumulated(model, not_a_loss),
        "one value": accumulated(wrapped(one, group), batch=single),
    }
    assert all(p.grad is None for p in model.parameters())
    return {**found, "after": accumulated(model)}


def exchanges_case(group: Any, sizes: list[int]) -> dict[str, Any]:
    """How often the ranks talk for each meeting, and whether they end with the same bits."""
    count = [0]
    before = dist.all_reduce

    def counting(*args: Any, **keywords: Any) -> Any:
        count[0] += 1
        return before(*args, **keywords)

    dist.all_reduce = counting
    try:
        found = exact_case(group, "resnet", sizes, [2] * len(sizes))
    finally:
        dist.all_reduce = before
    return {**found, "exchanges": count[0]}


def plan_case(group: Any, budget: str, *, sync: bool = False) -> dict[str, Any]:
    """A step that plans at its first batch: each rank for its share, alone."""
    batch, sizes = images(12, size=8), [7, 5]
    big = big_batch(make("resnet"), batch)
    model = wrapped(make("resnet"), group, sync=sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = bb.Step(model, loss_fn, optimizer, memory_budget=budget, batch_norm="exact")
    try:
        result = step(share_of(batch, sizes, group))
    except bb.BigBatchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "plan": step.plan.to_json() if step.plan else "",
        "loss": abs(float(result.loss) - big.loss),
        "statistics": buffers_error(model.module, big),
    }
