"""Wait for ranks that do something of their own, for as long as it takes.

A rank that decodes a long video, or waits for a slow disk, comes late to the next exchange, and
the others' exchange must not time out for that. So before such an exchange every rank does this:

    with own_work(...):      its own work; a thread says every few seconds that the rank is at it
        ...
                             then the rank waits, outside of any collective, for all others

All of it goes through the job's store, a dictionary that all ranks share. When a rank has given no
sign of life for some seconds, it is gone, or hangs in a library that lets no other thread
run. Then the others go on to the exchange, which names a rank that is lost and waits for another
as long as its timeout.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # seconds between two signs of life, and between two looks at them
SILENT_S = 5.0  # seconds without one after which a rank is not waited for here
SLOW_S = 20.0  # seconds after which the log names those that are waited for
FIRST_POLL_S = 0.0005  # between two looks at the store; doubled up to the next
LONGEST_POLL_S = 0.05
PREFIX = "hf_flexseq/own_work"


class OwnWork:
    """The works of one rank, each of which all ranks do in the same order."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._number = 0  # of the current work

    @contextmanager
    def of_rank(self, what: str) -> Iterator[None]:
        """Surround the work of this rank; the end waits for all ranks' work. Collective over the
        world. what: names the work in the log."""
        self._number += 1
        key = f"{PREFIX}/{self._number}"
        done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beating.start()
        try:
            yield
        finally:
            done.set()
            beating.join()
        self._store.set(self._key_of(self._rank), str(self._number))
        self._store.add(key, 1)
        self._wait(key, what)
        if self._rank == 0 and self._number > 1:
            self._store.delete_key(f"{PREFIX}/{self._number - 1}")  # all ranks are beyond it

    def _beat(self, done: threading.Event) -> None:
        """Count up in the store until the work is done."""
        while not done.wait(BEAT_S):
            self._store.add(f"{PREFIX}/beat/{self._rank}", 1)

    def _wait(self, key: str, what: str) -> None:
        """Wait until all ranks have ended their work, or one is silent."""
        began = time.monotonic()
        poll_s = FIRST_POLL_S
        looked_at_s = 0.0
        named_at_s = SLOW_S
        silence = _Silence()
        while self._store.add(key, 0) < self._world_size:
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
            waited_s = time.monotonic() - began
            if waited_s < looked_at_s + BEAT_S:
                continue
            looked_at_s = waited_s
            late = self._late()
            if silence.longest_s({rank: self._beats(rank) for rank in late}) > SILENT_S:
                return
            if waited_s > named_at_s:
                named_at_s *= 2
                self._name(late, what, waited_s)

    def _name(self, late: list[int], what: str, waited_s: float) -> None:
        """Log the ranks that are waited for, on the first rank that waits."""
        waiting = set(range(self._world_size)) - set(late)
        if self._rank == min(waiting):
            ranks = ", ".join(map(str, late))
            logger.warning(
                "%s: rank %s is still at its data, %.0f s after this one", what, ranks, waited_s
            )

    def _late(self) -> list[int]:
        """Return the ranks that have not ended the current work."""
        late = []
        for rank in range(self._world_size):
            key = self._key_of(rank)
            number = int(self._store.get(key)) if self._store.check([key]) else 0
            if number < self._number:
                late.append(rank)
        return late

    def _beats(self, rank: int) -> int:
        """Return how many signs of life a rank has given."""
        return self._store.add(f"{PREFIX}/beat/{rank}", 0)

    def _key_of(self, rank: int) -> str:
        """Return the key under which a rank says which work it has ended."""
        return f"{PREFIX}/rank/{rank}"


class _Silence:
    """Tells for how long ranks have given no sign of life."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: signs, and when the last one came

    def longest_s(self, beats: dict[int, int]) -> float:
        """Return the seconds of the rank that is silent for longest. beats: signs so far."""
        now = time.monotonic()
        longest = 0.0
        for rank, count in beats.items():
            before = self._seen.get(rank)
            if before is None or before[0] != count:
                self._seen[rank] = (count, now)
            else:
                longest = max(longest, now - before[1])
        return longest
