"""A plan in the words of other libraries: taken by the real ones, over the same samples, and nothing unsaid."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
import torch

import bigbatch as bb

PEERS = ["transformers", "lightning", "accelerate", "deepspeed", "torchtune"]
COUNTING_TOKENS = {"transformers", "torchtune"}
PLAN = bb.Plan(micro_batch_size=8, accumulation_steps=4)
RECOMPUTING = bb.Plan(micro_batch_size=8, accumulation_steps=4, recompute=("blocks.0", ("blocks.1", "blocks.2")))


def quiet(plan: bb.Plan, peer: str, **keywords: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bb.BigBatchWarning)
        return plan.to(peer, **keywords)


def lost(plan: bb.Plan, peer: str, **keywords: Any) -> str:
    with pytest.warns(bb.BigBatchWarning, match=f"{peer} has no words for a part of this plan: ") as caught:
        plan.to(peer, **keywords)
    assert len(caught) == 1
    return str(caught[0].message)


def size_and_steps(peer: str, words: dict[str, Any]) -> tuple[int, int]:
    """Samples in a micro-batch and micro-batches in a step, read from the words as their library does."""
    if peer == "transformers":
        return words["per_device_train_batch_size"], words["gradient_accumulation_steps"]
    if peer == "lightning":
        return words["DataLoader"]["batch_size"], words["Trainer"]["accumulate_grad_batches"]
    if peer == "accelerate":
        return words["DataLoader"]["batch_size"], words["Accelerator"]["gradient_accumulation_steps"]
    if peer == "deepspeed":
        return words["train_micro_batch_size_per_gpu"], words["gradient_accumulation_steps"]
    return words["batch_size"], words["gradient_accumulation_steps"]


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [4, 64, 100, 124, 148])
def test_a_step_is_over_the_same_samples_and_no_micro_batch_is_larger(peer, world_size, batch_size):
    size, steps = size_and_steps(peer, quiet(PLAN, peer, world_size=world_size, batch_size=batch_size))

    assert size * steps * world_size == batch_size
    assert size <= PLAN.micro_batch_size


def test_rounding_the_steps_up_would_be_another_batch():
    """Control: what people do by hand, ``ceil(batch / micro)`` steps of the same size, is over 4 % more samples."""
    size, steps = PLAN.micro_batch_size, -(-100 // PLAN.micro_batch_size)

    assert size * steps == 104 != 100


@pytest.mark.parametrize("peer", PEERS)
def test_without_a_batch_size_it_is_that_of_the_plan(peer):
    assert size_and_steps(peer, quiet(PLAN, peer)) == (8, 4)
    assert size_and_steps(peer, quiet(PLAN, peer, world_size=2)) == (8, 4)


@pytest.mark.parametrize("peer", PEERS)
def test_words_are_plain_values(peer):
    words = quiet(RECOMPUTING, peer, batch_size=64, world_size=2)

    assert json.loads(json.dumps(words)) == words


def test_the_words_of_each_library():
    assert quiet(RECOMPUTING, "transformers") == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    assert quiet(PLAN, "transformers") == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    assert quiet(RECOMPUTING, "torchtune") == {
        "batch_size": 8,
        "gradient_accumulation_steps": 4,
        "enable_activation_checkpointing": True,
    }
    assert quiet(RECOMPUTING, "lightning") == {
        "Trainer": {"accumulate_grad_batches": 4},
        "DataLoader": {"batch_size": 8},
    }


def test_deepspeed_gets_a_batch_that_its_check_lets_pass():
    """DeepSpeed stops unless the batch is micro-batch x steps x ranks."""
    plan = bb.Plan(micro_batch_size=8, accumulation_steps=4, recompute=("a",), accumulation_dtype="float32")
    words = quiet(plan, "deepspeed", world_size=2)

    assert words == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


# 5.24 deprecates the name; 4.57, the oldest that we work with, has no other.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_transformers_takes_the_words(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # which TrainingArguments needs for torch
    words = quiet(RECOMPUTING, "transformers", batch_size=24)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **words)

    assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 24
    assert arguments.gradient_checkpointing is True
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_accelerate_steps_once_per_batch():
    accelerate = pytest.importorskip("accelerate")
    words = quiet(PLAN, "accelerate", batch_size=20)
    accelerator = accelerate.Accelerator(cpu=True, **words["Accelerator"])
    model, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.ones(60, 2))
    model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(data, **words["DataLoader"]))
    samples, seen = [], 0
    for (x,) in loader:
        with accelerator.accumulate(model):
            seen += len(x)
            if accelerator.sync_gradients:
                samples, seen = [*samples, seen], 0

    assert samples == [20, 20, 20]


def test_lightning_takes_the_words():
    lightning = pytest.importorskip("lightning")
    words = quiet(PLAN, "lightning", batch_size=20)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **words["Trainer"]
    )

    assert trainer.accumulate_grad_batches * words["DataLoader"]["batch_size"] == 20


@pytest.mark.parametrize("peer", sorted(COUNTING_TOKENS))
def test_a_plan_that_can_be_said_in_full_is_said_without_a_warning(peer):
    """Control: the warnings below are for what is lost, not for every plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PLAN.to(peer, batch_size=64)


