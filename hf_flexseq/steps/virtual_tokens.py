"""Virtual tokens in front of every sequence, as prompt tuning and P-tuning train them.

PEFT puts the embeddings of n virtual tokens in front of each row of a batch. Here n placeholders
join each sequence where it is drawn, so that plans count and place them like any other token. Two
sequences with three virtual tokens each:

    input_ids         0 0 0 a b   0 0 0 c
    virtual_tokens    1 2 3 0 0   1 2 3 0      NUMBERS: from 1; 0 for a token of the dataset
    position_ids      0 1 2 3 4   0 1 2 3
    labels            - - a b -   - - c -      the targets, where every token has a label

The model puts the trained embeddings where the placeholders are (`hf/model/adapters.py`).

The last virtual token predicts the first token of its sequence. The plain Trainer trains on this
target, too, but does not count it in num_items_in_batch: `RowCounts.uncounted_targets`.
"""

from dataclasses import dataclass, replace

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.source_row import Columns, SourceRow

NUMBERS = "virtual_tokens"

# What PEFT hands on to the model besides the embeddings, or makes itself.
_COLUMNS = {"input_ids", "labels", "position_ids"}


def with_virtual_tokens(row: SourceRow, count: int) -> SourceRow:
    """Return a row with so many placeholders in front of each sequence. Raises ValueError for
    images, and for columns besides input_ids, labels and position_ids."""
    others = sorted({*row.columns, *row.names_of_images} - _COLUMNS)
    if others:
        raise ValueError(
            f"examples have {', '.join(others)}, of which virtual tokens of PEFT have no value: "
            "leave the columns out of the dataset"
        )
    if not row.columns:
        return replace(row, virtual_tokens=count)

    # 1. where tokens are, [tokens] each
    lengths = torch.tensor(row.lengths, dtype=torch.int64) + count  # [sequences]
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    is_virtual = positions < count

    # 2. what they are
    given = row.columns
    ids = given["input_ids"].new_zeros(len(positions))
    ids[~is_virtual] = given["input_ids"]
    labels = given["labels"].new_full((len(positions),), IGNORE_INDEX)
    labels[~is_virtual] = given["labels"]
    first_labels = torch.tensor(row.first_labels, dtype=labels.dtype)  # [sequences]
    labels[starts + count - 1] = first_labels
    columns = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions.to(given["position_ids"].dtype),
        NUMBERS: torch.where(is_virtual, positions + 1, 0),
    }
    return replace(
        row,
        columns=columns,
        lengths=tuple(lengths.tolist()),
        virtual_tokens=count,
        counts=row.counts._replace(uncounted_targets=int((first_labels != IGNORE_INDEX).sum())),
    )


def real_tokens(row: SourceRow) -> Columns:
    """Return the columns of a row, [tokens] each, without virtual tokens."""
    columns = dict(row.columns)
    numbers = columns.pop(NUMBERS, None)
    if numbers is None:
        return columns
    return {name: value[numbers == 0] for name, value in columns.items()}


@dataclass(frozen=True, slots=True)
class VirtualTokens:
    """The virtual tokens that a rank holds in one micro-batch."""

    places: torch.Tensor
    """[virtual] Their indices among the tokens of the micro-batch."""
    numbers: torch.Tensor
    """[virtual] Their numbers, from 0."""

    @classmethod
    def of(cls, numbers: torch.Tensor, device: torch.device) -> "VirtualTokens":
        """Return a micro-batch's virtual tokens. numbers: its column NUMBERS, [tokens] on the
        CPU."""
        places = numbers.nonzero().flatten()
        own = numbers[places] - 1
        return cls(to_device(places, device), to_device(own, device))

    def embedded(self, given: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens with the prompt's embeddings in them: [1, tokens, width] -> the
        same.

        given: embedded tokens, with placeholders. prompt: [n, width], of all virtual tokens. It
        takes part in the result, with gradients of 0, where this rank holds no virtual token.
        """
        own = prompt.to(given.dtype)[self.numbers]  # [virtual, width]
        return given.index_copy(1, self.places, own.unsqueeze(0))
