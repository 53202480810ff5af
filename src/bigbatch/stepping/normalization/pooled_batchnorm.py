r"""BatchNorm over all micro-batches of a step: loss, gradient and running statistics of the big batch.

The forwards of the micro-batches run in lock-step. A layer takes the mean and the sum of squared differences of its
micro-batch, and waits for the others; those of the batch follow by Chan's formula,

$$ \mu = \sum_k \frac{n_k}{N} \mu_k, \qquad N \sigma^2 = \sum_k M_k + n_k (\mu_k - \mu)^2, $$

as operations that autograd sees. So all micro-batches are one graph, and one backward gives what the big batch gives.
Proof and measurements are those of the design notes on exactness; nothing of it is an approximation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bigbatch.errors import BatchError, LossError, OptionError, warn
from bigbatch.memory.offloading import Host, host_of
from bigbatch.memory.saved_on_host import SavedOnHost
from bigbatch.memory.switching import computing, has_forward_of_its_own
from bigbatch.stepping.compiled import is_compiled
from bigbatch.stepping.distributed.meetings import END, Meetings
from bigbatch.stepping.normalization.batchnorm import layers_of, update_running_statistics, uses_batch_statistics
from bigbatch.stepping.normalization.lockstep import Lockstep, Worker, this_worker
from bigbatch.stepping.normalization.pooling import Call, Normalise, Part, Pool, Statistics
from bigbatch.stepping.shares import Group, Share
from bigbatch.units import format_names

_ONE_PATH = (
    'With batch_norm="exact" all micro-batches go through the same BatchNorm layers in the same order. Where the path '
    'depends on samples or on chance (early exit, layer drop), give batch_norm="merge" or "frozen".'
)
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

_Place = tuple[dict[str, Any], str, Any]
"""Where a module has a parameter or buffer, and which."""


class _Request(NamedTuple):
    """What a micro-batch brings to a layer: values per channel, their mean and variance, shape ``(C,)``."""

    layer: _BatchNorm
    num_values: int
    mean: torch.Tensor
    variance: torch.Tensor
    x: torch.Tensor


class PooledBatchNorm:
    """The BatchNorm layers of a model over all micro-batches of a step.

    Use: ``running`` around ``forwards`` and the backward, then ``commit`` or ``forget``.

    Args:
        model: Whose layers.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._layers = layers_of(model)
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: dict[_BatchNorm, list[Call]] = {}
        self._lockstep: Lockstep | None = None
        self._saved: SavedOnHost | None = None
        self._meetings: Meetings | None = None
        self._is_idle = False
        self._token: torch.Tensor | None = None
        self._tensors: list[_Place] = []
        self._tensors_of: dict[nn.Module, list[_Place]] = {}
        self._has_looked_for_state = False
        self.roots: list[torch.Tensor] = []  # the leaf that all meetings of ranks lead to in backward
        self.host: Host | None = None

    def is_needed(self) -> bool:
        """Whether some layer normalises by the batch it gets now."""
        return any(uses_batch_statistics(layer, "exact") for layer in self._layers)

    @property
    def failed(self) -> int | None:
        """Number of the micro-batch whose forward raised; None when it was another thing that did."""
        return self._lockstep.failed if self._lockstep else None

    @contextlib.contextmanager
    def running(
        self,
        device: torch.device,
        batch: Sequence[torch.Tensor],
        *,
        meetings: Meetings | None = None,
        is_idle: bool = False,
    ) -> Iterator[None]:
        """Within the block the layers meet.

        Args:
            device: Of the model.
            batch: The tensors of the micro-batches.
            meetings: With other ranks.
            is_idle: The samples are none of the batch; this rank has none.

        Raises:
            OptionError: Some layer cannot; the message says which and why.
        """
        layers = [layer for layer in self._layers if uses_batch_statistics(layer, "exact")]
        self._check(layers)
        self._calls, self.host = {}, host_of(device)
        self._tensors = [place for module in self._model.modules() for place in _places_of(module)]
        self._tensors_of = {layer: list(_places_of(layer)) for layer in layers}
        if self.host is not None:
            stay = [*self._model.parameters(), *self._model.buffers(), *batch]
            self._saved = SavedOnHost(self.host, stay)
        self._meetings, self._is_idle = meetings, is_idle
        self._token = torch.zeros((), device=device, requires_grad=True) if meetings else None
        self.roots = [] if self._token is None else [self._token]
        self._lockstep = Lockstep(device, self)
        try:
            with contextlib.ExitStack() as stack:
                for layer in layers:
                    stack.enter_context(computing(layer, partial(_forward, self)))
                yield
        finally:
            self._saved = self._lockstep = self._meetings = self._token = None
            self.roots, self._tensors, self._tensors_of = [], [], {}

    def forwards(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the forwards of all micro-batches return; they run side by side.

        Raises:
            LossError: They came to different layers.
        """
        assert self._lockstep is not None
        before = self._has_looked_for_state or _activations_on(self._model)
        found = self._lockstep.run([partial(self._listened, function) for function in functions])
        if before is not True:
            self._has_looked_for_state = True
            _warn_of_state(_activations_on(self._model) - before)
        return found

    def _listened(self, function: Callable[[], Any]) -> Any:
        with self._saved.listening() if self._saved else contextlib.nullcontext():
            return function()

    def commit(self) -> None:
        """The step counts: update running statistics once for each call of a layer, as the big batch would."""
        calls, self._calls = self._calls, {}
        for layer, of_layer in calls.items():
            if layer.training and layer.track_running_stats and layer.running_mean is not None:
                for call in of_layer:
                    update_running_statistics(layer, call.merged)

    def forget(self) -> None:
        """The step does not count."""
        self._calls = {}

    def meet(self, requests: list[_Request]) -> tuple[torch.Tensor, torch.Tensor, Call]:
        """Mean and variance of the whole batch, of what the micro-batches have brought."""
        layer = requests[0].layer
        if any(request.layer is not layer for request in requests):
            raise self.differ(dict(enumerate(requests)))
        counts = [0 if self._is_idle else request.num_values for request in requests]
        call = Call(layer, counts, self._layers.index(layer), self._meetings)
        pool: Any = Pool.apply
        means, variances = [request.mean for request in requests], [request.variance for request in requests]
        mean, variance, self._token = pool(call, layer.weight, layer.bias, self._token, *means, *variances)
        self._check_places(call.places)
        if call.total == 1:
            if self._meetings is not None:
                self._meetings.all_know()
            raise BatchError(
                f"The BatchNorm layer {self._names[layer]!r} got one value per channel in the whole batch, which has "
                f'no variance. Give a batch of at least 2 samples, or batch_norm="frozen".'
            )
        call.has_graph = any(one.requires_grad for one in means)
        self._calls.setdefault(layer, []).append(call)
        return mean, variance, call

    def check_all_are_there(self) -> None:
        """Raise ``LossError`` when a backward runs while forwards do."""
        if self._lockstep is not None and self._lockstep.is_running:
            raise LossError(
                "The loss runs a backward through BatchNorm in its forward (torch.autograd.grad, a gradient penalty). "
                'With batch_norm="exact" the other micro-batches are not there yet, and their part would be missing. '
                'Give batch_norm="merge" or "frozen".'
            )

    def check_may_pause(self, layer: _BatchNorm, worker: Worker | None) -> None:
        """Raise ``LossError`` where others would go on, or this one would, with what is not theirs."""
        if worker is None:
            if self._lockstep is not None and self._lockstep.is_running:
                raise LossError(
                    f"The BatchNorm layer {self._names[layer]!r} is called in another thread while the forwards of the "
                    f'micro-batches run, and with batch_norm="exact" they take turns in one. Call it in the thread of '
                    f'the step, or give batch_norm="merge".'
                )
            return
        if _is_in_custom_operator():
            raise LossError(
                f"The BatchNorm layer {self._names[layer]!r} is called in the body of a custom operator "
                f'(torch.library), which cannot wait there for the other micro-batches. Give batch_norm="merge".'
            )
        known = self._tensors if worker.has_not_paused else self._tensors_of[layer]
        if any(kept.get(name) is not tensor for kept, name, tensor in known):
            raise LossError(
                f"When the forward comes to the BatchNorm layer {self._names[layer]!r}, other tensors are in the place "
                f"of parameters or buffers of the model (torch.func.functional_call). With "
                f'batch_norm="exact" the forwards take turns, and each would put back those of another. Call the '
                f'model itself, or give batch_norm="merge".'
            )

    def differ(self, found: dict[int, _Request | None]) -> Exception:
        """The error of micro-batches that came to different layers, or to the end of the forward."""
        (first, there), *others = found.items()
        where = there and there.layer
        other, here = next((n, r) for n, r in others if (r and r.layer) is not where)
        return LossError(
            f"Micro-batch {first + 1} came to {self._place(there)} when micro-batch {other + 1} came to "
            f"{self._place(here)}. {_ONE_PATH}"
        )

    def end_forwards(self, digest: int, groups: Sequence[Group]) -> tuple[list[int], list[Share]]:
        """Meet with the ranks once more, when the losses are known.

        Args:
            digest: Of what all ranks must have the same.
            groups: Of the backwards that come next.

        Returns:
            The digest of each rank; and what all ranks begin each backward with, so that it goes through all meetings,
            in one order, whatever the losses reach.

        Raises:
            LossError: A rank is still in its forward.
        """
        if self._meetings is None or self._token is None:
            return [digest], []
        places, digests = self._meetings.end_forward(digest, len(groups))
        self._check_places(places)
        return digests, [Share(group, self._token, 0.0) for group in groups]

    def _check_places(self, places: list[int]) -> None:
        """Raise ``LossError``, on all ranks, when they came to different layers."""
        if len(set(places)) > 1 and self._meetings is not None:
            self._meetings.all_know()
            said = [
                "the end of its forward" if place == END else f"the layer {self._names[self._layers[place]]!r}"
                for place in places
            ]
            other = next(rank for rank, place in enumerate(places) if place != places[0])
            raise LossError(f"Rank 0 came to {said[0]} when rank {other} came to {said[other]}. {_ONE_PATH}")

    def _place(self, request: _Request | None) -> str:
        return "the end of its forward" if request is None else f"the layer {self._names[request.layer]!r}"

    def pause(self, request: _Request) -> Any:
        """Free what the paused forward holds and the host has."""
        return self._saved.give_up(request.x) if self._saved else None

    def go_on(self, paused: Any) -> None:
        """Give it back."""
        for returned in paused or ():
            returned.come_back()

    def recorded(self, layer: _BatchNorm, mean: torch.Tensor) -> Call:
        """The call that is made again inside backward.

        Args:
            mean: Of the micro-batch. It tells the calls apart where there were several, because what is recomputed is
                a part of the forward, and may begin with any of them.

        Raises:
            LossError: It is that of several calls, whose batches are not the same.
        """
        calls = self._calls[layer]
        if len(calls) == 1:
            return calls[0]
        distances = [float((call.means - mean).abs().amax(1).min()) for call in calls]
        call, *others = [call for call, far in zip(calls, distances, strict=True) if far == min(distances)]
        if any(not torch.equal(call.mean, other.mean) for other in others):
            raise LossError(
                f"The layer {self._names[layer]!r} is called several times and recomputed in backward, and in two "
                f"of its calls a micro-batch brought the same input, so they cannot be told apart. Do not "
                f'recompute what calls it, or give batch_norm="merge".'
            )
        return call

    def _check(self, layers: Sequence[_BatchNorm]) -> None:
        own = [
            self._names[layer]
            for layer in layers
            if type(layer).forward not in _FORWARDS or has_forward_of_its_own(layer)
        ]
        if own:
            raise OptionError(
                f'batch_norm="exact" takes the place of the forward of BatchNorm, but {format_names(own)} '
                f"{'has' if len(own) == 1 else 'have'} a forward of "
                f'{"its" if len(own) == 1 else "their"} own. Take torch\'s layer, or give batch_norm="merge".'
            )
        if is_compiled(self._model):
            raise OptionError(
                'batch_norm="exact" stops inside the layers, where compiled code cannot. Do not compile this model, or '
                'give batch_norm="merge".'
            )
        for module in self._model.modules():
            if isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None:
                raise OptionError(
                    f'batch_norm="exact" does not merge the running statistics of {type(module).__name__} layers, and '
                    f"{self._names[module]!r} has some. Make it with track_running_stats=False, or give "
                    f'batch_norm="merge".'
                )


def _forward(pooled: PooledBatchNorm, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer computes in lock-step, and when backward runs it again."""
    worker = this_worker()
    if worker is None and torch._C._current_graph_task_id() == -1:
        pooled.check_may_pause(layer, worker)
        return type(layer).forward(layer, x)  # called by somebody else meanwhile
    layer._check_input_dim(x)
    part = Part(pooled.host)
    mean, variance = Statistics.apply(x, part)  # pyright: ignore[reportGeneralTypeIssues]
    if worker is None:
        part.call = pooled.recorded(layer, mean.detach())
        if x.requires_grad and not part.call.has_graph:
            raise LossError(
                "A BatchNorm layer is in a checkpoint(use_reentrant=True), whose forward has no graph: with "
                'batch_norm="exact" the gradient through the statistics would be missing. Give use_reentrant=False.'
            )
        mean, variance = part.call.mean, part.call.variance
    else:
        pooled.check_may_pause(layer, worker)
        mean, variance, part.call = worker.meet(_Request(layer, x.numel() // x.shape[1], mean, variance, x))
    normalise: Any = Normalise.apply
    return normalise(x, mean, variance, part, pooled.check_all_are_there)


def _places_of(module: nn.Module) -> Iterator[_Place]:
    for kept in (module._parameters, module._buffers):
        for name, tensor in kept.items():
            yield kept, name, tensor


def _is_in_custom_operator() -> bool:
    """Whether torch has called what runs now as the body of an operator, below autograd.

    Its binding (pybind11) keeps a stack of such calls, and ends the process when they do not end in their order.
    """
    is_excluded, keys = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey
    # Where a mode answers for an operator the second is left out too, and inference mode leaves out the first.
    below_autograd = is_excluded(keys.AutogradFunctionality) and not is_excluded(keys.ADInplaceOrView)
    return below_autograd and not torch.is_inference_mode_enabled()


def _activations_on(model: nn.Module) -> set[tuple[str, str, int]]:
    """Tensors with a graph that modules keep as attributes: by module, attribute and identity."""
    return {
        (name, attribute, id(value))
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }


def _warn_of_state(found: set[tuple[str, str, int]]) -> None:
    if found:
        name, attribute, _ = min(found)
        warn(
            f'The module {name!r} keeps an activation in its attribute {attribute!r}. With batch_norm="exact" the '
            f"forwards of the micro-batches take turns at each BatchNorm layer, so a later layer that reads it may get "
            f"that of another micro-batch. Hand it on as an argument; if it is only looked at, all is well."
        )
