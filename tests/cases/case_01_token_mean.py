"""Variable-length text: the mean of micro-batch means is not the token mean of the whole batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import bigbatch as bb
from tests.cases.common import same, spans
from tests.reference import big_batch_gradients, gradients, slice_batch


def token_mean(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def count_tokens(batch):
    return (batch["labels"] != -100).sum()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
    ids = torch.randint(0, 13, (6, 9))
    labels = ids.roll(-1, 1).clone()
    for row, length in enumerate([9, 1, 2, 8, 3, 5]):
        labels[row, length:] = -100
    return dict(model=model, batch=dict(ids=ids, labels=labels), loss_fn=token_mean, n=6, micro=2)


def reference():
    case = build()
    return big_batch_gradients(case["model"], case["loss_fn"], case["batch"])


def _run(share):
    case = build()
    parts = [slice_batch(case["batch"], *span) for span in spans(case["n"], case["micro"])]
    total = sum(int(count_tokens(part)) for part in parts)
    for part in parts:
        tokens, samples = int(count_tokens(part)), len(part["ids"])
        weight = share(tokens / total, samples / case["n"], 1 / len(parts))
        (case["loss_fn"](case["model"], part) * weight).backward()
    return gradients(case["model"])


def careful():
    return _run(lambda of_tokens, of_samples, of_parts: of_tokens)


def naive():
    return _run(lambda of_tokens, of_samples, of_parts: of_parts)


def naive_sample_ratio():
    return _run(lambda of_tokens, of_samples, of_parts: of_samples)


def ours():
    case = build()
    bb.accumulate(case["model"], case["loss_fn"], case["batch"], micro_batch_size=case["micro"], weight="tokens")
    return gradients(case["model"])


def ours_ratio():
    """The same loss as a numerator and a denominator: nothing has to be known before the forward."""

    def loss_fn(model, batch):
        total = F.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return bb.Ratio(total, count_tokens(batch))

    case = build()
    bb.accumulate(case["model"], loss_fn, case["batch"], micro_batch_size=case["micro"])
    return gradients(case["model"])


def check(result):
    same(result, reference())
