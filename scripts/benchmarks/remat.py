"""Measured: what it saves under activation checkpointing that attention is not recomputed.

    python scripts/benchmarks/remat.py
    python scripts/benchmarks/remat.py --tokens 16384 --pairs 9

One process, one thread: forward and backward of a Llama's decoder layers on one document, all of
them checkpointed, with save_attention_output on and off in turn. Head, loss and optimizer are left
out.
The gain is the median of the ratios of neighbouring runs, by the wall clock and by the time on the
processor, in which other work on the machine shows less.

Peak memory is that of a process of its own for each setting.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaModel

from common import argument_parser, machine, ratios, spread, table, write_record
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


class Bench:
    """The decoder layers and their input. `run` does one forward and backward."""

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
        self.kernel = choose_kernel(CPU, torch.float32, HEAD_DIM)
        group = Group(ranks=(0,), sequences=(0,), strategy="local")
        self.shard = make_shard(MicroBatch(groups=(group,)), [tokens], 0)
        self.row = torch.arange(tokens)[None]

    def run(self, *, remat: bool) -> Clocks:
        seq_ctx = SequenceContext(
            self.shard, Communicator(), self.kernel, CPU, save_attention_output=remat
        )
        inputs = {
            "input_ids": self.row % 16,
            "position_ids": self.row,
            "seq_ctx": seq_ctx,
            "use_cache": False,
        }
        began = now()
        hidden = self.model(**inputs).last_hidden_state
        hidden.backward(torch.ones_like(hidden))
        ended = now()
        self.model.zero_grad()
        return Clocks(wall=ended.wall - began.wall, cpu=ended.cpu - began.cpu)


def peak_bytes(tokens: int, layers: int, *, remat: bool) -> int:
    """Return the peak memory of one forward and backward above what the process held before.

    The peak is that of the whole process, which therefore does nothing else.
    """
    bench = Bench(tokens, layers)
    before = status_bytes("VmRSS")
    bench.run(remat=remat)
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """Return a field of this process's status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


def measured_peak(args: argparse.Namespace, remat: bool) -> int:
    """Return the peak memory in bytes with attention kept (remat) or recomputed."""
    command = [
        *(sys.executable, __file__),
        *("--tokens", str(args.tokens)),
        *("--layers", str(args.layers)),
        *("--peak", "on" if remat else "off"),
    ]
    # Tensors get pages of their own, and give them back: otherwise the allocator's reserve is what
    # is measured.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return int(done.stdout)


class Measured(NamedTuple):
    """The raw figures of a run of this benchmark."""

    kept: list[Clocks]
    """Forward and backward with save_attention_output, one per pair."""
    recomputed: list[Clocks]
    """The same without."""
    peak_mib: dict[bool, float]
    """Peak memory, by save_attention_output."""
    kernel: str


def measure(args: argparse.Namespace) -> Measured:
    """Run both settings in pairs, then each in a process of its own for its peak memory."""
    bench = Bench(args.tokens, args.layers)
    # 1. warm up
    for remat in (True, False):
        bench.run(remat=remat)
    # 2. the pairs; which setting comes first changes from pair to pair
    clocks: dict[bool, list[Clocks]] = {True: [], False: []}
    for number in range(args.pairs):
        first = number % 2 == 0
        for remat in (first, not first):
            clocks[remat].append(bench.run(remat=remat))
    return Measured(
        kept=clocks[True],
        recomputed=clocks[False],
        peak_mib={remat: measured_peak(args, remat) / 2**20 for remat in (True, False)},
        kernel=bench.kernel.name,
    )


def page(args: argparse.Namespace, found: Measured) -> str:
    """Return the printed page."""
    rows = []
    for remat, clocks in ((True, found.kept), (False, found.recomputed)):
        wall = statistics.median(clock.wall for clock in clocks)
        cpu = statistics.median(clock.cpu for clock in clocks)
        rows.append([remat, f"{wall:.3f}", f"{cpu:.3f}", f"{found.peak_mib[remat]:.1f}"])
    columns = ("save_attention_output", "wall clock, s", "on the processor, s", "peak memory, MiB")
    wall_gain = ratios([c.wall for c in found.recomputed], [c.wall for c in found.kept])
    cpu_gain = ratios([c.cpu for c in found.recomputed], [c.cpu for c in found.kept])
    lines = [
        f"{machine('torch', 'transformers')}, one thread",
        "",
        f"{args.layers} decoder layers, {HIDDEN} wide, {HEADS} heads of {HEAD_DIM} on {KV_HEADS}, "
        f"float32, kernel {found.kernel}; one document of {args.tokens:,} tokens; "
        f"{args.pairs} pairs",
        "",
        table(columns, rows, numbers=(1, 2, 3)),
        "",
        "Medians of the pairs, with the lowest and the highest in brackets:",
        "",
        f"* faster by the wall clock {spread(wall_gain)}",
        f"* faster on the processor {spread(cpu_gain)}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the document")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    # one of its own processes
    parser.add_argument("--peak", choices=["on", "off"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak_bytes(args.tokens, args.layers, remat=args.peak == "on"))
        return
    found = measure(args)
    print(page(args, found))
    write_record(args.json, found._asdict())


if __name__ == "__main__":
    main()
