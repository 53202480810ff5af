from __future__ import annotations

import copy
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb
from tests.reference import big_batch_gradients, gradients
from tests.verification.worlds import GOOD, WRONG, Detached, World, batch, mlp, sample_mean, token_mean


def verified(world: World, **options) -> bb.Comparison:
    return bb.verify(world.model(), world.loss_fn, batch(), **world.options, **options)


@pytest.mark.parametrize("name", GOOD)
def test_what_adds_up_is_equal(name):
    found = verified(GOOD[name])

    assert found.findings == ()
    assert found.equal
    assert found.worst[1] <= 1e-12


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_named_with_its_remedy(name):
    found = verified(WRONG[name])

    assert not found.equal
    assert len(found.findings) == 1
    assert WRONG[name].found is not None
    assert re.search(WRONG[name].found, found.findings[0]), found.findings[0]


@pytest.mark.parametrize("name", [name for name in WRONG if name not in {"a counter", "noise"}])
def test_the_wrong_ones_are_far_off(name):
    """Control: the tolerance does not decide."""
    assert verified(WRONG[name]).worst[1] > 1e-3


def test_both_mistakes_are_named_when_there_are_two():
    world = WRONG["BatchNorm"]
    found = bb.verify(world.model(), lambda m, b: (m(b["x"])[:, 0].sum(1) - b["y"]).square().sum(), batch())

    assert [text[:9] for text in found.findings] == ["BatchNorm", "The loss "]
    assert "bb.Sum(loss)" in found.findings[1]


def test_the_remedy_for_labels_with_another_name_is_code_that_works():
    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())

    given = batch()["x"], batch()["labels"]
    found = bb.verify(mlp(), loss_fn, given)
    code = found.findings[0].partition("give weight=")[2].rstrip(".")

    assert code == "lambda batch: (batch[1] != -100).sum()"
    assert bb.verify(mlp(), loss_fn, given, weight=eval(code)).equal


def test_layers_that_never_get_a_gradient_are_named():
    found = bb.verify(Detached(), sample_mean, batch())

    assert found.equal
    assert found.findings[0].startswith("the layer ['body'] never gets a gradient")


def test_the_difference_is_that_of_accumulate_and_the_big_batch():
    model = mlp()
    found = bb.verify(model, token_mean, batch(), micro_batch_size=4)
    expected = big_batch_gradients(model, token_mean, batch())
    cut = copy.deepcopy(model).double()
    wide = {name: t.double() if t.is_floating_point() else t for name, t in batch().items()}
    with pytest.warns(bb.BigBatchWarning, match="weighed by samples"):
        bb.accumulate(cut, token_mean, wide, micro_batch_size=4)

    assert found.cuts == ((4, 4, 1),)
    for name, gradient in gradients(cut).items():
        difference = float((gradient - expected[name]).norm() / expected[name].norm())
        assert found.differences[name] == pytest.approx(difference, rel=1e-6)
    assert list(found.differences.values()) == sorted(found.differences.values(), reverse=True)
    assert found.worst == next(iter(found.differences.items()))


def test_an_uneven_cut_and_micro_batches_of_one_are_tried():
    assert verified(GOOD["mean over samples"]).cuts == ((5, 4), (1,) * 9)
    assert verified(WRONG["BatchNorm"]).cuts == ((5, 4), (3, 3, 3))


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["mean over samples", "BatchNorm"])
def test_the_smallest_batches_are_cut(name, num_samples):
    world = {**GOOD, **WRONG}[name]
    few = {key: value[:num_samples] for key, value in batch().items()}
    if name == "BatchNorm" and num_samples < 4:
        with pytest.raises(bb.BatchError, match="of 2 or more, as BatchNorm needs them; give at least 4"):
            bb.verify(world.model(), world.loss_fn, few)
        return
    found = bb.verify(world.model(), world.loss_fn, few)

    assert all(len(sizes) > 1 and sum(sizes) == num_samples for sizes in found.cuts)
    assert found.equal == (name != "BatchNorm")


