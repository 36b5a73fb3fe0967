"""Dataloaders that differ from a given one in a single respect."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.control import gather_ints


class LoaderProxy:
    """All that the loader inside is, and iterates as it does."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)


class LongestLoader(LoaderProxy):
    """A loader that reports the length of the longest one among all ranks."""

    def __init__(self, dataloader: Any, length: int) -> None:
        super().__init__(dataloader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    @classmethod
    def over(cls, dataloader: Any, communicator: Communicator) -> Any:
        """`dataloader` itself when the lengths agree, or when it has none. Collective."""
        try:
            own = len(dataloader)
        except TypeError:
            return dataloader
        longest = max(n for (n,) in gather_ints(communicator, [own]))
        return dataloader if longest == own else cls(dataloader, longest)


class UnrepeatedShard(IterableDatasetShard):
    """A process's samples of a stream, as accelerate deals them, without the repeats that fill the
    last batch."""

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        process_batch = (
            self.batch_size // self.num_processes if self.split_batches else self.batch_size
        )
        first = self.process_index * process_batch
        while round_of_all := list(islice(samples, process_batch * self.num_processes)):
            yield from round_of_all[first : first + process_batch]


@contextmanager
def without_repeats(dataloader: Any) -> Iterator[None]:
    """Inside this block the loader gives every sample once. Ranks may then draw different numbers
    of batches.

    accelerate fills the last round of batches with samples from the beginning unless
    `even_batches` is off, and on streams always.
    """
    sampler, dataset = (
        getattr(dataloader, "batch_sampler", None),
        getattr(dataloader, "dataset", None),
    )
    repeats = isinstance(sampler, BatchSamplerShard) and sampler.even_batches
    stream = type(dataset) is IterableDatasetShard
    if repeats:
        sampler.even_batches = False
    if stream:
        dataset.__class__ = UnrepeatedShard
    try:
        yield
    finally:
        if repeats:
            sampler.even_batches = True
        if stream:
            dataset.__class__ = IterableDatasetShard
