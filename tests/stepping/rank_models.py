"""More cases for the workers: models that are wrapped in unusual ways, and what the ranks say to one another."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Wrapped

import bigbatch as bb
from tests.reference import big_batch_gradients, gradient_error
from tests.stepping.rank_cases import (
    Trouble,
    gradients_of,
    mean_over_samples,
    mean_over_tokens,
    plain_name,
    share_of,
    tokens,
    whole,
    words,
    wrapped,
)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the collectives that are called from Python."""
    found: Counter[str] = Counter()
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
    names += ("all_gather_single", "all_gather_into_tensor")  # the second is called where torch has not got the first
    before = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counting(name: str, function: Any) -> Any:
        def call(tensor: Any, *args: Any, **keywords: Any) -> Any:
            small = isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[0] == keywords["group"].size()
            found["scalar" if name == "all_reduce" and small else name] += 1
            return function(tensor, *args, **keywords)

        return call

    for name, function in before.items():
        setattr(dist, name, counting(name, function))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _reduce_and_count(state, bucket):  # torch reads annotations, and takes no text
    state.count += 1
    buffer = bucket.buffer().div_(state.group.size())
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Reductions:
    """A communication hook that counts the reductions of DDP, and reduces as DDP does."""

    def __init__(self, model: Wrapped, group: Any):
        self.count = 0
        self.group = group
        model.register_comm_hook(self, _reduce_and_count)


class Average:
    """Counts its updates."""

    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1


def collectives_case(group: Any, reduce: str, micro: int) -> dict[str, int]:
    """What is communicated in the second of two steps, and how often schedule and average moved."""
    torch.manual_seed(0)
    model = Wrapped(words(), process_group=group)
    reductions = Reductions(model, group) if reduce == "overlap" else None
    optimizer = torch.optim.AdamW(model.parameters())
    schedule, average = torch.optim.lr_scheduler.StepLR(optimizer, 1), Average()
    step = bb.Step(
        model,
        mean_over_tokens,
        optimizer,
        micro_batch_size=micro,
        weight="tokens",
        reduce=reduce,
        scheduler=schedule,
        ema=average,
        max_grad_norm=1.0,
    )
    step(share_of(tokens(9), group))
    before = reductions.count if reductions else 0
    with counted() as found:
        step(share_of(tokens(9), group))
    return {
        "scalar": found["scalar"],
        "gradients": found["all_reduce"],
        "others": sum(found.values()) - found["scalar"] - found["all_reduce"],
        "through DDP": (reductions.count if reductions else 0) - before,
        "schedule": schedule.last_epoch,
        "average": average.count,
    }


def compiled_case(group: Any, reduce: str, backend: str, inside: bool) -> dict[str, Any]:
    """torch.compile x DDP x accumulation: the gradient of the second of two steps, and reductions in it."""
    torch._dynamo.reset()
    inner = torch.compile(words(), backend=backend) if inside else words()
    ddp = Wrapped(inner, process_group=group)
    reductions = Reductions(ddp, group) if reduce == "overlap" else None
    model: Any = ddp if inside else torch.compile(ddp, backend=backend)
    batch = tokens(9)
    once = lambda: bb.accumulate(  # noqa: E731
        model, mean_over_tokens, share_of(batch, group), micro_batch_size=1, weight="tokens", reduce=reduce
    )
    once()
    ddp.zero_grad()
    before = reductions.count if reductions else 0
    with counted() as found:
        once()
    expected = big_batch_gradients(words(), mean_over_tokens, batch)
    through_hook = reductions.count - before if reductions else found["all_reduce"]
    return {"error": gradient_error(gradients_of(model), expected), "reductions": through_hook}


def plain_loop_case(group: Any, micro: int) -> int:
    """Control: reductions of a loop without ``no_sync``."""
    model = Wrapped(words(), process_group=group)
    reductions = Reductions(model, group)
    share = share_of(tokens(9), group)
    for start in range(0, len(share["x"]), micro):
        (mean_over_tokens(model, {name: v[start : start + micro] for name, v in share.items()}) / 2).backward()
    return reductions.count


