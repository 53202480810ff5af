"""Copies of models and batches that have shapes and no numbers, so that a step of them costs no memory."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode


def fake_copy(value: Any, mode: FakeTensorMode) -> Any:
    """A deep copy whose tensors are fake tensors on the CPU; what shares memory in ``value`` shares it in the copy.

    The device of the original does not matter, and it may be ``meta``. On a machine without a card, fake tensors that
    say "cuda" fail in backward, so all of them say "cpu".

    Args:
        value: Anything that ``copy.deepcopy`` takes, for example a tuple of a model and its optimizer.
        mode: Of all fake tensors that are to meet.
    """
    with _CopyAsFakes(mode), _without_sharding():
        return copy.deepcopy(value)


@contextlib.contextmanager
def _without_sharding() -> Iterator[None]:
    """Within the block, modules that FSDP2 has sharded can be copied: as they were before."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    changed = [] if fsdp is None else [cls for cls in fsdp.FSDPModule.__subclasses__() if "__deepcopy__" in vars(cls)]
    before = [cls.__deepcopy__ for cls in changed]
    for cls in changed:
        cls.__deepcopy__ = _copy_before_sharding
    try:
        yield
    finally:
        for cls, method in zip(changed, before, strict=True):
            cls.__deepcopy__ = method


def _copy_before_sharding(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of the class that FSDP2 made its own from, without its hooks and its state."""
    plain: Any = type(module).__bases__[1]
    found = plain.__new__(plain)
    memo[id(module)] = found
    for name, value in vars(module).items():
        if name.startswith("__composable_api_state_key"):
            continue
        if name in ("_forward_pre_hooks", "_forward_hooks"):
            value = type(value)((key, hook) for key, hook in value.items() if not _is_of_fsdp(hook))
        found.__dict__[name] = copy.deepcopy(value, memo)
    return found


def _is_of_fsdp(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp")


@contextlib.contextmanager
def positions_count_up(packed: Collection[int]) -> Iterator[None]:
    """Within the block, models of transformers take position ids that they made themselves for those of one sequence.

    They look at the numbers to see whether several sequences are packed into one (``find_packed_sequence_indices``).
    Fake tensors have none, and then a mask of all pairs of tokens is made in each layer, which a real step has not.

    Args:
        packed: Storages of position ids that may be packed, by ``_cdata``: those of the batch.
    """
    masking = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or find is None:
        yield
        return

    def find_packed(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if position_ids.untyped_storage()._cdata not in packed:
            return None
        return find(position_ids, *args, **kwargs)

    masking.__dict__["find_packed_sequence_indices"] = find_packed
    try:
        yield
    finally:
        masking.__dict__["find_packed_sequence_indices"] = find


class _CopyAsFakes(TorchFunctionMode):
    """Makes fakes where ``copy.deepcopy`` would copy tensors."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._storages: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone:  # the copy of a Parameter is made of a clone of its data
            return self._fake_of(args[0])
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._fake_of(tensor)
        return memo[id(tensor)]

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "_local_tensor"):
            return self._whole(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
            raise TypeError(f"a tensor of the class {type(tensor).__name__} has no fake")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise TypeError(f"a tensor of the layout {tensor.layout} has no fake")
        with torch.no_grad(), self._mode:
            fake = torch.as_strided(self._bytes_of(tensor), tensor.size(), tensor.stride(), tensor.storage_offset())
        fake = fake.detach()
        if tensor.requires_grad:
            fake.requires_grad_()
        for name, value in vars(tensor).items():
            setattr(fake, name, value)
        return fake

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of what is spread over ranks, all of it."""
        with torch.no_grad(), self._mode:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat fake of all that lies in the storage of ``tensor``, in its dtype."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        flat, size = self._storages[key], tensor.element_size()
        return flat[: flat.numel() // size * size].view(tensor.dtype)
