from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import bigbatch as bb
from bigbatch.training import weights
from bigbatch.training.checkpoint import Checkpoints, Part, newest, paths_in, verified


def parts(step, num_bytes=3000):
    content = random.Random(step).randbytes(num_bytes)
    return {
        "model.safetensors": Part(lambda path: weights.write({"step": torch.full((50,), step)}, path), 400),
        "state.bin": Part(lambda path: path.write_bytes(content), num_bytes),
    }


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    """Two good checkpoints, of the steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, parts(step), about={"seed": 7})
    checkpoints.close()
    return checkpoints.folder


def test_the_newest_is_found_with_what_was_noted(folder):
    found = newest(folder)

    assert (found.path.name, found.step, found.about, found.refused) == ("step-00000002", 2, {"seed": 7}, ())
    assert names_in(found.path) == ["manifest.json", "model.safetensors", "state.bin"]
    assert weights.read(found.path / "model.safetensors")["step"].tolist() == [2] * 50


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert newest(tmp_path / "nowhere") is None


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in range(5, 30, 5):
        checkpoints.save(step, parts(step))

    assert [path.name for path in paths_in(tmp_path)] == ["step-00000015", "step-00000020", "step-00000025"]


def test_older_ones_are_removed_only_when_the_new_one_is_there(folder):
    seen = []
    checkpoints = Checkpoints(folder, keep=1)
    last = Part(lambda path: (seen.extend(paths_in(folder)), path.write_text("x")), 1)

    checkpoints.save(3, {"last": last})

    assert [path.name for path in seen] == ["step-00000001", "step-00000002"]
    assert [path.name for path in paths_in(folder)] == ["step-00000003"]


def test_a_run_that_went_back_removes_what_it_went_back_behind(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(9, parts(9))

    checkpoints.save(5, parts(5))

    assert [path.name for path in paths_in(folder)] == ["step-00000002", "step-00000005"]


def test_the_same_step_can_be_saved_again(folder):
    path = Checkpoints(folder).save(2, {"other": Part(lambda path: path.write_text("new"), 3)})

    assert (verified(path).path / "other").read_text() == "new"
    assert [path.name for path in paths_in(folder)] == ["step-00000001", "step-00000002"]


def test_what_dead_runs_left_is_removed(folder):
    (folder / ".unfinished-step-00000003-abc").mkdir()
    (folder / ".unfinished-step-00000003-abc" / "model.safetensors").write_text("half")

    Checkpoints(folder)

    assert names_in(folder) == [".lock", "step-00000001", "step-00000002"]


def test_a_folder_in_which_nothing_was_saved_goes_away(tmp_path):
    Checkpoints(tmp_path / "checkpoints").close()

    assert names_in(tmp_path) == []


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    code = f"""
import bigbatch as bb
from bigbatch.training.checkpoint import Checkpoints
try:
    Checkpoints({str(tmp_path)!r})
except bb.CheckpointError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    checkpoints.close()
    allowed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert refused.startswith(f"Another run writes its checkpoints to {tmp_path}. Wait for its end")
    assert allowed == ""


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.bin"])
def test_a_flipped_bit_is_noticed(folder, name):
    """A sample of all bits; the long run of all of them is tests/torture/corrupt.py."""
    file = folder / "step-00000002" / name
    data = file.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(data)), 60):
        file.write_bytes(flipped(data, bit))
        with pytest.raises(bb.CheckpointError, match=f"{name} has changed since it was written"):
            verified(file.parent)
    file.write_bytes(data)

    verified(file.parent)


def test_a_flipped_bit_is_silent_without_a_manifest(folder):
    """Control: the file itself loads, with another number in it."""
    file = folder / "step-00000002" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(flipped(data, 8 * len(data) - 60))

    assert weights.read(file)["step"].tolist() != [2] * 50


