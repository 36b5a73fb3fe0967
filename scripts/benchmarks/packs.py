"""Measured: a pack of very unequal lengths in one attention call, and in several.

    python scripts/benchmarks/packs.py                              one CUDA GPU, about a minute
    python scripts/benchmarks/packs.py --device cpu --longest 1024 --hidden 256
                                                                    on a CPU, to try it

A packed call of FlashAttention-2 launches ceil(longest / 128) x sequences x heads blocks
(flash-attention#437). Where one long document stands beside many short ones most of them are
empty. So the same causal pack is run

1. as one call, which is what training does;
2. as one call per run of neighbouring sequences whose lengths differ by at most --most times; the
   long sequences stand first, so that the runs are few.

Both give the same results, which is checked. A ratio above 1 says that several calls are faster.
On a CPU sequences are computed one by one anyway, and the ratio is about 1. Runs alternate; times
are CUDA's after a synchronisation. float32 on a CPU, bfloat16 on a GPU.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from common import argument_parser, machine, ratios, seconds_of, spread, table, write_record
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.segments import Segments

HEAD_DIM = 128
SHORT = 200  # tokens of a short document
COUNTS = (0, 8, 50, 200)  # short documents beside the long one


class Part(NamedTuple):
    """Neighbouring sequences of a pack that one call computes."""

    rows: slice
    """The tokens of the pack."""
    segments: Segments


class Pack:
    """Sequences packed one after the other, with everything that a call reads."""

    def __init__(
        self, lengths: Sequence[int], heads: int, kernel: Kernel, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tokens = sum(lengths)
        self.lengths = tuple(lengths)
        self.kernel = kernel
        self.device = device
        self.q = torch.randn(tokens, heads, HEAD_DIM, dtype=dtype, device=device)
        self.k = torch.randn(tokens, max(1, heads // 4), HEAD_DIM, dtype=dtype, device=device)
        self.v = torch.randn_like(self.k)  # [tokens, kv_heads, head_dim]

    def parts(self, runs: Sequence[slice]) -> list[Part]:
        """Return one part per run of sequences."""
        parts = []
        for run in runs:
            lengths = self.lengths[run]
            start = sum(self.lengths[: run.start])
            segments = Segments(lengths, lengths, causal=True, device=self.device)
            parts.append(Part(slice(start, start + sum(lengths)), segments))
        return parts

    def attend(self, parts: Sequence[Part]) -> list[tuple[torch.Tensor, ...]]:
        """Run forward and backward of every part: out, dq [tokens, heads, head_dim], dk, dv
        [tokens, kv_heads, head_dim] of each."""
        results = []
        for rows, segments in parts:
            q, k, v = self.q[rows], self.k[rows], self.v[rows]
            out, lse = self.kernel.forward(q, k, v, segments, scale=HEAD_DIM**-0.5)
            grads = self.kernel.backward(q, q, k, v, out, lse, segments, scale=HEAD_DIM**-0.5)
            results.append((out, *grads))
        return results

    def seconds(self, parts: Sequence[Part]) -> float:
        """Return the seconds of forward and backward, until the device has done its work."""

        def to_the_end() -> None:
            self.attend(parts)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        return seconds_of(to_the_end)


def similar_runs(lengths: Sequence[int], most: float) -> list[slice]:
    """Return the runs of neighbouring sequences whose lengths differ by at most `most` times.

    A run ends where the next sequence would break that, so that there are as few as can be.
    """
    runs = []
    start = 0
    shortest = longest = 0
    for index, length in enumerate(lengths):
        if index == start:
            shortest = longest = length
        shortest = min(shortest, length)
        longest = max(longest, length)
        if longest > most * shortest:
            runs.append(slice(start, index))
            start = index
            shortest = longest = length
    if start < len(lengths):
        runs.append(slice(start, len(lengths)))
    return runs


def alike(one: list[tuple[torch.Tensor, ...]], several: list[tuple[torch.Tensor, ...]]) -> bool:
    """Tell whether one call and several gave the same, but for rounding."""
    (whole,) = one
    for number, expected in enumerate(whole):
        found = torch.cat([results[number] for results in several])
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-4
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        if error > tolerance:
            return False
    return True


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the long document")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--most", type=float, default=4.0, help="ratio of lengths within one call")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device cpu, with small sizes, tries the script")
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    kernel = choose_kernel(device, dtype, HEAD_DIM)
    print(f"packs.py on {name}, {machine('torch')}, kernel {kernel.name}\n")
    rows = []
    figures = []
    for count in COUNTS:
        pack = Pack([asked.longest] + count * [SHORT], asked.hidden // HEAD_DIM, kernel, device)
        one_s, several_s, calls = measure(pack, asked)
        ratio = spread(ratios(one_s, several_s))
        rows.append([count, f"{1e3 * statistics.median(one_s):.2f}", calls, ratio])
        figures.append({"short": count, "one_s": one_s, "several_s": several_s})
    columns = ("short documents", "one call, ms", "several calls", "one over several")
    print(table(columns, rows, numbers=range(4)))
    write_record(asked.json, {"device": name, "kernel": kernel.name, "measured": figures})


def measure(pack: Pack, asked: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Return the seconds of each round as one call and as several, and how many those are."""
    one = pack.parts([slice(0, len(pack.lengths))])
    several = pack.parts(similar_runs(pack.lengths, asked.most))
    # The first runs warm up.
    assert alike(pack.attend(one), pack.attend(several)), "the calls do not agree"
    one_s = []
    several_s = []
    for _ in range(asked.rounds):
        one_s.append(pack.seconds(one))
        several_s.append(pack.seconds(several))
    return one_s, several_s, len(several)


if __name__ == "__main__":
    main()
