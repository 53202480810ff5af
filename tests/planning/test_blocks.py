from __future__ import annotations

from bigbatch.memory.events import Event, Storage
from bigbatch.planning.blocks import Node, find_blocks


class Forward:
    """Events of a forward, written as calls."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._num_storages = 0

    def call(self, name: str, *inside: str, num_bytes: int = 0) -> Forward:
        """A call of a module that saves so many bytes, and of others inside it that save as many each."""
        self.events.append(Event("enter", name))
        for inner in inside:
            self.call(inner, num_bytes=num_bytes)
        if num_bytes and not inside:
            self.events.append(Event("save", self._num_storages, (Storage(self._num_storages, num_bytes),)))
            self._num_storages += 1
        self.events.append(Event("exit", name))
        return self


def in_a_list(count: int) -> dict[str, Node]:
    names = tuple(f"blocks.{i}" for i in range(count))
    tree = {"": Node("Model", ("blocks", "head")), "blocks": Node("ModuleList", names, is_list=True)}
    tree["head"] = Node("Linear")
    for name in names:
        tree |= {name: Node("Block", (f"{name}.a", f"{name}.b")), f"{name}.a": Node("A"), f"{name}.b": Node("B")}
    return tree


def test_the_entries_of_a_list_are_blocks_and_so_is_what_saves_beside_them():
    forward = Forward()
    for i in range(4):
        forward.call(f"blocks.{i}", f"blocks.{i}.a", f"blocks.{i}.b", num_bytes=100)
    forward.call("head", num_bytes=50)

    assert find_blocks(in_a_list(4), forward.events) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def test_what_saves_nothing_is_no_block():
    forward = Forward()
    for i in range(4):
        forward.call(f"blocks.{i}", f"blocks.{i}.a", f"blocks.{i}.b", num_bytes=100 if i else 0)

    assert find_blocks(in_a_list(4), forward.events) == ["blocks.1", "blocks.2", "blocks.3"]


def test_a_block_that_saves_most_of_the_model_is_opened():
    forward = Forward()
    for i in range(2):
        forward.call(f"blocks.{i}", f"blocks.{i}.a", f"blocks.{i}.b", num_bytes=100)

    assert find_blocks(in_a_list(2), forward.events) == ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b"]


def test_one_large_module_without_parts_stays_whole():
    tree = {"": Node("Model", ("only",)), "only": Node("LSTM")}

    assert find_blocks(tree, Forward().call("only", num_bytes=100).events) == ["only"]


def test_no_block_is_inside_another_and_the_model_is_none():
    forward = Forward()
    for i in range(3):
        forward.call(f"blocks.{i}", f"blocks.{i}.a", f"blocks.{i}.b", num_bytes=100)
    found = find_blocks(in_a_list(3), [Event("enter", ""), *forward.events, Event("exit", "")])

    assert "" not in found
    assert not any(one != other and other.startswith(f"{one}.") for one in found for other in found)


def test_a_single_operation_that_is_called_again_and_again_is_no_block():
    """An activation that all layers share."""
    forward = Forward()
    for i in range(3):
        forward.call(f"blocks.{i}", f"blocks.{i}.a", f"blocks.{i}.b", num_bytes=100).call("act", num_bytes=10)
    tree = in_a_list(3) | {"": Node("Model", ("blocks", "head", "act")), "act": Node("GELU")}

    assert "act" not in find_blocks(tree, forward.events)


def test_a_storage_that_is_saved_twice_counts_once():
    """Else a model of which each part saves the same input would be opened without reason."""
    tree = {"": Node("Model", ("a", "b")), "a": Node("A", ("a.x", "a.y")), "b": Node("B")}
    tree |= {"a.x": Node("X"), "a.y": Node("Y")}
    events = [Event("enter", "a"), Event("enter", "a.x")]
    events += [Event("save", number, (Storage(0, 100),)) for number in range(9)]
    events += [Event("exit", "a.x"), Event("exit", "a"), Event("enter", "b")]
    events += [Event("save", 9, (Storage(1, 300),)), Event("exit", "b")]

    assert find_blocks(tree, events) == ["a", "b"]
