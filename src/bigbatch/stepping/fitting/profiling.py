"""What a model costs, found by running the real step without numbers: ``profile``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bigbatch.batch.logical import num_samples_of
from bigbatch.batch.resizing import micro_batch_of
from bigbatch.batch.structure import is_array, leaves
from bigbatch.errors import RecomputeError, TraceError
from bigbatch.memory.naming import unwrapped
from bigbatch.memory.switching import check_can_be_put_on
from bigbatch.memory.trace import Price
from bigbatch.planning.blocks import Node, find_blocks
from bigbatch.planning.costs import Line, MemoryProfile
from bigbatch.planning.slots import MicroBatch, ShapesDependOnSizeError, Traced, micro_batches, read_slots
from bigbatch.stepping.checks import update_is_lean
from bigbatch.stepping.fitting.shadow import Record, Shadow
from bigbatch.values import Plan

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step

_SIZES = (2, 32)
"""Micro-batches that are traced. Two give a line; a single sample is often a special case, and many cost no more.
A peak is the largest of several lines, so the two should lie on either side of the sizes that matter."""
_MANY = (256, 2048)
"""Samples of whole batches for which a loss of all of them is traced, beside the sum of those."""


def profile_of(
    step: Step, shadow: Shadow, batch: Any, *, price: Price | None = None, wanted: Collection[str] = ()
) -> MemoryProfile:
    """Trace the step twice, with a small and a large micro-batch in either order.

    Args:
        price: See ``FakeRecorder``.
        wanted: Modules that are to be blocks, whatever else is.

    Raises:
        TraceError: Fake tensors cannot follow it, or it is another one for each size.
    """
    small, large = _SIZES
    plain = Plan(micro_batch_size=large)
    # The optimizers make their state in the first step, so what is resident is read from the second one.
    with shadow.two_passes.without_keeping() if shadow.two_passes else nullcontext():
        up = shadow.run((small, large), plain, closely=True, price=price)
        down = shadow.run((large, small), plain, closely=True, price=price)
    first_small, later_large = micro_batches(up.events, up.sizes)
    first_large, later_small = micro_batches(down.events, down.sizes)
    traced = Traced(first=(first_small, first_large), later=(later_small, later_large))
    tree = _tree_of(shadow.step.model)
    blocks = {name: tree[name].kind for name in find_blocks(tree, later_small.forward, wanted)}
    try:
        may_recompute = _may_recompute(shadow, {name: tree[name].children for name in blocks})
        storages, slots = read_slots(traced, blocks, may_recompute, _neighbours(tree))
    except ShapesDependOnSizeError as error:
        raise TraceError(str(error)) from error
    resident = _resident(shadow, down, first_large, later_small)
    if shadow.two_passes is not None:
        resident |= _of_whole_batch(shadow, down, resident["other_bytes"])
    return MemoryProfile(
        **resident,
        **_inputs(shadow, step, batch),
        storages=storages,
        slots=slots,
        micro_seconds=tuple((m.num_samples, m.seconds) for m in traced.later) if price is not None else (),
        update_seconds=_seconds_of_update(down),
        smallest_micro_batch=step.accumulator.smallest_micro_batch,
        device=shadow.device,
        model=type(unwrapped(step.model)).__name__,
        update_is_lean=update_is_lean(step.optimizers),
        optimizer=" + ".join(type(optimizer).__name__ for optimizer in step.optimizers),
    )


def _resident(shadow: Shadow, record: Record, first: MicroBatch, later: MicroBatch) -> dict[str, Any]:
    """Bytes by kind. What is alive when the first micro-batch begins, and is none of the others, is ``other_bytes``."""
    fake = shadow.step
    seen: set[int] = set()
    kinds = {
        "parameter_bytes": _num_bytes(fake.named_parameters().values(), seen)
        + _num_bytes(fake.model.parameters(), seen),
        "buffer_bytes": _num_bytes(fake.model.buffers(), seen),
        "average_bytes": _num_bytes(_tensors_of(fake.options.ema), seen),
        "bucket_bytes": shadow.buckets.held_bytes,
        "optimizer_bytes": _num_bytes([v for o in fake.optimizers for s in o.state.values() for v in leaves(s)], seen),
    }
    gradients = later.live_bytes - first.live_bytes
    update = max((event.peak_bytes for event in _events_of_update(record)), default=0.0)
    return {
        **kinds,
        "gradient_bytes": int(gradients),
        "other_bytes": int(first.live_bytes - record.micro_batch_bytes - sum(kinds.values())),
        "update_bytes": int(max(0.0, update - first.live_bytes - gradients)),
    }


def _of_whole_batch(shadow: Shadow, record: Record, other_bytes: int) -> dict[str, Any]:
    """What a loss of the whole batch costs by its samples: its outputs, masks of dropout, and its own peak.

    Args:
        record: Of a step that was traced closely.
        other_bytes: With the outputs of that step among them.
    """
    assert shadow.two_passes is not None
    small, plain = _SIZES[0], Plan(micro_batch_size=_SIZES[1])
    with shadow.two_passes.without_keeping():
        records = [record, *(shadow.run((small, many - small), plain, closely=True) for many in _MANY)]
    entries = []
    for size in _SIZES:
        shadow.run((size, size), plain)
        entries.append([(size, number) for number in shadow.two_passes.mask_entries])
    starts = [next(event for event in record.events if event.marks("micro-batch")) for record in records]
    num_samples = [sum(record.sizes) for record in records]
    live = [start.live_bytes - record.micro_batch_bytes for start, record in zip(starts, records, strict=True)]
    outputs = Line.through((num_samples[0], live[0]), (num_samples[-1], live[-1])).per_sample
    fixed = live[0] - outputs * num_samples[0]
    peaks = [start.peak_bytes - record.micro_batch_bytes for start, record in zip(starts, records, strict=True)]
    return {
        "other_bytes": int(other_bytes - outputs * num_samples[0]),
        "outputs": Line(0.0, outputs),
        "masks": tuple(map(Line.through, *entries)),
        "keeps_first": shadow.two_passes.has_kept,
        "loss_bytes": tuple((size, max(0.0, peak - fixed)) for size, peak in zip(num_samples, peaks, strict=True)),
    }


_CUDA_WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS takes up to 32 MiB (Hopper) for each thread that uses it, and backward has a thread of its own:
https://docs.nvidia.com/cuda/cublas/#cublassetworkspace. It stands in for what cuDNN takes, until it is measured."""