class TimeFirst(nn.Module):
    """Its dropout cannot tell which samples it drops of, and with as many samples as times nobody can."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1)

    def forward(self, x):
        times = self.first(x)[None].expand(2, -1, -1)
        return self.last(self.dropout(times).mean(0))


def test_masks_by_sample_are_compared_too():
    batch = torch.randn(10, 3), torch.randn(10, 1)
    found = bb.verify(layers_that_drop(), of_pairs, batch, dropout="per-sample")

    assert found.equal
    assert found.worst[1] <= 1e-12
    assert not found.notes

    with pytest.raises(bb.LossError, match=r"dimension 0.*'dropout' \(Dropout\)"):
        bb.verify(TimeFirst(), of_pairs, batch, dropout="per-sample")


def test_masks_that_depend_on_the_cut_are_found():
    """Control: a forward that drops a second time when it sees few samples."""
    model, batch = layers_that_drop(), (torch.randn(10, 3), torch.randn(10, 1))

    def loss_fn(model, batch):
        x = F.dropout(batch[0], 0.0 if len(batch[0]) > 4 else 1e-9)
        return of_pairs(model, (x, batch[1]))

    found = bb.verify(model, loss_fn, batch, dropout="per-sample")

    assert not found.equal
    assert "With dropout, a cut is not the whole batch" in found.findings[0]


def layers_that_drop():
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))


def of_pairs(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def test_dropout_and_16_bits_are_said():
    assert "Dropout was switched off" in verified(GOOD["dropout"]).notes[0]
    assert "Dropout was switched off" in verified(GOOD["dropout, a function"]).notes[0]
    assert verified(GOOD["bf16"]).notes == (
        "precision=bf16 was left out: rounding in 16 bits would hide what is compared.",
    )
    assert verified(GOOD["mean over samples"]).notes == ()


def test_it_holds_in_float32_with_a_wider_bound():
    good, wrong = (verified(world, dtype="float32") for world in (GOOD["tokens"], WRONG["tokens by samples"]))

    assert good.equal
    assert good.worst[1] > 1e-9
    assert good.dtype == "float32"
    assert not wrong.equal
    assert 'weight="tokens"' in wrong.findings[0]


def test_a_model_that_recomputes_is_compared_without_and_goes_on_recomputing():
    model = GOOD["casts to float32"].model()
    bb.apply(bb.Plan(micro_batch_size=3, recompute=("inner",)), model)
    calls = []
    model.inner[1].register_forward_hook(lambda *_: calls.append("tanh"))

    assert bb.verify(model, sample_mean, batch()).equal
    calls.clear()
    sample_mean(model, batch()).backward()
    assert calls == ["tanh", "tanh"]


def test_a_list_of_samples_is_collated():
    samples = [{name: value[i] for name, value in batch().items()} for i in range(9)]
    collate = torch.utils.data.default_collate

    assert bb.verify(mlp(), token_mean, samples, collate=collate, weight="tokens").equal
    assert not bb.verify(mlp(), token_mean, samples, collate=collate).equal


class OnPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(6, 5)

    def forward(self, packed):
        return self.inner(packed)[0].data


@pytest.mark.parametrize(("weight", "equal"), [(lambda p: len(p.data), True), (lambda p: p.batch_sizes[0], False)])
def test_a_batch_with_a_split_of_its_own_is_run_at_once_as_it_is(weight, equal):
    sequences = [batch()["x"][i, : 4 - i // 3] for i in range(9)]

    def split(packed, micro_batch_size):
        return [nn.utils.rnn.pack_sequence(sequences[i : i + micro_batch_size]) for i in range(0, 9, micro_batch_size)]

    found = bb.verify(
        OnPacked(),
        lambda m, b: m(b).square().mean(),
        nn.utils.rnn.pack_sequence(sequences),
        split=split,
        weight=weight,
        micro_batch_size=4,
    )

    assert found.equal == equal
    assert equal or "neither samples nor tokens" in found.findings[0]


def test_a_reentrant_checkpoint_is_refused():
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            hidden = torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
            return self.head(hidden)

    with pytest.raises(bb.OptionError, match="use_reentrant=True, which hides"):
        bb.verify(Reentrant(), sample_mean, batch())


def test_of_large_parameters_a_part_is_enough_to_tell():
    model = nn.Sequential(nn.Linear(6, 5000), nn.Tanh(), nn.Linear(5000, 3))

    assert 'weight="tokens"' in bb.verify(model, token_mean, batch()).findings[0]


class Everything(nn.Module):
    """A counting buffer, BatchNorm, dropout, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.frozen


