"""A plan for a person: what to run, where its bytes are, how it came about, what limits it, what would be next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bigbatch.batch.sizes import micro_batch_sizes
from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.explanation import Block, Explanation
from bigbatch.reporting.text import identity
from bigbatch.units import format_bytes, format_count, format_seconds, format_share
from bigbatch.values import Plan

_MOST_ENTRIES = 6
_NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from.

    Attributes:
        name: Of the task or the shape.
        description: What it is, in a line; "" where nobody said.
        batch_size: Samples in a step.
        device: "cpu" or "cuda": where it will run.
        card: What times are estimated for; of no use where they were measured.
        profile: What the model costs.
        plan: What was chosen.
        explanation: Of the plan.
        advice: When accumulation is the wrong tool, in sentences.
        num_ranks: That share a batch; ``batch_size`` is the largest share, and bytes are those of one rank.
        whole_batch_size: Samples in a step over all ranks; None: those of this one.
        ranks_text: How they sum gradients, in a sentence.
    """

    name: str
    description: str
    batch_size: int
    device: str
    card: str
    profile: MemoryProfile
    plan: Plan
    explanation: Explanation
    advice: tuple[str, ...] = ()
    num_ranks: int = 1
    whole_batch_size: int | None = None
    ranks_text: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether there are times at all."""
        return bool(self.profile.micro_seconds)

    @property
    def timing(self) -> str:
        """Where times come from."""
        if self.profile.timing == "measured":
            return "measured"
        return f"estimated for {_CARDS_WITHOUT_A_NAME.get(self.card, self.card)}"


_CARDS_WITHOUT_A_NAME = {"cpu": "a desktop processor", "custom": "the peaks that were given"}
"""That of ``find_card("cpu")``, and that of ``card_from``."""


def plan_report(found: Planned) -> Group:
    """All there is to say about a plan, to be printed on a ``rich`` console."""
    parts: list[RenderableType] = [*_opening(found), _titled("Plan", _plan_table(found))]
    parts.append(_titled("Memory at the peak, by kind", _kinds_table(found)))
    parts.append(_titled("Memory by module, in the largest micro-batch", _blocks_table(found.explanation)))
    parts.append(_titled("From the direct batch to this plan", _levers_table(found)))
    others = [plan for plan in (found.explanation.leaner, found.explanation.faster) if plan is not None]
    if others:
        parts.append(_titled("Plans beside it", _others_table(found)))
    parts.append(_titled("What limits", _lines([found.explanation.limit_text])))
    if found.advice:
        parts.append(_titled("Is accumulation the right tool?", _lines(found.advice)))
    return Group(*parts)


def recompute_text(plan: Plan, *, num_blocks: int | None = None) -> str:
    """What a plan recomputes.

    >>> recompute_text(Plan(micro_batch_size=4, recompute=("a", "b", ("c", "d", "e"))), num_blocks=8)
    '5 of 8 modules: a, b, c to e as one'
    >>> recompute_text(Plan(micro_batch_size=4))
    'nothing'

    Args:
        num_blocks: Modules that there are; None: not said.
    """
    if not plan.recompute:
        return "nothing"
    entries = [name if isinstance(name, str) else f"{name[0]} to {name[-1]} as one" for name in plan.recompute]
    more = f" and {len(entries) - _MOST_ENTRIES} more" if len(entries) > _MOST_ENTRIES else ""
    count = plan.num_recomputed
    of = f"{count} of {num_blocks} modules" if num_blocks is not None else format_count(count, "module")
    return f"{of}: {', '.join(entries[:_MOST_ENTRIES])}{more}"


def _opening(found: Planned) -> Iterator[RenderableType]:
    about = f" ({found.description})" if found.description else ""
    budget = format_bytes(found.explanation.budget_bytes)
    batch_size, each = found.whole_batch_size or found.batch_size, ""
    if found.num_ranks > 1:
        each = f" on each of {found.num_ranks} ranks"
    yield Text(f"{found.name}{about}: batches of {batch_size} in {budget} on {found.device}{each}")
    if found.profile.fallback is not None:
        yield Text(f"Real steps were measured, and blocks are not told apart: {found.profile.fallback}")
    for warning in found.profile.warnings:
        yield Text(warning)


def _titled(title: str, inner: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(inner, (0, 0, 0, 2), expand=False))


def _lines(lines: Sequence[str]) -> Group:
    return Group(*map(Text, lines))


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    """A table without lines; columns of numbers are to the right."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, show_header=any(columns), header_style="dim")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in right else "left", overflow="fold")
    return table


