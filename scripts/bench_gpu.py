"""What a GPU does with pieces of attention and of sequences: the figures that plans for it rest
on.

    python scripts/bench_gpu.py                                       all parts, on one CUDA GPU,
                                                                      about ten minutes
    python scripts/bench_gpu.py --parts kernels overlap
    python scripts/bench_gpu.py --device cpu --most 2048 --context 4096 --hidden 256    the same on
                                                                                        a CPU, to
                                                                                        try it

kernels  TFLOP/s of the attention kernel for chunks of 128 to 32K queries and as many keys, 32
heads of 128 that share
         32, 8 or 4 key heads: whole squares as in a ring, forward and backward; and from which
         chunk on it reaches
         80 % of the best, which is what a chunk should not fall below
remat    decoder layers as wide as Llama-3.1-8B's under activation checkpointing, attention
         recomputed and not: median
         of the ratios of neighbouring runs
overlap  a square of attention beside a copy of its keys and values on a stream of its own: how
much of the shorter
         one is hidden
chunks   seconds of every chunk of 512 to 32K tokens behind 0 to 128K others, forward and backward,
         through the
         executor of a pipeline of one stage, keys and values carried; the cost model of pipelines
         fitted to two
         thirds of them, and its error on the others
traces   pipeline schedules on those times, simulated: long-tailed batches on 4 and 8 stages

Times are CUDA's after a synchronisation, medians of --rounds. float32 on a CPU, bfloat16 on a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from bench_pipeline import long_tailed
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

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

HEAD_DIM = 128
FLOPS = 4  # of a pair of a query and a key, per head and element, forward; 10 backward
ENOUGH = 0.8  # of the best throughput
LAYERS = 32  # of the model whose layers are timed


class Machine(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    kernel: Kernel
    rounds: int

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of the rounds, after one that does not count."""
        return statistics.median([self.once(run) for _ in range(self.rounds + 1)][1:])

    def once(self, run: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - began


# ---- kernels


class Square:
    """Attention of `tokens` queries to as many keys, all of them read."""

    def __init__(self, machine: Machine, tokens: int, heads: int, kv_heads: int) -> None:
        options = {"dtype": machine.dtype, "device": machine.device}
        self.kernel, self.scale = machine.kernel, HEAD_DIM**-0.5
        self.q = torch.randn(tokens, heads, HEAD_DIM, **options)
        self.k, self.v = (torch.randn(tokens, kv_heads, HEAD_DIM, **options) for _ in range(2))
        self.segments = Segments((tokens,), (tokens,), causal=False, device=machine.device)
        self.out, self.lse = self.forward()

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernel.forward(self.q, self.k, self.v, self.segments, scale=self.scale)

    def backward(self) -> object:
        return self.kernel.backward(
            self.q, self.q, self.k, self.v, self.out, self.lse, self.segments, scale=self.scale
        )


def kernels(machine: Machine, asked: argparse.Namespace) -> None:
    heads = asked.hidden // HEAD_DIM
    print(
        f"\n## Attention kernel {machine.kernel.name}, {heads} query heads of {HEAD_DIM}, "
        f"TFLOP/s\n"
    )
    print("| key heads | chunk | forward | backward |\n|---:|---:|---:|---:|")
    enough = []
    for kv_heads in dict.fromkeys(max(1, heads // share) for share in (1, 4, 8)):
        found = {
            n: throughput(machine, Square(machine, n, heads, kv_heads), n, heads)
            for n in sizes(128, asked.most)
        }
        for n, (forward, backward) in found.items():
            print(f"| {kv_heads} | {n:,} | {forward:.2f} | {backward:.2f} |")
        forward, backward = (
            min(n for n in found if found[n][way] >= ENOUGH * max(t[way] for t in found.values()))
            for way in (0, 1)
        )
        enough.append(
            f"With {kv_heads} key heads 80 % of the best from {forward:,} tokens, "
            f"backward {backward:,}."
        )
    print("\n" + "\n".join(enough))


def throughput(machine: Machine, square: Square, tokens: int, heads: int) -> tuple[float, float]:
    flops = FLOPS * tokens * tokens * heads * HEAD_DIM / 1e12
    return flops / machine.seconds(square.forward), 2.5 * flops / machine.seconds(square.backward)


def sizes(least: int, most: int) -> Iterator[int]:
    size = least
    while size <= most:
        yield size
        size *= 2


# ---- remat


def remat(machine: Machine, asked: argparse.Namespace) -> None:
    print("\n## Attention kept against attention recomputed, 2 checkpointed decoder layers\n")
    print("| tokens | kept, s | recomputed over it |\n|---:|---:|---:|")
    model = (
        LlamaModel(llama(asked, layers=2, attention=NAME))
        .to(machine.device, machine.dtype)
        .train()
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for tokens in sizes(min(4096, asked.most), asked.most):
        kept, again = zip(
            *(
                (layer_s(machine, model, tokens, True), layer_s(machine, model, tokens, False))
                for _ in range(machine.rounds + 1)
            ),
            strict=True,
        )
        ratio = statistics.median(b / a for a, b in zip(kept[1:], again[1:], strict=True))
        print(f"| {tokens:,} | {statistics.median(kept[1:]):.4f} | {ratio:.3f} |")


def layer_s(machine: Machine, model: LlamaModel, tokens: int, attention_remat: bool) -> float:
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
    """Layers of Llama-3.1-8B at its hidden size, and of its shape at others; next to no
    vocabulary."""
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


def overlap(machine: Machine, asked: argparse.Namespace) -> None:
    print("\n## A square of attention beside a copy of its keys and values\n")
    if machine.device.type != "cuda":
        print("needs a CUDA GPU: a CPU has no streams")
        return
    print(
        "| tokens | attention, ms | copy, ms | together, ms | hidden of the shorter "
        "|\n|---:|---:|---:|---:|---:|"
    )
    stream, heads = torch.cuda.Stream(), asked.hidden // HEAD_DIM
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

        alone, moving, together = (machine.seconds(run) for run in (square.forward, copy, both))
        hidden = (alone + moving - together) / min(alone, moving)
        print(
            f"| {tokens:,} | {1e3 * alone:.2f} | {1e3 * moving:.2f} | {1e3 * together:.2f} | "
            f"{hidden:.2f} |"
        )


# ---- chunks


class Timed(NamedTuple):
    """One action: forward or backward of `tokens` behind `before` others."""

    kind: str
    tokens: int
    before: int
    seconds: float

    @property
    def row(self) -> list[float]:
        return [1.0, self.tokens, causal_pairs(self.before, self.before + self.tokens)]


def chunks(machine: Machine, asked: argparse.Namespace) -> StageCost:
    """The fitted cost of one decoder layer."""
    timed = [t for tokens in sizes(512, asked.most) for t in chunk_times(machine, asked, tokens)]
    print(
        f"\n## Chunks of 512 to {asked.most:,} tokens behind up to {asked.context:,}, one "
        f"decoder layer\n"
    )
    print(
        "| action | samples | constant, us | per 1,000 tokens, us | per 1M pairs, us | error held "
        "out, mean | worst |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    constants = {}
    for kind in ("F", "B"):
        mine = [t for t in timed if t.kind == kind]
        held, fitted = mine[::3], [t for n, t in enumerate(mine) if n % 3]
        found = nnls(
            np.array([[x / t.seconds for x in t.row] for t in fitted]), np.ones(len(fitted))
        )
        errors = [abs(float(np.dot(found, t.row)) / t.seconds - 1) for t in held]
        constants[kind] = found
        cells = f"{1e6 * found[0]:.1f} | {1e9 * found[1]:.2f} | {1e12 * found[2]:.2f}"
        print(
            f"| {kind} | {len(mine)} | {cells} | {100 * statistics.mean(errors):.1f} % | "
            f"{100 * max(errors):.1f} % |"
        )
    base, linear, attention = (1e9 * x for x in constants["F"].tolist())
    ratio = constants["B"][2] / max(constants["F"][2], 1e-30)
    print(f"\nThe backward's attention takes {ratio:.2f} times the forward's.")
    return StageCost(linear_ns=linear, attention_ns=attention, chunk_ns=base)


def chunk_times(machine: Machine, asked: argparse.Namespace, tokens: int) -> list[Timed]:
    """Of all chunks of one sequence of `asked.context` tokens."""
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
        positions = torch.tensor(
            [[p for part in chunk.slices for p in range(part.start, part.stop)]]
        )
        columns.append(
            {
                name: (positions % 16 if name != "position_ids" else positions).to(machine.device)
                for name in ("input_ids", "labels", "position_ids")
            }
        )
    found: dict[tuple[str, int], list[float]] = {}
    obey = executor_module._Step.obey

    def timed(step: Any, action: Any) -> None:
        seconds = machine.once(lambda: obey(step, action))
        found.setdefault((action.kind, action.chunk), []).append(seconds)

    with mock.patch.object(executor_module._Step, "obey", timed):
        for _ in range(machine.rounds + 1):
            model.zero_grad()
            executor.train(plan, columns, count * tokens)
    return [
        Timed(kind, tokens, n * tokens, statistics.median(s[1:])) for (kind, n), s in found.items()
    ]


# ---- traces


def traces(layer: StageCost) -> None:
    print("\n## Pipeline schedules on these times, simulated; seconds of a step over auto's\n")
    print("| context | stages | 1f1b | seq1f1b, k = 8 | infinipipe (re-created) | auto, s |")
    print("|---|---:|---:|---:|---:|---:|")
    for context in (96, 192):
        for stages in (4, 8):
            cost = PipelineCost.even(stages, of_stage(layer, LAYERS // stages))
            lengths = long_tailed(0, context * 1024)
            seconds = {
                name: report(
                    make_pipeline_plan(lengths, cost, schedule=name, **options), cost
                ).seconds
                for name, options in (
                    ("auto", {}),
                    ("1f1b", {}),
                    ("seq1f1b", {"chunks": 8}),
                    ("infinipipe", {}),
                )
            }
            others = " | ".join(
                f"{seconds[name] / seconds['auto']:.3f}"
                for name in ("1f1b", "seq1f1b", "infinipipe")
            )
            print(f"| {context}K | {stages} | {others} | {seconds['auto']:.2f} |")


def of_stage(layer: StageCost, layers: int) -> StageCost:
    return StageCost(
        linear_ns=layers * layer.linear_ns,
        attention_ns=layers * layer.attention_ns,
        chunk_ns=layers * layer.chunk_ns,
        layers=layers,
    )


PARTS: Sequence[str] = ("kernels", "remat", "overlap", "chunks", "traces")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    device, dtype = (
        torch.device(asked.device),
        torch.bfloat16 if asked.device == "cuda" else torch.float32,
    )
    machine = Machine(device, dtype, choose_kernel(device, dtype, HEAD_DIM), asked.rounds)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(
        f"bench_gpu.py on {name}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {dtype}"
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        for name, part in {"kernels": kernels, "remat": remat, "overlap": overlap}.items():
            if name in asked.parts:
                part(machine, asked)
        if {"chunks", "traces"} & set(asked.parts):
            layer = chunks(machine, asked)
            if "traces" in asked.parts:
                traces(layer)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
