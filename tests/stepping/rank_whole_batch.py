"""Cases for the workers: losses that look across the samples of all ranks, against the one big batch in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Wrapped

import bigbatch as bb
from bigbatch.stepping.coupled import contrastive
from tests.reference import big_batch_gradients, gradient_error, slice_batch
from tests.stepping.coupled import LOSSES, Encoder, make_batch
from tests.stepping.rank_cases import Trouble, gradients_of, lengths
from tests.stepping.rank_models import counted, error_of, normed

# By name, how many samples there are, and how many each of up to four ranks has.
SHARES: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda size: [5] * size,
    "uneven": lambda size: [5, 1, 4, 2][:size] if size > 1 else [7],
    "empty rank": lambda size: [*lengths(8, size, last_is_empty=True)],
    "empty first": lambda size: [0, *lengths(8, size - 1, last_is_empty=False)] if size > 1 else [8],
}


def with_size(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda model, o, batch: plain(model, o, batch) + 0.1 * o["p"].square().mean()


# These do not change when all rows are shifted: the gradient of a bias would be 0, and its error rounding alone.
SHIFTED = ("Pearson", "pairwise AUC")
CASES = LOSSES | {name: dataclasses.replace(LOSSES[name], plain=with_size(LOSSES[name].plain)) for name in SHIFTED}


def encoder(dropout: float = 0.0) -> Encoder:
    torch.manual_seed(0)
    return Encoder(dropout).double()


def in_micro_batches(share: dict[str, Tensor], micro: int | str) -> tuple[Any, int | None]:
    """The batch and the micro-batch size; "uneven" is cut by hand: 1, then 2, then 3 and so on."""
    if micro != "uneven":
        return share, int(micro)
    return bb.LogicalBatch([slice_batch(share, *cut) for cut in cuts(len(share["t"]), micro)], whole=share), None


def cuts(num: int, micro: int | str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start = 0
    while start < num:
        size = len(found) + 1 if micro == "uneven" else int(micro)
        found.append((start, min(start + size, num)))
        start += size
    return found


def share_of(batch: dict[str, Tensor], sizes: list[int], rank: int) -> dict[str, Tensor]:
    first = sum(sizes[:rank])
    return slice_batch(batch, first, first + sizes[rank])


def truth(name: str, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor | None], float]:
    coupled = CASES[name]
    loss, found = coupled.reference(encoder(), batch, [len(batch["t"])])
    return found, float(loss)


def wrapped(model: Any, wrap: str, group: Any) -> Any:
    if wrap == "fsdp2":
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.body, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return Wrapped(model, process_group=group)


def gradient_case(group: Any, name: str, shares: str, micro: int | str, *, steps: bool = False) -> dict[str, float]:
    """How far gradient and loss of all ranks are from those of the big batch, by ``accumulate`` or by a ``Step``."""
    sizes = SHARES[shares](group.size())
    batch = make_batch(sum(sizes))
    expected, loss = truth(name, batch)
    inner = encoder()
    model = Wrapped(inner, process_group=group)
    loss_fn = CASES[name].loss_fn(inner)
    given, size = in_micro_batches(share_of(batch, sizes, group.rank()), micro)
    if steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = {n: p.detach().clone() for n, p in inner.named_parameters()}
        result = bb.Step(model, loss_fn, optimizer, micro_batch_size=size)(given)
        found = {n: before[n] - p.detach() for n, p in inner.named_parameters()}
        expected = {n: torch.zeros_like(before[n]) if g is None else g for n, g in expected.items()}
    else:
        result = bb.accumulate(model, loss_fn, given, micro_batch_size=size)
        found = gradients_of(model)
    return {
        "gradient": gradient_error(found, expected),
        "loss": abs(float(result.loss) - loss) / abs(loss),
        "weight": float(result.weight) - sum(sizes),
        "own": abs(sum(result.micro_batch_sizes) - sizes[group.rank()]),
    }


def own_negatives_case(group: Any, name: str) -> float:
    """Control: each rank has the loss of its own share, and DDP averages."""
    sizes = SHARES["equal"](group.size())
    batch = make_batch(sum(sizes))
    coupled, inner = CASES[name], encoder()
    model, share = Wrapped(inner, process_group=group), share_of(batch, sizes, group.rank())
    coupled.plain(inner, coupled.outputs(model, share), share).backward()
    found = {n: g for n, g in gradients_of(model).items() if not n.startswith("router")}
    return gradient_error(found, {n: g for n, g in truth(name, batch)[0].items() if n in found})


def inside_case(group: Any, wrap: str, reduce: str, shares: str, micro: int) -> dict[str, float]:
    """Gradients that are summed inside backward: of FSDP2, and of DDP in the last one."""
    sizes = SHARES[shares](group.size())
    batch = make_batch(sum(sizes))

    def forward(m: Any, b: Any) -> Any:
        return m(b["a"]), m(b["b"])

    def make() -> nn.Module:
        inner: Any = encoder()
        del inner.router, inner.bias
        if wrap == "fsdp2":
            del inner.log_scale
        return inner

    def loss_of(inner: Any) -> Callable[[Any, Any], Tensor]:
        scale = (lambda: 3.0) if wrap == "fsdp2" else (lambda: inner.log_scale.exp())
        return lambda o, b: bb.info_nce(*o, scale=scale()) + (b["t"] * o[0].sum(1)).std()

    def plain(model: Any, batch: Any) -> Tensor:
        return loss_of(model)(forward(model, batch), batch)

    expected, inner = big_batch_gradients(make(), plain, batch), make()
    model = wrapped(inner, wrap, group)
    loss_fn = bb.WholeBatchLoss(forward, loss_of(inner))
    given = share_of(batch, sizes, group.rank())
    errors, result = [], None
    for _ in range(2):  # DDP makes its buckets anew in the second
        result = bb.accumulate(model, loss_fn, given, micro_batch_size=micro, reduce=reduce)
        errors.append(gradient_error(gradients_of(model), expected))
        model.zero_grad()
    assert result is not None
    return {"gradient": max(errors), "loss": abs(float(result.loss) - float(plain(make(), batch).detach()))}


def dropout_case(group: Any, micro: int) -> dict[str, Any]:
    """With dropout, against the big batch whose masks are those that the ranks have drawn."""
    sizes = SHARES["uneven"](group.size())
    batch, coupled = make_batch(sum(sizes)), LOSSES["InfoNCE"]
    inner, outputs, after = encoder(0.3), [], None
    reference = encoder(0.3)
    for rank in range(group.size()):
        torch.manual_seed(100 + rank)
        share = share_of(batch, sizes, rank)
        first, *others = cuts(sizes[rank], micro)
        last = [coupled.outputs(reference, slice_batch(share, *cut)) for cut in (*others, first)]
        outputs += [last[-1], *last[:-1]]  # the first micro-batch comes last
        if rank == group.rank():
            after = torch.get_rng_state()
    joined = {name: torch.cat([one[name] for one in outputs]) for name in ("a", "b")}
    coupled.plain(reference, joined, batch).backward()
    torch.manual_seed(100 + group.rank())
    model = Wrapped(inner, process_group=group)
    result = bb.accumulate(model, coupled.loss_fn(inner), share_of(batch, sizes, group.rank()), micro_batch_size=micro)
    found = gradients_of(model)
    expected = gradients_of(reference)
    goes_on = after is not None and torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(100)  # control: every rank with the masks of the first
    other = encoder(0.3)
    coupled.plain(other, coupled.outputs(other, batch), batch).backward()
    return {
        "gradient": gradient_error(found, expected),
        "control": gradient_error(gradients_of(other), expected),
        "goes on": goes_on,
        "exactness": result.exactness,
    }


@contextlib.contextmanager
def watched_rows(trouble: Callable[[int], Any] = lambda number: None) -> Iterator[list[int]]:
    """The rows of each chunk that is computed, in forward and again in backward; ``trouble`` gets its number."""
    found: list[int] = []
    before = contrastive._similarities

    def similarities(rows: Tensor, columns: Tensor) -> Tensor:
        found.append(len(rows))
        trouble(len(found))
        return before(rows, columns)

    contrastive._similarities = similarities
    try:
        yield found
    finally:
        contrastive._similarities = before


def rows_case(group: Any, num_samples: int) -> list[int]:
    """The rows that this rank computes of all pairs."""
    sizes = lengths(num_samples, group.size(), last_is_empty=False)
    inner = encoder()
    loss_fn = bb.WholeBatchLoss(LOSSES["SigLIP"].outputs, lambda o, b: bb.siglip(o["a"], o["b"], chunk_size=4))
    with watched_rows() as found:
        share = share_of(make_batch(num_samples), sizes, group.rank())
        bb.accumulate(Wrapped(inner, process_group=group), loss_fn, share, micro_batch_size=3)
    return found


def failing_case(group: Any, where: str, kind: str, bad: list[int], micro: int = 2, **options: Any) -> dict[str, Any]:
    """Three steps; in the second, something fails on the ranks ``bad``, once. What is left, to compare over ranks."""
    sizes = [4] * group.size()
    inner = encoder()
    model = Wrapped(inner, process_group=group)
    trouble = Trouble("forward", kind, armed=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    passes = {"first pass": 1, "second pass": 2, "only pass": 0}

    def forward(m: Any, b: Any) -> dict[str, Tensor]:
        factor = trouble.happen() if where in passes else 1.0
        found = {name: rows * factor for name, rows in LOSSES["InfoNCE"].outputs(m, b).items()}
        if where == "backward" and found["a"].requires_grad:
            found["a"].register_hook(lambda gradient: gradient * trouble.happen())
        return found

    def loss(o: Any, b: Any) -> Tensor:
        factor = trouble.happen() if where == "loss" else 1.0
        pairs = bb.info_nce(o["a"], o["b"], scale=inner.log_scale.exp(), chunk_size=3)
        return pairs * factor + (b["t"] * o["a"].sum(1)).std()

    # Chunks of this rank: two directions in forward, two in backward.
    at_row = {"rows": 2, "rows again": 4}.get(where)
    num_chunks = -(-4 // 3)
    step = bb.Step(model, bb.WholeBatchLoss(forward, loss), optimizer, micro_batch_size=micro, **options)
    said = ""
    for i in range(3):
        trouble.armed, trouble.calm = i == 1 and group.rank() in bad, passes.get(where, 0)
        happens = lambda n: trouble.happen() if at_row and n == at_row * num_chunks else None  # noqa: E731
        with watched_rows(happens):
            try:
                result = step(share_of(make_batch(sum(sizes)), sizes, group.rank()))
                said += f"{'skipped' if result.skipped else 'done'}, {result.retries} retries; "
            except bb.BigBatchError as error:
                said += f"{type(error).__name__}: {error}; "
                if kind == "kill":
                    return {"said": said}
            except Exception as error:
                said += f"own {type(error).__name__}: {error}; "
    return {
        "weights": {n: p.detach().clone() for n, p in inner.named_parameters()},
        "said": said,
        "happened": trouble.happened,
        "num_steps": step.num_steps,
        "size": step.micro_batch_size,
        "gradients": [n for n, p in inner.named_parameters() if p.grad is not None],
    }


def truth_after(num_steps: int, num_ranks: int) -> dict[str, Tensor]:
    """Weights after so many steps in one process."""
    model, batch = encoder(), make_batch(4 * num_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        o = LOSSES["InfoNCE"].outputs(model, batch)
        (LOSSES["InfoNCE"].plain(model, o, batch) + (batch["t"] * o["a"].sum(1)).std()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def collectives_case(group: Any, name: str, micro: int) -> dict[str, int]:
    """What is communicated in the second of two steps."""
    sizes = [4] * group.size()
    inner = encoder()
    model = Wrapped(inner, process_group=group)
    step = bb.Step(
        model, LOSSES[name].loss_fn(inner), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=micro
    )
    share = share_of(make_batch(sum(sizes)), sizes, group.rank())
    step(share)
    with counted() as found:
        step(share)
    return dict(found)


def batch_case(group: Any, how: str) -> dict[str, Any]:
    """What the loss gets as the batch: that of all ranks, however it is handed over."""
    sizes = [3, 2, 0][: group.size()]
    batch = make_batch(sum(sizes))
    share = share_of(batch, sizes, group.rank())
    model = Wrapped(encoder(), process_group=group)
    options: dict[str, Any] = {"micro_batch_size": 2}
    seen: dict[str, Any] = {}

    def look(b: Any) -> Tensor:
        seen["y"] = b["y"].tolist()
        seen["type"] = type(b).__name__
        if how == "others":
            seen.update(
                names=b["names"], array=b["array"].tolist(), number=float(b["number"]), turned=b["turned"].shape
            )
            return b["turned"].sum(0)
        return b["t"]

    given: Any = share
    if how == "collate":
        given = [slice_batch(share, i, i + 1) for i in range(sizes[group.rank()])]
        options["collate"] = lambda samples: {n: torch.cat([s[n] for s in samples]) for n in batch}
    if how == "logical":
        parts = [slice_batch(share, *cut) for cut in cuts(sizes[group.rank()], 2)]
        given, options = bb.LogicalBatch(parts, whole=share), {}
    if how == "others":
        first = sum(sizes[: group.rank()])
        numbers = list(range(first, first + sizes[group.rank()]))
        turned = torch.stack([share["t"], share["t"]])
        extra = {"names": [f"n{i}" for i in numbers], "array": torch.tensor(numbers).numpy(), "turned": turned}
        given = {**share, **extra, "number": torch.tensor(7.0)}
        options["batch_dims"] = {"turned": 1}
    loss_fn = bb.WholeBatchLoss(lambda m, b: m(b["a"]), lambda z, b: (z.sum(1) * look(b)).std())
    bb.accumulate(model, loss_fn, given, **options)
    factor = 2 if how == "others" else 1
    expected = big_batch_gradients(encoder(), lambda m, b: (m(b["a"]).sum(1) * b["t"] * factor).std(), batch)
    return {
        "gradient": gradient_error(gradients_of(model), expected),
        "right": seen["y"] == batch["y"].tolist(),
        **seen,
    }


def looks_case(group: Any) -> tuple[int, int]:
    """Collectives of a step whose loss looks at nothing of the batch, and at two tensors of it."""
    sizes = [2] * group.size()
    share = share_of(make_batch(sum(sizes)), sizes, group.rank())
    model = Wrapped(encoder(), process_group=group)
    found = []
    for loss in (lambda z, b: z.std(), lambda z, b: (z.sum(1) * b["t"] * b["t"] * b["y"]).std()):
        with counted() as collectives:
            bb.accumulate(model, bb.WholeBatchLoss(lambda m, b: m(b["a"]), loss), share, micro_batch_size=1)
        found.append(collectives["all_gather_single"] + collectives["all_gather_into_tensor"])
    return found[0], found[1]


def told_case(group: Any) -> dict[str, str]:
    """What is wrong, as each rank is told it; nothing is left behind, and the next step works."""
    sizes = [2] * group.size()
    share = share_of(make_batch(sum(sizes)), sizes, group.rank())
    rank, inner = group.rank(), encoder()
    model, beside = Wrapped(inner, process_group=group), nn.Parameter(torch.ones((), dtype=torch.float64))

    def accumulated(forward: Any, loss: Any, batch: Any = share, **options: Any) -> str:
        options.setdefault("micro_batch_size", 1)
        said = error_of(lambda: bb.accumulate(model, bb.WholeBatchLoss(forward, loss), batch, **options))
        assert said == "no error" or all(p.grad is None for p in model.parameters()), said
        model.zero_grad()
        return said

    def rows(m: Any, b: Any) -> Tensor:
        return m(b["a"])

    def peeks(z: Tensor, b: Any) -> Tensor:
        if rank == 0:
            b["t"].mean()
        return z.std()

    def sums(m: Any, b: Any) -> Any:
        return {"z": rows(m, b), "flag": bb.Sum(rows(m, b)) if rank else rows(m, b)}

    padded = {**share, "long": torch.ones(2, 3 + rank)}
    return {
        "peeks": accumulated(rows, peeks),
        "other names": accumulated(lambda m, b: {f"z{rank}": rows(m, b)}, lambda o, b: o["z0"].std()),
        "other shapes": accumulated(lambda m, b: rows(m, b)[:, : 2 + rank], lambda o, b: o.std()),
        "other dtypes": accumulated(lambda m, b: rows(m, b).float() if rank else rows(m, b), lambda o, b: o.std()),
        "other values": accumulated(lambda m, b: (rows(m, b), rank), lambda o, b: o[0].std()),
        "other kinds": accumulated(sums, lambda o, b: o["z"].std()),
        "padded": accumulated(rows, lambda z, b: (z.sum(1) * b["long"].sum(1)).std(), padded),
        "padded, not looked at": accumulated(rows, lambda z, b: z.std(), padded),
        "beside": accumulated(rows, lambda z, b: z.std() * beside),
        "not sent": accumulated(lambda m, b: (rows(m, b), (x for x in ())), lambda o, b: o[0].std()),
        "well": accumulated(rows, lambda z, b: z.std()),
    }


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn)


def dtypes_case(group: Any) -> dict[str, bool]:
    """Whether rows and sums of any dtype are those of the big batch: rows bit by bit, with -0.0, NaN and no columns."""
    sizes = SHARES["empty first"](group.size())
    batch = make_batch(sum(sizes))
    batch["t"][0], batch["t"][1] = -0.0, float("nan")
    model = Wrapped(encoder(), process_group=group)
    seen: dict[str, bool] = {}

    def made(b: Any) -> dict[str, Tensor]:
        return {
            **{str(d): (b["a"][:, :3] * 3).to(d) for d in DTYPES},
            "none": b["a"][:, :0],
            "t": b["t"],
        }

    def forward(m: Any, b: Any) -> Any:
        sums = {"any": bb.Sum((b["y"] > 1).any()), "n": bb.Sum(torch.tensor(len(b["y"]), dtype=torch.int16))}
        return {"z": m(b["a"]), **made(b), **sums, "c": bb.Sum(torch.complex(b["a"].sum(), b["b"].sum()))}

    def loss(o: Any, b: Any) -> Tensor:
        for name, rows in made(batch).items():
            same = [x.contiguous().view(torch.uint8).tolist() for x in (rows.reshape(-1), o[name].reshape(-1))]
            seen[name] = o[name].shape == rows.shape and o[name].dtype == rows.dtype and same[0] == same[1]
        seen["n"] = int(o["n"]) == sum(sizes) and o["n"].dtype == torch.int16
        seen["any"] = o["any"].dtype == torch.int64
        seen["c"] = bool(torch.isclose(o["c"], torch.complex(batch["a"].sum(), batch["b"].sum())))
        return o["z"].std()

    share = share_of(batch, sizes, group.rank())
    bb.accumulate(model, bb.WholeBatchLoss(forward, loss), share, micro_batch_size=2)
    return seen


def batch_norm_case(group: Any, sizes: list[int], compiled: bool) -> dict[str, float]:
    """Running statistics are merged over ranks, of which some have one micro-batch and others several."""
    batch = make_batch(sum(sizes))
    x = batch["a"][:, :3] + 100.0
    first = sum(sizes[: group.rank()])
    inner = normed()
    torch._dynamo.reset()
    model: Any = Wrapped(inner, process_group=group)
    model = torch.compile(model, backend="eager") if compiled else model
    loss_fn = bb.WholeBatchLoss(lambda m, b: m(b), lambda z, b: z.std())
    share = x[first : first + sizes[group.rank()]]
    for _ in range(2):
        result = bb.accumulate(model, loss_fn, share, micro_batch_size=3)
        assert result.exactness == "approximate"
    expected = normed()
    for _ in range(2):
        expected(x)
    both = zip(inner.buffers(), expected.buffers(), strict=True)
    return {"error": max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in both)}


def random_loss_case(group: Any) -> dict[str, Any]:
    """A loss that draws: the same on all ranks, another in the next step; each rank goes on with its own."""
    sizes = [3, 1, 0][: group.size()]
    batch = make_batch(sum(sizes))
    model = Wrapped(encoder(), process_group=group)
    torch.manual_seed(group.rank())
    drawn: list[float] = []
    chosen: list[Tensor] = []

    def loss(z: Tensor, b: Any) -> Tensor:
        drawn.append(float(torch.rand(())))
        chosen.append(torch.randperm(len(z)))
        return (z[:-1] * z[chosen[-1]][:-1]).sum(1).exp().mean()

    step = bb.Step(
        model,
        bb.WholeBatchLoss(lambda m, b: m(b["a"]), loss),
        torch.optim.SGD(model.parameters(), lr=0.0),
        micro_batch_size=2,
    )
    for _ in range(2):
        step(share_of(batch, sizes, group.rank()))
    return {"drawn": drawn, "own": float(torch.rand(()))}


def precise_case(group: Any, precision: str) -> dict[str, Any]:
    """Under autocast: how far from float64, and how far the big batch in one process is."""
    sizes = SHARES["uneven"](group.size())
    batch = {n: t.float() if t.is_floating_point() else t for n, t in make_batch(sum(sizes)).items()}
    coupled = LOSSES["InfoNCE"]
    assert coupled.ours is not None
    expected = big_batch_gradients(encoder(), lambda m, b: coupled.plain(m, coupled.outputs(m, b), b), batch)
    alone, inner = encoder().float(), encoder().float()
    model = Wrapped(inner, process_group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if precision == "fp16" else None
    dtype = torch.float16 if scaler else torch.bfloat16
    with torch.autocast("cpu", dtype=dtype):
        o = coupled.outputs(alone, batch)
        loss = coupled.ours(alone, o, batch)
    (loss * (scaler.get_scale() if scaler else 1.0)).backward()
    result = bb.accumulate(
        model,
        coupled.loss_fn(inner),
        share_of(batch, sizes, group.rank()),
        micro_batch_size=2,
        precision=scaler or precision,
    )
    unscaled = 2.0**10 if scaler else 1.0
    errors = []
    for found in (gradients_of(alone), gradients_of(model)):
        errors.append(gradient_error({n: None if g is None else g / unscaled for n, g in found.items()}, expected))
    return {"alone": errors[0], "ranks": errors[1], "loss": float(result.loss), "plain": float(loss.detach())}


def frozen_case(group: Any) -> float:
    """Only the temperature in the loss is trained; it is used on no rank's forward."""
    sizes = SHARES["empty rank"](group.size())
    batch, inner = make_batch(sum(sizes)), encoder()
    for name, p in inner.named_parameters():
        p.requires_grad_(name == "log_scale")
    model = Wrapped(inner, process_group=group)
    bb.accumulate(model, LOSSES["InfoNCE"].loss_fn(inner), share_of(batch, sizes, group.rank()), micro_batch_size=2)
    found = gradients_of(model)["log_scale"]
    assert found is not None
    expected = truth("InfoNCE", batch)[0]["log_scale"]
    return gradient_error({"log_scale": found}, {"log_scale": expected})


