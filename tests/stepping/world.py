"""A run in the middle, and everything that a step could move in it, as hashes: for tests that nothing has moved."""

from __future__ import annotations

import hashlib
import pickle
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

import bigbatch as bb

NUM_SAMPLES = 6
BUILTINS = {
    bb.ArgumentError: TypeError,
    bb.BatchError: ValueError,
    bb.BudgetError: MemoryError,
    bb.DistributedError: RuntimeError,
    bb.EmptyBatchError: ValueError,
    bb.GradientError: RuntimeError,
    bb.LossError: ValueError,
    bb.NonFiniteError: FloatingPointError,
    bb.OptionError: ValueError,
    bb.RecomputeError: RuntimeError,
}


def good_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def make_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(NUM_SAMPLES, 3, generator=draw),
        "labels": torch.randint(0, 2, (NUM_SAMPLES,), generator=draw),
    }


def samples() -> list[dict[str, Tensor]]:
    return [{name: tensor[i] for name, tensor in make_batch().items()} for i in range(NUM_SAMPLES)]


def cut(batch: Any, size: int = 2) -> list[Any]:
    return [
        {name: tensor[i : i + size] for name, tensor in batch.items()} for i in range(0, len(batch["labels"]), size)
    ]


class World:
    """A run in the middle: everything that a step could move, and has moved once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.25),
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(4, 2),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.1, total_steps=100)
        self.ema = AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.made: list[bb.Step] = []
        good_loss(self.model, make_batch()).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.optimizer.zero_grad()

    def step(self, loss_fn: Any = good_loss, **options: Any) -> bb.Step:
        """A step with all that there is; options and arguments may be replaced."""
        usual = dict(micro_batch_size=2, scheduler=self.scheduler, ema=self.ema, max_grad_norm=1.0)
        step = bb.Step(
            options.pop("model", self.model), loss_fn, options.pop("optimizer", self.optimizer), **usual | options
        )
        self.made.append(step)
        return step

    def accumulate(self, loss_fn: Any = good_loss, batch: Any = None, **options: Any) -> Any:
        batch = make_batch() if batch is None else batch
        return bb.accumulate(options.pop("model", self.model), loss_fn, batch, **dict(micro_batch_size=2) | options)

    def state(self) -> dict[str, str]:
        """A hash of everything by name, so that a difference has a name."""
        named = {f"parameter {name}": p for name, p in self.model.named_parameters()}
        found = {
            **{name: [p, p.requires_grad, p.grad_dtype] for name, p in named.items()},
            **{f"grad of {name}": p.grad for name, p in named.items()},
            **{
                f"hooks of {name}": [len(h or ()) for h in (p._backward_hooks, p._post_accumulate_grad_hooks)]
                for name, p in named.items()
            },
            **{f"buffer {name}": buffer for name, buffer in self.model.named_buffers()},
            **{f"module {name}": module_state(module) for name, module in self.model.named_modules()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": [
                self.scaler.state_dict(),
                [dict(s) for s in self.scaler._per_optimizer_states.values() if s["found_inf_per_device"]],
            ],
            "steps": [(step.num_steps, step.num_skipped, step.micro_batch_size, step.plan) for step in self.made],
            "torch's random numbers": torch.get_rng_state(),
            "Python's random numbers": random.getstate(),
            "NumPy's random numbers": np.random.get_state(),
        }
        return {name: digest(value) for name, value in found.items()}


def module_state(module: nn.Module) -> list[Any]:
    hooks = [module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks]
    return [type(module).__name__, module.training, [len(registered) for registered in hooks], sorted(vars(module))]


def digest(value: Any) -> str:
    """Equal for equal bits: of tensors the bytes, so that NaN is equal to itself and -0.0 not to 0.0."""

    def plain(inner: Any) -> Any:
        if isinstance(inner, Tensor):
            return (
                str(inner.dtype),
                tuple(inner.shape),
                inner.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
            )
        if isinstance(inner, Mapping):
            return [(str(name), plain(of_name)) for name, of_name in inner.items()]
        if isinstance(inner, list | tuple):
            return [plain(one) for one in inner]
        return inner.tolist() if isinstance(inner, np.ndarray) else repr(inner)

    return hashlib.sha256(pickle.dumps(plain(value))).hexdigest()


def refused(run: Callable[[], Any], error: type[bb.BigBatchError], message: str) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)) as found:
        run()
    assert type(found.value) is error
    assert isinstance(found.value, BUILTINS[error])


class Switch:
    """A function that is good until somebody breaks it."""

    def __init__(self, good: Any, bad: Any):
        self.good, self.bad, self.broken = good, bad, False

    def __call__(self, *args: Any) -> Any:
        return (self.bad if self.broken else self.good)(*args)


def at_second(bad: Callable[[Any, Any], Any], good: Callable[[Any, Any], Any] = good_loss) -> Callable[[], Any]:
    """A loss that is bad at the second micro-batch, when the first has left its gradient."""

    def make() -> Any:
        calls = iter(range(10))
        return lambda model, batch: bad(model, batch) if next(calls) == 1 else good(model, batch)

    return make
