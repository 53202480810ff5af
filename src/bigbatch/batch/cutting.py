"""Find the samples of a batch and cut them: any nesting of containers, tensors along their dimension of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from bigbatch.batch.structure import UNSET, beside, children, hides_arrays, is_array, joined, mapped, rebuilt
from bigbatch.errors import BatchError, EmptyBatchError

_NOT_DECLARED = object()


@dataclass
class _Node:
    """A value of a batch and what is to be done with it."""

    value: Any
    path: str
    dim: int | None = None  # the dimension that is cut
    inside: list[_Node] | None = None  # of a container with something in it that is cut

    def mapped(self, change: Callable[[Any, int], Any]) -> Any:
        if self.dim is not None:
            return change(self.value, self.dim)
        if self.inside is None:
            return self.value
        return rebuilt(self.value, [node.mapped(change) for node in self.inside])

    def emptied(self) -> _Node:
        """The same without samples, on the host."""
        value, inside = self.value, self.inside
        if self.dim is not None:
            value = _copied_to_host(_window(value, self.dim, 0, 0))
        elif inside is not None:
            inside = [node.emptied() for node in inside]
            value = rebuilt(value, [node.value for node in inside])
        else:
            value = mapped(_copied_to_host, value)
        return _Node(value, self.path, self.dim, inside)


def _copied_to_host(value: Any) -> Any:
    """Without the storage that a view is a part of."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _window(value: Any, dim: int, start: int, length: int) -> Any:
    if isinstance(value, torch.Tensor) and dim:
        return value.narrow(dim, start, length)
    return value[(slice(None),) * dim + (slice(start, start + length),)] if dim else value[start : start + length]


@dataclass(frozen=True)
class Layout:
    """Which parts of a batch are cut, and along which dimension.

    Attributes:
        num_samples: The length of the batch.
        root: The batch.
    """

    num_samples: int
    root: _Node

    def cut(self, start: int, length: int) -> Any:
        """The samples ``start`` to ``start + length``; tensors are views, containers keep their types."""
        return self.root.mapped(lambda value, dim: _window(value, dim, start, length))

    def mapped(self, change: Callable[[Any, int], Any]) -> Any:
        """The batch with ``change(value, dim)`` in the place of each value that is cut."""
        return self.root.mapped(change)

    def emptied(self) -> Layout:
        """The layout of the same batch without samples, on the host: for a rank that has none."""
        return Layout(0, self.root.emptied())


def lay_out(batch: Any, batch_dims: Mapping[str, int | None] | None = None) -> Layout:
    """Find the samples of a batch.

    Every tensor (and NumPy array) with a dimension is cut along dimension 0, or the one that ``batch_dims`` gives
    for its path; lists without tensors are cut when they are as long as the batch. The rest is passed on.

    Args:
        batch: Any nesting of Mapping, list, tuple, namedtuple and dataclass.
        batch_dims: By dotted path (``"inputs.x"``): the dimension of the samples, or None for a value, or all values
            below that path, that the samples share. A list is made per-sample by 0.

    Raises:
        BatchError: Lengths disagree, nothing has a length, or something cannot be cut; the message names paths and
            lengths and the option that decides.
    """
    if not batch_dims and (flat := _lay_out_flat(batch)) is not None:
        return flat
    survey = _Survey(dict(batch_dims or {}))
    try:
        root = survey.visit(batch, "")
    except RecursionError:
        raise BatchError("The batch contains itself. Give a batch whose nesting ends.") from None
    survey.check_declared_were_found()
    num_samples = survey.agreed_length()
    survey.decide_lists(num_samples)
    _prune(root)
    return Layout(num_samples, root)


def _lay_out_flat(batch: Any) -> Layout | None:
    """The layout of what most batches are, a tuple, list or dict of dense tensors of one length; None for others.

    It finds nothing that the survey would not, but takes a fifth of the time, which a small step feels.
    """
    if type(batch) is dict and all(type(name) is str for name in batch):
        values = list(batch.values())
    elif type(batch) in (tuple, list):
        values = batch
    else:
        return None
    lengths = {_rows(value) for value in values}
    if len(lengths) != 1 or 0 in lengths:
        return None
    return Layout(lengths.pop(), _Node(batch, "", inside=[_Node(value, "", dim=0) for value in values]))


def _rows(value: Any) -> int:
    """Rows of a dense tensor; 0 for anything else."""
    is_dense = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested
    return value.shape[0] if is_dense and value.dim() else 0


def _prune(node: _Node) -> bool:
    """Make a leaf of each container in which nothing is cut, so that it is passed on as it is."""
    if node.inside is not None:
        cut = [_prune(inner) for inner in node.inside]  # all of them, so not inside any()
        node.inside = node.inside if any(cut) else None
    return node.dim is not None or node.inside is not None


