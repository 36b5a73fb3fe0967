"""Collators that replace a Trainer's own."""

from typing import Any

from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

from hf_flexseq.steps.collator import DataCollatorForFlexSeq, PaddedCollator


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
