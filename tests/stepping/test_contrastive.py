from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bigbatch as bb
from bigbatch.memory.measure import count_peak_bytes
from tests.reference import assert_same_gradients, gradient_error

N, D = 13, 5


def plain_info_nce(a: Tensor, b: Tensor, y: Tensor, s: Tensor, c: Tensor, *, symmetric: bool = True) -> Tensor:
    logits = s * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    target = torch.arange(len(a))
    loss = F.cross_entropy(logits, target)
    return (loss + F.cross_entropy(logits.T, target)) / 2 if symmetric else loss


def plain_siglip(a: Tensor, b: Tensor, y: Tensor, s: Tensor, c: Tensor) -> Tensor:
    logits = s * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T + c
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def plain_sup_con(a: Tensor, b: Tensor, y: Tensor, s: Tensor, c: Tensor) -> Tensor:
    """Row by row, as the paper writes it."""
    z = F.normalize(a, dim=1)
    losses = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        alike = [j for j in others if y[j] == y[i]]
        if alike:
            near = (s * z[i] * z[others]).sum(1).logsumexp(0)
            losses.append(-torch.stack([s * z[i] @ z[j] - near for j in alike]).mean())
    return torch.stack(losses).mean()


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "info_nce": (plain_info_nce, lambda a, b, y, s, c, k: bb.info_nce(a, b, scale=s, chunk_size=k)),
    "one way": (
        lambda *given: plain_info_nce(*given, symmetric=False),
        lambda a, b, y, s, c, k: bb.info_nce(a, b, scale=s, symmetric=False, chunk_size=k),
    ),
    "siglip": (plain_siglip, lambda a, b, y, s, c, k: bb.siglip(a, b, scale=s, bias=c, chunk_size=k)),
    "sup_con": (plain_sup_con, lambda a, b, y, s, c, k: bb.sup_con(a, y, scale=s, chunk_size=k)),
}


def given(num: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(num, D, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2)]
    labels = torch.randint(0, num // 2, (num,), generator=draw)  # some are alone
    numbers = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in (7.0, -2.0)]
    return [*rows, labels, *numbers]


def gradients_of(loss: Tensor, inputs: list[Tensor]) -> dict[str, Tensor | None]:
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return {str(i): g for i, g in enumerate(found)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk_size", [1, 4, 13, 256])
def test_loss_and_gradients_are_those_of_the_plain_formula(name, chunk_size):
    plain, ours = LOSSES[name]
    expected, found = plain(*given()), ours(*given(), chunk_size)

    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    inputs = given()
    assert_same_gradients(
        gradients_of(ours(*inputs, chunk_size), inputs), gradients_of(plain(*inputs), inputs), tolerance=1e-12
    )


def test_the_formulas_are_not_the_same():
    """Control: the tolerance tells them apart."""
    inputs = given()
    found = [gradients_of(ours(*inputs, 4), inputs) for _, ours in LOSSES.values()]

    for i, one in enumerate(found):
        assert all(gradient_error(one, other) > 1e-2 for other in found[:i])


def test_more_columns_are_negatives_of_all():
    a, b, *_ = given()
    more = torch.randn(4, D, dtype=torch.float64)
    logits = 20 * F.normalize(a, dim=1) @ F.normalize(torch.cat([b, more]), dim=1).T
    found = bb.info_nce(a, torch.cat([b, more]), symmetric=False, chunk_size=3)

    torch.testing.assert_close(found, F.cross_entropy(logits, torch.arange(N)), rtol=1e-13, atol=0)


def test_rows_that_are_not_normalized():
    a, b, *_ = given()

    torch.testing.assert_close(
        bb.info_nce(a, b, scale=1.0, normalize=False, symmetric=False), F.cross_entropy(a @ b.T, torch.arange(N))
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_computed_in_float32(name, dtype):
    plain, ours = LOSSES[name]
    inputs = given(dtype=dtype)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs]

    found = ours(*inputs, 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), plain(*wide), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_under_autocast_backward_is_that_of_the_forward(name):
    plain, ours = LOSSES[name]
    inputs = given(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(*inputs, 4)
    found = gradients_of(loss, inputs)

    assert gradient_error(found, gradients_of(plain(*inputs), inputs)) < 0.1


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bb.info_nce(torch.zeros(3, 2), torch.zeros(5, 2)), r"\(3, 2\) and \(5, 2\).* symmetric=False"),
        (lambda: bb.info_nce(torch.zeros(5, 2), torch.zeros(4, 2), symmetric=False), r"\(5, 2\) and \(4, 2\)"),
        (lambda: bb.siglip(torch.zeros(3, 2), torch.zeros(3, 1)), r"\(3, 2\) and \(3, 1\)"),
        (lambda: bb.siglip(torch.zeros(3), torch.zeros(3)), r"\(3,\) and \(3,\)"),
        (lambda: bb.sup_con(torch.zeros(3, 2), torch.zeros(2)), r"labels has shape \(2,\).* 3 rows"),
    ],
)
def test_shapes_that_do_not_go_together_are_named(call, match):
    with pytest.raises(bb.LossError, match=match):
        call()


def test_a_chunk_of_nothing_is_an_error():
    with pytest.raises(bb.OptionError, match="chunk_size"):
        bb.info_nce(torch.zeros(3, 2), torch.zeros(3, 2), chunk_size=0)


def peak_bytes(run: Callable[[list[Any]], Tensor], num: int) -> int:
    """Bytes alive beyond the inputs in forward and backward."""
    inputs = given(num, torch.float32)
    with count_peak_bytes(torch.device("cpu"), track=[]) as meter:
        run(inputs).backward()
    return meter.peak_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_memory_is_that_of_a_chunk_of_rows_and_not_of_all_pairs(name):
    _, ours = LOSSES[name]
    num, chunk = 1024, 32
    of_chunk = chunk * num * 4
    found = peak_bytes(lambda inputs: ours(*inputs, chunk), num)

    assert found <= 5 * of_chunk + 16 * num * D * 4
    assert found <= 0.25 * num * num * 4
    twice = peak_bytes(lambda inputs: ours(*inputs, chunk), 2 * num)
    assert twice <= 2.1 * found
    # Control: with all rows in one chunk it is that of some matrices of all pairs.
    assert peak_bytes(lambda inputs: ours(*inputs, num), num) > 2 * num * num * 4
