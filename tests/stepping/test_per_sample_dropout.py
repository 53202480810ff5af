"""Dropout by sample: any cut has the masks of the big batch, and so has what is run again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as imported_by_name
from torch.utils.checkpoint import checkpoint

import bigbatch as bb
from tests.reference import assert_same_gradients, gradient_error, gradients
from tests.stepping.test_philox import plain

NUM_SAMPLES = 13
CUTS = [13, 7, 4, 1]  # 13, 7 + 6, 4 + 3 + 3 + 3, and ones


def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 2)

    def forward(self, x):
        x = imported_by_name(self.first(x), 0.3, self.training)
        x = torch.dropout(F.alpha_dropout(x, 0.2, training=True), 0.2, True)
        return self.second(F.dropout(2 * x, 0.4, training=True, inplace=True))


class Channels(nn.Module):
    """Whole channels are dropped, and a whole path of some samples, as in stochastic depth."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 8, 1), nn.Dropout2d(0.4), nn.FeatureAlphaDropout(0.2))
        self.line, self.cube = nn.Dropout1d(0.3), nn.Dropout3d(0.3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.conv(x[..., None, None].expand(-1, -1, 3, 2).contiguous(memory_format=torch.channels_last))
        x = self.cube(self.line(x.flatten(2))[..., None, None]).mean((2, 3, 4))
        path = x.new_empty(len(x), 1).bernoulli_(0.7)
        return self.head(x * path)


class Tokens(nn.Module):
    """Attention with weights and without, in layers of torch and by hand; and tokens that are flattened."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.encoder(self.embed(x[..., None]))
        x = x + self.attention(x, x, x, need_weights=True)[0] + self.attention(x, x, x, need_weights=False)[0]
        q = x.view(len(x), 6, 2, 4).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).reshape(x.shape)
        flat = self.dropout(x.flatten(0, 1))
        return self.head(flat.view(x.shape).mean(1))


def layers():
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.Dropout(0.5),
        nn.SELU(),
        nn.AlphaDropout(0.2),
        nn.Dropout(0.3, inplace=True),
        nn.Linear(12, 2),
    )


MODELS = {"layers": layers, "functional": Functional, "channels": Channels, "tokens": Tokens}


def world(name="layers"):
    torch.manual_seed(11)
    batch = torch.randn(NUM_SAMPLES, 6).double(), torch.randn(NUM_SAMPLES, 2).double()
    return MODELS[name]().double(), batch


def accumulated(model, batch, micro_batch_size, *, loss_fn=squared, dropout="per-sample", **options):
    """A gradient from the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(5)
    result = bb.accumulate(model, loss_fn, batch, micro_batch_size=micro_batch_size, dropout=dropout, **options)
    return gradients(model), result


@pytest.mark.parametrize("name", MODELS)
def test_any_cut_is_the_big_batch(name):
    model, batch = world(name)
    whole, one = accumulated(model, batch, None)

    for size in CUTS[1:]:
        found, result = accumulated(model, batch, size)
        assert_same_gradients(found, whole, tolerance=1e-12)
        assert float(result.loss) == pytest.approx(float(one.loss), rel=1e-12)
        assert result.exactness == "exact"
    # Control: torch's own masks, with the same seed.
    found, result = accumulated(model, batch, 4, dropout="native")
    assert gradient_error(found, accumulated(model, batch, None, dropout="native")[0]) > 1e-2
    assert result.exactness == "same in distribution"


def test_the_big_batch_is_that_of_the_masks_written_out():
    """Independent: the masks from the definition in whole numbers, and the model by hand."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 2), nn.Dropout(0.6)).double()
    batch = torch.randn(7, 6).double(), torch.randn(7, 2).double()
    torch.manual_seed(77)
    step = bb.Step(
        model, squared, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=3, dropout="per-sample"
    )
    step(batch)  # the second step is looked at

    def mask(call, width, p):
        words = [[w for j in range(2) for w in plain((j, sample, call, 1), (77, 0))][:width] for sample in range(7)]
        return (torch.tensor(words) < round((1 - p) * 2**32)).double() / (1 - p)

    private = copy.deepcopy(model)
    hidden = private[0](batch[0]) * mask(0, 5, 0.3)
    (private[2](hidden) * mask(1, 2, 0.6) - batch[1]).square().mean().backward()
    seen = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: seen.update({name: seen.get(name, 0) + gradient}))
    step(batch)

    assert_same_gradients(seen, gradients(private), tolerance=1e-12)


def test_the_masks_of_two_steps_and_of_two_seeds_are_not_the_same():
    model, batch = world()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        step = bb.Step(model, squared, torch.optim.SGD(model.parameters(), lr=0.0), dropout="per-sample")
        losses.append([float(step(batch).loss) for _ in range(3)])

    assert losses[0] == losses[1]
    assert len({*losses[0], *losses[2]}) == 6


def test_accumulate_has_other_masks_each_time():
    model, batch = world()
    losses = [float(bb.accumulate(model, squared, batch, dropout="per-sample").loss) for _ in range(3)]

    assert len(set(losses)) == 3


def test_a_step_draws_no_random_numbers_and_leaves_the_generator():
    model, batch = world()
    step = bb.Step(
        model, squared, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4, dropout="per-sample"
    )
    torch.manual_seed(123)
    before = torch.get_rng_state()

    step(batch)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 123


def test_a_run_that_goes_on_has_the_masks_it_would_have_had():
    model, batch = world()

    def new_step(**options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return bb.Step(model, squared, optimizer, micro_batch_size=4, on_non_finite="skip", **options)

    step = new_step(dropout="per-sample")
    nan = (batch[0] * torch.nan, batch[1])
    assert step(nan).skipped
    step(batch)
    state = step.state_dict()
    torch.manual_seed(99)
    other = new_step(dropout="per-sample")
    other.load_state_dict(state)

    assert float(step(batch).loss) == float(other(batch).loss)
    with pytest.raises(bb.OptionError, match="dropout_seed"):
        new_step().load_state_dict(state)


def recomputed(kind, model):
    """The model with its middle recomputed in one of the ways there are."""
    if kind == "apply":
        bb.apply(bb.Plan(micro_batch_size=4, recompute=(("1", "2", "3"),)), model)
        return model

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            x = model[0](x)
            reentrant = kind == "reentrant"
            x = checkpoint(lambda x: model[4](model[3](model[2](model[1](x)))), x, use_reentrant=reentrant)
            return model[5](x)

    return Recomputed()


@pytest.mark.parametrize("kind", ["apply", "non-reentrant", "reentrant"])
def test_what_is_recomputed_has_the_same_masks(kind):
    model, batch = world()
    whole, _ = accumulated(model, batch, None)

    accumulated(recomputed(kind, model), batch, 4)

    assert_same_gradients(gradients(model), whole, tolerance=1e-12)


def test_recompute_that_does_not_put_random_numbers_back_is_an_error():
    model, batch = world()

    def loss_fn(_, batch):
        x = checkpoint(lambda x: model[1](model[0](x)), batch[0], use_reentrant=False, preserve_rng_state=False)
        return (model[5](x) - batch[1]).square().mean()

    with pytest.raises(bb.LossError, match="preserve_rng_state=False"):
        accumulated(model, batch, 4, loss_fn=loss_fn)


@pytest.mark.parametrize("fits", [5, 1])
def test_a_step_that_is_made_again_in_smaller_micro_batches_keeps_its_masks(fits):
    def short_of_memory(model, batch):
        if len(batch[0]) > fits:
            raise torch.OutOfMemoryError("out of memory")
        return squared(model, batch)

    after, sizes = [], []
    for loss_fn, size in ((short_of_memory, 13), (squared, None)):
        model, batch = world()
        torch.manual_seed(3)
        step = bb.Step(
            model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size, dropout="per-sample"
        )
        results = [step(batch) for _ in range(2)]
        after.append({name: p.detach() for name, p in model.named_parameters()})
        sizes.append(results[-1].micro_batch_sizes)

    assert max(sizes[0]) <= fits
    assert sizes[1] == (13,)
    assert_same_gradients(after[0], after[1], tolerance=1e-12)


def test_other_random_numbers_are_told():
    model, batch = world()

    def noisy(model, batch):
        return squared(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))

    assert accumulated(model, batch, 4, loss_fn=noisy)[1].exactness == "same in distribution"


def test_masks_on_a_card_are_made_by_another_operation_with_the_same_result():
    """``native_dropout`` is what torch uses there; it can be called here too."""
    model, batch = world()

    def fused(model, batch):
        hidden = torch.native_dropout(model[0](batch[0]), 0.5, True)[0]
        return (model[5](hidden) - batch[1]).square().mean()

    def plain_dropout(model, batch):
        return (model[5](F.dropout(model[0](batch[0]), 0.5)) - batch[1]).square().mean()

    expected = accumulated(model, batch, None, loss_fn=plain_dropout)[0]
    assert_same_gradients(accumulated(model, batch, 4, loss_fn=fused)[0], expected, tolerance=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_it_goes_with_autocast(precision):
    model, batch = world("tokens")
    model, batch = model.float(), tuple(part.float() for part in batch)
    whole, _ = accumulated(model, batch, None, precision=precision)

    found, result = accumulated(model, batch, 4, precision=precision)

    assert gradient_error(found, whole) < (5e-2 if precision == "bf16" else 1e-4)
    assert result.exactness == "exact"


def test_transformers_models_are_the_big_batch():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=12, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2
    )
    model = transformers.GPT2LMHeadModel(config).double().train()
    ids = torch.randint(0, 30, (NUM_SAMPLES, 9))

    def loss_fn(model, batch):
        return model(input_ids=batch["labels"], labels=batch["labels"]).loss

    whole, _ = accumulated(model, dict(labels=ids), None, loss_fn=loss_fn, weight="next_tokens")
    for kind in ("plain", "recomputed"):
        if kind == "recomputed":
            model.activation_checkpointing_enable()
        found, result = accumulated(model, dict(labels=ids), 4, loss_fn=loss_fn, weight="next_tokens")
        assert_same_gradients(found, whole, tolerance=1e-12)
        assert result.exactness == "exact"


class Wrong(nn.Module):
    """Has something in it that cannot be keyed."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call, self.head = inner, call, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.call(self.inner, x))


def time_first(inner, x):
    return inner(x[None].expand(8, -1, -1)).mean(0)


def of_all(inner, x):
    return x * inner(x.new_ones(6))


def seeded(inner, x):
    torch.manual_seed(0)
    return inner(x)


def fused(inner, x):
    q = x.view(-1, 1, 2, 3)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.1)[0].reshape(x.shape)


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (
            Wrong(nn.LSTM(6, 6, 2, dropout=0.1, batch_first=True), lambda m, x: m(x)[0]),
            bb.OptionError,
            r"'inner' \(LSTM",
        ),
        (
            Wrong(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1), time_first),
            bb.OptionError,
            r"'inner' \(TransformerEncoderLayer\).*batch_first=True",
        ),
        (Wrong(nn.Dropout(0.1), time_first), bb.LossError, r"'inner' \(Dropout\).*shape \(8, 4, 6\).*4 samples"),
        (Wrong(nn.Dropout(0.1), of_all), bb.LossError, r"'inner' \(Dropout\).*shape \(6,\)"),
        (Wrong(nn.Dropout(0.1), seeded), bb.LossError, "manual_seed"),
        (Wrong(nn.Identity(), fused), bb.OptionError, r"fused attention.*'the model' \(Wrong\).*MATH"),
    ],
    ids=["lstm", "time-first layer", "time-first tensor", "one mask for all", "seeded", "fused attention"],
)
def test_what_cannot_be_keyed_is_refused_by_name_and_nothing_moved(model: Any, error, said):
    model = model.double()
    batch = torch.randn(8, 6).double(), torch.randn(8, 2).double()
    before = torch.get_rng_state()

    with pytest.raises(error, match=said):
        bb.accumulate(model, squared, batch, micro_batch_size=4, dropout="per-sample")

    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    model.eval()  # then nothing is dropped, and nothing is refused
    if error is bb.OptionError and "LSTM" in said:
        bb.accumulate(model, squared, batch, micro_batch_size=4, dropout="per-sample")


def test_a_compiled_model_is_refused():
    model: Any = torch.compile(layers())
    with pytest.raises(bb.OptionError, match="compiled code"):
        bb.Step(model, squared, torch.optim.SGD(model.parameters(), lr=0.1), dropout="per-sample")


def test_micro_batches_of_unknown_sizes_are_refused():
    model, batch = world()

    class Opaque:
        def __init__(self, *data):
            self.data = data

    def loss_fn(model, part):
        return squared(model, part.data)

    parts = [Opaque(x, y) for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True)]
    with pytest.raises(bb.BatchError, match="how many samples"):
        bb.accumulate(
            model, loss_fn, bb.LogicalBatch(parts), dropout="per-sample", weight=lambda part: len(part.data[0])
        )


def test_an_unknown_policy_is_refused():
    with pytest.raises(bb.OptionError, match="per-sample"):
        bb.StepOptions(dropout="sample")  # pyright: ignore[reportArgumentType]
