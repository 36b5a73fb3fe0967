"""The collators that replace a Trainer's own, and the dataloader of one training, as planned steps
draw from it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from transformers import Trainer
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.trainer_utils import has_length

from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.loaders import LongestLoader, batches_on_host
from hf_flexseq.hf.engine.lookahead import draws_in_place
from hf_flexseq.hf.model.loss_kinds import rolls_out
from hf_flexseq.steps.collator import DataCollatorForFlexSeq, PaddedCollator
from hf_flexseq.steps.console import beside_bars

logger = logging.getLogger(__name__)


def flexseq_collator(given: Any) -> DataCollatorForFlexSeq:
    """Return our own collator, a new one for the Trainer's defaults, or a wrapper of `given`."""
    if isinstance(given, DataCollatorForFlexSeq):
        return given
    if given is default_data_collator or type(given) is DataCollatorWithPadding:
        ours = DataCollatorForFlexSeq()
        if hasattr(given, "tokenizer"):
            ours.tokenizer = given.tokenizer  # the Trainer saves it with the model
        return ours
    return DataCollatorForFlexSeq(given)


def padded_collator(given: Any, ours: DataCollatorForFlexSeq) -> Any:
    """Return the collator of padded batches: the user's own, or `PaddedCollator` for ours and
    defaults. ours: result of `flexseq_collator(given)`."""
    is_own = ours is not given and ours.example_collator is given
    return given if is_own else PaddedCollator(ours)


def is_around(given: Any, collator: Any) -> bool:
    """Tell if a collator calls another one, None for none: by a variable or an attribute."""
    held = [*getattr(given, "__dict__", {}).values()]
    for cell in getattr(given, "__closure__", None) or ():
        with suppress(ValueError):  # a variable without a value
            held.append(cell.cell_contents)
    return collator is not None and any(one is collator for one in held)


class EvaluationCollator:
    """Collates for the loaders of evaluations: padded batches, as the plain Trainer's, for who
    looks at a loader, and rows to plan while an evaluation computes its loss alone."""

    padded: Callable[[list[Any]], Any]
    """Makes padded batches."""
    planned: DataCollatorForFlexSeq
    """Makes rows to plan."""

    def __init__(self) -> None:
        # a scalar that workers share, since some outlive an evaluation
        self._plans = torch.zeros((), dtype=torch.bool).share_memory_()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the collator of padded batches."""
        if name.startswith("_") or name in ("padded", "planned"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.padded, name)

    def __call__(self, examples: list[Any]) -> Any:
        """Return a batch of the examples."""
        return (self.planned if self._plans else self.padded)(examples)

    @contextmanager
    def planning(self, plans: bool) -> Iterator[None]:
        """Make rows to plan inside this block, if `plans`."""
        before = bool(self._plans)
        self._plans.fill_(plans)
        try:
            yield
        finally:
            self._plans.fill_(before)


# ---- the dataloader


class TrainingData:
    """The dataloader of one training: keeps batches on the host until training ends, and bounds
    each epoch by the loader's length.

    The Trainer asks an iterator for that many batches and no more, while steps that are planned
    ahead would ask until it ends. A loader may count its ends, as accelerate's do, and shuffle by
    that count; those that the Trainer tells the epoch (`set_epoch`) shuffle by the epoch instead,
    and are left alone. A chain of loaders does not get it. Without `even_batches` ranks draw
    different numbers of batches until the last one is done.
    """

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine, dataloader: Any) -> None:
        self._trainer: Any = trainer
        self._engine = engine
        self._accumulation = trainer.args.gradient_accumulation_steps
        self._has_drawn = False
        self._has_named_rest = False
        self.loader = LongestLoader.over(dataloader, engine.communicator)
        """The loader that the Trainer is to iterate over."""
        is_bounded = not hasattr(self.loader, "set_epoch") and has_length(self.loader)
        self._length = len(self.loader) if is_bounded else None
        # the last iterator of the loader, and what stands for it
        self._epoch: tuple[Iterator[Any], Iterator[Any]] | None = None

    @classmethod
    @contextmanager
    def of(
        cls, trainer: Trainer, engine: FlexSeqEngine, dataloader: Any
    ) -> Iterator["TrainingData"]:
        """Surround the training. Collective over the world when it begins."""
        with batches_on_host(dataloader):
            data = cls(trainer, engine, dataloader)
            try:
                yield data
            finally:
                # As the Trainer does at the end: this stops its workers. The garbage collector
                # may come too late for its queues, and wait 5 s for each worker.
                data._epoch = None

    def batches(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator that stands for `epoch_iterator`, the same one every time.
        Collective over the world."""
        self.check_accumulation()
        if self._epoch is None or self._epoch[0] is not epoch_iterator:
            bounded = islice(epoch_iterator, self._length)
            is_stream = not has_length(self.loader)
            self._epoch = (epoch_iterator, self._with_rest(bounded) if is_stream else bounded)
        if not self._has_drawn:
            self._has_drawn = True
            self._choose_lookahead()
        return self._epoch[1]

    def _with_rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a stream's batches, and say once how a rest at its end is trained on."""
        count = 0
        for batch in batches:
            yield batch
            count += 1
        rest = count % self._accumulation
        if rest and not self._has_named_rest and self._trainer.is_world_process_zero():
            self._has_named_rest = True
            with beside_bars():
                logger.warning(
                    "train_dataset ends after %d batches: the last %d of %d in a step are a "
                    "smaller step, where the plain Trainer adds their gradients to the next step",
                    *(count, rest, self._accumulation),
                )

    def check_accumulation(self) -> None:
        """Raise ValueError if a callback has changed the accumulation during training."""
        steps = self._trainer.args.gradient_accumulation_steps
        if steps != self._accumulation:
            raise ValueError(
                f"gradient_accumulation_steps has changed from {self._accumulation} to {steps} "
                "while training: set it before trainer.train()"
            )

    def _choose_lookahead(self) -> None:
        """Draw steps ahead if that changes nothing. Collective over the world. By now callbacks
        have seen the beginning of training."""
        if self._engine.args.lookahead == 0 or rolls_out(self._trainer):
            return
        loader = self._trainer.callback_handler.train_dataloader
        if draws_in_place(self._trainer, loader, self._engine.communicator):
            self._engine.draw_in_place()