def _plan_table(found: Planned) -> Table:
    plan, explanation = found.plan, found.explanation
    sizes = micro_batch_sizes(found.batch_size, plan.micro_batch_size, found.profile.smallest_micro_batch)
    has_parts = any(block.parts for block in explanation.blocks)
    # Parts of blocks are no share of the blocks.
    num_blocks = None if has_parts else sum(1 for block in explanation.blocks if block.name)
    peak = explanation.peak_bytes if plan.peak_bytes is None else plan.peak_bytes
    workspace = f" and {format_bytes(explanation.workspace_bytes)} for kernels" if explanation.workspace_bytes else ""
    table = _table("", "")
    cut = identity(sizes, found.num_ranks, batch_size=found.whole_batch_size)
    table.add_row("micro × accumulation × ranks", cut)
    if found.ranks_text:
        table.add_row("gradients", found.ranks_text)
    table.add_row("recompute", recompute_text(plan, num_blocks=num_blocks))
    headroom = f"headroom {format_bytes(explanation.headroom_bytes)}"
    table.add_row("peak", f"{format_bytes(peak)}{workspace} of {format_bytes(explanation.budget_bytes)}, {headroom}")
    table.add_row("time of a step", _step_text(explanation.step_seconds, found))
    return table


def _step_text(seconds: float, found: Planned) -> str:
    if not found.is_timed:
        return _NOT_KNOWN
    num_samples = found.whole_batch_size or found.batch_size
    return f"{format_seconds(seconds)}, {num_samples / seconds:,.1f} samples/s ({found.timing})"


def _kinds_table(found: Planned) -> Table:
    explanation = found.explanation
    is_traced = found.plan.peak_bytes in (None, explanation.peak_bytes)
    table = _table("", "", "", right=(1, 2))
    for kind, num_bytes in explanation.kinds.items():
        if num_bytes:
            table.add_row(kind, format_bytes(num_bytes), format_share(num_bytes / explanation.peak_bytes, 1))
    # Kinds are told apart on the numbers of the profile, which may be a little off the traced peak.
    table.add_row("all" if is_traced else "all, simulated", format_bytes(explanation.peak_bytes), "")
    return table


def _blocks_table(explanation: Explanation) -> Table:
    table = _table("module", "class", "saves", "holds in this plan", "recompute adds", right=(2, 3, 4))
    for same in _runs(explanation.blocks):
        seconds = sum(block.recompute_seconds for block in same)
        table.add_row(
            _named(same),
            same[0].kind,
            format_bytes(sum(block.saved_bytes for block in same)),
            format_bytes(sum(block.held_bytes for block in same)),
            _added(seconds, same[0]) if same[0].recomputed else "",
        )
    return table


def _added(seconds: float, block: Block) -> str:
    only = ", ".join(_leaves(block))
    return f"{format_seconds(seconds)}, only {only}" if only else format_seconds(seconds)


def _leaves(block: Block) -> tuple[str, ...]:
    """The parts of it that are recomputed, without its own name."""
    return tuple(name.removeprefix(f"{block.name}.") for name in block.parts)


def _runs(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Neighbours that are alike."""

    def looks(block: Block) -> tuple[object, ...]:
        return block.kind, block.saved_bytes, block.recomputed, _leaves(block)

    for _, same in groupby(blocks, key=looks):
        yield list(same)


def _named(same: Sequence[Block]) -> str:
    if len(same) > 1:
        return f"{same[0].name} to {same[-1].name} ({len(same)} together)"
    return same[0].name or "between modules"


def _levers_table(found: Planned) -> Table:
    explanation = found.explanation
    table = _table("", "memory", "time of a step", right=(1, 2))
    direct, seconds = explanation.direct_bytes, explanation.direct_seconds
    times = f"{explanation.direct_of_budget:.1f} × the budget"
    table.add_row(
        f"{found.batch_size} at once, nothing recomputed: {times}", format_bytes(direct), _seconds(seconds, found)
    )
    for lever in explanation.levers:
        table.add_row(lever.name, _signed_bytes(-lever.saved_bytes), _signed_seconds(lever.added_seconds, found))
    table.add_row("this plan", format_bytes(explanation.peak_bytes), _seconds(explanation.step_seconds, found))
    return table


def _others_table(found: Planned) -> Table:
    explanation = found.explanation
    table = _table("", "micro-batches", "peak", "time of a step", "recompute", right=(1, 2, 3))
    named = [("leaner", explanation.leaner), ("this", found.plan), ("faster", explanation.faster)]
    for name, plan in named:
        if plan is not None:
            seconds = explanation.step_seconds if plan is found.plan else plan.step_seconds or 0.0
            peak = format_bytes(plan.peak_bytes or 0)
            table.add_row(name, str(plan.micro_batch_size), peak, _seconds(seconds, found), recompute_text(plan))
    return table


def _seconds(seconds: float, found: Planned) -> str:
    return format_seconds(seconds) if found.is_timed else _NOT_KNOWN


def _signed_bytes(num_bytes: int) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"


def _signed_seconds(seconds: float, found: Planned) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}" if seconds and found.is_timed else ""
