"""Dataloaders that differ from a given one in a single respect."""

from collections.abc import Iterator
from typing import Any

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
