"""Memory of the host for tensors whose sizes change in every step, in pages of one size.

The bytes of a tensor may be spread over several pages. Bytes of a page are given out one after the
other; a page whose tensors are all gone begins anew. Pages are made when they are needed, up to
the budget, and are kept for the next micro-batch and the next step.

torch's allocator of pinned memory rounds each block up to a power of two and keeps it: tensors of
changing sizes would take twice their bytes and more. Pages are powers of two, so nothing is lost.
"""

from typing import NamedTuple

import torch

MIB = 1 << 20
GIB = 1 << 30

MOST_PAGE_BYTES = 64 * MIB
LEAST_PAGE_BYTES = 1 << 12
# A budget has at least so many pages, unless they would be too small: one of them is half empty.
PAGES = 16

# Tensors begin at multiples of this, as copies of a GPU like it best.
ALIGNMENT = 256


class HostMemoryFull(ValueError):
    """Activations on the host need more than their budget."""


class Page:
    """A buffer that tensors of about the same age share."""

    __slots__ = ("buffer", "pieces", "used")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer: torch.Tensor | None = buffer  # uint8 [page bytes]; None once freed
        self.used = 0  # bytes from the start
        self.pieces = 0  # of tensors that still need it


class PageBytes(NamedTuple):
    """Bytes [start, stop) of a page."""

    page: Page
    start: int
    stop: int

    def bytes(self) -> torch.Tensor:
        """Return these bytes as a view, uint8 [bytes]."""
        assert self.page.buffer is not None, "the memory of the host has been freed"
        return self.page.buffer[self.start : self.stop]


def page_bytes_of(budget: int) -> int:
    """Return the bytes of a page, a power of two, for a budget in bytes."""
    share = max(budget // PAGES, LEAST_PAGE_BYTES)
    return min(MOST_PAGE_BYTES, 1 << (share.bit_length() - 1))


class Pages:
    """All pages of one rank."""

    def __init__(self, budget: int, *, pinned: bool) -> None:
        """budget: the most bytes of all pages together. pinned: True for memory that a GPU copies
        from and to by itself."""
        self.budget = budget
        self.page_bytes = page_bytes_of(budget)
        self._pinned = pinned
        self._all: list[Page] = []
        self._free: list[Page] = []
        self._open: Page | None = None  # which the next tensor begins on

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages, in use or not."""
        return len(self._all) * self.page_bytes

    def take(self, count: int) -> tuple[PageBytes, ...]:
        """Return `count` bytes. Raises HostMemoryFull over the budget."""
        pieces = []
        while count:
            page = self._page_with_room()
            stop = min(page.used + count, self.page_bytes)
            pieces.append(PageBytes(page, page.used, stop))
            page.pieces += 1
            count -= stop - page.used
            page.used = min(-(-stop // ALIGNMENT) * ALIGNMENT, self.page_bytes)
        return tuple(pieces)

    def give_back(self, pieces: tuple[PageBytes, ...]) -> None:
        """Take bytes back that no tensor needs any more."""
        for piece in pieces:
            page = piece.page
            page.pieces -= 1
            if page.pieces:
                continue
            page.used = 0
            if page is not self._open:
                self._free.append(page)

    def close(self) -> None:
        """Free all pages, also those in use."""
        for page in self._all:
            page.buffer = None
        self._all.clear()
        self._free.clear()
        self._open = None

    def _page_with_room(self) -> Page:
        if self._open is None or self._open.used == self.page_bytes:
            self._open = self._free.pop() if self._free else self._new_page()
        return self._open

    def _new_page(self) -> Page:
        if self.held_bytes + self.page_bytes > self.budget:
            raise HostMemoryFull(
                f"activations on the host need more than host_memory_gib={self.budget / GIB:.3g}, "
                "the budget of each rank: raise it, or set max_tokens_per_rank lower"
            )
        page = Page(torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        self._all.append(page)
        return page
