"""A loss's call of the model: a padded batch, and its tokens in one row.

    input_ids   attention_mask     in a row
    . a b c     0 1 1 1            a b c d e      3 and 2 tokens
    d e . .     1 1 0 0

`DataCollatorForFlexSeq` would have made the same row of the sequences. A packed row has several of
them: one begins wherever position_ids begin at 0 again. Results of its tokens are put back where
the padded batch has them. Images of all sequences come together, as a processor joins them; the
model knows how to divide them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.collator import IMAGES, LENGTHS, is_of_images
from hf_flexseq.steps.images import TYPES
from hf_flexseq.steps.known_columns import DIVIDING, FOLLOWING, NUMBERING

# Arguments of a call that change nothing of what is computed of its tokens, or say how it is
# answered.
_HARMLESS = {
    *("use_cache", "fused_lm_head", "return_dict", "num_items_in_batch", "logits_to_keep"),
    "past_key_values",
    "margin",  # of a pair: TRL hands it to reward models, which ignore it
    # what else tells the sequences of a packed row apart
    *(*DIVIDING, *FOLLOWING, *NUMBERING),
}
READ = ("input_ids", "attention_mask", "labels", "shift_labels", "position_ids")
"""Arguments of a call that are read of its tokens."""

Images = Mapping[str, torch.Tensor]  # tensors of some images, by name


class ModelCall:
    """One call of a model, on a padded batch."""

    def __init__(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        *,
        shift_labels: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        images: Images | None = None,
        types: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """ids: [B, S]. attention_mask: [B, S], 1 for tokens and 0 around them; None: all are.
        labels: [B, S], of the tokens themselves; None where the model predicts no tokens.
        shift_labels: [B, S], the targets, where a batch has them besides labels.
        positions: [B, S], of tokens in their sequences; None where every row is a sequence.
        images: see `images_in`. types: see `types_in`.

        Raises ValueError for a mask that does more than to mark padding, and for positions that
        neither rise nor begin at 0 again.
        """
        self.images = dict(images or {})
        """Tensors of the images of all sequences, in the order of the rows, by name."""
        self.types = dict(types or {})
        """[B, S] The modality of each token, by the names in TYPES that the batch has."""
        self.ids = ids.clone()  # a loss may change its batch
        self.mask = torch.ones_like(ids, dtype=torch.bool)
        """[B, S] True for tokens."""
        if attention_mask is not None:
            self.mask = attention_mask.bool()
        self.targets = torch.full_like(ids, IGNORE_INDEX)
        """[B, S] the label that each token predicts, IGNORE_INDEX for none."""
        if shift_labels is not None:
            self.targets = shift_labels.masked_fill(~self.mask, IGNORE_INDEX)
        elif labels is not None:
            # the next token's label, and none where padding is next
            self.targets[:, :-1] = labels[:, 1:].masked_fill(~self.mask[:, 1:], IGNORE_INDEX)
        self.lengths = _checked_lengths(self.mask)
        self.positions = positions
        """[B, S] Positions of tokens in their sequences; None where nothing says so."""
        if positions is not None:
            self.lengths = self._packed_lengths(positions)
        """Tokens of each sequence."""
        self._places = self.mask.nonzero(as_tuple=True)  # rows and columns of all tokens

    @classmethod
    def read(cls, given: Mapping[str, Any], *, of_tokens: bool) -> "ModelCall":
        """Return the call with the keyword arguments `given`. of_tokens: True for labels of
        tokens. Raises NotImplementedError for arguments that the planned model is not given."""
        images, types = images_in(given), types_in(given)
        for name, value in given.items():
            if name in READ or name in _HARMLESS or value is None or value is False:
                continue
            if name in images or name in types:
                continue
            raise NotImplementedError(
                f"a loss calls the model with {name}: hf_flexseq computes the figures of a loss "
                f"from {', '.join(sorted(READ))} alone{_ADVICE.get(name, '')}"
            )
        dividing = [name for name in (*DIVIDING, *NUMBERING) if given.get(name) is not None]
        if dividing and given.get("position_ids") is None:
            raise NotImplementedError(
                f"a loss calls the model with {dividing[0]} and without position_ids: give both"
            )
        if given.get("past_key_values") is not None:
            raise NotImplementedError("a loss calls the model with past_key_values: give tokens")
        if given.get("input_ids") is None:
            raise NotImplementedError("a loss calls the model without input_ids")
        targets = given.get("shift_labels") if of_tokens else None
        if targets is not None and (targets[:, -1] != IGNORE_INDEX).any():
            raise NotImplementedError(
                "a loss calls the model with shift_labels that give the last token of a row a "
                "target, and reads figures of all tokens but the last: make it -100"
            )
        return cls(
            given["input_ids"],
            given.get("attention_mask"),
            given.get("labels") if of_tokens else None,
            shift_labels=targets,
            positions=given.get("position_ids"),
            images=images,
            types=types,
        )

    def _packed_lengths(self, positions: torch.Tensor) -> list[int]:
        """Return the tokens of every sequence, from the positions of all tokens, [B, S]."""
        lengths: list[int] = []
        is_known = positions.shape == self.ids.shape
        for row in positions[self.mask].cpu().split(self.lengths) if is_known else ():
            starts = (row.diff() < 1).nonzero().flatten() + 1
            is_known = is_known and not row[starts].any()
            lengths += [stop - start for start, stop in pairwise([0, *starts.tolist(), len(row)])]
        if not is_known:
            raise ValueError(
                "position_ids of a batch that a loss calls the model with neither rise nor begin "
                "at 0 again: leave them out, or let the positions of each sequence begin at 0"
            )
        if self.images and len(lengths) > len(self.lengths):
            raise ValueError(
                f"a row of a batch is packed, and it has {', '.join(sorted(self.images))}, of "
                "which nobody knows the sequence: give every sequence as a row of its own"
            )
        return lengths

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def same_as(self, other: "ModelCall") -> bool:
        """Tell if both ask the same of the same tokens."""
        return self.covers(other) and torch.equal(self.targets, other.targets)

    def covers(self, other: "ModelCall") -> bool:
        """Tell if another call asks the same of the same tokens, but for labels that it masks."""
        return (
            self.ids.device == other.ids.device
            and torch.equal(self.ids, other.ids)
            and self.lengths == other.lengths
            and torch.equal(self.positions_in_row(), other.positions_in_row())
            and torch.equal(self.mask, other.mask)
            and differ_by_masks(self.targets, other.targets)
            and _are_equal(self.types, other.types)
            and _are_equal(self.images, other.images)
        )

    def in_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens, [B, S] -> [tokens]."""
        return values[self._places]

    def positions_in_row(self) -> torch.Tensor:
        """Return the position of every token in its sequence, [tokens], where the ids lie."""
        if self.positions is None:
            positions = torch.cat([torch.arange(length) for length in self.lengths])
            return positions.to(self.ids.device)
        return self.in_row(self.positions).to(self.ids.dtype)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Put tokens' values into the batch, [tokens, ...] -> [B, S, ...]; differentiable."""
        empty = values.new_zeros(*self.mask.shape, *values.shape[1:])
        return empty.index_put(self._places, values)


