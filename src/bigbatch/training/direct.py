"""The direct big batch as anybody would write it: one forward, one backward, one optimizer step, and no ``Step``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigbatch.batch.moving import moved
from bigbatch.stepping.averaging import updater_of
from bigbatch.stepping.checks import parameters_of, schedulers_of
from bigbatch.stepping.losses import plain_loss
from bigbatch.stepping.precision import Precision
from bigbatch.training.building import Parts, build
from bigbatch.training.data import eval_loader, going_through, train_loader
from bigbatch.training.evaluating import evaluate
from bigbatch.training.task import Task


def train_directly(task: Task, device: torch.device) -> dict[str, float]:
    """Train the task with its big batch at once, from its seed; the results of the last evaluation."""
    parts = build(task, device)
    steps = DirectSteps(task, parts, device)
    with going_through(train_loader(task, parts.train_data)) as batches:
        for batch in batches:
            steps.step(batch)
    if parts.eval_data is None:
        return {}
    loader = eval_loader(task, parts.eval_data, task.eval_batch_size or task.batch_size)
    return evaluate(task, parts.evaluated, loader, device)


class DirectSteps:
    """Optimizer steps of the whole batch at once, with clipping, loss scaling, scheduler and average of the task."""

    def __init__(self, task: Task, parts: Parts, device: torch.device):
        self.task = task
        self.parts = parts
        self.device = device
        self._update_average = updater_of(parts.options.ema)
        self.precision = Precision(parts.options.precision, device.type)
        self.schedulers = schedulers_of(parts.options.scheduler, parts.optimizers)
        if task.batch_norm == "frozen":
            for module in parts.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

    def backward(self, batch: Any) -> None:
        """Add the gradient of the batch to ``.grad``, scaled when there is a scaler."""
        if self.task.collate is not None:
            batch = self.task.collate(batch)
        batch = moved(batch, self.device)
        with self.precision.forward(self.device.type):
            loss = plain_loss(self.task.loss_fn(self.parts.model, batch))
        scaler = self.precision.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def step(self, batch: Any) -> None:
        """Make one optimizer step."""
        self.backward(batch)
        scaler, skipped = self.precision.scaler, False
        parameters = parameters_of(self.parts.optimizers)
        if scaler is not None:
            for optimizer in self.parts.optimizers:
                scaler.unscale_(optimizer)
            skipped = not all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
        if self.task.max_grad_norm is not None and not skipped:
            nn.utils.clip_grad_norm_(parameters, self.task.max_grad_norm)
        for optimizer in self.parts.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self.parts.model.zero_grad()
        if not skipped:
            self._move_on()

    def _move_on(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()
        if self._update_average is not None:
            self._update_average(self.parts.model)
