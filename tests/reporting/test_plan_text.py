from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

import bigbatch as bb
from bigbatch.planning.explanation import explain
from bigbatch.planning.search import frontier
from bigbatch.reporting.plan_text import Planned, plan_report, recompute_text
from bigbatch.units import format_bytes
from tests.planning.profiles import equal_blocks

BATCH, BLOCKS = 32, 8
PROFILE = equal_blocks(BLOCKS)
OTHERS = frontier(PROFILE, batch_size=BATCH)


def planned(plan: bb.Plan, *, budget_bytes: int = 40_000, profile=PROFILE, **changes) -> Planned:
    explanation = explain(profile, plan, batch_size=BATCH, budget_bytes=budget_bytes, others=OTHERS)
    values = dict(name="equal", description="blocks", batch_size=BATCH, device="cuda", card="rtx4090")
    return Planned(**{**values, "profile": profile, "plan": plan, "explanation": explanation, **changes})


def text_of(found: Planned, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_report(found))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell; cells have three spaces between them."""
    lines = text.split(f"\n{title}")[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip().split("   ") if cell.strip()] for line in lines]
    return {row[0]: row[1:] for row in cells if row}


GROUPED = bb.Plan(micro_batch_size=4, recompute=("blocks.0", ("blocks.1", "blocks.2")))


def test_the_kinds_are_those_of_the_explanation():
    found = planned(GROUPED)

    rows = rows_of(text_of(found), "Memory at the peak, by kind")

    peak = found.explanation.peak_bytes
    for kind, num_bytes in found.explanation.kinds.items():
        if num_bytes:
            assert rows[kind] == [format_bytes(num_bytes), f"{num_bytes / peak:.1%}".replace("%", " %")]
        else:
            assert kind not in rows
    assert rows["all"] == [format_bytes(peak)]


def test_blocks_that_are_alike_share_a_row():
    rows = rows_of(text_of(planned(GROUPED)), "Memory by module")

    blocks = {name: row for name, row in rows.items() if name.startswith("blocks")}
    assert list(blocks) == [
        "blocks.0 to blocks.2 (3 together)",
        "blocks.3 to blocks.7 (5 together)",
    ], "the first one saves what it is given too, like the others"
    assert len(blocks["blocks.0 to blocks.2 (3 together)"]) == 4, "class, bytes, bytes, seconds"
    assert len(blocks["blocks.3 to blocks.7 (5 together)"]) == 3, "nothing is added there"
    assert "between modules" in rows


def test_parts_of_blocks_are_named():
    found = planned(GROUPED)
    blocks = tuple(
        dataclasses.replace(block, parts=(f"{block.name}.norm", f"{block.name}.act")) if block.recomputed else block
        for block in found.explanation.blocks
    )
    text = text_of(dataclasses.replace(found, explanation=dataclasses.replace(found.explanation, blocks=blocks)))

    assert re.search(r"blocks.0 to blocks.2 \(3 together\) .*s, only norm, act\n", text)
    assert "3 modules: blocks.0, blocks.1 to blocks.2 as one" in text, "not of 8: these are parts"


def test_the_levers_lead_from_the_direct_batch_to_the_plan():
    found = planned(GROUPED)
    rows = rows_of(text_of(found), "From the direct batch to this plan")

    names = [lever.name for lever in found.explanation.levers]
    times = f"{found.explanation.direct_of_budget:.1f} × the budget"
    assert list(rows)[1:] == [f"{BATCH} at once, nothing recomputed: {times}", *names, "this plan"]
    assert rows["this plan"][0] == format_bytes(found.explanation.peak_bytes)


def test_times_say_where_they_come_from():
    measured = dataclasses.replace(PROFILE, timing="measured")
    custom = planned(GROUPED, card="custom")

    assert "(measured)" in text_of(planned(GROUPED, profile=measured))
    assert "(estimated for rtx4090)" in text_of(planned(GROUPED))
    assert "(estimated for the peaks that were given)" in text_of(custom)


def test_a_profile_without_times_shows_none():
    without = dataclasses.replace(PROFILE, micro_seconds=(), update_seconds=0.0, fallback="it reads a number")
    text = text_of(planned(bb.Plan(micro_batch_size=4), profile=without))

    assert "Real steps were measured, and blocks are not told apart: it reads a number" in text
    assert "not known" in text
    assert "samples/s" not in text


def test_workspace_advice_and_neighbours_are_told():
    with_workspace = dataclasses.replace(PROFILE, workspace=PROFILE.batch)
    found = planned(GROUPED, profile=with_workspace, advice=("It fits anyway.",))
    text = text_of(found)

    assert "for kernels of" in text
    assert text.endswith("Is accumulation the right tool?\n  It fits anyway.")
    assert list(rows_of(text, "Plans beside it"))[1:] == ["leaner", "this", "faster"]


def test_a_traced_peak_that_is_not_the_simulated_one_is_told_apart():
    traced = dataclasses.replace(GROUPED, peak_bytes=20_000)

    assert "all, simulated" in text_of(planned(traced))
    assert "all, simulated" not in text_of(planned(GROUPED))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_the_terminal(width):
    assert max(map(len, text_of(planned(GROUPED), width).splitlines())) <= width


def test_what_is_recomputed_is_told_briefly():
    many = bb.Plan(micro_batch_size=1, recompute=tuple(f"b.{i}" for i in range(20)))

    assert GROUPED.num_recomputed == 3
    assert recompute_text(GROUPED, num_blocks=8) == "3 of 8 modules: blocks.0, blocks.1 to blocks.2 as one"
    assert recompute_text(many) == "20 modules: b.0, b.1, b.2, b.3, b.4, b.5 and 14 more"
    assert recompute_text(bb.Plan(micro_batch_size=1, recompute=("a",))) == "1 module: a"
