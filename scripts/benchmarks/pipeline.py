"""Simulated: pipeline schedules, our own against Seq1F1B and against InfiniPipe's planner.

    python scripts/benchmarks/pipeline.py                            everything, 5 seeds
    python scripts/benchmarks/pipeline.py --parts tail --stages 8 --seeds 0 1 2
    python scripts/benchmarks/pipeline.py --parts tail --attention 2   twice the attention

    tail        long-tailed batches against InfiniPipe, in less memory
    equal       16 equal sequences against Seq1F1B, in its memory
    planning    CPU time of planning 512 sequences

Every figure of InfiniPipe is one of a re-creation from the paper's text: its code is not public.
Exits with 1 when a part misses its mark.

Batches: 256 sequences of exp(normal(7.0, 1.35)) tokens, 2 % of them exp(normal(10.2, 0.8)),
clipped to [64, context]. A chunk of t tokens whose queries see p keys costs a stage
t + p / 61,440 + 256 forward, and backward 2 t + 2.5 p / 61,440 + 1.5 x 256, of which the input's
part is t + 2.5 p / 61,440 + 256. The unit is one token's linear work, here called a microsecond.
By operations a hidden size of 5120 has twice that attention: `--attention 2`. Memory is tokens in
flight; there are 40 layers, and a checkpointed one keeps 2 of 34 bytes. All seconds are simulated;
planning time is CPU time of one thread.
"""

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import argument_parser, machine, table_head, table_row, write_record
from hf_flexseq.pipeline.planning import PipelineOptions, make_pipeline_plan
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.pipeline.planning.timeline import report
from hf_flexseq.pipeline.planning.walk import check, check_memory
from lengths import K, long_tailed

BYTES = 34  # of a token on a stage, so that a checkpointed one is a whole number
PAIRS_PER_TOKEN = 61_440  # pairs of a query and a key that cost what a token's linear work costs
Printer = Callable[..., None]
Figures = list[dict[str, Any]]


def llama_13b(stages: int, attention: float = 1.0) -> PipelineCost:
    """Return the cost of 40 layers in equal stages.

    attention: times the attention of the formula above.
    """
    stage = StageCost(
        linear_ns=1e3,
        attention_ns=attention * 1e3 / PAIRS_PER_TOKEN,
        chunk_ns=256e3,
        layers=40 // stages,
        token_bytes=BYTES,
        input_bytes=2,
    )
    return PipelineCost.even(stages, stage)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulated plan."""

    plan: PipelinePlan
    seconds: float
    bubble: float
    """Share of the ranks' time that is idle."""
    peak: int
    """Most tokens' worth of bytes that the fullest rank holds."""
    first: int
    """Most tokens' worth of bytes that the first rank holds."""

    @property
    def k(self) -> int:
        """Chunks of the sequence that has the most."""
        return max(chunk.index for chunk in self.plan.chunks) + 1

    @property
    def layers(self) -> int:
        """Checkpointed layers, summed over stages and chunks."""
        return sum(map(sum, self.plan.checkpointed))

    @property
    def figures(self) -> dict[str, float]:
        """The raw figures of this plan."""
        return {
            "seconds": self.seconds,
            "bubble": self.bubble,
            "fullest_rank_tokens": self.peak,
            "first_rank_tokens": self.first,
            "chunks_of_a_sequence": self.k,
            "checkpointed_layers": self.layers,
        }


def run(lengths: tuple[int, ...], cost: PipelineCost, **arguments: object) -> Run:
    """Plan a batch, check the plan, and simulate it."""
    plan = make_pipeline_plan(lengths, cost, PipelineOptions(**arguments))
    check(plan)
    if arguments.get("memory_limit"):
        check_memory(plan, cost, arguments["memory_limit"])
    found = report(plan, cost)
    return Run(
        plan=plan,
        seconds=found.seconds,
        bubble=found.bubble,
        peak=max(found.peak_bytes) // BYTES,
        first=found.peak_bytes[0] // BYTES,
    )


# ---- long-tailed batches

SHARE = 0.7  # of the re-creation's stage-0 peak: the memory of `auto`
TAIL_COLUMNS = (
    "context",
    "P",
    "seed",
    "longest",
    "re-creation: K",
    "stage-0 peak, tokens",
    "auto, relative time",
    "relative peak",
)


def long_tails(options: argparse.Namespace, write: Printer, figures: Figures) -> bool:
    """Print the long-tailed batches, and return whether all marks are met."""
    write("\n## Long-tailed batches against InfiniPipe (re-created from the paper's text)\n")
    write(table_head(TAIL_COLUMNS))
    times: list[float] = []
    peaks: list[float] = []
    for context, stages, seed in itertools.product(
        options.contexts, options.stages, options.seeds
    ):
        lengths = long_tailed(seed, context * K)
        cost = llama_13b(stages, options.attention)
        best = run(lengths, cost, schedule="infinipipe")
        memory_limit = (int(SHARE * best.first) * BYTES,) * stages
        auto = run(lengths, cost, memory_limit=memory_limit)
        times.append(auto.seconds / best.seconds)
        peaks.append(auto.peak / best.first)
        cells = [f"{context}K", stages, seed, f"{max(lengths):,}", best.k, f"{best.first:,}"]
        write(table_row([*cells, f"{times[-1]:.3f}", f"{peaks[-1]:.2f}"]))
        case = {"part": "tail", "context_k": context, "stages": stages, "seed": seed}
        for name, found in (("infinipipe", best), ("auto", auto)):
            figures.append(case | {"way": name} | found.figures)
    write(
        "\nThe re-creation may use any K up to 96 and has no limit of memory. Peaks are relative "
        "to its\nstage-0 peak, and that of auto is its fullest stage's.\n"
    )
    slowest = mark(write, f"auto: slowest {max(times):.3f}", max(times) <= 1.0, "at most 1.00")
    fullest = mark(
        write, f"auto: highest peak {max(peaks):.3f}", max(peaks) <= SHARE, "at most 0.70"
    )
    return slowest and fullest


