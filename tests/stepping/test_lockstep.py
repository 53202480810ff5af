"""Functions that take turns, and meet."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from greenlet import greenlet
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from bigbatch.memory.measure import LiveBytes
from bigbatch.stepping.normalization.lockstep import Lockstep, this_worker
from bigbatch.tasks.shapes.shape import default_dtype

_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


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


def around_a_meeting(*, no_hooks: bool = False) -> contextlib.ExitStack:
    """All that a forward may open before a layer and close after it."""
    stack = contextlib.ExitStack()
    if no_hooks:  # and there may be none beneath
        stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks("not here"))
        return stack
    for _ in range(2):  # two of each, so that their order counts
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
        stack.enter_context(Doubles())
        stack.enter_context(LiveBytes())
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.inference_mode())
    stack.enter_context(torch.autocast("cpu", torch.float16, cache_enabled=False))
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
    stack.enter_context(torch._C.DisableTorchFunctionSubclass())
    stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    stack.enter_context(default_dtype(torch.float64))
    return stack


def what_torch_keeps() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_inference_mode_enabled(),
        _AUTOGRAD._saved_tensors_hooks_get_disabled_error_message(),
        [*hooks()],
        [*map(id, _get_current_function_mode_stack())],
        [*map(id, _get_current_dispatch_mode_stack())],
        torch._C._is_multithreading_enabled(),  # pyright: ignore[reportAttributeAccessIssue]
        torch._C._get_torch_function_state(),  # pyright: ignore[reportAttributeAccessIssue]
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.get_default_dtype(),
    )


def hooks() -> Iterator[int]:
    """All hooks of saved tensors, the last first."""
    top = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    if top is None:
        return
    why = _AUTOGRAD._saved_tensors_hooks_get_disabled_error_message()
    _AUTOGRAD._pop_saved_tensors_default_hooks()
    yield id(top[0])
    yield from hooks()
    _AUTOGRAD._saved_tensors_hooks_enable()
    _AUTOGRAD._push_saved_tensors_default_hooks(*top)
    if why is not None:
        _AUTOGRAD._saved_tensors_hooks_disable(why, False)


@pytest.mark.parametrize("no_hooks", [False, True])
def test_what_one_has_opened_when_it_pauses_is_its_own(no_hooks):
    before, seen = what_torch_keeps(), []

    def work(number):
        for turn in range(4):
            if (turn + number) % 2:
                with around_a_meeting(no_hooks=no_hooks):
                    inside = what_torch_keeps()
                    meet(number)
                    assert what_torch_keeps() == inside != before
            else:
                meet(number)
            seen.append(what_torch_keeps())

    Lockstep(torch.device("cpu"), Sum()).run([lambda n=n: work(n) for n in range(3)])

    assert seen == [before] * 12
    assert what_torch_keeps() == before


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine"), SystemExit("mine")])
def test_what_one_has_opened_is_closed_when_another_fails(error):
    before, closed = what_torch_keeps(), []

    def waits():
        try:
            with around_a_meeting():
                with contextlib.suppress(Exception):
                    meet(1)
                closed.append("not reached")
        finally:
            closed.append(what_torch_keeps())
            with contextlib.suppress(BaseException):
                meet(2)  # nobody comes any more

    def fails():
        raise error

    with pytest.raises(type(error), match="mine"):
        Lockstep(torch.device("cpu"), Sum()).run([waits, fails, waits])  # the third has not begun

    assert closed == [before]
    assert what_torch_keeps() == before


class Within(torch.autograd.Function):
    """Calls what it is given from torch's own code."""

    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class Calls(TorchFunctionMode):
    """Calls it from torch's own code, too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.exp:
            meet(0)
        return func(*args, **(kwargs or {}))


def test_they_may_pause_below_autograd_functions_and_modes_and_calls_from_c():
    def work(number):
        x = torch.ones((), requires_grad=True)

        def met(x):
            return x * meet(number)

        def deep(n):
            return max((0, n), key=lambda _: meet(number)) if n == 0 else sorted([n], key=lambda n: deep(n - 1))

        y: object = x
        for _ in range(3):
            y = Within.apply(y, met)
            with Calls():
                torch.ones(()).exp()
            assert deep(20) == [20]
        return y

    found = Lockstep(torch.device("cpu"), Sum()).run([lambda n=n: work(n) for n in (1, 2, 3)])

    assert [y.item() for y in found] == [6.0**3] * 3
    assert all(torch.autograd.grad(y, y)[0] == 1 and y.requires_grad for y in found)


def test_a_function_may_have_greenlets_of_its_own():
    ended = []

    def work(number):
        def inner(value):
            try:
                return this_worker() is not None and meet(value) + meet(1)
            finally:
                ended.append(number)

        return greenlet(inner).switch(number), meet(number)

    assert Lockstep(torch.device("cpu"), Sum()).run([lambda n=n: work(n) for n in (1, 2, 3)]) == [(9, 6)] * 3
    assert ended == [1, 2, 3]

    with pytest.raises(LookupError):
        Lockstep(torch.device("cpu"), Sum()).run([lambda: work(4), lambda: None])
    assert ended == [1, 2, 3, 4]


def test_nothing_of_them_is_left_for_the_garbage_collector():
    """They hold states of random number generators, which are counted where memory is."""
    seen = []

    def work(fails):
        worker = this_worker()
        assert worker is not None
        seen.append(weakref.ref(worker))
        del worker
        meet(1)
        if fails:
            raise ValueError("mine")

    gc.collect()
    gc.disable()
    try:
        Lockstep(torch.device("cpu"), Sum()).run([lambda: work(False)] * 3)
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="mine"):
        Lockstep(torch.device("cpu"), Sum()).run([lambda: work(False), lambda: work(True), lambda: work(False)])
    gc.collect()
    assert [ref() for ref in seen] == [None] * 6


def test_backward_finishes_one_before_the_next_between_meetings():
    order: list[int] = []

    def work(number):
        x = torch.ones((), requires_grad=True)
        for turn in range(6):
            if turn == 3:
                x = meet(x)
            x = x * 1
            x.register_hook(lambda _: order.append(number))
        return x

    torch.stack(Lockstep(torch.device("cpu"), Sum()).run([lambda n=n: work(n) for n in range(3)])).sum().backward()
    assert order == [2, 2, 2, 1, 1, 1, 0, 0, 0] * 2


def test_an_exception_is_let_go():
    """Its traceback holds what a forward has computed: out of memory, nothing of it may stay."""
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
