"""Cutting a batch: every structure is cut right, with the right rows together, or refused by path and length."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import bigbatch as bb
from bigbatch.batch.cutting import lay_out
from bigbatch.batch.sizes import micro_batch_sizes, spans
from tests.batch.test_structure import CONTAINERS, Frozen, Plain, Typed, every_container

NUM_SAMPLES = 7
micro_sizes = pytest.mark.parametrize("micro_batch_size", [1, 3, NUM_SAMPLES - 1, NUM_SAMPLES, 2 * NUM_SAMPLES])


def rows(*shape: int, start: int = 0, num_samples: int = NUM_SAMPLES) -> Tensor:
    """A tensor whose every entry says which sample it belongs to."""
    return torch.arange(start, start + num_samples).reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone()


def pieces(batch: Any, micro_batch_size: int, batch_dims: Mapping[str, int | None] | None = None) -> list[Any]:
    layout = lay_out(batch, batch_dims)
    return [layout.cut(*span) for span in spans(micro_batch_sizes(layout.num_samples, micro_batch_size))]


def shares_storage(part: Any, whole: Any) -> bool:
    if isinstance(whole, Tensor):
        return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return np.shares_memory(part, whole)


@every_container
@micro_sizes
def test_every_container_is_cut_into_its_own_type(container, micro_batch_size):
    x, y = rows(2), rows()

    found = pieces(container.make(x, y), micro_batch_size)

    assert {type(piece) for piece in found} == {type(container.make(x, y))}
    read = [container.read(piece) for piece in found]
    assert torch.equal(torch.cat([x for x, _ in read]), x)
    assert torch.equal(torch.cat([y for _, y in read]), y)


@every_container
def test_rows_that_belong_together_stay_together(container):
    for piece in pieces(container.make(rows(2), rows()), 3):
        x, y = container.read(piece)
        assert torch.equal(x[:, 0], y)


@every_container
@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_cut_arrays_are_views(container, kind):
    x, y = kind(rows(2)), kind(rows())

    for piece in pieces(container.make(x, y), 3):
        assert all(shares_storage(*pair) for pair in zip(container.read(piece), (x, y), strict=True))


def test_a_copy_is_no_view():
    """Control."""
    assert not shares_storage(rows().clone(), rows())
    assert not shares_storage(np.arange(3).copy(), np.arange(3))


@every_container
def test_a_length_that_disagrees_is_refused_in_every_container(container):
    """The pairing that Composer makes of ``((x1, x2), y)`` without a word is an error with paths and lengths."""
    with pytest.raises(bb.BatchError, match=r"same length.*( has 7, .* has 6| has 6, .* has 7)") as refused:
        lay_out(container.make(rows(2), rows()[:6]))

    assert "batch_dims={" in str(refused.value)


def test_nested_inputs_are_paired_with_their_targets():
    """Composer 0.32.1 gave one micro-batch that pairs all of x1 and x2 with the first rows of y."""
    x1, x2, y = rows(2), rows(3) + 100, rows()

    found = pieces(((x1, x2), y), 3)

    assert len(found) == 3
    for (part1, part2), targets in found:
        assert torch.equal(part1[:, 0], targets)
        assert torch.equal(part2[:, 0] - 100, targets)


def test_a_ragged_inner_tuple_is_named():
    with pytest.raises(bb.BatchError, match=r"\['0.0', '0.1'\] has 7, \['1'\] has 4.*batch_dims=\{'1': 1\}"):
        lay_out(((rows(2), rows()), rows()[:4]))


def test_a_ragged_list_of_samples_is_pointed_to_collate():
    with pytest.raises(bb.BatchError, match=r"\['0'\] has 3, \['1'\] has 5, .*a list of samples needs collate="):
        lay_out([torch.arange(3), torch.arange(5), torch.arange(4)])


def test_strings_are_cut_with_their_samples():
    batch = {"x": rows(2), "names": [f"sample {i}" for i in range(NUM_SAMPLES)], "ids": tuple(range(NUM_SAMPLES))}

    for piece in pieces(batch, 3):
        assert piece["names"] == [f"sample {i}" for i in piece["x"][:, 0].tolist()]
        assert piece["ids"] == tuple(piece["x"][:, 0].tolist())


def test_a_batch_of_strings_alone_is_cut():
    assert pieces([f"text {i}" for i in range(5)], 3) == [["text 0", "text 1", "text 2"], ["text 3", "text 4"]]
    assert pieces({"a": list("abc"), "b": tuple("def")}, 2)[1] == {"a": ["c"], "b": ("f",)}


def test_lists_that_disagree_without_tensors_are_refused():
    with pytest.raises(bb.BatchError, match=r"\['a'\] has 3, \['b'\] has 2"):
        lay_out({"a": list("abc"), "b": list("de")})


def test_what_has_no_samples_is_passed_on_as_it_is():
    names, temperature = ["cat", "dog"], torch.tensor(2.0)
    batch = {"x": rows(2), "names": names, "t": temperature, "n": None, "mode": "train", "k": 3, "np": np.float64(1)}

    for piece in pieces(batch, 3):
        assert all(piece[name] is batch[name] for name in ("names", "t", "n", "mode", "k", "np"))


def test_a_container_in_which_nothing_is_cut_is_passed_on_as_it_is():
    settings = {"scale": torch.tensor(2.0), "deep": {"mode": "train"}}

    assert all(piece[1] is settings for piece in pieces((rows(), settings), 3))


def test_a_single_tensor_is_a_batch():
    assert [piece.tolist() for piece in pieces(rows(), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece.tolist() for piece in pieces(np.arange(4), 3)] == [[0, 1, 2], [3]]


def test_one_structure_in_two_places_is_cut_in_both():
    x = rows(2)

    for piece in pieces({"a": x, "b": x, "c": [x, x]}, 3):
        assert all(torch.equal(piece["a"], other) for other in (piece["b"], *piece["c"]))


class Tagged(Tensor):
    """A tensor of one's own, as torchvision's images are."""


def test_a_tensor_of_ones_own_class_keeps_it():
    assert {type(piece) for piece in pieces(rows(2).as_subclass(Tagged), 3)} == {Tagged}


def test_the_length_is_that_of_the_samples():
    assert lay_out((rows(2), 3, None)).num_samples == NUM_SAMPLES


# ----- batch_dims


@pytest.mark.parametrize("dim", [1, -2])
def test_samples_along_another_dimension(dim):
    x = rows(5).T.unsqueeze(-1)  # (5, N, 1)

    found = pieces({"x": x, "y": rows()}, 3, {"x": dim})

    assert [piece["x"].shape for piece in found] == [(5, 3, 1), (5, 3, 1), (5, 1, 1)]
    assert all(torch.equal(piece["x"][0, :, 0], piece["y"]) for piece in found)
    assert all(shares_storage(piece["x"], x) for piece in found)


@pytest.mark.parametrize("dim", [1, -1])
def test_samples_of_a_numpy_array_along_another_dimension(dim):
    x = np.tile(np.arange(NUM_SAMPLES), (5, 1))

    found = pieces((x, rows()), 3, {"0": dim})

    assert all((piece[0][0] == piece[1].numpy()).all() and piece[0].shape[0] == 5 for piece in found)
    assert all(shares_storage(piece[0], x) for piece in found)


def test_a_single_tensor_along_another_dimension():
    assert [piece.shape for piece in pieces(torch.zeros(5, 4), 3, {"": 1})] == [(5, 3), (5, 1)]


@pytest.mark.parametrize("mask", [torch.ones(7, 7), torch.ones(3), np.ones(2), [torch.ones(3), torch.ones(2)]])
def test_what_is_declared_shared_goes_to_every_micro_batch(mask):
    found = pieces({"x": rows(), "inner": {"mask": mask}}, 3, {"inner.mask": None})

    assert len(found) == 3
    assert all(piece["inner"]["mask"] is mask for piece in found)


def test_all_below_a_shared_path_is_shared():
    inner = {"mask": torch.ones(3), "deep": [torch.ones(2)]}

    assert all(piece["inner"] is inner for piece in pieces({"x": rows(), "inner": inner}, 3, {"inner": None}))


def test_a_mask_as_long_as_the_batch_is_cut_unless_declared_shared():
    """Control: nothing but the declaration tells a (N, N) mask from per-sample rows."""
    mask = torch.ones(NUM_SAMPLES, NUM_SAMPLES)

    assert pieces((rows(), mask), 3)[0][1].shape == (3, NUM_SAMPLES)
    assert pieces((rows(), mask), 3, {"1": None})[0][1] is mask


def test_a_list_of_samples_is_made_per_sample():
    """Detection: one dict of targets for each image, with as many boxes as there are."""
    targets = [{"boxes": torch.full((i, 4), i), "id": torch.tensor(i)} for i in range(NUM_SAMPLES)]

    found = pieces({"images": rows(3, 2, 2), "targets": targets}, 3, {"targets": 0})

    for piece in found:
        assert [target["id"].item() for target in piece["targets"]] == piece["images"][:, 0, 0, 0].tolist()
        assert all(target is targets[int(target["id"])] for target in piece["targets"])


def test_a_list_of_images_is_made_per_sample_in_an_attribute():
    batch = Plain(tuple(torch.zeros(i + 1, 2) for i in range(4)), [0, 1, 2, 3])

    assert [[len(image) for image in piece.x] for piece in pieces(batch, 3, {"x": 0})] == [[1, 2, 3], [4]]
    assert [piece.y for piece in pieces(batch, 3, {"x": 0})] == [[0, 1, 2], [3]]


def test_a_list_of_dicts_that_is_not_declared_is_refused():
    """Control: the same batch without the declaration."""
    targets = [{"boxes": torch.zeros(i, 4)} for i in range(3)]

    with pytest.raises(bb.BatchError, match=r"\['images'\] has 3, \['targets.0.boxes'\] has 0, \['targets.1.boxes'\]"):
        lay_out({"images": rows(num_samples=3), "targets": targets})


def test_a_declared_list_of_another_length_is_refused():
    with pytest.raises(bb.BatchError, match=r"\['x'\] has 7, \['t'\] has 3"):
        lay_out({"x": rows(), "t": [torch.zeros(1)] * 3}, {"t": 0})


def test_dotted_paths_reach_into_everything():
    batch = [Plain({"x": Typed(rows(2).T, None)}), rows()]

    assert [piece[0].x["x"].x.shape for piece in pieces(batch, 4, {"0.x.x.x": 1})] == [(2, 4), (2, 3)]


@pytest.mark.parametrize(
    ("batch", "batch_dims", "message"),
    [
        ({"x": rows()}, {"z": 1}, r"batch_dims names \['z'\], but the batch has \['x'\]"),
        ({"x": {"a": rows()}}, {"x.b": 1}, r"batch_dims names \['x.b'\], but the batch has \['x', 'x.a'\]"),
        ((rows(), {"y": rows()}), {"1": 0}, r"batch_dims\['1'\] is 0, but 1 is a dict. Name the tensors inside"),
        ((rows(2), Typed(rows(), 1)), {"1": 0}, r"batch_dims\['1'\] is 0, but 1 is a Typed. Name the tensors"),
        ((rows(), ["a"] * 7), {"1": 1}, r"batch_dims\['1'\] is 1, but 1 is a list.*only a list can be made .*by 0"),
        ((rows(), "name"), {"1": 0}, r"batch_dims\['1'\] is 0, but 1 is a str"),
        ((rows(), torch.tensor(1)), {"1": 0}, r"batch_dims\['1'\] is 0, but 1 has no dimensions"),
        ((rows(2), rows()), {"0": 2}, r"batch_dims\['0'\] is 2, but 0 has shape \(7, 2\): .*from 0 to 1"),
        ((rows(2), rows()), {"0": -3}, r"batch_dims\['0'\] is -3, but 0 has shape \(7, 2\)"),
        ((rows(2), rows()), {"0": 1}, r"\['0'\] has 2, \['1'\] has 7"),
        ((rows(2), rows()), {"0": None, "1": None}, r"no tensor with a dimension .*split="),
        ({"a": {"x": rows()}}, {"a": None, "a.x": 0}, r"batch_dims names \['a.x'\], but the batch has \['a'\]"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(batch, batch_dims, message):
    with pytest.raises(bb.BatchError, match=message):
        lay_out(batch, batch_dims)


# ----- refused


@pytest.mark.parametrize(
    "batch", [None, "text", 3, torch.tensor(1.0), {}, Plain(None), {"a": {"b": None}}, {1, 2}, len]
)
def test_a_batch_without_samples_is_refused(batch):
    with pytest.raises(bb.BatchError, match="no samples to cut.*split="):
        lay_out(batch)


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (torch.zeros(0, 3), "batch"),
        ({"x": torch.zeros(0), "y": [torch.zeros(0, 2)]}, r"x', 'y.0"),
        ((), "batch"),
        ([], "batch"),
        ({"names": []}, "names"),
        (np.zeros((0, 2)), "batch"),
    ],
)
def test_an_empty_batch_is_refused(batch, path):
    with pytest.raises(bb.BatchError, match=rf"The batch is empty: \['{path}'\] have length 0"):
        lay_out(batch)


def self_containing_list() -> list[Any]:
    batch = [rows()]
    batch.append(batch)
    return batch


def self_containing_dict() -> dict[str, Any]:
    batch: dict[str, Any] = {"x": rows()}
    batch["again"] = [batch]
    return batch


def self_containing_dataclass() -> Plain:
    batch = Plain(rows())
    batch.y = batch
    return batch


@pytest.mark.parametrize("make", [self_containing_list, self_containing_dict, self_containing_dataclass])
def test_a_batch_that_contains_itself_is_refused(make):
    with pytest.raises(bb.BatchError, match="contains itself"):
        lay_out(make())


@dataclasses.dataclass
class Unset:
    x: Tensor
    y: Tensor = dataclasses.field(init=False)


class Bag:
    """Not a container that can be seen into."""

    def __init__(self, **contents: Any):
        self.__dict__.update(contents)


class SlotBag:
    """The same without ``__dict__``, as attrs makes them."""

    __slots__ = ("x",)

    def __init__(self, x: Any):
        self.x = x


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)


# What cannot be cut here, and would be paired wrongly if it were passed on to each micro-batch as it is.
UNCUTTABLE = {
    "sparse": lambda: rows(3).to_sparse(),
    "jagged": jagged,
    "packed sequence": lambda: pack_sequence([torch.zeros(2), torch.zeros(1)]),
    "object": lambda: Bag(x=rows()),
    "object with a list": lambda: Bag(inner=[{"x": rows()}]),
    "object in an object": lambda: Bag(inner=Bag(x=rows())),
    "object with slots": lambda: SlotBag(rows()),
    "object in a list": lambda: [Bag(x=rows())],
    "deque": lambda: collections.deque([rows()]),
    "set": lambda: {rows()},
    "values of a dict": lambda: {"y": rows()}.values(),
    "iterator": lambda: iter([rows()]),
    "generator": lambda: (x for x in [rows()]),
}


@pytest.mark.parametrize("make", UNCUTTABLE.values(), ids=UNCUTTABLE)
def test_what_cannot_be_cut_is_refused_with_its_path(make):
    with pytest.raises(bb.BatchError, match=r"inner\.odd.*[Ss]plit=|inner\.odd.*batch_dims"):
        lay_out({"x": rows(), "inner": {"odd": make()}})


@pytest.mark.parametrize("make", UNCUTTABLE.values(), ids=UNCUTTABLE)
def test_what_cannot_be_cut_goes_to_every_micro_batch_if_declared_shared(make):
    odd = make()

    assert all(
        piece["inner"]["odd"] is odd for piece in pieces({"x": rows(), "inner": {"odd": odd}}, 3, {"inner.odd": None})
    )


def test_a_sparse_csr_tensor_is_refused():
    crow, column, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)

    with warnings.catch_warnings(action="ignore"):  # torch says that the layout is in beta
        sparse = torch.sparse_compressed_tensor(crow, column, values, (2, 2), layout=torch.sparse_csr)
    with pytest.raises(bb.BatchError, match="0 is a sparse_csr tensor.*split="):
        lay_out((sparse, torch.zeros(2)))


def test_a_module_is_no_batch_to_cut():
    """It holds tensors, but nobody takes them for samples."""
    model = torch.nn.Linear(2, 2)

    assert all(piece[1] is model for piece in pieces((rows(), model), 3))


def test_a_field_that_was_never_set_is_refused():
    with pytest.raises(bb.BatchError, match="y"):
        lay_out(Unset(rows()))


@dataclasses.dataclass
class WithMask:
    """Sets an attribute that is no field."""

    x: Tensor

    def __post_init__(self) -> None:
        self.mask = self.x > 3


@dataclasses.dataclass
class WithCache:
    x: Tensor

    @functools.cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


class DictWithAttribute(dict):
    mask: Tensor


def dict_with_mask() -> DictWithAttribute:
    batch = DictWithAttribute(x=rows())
    batch.mask = rows() > 3
    return batch


@pytest.mark.parametrize("make", [lambda: WithMask(rows()), dict_with_mask])
def test_a_tensor_beside_the_contents_of_a_container_is_refused(make):
    """It would stay as long as the whole batch, beside rows of one micro-batch."""
    with pytest.raises(bb.BatchError, match="mask"):
        lay_out(make())


def test_a_cached_property_is_not_that_of_the_whole_batch():
    batch = WithCache(rows())
    assert len(batch.doubled) == NUM_SAMPLES

    with contextlib.suppress(bb.BatchError):  # to refuse it is fine too
        assert all(torch.equal(piece.doubled, piece.x * 2) for piece in pieces(batch, 3))


class FromFile(Mapping):
    """A mapping that is made from something else than its items."""

    def __init__(self, path: Any):
        self.path = path
        self._items = {"x": rows(2), "y": rows()}

    def __getitem__(self, name: Any) -> Any:
        return self._items[name]

    def __iter__(self):
        return iter(self._items)

    def __len__(self) -> int:
        return 2


def test_a_mapping_that_cannot_be_made_from_items_is_refused():
    with pytest.raises(bb.BatchError, match="FromFile.*split="):
        pieces(FromFile("data.bin"), 3)


@pytest.mark.parametrize("batch", [{0: rows(2), "0": rows()[:6]}, {"a.b": rows(2), "a": {"b": rows()[:6]}}])
def test_two_tensors_whose_paths_read_alike_are_not_mixed_up(batch):
    """One of the two lengths must not be forgotten: rows of the other would be left out."""
    with pytest.raises(bb.BatchError, match="has 7, .* has 6|two .*path"):
        lay_out(batch)


def test_a_subclass_of_ndarray_is_cut():
    mine = type("Mine", (np.ndarray,), {"__module__": "mine"})

    assert [len(piece[1]) for piece in pieces((rows(), np.arange(NUM_SAMPLES).view(mine)), 3)] == [3, 3, 1]


# ----- any nesting


@st.composite
def leaves(draw: st.DrawFn, num_samples: int) -> Any:
    """Per-sample tensors, arrays and lists, and what is passed on."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    identity = draw(st.integers(0, 99)) * 1000
    tensor = rows(*shape, start=identity, num_samples=num_samples)
    return draw(
        st.sampled_from(
            [tensor, tensor.numpy(), [f"{identity + i}" for i in range(num_samples)], torch.tensor(2.5), None, "text"]
        )
    )


