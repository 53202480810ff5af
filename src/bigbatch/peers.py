"""The words of other libraries: what they are called here."""

from __future__ import annotations

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