# ---- equal lengths

EQUAL_COLUMNS = (
    "P",
    "k",
    "Seq1F1B: bubble",
    "peak, sequences",
    "auto",
    "its k",
    "its bubble",
)


def equal_lengths(options: argparse.Namespace, write: Printer, figures: Figures) -> bool:
    """Print `auto` against Seq1F1B in its memory, and return whether it is never slower."""
    write("\n## 16 sequences of 32,768 tokens against Seq1F1B, in its memory\n")
    write(table_head(EQUAL_COLUMNS))
    lengths = (32 * K,) * 16
    worst = 0.0
    for stages, k in itertools.product((2, *options.stages), (1, 2, 4, 8)):
        cost = llama_13b(stages, options.attention)
        plain = run(lengths, cost, schedule="seq1f1b", chunks=k)
        memory_limit = (plain.peak * BYTES,) * stages
        planned = run(lengths, cost, memory_limit=memory_limit)
        worst = max(worst, planned.seconds / plain.seconds)
        cells = [f"{stages}", f"{k}"]
        cells += [f"{100 * plain.bubble:.1f} %", f"{plain.first / lengths[0]:.2f}"]
        cells += [f"{planned.seconds / plain.seconds:.3f}", f"{planned.k}"]
        cells += [f"{100 * planned.bubble:.1f} %"]
        write(table_row(cells))
        for name, found in (("seq1f1b", plain), ("auto", planned)):
            case = {"part": "equal", "stages": stages, "k": k, "way": name}
            figures.append(case | found.figures)
    write()
    return mark(write, f"auto at worst {worst:.3f} of Seq1F1B's time", worst <= 1.0, "never worse")


# ---- planning time

PLANNING_COLUMNS = (
    "chunks of at most",
    "room per stage",
    "batches",
    "chunks",
    "ms, p50",
    "p90",
)


def planning(options: argparse.Namespace, write: Printer, figures: Figures) -> bool:
    """Print how long plans take, and return whether every median is at most 50 ms."""
    write("\n## Planning 512 sequences at P = 8, CPU time of one thread\n")
    write(table_head(PLANNING_COLUMNS))
    cost = llama_13b(8)
    worst = 0.0
    for most, tokens in ((None, None), (None, 200_000), (2_600, None), (2_600, 200_000)):
        memory_limit = None if tokens is None else (tokens * BYTES,) * 8
        milliseconds, chunks = [], []
        for seed in range(options.batches):
            lengths = long_tailed(seed, 96 * K, 512)
            began = time.process_time()
            plan = make_pipeline_plan(
                lengths, cost, PipelineOptions(max_tokens=most, memory_limit=memory_limit)
            )
            milliseconds.append(1e3 * (time.process_time() - began))
            chunks.append(len(plan.chunks))
            again = make_pipeline_plan(
                lengths, cost, PipelineOptions(max_tokens=most, memory_limit=memory_limit)
            )
            assert plan.digest() == again.digest(), "the same input gives the same plan"
        median = statistics.median(milliseconds)
        p90 = statistics.quantiles(milliseconds, n=10)[-1]
        worst = max(worst, median)
        cells = [f"{limit:,} tokens" if limit else "-" for limit in (most, tokens)]
        cells += [f"{len(milliseconds)}", f"{min(chunks)}-{max(chunks)}"]
        cells += [f"{median:.0f}", f"{p90:.0f}"]
        write(table_row(cells))
        case = {"part": "planning", "max_tokens": most, "room_tokens": tokens}
        figures.append(case | {"milliseconds": milliseconds, "chunks": chunks})
    write()
    return mark(write, f"slowest p50 {worst:.0f} ms", worst <= 50, "at most 50 ms")


def mark(write: Printer, what: str, passed: bool, wanted: str) -> bool:
    """Print one verdict and return it."""
    write(f"* {what}: {'passed' if passed else 'FAILED'} ({wanted})")
    return passed


PARTS = {
    "tail": long_tails,
    "equal": equal_lengths,
    "planning": planning,
}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[96, 192], help="in K tokens")
    parser.add_argument("--stages", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--attention", type=float, default=1.0, help="times the attention of the causal area"
    )
    parser.add_argument("--batches", type=int, default=11, help="for planning time")
    options = parser.parse_args()
    if options.batches < 2:
        parser.error(f"--batches {options.batches}: give at least 2, for a percentile")
    write = functools.partial(print, flush=True)
    write(f"pipeline.py {' '.join(sys.argv[1:])}")
    write(f"on {machine('numpy')}")
    figures: Figures = []
    passed = [PARTS[part](options, write, figures) for part in options.parts]
    write_record(options.json, figures)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
