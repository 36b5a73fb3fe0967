"""Columns of examples that transformers, accelerate or TRL give a meaning to, besides images
(`collator.py`) and masks of targets (`loss_masks.py`):

    attention_mask                      marks padding, which is cut off; another mask is refused
    shift_labels                        the targets: labels are not shifted again
    cu_seq_lens_q, cu_seq_lens_k,       where the sequences of a packed row end, or their lengths:
    cu_seqlens, seq_lengths             each becomes a separate one
    max_length_q, max_length_k          follow from those, and are left out
    seq_idx, segment_ids                number the sequences of a packed row: the columns above, or
                                        position_ids, must say the same

Any other column of one value per token travels with the tokens to the model, and so to a loss of
the user's own. The log names columns that are dropped on the way, and columns that nothing reads.
"""

from collections.abc import Mapping, Sized
from typing import Any

import torch

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.steps.loss_masks import MASKS

SHIFT_LABELS = "shift_labels"

# Divide a row, without a value for each token; and what follows from them.
DIVIDING = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_lengths")
FOLLOWING = ("max_length_q", "max_length_k")
NUMBERING = ("seq_idx", "segment_ids")

# Columns of another shape that say something of an example's tokens.
_OF_EXAMPLES = (*DIVIDING, *FOLLOWING, "sample_weight", "weight", "inputs_embeds", "label")
# Values that say nothing, by column: tokenizers make such columns unasked.
_SAYS_NOTHING = {"attention_mask": 1, "token_type_ids": 0}


def dropped_columns(example: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """Return an example's columns, besides input_ids and labels, that say something about its
    tokens but are missing in `made`, the example as the Trainer or a library's collator has made
    it."""
    # labels are made of masks (`loss_masks.py`), and positions of lengths
    used = {"input_ids", "labels", *(MASKS if "labels" not in example else ())}
    used |= {"seq_lengths"} if "position_ids" in made else set()
    dropped = []
    for name in example.keys() - used:
        value, own = example[name], made.get(name)
        speaks = name in _OF_EXAMPLES and value is not None
        is_row = isinstance(value, Sized) and not isinstance(value, str)
        if is_row and len(value) == len(example.get("input_ids", ())):
            speaks = any(one != _SAYS_NOTHING.get(name) for one in value)
            if isinstance(own, torch.Tensor) and [*own.flatten()[: len(value)]] == [*value]:
                own = value
        if speaks and own is not value:
            dropped.append(name)
    return sorted(dropped)


# ---- the sequences of a row


def sequence_numbers(name: str, value: torch.Tensor, tokens: int, index: int) -> torch.Tensor:
    """Return the number of each token's sequence, [tokens], by a column in DIVIDING."""
    ends = value.flatten()  # [sequences + 1], or [sequences] for lengths
    lengths = ends if name == "seq_lengths" else ends.diff()
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths.clamp(min=0))
    if len(numbers) != tokens:
        raise ValueError(
            f"{name} of example {index} is {ends.tolist()}, which does not divide its {tokens} "
            "tokens: give the limits of the sequences of its own row, or drop the column"
        )
    return numbers


def starts_of(columns: dict[str, torch.Tensor], index: int) -> list[int]:
    """Return at which tokens the sequences of an example begin, and take the columns that number
    them out of `columns`, each [tokens]."""
    numbers = {name: columns.pop(name) for name in (*DIVIDING, *NUMBERING) if name in columns}
    begins = {name: _after(value.diff() != 0) for name, value in numbers.items()}
    positions = columns.get("position_ids")
    begins["position_ids"] = set() if positions is None else _after(positions.diff() < 1)
    dividing = [begins[name] for name in DIVIDING if name in begins]
    starts = sorted(set().union(*dividing) if dividing else begins["position_ids"])
    if positions is not None and not dividing and positions[starts].any():
        raise ValueError(
            f"position_ids of example {index} neither rise nor begin at 0 again: its sequences "
            "would attend to each other; let the positions of each begin at 0, or give each as an "
            "example of its own"
        )
    for name, own in begins.items():
        beyond = own.difference(starts)
        if beyond:
            raise ValueError(
                f"{name} of example {index} begins a sequence at token {min(beyond)}, where "
                "nothing else divides the row: give position_ids that begin at 0 again there, or "
                "cu_seq_lens_q, or each sequence as an example of its own"
            )
    return [0, *starts]


def _after(is_last: torch.Tensor) -> set[int]:
    """Return the tokens after those marked in [tokens - 1]."""
    return set((is_last.nonzero().flatten() + 1).tolist())


# ---- labels


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return each token's target, [tokens] -> [tokens]: the next label, none for the last."""
    none = labels.new_full((1,), IGNORE_INDEX)
    return torch.cat((labels[1:], none))


def agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell if labels [tokens] are the same wherever both have one."""
    both = (first != IGNORE_INDEX) & (second != IGNORE_INDEX)
    return torch.equal(first[both], second[both])


def next_tokens(ids: torch.Tensor, labels: torch.Tensor) -> int | None:
    """Return how many labels [tokens] are the next token and not their own; None if one of them
    is not the next token, as in labels that have yet to be shifted. The last one may be another
    behind such labels, since padding without a mask may follow it."""
    labels, own, following = labels[:-1], ids[:-1], ids[1:]
    is_label = labels != IGNORE_INDEX
    found = int((is_label & (labels == following) & (own != following)).sum())
    others = (is_label & (labels != following)).nonzero().flatten().tolist()
    is_last = others == is_label.nonzero().flatten().tolist()[-1:]
    return found if not others or (found and is_last) else None
