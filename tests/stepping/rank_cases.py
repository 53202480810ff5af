"""What the workers run: a share of a batch on each rank, against the one big batch in one process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import bigbatch as bb
from tests.reference import Gradients, big_batch_gradients, big_batch_loss, gradient_error

CLASSES, TOKENS, WIDTH = 5, 4, 6


class Words(nn.Module):
    """Embedding, one hidden layer, a head; and a parameter without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(ids))) * self.scale


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def tokens(num_samples: int) -> dict[str, Tensor]:
    """Samples whose numbers of valid labels grow from the first to the last."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (num_samples, TOKENS), generator=draw)
    labels = torch.randint(0, CLASSES, (num_samples, TOKENS), generator=draw)
    for i in range(num_samples):
        labels[i, max(1, TOKENS * (i + 1) // num_samples) :] = -100
    return {"x": ids, "labels": labels}


def mean_over_samples(model: nn.Module, batch: Any) -> Tensor:
    target = F.one_hot(batch["x"], CLASSES).to(next(model.parameters()).dtype)
    return (model(batch["x"]) - target).square().sum((1, 2)).mean()


def mean_over_tokens(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def penalty(model: nn.Module) -> Tensor:
    found = [p for name, p in model.named_parameters() if name.endswith("scale")]
    return found[0].square().sum()


def two_terms(model: nn.Module, batch: Any) -> Any:
    out = model(batch["x"])
    target = F.one_hot(batch["x"], CLASSES).to(out.dtype)
    return {
        "words": F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()),
        "rows": (out - target).square().sum((1, 2)).mean(),
    }


def sum_of_two_terms(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(list(two_terms(model, batch).values())).sum()


def ratio_of_tokens(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["x"]).flatten(0, 1)
    total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return bb.Ratio(total, (batch["labels"] != -100).sum())


def mixed(model: nn.Module, batch: Any) -> Any:
    """A ratio, a mean and a constant: denominators known late and early, and a term that counts once."""
    out = model(batch["x"])
    return {
        "ratio": ratio_of_tokens(model, batch),
        "mean": out.square().sum((1, 2)).mean(),
        "constant": bb.Constant(penalty(model) + 0.0 * out.sum()),
    }


def plain_mixed(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["x"]).flatten(0, 1)
    ratio = F.cross_entropy(logits, batch["labels"].flatten())
    return ratio + model(batch["x"]).square().sum((1, 2)).mean() + penalty(model)


def six_terms(model: nn.Module, batch: Any) -> Any:
    """More terms than the exchange has room for at first."""
    out = model(batch["x"]).square()
    return {f"term {i}": out[..., i % CLASSES].sum(1).mean() * (i + 1) for i in range(6)}


def sum_of_six_terms(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(list(six_terms(model, batch).values())).sum()


# Loss for the ranks, the same as one plain number, options, samples, and whether the last rank gets none of them.
DATA: dict[str, tuple[Any, Any, dict[str, Any], int, bool]] = {
    "mean": (mean_over_samples, mean_over_samples, {"weight": "samples"}, 12, False),
    "uneven tokens": (mean_over_tokens, mean_over_tokens, {"weight": "tokens"}, 12, False),
    "indivisible": (mean_over_samples, mean_over_samples, {"weight": "samples"}, 7, False),
    "empty rank": (mean_over_tokens, mean_over_tokens, {"weight": "tokens"}, 5, True),
    "two terms": (two_terms, sum_of_two_terms, {"weight": {"words": "tokens", "rows": "samples"}}, 7, False),
    "late ratio": (ratio_of_tokens, mean_over_tokens, {}, 7, True),
    "six terms": (six_terms, sum_of_six_terms, {"weight": "samples"}, 5, True),
    "padded rank": (mean_over_tokens, mean_over_tokens, {"weight": "tokens"}, 8, False),
    "mixed": (mixed, plain_mixed, {"weight": "samples"}, 7, True),
}
WRAPS = ("ddp", "compiled", "compiled inside", "fsdp2")


def lengths(num_samples: int, num_ranks: int, *, last_is_empty: bool) -> list[int]:
    """Samples of each rank, the first ones with more."""
    sharing = num_ranks - 1 if last_is_empty and num_ranks > 1 else num_ranks
    return [num_samples // sharing + (rank < num_samples % sharing) for rank in range(sharing)] + [0] * (
        num_ranks - sharing
    )


def share_of(batch: dict[str, Tensor], group: Any, *, last_is_empty: bool = False) -> dict[str, Tensor]:
    each = lengths(len(batch["x"]), group.size(), last_is_empty=last_is_empty)
    first = sum(each[: group.rank()])
    return {name: value[first : first + each[group.rank()]] for name, value in batch.items()}


def micro_batches(share: Any, micro: int | str) -> tuple[Any, int | None]:
    """The batch and the micro-batch size; "uneven" is cut by hand: 1, then 2, then 3 and so on."""
    if micro != "uneven":
        return share, micro if isinstance(micro, int) else None
    cuts, start = [], 0
    for size in range(1, len(share["x"]) + 1):
        if start < len(share["x"]):
            cuts.append({name: value[start : start + size] for name, value in share.items()})
        start += size
    return bb.LogicalBatch(cuts), None


def wrapped(model: Any, wrap: str, group: Any, *, backend: str = "aot_eager") -> Any:
    if wrap == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.hidden, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if wrap == "compiled inside":
        return DistributedDataParallel(torch.compile(model, backend=backend), process_group=group)
    found = DistributedDataParallel(model, process_group=group)
    return torch.compile(found, backend=backend) if wrap == "compiled" else found


def whole(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor that may be sharded."""
    if tensor is None:
        return None
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("module.", "")


