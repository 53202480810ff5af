"""What a run is saved with, and how another one goes on from there."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bigbatch.errors import CheckpointError, OptionError
from bigbatch.training import randomness, sharded_files, weights
from bigbatch.training.checkpoint import Found, Part, verified
from bigbatch.training.progress import Progress
from bigbatch.training.sharding import flat, hollow, like, like_model, like_optimizer, tied

if TYPE_CHECKING:
    from bigbatch.training.loop import Run

_log = logging.getLogger("bigbatch")

_MODEL = "model.safetensors"
_EMA = "ema.safetensors"
_STATE = "state.pt"


def about(run: Run) -> dict[str, Any]:
    """What must be the same in a run that goes on: by the words in which a person would say it."""
    facts = {
        "task": run.task.name,
        "seed": run.task.seed,
        "batch size": run.task.batch_size,
        "samples": len(run.parts.train_data),
        "optimizers": [type(optimizer).__name__ for optimizer in run.step.optimizers],
        "schedulers": [type(scheduler).__name__ for scheduler in run.step.schedulers],
        "ema": None if run.parts.options.ema is None else type(run.parts.options.ema).__name__,
    }
    # More epochs are more of the same, unless the learning rate was planned for so many.
    return facts | ({"epochs": run.task.epochs} if run.step.schedulers else {})


def check_can_be_saved(run: Run) -> None:
    """Say before the training, and not after hours, that its state could not be saved or read back.

    Raises:
        CheckpointError: Something has no ``state_dict``, or keeps in it what a safe reader of pickles refuses.
    """
    for name, found in (*_named("scheduler", run.step.schedulers), *_named("ema", [run.parts.options.ema])):
        if found is not None and not (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")):
            raise CheckpointError(
                f"The run cannot be saved: its {name}, a {type(found).__name__}, has no state_dict and "
                f"load_state_dict. Give it both."
            )
    file = io.BytesIO()
    try:
        state = _state_of(run)
        torch.save(_without_numbers({**state, "model": weights.split(state["model"])[1]}), file)
        torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"The run cannot be saved: {error}\nA checkpoint holds tensors and plain values. If an object of your own "
            f"is in the state of the scheduler, the optimizer, the model or the ema, write in the file of the task "
            f"torch.serialization.add_safe_globals([ItsClass])."
        ) from error


def _without_numbers(value: Any) -> Any:
    """The same with empty tensors: a trial of it costs nothing."""
    if type(value) is torch.Tensor:
        return torch.empty(0)
    if type(value) is dict:
        return {name: _without_numbers(inner) for name, inner in value.items()}
    return [_without_numbers(inner) for inner in value] if type(value) is list else value


def _named(name: str, found: Any) -> Iterator[tuple[str, Any]]:
    return ((name, one) for one in found)


def parts_of(run: Run) -> dict[str, Part]:
    """The files of a checkpoint of that run, as it is now: those that one rank writes, beside ``spread_of``."""
    state = _state_of(run)
    parts: dict[str, Part] = {}
    if not run.group.is_sharded:
        model, state["model"] = weights.split(state["model"])
        parts[_MODEL] = _weights_part(model)
    ema = _ema_state(run)
    if ema is not None:
        parts[_EMA] = _weights_part(weights.split(ema)[0])
    num_bytes = _num_bytes(state)
    if run.group.is_sharded:
        num_bytes += sum(tensor.nbytes for tensor in spread_of(run).values())
    return parts | {_STATE: Part(lambda path: _save(state, path), num_bytes)}


def spread_of(run: Run) -> dict[str, torch.Tensor]:
    """What each rank writes its part of, by name; tied weights once."""
    others = {f"model.{name}" for name in tied(run.parts.model)}
    tensors = flat(_tensors_of(run))
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor) and name not in others}


def _weights_part(tensors: Mapping[str, torch.Tensor]) -> Part:
    return Part(lambda path: weights.write(tensors, path), weights.num_bytes(tensors))


def _ema_state(run: Run) -> dict[str, Any] | None:
    """State of an averaged model; other averages go with the state of the step."""
    return run.parts.options.ema.state_dict() if isinstance(run.parts.options.ema, nn.Module) else None


def _state_of(run: Run) -> dict[str, Any]:
    """All of it. The position is the number of steps: the order of the data follows from it and the seed."""
    step = run.step.state_dict()
    ema = _ema_state(run)
    if ema is not None:
        step["ema"] = weights.split(ema)[1]
    return {
        **hollow(_tensors_of(run)),
        "tied": tied(run.parts.model) if run.group.is_sharded else {},
        "schedulers": [scheduler.state_dict() for scheduler in run.step.schedulers],
        "step": step,
        "progress": run.progress.state_dict(),
        # One for each rank: dropout draws other numbers on each.
        "random": run.group.gathered(randomness.state(run.device)),
        "peak": (run.peak_bytes, run.peak_step),
        "budget_bytes": run.step.budget_bytes,
        "wanted_micro_batch_size": run.step.wanted_micro_batch_size,
    }


def _tensors_of(run: Run) -> dict[str, Any]:
    """What may be spread over the ranks."""
    return {
        "model": run.parts.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.step.optimizers],
    }


def _save(state: Any, path: Path) -> None:
    # Into a file of ours: torch leaves its own open when the disk is full.
    with path.open("wb") as file:
        torch.save(state, file)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 0 if value.is_meta else value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def resume(run: Run, found: Found) -> None:
    """Bring a run that has not begun to where the checkpoint was made.

    All of it is read and compared with the run before anything in the run changes, on any rank. With the memory
    budget, the micro-batch size and the number of ranks of the saved run, the cut is that of the saved run; otherwise
    it is chosen anew. On as many ranks, each goes on with its random numbers; on another number, with new ones.

    Raises:
        CheckpointError: The checkpoint is of another run; the message says what differs.
    """
    state: dict[str, Any] = {}
    problem = None
    try:
        state = _read(run, found)
    except CheckpointError as error:
        problem = error
    run.group.agree(problem)
    _load(run, found, state)


def _read(run: Run, found: Found) -> dict[str, Any]:
    """The state, which is one that the run can load, with its tensors as the run has them."""
    if not run.group.is_first:  # rank 0 has read all of it; this one may read another copy, on its own host
        verified(found.path, by_size=sharded_files.SUFFIX)
    _check_same("it is of another run", found, dict(found.about), about(run))
    # Mapped and not read, where this rank takes but a part of it.
    state = torch.load(str(found.path / _STATE), map_location="cpu", weights_only=True, mmap=run.group.is_sharded)
    now = run.parts.model.state_dict()
    if (found.path / _MODEL).exists():
        state["model"] |= weights.read(found.path / _MODEL, lambda name, value: like(value, now.get(name)))
    _check_same("the model is another one", found, _shapes(state["model"]), _shapes(now))
    ema = _ema_state(run)
    if ema is not None:
        state["step"]["ema"] |= weights.read(found.path / _EMA)
        _check_same("the ema is another one", found, _shapes(state["step"]["ema"]), _shapes(ema))
    groups = [[len(group["params"]) for group in one["param_groups"]] for one in state["optimizers"]]
    here = [[len(group["params"]) for group in one.param_groups] for one in run.step.optimizers]
    _check_same("the optimizers are others", found, {"parameters in groups": groups}, {"parameters in groups": here})
    return state | _ready(run, found, state)


def _ready(run: Run, found: Found, state: dict[str, Any]) -> dict[str, Any]:
    """Model and optimizers as the run can load them, with the numbers that are in the files of the ranks."""
    pairs = zip(state["optimizers"], run.step.optimizers, strict=True)
    ready = {
        "model": like_model(state["model"], run.parts.model),
        "optimizers": [like_optimizer(saved, optimizer) for saved, optimizer in pairs],
    }
    empty = {name for name, tensor in flat({name: state[name] for name in ready}).items() if tensor.is_meta}
    if empty:
        rooms = flat(ready)
        kept = {f"model.{name}": f"model.{first}" for name, first in state["tied"].items()}
        sharded_files.read({name: rooms[name] for name in empty - kept.keys()}, found.path)
        for name in empty & kept.keys():
            rooms[name].copy_(rooms[kept[name]])
    return ready


def _load(run: Run, found: Found, state: dict[str, Any]) -> None:
    try:
        run.step.load_state_dict(state["step"])  # first, because it checks before it loads
    except OptionError as error:
        raise CheckpointError(f"The run cannot go on from {found.path}: {error}", path=found.path) from error
    _choose_cut(run, state)
    run.parts.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.step.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(run.step.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    run.progress = Progress.of(state["progress"])
    run.info = dataclasses.replace(run.info, first_step=run.progress.num_steps)
    # Last: what draws random numbers while it is loaded leaves no trace.
    if len(state["random"]) == run.group.world_size:
        randomness.restore(state["random"][run.group.rank], run.device)
    else:
        randomness.begin("rank", run.task.seed, run.group.rank, "after step", run.progress.num_steps)


def _choose_cut(run: Run, state: dict[str, Any]) -> None:
    step = run.step
    saved = state["budget_bytes"], state["wanted_micro_batch_size"], len(state["random"])
    if saved == (step.budget_bytes, step.wanted_micro_batch_size, run.group.world_size):
        run.peak_bytes, run.peak_step = state["peak"]
        return
    # Of another budget, or of other shares. With a budget the size is measured at the first batch; with none, what
    # fitted still fits.
    step.plan = None
    if step.budget_bytes is not None or step.wanted_micro_batch_size is not None:
        step.micro_batch_size = step.wanted_micro_batch_size


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for name, value in state.items()
    }


def _check_same(what: str, found: Found, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    names = [name for name in {**now, **saved} if saved.get(name, _NONE) != now.get(name, _NONE)]
    if not names:
        return
    differences = [f"{name} {saved.get(name, _NONE)} there and {now.get(name, _NONE)} here" for name in names[:4]]
    more = f", and {len(names) - 4} more" if len(names) > 4 else ""
    raise CheckpointError(
        f"The run cannot go on from {found.path}: {what}: {', '.join(differences)}{more}. Give what it was made with, "
        f"or begin a new run with another --run-dir.",
        path=found.path,
        why=what,
    )


_NONE = "none"
