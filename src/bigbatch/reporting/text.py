"""Lines for a person: how a batch is cut, what it needs, how a run went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console, RenderableType

from bigbatch.training.events import RunInfo, RunResult, is_accuracy
from bigbatch.training.preflight import Preflight
from bigbatch.units import format_bytes, format_count, format_seconds, format_share


def identity(micro_batch_sizes: Sequence[int], num_ranks: int = 1, *, batch_size: int | None = None) -> str:
    """How a batch is cut: micro-batch × accumulation × ranks = batch.

    >>> identity([64] * 8)
    '64 × 8 × 1 = 512'
    >>> identity([60] * 8 + [32])
    '60 × 9 × 1 = 512, the last holds 32'
    >>> identity([4, 3, 3])
    '4 × 3 × 1 = 10, the last 2 hold 3'
    >>> identity([4, 3], 2, batch_size=13)
    '4 × 2 × 2 = 13, the last holds 3, some ranks have a sample less'
    >>> identity([4, 9, 30])
    '4 to 30 samples in 3 micro-batches × 1 = 43'
    >>> identity([4, 9, 30], 2, batch_size=86)
    '4 to 30 samples in 3 micro-batches here, 86 samples on 2 ranks'

    Args:
        micro_batch_sizes: Samples in each micro-batch of the rank with most of them, in order.
        num_ranks: Ranks that each run as many, or one less.
        batch_size: Samples on all ranks; None: equally many on each.
    """
    total = batch_size or sum(micro_batch_sizes) * num_ranks
    line = f"{max(micro_batch_sizes)} × {len(micro_batch_sizes)} × {num_ranks} = {total}"
    if len(set(micro_batch_sizes)) > 2:  # grouped by length
        sizes = f"{min(micro_batch_sizes)} to {max(micro_batch_sizes)}"
        grouped = f"{sizes} samples in {len(micro_batch_sizes)} micro-batches"
        # Each rank has groups of its own.
        return f"{grouped} × 1 = {total}" if num_ranks == 1 else f"{grouped} here, {total} samples on {num_ranks} ranks"
    runs = [(size, len(list(same))) for size, same in groupby(micro_batch_sizes)]
    for size, count in runs[1:]:
        line += f", the last holds {size}" if count == 1 else f", the last {count} hold {size}"
    return line if total == sum(micro_batch_sizes) * num_ranks else f"{line}, some ranks have a sample less"


def data_text(share: float) -> str:
    """How long a run waited for data.

    >>> data_text(0.012)
    'waiting 1.2 % of the time'
    """
    return f"waiting {format_share(share, digits=1)} of the time"


def padding_text(padding: tuple[float, float]) -> str:
    """What grouping by length has done.

    >>> padding_text((0.63, 0.09))
    '9 % of the tokens, 63 % before grouping'
    """
    before, after = padding
    return f"{format_share(after)} of the tokens, {format_share(before)} before grouping"


def opening(info: RunInfo) -> str:
    """What a run is about to do, in one line."""
    budget = f", budget {format_bytes(info.budget_bytes)}" if info.budget_bytes else ""
    switches = f", with {', '.join(info.switches)}" if info.switches else ""
    after = f", goes on after step {info.first_step}" if info.first_step else ""
    ranks = f", {info.num_ranks} ranks" if info.num_ranks > 1 else ""
    return (
        f"{info.task}: {format_count(info.num_samples, 'sample')}, {info.num_parameters:,} parameters, "
        f"batch {info.batch_size}, {format_count(info.num_epochs, 'epoch')} = {format_count(info.total_steps, 'step')} "
        f"on {info.device}{ranks}{budget}{switches}{after}"
    )


def peak_line(peak_bytes: int | None, budget_bytes: int | None, *, num_steps: int = 0, device: str = "cpu") -> str:
    """The peak of a real step beside the budget."""
    if peak_bytes is None:
        return f"peak not counted: no steady step of a full batch among {num_steps}"
    how = "counted bytes of a real steady step" if device == "cpu" else "of the allocator, in a real steady step"
    if budget_bytes is None:
        return f"peak {format_bytes(peak_bytes)} ({how}), no budget given"
    inside = "inside" if peak_bytes <= budget_bytes else "OVER"
    return f"peak {format_bytes(peak_bytes)} ({how}), {inside} the budget of {format_bytes(budget_bytes)}"


def direct_line(direct_bytes: int | None, budget_bytes: int | None) -> str:
    """What the big batch would need when run at once."""
    if direct_bytes is None:
        return "the direct big batch could not be run here: it is out of memory"
    ratio = f": {direct_bytes / budget_bytes:.1f} × the budget" if budget_bytes else ""
    return f"the direct big batch would need {format_bytes(direct_bytes)}{ratio}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Results of an evaluation; an accuracy is in per cent.

    >>> metrics_text({"accuracy": 0.9911, "loss": 0.0312})
    'accuracy 99.11 %, loss 0.0312'
    """
    return ", ".join(f"{name} {metric_text(name, value)}" for name, value in metrics.items())


