"""Measured: attention and chunks of sequences on a GPU, the figures that plans for it rest on.

    python scripts/benchmarks/gpu.py                            one CUDA GPU, about ten minutes
    python scripts/benchmarks/gpu.py --parts kernels overlap
    python scripts/benchmarks/gpu.py --device cpu --most 2048 --context 4096 --hidden 256
                                                                on a CPU, to try it

    kernels    TFLOP/s of the attention kernel for chunks of 128 to 32K queries and as many keys,
               32 heads of 128 that share 32, 8 or 4 key heads: whole squares as in a ring, forward
               and backward; and from which chunk on it reaches 80 % of the best, which is what a
               chunk should not fall below
    fused      merging, adding, gathering and packing of a rank in a group of 8, by torch's
               operations and by Triton's kernels: launches, microseconds for the host and until
               the device has done it
    remat      decoder layers as wide as Llama-3.1-8B's under activation checkpointing, attention
               recomputed and not: median of the ratios of neighbouring runs
    overlap    a square of attention beside a copy of its keys and values on a stream of its own:
               how much of the shorter one is hidden
    chunks     seconds of every chunk of 512 to 32K tokens behind 0 to 128K others, forward and
               backward, through the executor of a pipeline of one stage, keys and values carried;
               the cost model of pipelines fitted to two thirds of them, and its error on the
               others
    traces     pipeline schedules on those times, simulated: long-tailed batches on 4 and 8 stages

Times are CUDA's after a synchronisation, medians of --rounds. float32 on a CPU, bfloat16 on a GPU.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from common import (
    ROOT,
    argument_parser,
    machine,
    ratios,
    seconds_of,
    table,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost.stages import PipelineCost, StageCost, causal_pairs
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import NAME, PIPELINE_NAME
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.pipeline import executor as executor_module
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.planner.pipeline import make_pipeline_plan
from hf_flexseq.profiler.fit import nnls
from hf_flexseq.simulate.pipeline import report
from lengths import K, long_tailed

sys.path.insert(0, str(ROOT / "scripts"))
from gpu_checks.fused import Sizes
from gpu_checks.operation_times import operation_times

HEAD_DIM = 128
FLOPS = 4  # of a pair of a query and a key, per head and element, forward; 10 backward
ENOUGH = 0.8  # of the best throughput
LAYERS = 32  # of the model whose layers are timed
GROUP = 8  # ranks to which heads are dealt
Figures = list[dict[str, Any]]


class Machine(NamedTuple):
    """The device that is measured, and how."""

    device: torch.device
    dtype: torch.dtype
    kernel: Kernel
    rounds: int
    """Times that each run is timed, after one that is not."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of the rounds, after one that does not count."""
        self.once(run)
        return statistics.median(self.once(run) for _ in range(self.rounds))

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, until the device has done its work."""
        self.synchronize()

        def to_the_end() -> None:
            run()
            self.synchronize()

        return seconds_of(to_the_end)


# ---- kernels


class Square:
    """Attention of `tokens` queries to as many keys, all of them read."""

    def __init__(self, machine: Machine, tokens: int, heads: int, kv_heads: int) -> None:
        options = {"dtype": machine.dtype, "device": machine.device}
        self.kernel = machine.kernel
        self.scale = HEAD_DIM**-0.5
        self.q = torch.randn(tokens, heads, HEAD_DIM, **options)  # [tokens, heads, head_dim]
        self.k = torch.randn(tokens, kv_heads, HEAD_DIM, **options)
        self.v = torch.randn(tokens, kv_heads, HEAD_DIM, **options)
        self.segments = Segments((tokens,), (tokens,), causal=False, device=machine.device)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [tokens, heads, head_dim] and lse [heads, tokens]."""
        return self.kernel.forward(self.q, self.k, self.v, self.segments, scale=self.scale)

    def backward(self) -> object:
        return self.kernel.backward(
            self.q, self.q, self.k, self.v, self.out, self.lse, self.segments, scale=self.scale
        )


