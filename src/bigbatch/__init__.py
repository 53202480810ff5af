"""Train with the batch you want on the memory you have.

The names below are all there is to import; each is loaded when it is first used, because torch takes more than a
second to import and ``bigbatch --help`` should not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigbatch.batch.loading import LogicalBatchLoader
    from bigbatch.batch.logical import LogicalBatch
    from bigbatch.errors import (
        ArgumentError,
        BatchError,
        BigBatchError,
        BigBatchWarning,
        BudgetError,
        CheckpointError,
        DistributedError,
        EmptyBatchError,
        GradientError,
        LengthError,
        LossError,
        MissingExtraError,
        NonFiniteError,
        OptionError,
        RankMemoryError,
        RecomputeError,
        RunStopped,
        StateLostError,
        TaskError,
        TraceError,
    )
    from bigbatch.memory.limit import limit_memory
    from bigbatch.memory.recompute import apply, recompute
    from bigbatch.planning.costs import MemoryProfile
    from bigbatch.stepping.accumulate import accumulate
    from bigbatch.stepping.coupled.contrastive import info_nce, siglip, sup_con
    from bigbatch.stepping.coupled.whole_batch import WholeBatchLoss
    from bigbatch.stepping.fitting.verbs import plan, profile
    from bigbatch.stepping.learning_rate import scale_learning_rate, total_steps
    from bigbatch.stepping.losses import Constant, Ratio, Sum
    from bigbatch.stepping.normalization.conversions import to_group_norm, to_instance_norm, to_layer_norm
    from bigbatch.stepping.normalization.recalibrating import recalibrate_batch_norm
    from bigbatch.stepping.step import Step
    from bigbatch.training.task import Task
    from bigbatch.values import Plan, StepOptions, StepResult
    from bigbatch.verification.comparison import Comparison
    from bigbatch.verification.verifying import verify

__version__ = "0.1.0"

_ERRORS = "bigbatch.errors"
_HOME = {
    "ArgumentError": _ERRORS,
    "BatchError": _ERRORS,
    "BigBatchError": _ERRORS,
    "BigBatchWarning": _ERRORS,
    "BudgetError": _ERRORS,
    "CheckpointError": _ERRORS,
    "Comparison": "bigbatch.verification.comparison",
    "Constant": "bigbatch.stepping.losses",
    "DistributedError": _ERRORS,
    "EmptyBatchError": _ERRORS,
    "GradientError": _ERRORS,
    "LengthError": _ERRORS,
    "LogicalBatch": "bigbatch.batch.logical",
    "LogicalBatchLoader": "bigbatch.batch.loading",
    "LossError": _ERRORS,
    "MemoryProfile": "bigbatch.planning.costs",
    "MissingExtraError": _ERRORS,
    "NonFiniteError": _ERRORS,
    "OptionError": _ERRORS,
    "Plan": "bigbatch.values",
    "RankMemoryError": _ERRORS,
    "Ratio": "bigbatch.stepping.losses",
    "RecomputeError": _ERRORS,
    "RunStopped": _ERRORS,
    "StateLostError": _ERRORS,
    "Step": "bigbatch.stepping.step",
    "StepOptions": "bigbatch.values",
    "StepResult": "bigbatch.values",
    "Sum": "bigbatch.stepping.losses",
    "Task": "bigbatch.training.task",
    "TaskError": _ERRORS,
    "TraceError": _ERRORS,
    "WholeBatchLoss": "bigbatch.stepping.coupled.whole_batch",
    "accumulate": "bigbatch.stepping.accumulate",
    "apply": "bigbatch.memory.recompute",
    "info_nce": "bigbatch.stepping.coupled.contrastive",
    "limit_memory": "bigbatch.memory.limit",
    "plan": "bigbatch.stepping.fitting.verbs",
    "profile": "bigbatch.stepping.fitting.verbs",
    "recalibrate_batch_norm": "bigbatch.stepping.normalization.recalibrating",
    "recompute": "bigbatch.memory.recompute",
    "scale_learning_rate": "bigbatch.stepping.learning_rate",
    "siglip": "bigbatch.stepping.coupled.contrastive",
    "sup_con": "bigbatch.stepping.coupled.contrastive",
    "to_group_norm": "bigbatch.stepping.normalization.conversions",
    "to_instance_norm": "bigbatch.stepping.normalization.conversions",
    "to_layer_norm": "bigbatch.stepping.normalization.conversions",
    "total_steps": "bigbatch.stepping.learning_rate",
    "verify": "bigbatch.verification.verifying",
}

__all__ = [
    "ArgumentError",
    "BatchError",
    "BigBatchError",
    "BigBatchWarning",
    "BudgetError",
    "CheckpointError",
    "Comparison",
    "Constant",
    "DistributedError",
    "EmptyBatchError",
    "GradientError",
    "LengthError",
    "LogicalBatch",
    "LogicalBatchLoader",
    "LossError",
    "MemoryProfile",
    "MissingExtraError",
    "NonFiniteError",
    "OptionError",
    "Plan",
    "RankMemoryError",
    "Ratio",
    "RecomputeError",
    "RunStopped",
    "StateLostError",
    "Step",
    "StepOptions",
    "StepResult",
    "Sum",
    "Task",
    "TaskError",
    "TraceError",
    "WholeBatchLoss",
    "accumulate",
    "apply",
    "info_nce",
    "limit_memory",
    "plan",
    "profile",
    "recalibrate_batch_norm",
    "recompute",
    "scale_learning_rate",
    "siglip",
    "sup_con",
    "to_group_norm",
    "to_instance_norm",
    "to_layer_norm",
    "total_steps",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bigbatch' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
