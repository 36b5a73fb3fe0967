"""Columns that some models need besides `position_ids`: like any other, they travel with the
tokens and reach the model as keyword arguments.

A sequence of three tokens and one of two, packed:

    position_ids          0 1 2   0 1
    sequence_lengths      3 3 3   2 2       LENGTHS: one more than the last of its position_ids
    sequence_indices      0 1 2   0 1       INDICES: tokens before it in its sequence

They differ from `position_ids` where a dataset brings its own. They are made from the whole
sequence, before tokens are dispatched. Wherever a plan cuts the sequence, every part therefore has
the same values as in one process.
"""

from collections.abc import Collection

import torch

from hf_flexseq.steps.source_row import SourceRow

LENGTHS = "sequence_lengths"
INDICES = "sequence_indices"


def with_token_columns(row: SourceRow, names: Collection[str]) -> SourceRow:
    """Return `row` with the columns LENGTHS and INDICES, [tokens] of int64, if they are in
    `names`. Raises ValueError if the dataset has a column of such a name."""
    columns = {}
    lengths = torch.tensor(row.lengths, dtype=torch.int64)  # [sequences]
    ends = lengths.cumsum(0)
    if LENGTHS in names:
        last = row.columns["position_ids"][ends - 1]  # [sequences]
        columns[LENGTHS] = (last + 1).to(torch.int64).repeat_interleave(lengths)  # -> [tokens]
    if INDICES in names:
        starts = (ends - lengths).repeat_interleave(lengths)  # [sequences] -> [tokens]
        columns[INDICES] = torch.arange(starts.numel()) - starts
    return row.with_new(columns, "hf_flexseq gives this model")