class Branches(nn.Module):
    """Which branch runs depends on the samples; nothing ever uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out = hidden.new_zeros(len(x), 1)
        for i, branch in enumerate(self.branches):
            if (chosen := x[:, 0].long() == i).any():
                out = out.index_put((chosen,), branch(hidden[chosen]))
        return out


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches().double()


def branch_batch() -> Tensor:
    """Six samples: two for each of the first three branches, in order."""
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[:, 0] = torch.tensor([0.1, 0.2, 1.1, 1.2, 2.1, 2.2])
    return x


def branch_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def branches_case(group: Any, reduce: str, **keywords: Any) -> float:
    """Each rank uses a branch of its own."""
    model = Wrapped(branches(), process_group=group, **keywords)
    x = branch_batch()
    n = len(x) // group.size()
    share = x[group.rank() * n : (group.rank() + 1) * n]
    bb.accumulate(model, branch_loss, share, micro_batch_size=1, reduce=reduce)
    return gradient_error(gradients_of(model), big_batch_gradients(branches(), branch_loss, x))


class Two(nn.Module):
    """Two networks, each in a DDP of its own."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        self.first = Wrapped(first, process_group=group) if group else first
        self.second = Wrapped(second, process_group=group) if group else second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def two_case(group: Any, only_second: bool) -> float:
    """Two DDPs inside one module; ``only_second``: gradients of one of them, as for one network of a GAN."""
    model, x = Two(group), branch_batch()
    share = x[:4][group.rank() :: group.size()]
    parameters = model.second.parameters() if only_second else None
    bb.accumulate(model, branch_loss, share, micro_batch_size=1, parameters=parameters)
    expected = big_batch_gradients(Two(), branch_loss, x[:4])
    if only_second:
        expected = {name: g if name.startswith("second") else None for name, g in expected.items()}
    return gradient_error(gradients_of(model), expected)