def plan_case(group: Any, budgets: list[str]) -> dict[str, Any]:
    """A step that plans at its first batch, each rank for its share alone; then it is that of all."""
    sizes = [16] * group.size()
    batch, inner = make_batch(sum(sizes)), encoder()
    expected, _ = truth("InfoNCE", batch)
    model = Wrapped(inner, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {n: p.detach().clone() for n, p in inner.named_parameters()}
    loss_fn = LOSSES["InfoNCE"].loss_fn(inner)
    step = bb.Step(model, loss_fn, optimizer, memory_budget=budgets[group.rank()])
    sizes_run = step(share_of(batch, sizes, group.rank())).micro_batch_sizes
    found = {n: before[n] - p.detach() for n, p in inner.named_parameters()}
    wanted = {n: torch.zeros_like(before[n]) if g is None else g for n, g in expected.items()}
    return {"sizes": sizes_run, "gradient": gradient_error(found, wanted)}


def steps_case(group: Any) -> dict[str, Any]:
    """Ten steps of AdamW with clipping over growing shares against one process, with exact replicas."""
    batches = [make_batch(6 + i % 5) for i in range(10)]
    inner, alone = encoder(), encoder()
    model = Wrapped(inner, process_group=group)
    losses = [[], []]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, inner)]
    step = bb.Step(model, LOSSES["SupCon"].loss_fn(inner), optimizers[1], micro_batch_size=2, max_grad_norm=0.5)
    for i, batch in enumerate(batches):
        loss = LOSSES["SupCon"].plain(alone, LOSSES["SupCon"].outputs(alone, batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
        losses[0].append(float(loss.detach()))
        sizes = lengths(len(batch["t"]), group.size(), last_is_empty=i % 2 == 0)
        losses[1].append(float(step(share_of(batch, sizes, group.rank())).loss))
    weights = {n: p.detach().clone() for n, p in inner.named_parameters()}
    expected = {n: p.detach() for n, p in alone.named_parameters()}
    return {
        "losses": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "error": gradient_error(weights, expected),
        "weights": weights,
    }


def columns_case(group: Any, sizes: list[int]) -> dict[str, float]:
    """Labels and weights are columns of a table, whose values do not lie beside one another."""
    draw = torch.Generator().manual_seed(3)
    table = torch.rand(sum(sizes), 6, generator=draw, dtype=torch.float64)
    batch = {"x": table[:, :4], "y": table[:, 4], "weight": table[:, 5]}

    def plain(model: Any, batch: Any) -> Tensor:
        return loss((model(batch["x"])[:, 0], batch["weight"]), batch)

    def loss(out: Any, batch: Any) -> Tensor:
        (z, weight), y = out, batch["y"]
        return ((z[:, None] - z) * (y[:, None] - y) * weight).square().sum()

    torch.manual_seed(0)
    inner = nn.Linear(4, 2).double()
    expected = big_batch_gradients(inner, plain, batch)
    model = Wrapped(inner, process_group=group)
    loss_fn = bb.WholeBatchLoss(lambda m, b: (m(b["x"])[:, 0], b["weight"]), loss)
    bb.accumulate(model, loss_fn, share_of(batch, sizes, group.rank()), micro_batch_size=2)
    scale = max(float(gradient.norm()) for gradient in expected.values() if gradient is not None)
    pairs = [(found, expected[name]) for name, found in gradients_of(model).items()]
    return {"gradient": max(float((a - b).norm()) / scale for a, b in pairs if a is not None and b is not None)}
