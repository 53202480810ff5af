"""An allocation fails at step 5 of a run.

It continues at step 5 with the same logical batch; not silently from step 0 with weights that are already trained.
The user is told.
"""


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


def naive_restarts():
    return _run(True, True)


def naive_silent():
    return _run(False, False)


def check(result):
    assert result == reference(), result
