"""A run under FSDP2: each rank saves its part, and any number of ranks goes on, sharded or not."""

from __future__ import annotations

import pickle
import random
import resource
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bigbatch as bb
from bigbatch.training import sharded_files, weights
from bigbatch.training.checkpoint import Checkpoints, newest, verified
from bigbatch.training.group import ALONE, Group
from bigbatch.training.log import save_result
from bigbatch.training.loop import Run
from bigbatch.training.on_disk import Trouble
from bigbatch.training.rank import Rank
from bigbatch.training.resuming import resume
from bigbatch.training.saving import Saver
from bigbatch.training.sharding import once, one_by_one, take_part
from tests.torture.sharded_checkpoints import kills
from tests.training.processes import on_ranks
from tests.training.test_checkpoint import mounted
from tests.training.test_ranks_run import ALLOWED, differences, exact_task, gone_on, saved_in_the_middle, trained
from tests.training.test_resume import assert_same, state_of


class Tied(nn.Module):
    """Tied weights, frozen ones, one of a single number, which three ranks of four have nothing of, and a buffer."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((), 0.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("table", torch.arange(5, dtype=torch.float16))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.gain * self.third(self.second(self.first(x).relu()).relu())
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.frozen(x) * self.scale)

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


def optimizers(model):
    """Of two kinds: SGD has None in the place of a momentum."""
    rest = [p for name, p in model.named_parameters() if not name.startswith(("first", "gain"))]
    return [torch.optim.SGD([model.first.weight, model.gain], 0.05), torch.optim.AdamW(rest, lr=1e-2)]


def task(**changes):
    fields = dict(
        ema=None,
        model=lambda: Tied().double(),
        optimizer=optimizers,
        scheduler=lambda made, total: torch.optim.lr_scheduler.OneCycleLR(made[0], 0.1, total),
    )
    return exact_task(**{**fields, **changes})


def sharded(group):
    return Group(Rank(group.rank, group.world_size), group.store, parallel="fsdp2")


@pytest.fixture(scope="module")
def alone():
    """The run of one process that never stopped."""
    return trained(Run(task(), micro_batch_size=2))


def save_sharded(group, folder):
    saved_in_the_middle(sharded(group), folder, 8, task())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What a run on two ranks saved after eight steps."""
    folder = tmp_path_factory.mktemp("saved")
    on_ranks(2, save_sharded, folder)
    return folder


def gone_on_sharded(group, *folders):
    return [gone_on(sharded(group), folder, task=task()) for folder in folders]


def gone_on_with_ddp(group, *folders):
    return [gone_on(group, folder, task=task()) for folder in folders]


