from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigbatch.memory.fakes import fake_copy


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = {"a": [1, 2]}


def test_a_copy_has_the_same_shapes_and_flags_and_no_numbers():
    model = Tied()
    model.embed.weight.requires_grad_(False)
    model.eval()

    fake = fake_copy(model, FakeTensorMode())

    assert type(fake) is Tied
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        other = fake.get_parameter(name) if isinstance(tensor, nn.Parameter) else fake.get_buffer(name)
        assert isinstance(other, FakeTensor)
        assert isinstance(other, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert (other.shape, other.dtype, other.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert (other.requires_grad, other.is_leaf) == (tensor.requires_grad, True)
    assert not fake.training
    assert fake.note == model.note
    assert fake.note is not model.note


def test_what_is_shared_is_shared_in_the_copy():
    model = Tied()
    whole = torch.randn(6, 4)
    fake, (top, bottom), optimizer = fake_copy(
        (model, (whole[:3], whole[3:]), torch.optim.SGD(model.parameters(), lr=0.1).param_groups), FakeTensorMode()
    )

    assert fake.head.weight is fake.embed.weight
    assert optimizer[0]["params"][0] is fake.embed.weight
    assert top.untyped_storage()._cdata == bottom.untyped_storage()._cdata
    assert top.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    assert (bottom.storage_offset(), top.storage_offset()) == (12, 0)
    # Control: two tensors that share nothing do not.
    assert fake.mask.untyped_storage()._cdata != fake.scratch.untyped_storage()._cdata


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(4, 3).T, lambda: torch.randn(4, 6)[:, ::2], lambda: torch.ones(1).expand(5)]
)
def test_strides_are_kept(make):
    tensor = make()
    fake = fake_copy([tensor], FakeTensorMode())[0]

    assert (fake.shape, fake.stride(), fake.storage_offset()) == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )


def test_a_model_on_meta_is_copied_to_fakes_that_say_cpu():
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**20)

    fake = fake_copy(model, FakeTensorMode())

    assert fake.weight.device.type == "cpu"
    assert fake.weight.untyped_storage().nbytes() == 4 * 2**40  # no machine has them


def test_the_original_is_only_read():
    model = Tied()
    before = copy.deepcopy(model.state_dict()), [p._version for p in model.parameters()], list(vars(model))
    random_state = torch.get_rng_state()

    fake_copy(model, FakeTensorMode())

    assert [p._version for p in model.parameters()] == before[1]
    assert list(vars(model)) == before[2]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(isinstance(p, FakeTensor) for p in model.parameters())


class Special(torch.Tensor):
    """A class that could do anything in its operations."""


@pytest.mark.parametrize(
    ("value", "match"),
    [(torch.eye(3).to_sparse(), "layout"), (torch.ones(3).as_subclass(Special), "class Special")],
    ids=["sparse", "a class of its own"],
)
def test_what_has_no_fake_is_an_error(value, match):
    with pytest.raises(TypeError, match=match):
        fake_copy([value], FakeTensorMode())
