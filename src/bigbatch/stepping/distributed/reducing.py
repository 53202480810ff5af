"""Sum the gradients over the ranks, once a step: through DDP or FSDP2 inside the last backward, or here after it.

``DistributedDataParallel`` decides in its forward whether the backward will reduce, so ``no_sync`` holds for forward
and backward. A reduction of our own, after all backwards, is what DDP would do in its last one, over a fixed list of
parameters: a rank without a gradient adds zeros, and nobody needs to have used the same branches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from bigbatch.errors import DistributedError, GradientError, OptionError
from bigbatch.stepping.checks import num_ranks
from bigbatch.stepping.distributed.buckets import in_buckets
from bigbatch.stepping.gradients import DENSE, NONE, SPARSE
from bigbatch.stepping.insisting import insist
from bigbatch.units import format_names

if TYPE_CHECKING:
    from bigbatch.stepping.after_backward import Accumulation

_BITS, _PER_WORD = 2, 24
"""Of whether a parameter has a gradient; words are sent as float64, which holds 53 bits."""


class Reducer:
    """What in a model sums gradients over ranks, and when.

    Args:
        modules: All of the model.
        when: The option ``reduce``.
        pools: BatchNorm layers are not torch's: those of ranks do not meet in their forwards.

    Attributes:
        when: As given. FSDP2 may be told otherwise between two steps.
        group: The process group of the ranks; None: there is only this process.
        reduces_inside: Gradients are summed inside backward, or there are other collectives in the model, so that all
            ranks must run as many forwards and backwards.
        is_sharded: FSDP2 spreads the model over the ranks.
        must_run_together: There are collectives in each forward.
        has_sync_batch_norm: Layers of torch would join ranks in each forward, where they are not taken the place of.
        is_quiet: Nothing is reduced for now.

    Raises:
        DistributedError: What is found in the model does not go together.
        OptionError: It does not go with ``when``.
    """

    def __init__(self, modules: Sequence[nn.Module], when: str, *, pools: bool = False):
        self._ddps = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._sharded: list[Any] = [module for module in modules if _is_sharded(module)]
        self.when = when
        self._before: list[tuple[bool, bool]] = []
        self.group = _group_of(self._ddps, self._sharded)
        several = self.group is not None and self.group.size() > 1
        self.has_sync_batch_norm = several and any(isinstance(module, nn.SyncBatchNorm) for module in modules)
        syncs = self.has_sync_batch_norm and not pools
        self._overlaps = bool(self._ddps) and when != "after"
        self.reduces_inside = bool(self._sharded or syncs or self._overlaps)
        self.is_sharded = bool(self._sharded)
        self.must_run_together = bool(self._sharded or syncs)
        self.is_quiet = False
        self._check()

    def _check(self) -> None:
        if self.when == "each" and self._ddps:
            raise OptionError('reduce="each" is for FSDP2; DDP sums gradients once: give reduce="after" or "overlap".')
        for ddp in self._ddps:
            if self.when == "after" and ddp._comm_hooks:
                raise OptionError(
                    "The DistributedDataParallel has a communication hook, which only its own reduction runs. Give "
                    'reduce="overlap", or leave the hook out.'
                )
            if ddp.static_graph and self.when == "after":
                raise OptionError(
                    "DistributedDataParallel(static_graph=True) reduces in its first backward, whoever asks it not to. "
                    'Leave static_graph out, or give reduce="overlap".'
                )

    @property
    def device_to_talk(self) -> torch.device:
        """Where numbers for the other ranks are: on the host where the group can send from there."""
        assert self.group is not None
        devices = self.group._device_types
        if any(device.type == "cpu" for device in devices):
            return torch.device("cpu")
        return torch.device(devices[0].type, torch.accelerator.current_device_index())

    @property
    def scale(self) -> float:
        """What the engines divide gradients by."""
        if self.group is None or not (self._overlaps or self._sharded):
            return 1.0
        factors = {group.gradient_divide_factor for root in self._sharded for group in _param_groups(root)}
        factors = {float(self.group.size() if factor is None else factor) for factor in factors}
        if len(factors) > 1 or (self._ddps and factors - {float(self.group.size())}):
            raise DistributedError(f"Modules of the model divide gradients by different factors: {sorted(factors)}.")
        return factors.pop() if factors else float(self.group.size())

    def num_forwards(self, most: int) -> int:
        """How many forwards every rank must run, when one has ``most`` micro-batches."""
        if self.must_run_together:
            return most
        return 1 if self._overlaps else 0

    def check_parameters(self, named: dict[str, torch.Tensor], *, only_these: bool) -> None:
        """Before a step that gives these a gradient, and perhaps only these.

        Raises:
            DistributedError: Nothing keeps one of them equal over the ranks.
            OptionError: DDP cannot reduce them inside backward.
        """
        if self._overlaps and only_these:
            raise OptionError('With parameters=, DDP would wait for the others: give reduce="after".')
        if self._overlaps and any(p.is_floating_point() and p.element_size() < 4 for p in named.values()):
            raise OptionError(
                "The parameters have 16 bits, whose gradients are added up in float32, which DDP cannot reduce in its "
                'backward. Give reduce="after", or keep the parameters in float32 and use precision="bf16".'
            )
        # A copy without numbers makes no step that others could miss: it is how a rank plans for itself.
        if self.group is None and not any(isinstance(p, FakeTensor) for p in named.values()):
            _check_alone()
        if self.group is None or self.group.size() == 1:
            return
        covered = {id(p) for module in (*self._ddps, *self._sharded) for p in module.parameters()}
        if missing := [name for name, p in named.items() if id(p) not in covered]:
            raise DistributedError(
                f"{format_names(missing)} is in no DistributedDataParallel or fully_shard module, so the ranks may "
                f"have begun with different values of it. Wrap its module too: DistributedDataParallel(module)."
            )

    def check_may_meet(self) -> None:
        """Raise unless layers of the ranks can meet in backward: nothing else may be reduced there."""
        if self.group is None or self.group.size() == 1:
            return
        if self._sharded:
            raise DistributedError(
                'batch_norm="exact" joins statistics of ranks under DistributedDataParallel, not under fully_shard. '
                'Wrap the model in the former, or give batch_norm="merge".'
            )
        if self._overlaps:
            raise OptionError(
                'batch_norm="exact" over several ranks has exchanges of its own in backward, which those of '
                'reduce="overlap" would come between: give reduce="after".'
            )

    def begin(self) -> None:
        """Before the first forward of a step: nothing is reduced, unless ``before_micro_batch`` says so."""
        self._before = [(ddp.require_backward_grad_sync, ddp.require_forward_param_sync) for ddp in self._ddps]
        self.before_micro_batch(is_last=False)
        if not self.is_quiet:
            self.rebuild_buckets()

    def rebuild_buckets(self) -> None:
        """Let DDP put its buckets in order, where it has reduced for the first time. A collective.

        DDP would do it in its next forward with gradients, which not every rank runs, or not between the same
        exchanges.
        """
        if self.group is not None and self.group.size() > 1:
            for ddp in self._ddps:
                ddp._has_rebuilt_buckets |= ddp.reducer._rebuild_buckets()

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Let the engines reduce in the backward that follows, or not."""
        for ddp in self._ddps:
            ddp.require_backward_grad_sync = is_last and self._overlaps and not self.is_quiet
            # Buffers are broadcast in a forward, where not every rank may be.
            ddp.require_forward_param_sync = False
        for module in self._sharded:
            module.set_requires_gradient_sync(is_last or self.when == "each", recurse=False)

    def end(self) -> None:
        """After the last backward: as it was before."""
        for ddp, (backward, forward) in zip(self._ddps, self._before, strict=True):
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = backward, forward
        for module in self._sharded:
            module.set_requires_gradient_sync(True, recurse=False)
        self._before = []

    def abandon(self) -> None:
        """A backward has failed: forget gradients that lie inside FSDP2, and gather nothing any more."""
        for module in self._sharded:
            for group in _param_groups(module):
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
            if module._get_fsdp_state()._is_root:
                module._get_fsdp_state()._reset_iter_state()

    def check_one_backward(self) -> None:
        """Raise ``OptionError`` when the micro-batches need several backwards each, and engines reduce in the first."""
        if self.reduces_inside:
            raise OptionError(
                "The loss has denominators that are known only after the forward, which need a backward each, and "
                "gradients are summed over the ranks inside the first. Return means with weight={term: ...}"
                + (', or give reduce="after".' if self._overlaps else ".")
            )

    def check_reduced(self) -> None:
        """Raise ``GradientError`` unless DDP has reduced all of its parameters, in the step in which it did not."""
        for ddp in self._ddps if self._overlaps and not self.is_quiet else ():
            try:
                ddp.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise GradientError(
                    "DistributedDataParallel waits for gradients of parameters that the last micro-batch did not use. "
                    'Give reduce="after", which needs no rank to use them, or find_unused_parameters=True. '
                    f"Torch says: {str(error).partition(chr(10))[0]}"
                ) from error

    def sum_up(self, done: Accumulation, presence: Sequence[Sequence[float]]) -> None:
        """Correct the gradients, and sum those that no engine has summed.

        Args:
            done: The micro-batches of this rank.
            presence: What ``packed`` gave, by rank.
        """
        done.gradients.correct(done.shares.take_corrections())
        parameters = done.gradients.parameters
        inside = {id(p) for module in self._sharded for p in module.parameters()}
        if self._overlaps:
            inside |= {id(p) for ddp in self._ddps for p in ddp.parameters()}
        kinds = [_kinds_of(words, len(parameters)) for words in presence]
        wanted: list[tuple[torch.Tensor, int]] = []
        for i, p in enumerate(parameters):
            found = {kind[i] for kind in kinds} - {NONE}
            if found and id(p) not in inside:
                wanted.append((p, DENSE if DENSE in found else SPARSE))
        scale = self.scale
        for p, kind in wanted:
            if kind == SPARSE:
                self._reduce_sparse(p)
            elif p.grad is None or p.grad.is_sparse:
                insist(lambda p=p: _fill(p))
        for bucket in in_buckets([p.grad for p, kind in wanted if kind == DENSE and p.grad is not None]):
            self._reduce_bucket(bucket)
        if scale != 1.0:
            for p, _ in wanted:
                if p.grad is not None:
                    p.grad.div_(scale)

    def _reduce_bucket(self, bucket: list[torch.Tensor]) -> None:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=self.group)
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=self.group)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view(gradient.shape))
        # A thread of gloo may hold it a little longer, into the update; its memory is wanted there.
        flat.untyped_storage().resize_(0)

    def _reduce_sparse(self, p: torch.Tensor) -> None:
        if p.grad is None:
            indices = torch.zeros((1, 0), dtype=torch.int64, device=p.device)
            values = p.new_zeros((0, *p.shape[1:]), dtype=p.grad_dtype or p.dtype)
            p.grad = torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)
        p.grad = p.grad.coalesce()
        dist.all_reduce(p.grad, group=self.group)
        p.grad = p.grad.coalesce()

    def send_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, as DDP does before a forward."""
        for ddp in self._ddps:
            if ddp.forward_sync_buffers and ddp.modules_buffers:
                ddp._sync_buffers()


def packed(codes: Sequence[int]) -> list[float]:
    """What ``Gradients.presence`` gave, in few numbers."""
    words = [codes[i : i + _PER_WORD] for i in range(0, len(codes), _PER_WORD)]
    return [float(sum(code << (_BITS * i) for i, code in enumerate(word))) for word in words]


def num_words(num_parameters: int) -> int:
    """How many numbers say which of the parameters have a gradient."""
    return -(-num_parameters // _PER_WORD)


def _fill(p: torch.Tensor) -> None:
    p.grad = torch.zeros_like(p, dtype=p.grad_dtype or p.dtype) if p.grad is None else p.grad.to_dense()


def _kinds_of(words: Sequence[float], count: int) -> list[int]:
    mask = (1 << _BITS) - 1
    return [int(words[i // _PER_WORD]) >> (_BITS * (i % _PER_WORD)) & mask for i in range(count)]


def _is_sharded(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported for this: a model that has it has imported it
    if fsdp is None:
        return False
    if isinstance(module, fsdp.FullyShardedDataParallel):
        raise DistributedError(
            "The model is in a FullyShardedDataParallel (FSDP1), which cannot keep a step exact here. Use FSDP2: "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    return isinstance(module, fsdp.FSDPModule)


def _param_groups(module: Any) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups


def _group_of(ddps: Sequence[Any], sharded: Sequence[Any]) -> dist.ProcessGroup | None:
    """The process group that all of them are in."""
    groups = [ddp.process_group for ddp in ddps]
    for module in sharded:
        for group in _param_groups(module):
            mesh = group.mesh_info.mesh
            whole = mesh.ndim > 1 and mesh.size() == dist.get_world_size()
            groups.append(dist.group.WORLD if whole else mesh.get_group())
    if not groups:
        return None
    members = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    if len(members) > 1:
        raise DistributedError(f"Modules of the model are spread over different ranks: {sorted(members)}.")
    return groups[0]


def _check_alone() -> None:
    """Raise ``DistributedError`` where there are other ranks, which nothing in the model keeps equal to this one."""
    if num_ranks() > 1:
        raise DistributedError(
            f"The process group has {num_ranks()} ranks, but nothing in the model keeps them equal. Wrap it: "
            f"DistributedDataParallel(model), or fully_shard(model). If each rank is to train a model of its own, give "
            f"each a process group of its own: DistributedDataParallel(model, process_group=...)."
        )
