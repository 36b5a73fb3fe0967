"""Switch hf_flexseq on in a Trainer that exists already:
`trainer.add_callback(FlexSeqCallback(trainer))`."""

from typing import Any

from transformers import Trainer, TrainerCallback

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.trainer import FlexSeqMixin, arguments_on


class FlexSeqCallback(TrainerCallback):
    """Makes `trainer` plan its steps.

    The events of a callback come too late to change how batches are drawn, so the work is done in
    the constructor: it puts `FlexSeqMixin` in front of the trainer's class, for this instance.
    Subclass, mixin and callback are thereby one code path.

    Args: trainer (`Trainer`): the trainer to switch on; not one that plans already. args
    (`FlexSeqArguments`, *optional*): the options; by default those on `trainer.args`, or the
    defaults.
    """

    def __init__(self, trainer: Trainer, args: FlexSeqArguments | None = None) -> None:
        if isinstance(trainer, FlexSeqMixin):
            raise ValueError(
                f"{type(trainer).__name__} plans its steps already; leave the callback out"
            )
        former = type(trainer)
        trainer.__class__ = type(f"FlexSeq{former.__name__}", (FlexSeqMixin, former), {})
        try:
            trainer._setup_flexseq(args or _arguments_or_defaults(trainer.args))
        except (ValueError, NotImplementedError):
            trainer.__class__ = former
            raise


def _arguments_or_defaults(args: Any) -> FlexSeqArguments:
    try:
        return arguments_on(args)
    except ValueError:
        return FlexSeqArguments()