def nestings(num_samples: int) -> st.SearchStrategy[Any]:
    """Random containers; each list and tuple holds a tensor, or it would be a list of samples."""
    names = st.sampled_from(["x", "y", "labels", "a b", "0"])
    tensor = rows(2, num_samples=num_samples)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(names, inner, max_size=3),
            st.dictionaries(names, inner, max_size=3).map(collections.OrderedDict),
            st.lists(inner, max_size=3).map(lambda contents: [*contents, tensor]),
            st.lists(inner, max_size=3).map(lambda contents: (tensor, *contents)),
            st.builds(Typed, inner, inner),
            st.builds(Plain, inner, inner),
            st.builds(Frozen, inner, inner),
        )

    return st.recursive(leaves(num_samples), containers, max_leaves=8).map(
        lambda inner: {"first": tensor, "rest": inner}
    )


def opened(value: Any) -> list[Any] | None:
    """Contents of a container, told apart without our own code."""
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, spec.name) for spec in dataclasses.fields(value)]
    if isinstance(value, list | tuple) and not all(isinstance(inner, str) for inner in value):
        return list(value)
    return None


def glued(parts: Sequence[Any], whole: Any) -> Any:
    """The leaves of the pieces put together, in the order in which they lie in the whole."""
    inside = opened(whole)
    if inside is not None:
        assert {type(part) for part in parts} == {type(whole)}
        columns = zip(*(opened(part) or [] for part in parts), strict=True)
        return [glued(column, inner) for column, inner in zip(columns, inside, strict=True)]
    if isinstance(whole, Tensor) and whole.dim():
        return torch.cat(list(parts)).tolist()
    if isinstance(whole, np.ndarray):
        return np.concatenate(list(parts)).tolist()
    if isinstance(whole, list):
        return [name for part in parts for name in part]
    assert all(part is whole for part in parts)
    return whole


