"""Dataloaders that differ from a given one in a single respect, and how accelerate makes them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from transformers.trainer_utils import has_length

from hf_flexseq.base.patches import Patch
from hf_flexseq.distributed.communicator import Communicator

NO_LENGTH = -1  # of a stream, among lengths of loaders


class LoaderProxy:
    """Stands for the dataloader inside: has its attributes, and iterates as it does."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)


def batches_on_host(dataloader: Any) -> AbstractContextManager[None]:
    """Make a prepared loader leave its batches on the host inside a block: tokens are
    dispatched on the host. The loader itself is changed, since it may have been prepared before
    the engine."""
    if not isinstance(dataloader, DataLoaderShard):
        return nullcontext()
    return Patch(dataloader, device=None)  # asked for with every batch


@dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)  # accelerate refers weakly
class LoaderState:
    """State of a dataloader in accelerate, after a batch."""

    end_of_dataloader: bool
    """True if the batch was the last one."""
    remainder: int
    """Samples of all ranks' last batches that had not been drawn before; 0 for all, -1 if
    unknown."""


BEFORE_END = LoaderState(end_of_dataloader=False, remainder=-1)


def drawn_batches(
    iterator: Iterator[Any], count: int, accelerator: Accelerator
) -> tuple[list[Any], LoaderState]:
    """Return the next batches, at most `count`, and the state of their loader after the last."""
    known = accelerator.gradient_state
    batches, state = [], BEFORE_END
    for batch in islice(iterator, count):
        batches.append(batch)
        state = LoaderState(end_of_dataloader=known.end_of_dataloader, remainder=known.remainder)
    return batches, state


@contextmanager
def as_drawn(state: LoaderState, accelerator: Accelerator) -> Iterator[None]:
    """Let accelerate take its loader for being in `state` inside the block, though it has been
    drawn from further: `gather_for_metrics` and KTO's loss depend on that."""
    known = accelerator.gradient_state
    state = replace(state)  # accelerate forgets an object that was added twice at once
    known._add_dataloader(state)
    try:
        yield
    finally:
        known._remove_dataloader(state)


class LongestLoader(LoaderProxy):
    """A loader that reports the length of the longest one among all ranks."""

    def __init__(self, dataloader: Any, length: int) -> None:
        super().__init__(dataloader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    @classmethod
    def over(cls, dataloader: Any, communicator: Communicator) -> Any:
        """Return a loader as long as the longest of all ranks. Collective over the world."""
        lengths = lengths_of(dataloader, communicator)
        longest = max(lengths)
        if longest == lengths[communicator.rank] or NO_LENGTH in lengths:
            return dataloader
        return cls(dataloader, longest)


def lengths_of(dataloader: Any, communicator: Communicator) -> list[int]:
    """Return the batches of each rank's loader, NO_LENGTH if unknown. Collective."""
    own = len(dataloader) if has_length(dataloader) else NO_LENGTH
    return communicator.cpu_group.gather_values(own)


class UnrepeatedShard(IterableDatasetShard):
    """A process's samples of a stream, without accelerate's repeats in the last batch. In each
    round the first samples are process 0's batch, the next ones process 1's, and so on."""

    last_round: torch.Tensor | None
    """Gets the number of the last round's samples, a scalar that a worker shares. These are then
    followed by the repeats that accelerate puts in."""

    def __iter__(self) -> Iterator[Any]:
        source: Any = self.dataset
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(source, "set_epoch"):
            generator.manual_seed(self.epoch)  # as accelerate's shard does
        samples = iter(source)
        batch_size = self.batch_size
        if self.split_batches:
            batch_size = self.batch_size // self.num_processes
        size = batch_size * self.num_processes
        first = self.process_index * batch_size
        filling: list[Any] = []
        while one_round := list(islice(samples, size)):
            if self.drop_last and len(one_round) < size:
                return
            if self.last_round is not None:
                self.last_round.fill_(len(one_round))
                filling = filling or one_round
            yield from islice(chain(one_round, cycle(filling)), first, first + batch_size)


class CountedBatches(LoaderProxy):
    """A loader that tells accelerate of repeats in a stream's last batch: metrics omit them."""

    def __iter__(self) -> Iterator[Any]:
        loader = self.dataloader
        if type(getattr(loader, "dataset", None)) is not IterableDatasetShard:
            yield from loader
            return
        if loader.num_workers > 1:
            raise ValueError(
                f"dataloader_num_workers={loader.num_workers}: each repeats samples in its last "
                "batch of a stream, which metrics would count: set it to 1"
            )
        last_round = torch.zeros((), dtype=torch.int64).share_memory_()
        with without_repeats(loader, but_in=last_round):
            for batch in loader:
                loader.remainder = int(last_round)  # of no effect before the last batch
                yield batch


@contextmanager
def without_repeats(dataloader: Any, but_in: torch.Tensor | None = None) -> Iterator[None]:
    """Make the loader give every sample once inside this block, without accelerate's filling of
    the last round (`even_batches`). Ranks may then draw different numbers of batches. but_in: see
    `UnrepeatedShard.last_round`."""
    sampler: Any = getattr(dataloader, "batch_sampler", None)
    dataset: Any = getattr(dataloader, "dataset", None)
    with ExitStack() as changed:
        if isinstance(sampler, BatchSamplerShard):
            changed.enter_context(Patch(sampler, even_batches=False))
        if type(dataset) is IterableDatasetShard:
            # The loader keeps the dataset itself, with its workers and buffers, and offers no way
            # to put another one in: its class is what this one does when it is iterated.
            dataset.__class__ = UnrepeatedShard
            dataset.last_round = but_in
            changed.callback(setattr, dataset, "__class__", IterableDatasetShard)
        yield