class _Survey:
    """Walks a batch once and notes the lengths of what it meets."""

    def __init__(self, declared: dict[str, int | None]):
        self.declared = declared
        self.seen: set[str] = set()
        self.lengths: dict[str, int] = {}  # by path, of what must agree
        self.lists: list[_Node] = []  # cut only when they are as long as the batch

    def visit(self, value: Any, path: str) -> _Node:
        node = _Node(value, path)
        if path in self.seen:
            raise BatchError(f"The batch has two values with the path {path!r}. Rename one of the keys.")
        self.seen.add(path)
        dim = self.declared.get(path, _NOT_DECLARED)
        if dim is None:
            return node
        if is_array(value):
            self._visit_array(node, 0 if dim is _NOT_DECLARED else dim)
        elif dim is not _NOT_DECLARED:
            self._visit_declared(node, dim)
        elif (inside := children(value)) is not None:
            _check_can_be_rebuilt(value, path, [inner for _, inner in inside])
            node.inside = [self.visit(inner, joined(path, name)) for name, inner in inside]
        elif isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
            self.lists.append(node)
        else:
            _refuse_what_hides_tensors(value, path)
        return node

    def decide_lists(self, num_samples: int) -> None:
        for node in self.lists:
            if len(node.value) == num_samples:
                node.dim = 0
            elif hides_arrays(node.value):
                _refuse_what_hides_tensors(node.value, node.path)

    def _visit_array(self, node: _Node, dim: Any) -> None:
        array, path = node.value, node.path
        if isinstance(array, torch.Tensor) and (array.layout != torch.strided or array.is_nested):
            kind = "nested" if array.is_nested else str(array.layout).removeprefix("torch.")
            raise BatchError(f"{_shown(path)} is a {kind} tensor, which has no rows to cut. {_SPLIT}")
        if array.ndim == 0:
            if path in self.declared:
                raise BatchError(f"batch_dims[{path!r}] is {dim}, but {_shown(path)} has no dimensions.")
            return
        if not -array.ndim <= dim < array.ndim:
            raise BatchError(
                f"batch_dims[{path!r}] is {dim}, but {_shown(path)} has shape {tuple(array.shape)}: "
                f"give a dimension from 0 to {array.ndim - 1}."
            )
        node.dim = dim % array.ndim
        self.lengths[path] = array.shape[dim]

    def _visit_declared(self, node: _Node, dim: Any) -> None:
        value, path = node.value, node.path
        if not isinstance(value, list | tuple) or hasattr(value, "_fields") or dim != 0:
            raise BatchError(
                f"batch_dims[{path!r}] is {dim}, but {_shown(path)} is a {type(value).__name__}. Name the tensors "
                f"inside it; only a list can be made per-sample, by 0."
            )
        node.dim = 0
        self.lengths[path] = len(value)

    def check_declared_were_found(self) -> None:
        if missing := sorted(set(self.declared) - self.seen):
            raise BatchError(f"batch_dims names {missing}, but the batch has {sorted(self.seen - {''})}.")

    def agreed_length(self) -> int:
        lengths = self.lengths or {node.path: len(node.value) for node in self.lists}
        if not lengths:
            raise BatchError(
                "The batch holds no tensor with a dimension and no list, so it has no samples to cut. "
                "Put the inputs into a tuple, list, dict or dataclass, or give split=."
            )
        if len(set(lengths.values())) > 1:
            raise BatchError(self._disagreement(lengths))
        num_samples = next(iter(lengths.values()))
        if num_samples == 0:
            raise EmptyBatchError(
                f"The batch is empty: {_named(lengths)} have length 0 in the dimension of the samples."
            )
        return num_samples

    def _disagreement(self, lengths: dict[str, int]) -> str:
        found = ", ".join(
            f"{_named(path for path, other in lengths.items() if other == length)} has {length}"
            for length in dict.fromkeys(lengths.values())
        )
        first = next(iter(lengths))
        odd = next(path for path in lengths if lengths[path] != lengths[first])
        return (
            f"Every tensor of a batch must have the same length in dimension 0 (the samples), but {found}. "
            f"Where the samples lie along another dimension, say so with batch_dims={{{odd!r}: 1}}; what all samples "
            f"share is batch_dims={{{odd!r}: None}}; a list of samples needs collate=."
        )


_SPLIT = "Give split=, a function split(batch, micro_batch_size) returning the micro-batches, or pass a LogicalBatch."


def _check_can_be_rebuilt(value: Any, path: str, contents: list[Any]) -> None:
    """Raise ``BatchError`` for a container of which there cannot be another with the rows of a micro-batch."""
    if type(value) in (dict, list, tuple):
        return
    if unset := [name for name, inner in children(value) or () if inner is UNSET]:
        raise BatchError(f"{_shown(path)} is a {type(value).__name__} whose field {unset[0]!r} was never set; set it.")
    if left := sorted(beside(value)):
        raise BatchError(
            f"{_shown(path)} is a {type(value).__name__} with tensors in {left} beside its contents, which would stay "
            f"whole beside the rows of a micro-batch. Make them fields. {_SPLIT}"
        )
    try:
        again = [inner for _, inner in children(rebuilt(value, contents)) or ()]
    except Exception as error:
        raise BatchError(
            f"No second {type(value).__name__} can be made for {_shown(path)}: {error}. {_SPLIT}"
        ) from error
    if len(again) != len(contents) or any(a is not b for a, b in zip(again, contents, strict=True)):
        raise BatchError(f"A second {type(value).__name__} for {_shown(path)} has other contents. {_SPLIT}")


def _refuse_what_hides_tensors(value: Any, path: str) -> None:
    if isinstance(value, Iterator):
        raise BatchError(
            f"{_shown(path)} is a {type(value).__name__}, which the first micro-batch would use up. Make a list or a "
            f"tensor of it, or give split=. If it is to be handed on as it is: batch_dims={{{path!r}: None}}."
        )
    if hides_arrays(value):
        raise BatchError(
            f"{_shown(path)} is a {type(value).__name__} with tensors inside, which cannot be cut here. {_SPLIT} "
            f"If all samples share it: batch_dims={{{path!r}: None}}."
        )


def _named(paths: Any) -> str:
    return str([_shown(path) for path in paths])


def _shown(path: str) -> str:
    return path or "batch"