def rename(path):
    path.rename(path.with_name("renamed.bin"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: file.unlink(), "state.bin is missing"),
        (rename, "state.bin is missing; renamed.bin does not belong to it"),
        (lambda file: (file.parent / "extra").write_text(""), "extra does not belong to it"),
        (lambda file: os.truncate(file, 2999), "state.bin has 2,999 bytes and was written with 3,000"),
        (lambda file: os.truncate(file, 0), "state.bin has 0 bytes and was written with 3,000"),
        (lambda file: os.truncate(file, 3001), "state.bin has 3,001 bytes and was written with 3,000"),
        (lambda file: file.write_bytes(file.read_bytes()[:1000] + bytes(512) + file.read_bytes()[1512:]), "sha256"),
        (lambda file: (file.unlink(), file.mkdir()), "state.bin is no file"),
        (lambda file: (file.parent / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda file: os.truncate(file.parent / "manifest.json", 100), "manifest.json has changed"),
        (lambda file: (file.parent / "manifest.json").write_text("[]"), "manifest.json has changed"),
        (lambda file: shutil.copy(file.parents[1] / "step-00000001/manifest.json", file.parent), "sha256"),
    ],
)
def test_harm_is_named_and_the_one_before_is_found(folder, harm, message):
    harm(folder / "step-00000002" / "state.bin")

    with pytest.raises(bb.CheckpointError, match=message) as caught:
        verified(folder / "step-00000002")
    found = newest(folder)
    assert (found.step, [path.name for path, _ in found.refused]) == (1, ["step-00000002"])
    assert found.refused[0][1] == caught.value.why


def test_a_checkpoint_under_the_name_of_another_step_is_noticed(folder):
    (folder / "step-00000002").rename(folder / "step-00000004")

    with pytest.raises(bb.CheckpointError, match="it is the checkpoint of step 2"):
        verified(folder / "step-00000004")


def test_a_checkpoint_may_be_copied_under_a_name_of_ones_own(folder):
    shutil.copytree(folder / "step-00000002", folder / "best")

    assert verified(folder / "best").step == 2


def test_when_none_is_good_nobody_begins_again_by_accident(folder):
    for step in (1, 2):
        (folder / f"step-0000000{step}" / "state.bin").unlink()

    with pytest.raises(bb.CheckpointError, match="No checkpoint in .* can be used. step-00000002: state.bin is miss"):
        newest(folder)


def test_a_format_of_the_future_is_refused(folder, monkeypatch):
    monkeypatch.setattr("bigbatch.training.checkpoint.FORMAT_VERSION", 0)

    with pytest.raises(bb.CheckpointError, match="it has format 2, and this bigbatch reads format 0"):
        verified(folder / "step-00000002")


def test_there_is_no_such_checkpoint(tmp_path):
    with pytest.raises(OSError, match="cannot be used: there is no such folder"):
        verified(tmp_path / "step-00000001")


