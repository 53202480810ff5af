"""What ``bigbatch verify`` does: build the task, compare its first batch, print. This loads torch."""

from __future__ import annotations

from bigbatch.cli.wanted import Wanted
from bigbatch.reporting.comparison_text import verification_text
from bigbatch.training.building import build
from bigbatch.training.data import first_batch
from bigbatch.training.rank import Rank
from bigbatch.verification.verifying import verify


def verify_task(wanted: Wanted) -> bool:
    """Print how far a cut of the first batch is from the whole; whether they are equal."""
    device, task = wanted.prepare(Rank()), wanted.found()
    parts = build(task, device)
    batch = first_batch(task, parts.train_data)
    found = verify(parts.model, task.loss_fn, batch, micro_batch_size=wanted.micro_batch_size, **vars(parts.options))
    print(verification_text(task.name, found))
    return found.equal