def gradients_of(model: nn.Module) -> Gradients:
    return {plain_name(name): whole(p.grad) for name, p in model.named_parameters()}


def gradient_case(
    group: Any, wrap: str, data: str, micro: int | str, reduce: str = "after", backend: str = "aot_eager"
) -> dict[str, float]:
    """How far gradient and loss of the ranks are from those of the big batch."""
    loss_fn, plain, options, num_samples, last_is_empty = DATA[data]
    batch = tokens(num_samples)
    if data == "padded rank":  # the last rank has samples, of which nothing counts
        batch["labels"][num_samples // 2 :] = -100
    expected = big_batch_gradients(words(), plain, batch)
    model = wrapped(words(), wrap, group, backend=backend)
    torch._dynamo.reset()

    share, size = micro_batches(share_of(batch, group, last_is_empty=last_is_empty), micro)
    result = bb.accumulate(model, loss_fn, share, micro_batch_size=size, reduce=reduce, **options)

    return {
        "gradient": gradient_error(gradients_of(model), expected),
        "loss": abs(float(result.loss) - big_batch_loss(words(), plain, batch)),
        "weight": float(result.weight),
    }


def mean_of_means_case(group: Any) -> float:
    """Control: what DDP does by itself with shares of different weight."""
    batch = tokens(7)
    model = DistributedDataParallel(words(), process_group=group)
    mean_over_tokens(model, share_of(batch, group)).backward()
    return gradient_error(gradients_of(model), big_batch_gradients(words(), mean_over_tokens, batch))


def ten_steps(model: nn.Module, loss_fn: Any, batches: list[Any], micro: int | None, **options: Any) -> list[float]:
    """AdamW, clipping and OneCycle; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=len(batches) + 1)
    step = bb.Step(
        model,
        loss_fn,
        optimizer,
        micro_batch_size=micro,
        scheduler=schedule,
        max_grad_norm=0.5,
        weight="tokens",
        **options,
    )
    return [float(step(batch).loss) for batch in batches]


def ten_plain_steps(model: nn.Module, batches: list[Any]) -> list[float]:
    """The same in one process, without bigbatch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=len(batches) + 1)
    losses = []
    for batch in batches:
        loss = mean_over_tokens(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def steps_case(group: Any, wrap: str, reduce: str = "after", micro: int | None = 2) -> dict[str, float]:
    """Largest differences of losses and weights to ten steps of one process."""
    batches = [tokens(5 + i % 4) for i in range(10)]
    expected, model = words(), wrapped(words(), wrap, group)
    shares = [share_of(batch, group, last_is_empty=i % 2 == 0) for i, batch in enumerate(batches)]
    losses = ten_steps(model, mean_over_tokens, shares, micro, reduce=reduce)
    truth = ten_plain_steps(expected, batches)
    weights = {plain_name(name): whole(p) for name, p in model.named_parameters()}
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, truth, strict=True)),
        "weights": gradient_error(weights, {name: p.detach() for name, p in expected.named_parameters()}),
    }


