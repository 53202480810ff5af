from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.tasks import digits as module
from bigbatch.tasks.digits import Digits, ResidualNetwork, digits
from bigbatch.training.data import train_loader
from bigbatch.training.loop import Run

pytest.importorskip("sklearn")


def test_the_two_halves_hold_all_images_and_share_none():
    train, test = Digits(train=True), Digits(train=False)

    images = torch.cat([train.images, test.images]).flatten(1)
    assert len(images) == 1797
    assert len(train) == 898
    # A few of the images are there twice in the data itself.
    assert len(torch.unique(images, dim=0)) == 1797
    assert max(abs(a - b) for a, b in zip(counts(train), counts(test), strict=True)) <= 1


def counts(data):
    found = Counter(data.labels)
    return [found[digit] for digit in range(10)]


def test_training_images_change_a_little_each_time_and_test_images_do_not():
    train, test = Digits(train=True), Digits(train=False)

    assert not torch.equal(train[0][0], train[0][0])
    assert (train[0][0] - train.images[0]).abs().mean() < 0.25
    assert torch.equal(test[0][0], test.images[0])
    assert test[0][0].shape == (1, 8, 8)


def test_samples_are_the_same_one_by_one_and_together():
    test = Digits(train=False)

    together = test.__getitems__([3, 5])

    assert [label for _, label in together] == [test[3][1], test[5][1]]
    assert torch.equal(together[1][0], test[5][0])


@pytest.mark.parametrize(
    ("norm", "layer", "num_groups"),
    [("batch", nn.BatchNorm2d, None), ("group", nn.GroupNorm, 8), ("layer", nn.GroupNorm, 1)],
)
def test_a_norm_is_used_everywhere(norm, layer, num_groups):
    norms = [m for m in ResidualNetwork(norm).modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]

    assert len(norms) == 13
    assert {type(m) for m in norms} == {layer}
    assert {getattr(m, "num_groups", None) for m in norms} == {num_groups}


def test_an_unknown_norm_is_refused():
    with pytest.raises(bb.OptionError, match="norm='instance'; it is one of 'batch', 'group', 'layer'"):
        digits("instance")


@pytest.mark.parametrize(("norm", "exactness"), [("batch", "approximate"), ("group", "exact"), ("layer", "exact")])
def test_it_says_how_exact_it_is(norm, exactness):
    run = Run(digits(norm), micro_batch_size=16)
    images, labels = next(iter(train_loader(run.task, run.parts.train_data)))

    assert run.step([images[:32], labels[:32]]).exactness == exactness


def test_it_learns():
    """Not the whole run, which takes too long here: a small network, some epochs."""
    task = digits()
    small = bb.Task(
        model=lambda: ResidualNetwork(width=16),
        train_data=task.train_data,
        loss_fn=task.loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        eval_data=task.eval_data,
        evaluate=task.evaluate,
        batch_size=128,
        epochs=6,
        evaluate_every=6,
    )

    result = Run(small, micro_batch_size=64).train()

    assert result.metrics["accuracy"] > 0.5  # 0.1 by chance


@pytest.mark.slow
def test_the_whole_run_is_right_on_98_of_100_inside_its_budget():
    result = Run(digits(), memory_budget="64MiB").train()

    assert result.batch_size == 512
    assert result.metrics["accuracy"] >= 0.98
    assert result.peak_bytes <= 64 * 2**20


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    module._halves.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(bb.MissingExtraError, match=r'pip install "bigbatch\[demo\]"'):
        digits().train_data()
