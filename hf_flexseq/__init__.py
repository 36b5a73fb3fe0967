"""Flexible sequence parallelism for the HuggingFace Trainer.

Public names are resolved when they are first used, so that planning imports neither torch nor
transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_flexseq.config import FlexSeqArguments
    from hf_flexseq.hf.engine.engine import FlexSeqEngine
    from hf_flexseq.hf.model.probe import probe_model
    from hf_flexseq.hf.trainer.callback import FlexSeqCallback
    from hf_flexseq.hf.trainer.trainer import FlexSeqConfig, FlexSeqMixin, FlexSeqTrainer
    from hf_flexseq.plan import Plan, PlanInfeasible
    from hf_flexseq.steps.collator import DataCollatorForFlexSeq

__version__ = "0.1.0"

_HOMES = {
    "DataCollatorForFlexSeq": "hf_flexseq.steps.collator",
    "FlexSeqArguments": "hf_flexseq.config",
    "FlexSeqCallback": "hf_flexseq.hf.trainer.callback",
    "FlexSeqConfig": "hf_flexseq.hf.trainer.trainer",
    "FlexSeqEngine": "hf_flexseq.hf.engine.engine",
    "FlexSeqMixin": "hf_flexseq.hf.trainer.trainer",
    "FlexSeqTrainer": "hf_flexseq.hf.trainer.trainer",
    "Plan": "hf_flexseq.plan",
    "PlanInfeasible": "hf_flexseq.plan",
    "probe_model": "hf_flexseq.hf.model.probe",
}

__all__ = [
    "DataCollatorForFlexSeq",
    "FlexSeqArguments",
    "FlexSeqCallback",
    "FlexSeqConfig",
    "FlexSeqEngine",
    "FlexSeqMixin",
    "FlexSeqTrainer",
    "Plan",
    "PlanInfeasible",
    "probe_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