def listed(whole: Any) -> Any:
    inside = opened(whole)
    if inside is not None:
        return [listed(inner) for inner in inside]
    return whole.tolist() if isinstance(whole, np.ndarray) or (isinstance(whole, Tensor) and whole.dim()) else whole


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_pieces_of_any_nesting_put_together_are_the_batch(data):
    num_samples, micro_batch_size = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 10))
    batch = data.draw(nestings(num_samples))

    found = pieces(batch, micro_batch_size)

    assert len(found) == math.ceil(num_samples / micro_batch_size)
    assert glued(found, batch) == listed(batch)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_one_odd_length_in_any_nesting_is_refused(data):
    num_samples = data.draw(st.integers(2, 9))
    wrong = data.draw(st.integers(0, 12).filter(lambda length: length != num_samples))
    batch = [{"odd": torch.zeros(wrong)}, data.draw(nestings(num_samples))]

    with pytest.raises(bb.BatchError, match=rf"\['0.odd'\] has {wrong}.* has {num_samples}"):
        lay_out(batch)


def test_every_container_of_the_table_is_cut():
    """Control: a container that is passed on as it is would pass the tests of types."""
    for container in CONTAINERS.values():
        assert len(container.read(pieces(container.make(rows(2), rows()), 3)[0])[0]) == 3
