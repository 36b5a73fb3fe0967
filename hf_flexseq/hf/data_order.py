"""Whether a run with other factors draws the same samples in the same optimizer steps.

A step draws per_device_train_batch_size x gradient_accumulation_steps x processes samples. Where
the product is the same, other factors may still change the order:

* The end of an epoch. accelerate deals rounds of batch x processes samples, and fills the last one
  with samples from the beginning (`even_batches`, more than one process), or drops it
  (`dataloader_drop_last`). Everything before is the same, so the order is the same exactly when
  an epoch draws as many samples in all.
* The sampler. That of the default strategy is seeded by the epoch, and knows no factors.
  `group_by_length` sorts within batch x accumulation samples, and draws from the process's own
  random numbers, as the default does without `use_seedable_sampler`: for another number of
  processes nothing tells that these are the same.
* Streams, other samplers and other loaders may depend on anything.

`tests/hf/test_data_order.py` compares this with what accelerate's loaders draw.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from hf_flexseq.base.values import fields_of, whole

# Where the Trainer decides which samples are drawn.
_DRAWING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
_STRATEGIES = ("random", "sequential", "group_by_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """What the number of samples of an optimizer step is the product of."""

    batch: int
    """Samples that a process draws at once: `per_device_train_batch_size`."""

    accumulation: int
    """Draws of a step: `gradient_accumulation_steps`."""

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
        """Return the factors `to_record` was called on. Raises ValueError for anything else."""
        names = ("batch", "accumulation", "processes")
        fields = fields_of(record, "factors of an optimizer step", needed=names)
        return cls(**{name: whole(name, fields[name], least=1) for name in names})

    def __str__(self) -> str:
        return (
            f"per_device_train_batch_size={self.batch}, gradient_accumulation_steps="
            f"{self.accumulation} and {_processes(self.processes)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrder:
    """What decides, beside the factors, which samples an optimizer step has."""

    rows: int = 0
    """Samples of the dataset."""

    drop_last: bool = False
    """Whether the last round of an epoch is dropped where it is not full."""

    even_batches: bool = True
    """Whether it is filled where there are several processes."""

    processes_matter: str | None = None
    """What draws other samples for another number of processes; None where nothing does."""

    unknown: str | None = None
    """What may draw other samples for other factors, in a way that is not known; None where all
    is known."""

    def drawn(self, factors: Factors) -> int:
        """Return how many samples all processes together draw in an epoch."""
        round_size = factors.batch * factors.processes
        if self.drop_last:
            return self.rows // round_size * round_size
        if self.even_batches and factors.processes > 1:
            return -(-self.rows // round_size) * round_size
        return self.rows

    def change(self, former: Factors, now: Factors) -> str | None:
        """Return what would change the order, in a clause; None where every optimizer step has
        the same samples with both factors.

        former, now: both of the same number of samples.
        """
        if former == now:
            return None
        if self.unknown is not None:
            return f"{self.unknown} may draw in another order"
        if self.processes_matter is not None and former.processes != now.processes:
            return f"{self.processes_matter} draws in another order on {_processes(now.processes)}"
        if self.drawn(former) != self.drawn(now):
            return (
                f"an epoch of {self.rows} samples would draw {self.drawn(now)}, "
                f"not {self.drawn(former)}"
            )
        return None

    def fitting(self, former: Factors, now: Factors) -> Factors | None:
        """Return the factors for as many processes as `now` has that keep the order of `former`,
        those with the batch nearest to that of `now`; None where no factors do."""
        if former.processes == now.processes:
            return former
        kept = []
        for factors in _with_processes(former.samples, now.processes):
            if self.change(former, factors) is None:
                kept.append(factors)
        return min(kept, key=lambda factors: abs(factors.batch - now.batch), default=None)


def _with_processes(samples: int, processes: int) -> Iterator[Factors]:
    """Yield all factors of a number of samples that have so many processes."""
    own, rest = divmod(samples, processes)
    if rest:
        return
    for batch in range(1, own + 1):
        if own % batch == 0:
            yield Factors(batch=batch, accumulation=own // batch, processes=processes)


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def order_of(trainer: Trainer) -> DataOrder:
    """Return what decides which samples the optimizer steps of a trainer have."""
    args = trainer.args
    unknown = _unknown_source(trainer)
    if unknown is not None:
        return DataOrder(unknown=unknown)
    loaders = trainer.accelerator.dataloader_config
    processes_matter = None
    if args.train_sampling_strategy == "group_by_length":
        processes_matter = "group_by_length"
    elif args.train_sampling_strategy == "random" and not loaders.use_seedable_sampler:
        processes_matter = "a sampler without a seed (use_seedable_sampler=False)"
    return DataOrder(
        rows=len(trainer.train_dataset),
        drop_last=args.dataloader_drop_last,
        even_batches=loaders.even_batches,
        processes_matter=processes_matter,
    )


def _unknown_source(trainer: Trainer) -> str | None:
    """Return what draws a trainer's samples where that is not known to keep any order; None where
    the Trainer's own methods draw from a dataset with a length."""
    for name in _DRAWING:
        method = getattr(trainer, name)
        if getattr(method, "__func__", None) is not getattr(Trainer, name):
            return f"{type(trainer).__name__}.{name}"
    dataset = trainer.train_dataset
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return "a stream"
    if trainer.args.train_sampling_strategy not in _STRATEGIES:
        return f"train_sampling_strategy={trainer.args.train_sampling_strategy!r}"
    return None


def check_factors(folder: str, marker: Mapping[str, Any], now: Factors, order: DataOrder) -> None:
    """Raise ValueError, with the values that fit, for a run that would not draw the samples that a
    checkpoint's run would have drawn.

    Args:
        folder: The checkpoint.
        marker: What it knows of itself. One of an earlier version has the product of the factors
            alone, and one of the plain Trainer nothing: what it does not know is not checked.
        now: The factors of this run.
        order: How it draws.
    """
    samples = marker.get("sequences_per_step", now.samples)
    former = None
    if "factors" in marker:
        former = Factors.from_record(marker["factors"])
    if samples != now.samples:
        raise ValueError(
            f"{folder} was trained with {samples} sequences per optimizer step, this run draws "
            f"{now.samples} (per_device_train_batch_size x gradient_accumulation_steps x "
            f"processes): the data order would change; {_advice(samples, former, now, order)}"
        )
    change = None if former is None else order.change(former, now)
    if change is not None:
        raise ValueError(
            f"{folder} was trained with {former}, this run has {now}: the data order would "
            f"change, for {change}; {_advice(samples, former, now, order)}"
        )


def _advice(samples: int, former: Factors | None, now: Factors, order: DataOrder) -> str:
    """Return which values keep the order of a checkpoint on as many processes as there are now.

    samples: of an optimizer step of the checkpoint. former: its factors; None where it has kept
    the product alone.
    """
    here = _processes(now.processes)
    if former is None:
        own, rest = divmod(samples, now.processes)
        if rest:
            return f"no values fit {here}: resume on a number of processes that divides {samples}"
        return (
            f"on {here} the product of per_device_train_batch_size and "
            f"gradient_accumulation_steps must be {own}"
        )
    fitting = order.fitting(former, now)
    if fitting is None:
        return f"no values are known to fit {here}: resume with {former}"
    return (
        f"set per_device_train_batch_size={fitting.batch} and "
        f"gradient_accumulation_steps={fitting.accumulation}"
    )
