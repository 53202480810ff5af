"""The limit is tried in processes of its own: one that is too tight would take the tests with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import bigbatch as bb
from bigbatch.memory.limit import data_bytes

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is enforced on Linux only")
MIB = 2**20


def printed(program: str) -> str:
    """What a program prints, run by itself with two threads."""
    source = "import torch\nimport bigbatch as bb\ntorch.set_num_threads(2)\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@ON_LINUX
def test_what_fits_is_given_and_what_does_not_fails():
    found = printed("""
        with bb.limit_memory("200MiB", device="cpu"):
            kept = torch.ones(150 * 2**20, dtype=torch.uint8)
            try:
                torch.ones(100 * 2**20, dtype=torch.uint8)
            except RuntimeError as error:
                print(type(error).__name__, "can't allocate memory" in str(error))
            del kept
            print(torch.ones(150 * 2**20, dtype=torch.uint8).numel())
        print(torch.ones(300 * 2**20, dtype=torch.uint8).numel())
    """)

    assert found.splitlines() == ["RuntimeError True", str(150 * MIB), str(300 * MIB)]


@ON_LINUX
def test_tensors_from_before_do_not_count():
    found = printed("""
        before = torch.ones(300 * 2**20, dtype=torch.uint8)
        limit = bb.limit_memory("200MiB", device="cpu")
        print(torch.ones(150 * 2**20, dtype=torch.uint8).numel(), limit.limit_bytes - limit.used_bytes)
    """)

    assert found == f"{150 * MIB} {200 * MIB}"


@ON_LINUX
def test_free_memory_that_the_process_holds_counts_too():
    """It is given out again without asking the system: 120 MB would come on top."""
    found = printed("""
        parts = [torch.ones(60_000, dtype=torch.uint8) for _ in range(2000)]
        del parts
        limit = bb.limit_memory("200MiB", device="cpu")
        kept = []
        try:
            for _ in range(6000):
                kept.append(torch.ones(60_000, dtype=torch.uint8))
        except RuntimeError:
            pass
        count = len(kept)
        del kept
        limit.remove()
        print(180 * 2**20 < count * 60_000 <= 200 * 2**20)
    """)

    assert found == "True"


@ON_LINUX
def test_free_memory_beyond_the_limit_is_said():
    found = printed("""
        import warnings
        parts = [torch.ones(60_000, dtype=torch.uint8) for _ in range(2000)]
        del parts
        with warnings.catch_warnings(record=True) as caught:
            bb.limit_memory("40MiB", device="cpu").remove()
        print(len(caught), caught[0].category.__name__, "more than the limit of 40.00 MiB" in str(caught[0].message))
    """)

    assert found == "1 BigBatchWarning True"


@ON_LINUX
def test_threads_are_there_before_the_limit():
    """A thread that cannot be started ends the process, and nobody can catch it."""
    found = printed("""
        with bb.limit_memory("16MiB", device="cpu"):
            x = torch.randn(512, 512, requires_grad=True)
            (x @ x).sum().backward()
            print(x.grad.shape)
    """)

    assert found == "torch.Size([512, 512])"


@ON_LINUX
def test_a_step_is_stopped_by_it_and_goes_on_without():
    found = printed("""
        model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
        step = bb.Step(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        batch = torch.randn(4096, 64)
        before = [p.clone() for p in model.parameters()]
        with bb.limit_memory("100MiB", device="cpu"):
            try:
                bb.accumulate(model, lambda m, b: m(b).square().mean(), batch)
            except RuntimeError as error:
                print(type(error).__name__)
            same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
            print(same, [p.grad for p in model.parameters()])
        print(step(batch).micro_batch_sizes)
    """)

    assert found.splitlines() == ["RuntimeError", "True [None, None, None, None]", "(4096,)"]


@ON_LINUX
def test_limits_nest_and_are_lifted_once():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    outer = bb.limit_memory("8GiB", device="cpu")
    with bb.limit_memory("4GiB", device="cpu") as inner:
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == inner.limit_bytes
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == outer.limit_bytes
    outer.remove()
    outer.remove()

    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@ON_LINUX
def test_data_bytes_are_those_of_the_tensors_that_are_made():
    before = data_bytes()
    kept = torch.empty(64 * MIB, dtype=torch.uint8)  # not touched: the system counts what may be written

    assert data_bytes() - before == pytest.approx(kept.nbytes, abs=4 * MIB)


@pytest.mark.parametrize("amount", ["much", 0, -1, "512", None])
def test_what_is_no_amount_is_refused(amount):
    with pytest.raises(bb.OptionError, match="is no amount of memory"):
        bb.limit_memory(amount, device="cpu")


def test_a_device_without_a_limit_is_refused():
    with pytest.raises(bb.OptionError, match="there is no hard limit on meta"):
        bb.limit_memory("1GiB", device="meta")


@pytest.mark.gpu
def test_on_cuda_the_allocator_stops():
    with bb.limit_memory("200MiB", device="cuda"):
        torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.ones(300 * MIB, dtype=torch.uint8, device="cuda")

    assert torch.ones(300 * MIB, dtype=torch.uint8, device="cuda").numel() == 300 * MIB
