r"""Contrastive losses of a whole batch whose N x N similarities are never there at once.

They are computed in chunks of rows against all columns, and each chunk again in backward, so the memory is
O(chunk x N). The numbers are those of the plain formulas. In the loss of a ``WholeBatchLoss`` over several ranks, each
rank computes its part of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bigbatch.errors import LossError
from bigbatch.stepping.coupled.sharing import summed
from bigbatch.stepping.precision import at_least_float32
from bigbatch.values import check_positive

_CHUNK = 256

Scale = torch.Tensor | float


def info_nce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale: Scale = 20.0,
    symmetric: bool = True,
    normalize: bool = True,
    chunk_size: int = _CHUNK,
) -> torch.Tensor:
    r"""InfoNCE: row $i$ of ``a`` finds row $i$ of ``b`` among all rows of ``b``, and the other way round (CLIP).

    $$ -\frac{1}{N} \sum_i \log \frac{\exp(s\, \hat a_i \cdot \hat b_i)}{\sum_j \exp(s\, \hat a_i \cdot \hat b_j)},
       \qquad \hat a_i = a_i / \lVert a_i \rVert, $$

    with $s = 20$ and rows of length 1 unless told otherwise, and the mean of both directions when symmetric (van den
    Oord et al., 2018, https://arxiv.org/abs/1807.03748; Radford et al., 2021, https://arxiv.org/abs/2103.00020).

    >>> a, b = torch.randn(7, 3), torch.randn(7, 3)
    >>> logits = 20 * F.normalize(a) @ F.normalize(b).T
    >>> plain = (F.cross_entropy(logits, torch.arange(7)) + F.cross_entropy(logits.T, torch.arange(7))) / 2
    >>> bool(torch.isclose(info_nce(a, b, chunk_size=2), plain))
    True

    Args:
        a: Shape ``(N, D)``.
        b: Shape ``(N, D)``; when it is not symmetric it may have more rows, which are negatives of all.
        scale: What similarities are multiplied by, 1 / temperature; a tensor may need a gradient, such as CLIP's
            ``logit_scale.exp()``.
        symmetric: Whether ``b`` finds ``a`` too.
        normalize: Whether rows are divided by their lengths first, so that their products are cosines.
        chunk_size: Rows at a time.

    Returns:
        The loss, shape ``()``.

    Raises:
        LossError: The shapes do not go together.
    """
    _check_rows(a, b, same_number=symmetric, may_have_more=True)
    a, b = _ready(a, normalize), _ready(b, normalize)
    loss = _nce(a, b, scale, chunk_size)
    return (loss + _nce(b, a, scale, chunk_size)) / 2 if symmetric else loss


def siglip(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale: Scale = 10.0,
    bias: Scale = -10.0,
    normalize: bool = True,
    chunk_size: int = _CHUNK,
) -> torch.Tensor:
    r"""SigLIP: each pair of rows is told to be one or not, by itself.

    $$ -\frac{1}{N} \sum_{i,j} \log \sigma\bigl(z_{ij} (s\, \hat a_i \cdot \hat b_j + c)\bigr),
       \qquad z_{ii} = 1,\ z_{ij} = -1,\ \hat a_i = a_i / \lVert a_i \rVert, $$

    with $s = 10$, $c = -10$ and rows of length 1 unless told otherwise (Zhai et al., 2023, https://arxiv.org/abs/2303.15343).

    Args:
        a: Shape ``(N, D)``.
        b: Shape ``(N, D)``.
        scale: What similarities are multiplied by; a tensor may need a gradient.
        bias: What is added to them; a tensor may need a gradient.
        normalize: Whether rows are divided by their lengths first, so that their products are cosines.
        chunk_size: Rows at a time.

    Returns:
        The loss, shape ``()``.

    Raises:
        LossError: The shapes do not go together.
    """
    _check_rows(a, b, same_number=True)
    a, b = _ready(a, normalize), _ready(b, normalize)

    def chunk(rows: torch.Tensor, columns: torch.Tensor, start: int, scale: Scale, bias: Scale) -> torch.Tensor:
        logits = _similarities(rows, columns) * scale + bias
        signs = _diagonal(len(rows), start, columns).to(logits) * 2 - 1
        return -F.logsigmoid(signs * logits).sum()

    return _in_chunks(chunk, a, b, chunk_size, scale, bias) / len(a)


def sup_con(
    features: torch.Tensor,
    labels: torch.Tensor,
    *,
    scale: Scale = 10.0,
    normalize: bool = True,
    chunk_size: int = _CHUNK,
) -> torch.Tensor:
    r"""Supervised contrast: a row is near all rows of its label, and far from the others.

    $$ -\frac{1}{|I|} \sum_{i \in I} \frac{1}{|P(i)|} \sum_{p \in P(i)}
       \log \frac{\exp(s\, \hat z_i \cdot \hat z_p)}{\sum_{j \ne i} \exp(s\, \hat z_i \cdot \hat z_j)},
       \qquad \hat z_i = z_i / \lVert z_i \rVert, $$

    with $s = 10$ and rows of length 1 unless told otherwise, over the rows $I$ that have another one of their label
    (Khosla et al., 2020, https://arxiv.org/abs/2004.11362). Two views of a sample are two rows:
    ``sup_con(torch.cat([a, b]), labels.repeat(2))``.

    Args:
        features: Shape ``(N, D)``.
        labels: Whole numbers, shape ``(N,)``.
        scale: What similarities are multiplied by, 1 / temperature; a tensor may need a gradient.
        normalize: Whether rows are divided by their lengths first, so that their products are cosines.
        chunk_size: Rows at a time.

    Returns:
        The loss, shape ``()``; NaN when no two rows have the same label.

    Raises:
        LossError: The shapes do not go together.
    """
    _check_rows(features, features, same_number=True)
    if labels.shape != features.shape[:1]:
        raise LossError(f"labels has shape {tuple(labels.shape)}; it is one for each of the {len(features)} rows.")
    features = _ready(features, normalize)

    def chunk(rows: torch.Tensor, columns: torch.Tensor, start: int, scale: Scale) -> torch.Tensor:
        itself = _diagonal(len(rows), start, columns)
        logits = (_similarities(rows, columns) * scale).masked_fill(itself, -torch.inf)
        alike = (labels[start : start + len(rows), None] == labels) & ~itself
        counts = alike.sum(1)
        near = logits.masked_fill(~alike, 0.0).sum(1) / counts.clamp(min=1) - logits.logsumexp(1)
        has_others = counts > 0
        return torch.stack([-torch.where(has_others, near, 0.0).sum(), has_others.sum().to(near)])

    total, num_anchors = _in_chunks(chunk, features, features, chunk_size, scale)
    return total / num_anchors


def _nce(a: torch.Tensor, b: torch.Tensor, scale: Scale, chunk_size: int) -> torch.Tensor:
    def chunk(rows: torch.Tensor, columns: torch.Tensor, start: int, scale: Scale) -> torch.Tensor:
        logits = _similarities(rows, columns) * scale
        return F.cross_entropy(logits, torch.arange(start, start + len(rows), device=rows.device), reduction="sum")

    return _in_chunks(chunk, a, b, chunk_size, scale) / len(a)


def _in_chunks(
    chunk: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, chunk_size: int, *others: Scale
) -> torch.Tensor:
    """The sum of ``chunk(rows, b, start, *others)`` over the rows of ``a``; each is computed again in backward."""
    check_positive("chunk_size", chunk_size)

    def of_rows(first: int, stop: int, a: torch.Tensor, b: torch.Tensor, *others: Scale) -> torch.Tensor:
        found = [
            checkpoint(chunk, rows, b, first + k * chunk_size, *others, use_reentrant=False, preserve_rng_state=False)
            for k, rows in enumerate(a[first:stop].split(chunk_size))
        ]
        return torch.stack(found).sum(0)

    return summed(of_rows, len(a), a, b, *others)


def _ready(rows: torch.Tensor, normalize: bool) -> torch.Tensor:
    rows = rows.to(at_least_float32(rows.dtype))
    return F.normalize(rows, dim=1) if normalize else rows


def _similarities(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Of all pairs; under autocast the product is in 16 bits, and what follows is not."""
    found = rows @ columns.T
    return found.to(at_least_float32(found.dtype))


def _diagonal(num_rows: int, start: int, columns: torch.Tensor) -> torch.Tensor:
    """Where a row of the chunk that begins at ``start`` meets its own column."""
    numbers = torch.arange(len(columns), device=columns.device)
    return numbers[start : start + num_rows, None] == numbers


def _check_rows(a: torch.Tensor, b: torch.Tensor, *, same_number: bool, may_have_more: bool = False) -> None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1]
    if not fits or len(a) > len(b) or (same_number and len(a) != len(b)):
        more = " With symmetric=False, b may have more rows: negatives of all." if may_have_more else ""
        raise LossError(
            f"The rows that are compared have shapes {tuple(a.shape)} and {tuple(b.shape)}; they are (N, D) both.{more}"
        )
