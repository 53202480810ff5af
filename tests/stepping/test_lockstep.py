"""Functions that take turns, and meet."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bigbatch.memory.measure import LiveBytes
from bigbatch.stepping.normalization.lockstep import Lockstep, this_worker


class Sum:
    """A meeting where everybody gets the sum."""

    def __init__(self):
        self.order: list[str] = []

    def meet(self, requests):
        self.order.append("meet")
        return sum(requests)

    def pause(self, request):
        self.order.append(f"pause {request}")
        return request

    def go_on(self, paused):
        if paused is not None:
            self.order.append(f"go on {paused}")

    def differ(self, found):
        return LookupError(str(found))


def meet(value):
    worker = this_worker()
    assert worker is not None
    return worker.meet(value)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_they_meet_in_order_and_one_runs_at_a_time():
    meeting, running = Sum(), []

    def work(number):
        running.append(number)
        assert len(running) == 1
        running.clear()
        first = meet(number)
        return first, meet(first + number)

    found = Lockstep(torch.device("cpu"), meeting).run([lambda n=n: work(n) for n in (1, 2, 3)])

    assert found == [(6, 24)] * 3
    assert meeting.order[:5] == ["pause 1", "pause 2", "pause 3", "meet", "go on 1"]
    assert this_worker() is None


def test_who_ends_while_others_wait():
    with pytest.raises(LookupError, match=r"\{0: None, 1: 5\}"):
        Lockstep(torch.device("cpu"), Sum()).run([lambda: None, lambda: meet(5)])


class Doubles(TorchFunctionMode):
    """Makes rand twice as large."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ones else result


def test_what_torch_keeps_for_each_thread_is_there():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    live, packed = LiveBytes(), []

    def work():
        state = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            float(torch.ones(())),
            variable.get(),
        )
        torch.zeros(1000).exp()
        with torch.enable_grad():
            torch.ones(5, requires_grad=True).exp()
        meet(1)
        return state

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.detach(), lambda t: t)
    with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False), Doubles(), live, hooks:
        found = Lockstep(torch.device("cpu"), Sum()).run([work, work])
        assert torch._C._len_torch_function_stack() == 1

    assert found == [(False, True, torch.float16, False, 2.0, 7)] * 2
    assert live.peak_bytes() >= 8000
    assert len(packed) == 2


def test_backward_finishes_one_before_the_next_between_meetings():
    order: list[int] = []

    def work(number):
        x = torch.ones((), requires_grad=True)
        for _ in range(3):
            x = x * 1
            x.register_hook(lambda _: order.append(number))
        return x

    for depth_first, expected in ((True, [2, 2, 2, 1, 1, 1, 0, 0, 0]), (False, None)):
        order.clear()
        lockstep = Lockstep(torch.device("cpu"), Sum(), depth_first=depth_first)
        torch.stack(lockstep.run([lambda n=n: work(n) for n in range(3)])).sum().backward()
        assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert (order == expected) == depth_first


def test_an_exception_is_let_go():
    """Its traceback holds what a forward has computed: out of memory, nothing of it may stay."""
    import gc
    import weakref

    seen = []

    def work():
        big = torch.zeros(1000)
        seen.append(weakref.ref(big))
        meet(1)
        raise ValueError("mine")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="mine") as caught:
            Lockstep(torch.device("cpu"), Sum()).run([work, work])
        del caught
        assert [ref() for ref in seen[1:]] == [None]
        gc.collect()
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
