"""Containers of a batch: what is inside by name, and the same container with other contents."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from bigbatch.batch.structure import children, holds_arrays, joined, mapped, rebuilt

transformers = pytest.importorskip("transformers")


class Typed(NamedTuple):
    x: Any
    y: Any


Untyped = namedtuple("Untyped", ["x", "y"])


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any = None
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


@dataclasses.dataclass(kw_only=True)
class Derived(Plain):
    weight: Any = 0.5


@dataclasses.dataclass
class Prepared:
    """A second ``__post_init__`` would centre again; ``__init__`` does not take ``x``, and has an argument more."""

    raw: dataclasses.InitVar[Any]
    y: Any
    x: Any = dataclasses.field(init=False)

    def __post_init__(self, raw: Any) -> None:
        self.x = raw * 10 + 1


def prepared(x: Tensor, y: Tensor) -> Prepared:
    """Holds ``x`` and ``y`` themselves, although ``__init__`` changes what it is given."""
    new = Prepared(0, y)
    new.x = x
    return new


class Annotated(dict):
    """A dict of one's own with something on it."""

    source = "unknown"


def annotated(x: Tensor, y: Tensor) -> Annotated:
    new = Annotated(x=x, y=y)
    new.source = "file 7"
    return new


def by_name(value: Any) -> tuple[Any, Any]:
    return value["x"], value["y"]


def by_attribute(value: Any) -> tuple[Any, Any]:
    return value.x, value.y


def by_place(value: Any) -> tuple[Any, Any]:
    return value[0], value[1]


class Container(NamedTuple):
    """How to make a container of two tensors, and how to read them again."""

    make: Callable[[Any, Any], Any]
    read: Callable[[Any], tuple[Any, Any]]


CONTAINERS = {
    "dict": Container(lambda x, y: {"x": x, "y": y}, by_name),
    "dict with other keys": Container(lambda x, y: {0: x, ("a", 1): y}, lambda value: (value[0], value["a", 1])),
    "list": Container(lambda x, y: [x, y], by_place),
    "tuple": Container(lambda x, y: (x, y), by_place),
    "namedtuple": Container(Untyped, by_attribute),
    "NamedTuple": Container(Typed, by_attribute),
    "dataclass": Container(Plain, by_attribute),
    "frozen dataclass": Container(Frozen, by_attribute),
    "frozen dataclass with slots": Container(Slotted, by_attribute),
    "derived dataclass": Container(lambda x, y: Derived(x, y, weight=2.0), by_attribute),
    "dataclass with __post_init__ and init=False": Container(prepared, by_attribute),
    "OrderedDict": Container(lambda x, y: OrderedDict(y=y, x=x), by_name),
    "defaultdict": Container(lambda x, y: defaultdict(list, x=x, y=y), by_name),
    "UserDict": Container(lambda x, y: UserDict(x=x, y=y), by_name),
    "MappingProxyType": Container(lambda x, y: types.MappingProxyType({"x": x, "y": y}), by_name),
    "dict of one's own": Container(annotated, by_name),
    "BatchEncoding": Container(lambda x, y: transformers.BatchEncoding({"x": x, "y": y}), by_name),
    "BatchFeature": Container(lambda x, y: transformers.BatchFeature({"x": x, "y": y}), by_name),
    "ModelOutput": Container(
        lambda x, y: transformers.modeling_outputs.CausalLMOutput(logits=x, hidden_states=(y,)),
        lambda value: (value.logits, value["hidden_states"][0]),
    ),
    "what torch.max returns": Container(lambda x, y: torch.return_types.max((x, y)), lambda v: (v.values, v.indices)),
    "tuple in dict": Container(lambda x, y: {"in": (x, None), "y": [y]}, lambda value: (value["in"][0], value["y"][0])),
    "((x, x), y)": Container(lambda x, y: ((x, x), y), lambda value: (value[0][1], value[1])),
    "dict in dataclass in list": Container(
        lambda x, y: [Plain({"x": x}), {"deep": Typed(1, [y])}], lambda value: (value[0].x["x"], value[1]["deep"].y[0])
    ),
}
every_container = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)


@every_container
def test_mapping_changes_tensors_and_keeps_types(container):
    x, y = torch.arange(4.0), torch.arange(4)
    before = container.make(x, y)

    after = mapped(lambda value: value + 1 if isinstance(value, Tensor) else value, before)

    assert type(after) is type(before)
    found_x, found_y = container.read(after)
    assert torch.equal(found_x, x + 1)
    assert torch.equal(found_y, y + 1)
    assert container.read(before)[0] is x, "the original was changed"


@every_container
def test_a_container_is_made_again_from_its_contents(container):
    before = container.make(torch.arange(4.0), torch.arange(4))

    after = rebuilt(before, [inner for _, inner in children(before) or ()])

    assert type(after) is type(before)
    assert after is not before
    assert all(found is wanted for found, wanted in zip(container.read(after), container.read(before), strict=True))


