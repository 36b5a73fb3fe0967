"""Measured: what chunks save in a pipeline of two CPU stages, and how even the stages are.

    python scripts/benchmarks/stages.py
    python scripts/benchmarks/stages.py --rounds 9 --tokens 4096 --layers 4

Speed: forwards and backwards of two equal sequences through a Llama in two stages, without Trainer
and optimizer. The schedules take turns, so that a noisy machine is noisy for all of them; a ratio
is the median over rounds of 1f1b's seconds over the schedule's in the same round. Costs for the
cuts and for `auto` are fitted to forwards of this model on this machine at the start. Two clocks:

    wall    both ranks, from one barrier to the next. It needs two idle cores: on busy ones an idle
            stage's core does other work, and the bubble costs less than it would
    path    the longest path through the actions that were run, each as long as its thread was on
            the processor; what a machine with nothing else to do would take, transfers left out

Gradients of every schedule are compared with those of 1f1b, in float32. Each stage has one thread:
a second one would use the other stage's idle core, and hide the bubble.

Balance: seconds on the processor of both stages, of a Llama with 8 layers, 256 wide, and a
vocabulary of 32,000, where the LM head costs as much as several layers.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from common import (
    argument_parser,
    load_average,
    machine,
    ratios,
    spread,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.cost.stages import PipelineCost, StageCost, causal_pairs
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import PIPELINE_NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.pipeline import executor as executor_module
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.planner.pipeline import make_pipeline_plan
from hf_flexseq.schedule.pipeline.walk import walk

STAGES = 2
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "seq1f1b, 4 even": {"schedule": "seq1f1b", "chunks": 4, "cuts": "even"},
    "seq1f1b, 4 by computation": {"schedule": "seq1f1b", "chunks": 4, "cuts": "computation"},
    "seq1f1b, 4 by time": {"schedule": "seq1f1b", "chunks": 4, "cuts": "time"},
    "auto": {"schedule": "auto"},
}
Clocks = dict[str, list[float]]  # by clock, the seconds of each round
COLUMNS = (
    "schedule",
    "chunks",
    "wall, s",
    "1f1b over it",
    "path, s",
    "1f1b over it",
    "simulated",
    "gradients differ by",
)


class Pipeline:
    """One stage of a new Llama, and the executor that runs a pipeline's plan on it."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": layers,
        }
        heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=vocabulary)).train()
        self.model.set_attn_implementation(PIPELINE_NAME)
        self.vocabulary = vocabulary
        communicator = Communicator()
        self.stage = cut(self.model, communicator.rank, STAGES)
        if self.stage.is_last:
            attach_chunked_loss(self.model)
        kernel = choose_kernel(torch.device("cpu"), torch.float32, 64)
        self.executor = PipelineExecutor(
            self.stage, Neighbours(communicator, [list(range(STAGES))]), kernel
        )

    def run(self, plan: PipelinePlan) -> tuple[float, list[float]]:
        """Run one step, and return its seconds. Collective.

        Returns (wall seconds, this stage's seconds on the processor, action by action).
        """
        self.model.zero_grad()
        columns = [self._columns(chunk) for chunk in plan.chunks]
        dist.barrier()
        with timed_actions() as seconds:
            began = time.perf_counter()
            self.executor.train(plan, columns, sum(plan.lengths))
            dist.barrier()
            return time.perf_counter() - began, list(seconds)

    def _columns(self, chunk: Any) -> dict[str, torch.Tensor]:
        """Return a chunk's columns, each [1, tokens]; a token depends on sequence and position."""
        ids, positions = [], []
        for part in chunk.slices:
            for p in range(part.start, part.stop):
                mixed = 7919 * part.sequence + 104729 * p + p * p // 3
                ids.append(mixed % self.vocabulary)
                positions.append(p)
        row = torch.tensor([ids])  # [1, tokens]
        return {"input_ids": row, "labels": row, "position_ids": torch.tensor([positions])}

    def gradients(self) -> list[torch.Tensor]:
        """Return a copy of the gradient of each parameter of this stage, in its shape."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@contextmanager
def timed_actions() -> Iterator[list[float]]:
    """Collect the seconds that every action inside the block was on the processor.

    A thread that waits is not on the processor.
    """
    seconds: list[float] = []
    obey = executor_module._Step.obey

    def timed(step: Any, action: Any) -> None:
        began = time.thread_time()
        obey(step, action)
        seconds.append(time.thread_time() - began)

    with mock.patch.object(executor_module._Step, "obey", timed):
        yield seconds


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks. Collective."""
    found: list[Any] = [None] * STAGES
    dist.all_gather_object(found, value)
    return found


def plan_for(lengths: Sequence[int], cost: PipelineCost, **options: Any) -> PipelinePlan:
    return make_pipeline_plan(list(lengths), cost, **options)


def even_cost() -> PipelineCost:
    return PipelineCost.even(STAGES, StageCost(linear_ns=1.0, attention_ns=0.0, chunk_ns=0.0))