def kernels(machine: Machine, asked: argparse.Namespace, figures: Figures) -> None:
    """Print the throughput of attention by key heads and chunk."""
    heads = asked.hidden // HEAD_DIM
    print(
        f"\n## Attention kernel {machine.kernel.name}, {heads} query heads of {HEAD_DIM}, "
        f"TFLOP/s\n"
    )
    print(table_head(("key heads", "chunk", "forward", "backward"), numbers=range(4)))
    enough = []
    for kv_heads in dict.fromkeys(max(1, heads // share) for share in (1, 4, 8)):
        forward: dict[int, float] = {}  # TFLOP/s by tokens of the chunk
        backward: dict[int, float] = {}
        for tokens in sizes(128, asked.most):
            square = Square(machine, tokens, heads, kv_heads)
            forward[tokens], backward[tokens] = throughput(machine, square, tokens, heads)
            cells = [kv_heads, f"{tokens:,}", f"{forward[tokens]:.2f}", f"{backward[tokens]:.2f}"]
            print(table_row(cells))
            case = {"part": "kernels", "kv_heads": kv_heads, "tokens": tokens}
            speeds = {"forward_tflops": forward[tokens], "backward_tflops": backward[tokens]}
            figures.append(case | speeds)
        enough.append(
            f"With {kv_heads} key heads 80 % of the best from {first_fast(forward):,} tokens, "
            f"backward {first_fast(backward):,}."
        )
    print("\n" + "\n".join(enough))


def first_fast(throughputs: dict[int, float]) -> int:
    """Return the smallest chunk whose throughput is near the best."""
    best = max(throughputs.values())
    return min(tokens for tokens, found in throughputs.items() if found >= ENOUGH * best)


def throughput(machine: Machine, square: Square, tokens: int, heads: int) -> tuple[float, float]:
    """Return the TFLOP/s of the forward and of the backward."""
    flops = FLOPS * tokens * tokens * heads * HEAD_DIM / 1e12
    return flops / machine.seconds(square.forward), 2.5 * flops / machine.seconds(square.backward)


def sizes(least: int, most: int) -> Iterator[int]:
    """Yield `least` and its doubles up to `most`."""
    size = least
    while size <= most:
        yield size
        size *= 2


# ---- fused


def fused(machine: Machine, asked: argparse.Namespace, figures: Figures) -> None:
    """Print what the operations between kernel calls take, by torch and by Triton."""
    heads = asked.hidden // HEAD_DIM
    rows = min(8192, asked.most)
    sizes = Sizes(rows, rows // 2, heads, max(1, heads // 4), HEAD_DIM, min(GROUP, heads))
    print(f"\n## Between kernel calls: {rows // 2:,} of {rows:,} rows, {heads} heads\n")
    columns = ("operation", "by", "launches", "host, us", "until done, us")
    print(table_head(columns, numbers=range(2, 5)))
    for one in operation_times(sizes, machine.device, machine.dtype, rounds=machine.rounds):
        launched = "-" if one.launches is None else one.launches
        times = (f"{one.host_us:.1f}", f"{one.done_us:.1f}")
        print(table_row([one.operation, one.by, launched, *times]))
        figures.append({"part": "fused"} | one._asdict())
    if machine.device.type == "cpu":
        print("\nTriton's kernels are not timed: they need a CUDA GPU.")


# ---- remat


def remat(machine: Machine, asked: argparse.Namespace, figures: Figures) -> None:
    """Print how much longer checkpointed layers take when attention is recomputed."""
    print("\n## Attention kept against attention recomputed, 2 checkpointed decoder layers\n")
    print(table_head(("tokens", "kept, s", "recomputed over it"), numbers=range(3)))
    config = llama(asked, layers=2, attention=NAME)
    model = LlamaModel(config).to(machine.device, machine.dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for tokens in sizes(min(4096, asked.most), asked.most):
        kept, recomputed = [], []
        for _ in range(machine.rounds + 1):
            kept.append(layer_s(machine, model, tokens, attention_remat=True))
            recomputed.append(layer_s(machine, model, tokens, attention_remat=False))
        kept, recomputed = kept[1:], recomputed[1:]  # the first round warms up
        ratio = statistics.median(ratios(recomputed, kept))
        print(table_row([f"{tokens:,}", f"{statistics.median(kept):.4f}", f"{ratio:.3f}"]))
        case = {"part": "remat", "tokens": tokens}
        figures.append(case | {"kept_s": kept, "recomputed_s": recomputed})


def layer_s(machine: Machine, model: LlamaModel, tokens: int, *, attention_remat: bool) -> float:
    """Return the seconds of a forward and backward of the layers on one document."""
    group = Group(ranks=(0,), sequences=(0,), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), [tokens], 0)
    row = torch.arange(tokens, device=machine.device)[None]

    def run() -> None:
        seq_ctx = SequenceContext(
            shard, Communicator(), machine.kernel, machine.device, attention_remat=attention_remat
        )
        hidden = model(
            input_ids=row % 16, position_ids=row, seq_ctx=seq_ctx, use_cache=False
        ).last_hidden_state
        hidden.backward(torch.ones_like(hidden))

    seconds = machine.once(run)
    model.zero_grad()
    return seconds


def llama(asked: argparse.Namespace, *, layers: int, attention: str) -> LlamaConfig:
    """Return the config of layers shaped like Llama-3.1-8B's, with next to no vocabulary."""
    heads = asked.hidden // HEAD_DIM
    return LlamaConfig(
        vocab_size=16,
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 18,
        attn_implementation=attention,
    )


# ---- overlap


def overlap(machine: Machine, asked: argparse.Namespace, figures: Figures) -> None:
    """Print how much of a copy is hidden behind attention, or the other way around."""
    print("\n## A square of attention beside a copy of its keys and values\n")
    if machine.device.type != "cuda":
        print("needs a CUDA GPU: a CPU has no streams")
        return
    columns = ("tokens", "attention, ms", "copy, ms", "together, ms", "hidden of the shorter")
    print(table_head(columns, numbers=range(5)))
    stream = torch.cuda.Stream()
    heads = asked.hidden // HEAD_DIM
    for tokens in sizes(1024, asked.most):
        square = Square(machine, tokens, heads, max(1, heads // 4))
        source = torch.stack((square.k, square.v)).cpu().pin_memory()
        target = torch.empty_like(source, device=machine.device)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

        def both(square: Square = square, copy: Callable[[], None] = copy) -> None:
            copy()
            square.forward()

        attention_s = machine.seconds(square.forward)
        copy_s = machine.seconds(copy)
        together_s = machine.seconds(both)
        hidden = (attention_s + copy_s - together_s) / min(attention_s, copy_s)
        milliseconds = [f"{1e3 * s:.2f}" for s in (attention_s, copy_s, together_s)]
        print(table_row([f"{tokens:,}", *milliseconds, f"{hidden:.2f}"]))
        case = {"part": "overlap", "tokens": tokens, "attention_s": attention_s}
        figures.append(case | {"copy_s": copy_s, "together_s": together_s})


# ---- chunks


class Timed(NamedTuple):
    """One timed action of a chunk."""

    kind: str
    """F forward, B backward."""
    tokens: int
    """Tokens of the chunk."""
    before: int
    """Tokens of the sequence in front of it."""
    seconds: float

    @property
    def row(self) -> list[float]:
        """The terms of the cost model: a constant, tokens, pairs of a query and a key."""
        return [1.0, self.tokens, causal_pairs(self.before, self.before + self.tokens)]


CHUNK_COLUMNS = (
    "action",
    "samples",
    "constant, us",
    "per 1,000 tokens, us",
    "per 1M pairs, us",
    "error held out, mean",
    "worst",
)


def chunks(machine: Machine, asked: argparse.Namespace, figures: Figures) -> StageCost:
    """Time chunks, print the cost model fitted to them, and return it for one decoder layer."""
    timed: list[Timed] = []
    for tokens in sizes(512, asked.most):
        timed += chunk_times(machine, asked, tokens)
    print(
        f"\n## Chunks of 512 to {asked.most:,} tokens behind up to {asked.context:,}, one "
        f"decoder layer\n"
    )
    print(table_head(CHUNK_COLUMNS, numbers=range(1, 7)))
    constants = {}
    for kind in ("F", "B"):
        samples = [sample for sample in timed if sample.kind == kind]
        held_out = samples[::3]
        fitted = [sample for index, sample in enumerate(samples) if index % 3]
        # each sample weighs the same: its terms are divided by its seconds
        terms = [[term / sample.seconds for term in sample.row] for sample in fitted]
        found = nnls(np.array(terms), np.ones(len(fitted)))
        constants[kind] = found
        errors = []
        for sample in held_out:
            predicted = float(np.dot(found, sample.row))
            errors.append(abs(predicted / sample.seconds - 1))
        cells = [kind, len(samples), f"{1e6 * found[0]:.1f}", f"{1e9 * found[1]:.2f}"]
        cells += [f"{1e12 * found[2]:.2f}", f"{100 * statistics.mean(errors):.1f} %"]
        cells += [f"{100 * max(errors):.1f} %"]
        print(table_row(cells))
    for sample in timed:
        figures.append({"part": "chunks"} | sample._asdict())
    base, linear, attention = (1e9 * x for x in constants["F"].tolist())
    ratio = constants["B"][2] / max(constants["F"][2], 1e-30)
    print(f"\nThe backward's attention takes {ratio:.2f} times the forward's.")
    return StageCost(linear_ns=linear, attention_ns=attention, chunk_ns=base)


def chunk_times(machine: Machine, asked: argparse.Namespace, tokens: int) -> list[Timed]:
    """Time forward and backward of all chunks of one sequence of `asked.context` tokens."""
    torch.manual_seed(0)
    config = llama(asked, layers=1, attention="eager")
    model = LlamaForCausalLM(config).to(machine.device, machine.dtype).train()
    model.set_attn_implementation(PIPELINE_NAME)
    executor = PipelineExecutor(cut(model, 0, 1), Neighbours(Communicator(), []), machine.kernel)
    even = PipelineCost.even(1, StageCost(linear_ns=1.0, attention_ns=0.0, chunk_ns=0.0))
    count = -(-asked.context // tokens)
    plan = make_pipeline_plan(
        [count * tokens], even, schedule="seq1f1b", chunks=count, cuts="even"
    )
    columns = []
    for chunk in plan.chunks:
        row = []
        for part in chunk.slices:
            row += range(part.start, part.stop)
        positions = torch.tensor([row], device=machine.device)  # [1, tokens]
        ids = positions % 16
        columns.append({"input_ids": ids, "labels": ids, "position_ids": positions})
    found: dict[tuple[str, int], list[float]] = {}
    obey = executor_module._Step.obey

    def timed(step: Any, action: Any) -> None:
        seconds = machine.once(lambda: obey(step, action))
        found.setdefault((action.kind, action.chunk), []).append(seconds)

    with mock.patch.object(executor_module._Step, "obey", timed):
        for _ in range(machine.rounds + 1):
            model.zero_grad()
            executor.train(plan, columns, count * tokens)
    timed_chunks = []
    for (kind, index), seconds in found.items():
        median = statistics.median(seconds[1:])  # the first round warms up
        timed_chunks.append(Timed(kind, tokens, index * tokens, median))
    return timed_chunks


# ---- traces


def traces(layer: StageCost, figures: Figures) -> None:
    """Print what schedules of pipelines take on the fitted cost of a layer, simulated."""
    print("\n## Pipeline schedules on these times, simulated; seconds of a step over auto's\n")
    schedules = {"auto": {}, "1f1b": {}, "seq1f1b": {"chunks": 8}, "infinipipe": {}}
    columns = (
        "context",
        "stages",
        "1f1b",
        "seq1f1b, k = 8",
        "infinipipe (re-created)",
        "auto, s",
    )
    rows = []
    for context in (96, 192):
        for stages in (4, 8):
            cost = PipelineCost.even(stages, stage_cost(layer, LAYERS // stages))
            lengths = long_tailed(0, context * K)
            seconds = {}
            for name, options in schedules.items():
                plan = make_pipeline_plan(lengths, cost, schedule=name, **options)
                seconds[name] = report(plan, cost).seconds
            others = []
            for name in ("1f1b", "seq1f1b", "infinipipe"):
                others.append(f"{seconds[name] / seconds['auto']:.3f}")
            rows.append([f"{context}K", stages, *others, f"{seconds['auto']:.2f}"])
            case = {"part": "traces", "context_k": context, "stages": stages}
            figures.append(case | {"seconds": seconds})
    print(table(columns, rows, numbers=range(1, 6)))


def stage_cost(layer: StageCost, layers: int) -> StageCost:
    """Return the cost of a stage of so many layers."""
    return StageCost(
        linear_ns=layers * layer.linear_ns,
        attention_ns=layers * layer.attention_ns,
        chunk_ns=layers * layer.chunk_ns,
        layers=layers,
    )


PARTS: Sequence[str] = ("kernels", "fused", "remat", "overlap", "chunks", "traces")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--most", type=int, default=32768, help="tokens of the largest chunk")
    parser.add_argument(
        "--context",
        type=int,
        default=131072,
        help="tokens of the sequence that is cut into chunks",
    )
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device cpu, with small sizes, tries the script")
    if asked.hidden % HEAD_DIM:
        parser.error(f"--hidden {asked.hidden}: must be a multiple of {HEAD_DIM}")
    device = torch.device(asked.device)
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    measured = Machine(device, dtype, choose_kernel(device, dtype, HEAD_DIM), asked.rounds)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"gpu.py on {name}, {machine('torch', 'transformers')}, {dtype}")
    figures: Figures = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        runs = {"kernels": kernels, "fused": fused, "remat": remat, "overlap": overlap}
        for part, run in runs.items():
            if part in asked.parts:
                run(measured, asked, figures)
        if {"chunks", "traces"} & set(asked.parts):
            layer = chunks(measured, asked, figures)
            if "traces" in asked.parts:
                traces(layer, figures)
        dist.destroy_process_group()
    write_record(asked.json, {"device": name, "dtype": str(dtype), "measured": figures})


if __name__ == "__main__":
    main()
