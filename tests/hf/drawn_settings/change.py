"""What a customisation of a trainer is.

Each is written as a user would, without a thought of hf_flexseq, and stands in front of the stock
trainer and of ours alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.hf.drawn_settings.options import CAUSAL
from tests.hf.tiny import VOCAB


@dataclass(frozen=True, kw_only=True)
class Change:
    """One customisation."""

    methods: type | None = None
    """Goes in front of the trainer's class."""

    model: Callable[[Any], None] | None = None
    """Changes the model before the trainer is made."""

    trainer: Callable[[Any], None] | None = None
    """Changes the trainer before it trains."""

    arguments: Mapping[str, Any] | None = None
    """Of the trainer."""

    of: tuple[str, ...] = CAUSAL
    """The trainers that it goes with."""

    slot: str = ""
    """Two of one slot are not drawn together; none is its own."""

    weight: float = 1.0


def shifted_ids(ids: torch.Tensor) -> torch.Tensor:
    return (ids + 1) % VOCAB


def other_labels(labels: torch.Tensor) -> torch.Tensor:
    """Other targets at the same places."""
    return torch.where(labels >= 0, (labels * 3 + 1) % VOCAB, labels)