@contextmanager
def mounted(path, options):
    """A file system of its own in memory, for root; the test is skipped where nothing can be mounted."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        made = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        pytest.skip("Only root can mount a small disk.")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("free_bytes", [0, 4096, 65_536, 131_072, 196_608])
def test_a_full_disk_is_told_and_the_one_before_still_loads(tmp_path, free_bytes):
    def saved(state, path):
        with path.open("wb") as file:
            torch.save(state, file)

    def real_parts(step):
        tensors = {"weight": torch.full((25_000,), float(step))}
        state = {"moments": torch.full((25_000,), float(step))}
        return {
            "model.safetensors": Part(lambda path: weights.write(tensors, path), 100_000),
            "state.pt": Part(lambda path: saved(state, path), 100_000),
        }

    with mounted(tmp_path / "disk", "size=512k") as disk:
        checkpoints = Checkpoints(disk)
        checkpoints.save(1, real_parts(1))
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(bytes(free - free_bytes))
        with pytest.raises(bb.CheckpointError, match="step-00000002 cannot be written: the disk is full") as caught:
            checkpoints.save(2, real_parts(2))
        found = newest(disk)
        left = names_in(disk)
        checkpoints.close()

    error = caught.value
    assert error.needed_bytes == 200_000
    assert error.free_bytes == free_bytes
    assert "It needs 195.31 KiB (200,000 bytes), and" in str(error)
    assert error.path == disk / "step-00000002"
    assert (found.step, found.refused) == (1, ())
    assert left == [".lock", "other", "step-00000001"]


def test_there_is_room_again_when_something_was_removed(tmp_path):
    """Control: on the same disk the same checkpoint can be written when there is room."""
    with mounted(tmp_path / "disk", "size=64k") as disk:
        checkpoints = Checkpoints(disk)
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 4096))
        with pytest.raises(bb.CheckpointError, match="the disk is full"):
            checkpoints.save(1, parts(1))
        (disk / "other").unlink()

        assert newest(checkpoints.save(1, parts(1)).parent).step == 1
        checkpoints.close()


def test_a_limit_on_files_is_told(folder):
    """A write that fails for another reason than a full disk says which."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(bb.CheckpointError, match="step-00000003 cannot be written: File too large") as caught:
            Checkpoints(folder).save(3, parts(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert caught.value.free_bytes is None
    assert names_in(folder) == [".lock", "step-00000001", "step-00000002"]


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    message = "No checkpoint can be written to .*: Read-only file system. Give"
    with mounted(tmp_path / "disk", "ro") as disk, pytest.raises(bb.CheckpointError, match=message):
        Checkpoints(disk)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("")

    with pytest.raises(bb.CheckpointError, match="No checkpoint can be written to .*: File exists. Give another"):
        Checkpoints(tmp_path / "checkpoints")


def test_what_cannot_be_written_leaves_nothing_behind(folder):
    def broken(path):
        path.write_text("half")
        raise ValueError("no such dtype")

    with pytest.raises(bb.CheckpointError, match="step-00000003 cannot be written: ValueError: no such dtype"):
        Checkpoints(folder).save(3, {"a": Part(broken, 1)})

    assert names_in(folder) == [".lock", "step-00000001", "step-00000002"]


def test_an_interrupt_while_saving_leaves_nothing_behind(folder):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Checkpoints(folder).save(3, {"a": Part(interrupted, 1)})

    assert names_in(folder) == [".lock", "step-00000001", "step-00000002"]


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The order that survives a power cut: the files, their folder, the name, the folder above."""
    heard = []
    fsync, replace = os.fsync, os.replace

    def heard_fsync(descriptor):
        heard.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-step")[0])
        fsync(descriptor)

    def heard_replace(source, target):
        heard.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", heard_fsync)
    monkeypatch.setattr(os, "replace", heard_replace)
    Checkpoints(tmp_path / "checkpoints").save(1, parts(1))

    files = ["model.safetensors", "state.bin", "manifest.json"]
    assert heard == [*files, ".unfinished", "rename to step-00000001", "checkpoints"]


def test_tied_weights_are_written_once(tmp_path):
    tied = torch.randn(10, 10)
    table = torch.randn(4, 6)
    state = {"a": tied, "b": tied, "row": table[1], "table": table, "turned": table.T, "empty": torch.zeros(0)}

    weights.write(state, tmp_path / "a.safetensors")
    found = weights.read(tmp_path / "a.safetensors")

    assert set(found) == set(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found["a"] is found["b"]
    assert weights.num_bytes(state) == 4 * (100 + 6 + 24 + 24)


def test_manifest_is_readable(folder):
    manifest = json.loads((folder / "step-00000002" / "manifest.json").read_text())

    assert (manifest["format"], manifest["version"], manifest["step"]) == ("bigbatch checkpoint", 2, 2)
    assert manifest["files"]["state.bin"]["bytes"] == 3000
    assert len(manifest["files"]["state.bin"]["sha256"]) == 64