def state_of(model: nn.Module, given, optimizer) -> list:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), *given.values()]
    versions = [(p._version, None if p.grad is None else id(p.grad)) for p in model.parameters()]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return [
        [None if t is None else t.clone() for t in [*tensors, *moments, torch.get_rng_state()]],
        versions,
        [m.training for m in model.modules()],
        [random.getstate(), torch.get_default_dtype(), torch.is_grad_enabled()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    ]


def assert_untouched(before, after):
    assert before[1:] == after[1:]
    for a, b in zip(before[0], after[0], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Everything()
    model.inner[1].eval()
    optimizer = torch.optim.AdamW(model.parameters())
    sample_mean(model, batch()).backward()
    optimizer.step()
    return model, optimizer


def moves_all(model, b):
    """Draws, and changes its batch and the mode of its model."""
    random.random()
    torch.rand(1)
    b["x"].mul_(2.0)
    model.train()
    return sample_mean(model, b)


def test_nothing_is_touched():
    (model, optimizer), given = trained(), batch()
    before = state_of(model, given, optimizer)
    bb.verify(model, moves_all, given)

    assert_untouched(before, state_of(model, given, optimizer))


def test_nothing_is_touched_by_a_loss_that_runs_the_original_too():
    (model, optimizer), given = trained(), batch()
    before = state_of(model, given, optimizer)
    seen = []

    def runs_both(m, b):
        model.train()
        model(b["x"])
        seen.append(float(model.calls))
        return moves_all(m, b)

    bb.verify(model, runs_both, given)

    assert max(seen) > float(before[0][list(model.state_dict()).index("calls")])
    assert_untouched(before, state_of(model, given, optimizer))


@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
def test_nothing_is_touched_after_an_error(fail_at):
    (model, optimizer), given, calls = trained(), batch(), []
    before = state_of(model, given, optimizer)

    def fails(m, b):
        calls.append(1)
        loss = moves_all(m, b)
        if len(calls) == fail_at:
            raise RuntimeError("on purpose")
        return loss

    with pytest.raises(RuntimeError, match="on purpose"):
        bb.verify(model, fails, given)
    assert_untouched(before, state_of(model, given, optimizer))


def test_a_loss_that_uses_another_model_is_refused_and_moves_nothing():
    (model, optimizer), given = trained(), batch()
    before = state_of(model, given, optimizer)

    with pytest.raises(bb.LossError, match=r"no parameter of the model that loss_fn was given.*first argument"):
        bb.verify(model, lambda _, b: sample_mean(model, b), given)
    assert_untouched(before, state_of(model, given, optimizer))


def test_parameters_outside_of_the_model_get_no_gradient():
    temperature = torch.tensor(0.5, requires_grad=True)

    assert bb.verify(mlp(), lambda m, b: sample_mean(m, b) * temperature, batch()).equal
    assert temperature.grad is None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"dtype": "bf16"}, bb.OptionError, "dtype='bf16'; it is one of 'float64', 'float32'"),
        ({"micro_batch_size": 9}, bb.OptionError, "micro_batch_size=9 cuts nothing: the batch has 9 samples"),
        ({"micro_batch_size": 0}, bb.OptionError, "at least 1"),
        ({"wieght": "tokens"}, bb.OptionError, "no option 'wieght'"),
    ],
)
def test_a_wrong_argument_is_said(arguments, error, match):
    with pytest.raises(error, match=match):
        bb.verify(mlp(), sample_mean, batch(), **arguments)


def test_a_batch_that_cannot_be_compared_is_said():
    with pytest.raises(bb.BatchError, match="1 sample, which cannot be cut"):
        bb.verify(mlp(), sample_mean, {name: value[:1] for name, value in batch().items()})
    with pytest.raises(bb.BatchError, match="no whole batch to compare with"):
        bb.verify(mlp(), sample_mean, bb.LogicalBatch([batch()]))


def test_a_loss_that_is_not_finite_is_said():
    found = bb.verify(mlp(), lambda m, b: sample_mean(m, b) / 0.0, batch())

    assert not found.equal
    assert found.findings == ("The loss of the whole batch is inf, so there is no gradient to compare with.",)


def test_the_comparison_goes_through_json():
    found = verified(WRONG["tokens by samples"])

    assert bb.Comparison.from_json(found.to_json()) == found
