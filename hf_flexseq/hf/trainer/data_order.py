"""Check that a resumed run draws as many samples in an optimizer step as its checkpoint's run.

A step draws per_device_train_batch_size x gradient_accumulation_steps x processes samples. Another
product would move every step, and is refused. With the same product and other factors the default
sampler draws the same samples up to the end of an epoch: accelerate fills or drops the last round
of batch x processes samples. Samplers that sort within a batch or have no seed, streams and
loaders of the user's may draw in another order. The log says so.

Rejected: rules about which factors keep which order, for runs that are rare.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import Trainer

from hf_flexseq.base.values import fields_of, whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors of the number of samples in an optimizer step."""

    batch: int
    """`per_device_train_batch_size`."""

    accumulation: int
    """`gradient_accumulation_steps`."""

    processes: int

    @classmethod
    def of(cls, trainer: Trainer) -> "Factors":
        """Return the factors of a trainer's steps."""
        batch: int = trainer._train_batch_size
        accumulation: int = trainer.args.gradient_accumulation_steps
        samples: int = trainer.get_total_train_batch_size(trainer.args)
        return cls(
            batch=batch, accumulation=accumulation, processes=samples // (batch * accumulation)
        )

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        return self.batch * self.accumulation * self.processes

    def to_record(self) -> dict[str, int]:
        """Return the factors as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> "Factors":
        """Inverse of `to_record`. Raises ValueError for an invalid record."""
        names = ("batch", "accumulation", "processes")
        fields = fields_of(record, "factors of an optimizer step", needed=names)
        return cls(**{name: whole(name, fields[name], least=1) for name in names})

    def __str__(self) -> str:
        return (
            f"per_device_train_batch_size={self.batch}, gradient_accumulation_steps="
            f"{self.accumulation} and {_processes(self.processes)}"
        )


def check_factors(
    folder: str, marker: Mapping[str, Any], now: Factors, *, says: bool = True
) -> None:
    """Raise ValueError, with values that fit, if a run would draw another number of samples in a
    step than the checkpoint's run; log other factors of the same number.

    Args:
        folder: The checkpoint.
        marker: Its metadata. Earlier versions saved only the product of the factors, and the
            plain Trainer saves nothing; missing values are not checked.
        now: The factors of this run.
        says: True on the rank that logs.
    """
    samples = marker.get("sequences_per_step", now.samples)
    former = Factors.from_record(marker["factors"]) if "factors" in marker else now
    if samples != now.samples:
        own, rest = divmod(samples, now.processes)
        advice = f"resume on a number of processes that divides {samples}"
        if former.processes == now.processes and former != now:
            advice = (
                f"set per_device_train_batch_size={former.batch} and "
                f"gradient_accumulation_steps={former.accumulation}"
            )
        elif not rest:
            advice = (
                f"on {_processes(now.processes)} the product of per_device_train_batch_size and "
                f"gradient_accumulation_steps must be {own}"
            )
        raise ValueError(
            f"{folder} was trained with {samples} sequences per optimizer step, this run draws "
            f"{now.samples} (per_device_train_batch_size x gradient_accumulation_steps x "
            f"processes): the data order would change; {advice}"
        )
    if former != now and says:
        logger.warning(
            "%s was trained with %s, this run has %s: each step draws as many samples, but not "
            "always the same: the end of an epoch, group_by_length, a sampler without a seed, "
            "streams and loaders of your own depend on these",
            folder,
            former,
            now,
        )


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"
