"""Put normalization that looks at one sample alone in the place of BatchNorm, which couples the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.errors import OptionError, warn
from bigbatch.stepping.checks import check_model
from bigbatch.units import format_names
from bigbatch.values import check_positive

_Model = TypeVar("_Model", bound=nn.Module)

_TORCHS_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = {nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}
# One value of an input of shape (N, C) is all that a channel has, so a group needs several channels for a variance.
_CHANNELS_IN_A_GROUP_OF_1D = 8


def to_group_norm(model: _Model, *, num_groups: int = 32) -> _Model:
    """Replace each BatchNorm by a ``GroupNorm``, in place: gradients no longer depend on how a batch is cut.

    Weight and bias are carried over as the same parameters, so an optimizer that has them keeps them; so are dtype,
    device, mode, hooks and names. The running statistics go: the model is another one, and is to be trained on (Wu and
    He, 2018, https://arxiv.org/abs/1803.08494).

    >>> import torch
    >>> to_group_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24

    Args:
        model: Or a single layer.
        num_groups: At most; of a layer the largest number that divides its channels and leaves two in a group (in a
            BatchNorm1d eight, where there are as many: its input may have no other values).

    Returns:
        The model; another object only when it is a BatchNorm itself.

    Raises:
        OptionError: A layer cannot be converted; it is named, and nothing was changed.
    """
    check_positive("num_groups", num_groups)
    return _converted(model, lambda layer: _group_norm(layer, num_groups), "GroupNorm")


def to_layer_norm(model: _Model) -> _Model:
    """Replace each BatchNorm by layer normalization: all channels and places of a sample together.

    It is ``GroupNorm`` of one group, which has a weight for each channel as BatchNorm has (``nn.LayerNorm`` has one
    for each place too). What is carried over, and what is raised, as in ``to_group_norm``.
    """
    return _converted(model, lambda layer: _group_norm(layer, 1), "LayerNorm")


def to_instance_norm(model: _Model) -> _Model:
    """Replace each BatchNorm2d and BatchNorm3d by instance normalization: each channel of a sample alone.

    What is carried over, and what is raised, as in ``to_group_norm``. BatchNorm1d and SyncBatchNorm are refused: their
    input may be of shape (N, C), where a channel of a sample has one value and no variance.
    """
    return _converted(model, _instance_norm, "InstanceNorm")


def _converted(model: _Model, convert: Callable[[nn.Module], nn.Module], wanted: str) -> _Model:
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not layers:
        warn(f"The model has no BatchNorm layer, so nothing was converted to {wanted}.")
        return model
    strange = [_named(name, layer) for name, layer in layers.items() if type(layer) not in _TORCHS_OWN]
    if strange:
        raise OptionError(
            f"Not torch's own BatchNorm: {format_names(strange)}. What such a layer does beside normalizing (an "
            f"activation, a parametrization, a size that is not known yet) would be lost. Convert it yourself, or run "
            f"the model once if it is lazy. Nothing was changed."
        )
    new = {name: _with_state_of(layer, _tried(convert, name, layer)) for name, layer in layers.items()}
    by_old = {id(layers[name]): layer for name, layer in new.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in by_old:
                parent._modules[name] = by_old[id(child)]
    return by_old.get(id(model), model)  # pyright: ignore[reportReturnType]


def _named(name: str, layer: nn.Module) -> str:
    return f"{name or 'the model'} ({type(layer).__name__})"


def _tried(convert: Callable[[nn.Module], nn.Module], name: str, layer: nn.Module) -> nn.Module:
    try:
        return convert(layer)
    except OptionError as error:
        raise OptionError(f"{_named(name, layer)} {error} Nothing was changed.") from None


def _group_norm(layer: nn.Module, most_groups: int) -> nn.Module:
    assert isinstance(layer, _BatchNorm)
    channels, is_1d = layer.num_features, not isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d)
    if channels == 1 and is_1d:
        raise OptionError("has 1 channel, and its input may have no other values: they would all become 0.")
    in_a_group = min(_CHANNELS_IN_A_GROUP_OF_1D if is_1d else 2, channels)
    fitting = [n for n in range(1, min(most_groups, channels) + 1) if channels % n == 0 and channels // n >= in_a_group]
    return nn.GroupNorm(fitting[-1], channels, eps=layer.eps, affine=False)


def _instance_norm(layer: nn.Module) -> nn.Module:
    assert isinstance(layer, _BatchNorm)
    kind = _INSTANCE.get(type(layer))  # pyright: ignore[reportArgumentType]
    if kind is None:
        raise OptionError("may get an input of shape (N, C), where a channel of a sample has one value: no variance.")
    return kind(layer.num_features, eps=layer.eps)


def _with_state_of(old: nn.Module, new: nn.Module) -> nn.Module:
    """The new layer with parameters, mode and hooks of the old one."""
    new.affine = old.affine
    for name in ("weight", "bias"):
        parameter = old._parameters[name]
        assert parameter is None or isinstance(parameter, torch.nn.Parameter)
        new.register_parameter(name, parameter)
    new.training = old.training
    for name, hooks in vars(old).items():
        if name.startswith(("_forward_", "_backward_", "_is_full_backward")):
            setattr(new, name, hooks)
    return new
