from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

import bigbatch as bb
from bigbatch.reporting.panel import LivePanel, PlainLines
from bigbatch.training.loop import Run
from bigbatch.training.preflight import preflight
from tests.training.tiny import network, tiny_task


def wide_task(**changes):
    def model():
        return torch.nn.Sequential(torch.nn.Linear(2, 500), torch.nn.Linear(500, 3))

    return tiny_task(model=model, grad_norm=True, **changes)


def plain_lines(task, seconds_between=0.0, **how):
    lines = []
    Run(task, listeners=[PlainLines(lines.append, seconds_between=seconds_between)], **how).train()
    return lines


def test_plain_lines_tell_everything():
    lines = plain_lines(tiny_task(epochs=1, grad_norm=True), micro_batch_size=5)

    assert lines[0].startswith("tiny: 50 samples, 99 parameters, batch 16, 1 epoch = 4 steps on cpu")
    assert lines[1] == "micro × accumulation × ranks: 5 × 4 × 1 = 16, the last holds 1"
    step = r"step 1/4, epoch 1, loss \d\.\d{4}, gradient norm [\d.]+, lr 0.01, [\d,]+ samples/s, .* left"
    assert re.fullmatch(step, lines[2])
    assert ", peak " in lines[3]
    assert re.fullmatch(r"epoch 1: accuracy [\d.]+ %, loss [\d.]+", lines[-1])


def test_plain_lines_tell_of_the_search():
    lines = plain_lines(tiny_task(epochs=1), memory_budget="1MiB")

    assert lines[1:3] == ["planning for 1.00 MiB ...", lines[2]]
    assert re.fullmatch(r"micro-batches of 16 fit, measured peak [\d.]+ KiB", lines[2])


def test_plain_lines_are_few():
    """The opening, the identity, the first step and the last one; the rest falls within the two seconds."""
    lines = plain_lines(tiny_task(epochs=20), seconds_between=2.0)

    assert len([line for line in lines if line.startswith("step")]) == 2
    assert lines[-1].startswith("step 80/80")


def drawn(task, **how):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    Run(task, listeners=[LivePanel(console, lambda: 123 * 2**20)], **how).train()
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())


def test_the_panel_shows_all_there_is():
    text = drawn(wide_task(epochs=2), memory_budget="120kB")

    last = text[text.rindex("╭") :]
    assert "tiny is done" in last
    for name in (
        "micro-batch",
        "step",
        "loss",
        "gradient norm",
        "learning rate",
        "speed",
        "data",
        "time left",
        "evaluation",
    ):
        assert name in last
    assert re.search(r"step\s+8 of 8, epoch 2", last)
    assert re.search(r"micro-batch\s+\d of \d\s+\d+ × \d × 1 = 16", last)
    assert re.search(r"peak of a step [\d.]+ KiB of 117.19 KiB, process now 123.00 MiB", last)
    assert "plans for" in text
    assert re.search(r"micro-batches of \d+ fit, measured peak", text)


def test_the_panel_shows_the_noise_scale_when_it_is_measured():
    assert "gradient noise scale" in drawn(wide_task(noise_scale=True, epochs=1), micro_batch_size=5)
    assert "gradient noise scale" not in drawn(wide_task(epochs=1), micro_batch_size=5)


def test_what_grouping_by_length_has_done_is_shown():
    samples = [torch.ones(n, 1) for n in (1, 9, 2, 8) * 4]
    task = bb.Task(
        model=lambda: torch.nn.Linear(1, 1),
        train_data=lambda: samples,
        loss_fn=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        collate=lambda chosen: torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True),
        length=len,
        max_tokens=36,
        batch_size=16,
    )

    assert re.search(r"padding +0 % of the tokens, 43 % before grouping", drawn(task))
    assert ", padding 0 %, " in plain_lines(task)[2]


def test_the_panel_reads_the_loss_only_when_it_draws():
    reads = []

    class Loss:
        def __float__(self):
            reads.append(1)
            return 1.0

    console = Console(file=io.StringIO(), force_terminal=True)
    panel = LivePanel(console, lambda: 0)
    run = Run(tiny_task(epochs=25))
    panel.began(run.info)
    for record in run.steps(99):
        object.__setattr__(record.result, "loss", Loss())
        panel.stepped(record)
    panel.close()

    assert len(reads) < 20


def test_the_terminal_is_given_back_when_a_run_fails():
    def broken(model, batch):
        raise RuntimeError("broken")

    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with pytest.raises(RuntimeError, match="broken"):
        Run(tiny_task(loss_fn=broken), listeners=[LivePanel(console, lambda: 0)]).train()

    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_run_without_evaluation_has_no_such_row():
    text = drawn(tiny_task(eval_data=None, evaluate=None, epochs=1, model=network))

    assert "evaluation" not in text
    assert "not asked for" in text


def test_the_panel_shows_a_preflight_too():
    out = io.StringIO()
    panel = LivePanel(Console(file=out, force_terminal=True, width=100), lambda: 0)

    assert preflight(tiny_task(), num_steps=10, memory_budget="1MiB", listeners=[panel]).go
    assert "tiny trains" in out.getvalue()
