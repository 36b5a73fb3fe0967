"""Check that a resumed run draws the same samples in the same optimizer steps.

A step draws per_device_train_batch_size x gradient_accumulation_steps x processes samples. With
the same product, other factors may still change the order:

* The end of an epoch. accelerate distributes rounds of batch x processes samples. It fills the
  last round with samples from the beginning (`even_batches`, more than one process), or drops it
  (`dataloader_drop_last`). So the order is the same exactly if an epoch draws the same number of
  samples in total.
* The sampler. The default one is seeded by the epoch and does not depend on the factors.
  `group_by_length` sorts within batch x accumulation samples. It draws from the process's own
  random numbers, as the default does without `use_seedable_sampler`; these may differ with the
  number of processes.
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

# Trainer methods that decide which samples are drawn.
_DRAWING = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
_STRATEGIES = ("random", "sequential", "group_by_length")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOrder:
    """Everything besides the factors that decides which samples a step draws."""

    rows: int = 0
    """Samples of the dataset."""

    drop_last: bool = False
    """True if an incomplete last round of an epoch is dropped."""

    even_batches: bool = True
    """True if it is filled, given more than one process."""

    processes_matter: str | None = None
    """Description of a sampler that depends on the number of processes, if any."""

    unknown: str | None = None
    """Description of a source with an unknown order, if any."""

    def drawn(self, factors: Factors) -> int:
        """Return the number of samples that all processes draw in an epoch."""
        round_size = factors.batch * factors.processes
        if self.drop_last:
            return self.rows // round_size * round_size
        if self.even_batches and factors.processes > 1:
            return -(-self.rows // round_size) * round_size
        return self.rows

    def change(self, former: Factors, now: Factors) -> str | None:
        """Return a clause on why the order would change between equal numbers of samples, or
        None."""
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
        """Return factors that keep the order of `former` on the processes of `now`, or None."""
        if former.processes == now.processes:
            return former
        kept = []
        for factors in _with_processes(former.samples, now.processes):
            if self.change(former, factors) is None:
                kept.append(factors)
        return min(kept, key=lambda factors: abs(factors.batch - now.batch), default=None)


def _with_processes(samples: int, processes: int) -> Iterator[Factors]:
    """Yield all factorizations of `samples` with the given number of processes."""
    own, rest = divmod(samples, processes)
    if rest:
        return
    for batch in range(1, own + 1):
        if own % batch == 0:
            yield Factors(batch=batch, accumulation=own // batch, processes=processes)


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"


def order_of(trainer: Trainer) -> DataOrder:
    """Return the data order of a trainer."""
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
    """Return the source of a trainer's samples if its order is unknown; None otherwise."""
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
    """Raise ValueError, with values that fit, if a run would draw other samples than the
    checkpoint's run.

    Args:
        folder: The checkpoint.
        marker: Its metadata. Earlier versions saved only the product of the factors, and the
            plain Trainer saves nothing; missing values are not checked.
        now: The factors of this run.
        order: The data order of this run.
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
            f"change: {change}; {_advice(samples, former, now, order)}"
        )


def _advice(samples: int, former: Factors | None, now: Factors, order: DataOrder) -> str:
    """Return advice on values that keep a checkpoint's order on the current processes. samples:
    per optimizer step of the checkpoint. former: its factors, if it saved them."""
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
