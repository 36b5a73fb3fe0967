"""The items that the Trainer gets for a planned step of next-token loss.

The Trainer counts the batches that it draws. A step therefore goes to it as a list of items, all
but the last of them empty.
"""

from typing import Any

import torch

from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.virtual_tokens import real_tokens


class StepItem(dict[str, Any]):
    """A batch for the Trainer's count, whose tokens have been dispatched."""

    step: RankStep[Any] | None = None  # the whole step on its last item, None on the others

    @classmethod
    def of(cls, ids: torch.Tensor, step: RankStep[Any] | None) -> "StepItem":
        """Return the item with token ids [1, tokens]."""
        item = cls(input_ids=ids, attention_mask=torch.ones_like(ids))
        item.step = step
        return item


def step_items(step: RankStep[Any], num_batches: int) -> list[StepItem]:
    """Return `num_batches` items, of which the last one holds the step. For the Trainer's token
    counters it has this rank's tokens [1, tokens] and a mask, the others [1, 0]."""
    nothing = torch.empty(1, 0, dtype=torch.int64)
    ids = real_tokens(step.row).get("input_ids", nothing[0])
    own = ids.unsqueeze(0)  # [tokens] -> [1, tokens]
    return [*(StepItem.of(nothing, None) for _ in range(num_batches - 1)), StepItem.of(own, step)]