def failing_steps(
    group: Any, where: str, bad: list[int], kind: str, *, micro_batch: int = 1, **options: Any
) -> dict[str, Any]:
    """Three steps; in the second, something fails on the ranks ``bad``, once. What is left, to be compared over ranks.

    Args:
        where: "forward", "backward" or "optimizer".
        kind: "memory", "nan", "error" or "kill".
        micro_batch: In which it fails, from 1; a rank may not have so many.
    """
    model = wrapped(words(), "ddp", group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trouble = Trouble(where, kind, armed=False)
    trouble.install(optimizer)
    step = bb.Step(model, trouble.loss(mean_over_tokens), optimizer, micro_batch_size=2, weight="tokens", **options)
    said = ""
    for i in range(3):
        trouble.armed, trouble.calm = i == 1 and group.rank() in bad, micro_batch - 1
        try:
            result = step(share_of(tokens(7 + i), group))
            said += f"{'skipped' if result.skipped else 'done'}, {result.retries} retries; "
        except bb.BigBatchError as error:
            said += f"{type(error).__name__}: {error}; "
        except Exception as error:
            said += f"own {type(error).__name__}: {error}; "
    return {
        "weights": {plain_name(name): whole(p) for name, p in model.named_parameters()},
        "said": said,
        "happened": trouble.happened,
        "num_steps": step.num_steps,
        "size": step.micro_batch_size,
        "gradients": [name for name, p in model.named_parameters() if p.grad is not None],
    }


class Trouble:
    """Makes one step fail once on this rank."""

    def __init__(self, where: str, kind: str, *, armed: bool):
        self.where, self.kind, self.armed = where, kind, armed
        self.calm = 0  # times that nothing happens before
        self.happened = False

    def happen(self) -> float:
        """Raise, or return what to multiply by."""
        if not self.armed:
            return 1.0
        if self.calm and self.where != "optimizer":
            self.calm -= 1
            return 1.0
        self.armed, self.happened = False, True
        if self.kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB (in a test)")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "error":
            raise KeyError("sample 17")
        return float("nan")

    def loss(self, loss_fn: Any) -> Any:
        def with_trouble(model: nn.Module, batch: Any) -> Any:
            factor = self.happen() if self.where == "forward" else 1.0
            loss = loss_fn(model, batch) * factor
            if self.where == "backward":
                loss.register_hook(lambda gradient: gradient * self.happen())
            return loss

        return with_trouble

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        if self.where == "optimizer":
            optimizer.register_step_post_hook(lambda *_: self.happen() and None)


def truth_after(skipped: bool) -> dict[str, Tensor]:
    """Weights after the steps of ``failing_steps`` in one process, where none fails, or the second is left out."""
    model = words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        if not (skipped and i == 1):
            mean_over_tokens(model, tokens(7 + i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def killed_steps(group: Any, where: str, victim: int, wrap: str = "ddp", reduce: str = "after") -> tuple[str, float]:
    """Two steps; in the second a rank is killed. What the others are told, and after how many seconds."""
    model = wrapped(words(), wrap, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trouble = Trouble(where, "kill", armed=False)
    trouble.install(optimizer)
    step = bb.Step(model, trouble.loss(mean_over_tokens), optimizer, micro_batch_size=2, weight="tokens", reduce=reduce)
    step(share_of(tokens(7), group))
    trouble.armed = group.rank() == victim
    began = time.monotonic()
    try:
        for _ in range(2):  # who is killed inside its optimizer is missed in the step after that
            step(share_of(tokens(7), group))
    except bb.DistributedError as error:
        return f"{error.rank}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def left_steps(group: Any, kind: str, wrap: str, reduce: str) -> str:
    """Rank 1 fails where the others cannot be told, and ends as a program does; what the others are told."""
    model = wrapped(words(), wrap, group)
    trouble = Trouble("forward", kind, armed=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bb.Step(model, trouble.loss(mean_over_tokens), optimizer, micro_batch_size=2, weight="tokens", reduce=reduce)
    step(share_of(tokens(7), group))
    trouble.armed = group.rank() == 1
    try:
        step(share_of(tokens(7), group))
    except bb.DistributedError as error:
        if group.rank() == 1:
            os._exit(7 if str(error).startswith("Rank 1 failed: ") and error.rank == 1 else 8)
        return str(error)
    return "no error"


def plan_case(group: Any, budgets: list[str], wrap: str = "ddp") -> dict[str, Any]:
    """A step that plans at its first batch, where the ranks have other budgets."""
    model = wrapped(words(), wrap, group)
    before = {plain_name(name): whole(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = budgets[group.rank()]
    step = bb.Step(model, mean_over_tokens, optimizer, memory_budget=budget, weight="tokens")
    batch = tokens(64)
    try:
        step.fit(share_of(batch, group))
    except bb.BigBatchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    unmoved = all(whole(value).equal(before[plain_name(name)]) for name, value in model.named_parameters())
    result = step(share_of(batch, group))
    truth = words()
    mean_over_tokens(truth, batch).backward()
    with torch.no_grad():
        for p in truth.parameters():
            p -= 0.1 * p.grad
    weights = {plain_name(name): whole(p) for name, p in model.named_parameters()}
    error = gradient_error(weights, {name: p.detach() for name, p in truth.named_parameters()})
    return {"plan": step.plan.to_json(), "sizes": result.micro_batch_sizes, "unmoved": unmoved, "weights": error}


def told_case(group: Any) -> dict[str, str]:
    """What is wrong with the batch or the loss on some rank, as each rank is told it; nothing is left behind."""
    model = wrapped(words(), "ddp", group)
    batch = share_of(tokens(6), group)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}

    def other_terms(model: nn.Module, batch: Any) -> Any:
        loss = mean_over_samples(model, batch)
        return {"here": loss} if group.rank() else {"there": loss}

    def error_of(loss_fn: Any, batch: Any, **options: Any) -> str:
        try:
            bb.accumulate(model, loss_fn, batch, **options)
        except bb.BigBatchError as error:
            assert all(p.grad is None for p in model.parameters())
            return f"{type(error).__name__}: {error}"
        return "no error"

    return {
        "nothing counts": error_of(mean_over_tokens, nothing, weight="tokens"),
        "other terms": error_of(other_terms, batch),
        "no batch": error_of(mean_over_samples, batch if group.rank() else 7),
    }


def iterator_case(group: Any) -> float:
    """Micro-batches that come one by one, of unknown number and weight."""
    batch = tokens(7)
    model, (cut, _) = wrapped(words(), "ddp", group), micro_batches(share_of(batch, group), "uneven")
    bb.accumulate(model, mean_over_tokens, bb.LogicalBatch(iter(cut.micro_batches)), weight="tokens")
    return gradient_error(gradients_of(model), big_batch_gradients(words(), mean_over_tokens, batch))


def texts(num_samples: int) -> list[Tensor]:
    """Samples of 1 to 12 tokens, in no order."""
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(0, CLASSES, (1 + 7 * i % 12,), generator=draw) for i in range(num_samples)]


def padded_texts(samples: list[Tensor]) -> dict[str, Tensor]:
    labels = [(5 * sample + 1) % CLASSES for sample in samples]
    return {
        "x": pad_sequence(samples, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def grouped_case(group: Any, wrap: str, num_samples: int, reduce: str = "after", **options: Any) -> dict[str, Any]:
    """Each rank groups its share by length; the last of three has none. Against the big batch."""
    batch = texts(num_samples)
    each = lengths(num_samples, group.size(), last_is_empty=group.size() == 3)
    first = sum(each[: group.rank()])
    share = batch[first : first + each[group.rank()]]
    expected = big_batch_gradients(words(), mean_over_tokens, padded_texts(batch))
    model = wrapped(words(), wrap, group)
    how: dict[str, Any] = {"collate": padded_texts, "length": len, "max_tokens": 24, "weight": "tokens", **options}
    try:
        result = bb.accumulate(model, mean_over_tokens, share, reduce=reduce, **how)
    except bb.BigBatchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "gradient": gradient_error(gradients_of(model), expected),
        "loss": abs(float(result.loss) - big_batch_loss(words(), mean_over_tokens, padded_texts(batch))),
        "sizes": result.micro_batch_sizes,
        "padding": result.padding,
    }


def grouped_plan_case(group: Any, budgets: list[str]) -> dict[str, Any]:
    """Ranks with other lengths and budgets plan one step; texts of rank 0 are four times as long."""
    model = wrapped(words(), "ddp", group)
    longest = (200, 50)[group.rank()]
    share = [torch.arange(longest - i) % CLASSES for i in range(24)]
    how: dict[str, Any] = {"collate": padded_texts, "length": len, "weight": "tokens"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bb.Step(model, mean_over_tokens, optimizer, memory_budget=budgets[group.rank()], **how)
    plan = step.fit(share)
    return {"plan": plan.to_json(), "max_tokens": plan.max_tokens, "sizes": step(share).micro_batch_sizes}