def images_in(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of images in a batch, or in the arguments of a call."""
    found = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and is_of_images(name) and name not in _HARMLESS:
            found[name] = value
    return found


def types_in(given: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return a batch's columns of token types, [B, S] each, by the names in TYPES. prefix: of
    their names in the batch."""
    found = {name: given.get(prefix + name) for name in TYPES}
    return {name: value for name, value in found.items() if value is not None}


def differ_by_masks(targets: torch.Tensor, given: torch.Tensor) -> bool:
    """Tell if `given` are `targets`, each [B, S], some of them masked."""
    if given.shape != targets.shape:
        return False
    return torch.equal(targets.masked_fill(given == IGNORE_INDEX, IGNORE_INDEX), given)


def _are_equal(some: Images, others: Images) -> bool:
    same_names = some.keys() == others.keys()
    return same_names and all(torch.equal(value, others[name]) for name, value in some.items())


def joined(
    calls: Sequence[ModelCall], images_of_rows: Callable[[ModelCall], Sequence[Images]]
) -> dict[str, Any] | None:
    """Return all calls as one batch of the engine, columns [1, tokens] and lengths, or None.
    images_of_rows: divides the images of a call by its rows."""
    lengths: list[int] = []
    for call in calls:
        lengths += call.lengths
    if not lengths:
        return None
    positions = torch.cat([call.positions_in_row() for call in calls])
    targets = torch.cat([call.in_row(call.targets) for call in calls])
    row: dict[str, Any] = {
        "input_ids": torch.cat([call.in_row(call.ids) for call in calls]).unsqueeze(0),
        "labels": targets.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        LENGTHS: lengths,
    }
    for name in TYPES:
        if any(name in call.types for call in calls):
            own = [call.types.get(name, torch.zeros_like(call.ids)) for call in calls]
            parts = [call.in_row(types) for call, types in zip(calls, own, strict=True)]
            row[name] = torch.cat(parts).unsqueeze(0)
    if any(call.images for call in calls):
        row[IMAGES] = []
        for call in calls:
            for tensors in images_of_rows(call):
                row[IMAGES].append({name: value.cpu() for name, value in tensors.items()})
    return row


def in_first_row(call: ModelCall) -> list[Images]:
    """Return the images of a call as if they all belonged to its first row, for a model that takes
    none: it is drawn, and refused, on all ranks."""
    return [call.images, *({} for _ in call.lengths[1:])]


_STATES = "; give the trainer's class flexseq_figures, which reads them (docs/objectives.md)"
_ADVICE = {
    "output_hidden_states": _STATES,
    "output_attentions": _STATES,
    "output_router_logits": (
        "; set config.output_router_logits=False, or for TRL's trainers router_aux_loss_coef=0.0"
    ),
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
