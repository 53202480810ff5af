"""What a run leaves behind: a log line for each step and epoch, curves for TensorBoard, weights, and the result."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bigbatch.errors import MissingExtraError, TaskError
from bigbatch.training import weights
from bigbatch.training.events import EpochRecord, Listener, RunInfo, RunResult, StepRecord
from bigbatch.training.sharding import once, one_by_one, tied
from bigbatch.values import Plan

_SECONDS_BETWEEN_READS = 1.0


class _Blocks(Listener):
    """Keeps the records of steps, and reads them once a second: reading a loss waits for the device."""

    def __init__(self) -> None:
        self._waiting: list[StepRecord] = []
        self._last_read = time.monotonic()

    def stepped(self, record: StepRecord) -> None:
        self._waiting.append(record)
        if time.monotonic() - self._last_read >= _SECONDS_BETWEEN_READS:
            self.read()

    def read(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self.write_step(record.as_dict())
        self.flush()
        self._last_read = time.monotonic()

    def epoch_ended(self, record: EpochRecord) -> None:
        self.read()
        self.write_epoch(dataclasses.asdict(record))
        self.flush()

    def saving(self) -> None:
        """A run that goes on from there will not make these steps again."""
        self.read()

    def close(self) -> None:
        """Also when the run failed: the last steps are what one wants to see then."""
        self.read()

    def write_step(self, step: dict[str, Any]) -> None: ...

    def write_epoch(self, epoch: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...


class JsonLog(_Blocks):
    """One JSON object a line: ``{"event": "step", "step": 1, "loss": 2.31, ...}``.

    The other events are run, resume, plan and epoch. Lines are on the disk at most a second after what they tell, at
    the end of each epoch and before each checkpoint.

    Args:
        path: The file.
        first_step: Go on with the log of a run after this step: lines about later ones are taken out, because those
            steps will be made again. 0: begin a new file.
    """

    def __init__(self, path: Path, *, first_step: int = 0):
        super().__init__()
        if first_step and path.exists():
            _cut_after(path, first_step)
        self._file = path.open("a" if first_step else "w", encoding="utf-8")

    def began(self, info: RunInfo) -> None:
        """Write the line ``run``, or ``resume`` when it goes on."""
        self._line("resume" if info.first_step else "run", dataclasses.asdict(info))

    def saving(self) -> None:
        """Bring all lines to the disk."""
        super().saving()
        os.fsync(self._file.fileno())

    def fitted(self, plan: Plan) -> None:
        """Write the line ``plan``."""
        self._line("plan", dataclasses.asdict(plan))

    def write_step(self, step: dict[str, Any]) -> None:
        """Write a line ``step``."""
        self._line("step", step)

    def write_epoch(self, epoch: dict[str, Any]) -> None:
        """Write a line ``epoch``."""
        self._line("epoch", epoch)

    def flush(self) -> None:
        """Hand the lines over to the system."""
        self._file.flush()

    def close(self) -> None:
        """Write what waits, and close the file."""
        super().close()
        self._file.close()

    def _line(self, event: str, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")


def _cut_after(path: Path, step: int) -> None:
    """Leave the lines about steps up to this one; the last line may be half of one."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if values.get("step", 0) <= step and values.get("first_step", 0) < step:
            kept.append(f"{line}\n")
    _written(path, lambda unfinished: unfinished.write_text("".join(kept), encoding="utf-8"))


class TensorBoardLog(_Blocks):
    """Loss, gradient norm, learning rate and speed by step, and the results of the evaluation.

    Args:
        directory: Of the curves.
        first_step: Later steps that are there already are not shown.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, *, first_step: int = 0):
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "The log for TensorBoard needs the package tensorboard, which is not installed: "
                'pip install "bigbatch[log]".'
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else None)

    def write_step(self, step: dict[str, Any]) -> None:
        """Write the numbers of a step."""
        for name in ("loss", "grad_norm", "noise_scale", "learning_rate", "samples_per_second", "data_share"):
            if isinstance(step[name], int | float):  # what is not finite is text, for JSON
                self._writer.add_scalar(f"train/{name}", step[name], step["step"])

    def write_epoch(self, epoch: dict[str, Any]) -> None:
        """Write the results of an evaluation."""
        for name, value in epoch["metrics"].items():
            self._writer.add_scalar(f"eval/{name}", value, epoch["step"])

    def flush(self) -> None:
        """Hand the numbers over to the system."""
        self._writer.flush()

    def close(self) -> None:
        """Write what waits, and close the file."""
        super().close()
        self._writer.close()


def make_run_dir(run_dir: str | Path | None, name: str, *, goes_on: bool = False) -> Path:
    """The folder of a run: the given one, or a new one in ``runs`` with the task and the time in its name.

    Args:
        run_dir: The given one, or None.
        name: Of the task.
        goes_on: The given one may hold the files of a run already: those of this one.

    Raises:
        TaskError: The given one holds the files of a run already, or cannot be made.
    """
    if run_dir is not None:
        path = Path(run_dir)
        if (path / "log.jsonl").exists() and not goes_on:
            raise TaskError(
                f"{path} holds the files of another run. Give another --run-dir, remove that folder, or go on with "
                f"that run: --resume auto."
            )
        return _made(path, exist_ok=True)
    first = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    path = first
    while path.exists():  # another run began in the same second
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return _made(path, exist_ok=False)


def _made(path: Path, *, exist_ok: bool) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        raise TaskError(
            f"The folder {path} of the run cannot be made: {error.strerror}. Give another --run-dir."
        ) from error
    return path


def save_result(run_dir: Path, result: RunResult, model: nn.Module, ema: Any) -> list[Path]:
    """Write ``model.safetensors``, ``ema.safetensors`` when there is an averaged model, and ``result.json``.

    Args:
        run_dir: The folder of the run.
        result: How it went.
        model: The trained model. When it is spread over ranks, the others ``take_part`` meanwhile.
        ema: Its average, or None.

    Returns:
        The files.
    """
    models = {"model": model}
    if isinstance(ema, nn.Module):
        models["ema"] = ema.module if isinstance(ema, torch.optim.swa_utils.AveragedModel) else ema
    files = [_written(run_dir / f"{name}.safetensors", _saver(one)) for name, one in models.items()]
    text = json.dumps(dataclasses.asdict(result), indent=2) + "\n"
    files.append(_written(run_dir / "result.json", lambda path: path.write_text(text, encoding="utf-8")))
    return files


def _saver(model: nn.Module) -> Callable[[Path], Any]:
    from safetensors.torch import save_model

    tensors = once(model)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return lambda path: weights.write_in_turns(tensors, one_by_one(tensors.values()), tied(model), path)
    return lambda path: save_model(model, str(path))  # knows tied weights, which save_file refuses


def _written(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write beside it and rename: a file of that name is always whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write(unfinished)
    os.replace(unfinished, path)
    return path