@pytest.mark.parametrize("peer", PEERS)
def test_the_modules_that_a_library_cannot_be_told_are_named(peer):
    message = lost(RECOMPUTING, peer)

    assert "which modules are recomputed, ['blocks.0', 'blocks.1 + blocks.2']" in message
    assert "bb.apply(plan, model)" in message


@pytest.mark.parametrize("peer", ["transformers", "deepspeed", "torchtune"])
def test_groups_that_become_single_layers_may_need_more(peer):
    plan = bb.Plan(micro_batch_size=8, accumulation_steps=4, recompute=(("a", "b"),), peak_bytes=3 * 2**30)

    assert "may need more than the planned peak of 3.00 GiB" in lost(plan, peer)
    assert "groups" not in lost(bb.Plan(8, 4, recompute=("a",), peak_bytes=3 * 2**30), peer)


def test_an_uneven_cut_is_said_with_what_it_became():
    message = lost(PLAN, "transformers", batch_size=20)

    assert "micro-batches of different sizes: 20 samples in 3 of at most 8 became 4 of 5" in message


@pytest.mark.parametrize("peer", ["lightning", "accelerate", "deepspeed"])
def test_means_of_means_are_said_where_a_library_takes_them(peer):
    assert "which for a loss over tokens is another loss" in lost(PLAN, peer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.Plan(8, 1).to(peer)


@pytest.mark.parametrize("peer", ["transformers", "lightning", "accelerate", "torchtune"])
def test_a_dtype_to_add_up_in_is_lost_by_name(peer):
    assert "accumulation_dtype='float32'" in lost(bb.Plan(8, 4, accumulation_dtype="float32"), peer)


FINE = bb.Plan(8, 4, recompute=("a", "b"), keep=(("a", "attention"),), offload=("b",))


@pytest.mark.parametrize(
    ("peer", "offload"),
    [
        ("transformers", {}),
        ("deepspeed", {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True}}),
        ("torchtune", {"enable_activation_offloading": True}),
    ],
)
def test_what_is_kept_and_what_lies_in_host_memory_is_said_as_far_as_there_are_words(peer, offload):
    words, message = quiet(FINE, peer), lost(FINE, peer)

    assert {name: words[name] for name in offload} == offload
    assert words == quiet(bb.Plan(8, 4, recompute=("a", "b")), peer) | offload
    assert "what is kept of recomputed modules, ['attention of a']: it runs again" in message
    assert "which inputs lie in host memory, ['b']: " in message
    assert ("they stay on the card" in message) == (not offload)


@pytest.mark.parametrize(
    ("plan", "peer", "keywords", "message"),
    [
        (PLAN, "keras", {}, "There are no words for 'keras'. The libraries are transformers, lightning, accelerate, "),
        (bb.Plan(8), "transformers", {}, "does not say accumulation_steps, so give batch_size="),
        (PLAN, "deepspeed", {"batch_size": 30, "world_size": 4}, r"leaves 2 over; .*Take 28, or another number"),
        (PLAN, "deepspeed", {"batch_size": 3, "world_size": 4}, r"leaves 3 over; .*Take 4, or another number"),
        (PLAN, "accelerate", {"world_size": 0}, "world_size=0; it is a whole number of at least 1"),
        (PLAN, "accelerate", {"batch_size": 8.0}, "batch_size=8.0; it is a whole number of at least 1"),
    ],
)
def test_what_cannot_be_said_at_all_is_an_error(plan, peer, keywords, message):
    with pytest.raises(bb.OptionError, match=message):
        plan.to(peer, **keywords)


def test_the_warning_points_at_the_line_that_asked():
    with pytest.warns(bb.BigBatchWarning, match=re.escape("(1) which modules")) as caught:
        bb.Plan(8, 1, recompute=("a",)).to("transformers")

    assert caught[0].filename == __file__
