"""Collate functions of the field, and what they are told to pad to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bigbatch as bb
from bigbatch.batch.collating import PLAIN, Room, collated, collation_of, samples_for
from bigbatch.batch.lengths import padding_rule

SAMPLES = [{"input_ids": list(range(1, n + 1)), "labels": [n % 2]} for n in (3, 30, 5, 4, 28, 6)]


def num_tokens(sample: dict[str, Any]) -> int:
    return len(sample["input_ids"])


def padded(samples: list[Tensor], pad_to_multiple_of: int = 1) -> Tensor:
    length = padding_rule(pad_to_multiple_of, few=False)(max(map(len, samples)))
    return torch.stack([torch.nn.functional.pad(sample, (0, length - len(sample))) for sample in samples])


def transformers_collator(pad_to_multiple_of: int | None = None) -> Any:
    """``DataCollatorWithPadding`` of transformers, with a tokenizer that is made here."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]")
    return transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)


def shapes(samples: Any, room: Room = PLAIN, **options: Any) -> list[tuple[int, ...]]:
    found = collation_of(samples, None, bb.StepOptions(**options), room).micro_batches(samples)
    made = [micro_batch if isinstance(micro_batch, Tensor) else micro_batch["input_ids"] for micro_batch, _ in found]
    return [tuple(tensor.shape) for tensor in made]


@pytest.mark.parametrize(
    ("multiple", "expected"), [(None, [(2, 30), (4, 6)]), (8, [(2, 32), (4, 8)]), (32, [(2, 32), (2, 32), (2, 32)])]
)
def test_a_collator_of_transformers_is_told_what_to_pad_to(multiple, expected):
    collator = transformers_collator()
    found = shapes(SAMPLES, collate=collator, length=num_tokens, max_tokens=64, pad_to_multiple_of=multiple)

    assert found == expected
    assert collator.pad_to_multiple_of is None, "The user's own is left as it was."


def test_what_a_collator_of_transformers_makes_is_all_there():
    options = bb.StepOptions(collate=transformers_collator(), length=num_tokens, max_tokens=64)

    (long, _), (short, _) = collation_of(SAMPLES, None, options, PLAIN).micro_batches(SAMPLES)

    assert long["input_ids"].tolist()[1][:28] == SAMPLES[4]["input_ids"]
    assert short["attention_mask"].sum(1).tolist() == [3, 5, 4, 6]
    assert short["labels"].flatten().tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("collate", [padded, lambda samples, pad_to_multiple_of=1: padded(samples, pad_to_multiple_of)])
def test_a_function_is_told_by_its_parameter(collate):
    samples = [torch.ones(n) for n in (3, 17, 18, 4)]

    assert shapes(samples, collate=collate, length=len, max_tokens=48, pad_to_multiple_of=8) == [(2, 24), (2, 8)]
    # In the order in which they came, padding goes to a multiple as well.
    assert shapes(samples, collate=collate, pad_to_multiple_of=8) == [(4, 24)]


def test_a_collate_that_cannot_be_told_is_refused():
    with pytest.raises(bb.OptionError, match="Write def collate\\(samples, pad_to_multiple_of=1\\)"):
        shapes([torch.ones(2)], collate=torch.stack, pad_to_multiple_of=8)


def test_for_a_compiled_model_lengths_become_few():
    samples = [torch.ones(n) for n in (33, 34, 47, 40, 20, 7)]
    room = Room(few_lengths=True)

    assert shapes(samples, room, collate=padded, length=len, max_tokens=192) == [(4, 48), (2, 32)]


def test_for_a_compiled_model_a_collate_that_cannot_be_told_is_warned_about():
    samples, room = [torch.ones(3), torch.ones(9)], Room(few_lengths=True)

    with pytest.warns(bb.BigBatchWarning, match="many lengths"):
        found = shapes(samples, room, collate=lambda chosen: padded(chosen), length=len, max_tokens=9)

    assert found == [(1, 9), (1, 3)]


def test_the_padded_length_is_held_against_max_tokens():
    with pytest.raises(bb.LengthError, match="Sample 1 .* has length 17, padded to 24 by pad_to_multiple_of=8, but"):
        shapes([torch.ones(3), torch.ones(17)], collate=padded, length=len, max_tokens=23, pad_to_multiple_of=8)


def test_plans_are_made_with_the_longest_sample():
    samples = [torch.ones(n) for n in (3, 9, 4)]

    assert [len(s) for s in samples_for(samples, 5, bb.StepOptions(collate=padded, length=len))] == [9] * 5
    assert [len(s) for s in samples_for(samples, 5, bb.StepOptions(collate=padded))] == [3, 9, 4, 3, 9]
    assert collated(samples, bb.StepOptions(collate=padded, pad_to_multiple_of=8)).shape == (3, 16)