def metric_text(name: str, value: float) -> str:
    """One result."""
    return format_share(value, digits=2) if is_accuracy(name) else f"{value:.4g}"


def closing(result: RunResult, files: Sequence[str]) -> list[str]:
    """How a run went, line by line."""
    skipped = f", {result.num_skipped} of them skipped" if result.num_skipped else ""
    lines = [
        metrics_text(result.metrics) or (f"loss {result.loss:.4g}" if result.loss is not None else "no result"),
        peak_line(result.peak_bytes, result.budget_bytes, num_steps=result.num_steps, device=result.device),
        f"{format_count(result.num_steps, 'step')}{skipped} in {format_seconds(result.seconds)}, "
        f"{result.samples_per_second:,.0f} samples/s",
        f"equal to the big batch: {_EXACTNESS[result.exactness]}",
        *([result.data_advice] if result.data_advice else []),
    ]
    if result.noise_scale is not None:
        lines.append(noise_scale_text(result.noise_scale, result.batch_size))
    return [*lines, f"files: {', '.join(files)}"] if files else lines


def noise_scale_text(noise_scale: float, batch_size: int) -> str:
    """The gradient noise scale as advice; two digits of it are what can be told.

    >>> noise_scale_text(912.3, 128)
    'gradient noise scale 910: a batch of about 910 would still be used well; beyond that you pay without gain'
    >>> noise_scale_text(31.0, 128)
    'gradient noise scale 31: the batch of 128 is larger than is used well; about 31 would do nearly as much in a step'
    >>> noise_scale_text(math.inf, 128)
    'gradient noise scale not known: with 128 samples the gradient is lost in noise; a larger batch would be used well'

    Args:
        noise_scale: In samples.
        batch_size: Of the steps that it was measured in.
    """
    if not math.isfinite(noise_scale):
        return (
            f"gradient noise scale not known: with {batch_size} samples the gradient is lost in noise; a larger batch "
            f"would be used well"
        )
    rounded = max(int(float(f"{noise_scale:.2g}")), 1)
    if rounded < batch_size:
        return (
            f"gradient noise scale {rounded}: the batch of {batch_size} is larger than is used well; about {rounded} "
            f"would do nearly as much in a step"
        )
    return (
        f"gradient noise scale {rounded}: a batch of about {rounded} would still be used well; beyond that you pay "
        f"without gain"
    )


_EXACTNESS = {
    "exact": "exactly, up to rounding",
    "same in distribution": "in distribution (dropout draws other random numbers)",
    "approximate": "approximately (BatchNorm saw the statistics of micro-batches)",
}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last one is not padded.

    >>> print(table([("loss", "ok"), ("gradient norm", "ok")]))
    loss           ok
    gradient norm  ok
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in rows)


def rendered(report: RenderableType, width: int) -> str:
    """A report as plain text, without the spaces that fill up its cells."""
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(report)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def preflight_text(found: Preflight) -> str:
    """What a pre-flight found, and the verdict."""
    rows = [(check.name, check.verdict, check.found) for check in found.checks]
    wrong = [check.name for check in found.checks if check.verdict == "wrong"]
    advice = [f"{check.name}: {check.advice}" for check in found.checks if check.advice]
    verdict = f"no go: {', '.join(wrong)}" if wrong else "go"
    return "\n".join(["", f"pre-flight of {found.num_steps} steps", table(rows), *advice, verdict])
