"""A loss's call of the model: a padded batch, and its tokens in one row.

    input_ids   attention_mask     in a row
    . a b c     0 1 1 1            a b c d e      3 and 2 tokens
    d e . .     1 1 0 0

The row is what `DataCollatorForFlexSeq` would have made of the sequences. Results of its tokens
are put back where the padded batch has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.collator import LENGTHS

# Arguments of a call that change nothing of what is computed of its tokens, or say how it is
# answered.
_HARMLESS = {
    *("use_cache", "fused_lm_head", "return_dict", "num_items_in_batch", "logits_to_keep"),
    "past_key_values",
    "margin",  # of a pair: TRL hands it to reward models, which ignore it
}
_READ = {"input_ids", "attention_mask", "labels"}


class Call:
    """One call of a model, on a padded batch."""

    __slots__ = ("_places", "ids", "lengths", "mask", "targets")

    def __init__(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor | None
    ) -> None:
        """ids: [B, S]. attention_mask: [B, S], 1 for tokens and 0 around them; None: all are.
        labels: [B, S], of the tokens themselves; None where the model predicts no tokens.

        Raises ValueError for a mask that does more than to mark padding.
        """
        self.ids = ids.clone()  # a loss may change its batch
        self.mask = torch.ones_like(ids, dtype=torch.bool)
        """[B, S] True for tokens."""
        if attention_mask is not None:
            self.mask = attention_mask.bool()
        self.targets = torch.full_like(ids, IGNORE_INDEX)
        """[B, S] the label that each token predicts, IGNORE_INDEX for none."""
        if labels is not None:
            # the next token's label, and none where padding is next
            self.targets[:, :-1] = labels[:, 1:].masked_fill(~self.mask[:, 1:], IGNORE_INDEX)
        self.lengths = _checked_lengths(self.mask)
        """Tokens of each sequence."""
        self._places = self.mask.nonzero(as_tuple=True)  # rows and columns of all tokens

    @classmethod
    def read(cls, given: Mapping[str, Any], *, of_tokens: bool) -> "Call":
        """Return the call with the keyword arguments `given`. of_tokens: True for labels of
        tokens. Raises NotImplementedError for arguments that the planned model is not given."""
        for name, value in given.items():
            if name in _READ or name in _HARMLESS or value is None or value is False:
                continue
            raise NotImplementedError(
                f"a loss calls the model with {name}: hf_flexseq computes the figures of a loss "
                f"from {', '.join(sorted(_READ))} alone{_ADVICE.get(name, '')}"
            )
        if given.get("past_key_values") is not None:
            raise NotImplementedError("a loss calls the model with past_key_values: give tokens")
        if given.get("input_ids") is None:
            raise NotImplementedError("a loss calls the model without input_ids")
        return cls(
            given["input_ids"],
            given.get("attention_mask"),
            given.get("labels") if of_tokens else None,
        )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def same_as(self, other: "Call") -> bool:
        """Tell if both ask the same of the same tokens."""
        return (
            self.ids.device == other.ids.device
            and torch.equal(self.ids, other.ids)
            and torch.equal(self.mask, other.mask)
            and torch.equal(self.targets, other.targets)
        )

    def in_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens, [B, S] -> [tokens]."""
        return values[self._places]

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Put tokens' values into the batch, [tokens, ...] -> [B, S, ...]; differentiable."""
        empty = values.new_zeros(*self.mask.shape, *values.shape[1:])
        return empty.index_put(self._places, values)


def joined(calls: Sequence[Call]) -> dict[str, Any] | None:
    """Return all calls as one batch of the engine, columns [1, tokens] and lengths, or None."""
    lengths: list[int] = []
    for call in calls:
        lengths += call.lengths
    if not lengths:
        return None
    positions = torch.cat([torch.arange(length) for length in lengths])
    targets = torch.cat([call.in_row(call.targets) for call in calls])
    return {
        "input_ids": torch.cat([call.in_row(call.ids) for call in calls]).unsqueeze(0),
        "labels": targets.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        LENGTHS: lengths,
    }


_ADVICE = {
    "output_router_logits": (
        "; set config.output_router_logits=False, or for TRL's trainers router_aux_loss_coef=0.0"
    ),
    "pixel_values": "; images are not available",
}


def _checked_lengths(mask: torch.Tensor) -> list[int]:
    """Return the tokens of every row of [B, S]. Raises ValueError for gaps between tokens."""
    counts = mask.sum(dim=1)  # [B]
    # where a token is followed by padding: once at most, the row's end counted
    ends = (mask[:, :-1] & ~mask[:, 1:]).sum(dim=1) + mask[:, -1]
    wrong = (ends != 1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        what = "no tokens" if not counts[row] else "padding between its tokens"
        raise ValueError(
            f"row {row} of a batch that a loss calls the model with has {what} in its "
            "attention_mask: give every sequence as a row of its own, with padding around it"
        )
    lengths: list[int] = counts.tolist()
    return lengths
