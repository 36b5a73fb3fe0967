"""Describe where the sequences of one packed attention call are: their lengths, known on the host,
and the same lengths on the device.

The lengths are Python ints because every decision about them is taken on the host (loops, launch
bounds, whether there is any work). Kernels on a GPU also want them as cumulative int32 tensors;
these are made when first asked for, so the CPU never pays for them.

    lengths (3, 0, 2)  ->  cu_seqlens [0, 3, 3, 5], total 5, max 3
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from hf_flexseq.kernels.upload import to_device


class Segments:
    """Sequences packed one after the other, as the queries and the keys of one attention call.

    A plain class on purpose: FSDP2's input cast takes dataclasses, tuples and dicts apart.
    """

    __slots__ = (
        "_apart",
        "_cu_seqlens_k",
        "_cu_seqlens_q",
        "causal",
        "device",
        "k_lens",
        "max_k",
        "max_q",
        "q_lens",
        "total_k",
        "total_q",
        "window",
    )

    def __init__(
        self,
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        *,
        causal: bool,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        """q_lens, k_lens: query and key tokens per sequence; either may be 0.

        causal: the last query of a sequence reads all its keys, and each query before it one key
        fewer, as where the queries are the last tokens of the keys; else each query reads all
        keys. window: of a causal call, how many keys a query reads at most: the last ones that it
        may; None for all. Raises AssertionError for lengths that do not fit each other.
        """
        self.q_lens = tuple(q_lens)
        self.k_lens = tuple(k_lens)
        self.causal = causal
        self.window = window
        self.device = device
        self._check_lengths()
        self.max_q = max(self.q_lens, default=0)
        self.max_k = max(self.k_lens, default=0)
        self.total_q = sum(self.q_lens)
        self.total_k = sum(self.k_lens)
        self._cu_seqlens_q: torch.Tensor | None = None
        self._cu_seqlens_k: torch.Tensor | None = None
        self._apart: dict[int, tuple[tuple[slice, slice, Segments], ...]] = {}  # by `first`

    def _check_lengths(self) -> None:
        assert len(self.q_lens) == len(self.k_lens), (
            f"{len(self.q_lens)} query and {len(self.k_lens)} key sequences"
        )
        assert min(self.q_lens + self.k_lens, default=0) >= 0, (
            f"negative length in {self.q_lens} or {self.k_lens}"
        )
        assert self.window is None or (self.causal and self.window > 0), (
            f"a window of {self.window} keys in a call that is causal: {self.causal}"
        )
        if self.causal:
            pairs = zip(self.q_lens, self.k_lens, strict=True)
            assert all(q_len <= k_len for q_len, k_len in pairs), (
                "causal sequences need at least as many keys as queries, "
                f"got {self.q_lens} and {self.k_lens}"
            )

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """First query row of each sequence, and the total: int32 [sequences + 1] on `device`."""
        if self._cu_seqlens_q is None:
            self._cu_seqlens_q = to_device(cumulative(self.q_lens), self.device)
        return self._cu_seqlens_q

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """First key row of each sequence, and the total: int32 [sequences + 1] on `device`."""
        if self._cu_seqlens_k is None:
            if self.q_lens == self.k_lens:
                self._cu_seqlens_k = self.cu_seqlens_q
            else:
                self._cu_seqlens_k = to_device(cumulative(self.k_lens), self.device)
        return self._cu_seqlens_k

    def apart(self, first: int) -> "tuple[tuple[slice, slice, Segments], ...]":
        """Return each of the first `first` sequences alone, and then all others together, if any
        remain: query rows, key rows, lengths. Every call returns the same objects, so lengths are
        copied to the device once."""
        if first not in self._apart:
            parts = []
            q_start = k_start = 0
            for number in range(min(first + 1, len(self.q_lens))):
                own = slice(number, number + 1 if number < first else None)
                part = Segments(
                    self.q_lens[own],
                    self.k_lens[own],
                    causal=self.causal,
                    device=self.device,
                    window=self.window,
                )
                rows = slice(q_start, q_start + part.total_q)
                keys = slice(k_start, k_start + part.total_k)
                parts.append((rows, keys, part))
                q_start, k_start = rows.stop, keys.stop
            self._apart[first] = tuple(parts)
        return self._apart[first]

    def has_work(self) -> bool:
        """Return whether any query has a key to read."""
        lengths = zip(self.q_lens, self.k_lens, strict=True)
        return any(q_len and k_len for q_len, k_len in lengths)

    def has_keyless(self) -> bool:
        """Return whether any query has no key to read."""
        lengths = zip(self.q_lens, self.k_lens, strict=True)
        return any(q_len and not k_len for q_len, k_len in lengths)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Assert that q [total_q, H, D], k, v [total_k, Hkv, D] fit the lengths and each other."""
        assert q.shape[0] == self.total_q, (
            f"{q.shape[0]} query rows for sequences of {self.total_q} tokens"
        )
        assert k.shape[0] == self.total_k, (
            f"{k.shape[0]} key rows for sequences of {self.total_k} tokens"
        )
        fits = k.shape == v.shape and k.shape[2] == q.shape[2]
        assert fits, (
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit each other"
        )
        assert q.shape[1] % k.shape[1] == 0, (
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads"
        )

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"Segments(q_lens={self.q_lens}, k_lens={self.k_lens}, causal={self.causal}{window})"
        )


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """Return (0, l0, l0 + l1, ...) on the host: int32 [sequences + 1]."""
    return torch.tensor((0, *accumulate(lengths)), dtype=torch.int32)
