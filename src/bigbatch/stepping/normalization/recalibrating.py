"""Running statistics of BatchNorm from data, as one pass of all of it at once would leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.batch.moving import moved
from bigbatch.errors import BatchError, LossError, warn
from bigbatch.stepping.checks import check_model
from bigbatch.stepping.compiled import without_compiled_code
from bigbatch.stepping.normalization.batchnorm import Merged
from bigbatch.stepping.undo import Undo

Forward = Callable[[Any, Any], Any]


def recalibrate_batch_norm(
    model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None, exact: bool = True
) -> None:
    r"""Set the running statistics of BatchNorm layers to those of the data: mean, and unbiased variance.

    The mean of variances of batches is not the variance of the data: it is biased, and a short last batch counts as
    much as a full one. Here counts, means and squares are merged by Chan's formula in float64, by true sizes. The idea
    is that of Precise-BN (Wu and Johnson, 2021, https://arxiv.org/abs/2105.07576).

    A layer behind another one sees inputs that were normalised by batch, which is not what one pass of all data at
    once would give (about 1e-3 off). So the pass is repeated, each layer normalising by what the pass before found,
    until nothing changes: after as many passes as layers lie behind one another, at most as many as there are.

    Everything but BatchNorm runs in eval mode, without a graph: dropout would change the variance that evaluation
    meets. Layers that are in eval mode inside a model in train mode are frozen on purpose, and are left as they are.
    Random numbers are put back, and each pass draws the same.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> recalibrate_batch_norm(model, [torch.tensor([[0.0, 1.0], [4.0, 3.0]]), torch.tensor([[5.0, 5.0]])])
    >>> model[0].running_mean, model[0].running_var
    (tensor([3., 3.]), tensor([7., 4.]))

    Args:
        model: Its parameters and modes stay as they are.
        batches: A loader, or a list; of any sizes. With ``exact`` it is read several times and must give the same.
        forward: ``forward(model, batch)`` runs the model. None: ``model(batch)``, ``model(**batch)`` for a mapping, and
            ``model(batch[0])`` for a tuple or list.
        exact: False: one pass, which is exact for layers that lie behind no other BatchNorm.

    Raises:
        BatchError: There is no batch, one value per channel in all, or an iterator that can be read only once.
        LossError: No BatchNorm layer is called.

    After any error the model is as before.
    """
    check_model(model)
    layers = _layers_of(model)
    if not layers:
        warn("The model has no BatchNorm layer with running statistics (in train mode), so nothing was recalibrated.")
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    undo = Undo(model)
    undo.take(device, everywhere=True)
    try:
        with eval_mode(model), torch.no_grad(), without_compiled_code(model):
            found = _passes(model, layers, batches, forward or _forward, undo, device, exact=exact)
    finally:
        undo.restore()
    for layer, calls in found.items():
        _write(layer, calls)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode within the block."""
    # Module by module: what a user keeps in eval mode on purpose stays so.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _layers_of(model: nn.Module) -> list[_BatchNorm]:
    found = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    return [layer for layer in found if layer.training or not model.training]


_Found = dict[_BatchNorm, list[Merged]]
"""Statistics of each call of a layer in a forward; float64."""


def _passes(
    model: nn.Module,
    layers: list[_BatchNorm],
    batches: Iterable[Any],
    forward: Forward,
    undo: Undo,
    device: torch.device,
    *,
    exact: bool,
) -> _Found:
    """Statistics of all data, for each call of each layer."""
    one_pass = _Pass(layers, {})
    _run(model, one_pass, batches, forward, device)
    num_calls = sum(len(calls) for calls in one_pass.found.values())
    if not num_calls:
        raise LossError(
            "No BatchNorm layer was called. forward(model, batch) must run the model that it is given, over batches "
            "of which there is at least one."
        )
    if exact and num_calls > 1 and iter(batches) is batches:
        raise BatchError(
            f"batches is a {type(batches).__name__}, which can be read only once, and layers that lie behind one "
            f"another need several passes. Give a list or a DataLoader, or exact=False for one pass."
        )
    for _ in range(num_calls - 1 if exact else 0):
        before = one_pass.found
        undo.rng.restore()  # a loader that shuffles, or draws augmentations here, gives the same again
        one_pass = _Pass(layers, before)
        _run(model, one_pass, batches, forward, device)
        if _counts(one_pass.found) != _counts(before):
            raise BatchError(_NOT_THE_SAME)
        if _same(one_pass.found, before):
            break
    if any(call.count < 2 for calls in one_pass.found.values() for call in calls):
        raise BatchError("A BatchNorm layer got one value per channel in all batches, which has no variance.")
    return one_pass.found


def _same(found: _Found, before: _Found) -> bool:
    pairs = [(a, b) for layer in found for a, b in zip(found[layer], before[layer], strict=True)]
    return all(torch.equal(a.mean, b.mean) and torch.equal(a.squares, b.squares) for a, b in pairs)


def _counts(found: _Found) -> dict[_BatchNorm, list[float]]:
    return {layer: [call.count for call in calls] for layer, calls in found.items()}


class _Pass:
    """Collects statistics, and lets each layer normalise by those that are known.

    Args:
        layers: That are listened to.
        known: From the pass before; without them a layer normalises by the batch it sees.
    """

    def __init__(self, layers: list[_BatchNorm], known: _Found):
        self.layers = layers
        self.found: _Found = {}
        self._known = known
        self._num_calls: dict[nn.Module, int] = {}

    def begin_forward(self) -> None:
        """The next call of each layer is its first one."""
        self._num_calls = {}

    def before_call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook: count the input in, and give the layer, which is in eval mode, what it is to normalise by."""
        x = args[0] if args else kwargs["input"]
        if x.numel() == 0:
            return
        number = self._num_calls.get(layer, 0)
        self._num_calls[layer] = number + 1
        calls = self.found.setdefault(layer, [])
        dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.to(torch.float64), dims, correction=0)
        if number == len(calls):
            calls.append(Merged(count, mean.clone(), variance * count))
        else:
            calls[number].add(count, mean, variance * count)
        if self._known:
            if number >= len(self._known.get(layer, ())):
                raise BatchError(_NOT_THE_SAME)
            known = self._known[layer][number]
            mean, variance = known.mean, known.squares / known.count  # as a forward in train mode would
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)


_NOT_THE_SAME = "The batches of a second pass are not those of the first. Give a list, or exact=False for one pass."


def _run(model: nn.Module, one_pass: _Pass, batches: Iterable[Any], forward: Forward, device: torch.device) -> None:
    handles = [layer.register_forward_pre_hook(one_pass.before_call, with_kwargs=True) for layer in one_pass.layers]
    try:
        for batch in batches:
            one_pass.begin_forward()
            forward(model, moved(batch, device))
    finally:
        for handle in handles:
            handle.remove()


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _write(layer: Any, calls: list[Merged]) -> None:
    """As ``momentum=None`` from the start would after one pass: the plain average of the calls of a forward."""
    with torch.no_grad():
        layer.running_mean.copy_(torch.stack([call.mean for call in calls]).mean(0))
        layer.running_var.copy_(torch.stack([call.squares / (call.count - 1) for call in calls]).mean(0))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(len(calls))
