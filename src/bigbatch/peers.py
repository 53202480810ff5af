"""The words of other libraries: what they are called here, and a plan in their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bigbatch.errors import OptionError, warn
from bigbatch.units import format_bytes, format_names

if TYPE_CHECKING:
    from bigbatch.values import Plan

_ACCUMULATION = "Give micro_batch_size=, the samples in one forward-backward; how many follows from the batch."
OUR_WORDS = {
    "gradient_accumulation_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "accumulation_steps": _ACCUMULATION,
    "per_device_train_batch_size": "Give batch_size=, over all devices, and micro_batch_size=.",
    "device_train_microbatch_size": "It is called micro_batch_size here.",
    "microbatch_size": "It is called micro_batch_size here.",
    "train_batch_size": "It is called batch_size here, and it is the global one.",
    "clip_grad_norm": "It is called max_grad_norm here.",
    "gradient_clip_val": "It is called max_grad_norm here.",
    "gradient_clipping": "It is called max_grad_norm here.",
    "mixed_precision": 'It is called precision here: "bf16" or "fp16".',
    "scaler": "Give the GradScaler as precision=.",
    "lr_scheduler": "It is called scheduler here.",
    "plan": "bb.apply(plan, model) puts its recompute on; give micro_batch_size=plan.micro_batch_size.",
    "memory_budget": "bb.Step finds the micro-batch size for a budget; here give micro_batch_size=.",
    "batch_size": "The batch that is handed over says its size; give micro_batch_size=.",
    "collate_fn": "It is called collate here.",
    "gradient_checkpointing": "Recomputed modules are part of a plan: plan=bb.Plan(..., recompute=(names)).",
    "activation_checkpointing": "Recomputed modules are part of a plan: plan=bb.Plan(..., recompute=(names)).",
}


class _Cut(NamedTuple):
    """Equal micro-batches, the only cut that other libraries have: on each rank ``steps`` of ``size`` samples."""

    size: int
    steps: int
    world_size: int


class _Words(NamedTuple):
    """How a library is told: its words for a cut, those for recompute, and what it has none for."""

    cut: Callable[[_Cut], dict[str, Any]]
    recompute: dict[str, Any] | None
    recompute_is: str
    accumulation_dtype: Callable[[str], dict[str, Any]] | None = None
    offload: dict[str, Any] | None = None
    # Transformers and torchtune divide by the number of tokens in all micro-batches; the others average their means.
    counts_tokens: bool = False


_BOTH = "or leave it out and call bb.apply(plan, model), which recomputes what was planned"
_PEERS: dict[str, _Words] = {
    "transformers": _Words(
        lambda cut: {"per_device_train_batch_size": cut.size, "gradient_accumulation_steps": cut.steps},
        # 5.24 warns that this will be called activation_checkpointing in 6.0; 4.57 does not know that name yet.
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        f"gradient_checkpointing recomputes every layer; {_BOTH}",
        counts_tokens=True,
    ),
    "lightning": _Words(
        lambda cut: {"Trainer": {"accumulate_grad_batches": cut.steps}, "DataLoader": {"batch_size": cut.size}},
        None,
        "it has no option for that; call bb.apply(plan, model), which recomputes what was planned",
    ),
    "accelerate": _Words(
        lambda cut: {
            "Accelerator": {"gradient_accumulation_steps": cut.steps},
            "DataLoader": {"batch_size": cut.size},
        },
        None,
        "it has no option for that; call bb.apply(plan, model), which recomputes what was planned",
    ),
    "deepspeed": _Words(
        lambda cut: {
            "train_batch_size": cut.size * cut.steps * cut.world_size,
            "train_micro_batch_size_per_gpu": cut.size,
            "gradient_accumulation_steps": cut.steps,
        },
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
        "activation_checkpointing sets up deepspeed.checkpointing.checkpoint, and the model has to call it; " + _BOTH,
        lambda dtype: {"data_types": {"grad_accum_dtype": _DEEPSPEED_DTYPES.get(dtype, dtype)}},
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True}},
    ),
    "torchtune": _Words(
        lambda cut: {"batch_size": cut.size, "gradient_accumulation_steps": cut.steps},
        {"enable_activation_checkpointing": True},
        f"enable_activation_checkpointing recomputes every layer; {_BOTH}",
        offload={"enable_activation_offloading": True},
        counts_tokens=True,
    ),
}
_DEEPSPEED_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def to_peer(plan: Plan, peer: str, *, world_size: int = 1, batch_size: int | None = None) -> dict[str, Any]:
    """A plan in the words of another library; the optimizer step is over the same samples.

    Args:
        plan: The plan of one rank.
        peer: "transformers" (for ``TrainingArguments``), "lightning" (for ``Trainer`` and its ``DataLoader``),
            "accelerate" (for ``Accelerator`` and its ``DataLoader``), "deepspeed" (its JSON), "torchtune" (its YAML).
        world_size: Ranks that share a batch.
        batch_size: Samples of a step over all ranks. None: ``micro_batch_size * accumulation_steps`` on each rank.

    Raises:
        OptionError: The library is unknown, the batch cannot be shared equally, or its size is not known.

    Warns:
        BigBatchWarning: The library has no words for a part of the plan; each part is named.
    """
    if peer not in _PEERS:
        raise OptionError(f"There are no words for {peer!r}. The libraries are {', '.join(_PEERS)}.")
    words, cut = _PEERS[peer], _equal_cut(plan, world_size, batch_size)
    found = words.cut(cut)
    if plan.recompute and words.recompute is not None:
        found |= words.recompute
    if plan.offload and words.offload is not None:
        found |= words.offload
    if plan.accumulation_dtype is not None and words.accumulation_dtype is not None:
        found |= words.accumulation_dtype(plan.accumulation_dtype)
    lost = _lost(plan, words, cut)
    if lost:
        parts = " ".join(f"({number}) {part}." for number, part in enumerate(lost, start=1))
        warn(f"{peer} has no words for a part of this plan: {parts}")
    return found


def _equal_cut(plan: Plan, world_size: int, batch_size: int | None) -> _Cut:
    """The fewest equal micro-batches that are no larger than the plan's."""
    if batch_size is None:
        if plan.accumulation_steps is None:
            raise OptionError("The plan does not say accumulation_steps, so give batch_size=, over all ranks.")
        return _Cut(plan.micro_batch_size, plan.accumulation_steps, world_size)
    on_a_rank, rest = divmod(batch_size, world_size)
    if rest:
        raise OptionError(
            f"batch_size={batch_size} over world_size={world_size} ranks leaves {rest} over; other libraries need the "
            f"same number on each. Take {max(on_a_rank, 1) * world_size}, or another number of ranks."
        )
    fewest = -(-on_a_rank // plan.micro_batch_size)
    steps = next(steps for steps in range(fewest, on_a_rank + 1) if on_a_rank % steps == 0)
    return _Cut(on_a_rank // steps, steps, world_size)


def _lost(plan: Plan, words: _Words, cut: _Cut) -> list[str]:
    """What cannot be said in the words of a library, each part in words of ours."""
    lost = []
    fewest = -(-cut.size * cut.steps // plan.micro_batch_size)
    if cut.steps > fewest:
        lost.append(
            f"micro-batches of different sizes: {cut.size * cut.steps} samples in {fewest} of at most "
            f"{plan.micro_batch_size} became {cut.steps} of {cut.size}, which takes longer"
        )
    groups = [entry for entry in plan.recompute if not isinstance(entry, str) and len(entry) > 1]
    if plan.recompute:
        names = [entry if isinstance(entry, str) else " + ".join(entry) for entry in plan.recompute]
        lost.append(f"which modules are recomputed, {format_names(names)}: {words.recompute_is}")
    if groups and words.recompute is not None:
        above = "" if plan.peak_bytes is None else f" of {format_bytes(plan.peak_bytes)}"
        lost.append(f"groups recomputed as one: each layer alone may need more than the planned peak{above}")
    if plan.keep and words.recompute is not None:
        kept = format_names([f"{what} of {name}" for name, what in plan.keep])
        lost.append(f"what is kept of recomputed modules, {kept}: it runs again, which takes longer")
    if plan.offload and words.recompute is not None:
        names = format_names(list(plan.offload))
        # transformers 5.24 takes "offload" beside use_reentrant; those before hand it to torch, which refuses it.
        where = "they stay on the card" if words.offload is None else "there it is for every layer"
        lost.append(f"which inputs lie in host memory, {names}: {where}")
    if plan.accumulation_dtype is not None and words.accumulation_dtype is None:
        lost.append(f"accumulation_dtype={plan.accumulation_dtype!r}: gradients are added up in their own dtype")
    if cut.steps > 1 and not words.counts_tokens:
        lost.append("weights: it averages the means of the micro-batches, which for a loss over tokens is another loss")
    return lost
