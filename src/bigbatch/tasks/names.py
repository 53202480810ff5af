"""Names of what is built in. Nothing here loads torch, so that ``--help`` can tell them at once."""

from __future__ import annotations

BUILT_IN = {
    "contrastive": "bigbatch.tasks.contrastive",
    "digits": "bigbatch.tasks.digits",
    "resnet50": "bigbatch.tasks.resnet50",
    "text": "bigbatch.tasks.text",
}
"""Module of each built-in task; the function in it is called as the task."""

SHAPE_NAMES = ("gpt2", "llama-8b", "llama-70b", "resnet50", "unet", "vit-l")
"""The shapes. Where a shape and a task have one name, a plan is made for the shape."""

TASKS = ", ".join(BUILT_IN)
TASKS_TO_PLAN = ", ".join(name for name in BUILT_IN if name not in SHAPE_NAMES)
SHAPES_TO_PLAN = ", ".join(SHAPE_NAMES)

TASK_HELP = f"{TASKS}, or file.py:name of a task of your own."
PLAN_HELP = f"{TASKS_TO_PLAN}, file.py:name of a task of your own, or a shape: {SHAPES_TO_PLAN}."
