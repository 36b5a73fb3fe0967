"""What it saves under activation checkpointing that attention is not recomputed: one process, one
thread.

    python scripts/bench_remat.py
    python scripts/bench_remat.py --tokens 16384 --pairs 9

Forward and backward of a Llama's decoder layers on one document, all of them checkpointed, with
attention_remat on and off in turn; head, loss and optimizer are left out. The gain is the median
of the ratios of neighbouring runs, by the wall clock and by the time on the processor, in which
other work on the machine shows less.

Beside it stands the bound of any method that only removes attention's second forward, from shares
measured in the same runs: with attention's share a of the forward, and its backward r times its
forward,

    (1 + 1 + 2 (1 - a) + r a) / (1 + (1 - a) + 2 (1 - a) + r a)

where all else is taken to need twice its forward for its backward. The second bound takes the
measured step instead: the time with the second forward over the same less attention's second
forward. Peak memory is that of a process of its own for each setting.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attention import NAME
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
HIDDEN = HEADS * HEAD_DIM


class Clocks(NamedTuple):
    """Seconds by the wall clock, and of this process on the processor."""

    wall: float
    cpu: float


def now() -> Clocks:
    return Clocks(time.perf_counter(), time.process_time())


class TimedKernel:
    """The kernel of this machine, which notes the seconds of its calls."""

    def __init__(self) -> None:
        self._kernel = choose_kernel(CPU, torch.float32, HEAD_DIM)
        self.name, self.wide_gradients = self._kernel.name, self._kernel.wide_gradients
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def forward(self, *args: object, **kwargs: object):
        return timed(self.forward_s, lambda: self._kernel.forward(*args, **kwargs))

    def backward(self, *args: object, **kwargs: object):
        return timed(self.backward_s, lambda: self._kernel.backward(*args, **kwargs))


def timed(seconds: list[float], function: Callable[[], object]) -> object:
    began = time.process_time()
    result = function()
    seconds.append(time.process_time() - began)
    return result


class Bench:
    """The layers and their input. `run` takes one forward and backward."""

    def __init__(self, tokens: int, layers: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        config = LlamaConfig(
            vocab_size=16,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            attn_implementation=NAME,
        )
        self.model = LlamaModel(config).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.kernel = TimedKernel()
        group = Group(ranks=(0,), sequences=(0,), strategy="local")
        self.shard = make_shard(MicroBatch(groups=(group,)), [tokens], 0)
        self.forward_s: list[float] = []
        self.row = torch.arange(tokens)[None]

    def run(self, *, remat: bool) -> Clocks:
        seq_ctx = SequenceContext(
            self.shard, Communicator(), self.kernel, CPU, attention_remat=remat
        )
        inputs = {
            "input_ids": self.row % 16,
            "position_ids": self.row,
            "seq_ctx": seq_ctx,
            "use_cache": False,
        }
        began = now()
        hidden = timed(self.forward_s, lambda: self.model(**inputs).last_hidden_state)
        hidden.backward(torch.ones_like(hidden))
        ended = now()
        self.model.zero_grad()
        return Clocks(*(stop - start for start, stop in zip(began, ended, strict=True)))


def bound(attention: float, ratio: float) -> float:
    """The formula above, of attention's share and of its backward over its forward."""
    rest = 1 - attention
    return (2 + 2 * rest + ratio * attention) / (1 + 3 * rest + ratio * attention)


def peak_bytes(tokens: int, layers: int, *, remat: bool) -> int:
    """Peak memory of one forward and backward above what the process held before; run in a process
    of its own."""
    bench = Bench(tokens, layers)
    before = status_bytes("VmRSS")
    bench.run(remat=remat)
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measured_peak(args: argparse.Namespace, remat: bool) -> int:
    command = [
        sys.executable,
        __file__,
        "--tokens",
        str(args.tokens),
        "--layers",
        str(args.layers),
    ]
    command += ["--peak", "on" if remat else "off"]
    # Tensors get pages of their own, and give them back: otherwise the allocator's reserve is what
    # is measured.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def report(args: argparse.Namespace) -> list[str]:
    bench = Bench(args.tokens, args.layers)
    for remat in (True, False):
        bench.run(remat=remat)  # warm up
    for seconds in (bench.forward_s, bench.kernel.forward_s, bench.kernel.backward_s):
        seconds.clear()
    pairs = [pair(bench, first_remat=i % 2 == 0) for i in range(args.pairs)]
    attend_s = args.layers * statistics.median(bench.kernel.forward_s)
    share = attend_s / statistics.median(bench.forward_s)
    off = statistics.median(without.cpu for _, without in pairs)
    ratio = statistics.median(bench.kernel.backward_s) / statistics.median(bench.kernel.forward_s)
    peaks = [measured_peak(args, remat) / 2**20 for remat in (True, False)]
    settings = zip((True, False), zip(*pairs, strict=True), peaks, strict=True)
    return [
        f"{cpu_model()}, {os.cpu_count()} cores, one thread; python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        "",
        f"{args.layers} decoder layers, {HIDDEN} wide, {HEADS} heads of {HEAD_DIM} on {KV_HEADS}, "
        f"float32, kernel "
        f"{bench.kernel.name}; one document of {args.tokens:,} tokens; {args.pairs} pairs",
        "",
        "| attention_remat | wall clock, s | on the processor, s | peak memory, MiB |",
        "|---|---:|---:|---:|",
        *(f"| {remat} | {medians(runs)} | {peak:.1f} |" for remat, runs, peak in settings),
        "",
        f"* faster by the wall clock "
        f"{spread(without.wall / with_.wall for with_, without in pairs)}",
        f"* faster on the processor {spread(without.cpu / with_.cpu for with_, without in pairs)}",
        f"* attention is {share:.2f} of the forward, its backward takes {ratio:.2f} times its "
        f"forward",
        f"* bound by the formula {bound(share, ratio):.3f}, by the measured step "
        f"{off / (off - attend_s):.3f}",
    ]


def medians(runs: Iterable[Clocks]) -> str:
    return " | ".join(f"{statistics.median(seconds):.3f}" for seconds in zip(*runs, strict=True))


def spread(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{statistics.median(found):.3f} (median of pairs; {found[0]:.3f} to {found[-1]:.3f})"


def pair(bench: Bench, *, first_remat: bool) -> tuple[Clocks, Clocks]:
    """What it took with attention kept and with it recomputed; which comes first changes from pair
    to pair."""
    seconds = {remat: bench.run(remat=remat) for remat in (first_remat, not first_remat)}
    return seconds[True], seconds[False]


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    # one of its own processes
    parser.add_argument("--peak", choices=["on", "off"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak_bytes(args.tokens, args.layers, remat=args.peak == "on"))
    else:
        print("\n".join(report(args)))


if __name__ == "__main__":
    main()
