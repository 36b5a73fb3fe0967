"""Switch hf_flexseq on in an existing Trainer:
`trainer.add_callback(FlexSeqCallback(trainer))`."""

from typing import Any

from transformers import Trainer, TrainerCallback

from hf_flexseq.config import FlexSeqArguments, arguments_on
from hf_flexseq.hf.trainer.trainer import FlexSeqMixin


class FlexSeqCallback(TrainerCallback):
    """Makes `trainer` plan its steps.

    Args:
        trainer: The trainer to switch on; not a FlexSeq trainer.
        args: The options; None takes those on `trainer.args`, or the defaults.
    """

    def __init__(self, trainer: Trainer, args: FlexSeqArguments | None = None) -> None:
        """Raises as `FlexSeqTrainer` does, and then leaves the trainer unchanged; TypeError for
        anything but a trainer."""
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"FlexSeqCallback got {type(trainer).__name__}, not a trainer: make the trainer, "
                "then trainer.add_callback(FlexSeqCallback(trainer))"
            )
        if isinstance(trainer, FlexSeqMixin):
            raise ValueError(
                f"{type(trainer).__name__} plans its steps already; leave the callback out"
            )
        # Callback events come too late to change how batches are drawn, so the class of this
        # instance is changed. Subclass, mixin and callback thereby share one code path.
        former, attributes = type(trainer), {**vars(trainer)}
        trainer.__class__ = type(f"FlexSeq{former.__name__}", (FlexSeqMixin, former), {})
        try:
            trainer._setup_flexseq(args or _defaults_for(trainer.args))
        except BaseException:
            trainer.__class__, trainer.__dict__ = former, attributes
            raise


def _defaults_for(args: Any) -> FlexSeqArguments | None:
    """Return the default options; None for training arguments that have options."""
    try:
        arguments_on(args)
    except ValueError:
        return FlexSeqArguments()
    return None