def _inputs(shadow: Shadow, step: Step, batch: Any) -> dict[str, Any]:
    """Bytes of the batch on the device: all of it where it lies there, else one micro-batch and the next."""
    line = bytes_of_batch(step, batch)
    if shadow.device == "cpu":
        return {"batch": line}
    workspace = Line(float(_CUDA_WORKSPACE_BYTES), 0.0)
    lies_there = any(isinstance(value, torch.Tensor) and value.device.type == shadow.device for value in leaves(batch))
    if lies_there or step.accumulator.two_passes is not None:  # the loss gets all of it
        return {"batch": line, "workspace": workspace}
    return {"batch": Line(2 * line.fixed, 2 * line.per_sample), "batch_is_whole": False, "workspace": workspace}


def _events_of_update(record: Record) -> list[Any]:
    starts = [i for i, event in enumerate(record.events) if event.marks("update")]
    return record.events[starts[-1] + 1 :]


def _seconds_of_update(record: Record) -> float:
    return sum(event.seconds for event in _events_of_update(record))


def _tensors_of(ema: Any) -> list[torch.Tensor]:
    return [*ema.parameters(), *ema.buffers()] if isinstance(ema, nn.Module) else []


def _num_bytes(values: Any, seen: set[int]) -> int:
    """Bytes of the storages of these that were not seen before."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            total += 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
    return total


def bytes_of_batch(step: Step, batch: Any) -> Line:
    """Bytes of a batch as it lies on the device: what all samples share, and what each of them takes.

    On the CPU, samples that are collated lie there too, beside what is made of them.
    """
    options, (small, large) = step.options, _SIZES
    made = Line.through(
        (small, _bytes_of(micro_batch_of(batch, small, options))),
        (large, _bytes_of(micro_batch_of(batch, large, options))),
    )
    if options.collate is None or step.accumulator.device.type != "cpu":
        return made
    return Line(made.fixed, made.per_sample + _bytes_of(batch) / num_samples_of(batch, options))


def _bytes_of(value: Any) -> int:
    return sum(array.nbytes for array in leaves(value) if is_array(array))


def _tree_of(model: nn.Module) -> dict[str, Node]:
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return {
        name: Node(
            type(module).__name__,
            tuple(f"{name}.{child}".lstrip(".") for child, inner in module._modules.items() if inner is not None),
            isinstance(module, lists),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _neighbours(tree: dict[str, Node]) -> set[tuple[str, str]]:
    return {
        pair for node in tree.values() if node.is_list for pair in zip(node.children, node.children[1:], strict=False)
    }


def _may_recompute(shadow: Shadow, blocks: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Those of the blocks, and of the modules in each of them, that can be recomputed."""
    model = shadow.step.model
    can = {name for name in (*blocks, *chain(*blocks.values())) if _can_be_put_on(model, name)}
    # One whose input is changed in place (ReLU(inplace=True)), or that changes a buffer of its own, is found only when
    # it runs.
    doubtful = [name for name in blocks if name in can]
    failing = set(doubtful) - _that_run(shadow, doubtful)
    inside = [child for name in failing for child in blocks[name] if child in can]
    return can - failing - (set(inside) - _that_run(shadow, inside))


def _can_be_put_on(model: nn.Module, name: str) -> bool:
    try:
        check_can_be_put_on(model.get_submodule(name), name, in_group=False)
    except RecomputeError:
        return False
    return True


def _that_run(shadow: Shadow, names: Sequence[str]) -> set[str]:
    """Those that can be recomputed, found by halves."""
    if not names:
        return set()
    try:
        shadow.run([_SIZES[0]], Plan(micro_batch_size=_SIZES[0], recompute=tuple(names)))
    except (RecomputeError, TraceError):
        half = len(names) // 2
        return _that_run(shadow, names[:half]) | _that_run(shadow, names[half:]) if half else set()
    return set(names)
