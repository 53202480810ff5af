"""A step without numbers needs, to the byte, what the real one is measured to need."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bigbatch as bb
from bigbatch.errors import BigBatchWarning
from bigbatch.stepping.fitting.planner import Planner
from tests.stepping.plannable import WORLDS, World, averaged, cnn, features, images, mlp, sgd


def groups_of(planner: Planner) -> tuple[str | tuple[str, ...], ...]:
    """All blocks, neighbours as one."""
    groups: list[list[str]] = []
    for slot in planner.traced.slots:
        if slot.may_recompute and slot.follows and groups:
            groups[-1].append(slot.name or "")
        elif slot.may_recompute:
            groups.append([slot.name or ""])
    return tuple(tuple(group) if len(group) > 1 else group[0] for group in groups)


def choices_of(planner: Planner) -> dict[str, Any]:
    every = tuple(dict.fromkeys(slot.name for slot in planner.traced.slots if slot.may_recompute))
    return {"none": (), "all": every, "every second": every[::2], "groups": groups_of(planner)}


def peaks(planner: Planner, batch: Any, size: int, recompute: Any) -> tuple[int, int]:
    """Traced, and measured with real tensors."""
    plan = bb.Plan(micro_batch_size=size, recompute=recompute)
    with bb.apply(plan, planner.step.model):
        measured = planner.step.measure(batch, size)
    return planner.peak_bytes(plan, planner.num_samples), measured


@pytest.mark.parametrize("kind", list(WORLDS))
def test_the_traced_peak_is_the_measured_one_to_the_byte(kind):
    """10 samples in 1, 2 or 5 micro-batches or an uneven cut, each with another choice of blocks: two for a kind."""
    step, batch = WORLDS[kind].make()
    planner = Planner(step, batch)
    choices = choices_of(planner)

    cuts = [(10, "none"), (4, "groups"), (5, "all"), (2, "every second")]
    first = list(WORLDS).index(kind) % 4

    for size, which in (cuts[first], cuts[(first + 2) % 4]):
        traced, measured = peaks(planner, batch, size, choices[which])
        assert traced == measured, (size, which)


def test_what_is_recomputed_and_how_it_is_cut_change_the_peak():
    """Control: the equality above is not that of a constant."""
    step, batch = WORLDS["transformer, no undo"].make()
    planner = Planner(step, batch)
    every = choices_of(planner)["all"]

    found = {peaks(planner, batch, size, choice)[0] for size in (2, 5, 10) for choice in ((), every, every[:1])}

    assert len(found) >= 6
    assert max(found) > 1.5 * min(found)


def test_statistics_of_batch_norm_in_fp16_are_all_that_is_off():
    """torch's fake of it saves mean and deviation in 16 bits, and its CPU kernel in 32: 4 bytes a channel."""
    step, batch = World(cnn, sgd, make_batch=images, options=dict(precision="fp16")).make()
    planner = Planner(step, batch)
    num_channels = sum(m.num_features for m in step.model.modules() if isinstance(m, nn.BatchNorm2d))

    traced, measured = peaks(planner, batch, 10, ())

    assert 0 <= measured - traced <= 4 * num_channels


# Models of other kinds


class Called3Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class NestedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = [[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)] for _ in range(2)]
        self.stages: Any = nn.ModuleList(nn.ModuleList(row) for row in rows)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x)


class UNet(nn.Module):
    """With skip connections across its middle."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8), (8, 8), (8, 8), (16, 8), (16, 8)
        convolutions = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in widths]
        self.down, self.up = nn.ModuleList(convolutions[:3]), nn.ModuleList(convolutions[3:])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2)
        for up, skip in zip(self.up, reversed(skips), strict=False):
            x = F.interpolate(up(torch.cat([x, skip], 1)), scale_factor=2)
        return self.head(x.mean((2, 3)))


class Checkpointed(nn.Module):
    """By its author."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(mlp()[1] for _ in range(3))
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def parametrized() -> nn.Module:
    from torch.nn.utils import parametrizations

    layers = parametrizations.weight_norm(nn.Linear(16, 32)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(32, 16))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 5))


def leaves() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 5))


def compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    return model


def hooked() -> nn.Module:
    model, seen = mlp(), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model[2].register_full_backward_hook(lambda module, inputs, outputs: None)
    model[0].register_forward_pre_hook(lambda module, args: None)
    return model


