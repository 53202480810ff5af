"""What a forward returns for a loss of the whole batch: rows of samples and sums, in any nesting, put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bigbatch.batch.structure import children, is_array, joined, rebuilt
from bigbatch.errors import LossError
from bigbatch.stepping.losses import Sum
from bigbatch.stepping.precision import at_least_float32


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What is in the outputs, with its path; a ``Sum`` is a leaf."""
    inside = None if isinstance(value, Sum) else children(value)
    if inside is None:
        yield path, value
    for name, inner in inside or ():
        yield from named_leaves(inner, joined(path, name))


def with_leaves(value: Any, leaves: Iterable[Any]) -> Any:
    """The same nesting with other leaves, in the order of ``named_leaves``."""
    left = iter(leaves)
    inside = None if isinstance(value, Sum) else children(value)
    return next(left) if inside is None else rebuilt(value, [with_leaves(inner, left) for _, inner in inside])


def opened(leaf: Any) -> Any:
    """What the loss sees of it: the tensor of a ``Sum``."""
    return leaf.term if isinstance(leaf, Sum) else leaf


def detached(leaf: Any) -> Any:
    """The same without its graph."""
    if isinstance(leaf, Sum):
        return Sum(leaf.term.detach())
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def num_rows(leaf: Any) -> int | None:
    """Rows of samples; None where there are none."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) else None


def can_vary(leaf: Any) -> bool:
    """Whether it may have a gradient."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def shown(path: str) -> str:
    """How a message begins that is about it."""
    return f"The output {path!r}" if path else "The output"


def check_leaf(path: str, leaf: Any, num_samples: int = 0) -> None:
    """Raise ``LossError`` for an output that is neither per sample nor a declared sum."""
    if isinstance(leaf, Sum):
        if not isinstance(leaf.term, torch.Tensor):
            raise LossError(f"{shown(path)} is a bb.Sum of a {type(leaf.term).__name__}; it is one of a tensor.")
    elif is_array(leaf) and (not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided):
        raise LossError(f"{shown(path)} of forward is a {type(leaf).__name__} of another kind; return dense tensors.")
    elif isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        raise LossError(
            f"{shown(path)} of forward is a 0-d tensor, so it has no rows for the samples. If it is a sum over the "
            f"samples, return bb.Sum(tensor) and the loss gets that of the whole batch; a mean is a sum and a count."
        )
    elif isinstance(leaf, torch.Tensor) and num_samples and leaf.shape[0] != num_samples:
        raise LossError(
            f"{shown(path)} of forward has shape {tuple(leaf.shape)} for {num_samples} samples. Outputs have the "
            f"samples in dimension 0: reshape it, or return views of a sample as two outputs. If it is a sum over the "
            f"samples, return bb.Sum(tensor)."
        )


def joined_leaves(parts: Sequence[Sequence[tuple[str, Any]]], of: str = "micro-batches") -> Iterator[Any]:
    """The leaves of the whole batch, from those of the micro-batches or "ranks"; consumes nothing."""
    names = [[path for path, _ in part] for part in parts]
    one, start = ("rank", 0) if of == "ranks" else ("micro-batch", 1)
    for k, other in enumerate(names):
        if other != names[0]:
            raise LossError(f"forward returned {other} for {one} {k + start}, but {names[0]} for {one} {start}.")
    for i, (path, first) in enumerate(parts[0]):
        leaves = [part[i][1] for part in parts]
        if any(isinstance(leaf, Sum) != isinstance(first, Sum) for leaf in leaves):
            raise LossError(f"{shown(path)} of forward is a bb.Sum for some {of}, but not for others.")
        if isinstance(first, Sum):
            yield _added(path, [leaf.term for leaf in leaves], of)
        elif all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            _check_same_shapes(path, [leaf.shape[1:] for leaf in leaves], of)
            yield torch.cat(leaves)
        else:
            of_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
            if of_tensors or any(leaf is not first and leaf != first for leaf in leaves):
                raise LossError(
                    f"{shown(path)} of forward is {leaves[:3]} in the {of}, and nobody knows how these are "
                    f"put together. Return a tensor with a row for each sample, or bb.Sum(tensor)."
                )
            yield first


def _added(path: str, terms: Sequence[torch.Tensor], of: str) -> torch.Tensor:
    _check_same_shapes(path, [term.shape for term in terms], of)
    first, *others = terms
    return sum((widened(term) for term in others), start=widened(first, copy=True)).to(_dtype_of_sum(first))


def widened(term: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """It in the dtype that it is added up in, which every backend can add."""
    has_fraction = term.is_floating_point() or term.is_complex()
    return term.to(at_least_float32(term.dtype) if has_fraction else torch.int64, copy=copy)


def _dtype_of_sum(term: torch.Tensor) -> torch.dtype:
    # A bool is counted, as its sum is.
    return torch.int64 if term.dtype == torch.bool else term.dtype


def _check_same_shapes(path: str, shapes: Sequence[torch.Size], of: str) -> None:
    if len(set(shapes)) > 1:
        found = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        raise LossError(
            f"{shown(path)} of forward has other shapes in other {of}: {found}, without the samples. Outputs "
            f"of a sample have one shape: pool over what is padded, or pad it to one length."
        )


def without_samples(leaf: Any) -> Any:
    """The leaf of a batch of no samples, without numbers (on ``meta``, which can be sent in any dtype)."""
    if isinstance(leaf, Sum):
        return Sum(leaf.term.to("meta"))
    return leaf.new_empty((0, *leaf.shape[1:]), device="meta") if isinstance(leaf, torch.Tensor) else leaf


def with_zeros(leaf: Any, device: torch.device) -> Any:
    """What ``without_samples`` gave, with numbers: no rows, or a sum of zeros."""
    if isinstance(leaf, Sum):
        return Sum(torch.zeros_like(leaf.term, device=device))
    return torch.zeros_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf
