"""Measured: what a sliding window and a softcap cost in one attention call, beside full attention.

    python scripts/benchmarks/windows.py                one CUDA GPU if there is one, else a CPU
    python scripts/benchmarks/windows.py --device cpu   two minutes on one CPU core

A window of w keys leaves a share of the pairs of queries and keys that causal attention has. Were
a pair always as expensive, its call would take that share of the time. So what is shown is the
ratio of the two times, divided by the share: 1 is perfect. The calls are those of a training step,
forward and backward, and runs alternate: the full call and each other one, round by round.

On a CPU it is float32, and times are shown twice: by the wall clock, which other programs disturb,
and by the processor's, with one thread. There are two shapes of heads, one where four query heads
share a key head and one where none do.
    w = 512 at most 2.2, w = 2,048 at most 1.5 at 8,192 tokens
are what an idle machine must show. A softcap has no target; its row is the ratio to the full call.

On a GPU it is bfloat16, in every kernel that the machine has, and the rows are milliseconds.
Kernels that lack a feature are named with the reason.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from common import argument_parser, load_average, machine, table, write_record
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.guarantees import Calls
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.layers import FULL, Reach

WINDOWS = (512, 1_024, 2_048, 4_096)
MOST = {512: 2.2, 2_048: 1.5}  # of the share, on a CPU
SOFTCAP = 50.0


class Heads(NamedTuple):
    """The heads of a call."""

    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query} heads of {self.size} on {self.kv}"


CPU_HEADS = (Heads(4, 1, 64), Heads(2, 2, 128))
CUDA_HEADS = (Heads(32, 8, 128), Heads(16, 8, 256))


class Kind(NamedTuple):
    """A kind of attention layer."""

    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        words = []
        if self.window is not None:
            words.append(f"window {self.window:,}")
        if self.softcap is not None:
            words.append("softcap")
        return ", ".join(words) or "full"

    def share(self, tokens: int) -> float:
        """Return which part of the pairs of causal attention such a layer has."""
        return Reach(window=self.window).pairs(tokens) / FULL.pairs(tokens)


KINDS = (
    Kind(),
    *(Kind(window=window) for window in WINDOWS),
    Kind(softcap=SOFTCAP),
    Kind(window=WINDOWS[2], softcap=SOFTCAP),
)


class Times(NamedTuple):
    """Seconds of one run."""

    wall_s: float
    processor_s: float


class Attention:
    """One sequence, with everything that a call reads."""

    def __init__(
        self, tokens: int, heads: Heads, device: torch.device, dtype: torch.dtype
    ) -> None:
        like = {"device": device, "dtype": dtype}
        self.device = device
        self.tokens = tokens
        self.scale = heads.size**-0.5
        self.q = torch.randn(tokens, heads.query, heads.size, **like)
        self.dout = torch.randn(tokens, heads.query, heads.size, **like)
        self.k = torch.randn(tokens, heads.kv, heads.size, **like)
        self.v = torch.randn(tokens, heads.kv, heads.size, **like)

    def step(self, kernel: Kernel, kind: Kind) -> Callable[[], object]:
        """Return what runs forward and backward of a layer of a kind."""
        lengths = [self.tokens]
        segments = Segments(lengths, lengths, causal=True, device=self.device, window=kind.window)

        def run() -> None:
            settings = {"scale": self.scale, "softcap": kind.softcap}
            inputs = (self.q, self.k, self.v)
            out, lse = kernel.forward(*inputs, segments, **settings)
            kernel.backward(self.dout, *inputs, out, lse, segments, **settings)

        return run

    def times(self, run: Callable[[], object]) -> Times:
        """Return the seconds of one run, until the device has done its work."""
        began_wall = time.perf_counter()
        began_processor = time.process_time()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return Times(time.perf_counter() - began_wall, time.process_time() - began_processor)


def measure(
    attention: Attention, kernel: Kernel, kinds: Sequence[Kind], rounds: int
) -> dict[Kind, list[Times]]:
    """Return the times of each round by kind; runs alternate, and the first round warms up."""
    steps = {kind: attention.step(kernel, kind) for kind in kinds}
    times: dict[Kind, list[Times]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, step in steps.items():
            measured = attention.times(step)
            if number > 0:
                times[kind].append(measured)
    return times


def median_of(times: Sequence[Times]) -> Times:
    """Return the median of each clock."""
    walls = statistics.median(run.wall_s for run in times)
    processors = statistics.median(run.processor_s for run in times)
    return Times(walls, processors)


def calls_of(kind: Kind, heads: Heads, device: torch.device, dtype: torch.dtype) -> Calls:
    """Return what a kernel must serve for layers of a kind."""
    return Calls(
        device,
        dtype,
        heads.size,
        window=kind.window is not None,
        softcap=kind.softcap is not None,
    )


def on_cpu(asked: argparse.Namespace) -> list[dict[str, object]]:
    """Print the tables of a CPU and return their figures."""
    device = torch.device("cpu")
    torch.set_num_threads(1)
    (kernel,) = CANDIDATES["cpu"]
    figures: list[dict[str, object]] = []
    for heads in CPU_HEADS:
        attention = Attention(asked.tokens, heads, device, torch.float32)
        measured = measure(attention, kernel, KINDS, asked.rounds)
        full = median_of(measured[Kind()])
        print(f"{kernel.name}, {asked.tokens:,} tokens, {heads}, float32, one thread; ")
        print(
            f"full: {full.wall_s:.2f} s by the wall, {full.processor_s:.2f} s of the processor\n"
        )
        rows = []
        for kind, times in measured.items():
            middle = median_of(times)
            share = kind.share(asked.tokens)
            wall = middle.wall_s / full.wall_s
            processor = middle.processor_s / full.processor_s
            most = MOST.get(kind.window, "") if kind.softcap is None else ""
            rows.append(
                [
                    kind,
                    f"{share:.3f}",
                    f"{wall:.3f}",
                    f"{wall / share:.2f}",
                    f"{processor / share:.2f}",
                    most,
                ]
            )
            figures.append(
                {
                    "heads": heads._asdict(),
                    "kind": kind._asdict(),
                    "tokens": asked.tokens,
                    "share": share,
                    "wall_s": [run.wall_s for run in times],
                    "processor_s": [run.processor_s for run in times],
                }
            )
        columns = (
            "layer",
            "share of the pairs",
            "time over full",
            "over its share",
            "by the processor's clock",
            "at most",
        )
        print(table(columns, rows, numbers=range(1, 6)) + "\n")
    return figures


def on_cuda(asked: argparse.Namespace) -> list[dict[str, object]]:
    """Print the tables of a GPU and return their figures."""
    device = torch.device("cuda")
    figures: list[dict[str, object]] = []
    for heads in CUDA_HEADS:
        attention = Attention(asked.tokens, heads, device, torch.bfloat16)
        print(f"{asked.tokens:,} tokens, {heads}, bfloat16; forward and backward, ms\n")
        rows = []
        for kernel in CANDIDATES["cuda"]:
            served = []
            for kind in KINDS:
                refusal = kernel.why_not(calls_of(kind, heads, device, torch.bfloat16))
                if refusal is None:
                    served.append(kind)
                else:
                    rows.append([kernel.name, kind, f"not run: {refusal}", "", ""])
            if Kind() not in served:
                continue
            measured = measure(attention, kernel, served, asked.rounds)
            full = median_of(measured[Kind()])
            for kind, times in measured.items():
                middle = median_of(times)
                share = kind.share(asked.tokens)
                over_share = middle.wall_s / full.wall_s / share
                rows.append(
                    [
                        kernel.name,
                        kind,
                        f"{1e3 * middle.wall_s:.2f}",
                        f"{share:.3f}",
                        f"{over_share:.2f}",
                    ]
                )
                figures.append(
                    {
                        "kernel": kernel.name,
                        "heads": heads._asdict(),
                        "kind": kind._asdict(),
                        "tokens": asked.tokens,
                        "share": share,
                        "wall_s": [run.wall_s for run in times],
                    }
                )
        columns = ("kernel", "layer", "ms", "share of the pairs", "time over full, over its share")
        print(table(columns, rows, numbers=range(2, 5)) + "\n")
    return figures


def main() -> None:
    parser = argument_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument(
        "--tokens", type=int, help="of the sequence; by default 8,192 on a CPU, 65,536 on a GPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device cpu measures the kernel of CPUs")
    if asked.tokens is None:
        asked.tokens = 65_536 if asked.device == "cuda" else 8_192
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"windows.py on {name}, {machine('torch')}, load {load_average()}\n")
    figures = on_cuda(asked) if asked.device == "cuda" else on_cpu(asked)
    write_record(asked.json, {"device": name, "measured": figures})


if __name__ == "__main__":
    main()
