"""Which collator a Trainer gets in place of its own."""

from typing import Any

from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

from hf_flexseq.steps.collator import DataCollatorForFlexSeq, PaddedCollator


def flexseq_collator(given: Any) -> DataCollatorForFlexSeq:
    """Return our own collator as it is, one of ours in place of the Trainer's defaults, which only
    pad, and one of ours around any other."""
    if isinstance(given, DataCollatorForFlexSeq):
        return given
    if given is default_data_collator or type(given) is DataCollatorWithPadding:
        ours = DataCollatorForFlexSeq()
        if hasattr(given, "tokenizer"):
            ours.tokenizer = given.tokenizer  # the Trainer saves it with the model
        return ours
    return DataCollatorForFlexSeq(given)


def padded_collator(given: Any, ours: DataCollatorForFlexSeq) -> Any:
    """Return what makes padded batches: the user's own collator as it is, and one of ours where
    the Trainer's defaults only pad, or ours was given.

    ours: what `flexseq_collator` made of the given one.
    """
    is_own = ours is not given and ours.example_collator is given
    return given if is_own else PaddedCollator(ours)
