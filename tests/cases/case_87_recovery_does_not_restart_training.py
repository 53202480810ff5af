"""An allocation fails at step 5 of a run.

It continues at step 5 with the same logical batch; not silently from step 0 with weights that are already trained.
The user is told.
"""

import logging

import torch

import bigbatch as bb
from tests.cases.common import FakeOutOfMemory


def build():
    return dict(steps=8, fails_at=5, micro=8, fits_after=4)


def reference():
    return dict(sequence=list(range(8)), announced=True)


def _run(restart, tell):
    case = build()
    sequence, micro, index, announced = [], case["micro"], 0, False
    while index < case["steps"]:
        if index == case["fails_at"] and micro > case["fits_after"]:
            micro //= 2
            announced = tell
            index = 0 if restart else index
            continue
        sequence.append(index)
        index += 1
    return dict(sequence=sequence, announced=announced)


def careful():
    return _run(False, True)


def ours():
    case = build()
    model, index, attempted, said = torch.nn.Linear(3, 1), [0], [], logging.getLogger("bigbatch")

    def loss_fn(model, batch):
        if index[0] == case["fails_at"] and len(batch["x"]) > case["fits_after"]:
            raise FakeOutOfMemory("simulated: out of memory")
        attempted.append(int(batch["number"]))
        return model(batch["x"]).square().mean()

    messages: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())
    said.addHandler(listener)
    try:
        step = bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=case["micro"])
        for index[0] in range(case["steps"]):
            step(dict(x=torch.randn(case["micro"], 3), number=torch.tensor(index[0])))
            assert step.num_steps == index[0] + 1
    finally:
        said.removeHandler(listener)
    # Which logical batches took part, in order; from the failure on in two micro-batches each.
    return dict(sequence=list(dict.fromkeys(attempted)), announced=sum("Out of memory" in m for m in messages) == 1)


def naive_restarts():
    return _run(True, True)


def naive_silent():
    return _run(False, False)


def check(result):
    assert result == reference(), result
