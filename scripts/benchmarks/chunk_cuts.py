"""Measured: what the cuts of a sequence cost a stage: seconds on the processor of forwards and
backwards of one sequence through two layers, a norm and a head.

    python scripts/benchmarks/chunk_cuts.py
    python scripts/benchmarks/chunk_cuts.py --rounds 30 --tokens 8192

whole    one chunk
equal    four chunks of equal work, as the planner's quadratic has them
tiles    the same cuts at multiples of `cuts.TILE`, where `on_tiles` moves them

The three take turns. `least` is the sum over actions of the least seconds of all rounds, which a
noisy machine disturbs less than the median of the rounds' sums.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import statistics
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from hf_flexseq.hf.attention import PIPELINE_NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.stages import cut as cut_model
from hf_flexseq.plan.pipeline import PipelinePlan
from hf_flexseq.planner.pipeline.cuts import CutWork, cut, on_tiles
from stages import timed_actions

CHUNKS = 4
VOCABULARY = 1024
COLUMNS = ("cuts", "places", "least, s", "whole over it", "median, s")
# of 4,096 tokens of this model: as much time in a token's linear layers as in 3,190 of its pairs
WORK = CutWork(linear=3190.0, square=1.0)


def plan_of(places: list[int]) -> PipelinePlan:
    """Return the plan of one sequence on one stage, in chunks between these places."""
    chunks = []
    for index, (start, stop) in enumerate(pairwise(places)):
        chunks.append({"unit": 0, "index": index, "slices": [[0, start, stop]]})
    indices = range(len(chunks))
    actions = [f"0F0.{index}" for index in indices] + [f"0B0.{index}" for index in indices[::-1]]
    return PipelinePlan.from_record(
        {
            "version": 1,
            "lengths": [places[-1]],
            "ranks": 1,
            "stages": 1,
            "chunks": chunks,
            "actions": [" ".join(actions)],
            "checkpointed": [],
            "schedule": "seq1f1b",
            "objective_s": 0.0,
            "planning_s": 0.0,
        }
    )


def columns_of(plan: PipelinePlan) -> list[dict[str, torch.Tensor]]:
    """Return the columns of each chunk, each [1, tokens]."""
    columns = []
    for chunk in plan.chunks:
        (part,) = chunk.slices
        positions = torch.arange(part.start, part.stop).unsqueeze(0)
        ids = 7919 * positions % VOCABULARY
        columns.append({"input_ids": ids, "labels": ids, "position_ids": positions})
    return columns


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config).train()
    model.set_attn_implementation(PIPELINE_NAME)
    stage = cut_model(model, 0, 1)
    attach_chunked_loss(model)
    kernel = choose_kernel(torch.device("cpu"), torch.float32, 64)
    executor = PipelineExecutor(stage, None, kernel)

    equal = cut(asked.tokens, CHUNKS, WORK)
    places = {"whole": [0, asked.tokens], "equal": equal, "tiles": on_tiles(equal, WORK)}
    plans = {name: plan_of(of_name) for name, of_name in places.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in plans}
    for number in range(asked.rounds + 1):
        for name, plan in plans.items():
            model.zero_grad()
            with timed_actions() as of_actions:
                executor.train(plan, columns_of(plan), asked.tokens)
            if number:  # the first round warms up
                seconds[name].append(list(of_actions))

    print(f"on {machine('torch', 'transformers')}; load average {load_average()}\n")
    print(table_head(COLUMNS, numbers=(2, 3, 4)))
    least = {}
    for name, rounds in seconds.items():
        least[name] = sum(min(of_action) for of_action in zip(*rounds, strict=True))
        median = statistics.median(sum(of_round) for of_round in rounds)
        ratio = least["whole"] / least[name]
        cells = (name, str(places[name]), f"{least[name]:.4f}", f"{ratio:.3f}", f"{median:.4f}")
        print(table_row(cells))
    write_record(asked.json, {"places": places, "seconds": seconds})


if __name__ == "__main__":
    main()
