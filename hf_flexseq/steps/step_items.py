"""The items that the Trainer gets for a planned step.

The Trainer counts the batches that it draws. A step therefore goes to it as a list of items, all
but the last of them empty.
"""

from typing import Any

import torch

from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.virtual_tokens import real_tokens


class StepItem(dict[str, Any]):
    """A batch for the Trainer's count. It is read-only: its tokens have been dispatched."""

    step: RankStep[Any] | None = None  # the whole step on its last item, None on the others
    _versions: dict[str, int] | None = None  # None for a copy that a user's code has made

    @classmethod
    def of(cls, ids: torch.Tensor, step: RankStep[Any] | None) -> "StepItem":
        """Return the item with token ids [1, tokens]."""
        item = cls(input_ids=ids, attention_mask=torch.ones_like(ids))
        item.step = step
        item._versions = item._versions_now()
        return item

    @property
    def is_as_made(self) -> bool:
        """True for an item of `step_items` whose tensors nothing has changed."""
        return self._versions == self._versions_now()

    def _versions_now(self) -> dict[str, int]:
        return {name: value._version for name, value in self.items()}

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the inputs of training_step are a planned step, which is read-only and has no labels "
            f"(it has {', '.join(self)}): change samples in the dataset or the data_collator, or "
            "put FlexSeqMixin in front of the class, which then gets each micro-batch"
        )

    __missing__ = __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def step_items(step: RankStep[Any], num_batches: int) -> list[StepItem]:
    """Return `num_batches` items, of which the last one holds the step. For the Trainer's token
    counters it has this rank's tokens [1, tokens] and a mask, the others [1, 0]."""
    nothing = torch.empty(1, 0, dtype=torch.int64)
    ids = real_tokens(step.row).get("input_ids", nothing[0])
    own = ids.unsqueeze(0)  # [tokens] -> [1, tokens]
    return [*(StepItem.of(nothing, None) for _ in range(num_batches - 1)), StepItem.of(own, step)]
