"""Grouping by length inside a step: the gradient of the big batch, the bound of the plan, and what does not go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import bigbatch as bb
from tests.reference import assert_same_gradients, big_batch_gradients, gradient_error, gradients

NUM_TOKENS = 30


class Tagger(nn.Module):
    """Attention over all tokens but the padding, and a norm or dropout when it is told so."""

    def __init__(self, *, norm: nn.Module | None = None, dropout: float = 0.0, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, width)
        self.norm = norm or nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=(tokens != 0).unsqueeze(1))
        return self.head(self.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2)))


def padded(samples: list[Tensor], pad_to_multiple_of: int = 1) -> dict[str, Tensor]:
    tokens = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    labels = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=-100)
    more = -tokens.shape[1] % pad_to_multiple_of
    return {"tokens": F.pad(tokens, (0, more)), "labels": F.pad(labels, (0, more), value=-100)}


def num_tokens(sample: Tensor) -> int:
    return len(sample) - 1


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def make_batch(num_samples: int = 24, longest: int = 40) -> list[Tensor]:
    draw = torch.Generator().manual_seed(num_samples)
    lengths = (2 + (longest - 1) * torch.rand(num_samples, generator=draw) ** 3).long().tolist()
    lengths[num_samples // 2] = longest + 1
    return [torch.randint(1, NUM_TOKENS, (n,), generator=draw) for n in lengths]


OPTIONS: dict[str, Any] = {"collate": padded, "length": num_tokens, "weight": "tokens"}
BOUNDS = [
    {"micro_batch_size": 4},
    {"max_tokens": 80},
    {"max_tokens": 120, "micro_batch_size": 5},
    {"max_tokens": 40},
    {"micro_batch_size": 4, "pad_to_multiple_of": 16},
]


def make_step(model: nn.Module, **options: Any) -> bb.Step:
    return bb.Step(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=0.01), **{**OPTIONS, **options})


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_the_gradient_is_that_of_the_big_batch(bound):
    torch.manual_seed(0)
    model, batch = Tagger().double(), make_batch()
    expected = big_batch_gradients(model, loss_fn, padded(batch))

    result = bb.accumulate(model, loss_fn, batch, **OPTIONS, **bound)

    assert_same_gradients(gradients(model), expected)
    assert result.padding is not None
    before, after = result.padding
    assert after < max(before, 0.05)  # one sample at a time has no padding before
    assert sum(result.micro_batch_sizes) == len(batch)
    assert bb.StepResult.from_json(result.to_json()).padding == result.padding


def test_in_float32_it_is_that_of_the_ungrouped_step():
    torch.manual_seed(0)
    model, batch = Tagger(), make_batch()
    grouped = copy.deepcopy(model)
    bb.accumulate(model, loss_fn, batch, micro_batch_size=4, collate=padded, weight="tokens")
    bb.accumulate(grouped, loss_fn, batch, micro_batch_size=4, **OPTIONS)

    assert_same_gradients(gradients(grouped), gradients(model), tolerance=1e-5)


def test_weighing_groups_by_samples_is_not_the_big_batch():
    """Control: groups hold very different numbers of tokens, so the weights matter more than ever."""
    torch.manual_seed(0)
    model, batch = Tagger().double(), make_batch()
    expected = big_batch_gradients(model, loss_fn, padded(batch))
    bb.accumulate(model, loss_fn, batch, micro_batch_size=4, **{**OPTIONS, "weight": "samples"})

    assert gradient_error(gradients(model), expected) > 1e-2


def test_a_group_in_which_nothing_counts_is_weighed_0():
    torch.manual_seed(0)
    model, batch = Tagger().double(), make_batch()

    def unlabelled(samples: list[Tensor]) -> dict[str, Tensor]:
        made = padded(samples)
        short = (made["tokens"] != 0).sum(1) < 4
        return {**made, "labels": made["labels"].masked_fill(short.unsqueeze(1), -100)}

    result = bb.accumulate(model, loss_fn, batch, max_tokens=40, **{**OPTIONS, "collate": unlabelled})

    assert_same_gradients(gradients(model), big_batch_gradients(model, loss_fn, unlabelled(batch)))
    assert len(result.micro_batch_sizes) > 3


def test_the_same_seed_gives_the_same_step():
    """With dropout, and with a collate that draws random numbers."""

    def masking(samples: list[Tensor]) -> dict[str, Tensor]:
        made = padded(samples)
        hidden = torch.rand(made["tokens"].shape) < 0.2
        return {**made, "tokens": made["tokens"].masked_fill(hidden, 1)}

    def one(seed: int) -> tuple[bb.StepResult, dict[str, Any]]:
        torch.manual_seed(0)
        model = Tagger(dropout=0.4)
        torch.manual_seed(seed)
        return make_step(model, max_tokens=80, collate=masking)(make_batch()), model.state_dict()

    first, again, other = one(1), one(1), one(2)

    assert first[0].exactness == "same in distribution"
    assert first[0].micro_batch_sizes == again[0].micro_batch_sizes
    assert all(torch.equal(value, again[1][name]) for name, value in first[1].items())
    assert not all(torch.equal(value, other[1][name]) for name, value in first[1].items())


@pytest.mark.parametrize("policy", ["merge", "native", "exact"])
def test_batch_norm_in_train_mode_is_refused(policy):
    step = make_step(Tagger(norm=nn.BatchNorm1d(8)), max_tokens=80, batch_norm=policy)

    with pytest.raises(bb.OptionError, match="mean and variance"):
        step(make_batch())
    assert step.num_steps == 0


def test_a_loss_of_the_whole_batch_is_refused():
    model = Tagger()
    loss = bb.WholeBatchLoss(lambda m, b: m(b["tokens"])[:, 0], lambda outputs, batch: outputs.square().mean())
    step = bb.Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), max_tokens=80, **OPTIONS)

    with pytest.raises(bb.OptionError, match="in the order of the batch"):
        step(make_batch())


@pytest.mark.filterwarnings("ignore:length= groups samples under a bound")
@pytest.mark.parametrize(
    ("option", "match"), [({"dropout": "per-sample"}, "moves samples"), ({"noise_scale": True}, "random parts")]
)
def test_what_depends_on_who_is_in_a_micro_batch_is_refused(option, match):
    with pytest.raises(bb.OptionError, match=match):
        make_step(Tagger(), max_tokens=80, **option)(make_batch())
    make_step(Tagger(), **option)(make_batch())  # at once, nothing is grouped


@pytest.mark.filterwarnings("ignore:length= groups samples under a bound")
def test_batch_norm_with_its_running_statistics_goes():
    torch.manual_seed(0)
    model = Tagger(norm=nn.BatchNorm1d(8)).double()
    evaluated = copy.deepcopy(model).eval()
    bb.accumulate(model, loss_fn, make_batch(), max_tokens=80, batch_norm="frozen", **OPTIONS)

    assert_same_gradients(gradients(model), big_batch_gradients(evaluated, loss_fn, padded(make_batch())))
    # A batch at once is not grouped, so there is nothing to refuse.
    assert bb.accumulate(Tagger(norm=nn.BatchNorm1d(8)), loss_fn, make_batch(), **OPTIONS).padding is None


def test_a_sample_above_max_tokens_moves_nothing():
    model = Tagger()
    before, step = copy.deepcopy(model.state_dict()), make_step(model, max_tokens=39)

    with pytest.raises(bb.LengthError, match="Sample 12 of the batch has length 40"):
        step(make_batch())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_plan_bounds_the_tokens_of_batches_that_are_longer_or_shorter():
    model = Tagger()
    found = bb.plan(model, loss_fn, make_batch(), memory_budget="200KiB", batch_size=24, calibrate=False, **OPTIONS)
    assert 1 < found.micro_batch_size < 24
    assert found.max_tokens == 40 * found.micro_batch_size
    assert bb.Plan.from_json(found.to_json()) == found

    shapes = []

    def seen(model: Any, batch: Any) -> Tensor:
        shapes.append(batch["tokens"].shape)
        return loss_fn(model, batch)

    step = bb.Step(model, seen, torch.optim.SGD(model.parameters(), lr=0.1), plan=found, **OPTIONS)
    for longest in (40, 10, 80):
        shapes.clear()
        step(make_batch(longest=longest))
        assert max(n * length for n, length in shapes) <= max(found.max_tokens, longest)
    assert max(step(make_batch(longest=10)).micro_batch_sizes) > found.micro_batch_size


@pytest.mark.parametrize("budget", ["160KiB", "260KiB"])
def test_a_memory_budget_holds_for_the_groups_of_a_step(budget):
    model = Tagger()
    step = make_step(model, batch_size=24, memory_budget=budget)
    result = step(make_batch())

    assert step.plan is not None
    assert step.plan.max_tokens == 40 * step.plan.micro_batch_size
    assert result.padding is not None
    assert step.measure(make_batch(), step.micro_batch_size) <= step.plan.budget_bytes


def test_verify_compares_the_groups_with_the_whole_batch():
    torch.manual_seed(0)
    model, batch = Tagger(), make_batch()

    assert bb.verify(model, loss_fn, batch, micro_batch_size=4, **OPTIONS).equal
    assert bb.verify(model, loss_fn, batch, micro_batch_size=4, pad_to_multiple_of=8, **OPTIONS).equal
    assert not bb.verify(model, loss_fn, batch, micro_batch_size=4, **{**OPTIONS, "weight": "samples"}).equal


class OutOfMemoryAbove(Tagger):
    """Runs out of memory with more padded tokens than ``limit``."""

    limit = 10**9

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(tokens)


@pytest.mark.parametrize("bound", [{"micro_batch_size": 8}, {"max_tokens": 320}], ids=str)
def test_a_step_that_runs_out_of_memory_is_made_again_with_fewer_tokens(bound):
    torch.manual_seed(0)
    model, batch = OutOfMemoryAbove().double(), make_batch()
    undisturbed = copy.deepcopy(model)
    model.limit = 130
    failing, plain = make_step(model, **bound), make_step(undisturbed, **bound)

    result = failing(batch)
    plain(batch)

    assert result.retries >= 1
    for name, value in undisturbed.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-9, atol=1e-12), name


def test_a_compiled_model_sees_few_lengths_and_is_compiled_a_few_times():
    torch.compiler.reset()
    lengths, graphs = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    def seen(model: Any, batch: Any) -> Tensor:
        lengths.append(batch["tokens"].shape[1])
        return loss_fn(model, batch)

    torch.manual_seed(0)
    model = Tagger().double()
    expected = copy.deepcopy(model)
    model.compile(backend=backend)
    for longest in range(70, 130, 10):
        bb.accumulate(model, seen, make_batch(longest=longest), max_tokens=400, **OPTIONS)
        bb.accumulate(
            expected, loss_fn, make_batch(longest=longest), micro_batch_size=4, collate=padded, weight="tokens"
        )

    assert set(lengths) <= {32, 48, 64, 96, 128}
    assert len(graphs) <= 3
    assert_same_gradients(gradients(model), gradients(expected))
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"length": len}, "length= has no effect without collate="),
        ({"collate": padded, "max_tokens": 8}, "max_tokens= has no effect without length="),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of= has no effect without collate="),
        ({**OPTIONS, "max_tokens": 0}, "max_tokens=0; it is a whole number of at least 1"),
        ({**OPTIONS, "pad_to_multiple_of": 2.5}, "pad_to_multiple_of=2.5"),
        ({**OPTIONS, "length": 4}, "length=4 cannot be called"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, match):
    with pytest.raises(bb.OptionError, match=match):
        bb.StepOptions(**options)


@pytest.mark.parametrize("how", ["step", "accumulate", "loader"])
def test_lengths_without_a_bound_are_warned_of(how):
    model, batch = Tagger(), make_batch()

    def run(**bound: Any) -> None:
        if how == "accumulate":
            bb.accumulate(model, loss_fn, batch, **OPTIONS, **bound)
        elif how == "step":
            step = make_step(model, **bound)
            for _ in range(2):
                step(batch)
        else:
            bb.LogicalBatchLoader(batch, batch_size=4, **OPTIONS, **bound)

    with pytest.warns(bb.BigBatchWarning, match="length= groups samples under a bound, and none was given") as found:
        run()
    assert len(found) == 1
    run(max_tokens=400)  # control: any warning is an error here