def added_case(group: Any) -> float:
    """``accumulate`` adds to what lies in ``.grad``, once."""
    model, batch = Wrapped(words(), process_group=group), tokens(5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    bb.accumulate(model, mean_over_tokens, share_of(batch, group), micro_batch_size=1, weight="tokens")
    expected = big_batch_gradients(words(), mean_over_tokens, batch)
    return gradient_error(gradients_of(model), {name: None if g is None else g + 1 for name, g in expected.items()})


def sparse_case(group: Any, dtype: torch.dtype = torch.float64, **options: Any) -> float:
    """A sparse gradient, of which a rank has none."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"embed": nn.Embedding(5, 3, sparse=True), "head": nn.Linear(3, 1)}).to(dtype)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        inner = getattr(model, "module", model)
        return inner["head"](inner["embed"](batch)).square().mean()

    ids = torch.tensor([[0, 1], [1, 2], [3, 3]])
    model = Wrapped(make(), process_group=group)
    bb.accumulate(model, loss_fn, ids[group.rank() : group.rank() + 1] if group.rank() < 2 else ids[:0], **options)
    expected = big_batch_gradients(make(), loss_fn, ids[:2])
    dense = lambda found: {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}  # noqa: E731
    return gradient_error(dense(gradients_of(model)), dense(expected))


def error_of(function: Any) -> str:
    try:
        function()
    except bb.BigBatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_case(group: Any) -> dict[str, str]:
    """Models that cannot be kept equal over the ranks."""
    batch = share_of(tokens(4), group)

    def accumulated(model: nn.Module, **options: Any) -> str:
        run = lambda: bb.accumulate(model, mean_over_samples, batch, weight="samples", **options)  # noqa: E731
        return error_of(run)

    outer = words()
    outer.hidden = Wrapped(outer.hidden, process_group=group)
    whole_model = Wrapped(words(), process_group=group)
    hooked = Wrapped(words(), process_group=group)
    Reductions(hooked, group)
    empty = {name: value[:0] for name, value in batch.items()}
    return {
        "partly": accumulated(outer),
        "hooked": accumulated(hooked),
        "static": accumulated(Wrapped(words(), process_group=group, static_graph=True)),
        "each": accumulated(Wrapped(words(), process_group=group), reduce="each"),
        "16 bits": accumulated(Wrapped(words().bfloat16(), process_group=group), reduce="overlap"),
        "only some": accumulated(whole_model, reduce="overlap", parameters=whole_model.parameters()),
        "all empty": error_of(lambda: bb.accumulate(Wrapped(words(), process_group=group), mean_over_samples, empty)),
    }


def plain_case(group: Any) -> str:
    return error_of(lambda: bb.accumulate(words(), mean_over_samples, tokens(4), weight="samples"))


class Normed(nn.Module):
    """BatchNorm whose input passes no other one, so that its merged statistics are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def batch_norm_case(group: Any, policy: str, sizes: list[int]) -> dict[str, Any]:
    """Running statistics after one step, here and by the big batch."""
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1000.0
    model = Wrapped(normed(), process_group=group)
    start = sum(sizes[: group.rank()])
    share = x[start : start + sizes[group.rank()]]
    result = bb.accumulate(model, branch_loss, share, micro_batch_size=3, batch_norm=policy)
    truth = normed()
    branch_loss(truth, x).backward()
    found = {plain_name(name): value.clone() for name, value in model.named_buffers()}
    expected = dict(truth.named_buffers())
    return {
        "buffers": found,
        "error": max(float((found[n].double() - b).norm() / b.double().norm()) for n, b in expected.items()),
        "exactness": result.exactness,
    }


def sync_batch_norm_case(group: Any) -> str:
    """SyncBatchNorm stays as torch has it: it runs on CUDA only, and says so."""
    model = Wrapped(nn.SyncBatchNorm.convert_sync_batchnorm(normed(), group), process_group=group)
    try:
        bb.accumulate(model, branch_loss, branch_batch()[group.rank() :: group.size()], micro_batch_size=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def dropout_case(group: Any) -> dict[str, Any]:
    """Every rank draws its own random numbers, and they go on from step to step."""
    torch.manual_seed(group.rank())
    model = Wrapped(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double(), process_group=group)
    step = bb.Step(model, branch_loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=1)
    first = step(branch_batch()[group.rank() :: group.size()])
    return {
        "exactness": first.exactness,
        "drawn": float(torch.rand(())),
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
    }


def shards_case(group: Any) -> dict[str, Any]:
    """The norm of sharded gradients, and a step that is skipped because one shard is not finite."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model, batch = fully_shard(words(), mesh=mesh), tokens(6)
    step = bb.Step(
        model,
        mean_over_tokens,
        torch.optim.SGD(model.parameters(), lr=0.0),
        micro_batch_size=1,
        weight="tokens",
        grad_norm=True,
        on_non_finite="skip",
    )
    norm = float(step(share_of(batch, group)).grad_norm)
    expected = big_batch_gradients(words(), mean_over_tokens, batch)
    truth = float(torch.stack([g.square().sum() for g in expected.values() if g is not None]).sum().sqrt())
    scale = 1e200  # every entry is finite, and the sum of their squares is not
    large = bb.Step(
        model,
        lambda m, b: mean_over_tokens(m, b) * scale,
        torch.optim.SGD(model.parameters(), lr=0.0),
        weight="tokens",
        grad_norm=True,
    )
    spoiled = group.rank() == 0
    bad = bb.Step(
        model,
        lambda m, b: mean_over_tokens(m, b) * (float("nan") if spoiled else 1.0),
        torch.optim.SGD(model.parameters(), lr=0.0),
        weight="tokens",
        on_non_finite="skip",
    )
    return {
        "error": abs(norm - truth) / truth,
        "large": abs(float(large(share_of(batch, group)).grad_norm) - truth * scale) / (truth * scale),
        "skipped": bad(share_of(batch, group)).skipped,
        "after": [name for name, p in model.named_parameters() if p.grad is not None],
    }


def different_numbers_of_steps_case(group: Any) -> str:
    """One rank leaves out a step."""
    model = Wrapped(words(), process_group=group)
    step = bb.Step(model, mean_over_samples, torch.optim.SGD(model.parameters(), lr=0.1), weight="samples")
    other = bb.Step(model, mean_over_samples, torch.optim.SGD(model.parameters(), lr=0.1), weight="samples")
    step(share_of(tokens(4), group))
    return error_of(lambda: (step if group.rank() else other)(share_of(tokens(4), group)))


def unused_case(group: Any) -> str:
    """A parameter that DDP waits for in vain is told in the same step; the group cannot be used afterwards."""
    return error_of(lambda: branches_case(group, "overlap"))


def scaled_case(group: Any, wrap: str) -> list[Any]:
    """fp16 with a scaler: two good steps, and one in which rank 1 alone overflows."""
    model = wrapped(words().float(), wrap, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    now = {"overflows": False}

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mean_over_tokens(model, batch) * (1e30 if now["overflows"] and group.rank() == 1 else 1.0)

    step = bb.Step(model, loss_fn, optimizer, micro_batch_size=2, weight="tokens", precision=scaler)
    results = []
    for overflows in (False, False, True):
        now["overflows"] = overflows
        results.append(step(share_of(tokens(9), group)).skipped)
    return [*results, scaler.get_scale()]


def scaled_without_samples_case(group: Any, beside: str) -> list[Any]:
    """A first step in which the other rank has no samples, or none that counts; and the same unscaled by hand."""
    share = tokens(4) if group.rank() == 0 or beside == "padding" else share_of(tokens(0), group)
    if group.rank() > 0:
        share["labels"] = torch.full_like(share["labels"], -100)
    models = [wrapped(words().float(), "ddp", group) for _ in range(2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = bb.Step(models[0], mean_over_tokens, optimizers[0], weight="tokens", precision=scalers[0])
    skipped = step(share).skipped
    bb.accumulate(models[1], mean_over_tokens, share, weight="tokens", precision=scalers[1])
    scalers[1].unscale_(optimizers[1])
    scalers[1].step(optimizers[1])
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return [skipped, all(torch.equal(ours, theirs) for ours, theirs in pairs), scalers[0].get_scale()]


def retried_alone_case(group: Any, wrap: str) -> tuple[int, float]:
    """One rank, wrapped: a failed forward inside FSDP2 leaves nothing behind, so the step is made again."""
    model = wrapped(words(), wrap, group)
    trouble = Trouble("forward", "memory", armed=True)
    trouble.calm = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = bb.Step(model, trouble.loss(mean_over_tokens), optimizer, micro_batch_size=4, weight="tokens")
    retries = step(tokens(8)).retries
    truth = words()
    mean_over_tokens(truth, tokens(8)).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in truth.named_parameters()}
    return retries, gradient_error({plain_name(name): whole(p) for name, p in model.named_parameters()}, expected)


def after_a_loop_case(group: Any, reduce: str | None, data: str, last_is_empty: bool) -> float:
    """A step after DDP has reduced once, in a loop by hand or in a step; then it would put its buckets in order."""
    batch = tokens(7)
    outputs, loss = lambda m, b: m(b["x"]).mean(1), lambda out, b: (out.T @ out / len(out)).square().sum()
    of_samples, of_whole = mean_over_samples, lambda m, b: loss(outputs(m, b), b)
    expected = big_batch_gradients(words(), of_whole if data == "whole batch" else of_samples, batch)
    model = Wrapped(words(), process_group=group)
    if reduce is None:
        mean_over_samples(model, batch).backward()
    else:
        bb.accumulate(model, mean_over_samples, batch, reduce=reduce)
    model.zero_grad()
    loss_fn = bb.WholeBatchLoss(outputs, loss) if data == "whole batch" else of_samples
    share = share_of(batch, group, last_is_empty=last_is_empty)
    bb.accumulate(model, loss_fn, share, micro_batch_size=2, weight=None if data == "whole batch" else "samples")
    return gradient_error(gradients_of(model), expected)


def planned_after_a_loop_case(group: Any) -> tuple[int, ...]:
    """A rank without samples makes no plan, and so no forward, while the others try theirs."""
    model = Wrapped(words(), process_group=group)
    mean_over_samples(model, tokens(4)).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters())
    step = bb.Step(model, mean_over_samples, optimizer, weight="samples", memory_budget="50MiB")
    return step(share_of(tokens(7), group, last_is_empty=True)).micro_batch_sizes


def unfinished_case(group: Any) -> tuple[str, bool]:
    """A backward by hand has left DDP waiting for a parameter; then a step cannot begin, and nothing is lost."""
    model = Wrapped(words(), process_group=group)
    model.module.embed(tokens(2)["x"]).sum().backward()  # not through DDP
    before = model.module.embed.weight.grad
    model(tokens(2)["x"])
    model.module.scale.square().sum().backward()  # of all that DDP waits for, this alone
    try:
        bb.accumulate(model, mean_over_samples, share_of(tokens(4), group), weight="samples")
    except RuntimeError as error:
        return str(error), model.module.embed.weight.grad is before
    return "no error", False
