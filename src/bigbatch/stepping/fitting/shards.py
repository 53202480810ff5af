"""What FSDP2 makes of a model: its units, and what the shards of one rank need in the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from bigbatch.errors import OptionError
from bigbatch.planning.sharding_costs import Shards, Unit
from bigbatch.stepping.distributed.buckets import NO_BUCKETS, buckets_of
from bigbatch.stepping.distributed.wrapping import blocks_to_shard
from bigbatch.stepping.fitting.profiling import profile_of
from bigbatch.stepping.fitting.shadow import Shadow
from bigbatch.stepping.gradients import accumulation_dtype_of
from bigbatch.stepping.precision import at_least_float32

if TYPE_CHECKING:
    from bigbatch.stepping.step import Step


Sharding = Literal["ddp", "fsdp2"]
"""How a model is spread over ranks: copied, or in shards."""


class _Whole(NamedTuple):
    """A parameter as it is in one process, with the dtypes in which FSDP2 gathers and sums it.

    Attributes:
        parameter: As it is in the model, whole or a shard.
        gathered: The dtype of the whole one.
        summed: The dtype in which its gradient is kept and sent.
    """

    parameter: torch.Tensor
    gathered: torch.dtype
    summed: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the whole one."""
        return self.parameter.shape

    def shard_shape(self, world_size: int) -> tuple[int, ...]:
        """Of the largest shard; with it all are padded. FSDP2 cuts the first dimension as ``torch.chunk`` does."""
        return (-(-self.shape[0] // world_size), *self.shape[1:])


def shards_of(step: Step, world_size: int, device: str) -> Shards:
    """The shards of a model that FSDP2 has sharded; or of one that ``bigbatch train --parallel fsdp2`` would shard.

    Args:
        step: With the model and its optimizers.
        world_size: Ranks; for a model that is sharded already, those that it is sharded for.
        device: "cpu" or "cuda": where it will run.

    Raises:
        OptionError: It is sharded in a way whose costs are not known, or has an average of its weights.
        TraceError: The update cannot be followed without numbers.
    """
    if isinstance(step.options.ema, nn.Module):
        raise OptionError("What an average of sharded weights costs is not known: leave ema= out, or plan for DDP.")
    found = _sharded_units(step.model) or _units_to_be(step.model)
    for whole in (whole for unit in found.values() for whole in unit):
        if not whole.shape:
            raise OptionError("FSDP2 shards no parameter without a dimension: make it one of shape (1,).")
    parts = _Parts([whole for unit in found.values() for whole in unit], world_size)
    update = _update_of(step, parts, device)
    wide = accumulation_dtype_of(step.options.accumulation_dtype)
    units = tuple(_unit(name, wholes, world_size, wide) for name, wholes in found.items())
    return Shards(world_size, units, update.parameter_bytes, update.optimizer_bytes, update.update_bytes)


class Spread:
    """How a model is spread over ranks, or will be.

    Args:
        step: With the model.
        sharding: How it will be wrapped; None: as it is.
        num_ranks: That will share a batch; None: those that it is wrapped for.

    Attributes:
        num_ranks: That share a batch.
        is_sharded: By FSDP2.
        buckets: Of DDP.
        names: Of the modules that FSDP2 gathers by themselves.

    Raises:
        OptionError: It is wrapped already, in another way or for other ranks.
    """

    def __init__(self, step: Step, sharding: Sharding | None, num_ranks: int | None):
        model, group = step.model, step.accumulator.ranks.group
        self.num_ranks = num_ranks or (1 if group is None else group.size())
        self.is_sharded = _check_sharding(step, sharding, self.num_ranks)
        self.buckets = NO_BUCKETS
        if not self.is_sharded:
            self.buckets = buckets_of(model, num_ranks=self.num_ranks, reduce=step.options.reduce)
        self.names = [name for name in _sharded_units(model) or _units_to_be(model) if name] if self.is_sharded else []


def _check_sharding(step: Step, sharding: str | None, num_ranks: int) -> bool:
    if sharding not in (None, "ddp", "fsdp2"):
        raise OptionError(f'sharding={sharding!r}; it is "ddp", "fsdp2", or None for how the model is wrapped.')
    group, sharded = step.accumulator.ranks.group, step.accumulator.ranks.reducer.is_sharded
    if sharding is not None and group is not None and sharded != (sharding == "fsdp2"):
        raise OptionError(f"sharding={sharding!r}, but the model is wrapped for {'FSDP2' if sharded else 'DDP'}.")
    if sharded and group is not None and group.size() != num_ranks:
        raise OptionError(
            f"world_size={num_ranks}, but the model is sharded for {group.size()} ranks. Plan for others from a model "
            f'that is not sharded: sharding="fsdp2".'
        )
    return sharded or sharding == "fsdp2"


_Units = dict[str, list[_Whole]]
"""The parameters by the name of the module."""


def _units_to_be(model: nn.Module) -> _Units:
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[block]: block for block in blocks_to_shard(model)}
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    root = [p for p in model.parameters() if id(p) not in inside]
    found = {"": _as_they_are(root)}
    return found | {name: _as_they_are(block.parameters()) for name, block in blocks.items()}


def _as_they_are(parameters: Iterable[torch.Tensor]) -> list[_Whole]:
    return [_Whole(p, p.dtype, p.dtype) for p in parameters]


def _sharded_units(model: nn.Module) -> _Units:
    """Those of a model that is sharded; none for one that is not."""
    found: _Units = {}
    for name, module in model.named_modules():
        get_state: Any = getattr(module, "_get_fsdp_state", None)
        if get_state is not None:
            state = get_state()
            _check_known(name, state)
            groups = state._fsdp_param_groups
            wholes = [_as_sharded(param, group.mp_policy) for group in groups for param in group.fsdp_params]
            if wholes or not name:
                found[name] = wholes
    if found and "" not in found:
        raise OptionError(
            "Modules of the model are sharded, and the model itself is not, so that it is not known when they are "
            "gathered. Shard the model after them: fully_shard(model)."
        )
    return found


def _check_known(name: str, state: Any) -> None:
    """Raise ``OptionError`` for what is set otherwise than FSDP2 sets it, and costs another amount."""
    groups = state._fsdp_param_groups
    known = {
        "several modules in one call of fully_shard": len(state._modules) == 1,
        "replicas of shards (a mesh of two dimensions)": all(group.mesh_info.mesh.ndim == 1 for group in groups),
        "an offload policy": all(not hasattr(group.offload_policy, "pin_memory") for group in groups),
        "shards along another dimension than the first": all(
            param.fsdp_placement.dim == 0 for group in groups for param in group.fsdp_params
        ),
        "prefetching that was set by hand": not (
            state._states_to_forward_prefetch or state._states_to_backward_prefetch
        ),
        "another reshard_after_forward than True": not name
        or all(group.post_forward_mesh_info == group.mesh_info for group in groups),
    }
    if wrong := [what for what, is_known in known.items() if not is_known]:
        raise OptionError(
            f"{name or 'The model'} has {', '.join(wrong)}, and what FSDP2 needs then is not known. Give "
            f"micro_batch_size=, and leave memory_budget out."
        )


def _as_sharded(param: Any, policy: Any) -> _Whole:
    own = param.sharded_param.dtype
    gathered = policy.param_dtype or own
    return _Whole(param.sharded_param, gathered, policy.reduce_dtype or gathered)


def _unit(name: str, wholes: Sequence[_Whole], world_size: int, wide: torch.dtype | None) -> Unit:
    trained = [whole for whole in wholes if whole.parameter.requires_grad]

    def padded(found: Sequence[_Whole], dtype: str) -> int:
        counts = (torch.Size(whole.shard_shape(world_size)).numel() * world_size for whole in found)
        return sum(count * getattr(whole, dtype).itemsize for count, whole in zip(counts, found, strict=True))

    shards = (torch.Size(whole.shard_shape(world_size)).numel() * whole.parameter.dtype.itemsize for whole in trained)
    own_dtypes = [(whole, whole.parameter.dtype) for whole in trained]
    return Unit(
        name,
        gathered_bytes=padded(wholes, "gathered"),
        traced_bytes=sum(whole.shape.numel() * (wide or at_least_float32(own)).itemsize for whole, own in own_dtypes),
        kept_bytes=sum(whole.shape.numel() * whole.summed.itemsize for whole in trained),
        sent_bytes=padded(trained, "summed"),
        shard_bytes=sum(shards),
    )


class _Parts(nn.Module):
    """The shards of one rank, without numbers and without the model around them."""

    def __init__(self, wholes: Sequence[_Whole], world_size: int):
        super().__init__()
        self.of: dict[int, nn.Parameter] = {}
        for whole in wholes:
            part = torch.empty(whole.shard_shape(world_size), dtype=whole.parameter.dtype, device="meta")
            self.of[id(whole.parameter)] = nn.Parameter(part, requires_grad=whole.parameter.requires_grad)
        self.parts = nn.ParameterList(self.of.values())


class _Update(NamedTuple):
    parameter_bytes: int
    optimizer_bytes: int
    update_bytes: int


def _update_of(step: Step, parts: _Parts, device: str) -> _Update:
    """What the real step needs when its model is nothing but these shards."""
    dtypes = {p.dtype for p in parts.parts}
    options = replace(
        step.options,
        collate=None,
        split=None,
        length=None,
        max_tokens=None,
        pad_to_multiple_of=None,
        batch_dims=None,
        weight=None,
        scheduler=None,
        batch_norm="merge",
        dropout="native",
        noise_scale=False,
        reduce="after",
        # FSDP2 leaves gradients in the dtype of the parameters, whatever it adds them up in.
        accumulation_dtype=dtypes.pop() if len(dtypes) == 1 else None,
    )
    optimizers = [_of_parts(optimizer, parts.of) for optimizer in step.optimizers]
    alone = type(step)(parts, _touch_all, optimizers, **vars(options))
    batch = torch.empty(2, 1, device="meta")
    found = profile_of(alone, Shadow(alone, batch, device), batch)
    return _Update(found.parameter_bytes, found.optimizer_bytes, found.update_bytes)


def _touch_all(parts: Any, batch: torch.Tensor) -> torch.Tensor:
    """A loss that gives every shard a gradient."""
    return torch.stack([p.float().sum() for p in parts.parts if p.requires_grad]).sum() + 0.0 * batch.sum()


def _of_parts(optimizer: torch.optim.Optimizer, part_of: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer with the same settings, of the shards, and without state."""
    found = type(optimizer).__new__(type(optimizer))
    found.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    found.param_groups = [
        {**group, "params": [part_of[id(p)] for p in group["params"]]} for group in optimizer.param_groups
    ]
    found.state = defaultdict(dict)
    return found