def assert_same_run(found, alone):
    assert differences(found, alone, first=8) < ALLOWED
    assert found["rates"] == alone["rates"][8:]
    assert found["metrics"][1:] == [pytest.approx(metrics, rel=1e-9) for metrics in alone["metrics"][1:]]
    for tensor, expected in zip(found["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(tensor), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def test_each_rank_has_a_file_and_tied_weights_are_in_it_once(saved):
    (path,) = saved.glob("step-*")
    metadata = sharded_files._Reader(path).read_metadata()

    assert {file.name for file in path.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
        "state.pt",
    }
    assert "model.second.weight" in metadata.state_dict_metadata
    assert "model.third.weight" not in metadata.state_dict_metadata
    assert len(metadata.state_dict_metadata["model.second.weight"].chunks) == 2


def test_it_goes_on_in_one_process(saved, alone):
    assert_same_run(gone_on(ALONE, saved, task=task()), alone)


def test_what_is_left_out_is_outside_the_tolerance(saved, alone, monkeypatch):
    """Control: the moments of AdamW are not read, so they are zero."""
    real = sharded_files.read

    def read(rooms, folder):
        real({name: room for name, room in rooms.items() if "exp_avg" not in name}, folder)
        for name, room in rooms.items():
            if "exp_avg" in name:
                room.zero_()

    monkeypatch.setattr(sharded_files, "read", read)

    assert differences(gone_on(ALONE, saved, task=task()), alone, first=8) > 1e6 * ALLOWED


def test_it_goes_on_with_ddp(saved, alone):
    for (found,) in on_ranks(2, gone_on_with_ddp, saved):
        assert_same_run(found, alone)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_goes_on_sharded_as_does_what_one_process_saved(saved, tmp_path, alone, world_size):
    saved_in_the_middle(ALONE, tmp_path, 8, task())
    for both in on_ranks(world_size, gone_on_sharded, saved, tmp_path):
        for found in both:
            assert_same_run(found, alone)


WIDTH = 120


class Largest(TorchDispatchMode):
    """The bytes behind the largest tensor that is made or touched, of those that are in one piece."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with the part of this rank comes here again
        found = func(*args, **(kwargs or {}))
        storages = [tensor.untyped_storage() for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)]
        real = [storage.nbytes() for storage in storages if storage.device.type != "meta"]  # torch tries shapes there
        self.num_bytes = max([self.num_bytes, *real])
        return found


def largest_tensors(group, folder):
    """While a run is saved, read, and its result is written; and when all of it was in one piece."""
    group, wide = sharded(group), task(model=lambda: Tied(WIDTH).double())
    run = Run(wide, micro_batch_size=2, group=group)
    for record in run.steps(1):
        run.progress.add(record)
    found = {}
    with Largest() as largest:
        Saver(Checkpoints(folder) if group.is_first else None)._save(run)
    found["saved"] = largest.num_bytes
    group.gathered(None)
    again = Run(wide, micro_batch_size=2, group=group)
    with Largest() as largest:
        resume(again, newest(folder))
    found["read"] = largest.num_bytes
    with Largest() as largest:
        list(one_by_one(once(again.parts.model).values()))
    return found | {"in one piece": largest.num_bytes}


def test_no_rank_holds_more_than_its_part(tmp_path):
    """Of a weight of 120 × 120 numbers, each of two ranks holds the half; in one piece is the control."""
    whole = 8 * WIDTH * WIDTH
    for found in on_ranks(2, largest_tensors, tmp_path):
        assert found == {"saved": whole // 2, "read": whole // 2, "in one piece": whole}


def full_disk(group, disk):
    """Of two checkpoints on a small disk, the second one has no room."""
    group = sharded(group)
    wide = task(model=lambda: Tied(WIDTH).double())
    run = Run(wide, micro_batch_size=2, group=group)
    saver = Saver(Checkpoints(disk) if group.is_first else None)
    told = []
    for record in run.steps(2):
        run.progress.add(record)
        try:
            saver._save(run)
        except bb.CheckpointError as error:
            told.append((str(error), error.needed_bytes, error.free_bytes))
        if group.is_first:
            (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free // 2))
        group.gathered(None)
    group.gathered(None)
    return told


def test_a_full_disk_is_told_on_all_ranks(tmp_path):
    """And what it needs, which is what the one before has."""
    with mounted(tmp_path / "disk", "size=3m") as disk:
        told, told_there = on_ranks(2, full_disk, disk)
        found = newest(disk)
        num_bytes = sum(file.stat().st_size for file in found.path.iterdir())
        left = {path.name for path in disk.iterdir()} - {".lock"}

    ((message, needed_bytes, free_bytes),) = told == told_there and told
    assert "step-00000002 cannot be written: the disk is full. It needs" in message
    assert 0.8 * num_bytes < needed_bytes < num_bytes
    assert free_bytes < needed_bytes
    assert (found.step, found.refused) == (1, ())
    assert left == {"step-00000001", "other"}


def what_goes_wrong(group, folder):
    """A rank that cannot write, and one that does not see the folder: all get the error, and step 4 is left."""
    group = sharded(group)
    saved_in_the_middle(group, folder, 4, task())
    run = Run(task(), micro_batch_size=2, group=group)
    for record in run.steps(1):
        run.progress.add(record)
    saver = Saver(Checkpoints(folder) if group.is_first else None)
    told = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    with pytest.raises(bb.CheckpointError, match="too large") as raised:
        saver._save(run)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told.append(str(raised.value))

    real = sharded_files.write
    if group.rank == 1:
        sharded_files.write = lambda tensors, path, group: real(tensors, path / "of this host", group)
    with pytest.raises(bb.CheckpointError, match="does not see") as raised:
        saver._save(run)
    sharded_files.write = real
    told.append(str(raised.value))
    left = sorted(path.name for path in folder.iterdir()) if group.is_first else None
    group.gathered(None)
    path = saver._save(run)
    return told, left, path.name


def test_what_one_rank_cannot_write_is_an_error_on_all_and_older_ones_are_untouched(tmp_path):
    (told, left, name), (told_there, _, name_there) = on_ranks(2, what_goes_wrong, tmp_path)

    assert told == told_there
    assert "step-00000001 cannot be written: rank 1: File too large." in told[0]
    assert "rank 1 does not see" in told[1]
    assert "give a --run-dir on a file system that all hosts share" in told[1]
    assert left == [".lock", "step-00000004"]
    assert name == name_there == "step-00000001"  # control: it can be saved when nothing is wrong


@pytest.mark.slow
def test_a_kill_while_ranks_save_leaves_a_whole_checkpoint(tmp_path):
    """A sample; the long run is tests/torture/sharded_checkpoints.py."""
    found = kills(tmp_path, 6, 8.0, random.Random(1))

    assert found["the last one"] + found["the one being written"] == 6
    assert found["within a save"] > 0


def test_ranks_that_did_not_read_all_of_it_compare_sizes(saved, tmp_path):
    """Of the files of the ranks; rank 0 has read every byte before."""
    path = shutil.copytree(next(saved.glob("step-*")), tmp_path / "copy")
    content = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").write_bytes(bytes(len(content)))

    assert verified(path, by_size=sharded_files.SUFFIX).step == 8
    with pytest.raises(bb.CheckpointError, match="__1_0.distcp has changed"):
        verified(path)
    (path / "__1_0.distcp").write_bytes(content[:-1])
    with pytest.raises(bb.CheckpointError, match="__1_0.distcp has .* bytes and was written with"):
        verified(path, by_size=sharded_files.SUFFIX)


def test_files_of_other_ranks_that_are_not_there_are_told(tmp_path):
    """Two hosts with a folder of the same name each."""
    checkpoints = Checkpoints(tmp_path)
    unfinished = checkpoints.begin(1, {})

    with pytest.raises(bb.CheckpointError, match="__1_0.distcp, which rank 1 has written, is not there. All ranks wr"):
        checkpoints.finish(unfinished, 1, {}, by_ranks=[{}, {"__1_0.distcp": {"bytes": 3, "sha256": ""}}])

    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_trouble_that_a_rank_tells_is_that_of_the_system():
    full = RuntimeError("PytorchStreamWriter failed writing file data/0")
    full.__context__ = OSError(28, "No space left on device")

    found = pickle.loads(pickle.dumps(Trouble.of(full, whose="rank 3: ")))

    assert (found.number, found.why) == (28, "rank 3: No space left on device")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "state.pt"])
@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_harm_is_noticed_before_anything_changes(saved, tmp_path, name, harm):
    path = shutil.copytree(next(saved.glob("step-*")), tmp_path / "step-00000008")
    content = (path / name).read_bytes()
    if harm == "changed":
        (path / name).write_bytes(content[:-90] + bytes([content[-90] ^ 1]) + content[-89:])
    elif harm == "cut":
        (path / name).write_bytes(content[:-1])
    else:
        (path / name).unlink()

    with pytest.raises(bb.CheckpointError, match=f"{name} (has changed|has .* bytes|is missing)"):
        newest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: Tied(9).double()}, r"the model is another one: gain.*|first.weight float64 \(8, 2\) there"),
        ({"model": lambda: Tied()}, "first.weight float64 .* there and float32"),
        ({"seed": 3}, "it is of another run: seed 0 there and 3 here"),
        ({"optimizer": lambda model: [optimizers(model)[0], torch.optim.AdamW(model.head.parameters())]}, "groups"),
    ],
)
def test_another_run_is_refused_and_nothing_changes(saved, changes, message):
    run = Run(task(**changes))
    before = state_of(run)

    with pytest.raises(bb.CheckpointError, match=message):
        resume(run, newest(saved))

    assert_same(state_of(run), before)


def test_what_is_not_in_the_files_is_told(saved, tmp_path):
    with pytest.raises(bb.CheckpointError, match="Missing key in checkpoint state_dict: model.other"):
        sharded_files.read({"model.other": torch.zeros(3)}, next(saved.glob("step-*")))


class Code:
    def __reduce__(self):
        return print, ("this ran",)


def test_code_in_the_metadata_is_not_run(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Code()))

    with pytest.raises(bb.CheckpointError, match="builtins.print is in .metadata, where no checkpoint has it"):
        sharded_files.read({"a": torch.zeros(1)}, tmp_path)

    assert "this ran" not in capsys.readouterr().out


def write_result(group, folder):
    group = sharded(group)
    run = Run(task(epochs=1), micro_batch_size=2, group=group)
    result = run.train()
    if group.is_first:
        save_result(folder, result, run.parts.model, None)
    else:
        take_part(run.parts.model)
    return dict(zip(once(run.parts.model), one_by_one(once(run.parts.model).values()), strict=True))


def test_the_result_is_one_file_of_whole_weights(tmp_path):
    expected, _ = on_ranks(2, write_result, tmp_path)

    found = weights.read(tmp_path / "model.safetensors")
    assert found["third.weight"] is found.pop("second.weight")
    assert_same(found, expected | {"third.weight": expected.pop("second.weight")})
    Tied().double().load_state_dict(found | {"second.weight": found["third.weight"], "_extra_state": {"version": 3}})
