"""Measuring a step, the micro-batch size found by trying, and that nothing is moved by either.

``sizing.fit`` is what ``Step.fit`` falls back to; tests of the size that it finds call it by itself.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

import bigbatch as bb
from bigbatch.stepping.fitting.sizing import fit, largest_that_fits
from bigbatch.values import Plan

NUM_FEATURES = 16
NUM_SAMPLES = 24
Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """One sample's activations are half as large as all parameters."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 64), *(nn.Tanh() for _ in range(10)), nn.Linear(64, 5))


def mostly_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 5))


def net_with_batch_norm() -> nn.Module:
    middle = nn.BatchNorm1d(32), *(nn.Tanh() for _ in range(6)), nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), *middle, nn.Linear(32, 5))


def make_batch(num_samples: int = NUM_SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return x, torch.randint(0, 5, (num_samples,), generator=generator)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw_foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)


def adamw_fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def with_tensor_lr(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), fused=True)


def fitted(step: bb.Step, batch: Any) -> Plan:
    """The largest micro-batch that fits, found by trying, and put on the step."""
    assert step.budget_bytes is not None
    step.plan = fit(step, batch, step.budget_bytes)
    step.micro_batch_size = step.plan.micro_batch_size
    return step.plan


# Nothing moves


def snapshot(step: bb.Step) -> dict[str, Any]:
    """Everything that a step could move, by value."""
    model, scaler = step.model, step.accumulator.precision.scaler
    found = dict(
        model=dict(model.state_dict()),
        buffers=dict(model.named_buffers()),
        optimizers=[optimizer.state_dict() for optimizer in step.optimizers],
        schedulers=[scheduler.state_dict() for scheduler in step.schedulers],
        step=step.state_dict(),
        gradients=[parameter.grad for parameter in model.parameters()],
        modes=[module.training for module in model.modules()],
        hooks=[(len(m._forward_pre_hooks), len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
        rng=torch.get_rng_state(),
        scaler=None if scaler is None else {**scaler.state_dict(), "found": dict(scaler._per_optimizer_states)},
    )
    return copy.deepcopy(found)


def identities(step: bb.Step) -> list[int]:
    """The tensors themselves, which others refer to: a scheduler, a compiled graph, an average."""
    state = [value for o in step.optimizers for s in o.state.values() for value in s.values()]
    groups = [value for o in step.optimizers for group in o.param_groups for value in group.values()]
    kept = [*step.model.parameters(), *step.model.buffers(), *state, *groups]
    return [id(value) for value in kept if isinstance(value, Tensor)]


def assert_identical(found: Any, expected: Any, path: str = "") -> None:
    """Bit for bit, through dicts, lists and tuples."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name in expected:
            assert_identical(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, inner in enumerate(expected):
            assert_identical(found[index], inner, f"{path}.{index}")
    elif isinstance(expected, Tensor):
        assert torch.equal(found.view(torch.uint8) if found.dim() else found, _bits(expected)), path
    elif not callable(expected):
        assert found == expected, path


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


class Counting(nn.Module):
    """Changes a buffer in place, and another one by putting a new tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(NUM_FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().mean(0)
        return x


def spectral() -> nn.Module:
    """The buffers of spectral norm take a step of power iteration at each forward."""
    layers = nn.utils.parametrizations.spectral_norm(nn.Linear(NUM_FEATURES, 64)), *(nn.Tanh() for _ in range(10))
    return nn.Sequential(*layers, nn.Linear(64, 5))


def rebinding() -> nn.Module:
    return nn.Sequential(Counting(), mlp())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "sgd": (mlp, sgd, {}),
    "adamw foreach": (mlp, adamw_foreach, dict(max_grad_norm=0.1)),
    "adamw fused": (mlp, adamw_fused, {}),
    "lr in a tensor": (mlp, with_tensor_lr, {}),
    "batch norm, dropout": (net_with_batch_norm, sgd, {}),
    "native batch norm": (net_with_batch_norm, adamw_foreach, dict(batch_norm="native")),
    "frozen batch norm": (net_with_batch_norm, sgd, dict(batch_norm="frozen")),
    "fp16": (mlp, sgd, dict(precision="fp16")),
    "spectral norm": (spectral, sgd, {}),
    "other buffers": (rebinding, sgd, {}),
    "bfloat16 parameters": (lambda: mlp().bfloat16(), adamw_foreach, {}),
    "everything": (net_with_batch_norm, adamw_foreach, dict(precision="fp16", max_grad_norm=0.1)),
}


def make_step(kind: str, **more: Any) -> bb.Step:
    torch.manual_seed(5)
    make_model, make_optimizer, options = CASES[kind]
    model = make_model()
    optimizer = make_optimizer(model)
    if kind == "everything":
        options = {**options, "ema": AveragedModel(model), "scheduler": OneCycleLR(optimizer, 0.1, total_steps=100)}
    # Without the copies that can undo an optimizer: of these small models they are more than the activations.
    options = {"on_out_of_memory": "raise", **options}
    return bb.Step(model, _as_wide_as(model), optimizer, **options, **more)


def _as_wide_as(model: nn.Module) -> Callable[[nn.Module, Batch], Tensor]:
    dtype = next(model.parameters()).dtype
    return lambda model, batch: loss_fn(model, (batch[0].to(dtype), batch[1]))


@pytest.mark.parametrize("after", [0, 2], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize("kind", list(CASES))
def test_measuring_and_fitting_leave_everything_as_it_was(kind, after):
    step, batch = make_step(kind), make_batch()
    step.micro_batch_size = 6
    for _ in range(after):
        step(batch)
    before, same = snapshot(step), identities(step)

    peaks = [step.measure(batch, size) for size in (3, 24)]
    fit(step, batch, 2**30)

    assert_identical(snapshot(step), before)
    assert identities(step) == same
    assert 0 < peaks[0] < peaks[1]


@pytest.mark.parametrize("kind", list(CASES))
def test_a_run_that_was_fitted_is_the_run_that_was_not(kind):
    """Not a bit differs, after any number of steps."""
    batch, other = make_batch(), make_batch(20)
    ends = []
    for is_fitted in (True, False):
        step = make_step(kind, micro_batch_size=6)
        for index in range(4):
            if is_fitted and index in (0, 2):
                step.measure(other if index else batch, 7)
            step(batch)
        ends.append(snapshot(step))

    assert_identical(*ends)


def test_a_step_does_move_what_is_compared():
    """Control."""
    step = make_step("everything", micro_batch_size=6)
    step(make_batch())
    before = snapshot(step)
    step(make_batch())
    after = snapshot(step)

    for name in ("model", "buffers", "optimizers", "schedulers", "step", "rng"):
        with pytest.raises(AssertionError):
            assert_identical(after[name], before[name])


def test_an_overflow_in_the_trial_leaves_the_scale():
    """The first fp16 steps of a run overflow, and the trial finds what a step needs that does not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    model, batch = mlp(), make_batch()
    step = bb.Step(model, loss_fn, adamw_foreach(model), precision=scaler)
    before = snapshot(step)

    overflowing = step.measure(batch, 6)

    assert_identical(snapshot(step), before)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    # To name what is not finite takes a little more; a step with zeros has some scalars less.
    finite = step.measure(batch, 6)
    assert finite - 64 <= overflowing < 1.1 * finite


def test_a_trial_that_fails_leaves_everything_as_it_was():
    step = make_step("batch norm, dropout")
    step(make_batch())
    before, calls = snapshot(step), []

    def fails(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(len(batch[0]))
        if len(calls) == 2:
            raise ZeroDivisionError("as if")
        return loss_fn(model, batch)

    step.accumulator.loss_fn = fails
    with pytest.raises(ZeroDivisionError, match="as if"):
        step.measure(make_batch(), 6)

    assert_identical(snapshot(step), before)


def test_the_listener_hears_nothing_of_a_trial():
    heard = []
    step = make_step("sgd", memory_budget="1GiB")
    step.on_micro_batch = lambda k, num: heard.append((k, num))

    step(make_batch())

    assert heard == [(1, 1)]


# The largest that fits


def candidates_of(num_samples: int, smallest: int = 1) -> list[int]:
    """Sizes that need different numbers of micro-batches: 24 is 24, 12, 8, 6, 5, 4, 3, 2, 1."""
    return sorted({math.ceil(num_samples / k) for k in range(1, num_samples + 1)} - set(range(smallest)))


@pytest.mark.parametrize("kind", ["sgd", "batch norm, dropout", "adamw foreach"])
def test_the_largest_that_fits_is_that_of_an_exhaustive_search(kind):
    batch = make_batch()
    smallest = 2 if kind.startswith("batch norm") else 1
    peaks = {size: make_step(kind).measure(batch, size) for size in candidates_of(NUM_SAMPLES, smallest)}
    assert len(set(peaks.values())) > 3

    budgets = {peak + more for peak in peaks.values() for more in (-1, 0, 1)}
    for budget in budgets:
        fitting = [size for size, peak in peaks.items() if peak <= budget]
        step = make_step(kind, memory_budget=budget)
        if not fitting:
            with pytest.raises(bb.BudgetError, match="No micro-batch fits") as caught:
                fitted(step, batch)
            assert (caught.value.smallest_bytes, caught.value.budget_bytes) == (peaks[smallest], budget)
            continue
        plan = fitted(step, batch)
        # Where two sizes need the same, the larger one takes fewer micro-batches.
        assert plan.micro_batch_size == max(fitting)
        assert plan.peak_bytes == peaks[max(fitting)]
        assert plan.budget_bytes == budget
        assert plan.accumulation_steps == math.ceil(NUM_SAMPLES / plan.micro_batch_size)


def test_the_first_batch_is_fitted_by_itself_and_the_plan_stays():
    sizes = []

    def listening(model: nn.Module, batch: Batch) -> Tensor:
        sizes.append(len(batch[0]))
        return loss_fn(model, batch)

    model, batch = mlp(), make_batch()
    budget = make_step("sgd").measure(batch, 8)
    step = bb.Step(model, listening, sgd(model), memory_budget=budget)

    assert step.micro_batch_size is None
    assert step.plan is None
    first = step(batch)
    tried, plan = len(sizes), step.plan
    second = step(batch)

    assert first.micro_batch_sizes == second.micro_batch_sizes
    assert len(sizes) == tried + len(first.micro_batch_sizes)
    assert step.plan is plan
    assert plan.micro_batch_size == step.micro_batch_size == first.micro_batch_sizes[0] < NUM_SAMPLES


def test_a_larger_batch_is_fitted_again_when_all_of_the_first_one_fitted():
    step = make_step("sgd", memory_budget=make_step("sgd").measure(make_batch(24), 12))
    sizes = [step(make_batch(n)).micro_batch_sizes for n in (4, 24, 48, 4)]

    assert sizes[0] == sizes[3] == (4,)
    # More samples than were ever seen to fit at once are not tried in the training itself.
    assert len(sizes[1]) > 1
    assert set(sizes[2][:-1]) == {sizes[1][0]}


def test_the_size_that_is_returned_was_tried_and_so_was_the_next():
    sizes: list[int] = []

    def listening(model: nn.Module, batch: Batch) -> Tensor:
        sizes.append(len(batch[0]))
        return loss_fn(model, batch)

    batch = make_batch(240)
    budget = make_step("sgd").measure(batch, 60) + 100
    model = mlp()
    plan = fitted(bb.Step(model, listening, sgd(model), memory_budget=budget), batch)

    assert plan.micro_batch_size == 60
    assert {60, 80} <= set(sizes)
    # 30 sizes could be tried. A line through the first ones finds it in a few.
    assert len(candidates_of(240)) > 25
    assert len(set(sizes)) <= 8


@pytest.mark.parametrize("kind", ["sgd", "batch norm, dropout", "adamw foreach"])
def test_a_step_at_its_budget_stays_inside(kind):
    """The peak of a real step, counted by itself, is what the plan says and not more than the budget."""
    from tests.stepping.test_peak_memory import peak_of_a_steady_step

    batch = make_batch()
    for size in (2, 6, 12):
        budget = round(make_step(kind).measure(batch, size) * 1.03)
        step = make_step(kind, memory_budget=budget)
        peak = peak_of_a_steady_step(step, batch)
        assert step.plan.peak_bytes == pytest.approx(peak, rel=0.01)
        assert peak <= budget
        # Control: the whole batch at once would not have been inside.
        assert make_step(kind).measure(batch, None) > budget


def test_with_a_size_of_ones_own_that_one_is_tried_alone():
    batch = make_batch()
    peak = make_step("sgd").measure(batch, 5)
    step = make_step("sgd", memory_budget=peak, micro_batch_size=5)

    assert fitted(step, batch).micro_batch_size == 5
    with pytest.raises(bb.BudgetError, match="even 5 sample"):
        fitted(make_step("sgd", memory_budget=peak - 1, micro_batch_size=5), batch)


def test_a_size_of_ones_own_is_kept_and_modules_are_recomputed_for_it():
    batch = make_batch()
    budget = round(make_step("sgd").measure(batch, 5) * 1.01)  # less than the margin
    step = make_step("sgd", memory_budget=budget, micro_batch_size=5)

    assert step(batch).micro_batch_sizes == (5, 5, 5, 5, 4)
    assert step.plan.recompute
    with pytest.raises(bb.BudgetError, match="even micro-batches of 5"):
        make_step("sgd", memory_budget=budget // 3, micro_batch_size=5)(batch)


@pytest.mark.parametrize("kind", ["sgd", "batch norm, dropout"])
def test_when_nothing_fits_nothing_moved(kind):
    step = make_step(kind, memory_budget=1000)
    before = snapshot(step)

    with pytest.raises(bb.BudgetError, match=r"even micro-batches of \d.* need .* KiB") as caught:
        step(make_batch())

    assert isinstance(caught.value, MemoryError)
    assert caught.value.budget_bytes == 1000
    assert_identical(snapshot(step), before)
    # What it says is enough is enough.
    make_step(kind, memory_budget=caught.value.smallest_bytes)(make_batch())
    with pytest.raises(bb.BudgetError, match="No plan fits"):
        make_step(kind, memory_budget=round(caught.value.smallest_bytes * 0.97))(make_batch())


@pytest.mark.parametrize("kind", ["sgd", "batch norm, dropout"])
def test_when_no_size_that_is_tried_fits_nothing_moved(kind):
    step = make_step(kind, memory_budget=1000)
    before = snapshot(step)

    with pytest.raises(bb.BudgetError, match=r"even \d sample.* need .* KiB") as caught:
        fitted(step, make_batch())

    smallest = 2 if kind.startswith("batch norm") else 1
    assert caught.value.smallest_bytes == make_step(kind).measure(make_batch(), smallest)
    assert_identical(snapshot(step), before)


def test_a_single_sample():
    step = make_step("sgd", memory_budget="1MiB")

    assert step(make_batch(1)).micro_batch_sizes == (1,)
    assert step.micro_batch_size == 1


def test_a_single_sample_that_batch_norm_refuses_is_its_error():
    step = make_step("batch norm, dropout", memory_budget="1MiB")
    before = snapshot(step)

    with pytest.raises(bb.BatchError, match="one value per channel"):
        step(make_batch(1))

    assert_identical(snapshot(step), before)


def test_batch_norm_is_never_fitted_to_one_sample():
    budget = make_step("batch norm, dropout").measure(make_batch(8), 2)

    even = make_step("batch norm, dropout", memory_budget=budget)
    assert fitted(even, make_batch(8)).micro_batch_size == 2
    planned = make_step("batch norm, dropout", memory_budget=budget)
    assert min(planned(make_batch(9)).micro_batch_sizes) >= 2


def test_batch_norm_is_not_fitted_to_a_size_that_leaves_one_sample():
    """9 samples cannot be cut into pieces of 2."""
    batch = make_batch(9)
    two, three = (make_step("batch norm, dropout").measure(batch, size) for size in (2, 3))
    assert two < three

    assert fitted(make_step("batch norm, dropout", memory_budget=three), batch).micro_batch_size == 3
    with pytest.raises(bb.BudgetError, match="No micro-batch fits"):
        fitted(make_step("batch norm, dropout", memory_budget=three - 1), batch)


def test_the_whole_batch_at_once_is_found_where_a_part_needs_more():
    """Only the second micro-batch has gradients to add to; a batch in one piece does without them."""
    batch = make_batch()

    def make(**more: Any) -> bb.Step:
        model = mostly_parameters()
        return bb.Step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **more)

    whole, half, one = (make().measure(batch, size) for size in (24, 12, 1))
    assert whole < one < half

    assert fitted(make(memory_budget=whole), batch).micro_batch_size == 24
    # The planner keeps 2 % free.
    assert make(memory_budget=math.ceil(whole / 0.98))(batch).micro_batch_sizes == (24,)


def test_out_of_memory_in_the_trial_is_a_size_that_does_not_fit():
    def limited(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch[0]) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_fn(model, batch)

    model = mlp()
    step = bb.Step(model, limited, sgd(model), memory_budget="1GiB")

    assert step(make_batch()).micro_batch_sizes == (6, 6, 6, 6)


def test_out_of_memory_at_the_smallest_size_says_so():
    def never(model: nn.Module, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = mlp()
    step = bb.Step(model, never, sgd(model), memory_budget="1GiB")

    with pytest.raises(bb.BudgetError, match="more than there is"):
        step(make_batch())


def test_another_error_in_the_trial_is_not_taken_for_out_of_memory():
    def broken(model: nn.Module, batch: Batch) -> Tensor:
        raise KeyError("no such key")

    model = mlp()
    with pytest.raises(KeyError, match="no such key"):
        bb.Step(model, broken, sgd(model), memory_budget="1GiB")(make_batch())


# Batches of other kinds


def collate(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def test_a_batch_that_is_collated_is_fitted():
    samples = list(zip(*make_batch(), strict=True))
    model = mlp()
    budget = bb.Step(model, loss_fn, sgd(model), collate=collate).measure(samples, 6)

    step = bb.Step(model, loss_fn, sgd(model), collate=collate, memory_budget=budget)

    assert fitted(step, samples).micro_batch_size == 6
    assert step(samples).micro_batch_sizes == (6, 6, 6, 6)


def test_a_batch_that_is_collated_is_planned():
    samples = list(zip(*make_batch(), strict=True))
    model = mlp()
    whole = bb.Step(model, loss_fn, sgd(model), collate=collate).measure(samples, None)

    step = bb.Step(model, loss_fn, sgd(model), collate=collate, memory_budget=round(whole * 0.9))

    assert step.fit(samples).peak_bytes <= whole * 0.9
    assert step(samples).micro_batch_sizes[0] == step.plan.micro_batch_size


def test_a_batch_that_is_cut_already_has_nothing_to_choose():
    model = mlp()
    step = bb.Step(model, loss_fn, sgd(model), memory_budget="1GiB")

    with pytest.raises(bb.OptionError, match="cut already"):
        step(bb.LogicalBatch([make_batch(3)]))


def test_fitting_without_a_budget_is_an_error():
    with pytest.raises(bb.OptionError, match='memory_budget="8GiB"'):
        make_step("sgd").fit(make_batch())


def test_a_gradient_that_lies_there_is_an_error_before_any_trial():
    step = make_step("sgd", memory_budget="1GiB")
    step.model[0].weight.grad = torch.ones_like(step.model[0].weight)

    with pytest.raises(bb.GradientError, match="0.weight"):
        step(make_batch())

    assert torch.equal(step.model[0].weight.grad, torch.ones_like(step.model[0].weight))


def test_a_trial_does_not_need_valid_labels_in_the_first_samples():
    """The whole batch has a weight; two of its micro-batches need not."""
    x, y = make_batch()
    y[:10] = -100
    model = mlp()

    def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(model, (batch["x"], batch["labels"]))

    step = bb.Step(model, token_loss, sgd(model), weight="tokens", memory_budget="1GiB", micro_batch_size=3)

    assert step(dict(x=x, labels=y)).micro_batch_sizes == (3,) * 8


def test_an_optimizer_for_sparse_gradients_can_be_measured():
    model = nn.Embedding(50, 4, sparse=True)
    step = bb.Step(
        model, lambda m, ids: m(ids).square().mean(), torch.optim.SparseAdam(model.parameters()), memory_budget="1GiB"
    )
    ids = torch.arange(12)

    assert step(ids).micro_batch_sizes == (12,)
    assert step.measure(ids, 4) > 0


# The search by itself


@pytest.mark.parametrize("shape", ["line", "with a floor", "square", "jump"])
@pytest.mark.parametrize("num_candidates", [1, 2, 30, 200])
def test_the_search_finds_the_largest_in_few_tries(num_candidates, shape):
    candidates = sorted(random.Random(1).sample(range(1, 5000), num_candidates))
    peak = {
        "line": lambda n: 1000 + 7.3 * n,
        "with a floor": lambda n: max(9000, 7.3 * n),
        "square": lambda n: 10 + 0.01 * n * n,
        "jump": lambda n: 3 * n + 50_000 * (n > 2500),
    }[shape]
    for chosen in {0, num_candidates // 3, num_candidates - 1}:
        tried: list[int] = []

        def peak_of(n: int, tried: list[int] = tried) -> float:
            tried.append(n)
            return peak(n)

        budget = math.ceil(peak(candidates[chosen]))
        largest = max(n for n in candidates if peak(n) <= budget)

        assert largest_that_fits(candidates, peak_of, budget)[0] == largest
        assert len(tried) == len(set(tried))
        assert len(tried) <= 2 * math.log2(num_candidates) + 4


def test_the_search_ends_for_peaks_without_any_order():
    """What is returned fits, and the next was seen not to."""
    numbers = random.Random(2)
    candidates = list(range(1, 60))
    for _ in range(200):
        peaks = {n: numbers.choice([numbers.randrange(100), math.inf]) for n in candidates}
        peaks[1] = 0
        tried: list[int] = []

        def peak_of(n: int, tried: list[int] = tried, peaks: dict[int, float] = peaks) -> float:
            tried.append(n)
            return peaks[n]

        size, peak = largest_that_fits(candidates, peak_of, 50)

        assert peak == peaks[size] <= 50
        assert size == 59 or (size + 1 in tried and peaks[size + 1] > 50)
        assert len(tried) <= 59