class OfTransformers(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        import transformers

        sizes: dict[str, Any] = dict(vocab_size=30, bos_token_id=0, eos_token_id=0, use_cache=False)
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **sizes)
            self.inner: Any = transformers.GPT2LMHeadModel(config)
        else:
            more: dict[str, Any] = dict(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
            )
            self.inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more, pad_token_id=0))
        # The newer name of the two, where there is one.
        name = "activation_checkpointing_enable"
        getattr(self.inner, name, self.inner.gradient_checkpointing_enable)()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids).logits


_TEACHER = mlp().requires_grad_(False)
_CLASS_WEIGHTS = torch.ones(5)


def like_a_teacher(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        wanted = _TEACHER(batch[0])
    return F.huber_loss(model(batch[0]), wanted)


def class_weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=_CLASS_WEIGHTS)


class ItsOwn(torch.optim.AdamW):
    """An optimizer with attributes of its own."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, lr=0.1)
        self.history = {"steps": [1, 2]}
        self.scratch = torch.zeros(100)


ODD: dict[str, World] = {
    "a module called three times": World(Called3Times, make_batch=features),
    "lists in lists": World(NestedLists, make_batch=features),
    "skips": World(UNet, make_batch=images),
    "checkpointed": World(lambda: Checkpointed(False), make_batch=features),
    "checkpointed, reentrant": World(lambda: Checkpointed(True), make_batch=features),
    "parametrized": World(parametrized, make_batch=features),
    "leaves": World(leaves, make_batch=features),
    "compiled": World(lambda: torch.compile(mlp(), backend="eager"), make_batch=features),  # type: ignore[arg-type]
    "compiled in place": World(compiled_in_place, make_batch=features),
    "hooked": World(hooked, make_batch=features),
    "gpt2 of transformers": World(lambda: OfTransformers("gpt2")),
    "llama of transformers": World(lambda: OfTransformers("llama")),
    "a teacher": World(mlp, loss_fn=like_a_teacher, make_batch=features),
    "class weights": World(mlp, loss_fn=class_weighted, make_batch=features),
    "an optimizer of one's own": World(mlp, lambda model: ItsOwn(model.parameters()), make_batch=features),
}


@pytest.mark.parametrize("kind", list(ODD))
def test_odd_models_are_followed_to_the_byte(kind):
    step, batch = ODD[kind].make()
    planner = Planner(step, batch)
    every = choices_of(planner)["all"]

    with warnings.catch_warnings():
        # Checkpointing of the model's own is put off while a plan is on, and apply says so.
        warnings.simplefilter("ignore", BigBatchWarning)
        for size, recompute in [(10, ()), (4, ()), (5, every)]:
            traced, measured = peaks(planner, batch, size, recompute)
            assert traced == measured, (size, recompute)


def test_an_average_is_traced_as_it_takes_in_weights_and_not_as_it_copies_them_first():
    """With an average in its own function, which makes what a copy does not."""
    step, batch = World(mlp, sgd, make_batch=features, options=averaged).make()
    planner = Planner(step, batch)

    traced, measured = peaks(planner, batch, 10, ())

    assert traced == measured


def test_an_optimizer_that_begins_in_another_way_is_traced_as_it_goes_on():
    """RAdam does without its second moment for five steps, and needs less then."""
    step, batch = World(mlp, lambda model: torch.optim.RAdam(model.parameters()), make_batch=features).make()
    planner = Planner(step, batch)

    early, _ = peaks(planner, batch, 5, ())
    for _ in range(8):
        step(batch)
    late, measured = peaks(planner, batch, 5, ())

    assert early == late == measured


def test_a_loss_that_runs_another_model_leaves_no_gradient_there():
    """It is a mistake, but not one that a look at memory may make worse: no tensor without numbers stays anywhere."""
    model = mlp()
    step = bb.Step(model, lambda _, batch: F.cross_entropy(model(batch[0]), batch[1]), sgd(model))

    with pytest.raises(bb.TraceError, match="GradientError"):
        _ = Planner(step, features(10)).traced

    assert all(p.grad is None for p in model.parameters())


def test_what_a_plan_offloads_is_not_on_the_card():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)])
    step = bb.Step(model, lambda m, b: m(b).square().mean(), sgd(model))
    names = tuple(str(index) for index in range(8))
    kept, offloaded = (bb.Plan(micro_batch_size=4096, recompute=names, offload=offload) for offload in ((), names))

    planner = Planner(step, torch.randn(4, 64), device="cuda")
    spared = planner.peak_bytes(kept, 8192) - planner.peak_bytes(offloaded, 8192)

    # At the peak, all inputs of blocks but two are in host memory (the first is the batch, and needs no gradient).
    assert spared == 5 * 4096 * 64 * 4