@every_container
def test_a_tensor_is_found_in_every_container(container):
    assert holds_arrays(container.make(torch.arange(4.0), torch.arange(4)))


def test_the_factory_of_a_defaultdict_survives():
    after = mapped(lambda value: value, defaultdict(list, x=torch.arange(2)))

    assert after["new"] == []


def test_the_order_of_a_dict_survives():
    assert list(mapped(lambda value: value, OrderedDict(y=torch.arange(2), x=torch.arange(2)))) == ["y", "x"]


def test_attributes_of_a_dict_of_ones_own_survive():
    assert mapped(lambda value: value, annotated(torch.arange(2), torch.arange(2))).source == "file 7"


def test_fields_without_tensors_survive():
    after = mapped(lambda value: value, Derived(torch.arange(2), name="mine", weight=2.0))

    assert (after.name, after.weight, after.y) == ("mine", 2.0, None)


def test_a_dataclass_is_not_initialised_again():
    """Control: making it anew, or ``dataclasses.replace``, would."""
    first = Prepared(torch.arange(3), torch.arange(3))

    after = mapped(lambda value: value, first)

    assert torch.equal(after.x, torch.arange(3) * 10 + 1)
    with pytest.raises((TypeError, ValueError), match="raw|init=False"):
        dataclasses.replace(first, x=first.x)


@pytest.mark.parametrize("leaf", [None, "text", b"bytes", 3, 2.5, True, range(3), len, object(), {1, 2}, slice(1)])
def test_other_values_are_leaves_and_passed_on(leaf):
    assert children(leaf) is None
    assert mapped(lambda value: value, {"a": leaf})["a"] is leaf


@pytest.mark.parametrize("leaf", [["a", "b"], ("a",), [1, 2], [[1], ["b"]], [], (), [None], ("a", {"b": "c"})])
def test_a_list_without_tensors_is_a_leaf(leaf):
    assert children(leaf) is None
    assert not holds_arrays(leaf)


@pytest.mark.parametrize("empty", [{}, Untyped(1, "a"), Plain("a")])
def test_containers_that_name_their_contents_are_no_leaves_without_tensors(empty):
    assert children(empty) is not None
    assert not holds_arrays(empty)


def test_a_dataclass_itself_is_a_leaf():
    assert children(Plain) is None
    assert children(Typed) is None


def test_contents_are_named():
    x = torch.arange(2)

    assert [name for name, _ in children({"a": x, 3: x}) or ()] == ["a", "3"]
    assert [name for name, _ in children((x, None)) or ()] == ["0", "1"]
    assert [name for name, _ in children(Typed(x, x)) or ()] == ["x", "y"]
    assert [name for name, _ in children(Plain(x)) or ()] == ["x", "y", "name"]


def test_paths_are_dotted():
    assert joined("", "x") == "x"
    assert joined("inputs.0", "x") == "inputs.0.x"


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(2),
        torch.tensor(1.0),
        np.arange(2),
        [torch.arange(2)],
        [["a"], [{"deep": Plain(torch.arange(2))}]],
        {"a": {"b": np.arange(2)}},
        pack_sequence([torch.arange(2)]),
        [pack_sequence([torch.arange(2)])],
        np.arange(2).view(type("Mine", (np.ndarray,), {"__module__": "mine"})),
        np.ma.array([1, 2]),
    ],
)
def test_arrays_are_found_wherever_they_are(value):
    assert holds_arrays(value)


@pytest.mark.parametrize(
    "value", [None, "a", [1, 2], {"a": "b"}, Counter("aab"), Plain("a"), np.dtype("f4"), np.sum, np.float64(1.0)]
)
def test_nothing_else_is_taken_for_an_array(value):
    assert not holds_arrays(value)


def test_a_packed_sequence_is_no_tuple_to_take_apart():
    """It is a namedtuple whose fields are not cut along samples."""
    assert children(pack_sequence([torch.arange(2)])) is None


class SizedList(list):
    """Its constructor takes more than its contents."""

    def __init__(self, contents: Any, *, size: int):
        super().__init__(contents)
        self.size = size


class Doubled(Untyped):
    """Its constructor takes other things than its fields."""

    def __new__(cls, both: Any) -> Doubled:
        return super().__new__(cls, both, both)


def test_a_list_with_a_constructor_of_its_own_survives():
    after = mapped(lambda value: value, SizedList([torch.arange(2)], size=7))

    assert type(after) is SizedList
    assert after.size == 7


def test_a_namedtuple_with_a_constructor_of_its_own_survives():
    after = mapped(partial(torch.add, 1), Doubled(torch.arange(2)))

    assert type(after) is Doubled
    assert torch.equal(after.y, torch.arange(2) + 1)
