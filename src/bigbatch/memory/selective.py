"""Of a recomputed call, keep what some operations returned, so that they do not run a second time.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` does this too, and refuses what is right: it counts
*every* operation and wants the same ones in the second run, which fails when autocast has a weight cast already
(https://github.com/pytorch/pytorch/issues/193338) and when running statistics are set aside; it refuses a second
backward (https://github.com/pytorch/pytorch/issues/142862), and what was kept and then changed in place
(https://github.com/pytorch/pytorch/issues/119590). And an operation that it leaves out draws no random numbers, so that
all masks after it are others. Here only the operations that are kept are counted, random numbers go on as if they had
run, and what cannot be used is computed again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.errors import RecomputeError

# Names of operations without their overload. Those that this torch lacks are never met.
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        # Called by variable-length attention, and by xFormers and flash-attn where they use what torch brings.
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "flex_attention",
    }
)
_MATMUL = _ATTENTION | {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::linear",  # It is one operation on some devices only; elsewhere it arrives as mm or addmm.
    "aten::convolution",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
}
KEPT_OPERATIONS = {"attention": _ATTENTION, "matmul": _MATMUL}
"""What each word of ``Plan.keep`` keeps."""


@functools.cache
def words_that_keep(operation: Any) -> tuple[str, ...]:
    """The words of ``Plan.keep`` that keep what this operation returns."""
    return tuple(word for word, names in KEPT_OPERATIONS.items() if _name_of(operation) in names)


class KeptOutputs:
    """What some operations returned in the first run of a call, to be returned again in the second.

    An output is handed out once, and all are dropped when the second run is over; in a third run (``retain_graph``,
    gradients of gradients) these operations run like all others.

    Args:
        operations: Their names without overload, for example ``"aten::mm"``.
    """

    def __init__(self, operations: frozenset[str]):
        self._operations = operations
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def recording(self) -> TorchDispatchMode:
        """A context for the first run."""
        return _Recording(self)

    def replaying(self) -> TorchDispatchMode:
        """A context for the second run."""
        return _Replaying(self)

    def includes(self, operation: Any) -> bool:
        """Whether this is one to keep."""
        return _name_of(operation) in self._operations

    def add(self, operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Remember what the next operation of the first run returned."""
        usable = all(not leaf.is_inference() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        aliases = tree_map(_alias, output) if usable else None
        states = _random_states(operation, args, kwargs, output)
        self._kept.append(_Kept(operation, aliases, _versions(aliases), states))

    def take(self, position: int, operation: Any) -> Any:
        """What the operation at this position returned in the first run; None if it must run again.

        Raises:
            RecomputeError: It was another operation in the first run.
        """
        first = self._kept[position] if position < len(self._kept) else None
        if first is None or first.operation is not operation:
            was = "no operation" if first is None else repr(_name_of(first.operation))
            raise RecomputeError(
                f"Of the operations that are kept, number {position + 1} was {was} in the forward, and is "
                f"{_name_of(operation)!r} when it runs again in backward. The function must do the same both times: "
                f"see what it reads from outside, or take this module out of keep=."
            )
        output, first.output = first.output, None
        if output is None or _versions(output) != first.versions:
            return None  # What was changed in place (relu_ after a convolution) is not what the operation returned.
        for device, state in first.random_states:
            _set_random_state(device, state)
        return output

    def drop(self) -> None:
        """Forget the outputs. Some are never asked for, because a second run ends when it has what backward needs."""
        for kept in self._kept:
            kept.output = None


@dataclass
class _Kept:
    """One operation of the first run: what it returned, and the random numbers that come after it."""

    operation: Any
    output: Any
    versions: list[int]
    random_states: list[tuple[torch.device, torch.Tensor]]


class _Run(TorchDispatchMode):
    """One of the two runs of a call."""

    supports_higher_order_operators = True  # FlexAttention is one.

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile in here, instead of stepping back."""
        return True

    def __init__(self, outputs: KeptOutputs):
        super().__init__()
        self._outputs = outputs


class _Recording(_Run):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._outputs.includes(func):
            self._outputs.add(func, args, kwargs or {}, output)
        return output


class _Replaying(_Run):
    def __init__(self, outputs: KeptOutputs):
        super().__init__(outputs)
        self._position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = None
        if self._outputs.includes(func):
            output = self._outputs.take(self._position, func)
            self._position += 1
        return func(*args, **(kwargs or {})) if output is None else output

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outputs.drop()


@functools.lru_cache(maxsize=4096)
def _name_of(operation: Any) -> str:
    # An operation that writes into a tensor it is given returns nothing new.
    is_mutable = getattr(getattr(operation, "_schema", None), "is_mutable", False)
    return "" if is_mutable else operation.name().partition(".")[0]


def _alias(value: Any) -> Any:
    """The same tensor without its place in a graph, and with the same count of in-place changes."""
    if not isinstance(value, torch.Tensor):
        return value
    # Beneath autograd this key is left out, and with it what lets an alias share the count.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _versions(output: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _random_states(operation: Any, args: Any, kwargs: Any, output: Any) -> list[tuple[torch.device, torch.Tensor]]:
    """The state of the generators that an operation has drawn from, after it; none if it drew nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return []
    for index, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            probability = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            if not probability:
                return []
    devices = {leaf.device for leaf in tree_leaves((args, output)) if isinstance(leaf, torch.Tensor)}
    return [(device, _random_state(device)) for device in devices if device.type != "meta"]


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