def fitted_cost(pipeline: Pipeline, tokens: int) -> PipelineCost:
    """Fit each stage's cost to forwards of a tiny, a half and a whole sequence. Collective."""
    times = []
    for length in (16, tokens // 2, tokens):
        plan = plan_for([length], even_cost(), schedule="1f1b")
        times.append(1e9 * min(pipeline.run(plan)[1][0] for _ in range(3)))
    constant, half, whole = times
    near = causal_pairs(0, tokens // 2)
    far = causal_pairs(0, tokens)
    attention = ((whole - constant) - 2 * (half - constant)) / (far - 2 * near)
    linear = (whole - constant - attention * far) / tokens
    stage = StageCost(
        linear_ns=max(linear, 1.0), attention_ns=max(attention, 0.0), chunk_ns=constant
    )
    return PipelineCost(stages=tuple(gathered(stage)))


def path_s(plan: PipelinePlan, seconds: Sequence[Sequence[float]]) -> float:
    """Return the step's length if every action took these seconds and transfers took none.

    seconds: by rank, in the order of its actions.
    """
    free_at = [0.0] * plan.ranks
    remaining = [iter(rank_seconds) for rank_seconds in seconds]
    # when the input of (direction, stage, unit, chunk) is there
    arrived: dict[tuple[str, int, int, int], float] = {}
    for rank, action in walk(plan):
        direction = "F" if action.kind == "F" else "B"
        input_at = arrived.get((direction, action.stage, action.unit, action.chunk), 0.0)
        free_at[rank] = max(free_at[rank], input_at) + next(remaining[rank])
        if action.kind == "W":  # a weight gradient goes nowhere
            continue
        next_stage = action.stage + 1 if direction == "F" else action.stage - 1
        arrived[direction, next_stage, action.unit, action.chunk] = free_at[rank]
    return max(free_at)


def speed(rank: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Time all schedules in turn and return the seconds of each. Collective; rank 0 prints."""
    pipeline = Pipeline(layers=asked.layers, hidden=asked.hidden, vocabulary=asked.vocabulary)
    cost = fitted_cost(pipeline, asked.tokens)
    plans = {}
    for name, options in SCHEDULES.items():
        plans[name] = plan_for([asked.tokens] * 2, cost, **options)
    clocks: dict[str, Clocks] = {name: {"wall": [], "path": []} for name in SCHEDULES}
    differences: dict[str, float] = {}
    wanted: list[torch.Tensor] = []
    # the first round warms up, and its gradients are compared
    for number in range(asked.rounds + 1):
        for name, plan in plans.items():
            wall, seconds = pipeline.run(plan)
            by_rank = gathered(seconds)
            if number:
                clocks[name]["wall"].append(wall)
                clocks[name]["path"].append(path_s(plan, by_rank))
            else:
                found = pipeline.gradients()
                wanted = wanted or found
                differences[name] = max(gathered(largest_difference(found, wanted)))
    if rank == 0:
        print_speed(asked, plans, clocks, differences)
    return {"seconds": clocks, "gradients_differ_by": differences}


def largest_difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return ||a - b|| / ||b||, the worst over this stage's parameters.

    The denominator is at least 1e-3 of the largest norm.
    """
    floor = 1e-3 * max(float(b.norm()) for b in wanted)
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        worst = max(worst, float((a - b).norm()) / max(float(b.norm()), floor))
    return worst


def print_speed(
    asked: argparse.Namespace,
    plans: dict[str, PipelinePlan],
    clocks: dict[str, Clocks],
    differences: dict[str, float],
) -> None:
    """Print one row for each schedule."""
    shape = f"{asked.layers} layers, {asked.hidden} wide, vocabulary {asked.vocabulary:,}, float32"
    print(f"\n{shape}; 2 sequences of {asked.tokens:,} tokens, 2 stages; {asked.rounds} rounds\n")
    print(table_head(COLUMNS, numbers=(1, 2, 4, 6, 7)))
    for name, plan in plans.items():
        cells = [name, str(len(plan.chunks))]
        for clock in ("wall", "path"):
            seconds = clocks[name][clock]
            cells.append(f"{statistics.median(seconds):.2f}")
            cells.append(spread(ratios(clocks["1f1b"][clock], seconds)))
        cells.append(f"{plans['1f1b'].objective_s / plan.objective_s:.3f}")
        cells.append(f"{differences[name]:.1e}")
        print(table_row(cells))


def balance(rank: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Return both stages' seconds on the processor by round. Collective; rank 0 prints."""
    pipeline = Pipeline(layers=8, hidden=256, vocabulary=32_000)
    plan = plan_for([asked.tokens], even_cost(), schedule="1f1b")
    rounds = []
    for _ in range(asked.rounds + 1):
        _, seconds = pipeline.run(plan)
        rounds.append(gathered(sum(seconds)))
    rounds = rounds[1:]  # the first round warms up
    if rank == 0:
        start, stop = pipeline.stage.spans[0]
        medians = [statistics.median(stage) for stage in zip(*rounds, strict=True)]
        imbalance = [max(stages) * STAGES / sum(stages) for stages in rounds]
        print(
            f"\n8 layers, 256 wide, vocabulary 32,000; one sequence of {asked.tokens:,} tokens; "
            f"{asked.rounds} rounds"
        )
        print(
            f"layers: {stop - start} and embedding, {8 - stop} and head; on the processor, s: "
            f"{medians}"
        )
        print(f"largest over mean: {spread(imbalance)}")
    return {"processor_s": rounds}


def rank_main(rank: int, folder: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=STAGES
    )
    figures = {}
    for part in (speed, balance):
        if asked.part in ("all", part.__name__):
            figures[part.__name__] = part(rank, asked)
    if rank == 0:
        write_record(asked.json, figures)
    dist.barrier()
    dist.destroy_process_group()


def surroundings() -> str:
    """Return one line about the machine as it is now."""
    return f"{machine('torch', 'transformers')}; load average {load_average()}"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=("all", "speed", "balance"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--vocabulary", type=int, default=1024, help="small: the stages of the speed test are even"
    )
    asked = parser.parse_args()
    print(f"before: {surroundings()}", flush=True)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, asked)) for rank in range(STAGES)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed")
    print(f"\nafter: {surroundings()}")


if __name__ == "__main__":
    main()
