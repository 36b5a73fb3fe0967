"""Modelled: choices for activations by micro-batch, against the best switch for a whole run.

    python scripts/benchmarks/choices.py --json choices.json
    python scripts/benchmarks/choices.py --million-tokens 4 --batches 4 --sharding hsdp

A step has one sequence of 512K tokens, and others whose lengths are log-normal like CommonCrawl's
(median 950, sigma 1.75), cut at 512K, until it has so many tokens. Llama-3.1-8B trains on 64 H100:
with its states sharded over all of them (fsdp2), or inside of each node (hsdp), or adapters of it
alone, with its weights whole on every rank (lora).

A switch holds for all micro-batches of all steps: one choice for activations, the most tokens a
rank that it allows, and the planner `auto`. Every rung of the planner's ladder is a switch, and so
is activation checkpointing as others have it by default, which computes attention again.

    again         the fastest switch that does so, or recomputes nothing
    one degree    the same with one degree for all sequences of all steps
    planned       the planner chooses for every micro-batch
    bound         a step that recomputes nothing and yet fits: no plan gains more than that
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from common import argument_parser, machine, table, write_record
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens, with_choice
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan import Plan, PlanInfeasible
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.lower_bound import bound_ns
from lengths import K, common_crawl_like

TOPOLOGY = Topology(nodes=8, ranks_per_node=8)
WORLD = TOPOLOGY.world_size
LONGEST = 512 * K
MILLION_TOKENS = (4, 8, 16)  # of a step
ADAPTED = LLAMA_8B.with_adapters(64)  # rank 64, at all matrices


class States(NamedTuple):
    """What is trained, and how its states are sharded."""

    shape: ModelShape
    zero_stage: int
    replicas: int = 1


SHARDINGS = {
    "fsdp2": States(LLAMA_8B, 3),
    "hsdp": States(LLAMA_8B, 3, TOPOLOGY.nodes),
    "lora": States(ADAPTED, 0),
}


def lengths_of(tokens: int, seed: int) -> list[int]:
    """Return the lengths of a step of so many tokens."""
    rng = random.Random(seed)
    lengths = [LONGEST]
    left = tokens - LONGEST
    while left > 0:
        length = min(common_crawl_like(rng), left)
        if length <= LONGEST:
            lengths.append(length)
            left -= length
    return lengths


def cost_of(states: States) -> CostModel:
    """Return the cost model of a run that has chosen nothing for its activations."""
    return analytic_cost_model(
        states.shape,
        DEVICES["H100"],
        TOPOLOGY,
        zero_stage=states.zero_stage,
        replicas=states.replicas,
        checkpointing=False,
    )


def planned(lengths: Sequence[int], cost: CostModel) -> Plan:
    """Return the plan whose micro-batches have choices of their own."""
    return make_plan(lengths, TOPOLOGY, cost)


def switched(
    lengths: Sequence[int], cost: CostModel, choice: MemoryChoice, degree: int | None = None
) -> Plan | None:
    """Return the plan under one choice for all micro-batches; None where a sequence does not fit.
    degree: of all sequences; None to plan it."""
    options = PlanOptions(
        planner="auto" if degree is None else "static",
        sp_degree=degree,
        max_tokens_per_rank=most_tokens(cost, choice, WORLD) or None,
    )
    try:
        return make_plan(lengths, TOPOLOGY, with_choice(cost, choice), options)
    except PlanInfeasible:
        return None


def computes_again(choice: MemoryChoice) -> bool:
    """Return True for recomputed layers that keep their inputs alone, on the device."""
    return choice.outputs_recomputed == choice.recomputed_layers and not choice.uses_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A choice for a whole run."""

    choice: str
    computes_again: bool
    """True if it is others' default, or recomputes nothing."""
    seconds: float
    """Of all steps together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The steps of one size."""

    sharding: str
    million_tokens: int
    planned_s: float
    """Of all steps together, as those below."""
    bound_s: float
    micro_batches: float
    """Of a planned step."""
    chosen: dict[str, int]
    """Micro-batches by their choice."""
    switches: tuple[Switch, ...]
    """Fastest first."""
    one_degree: Switch
    """The fastest of `again` with one degree for all sequences."""

    @property
    def again(self) -> Switch:
        """The fastest switch that computes attention again, or recomputes nothing."""
        return next(switch for switch in self.switches if switch.computes_again)

    def cells(self) -> tuple[str, ...]:
        """Return the result's line of the table."""
        best = self.switches[0]
        return (
            self.sharding,
            f"{self.million_tokens}M",
            f"{self.planned_s:.1f}",
            f"{self.micro_batches:.1f}",
            f"{best.seconds:.1f}",
            f"{best.seconds / self.planned_s:.3f}x",
            f"{self.again.seconds / self.planned_s:.3f}x",
            f"{self.one_degree.seconds / self.planned_s:.3f}x",
            f"{best.seconds / self.bound_s:.3f}x",
            best.choice,
        )


COLUMNS = (
    "states",
    "tokens a step",
    "planned, s",
    "micro-batches",
    "best switch, s",
    "over planned",
    "attention again, over planned",
    "the same, one degree",
    "best switch over the bound",
    "best switch",
)


def result_of(sharding: str, million_tokens: int, seeds: Sequence[int]) -> Result:
    """Return the figures of the steps of some seeds."""
    cost = cost_of(SHARDINGS[sharding])
    steps = [lengths_of(million_tokens * 10**6, seed) for seed in seeds]
    # 1. each switch, and with attention computed again each degree
    switches = []
    fixed = []
    layers = LLAMA_8B.layers
    checkpointing = MemoryChoice(recomputed_layers=layers, outputs_recomputed=layers)
    for choice in (*choices_of(cost, WORLD), checkpointing):
        switches += switches_of(steps, cost, choice)
        if computes_again(choice):
            for degree in TOPOLOGY.degrees():
                fixed += switches_of(steps, cost, choice, degree)
    # 2. the planner's own choices
    ours = [planned(lengths, cost) for lengths in steps]
    chosen: dict[str, int] = {}
    for plan in ours:
        for micro_batch in plan.micro_batches:
            name = str(micro_batch.memory or MemoryChoice())
            chosen[name] = chosen.get(name, 0) + 1
    return Result(
        sharding=sharding,
        million_tokens=million_tokens,
        planned_s=sum(plan.objective_s for plan in ours),
        bound_s=sum(bound_s(lengths, cost) for lengths in steps),
        micro_batches=sum(len(plan.micro_batches) for plan in ours) / len(ours),
        chosen=chosen,
        switches=tuple(sorted(switches, key=lambda switch: switch.seconds)),
        one_degree=min(fixed, key=lambda switch: switch.seconds),
    )


def switches_of(
    steps: Sequence[Sequence[int]],
    cost: CostModel,
    choice: MemoryChoice,
    degree: int | None = None,
) -> list[Switch]:
    """Return the switch of a choice with its seconds; none where a step does not fit."""
    plans = [switched(lengths, cost, choice, degree) for lengths in steps]
    if any(plan is None for plan in plans):
        return []
    name = str(choice) if degree is None else f"degree {degree}, {choice}"
    made = Switch(
        choice=name,
        computes_again=computes_again(choice),
        seconds=sum(plan.objective_s for plan in plans if plan is not None),
    )
    return [made]


def bound_s(lengths: Sequence[int], cost: CostModel) -> float:
    """Return the seconds that no plan of a step undercuts: nothing is recomputed, and as many
    tokens fit as under any choice."""
    cap = most_tokens(cost, choices_of(cost, WORLD)[-1], WORLD)
    nanoseconds = bound_ns(
        np.array(lengths, dtype=np.int64),
        TOPOLOGY,
        cost,
        strategy=cost.allowed("auto", TOPOLOGY),
        cap=cap,
        sync="lockstep",
        shares=None,
    )
    return nanoseconds / 1e9


def main() -> None:
    """Print a line for each size of a step."""
    parser = argument_parser(__doc__)
    parser.add_argument("--million-tokens", type=int, nargs="+", default=MILLION_TOKENS)
    parser.add_argument("--batches", type=int, default=2, help="steps of each size")
    parser.add_argument("--sharding", nargs="+", choices=SHARDINGS, default=tuple(SHARDINGS))
    asked = parser.parse_args()
    print(f"on {machine('numpy')}\n")
    results = []
    for sharding in asked.sharding:
        for million_tokens in asked.million_tokens:
            results.append(result_of(sharding, million_tokens, range(asked.batches)))
    print(table(COLUMNS, [result.cells() for result in results], range(1, 9)))
    for result in results:
        counts = ", ".join(f"{count} x {name}" for name, count in result.chosen.items())
        print(f"\n{result.sharding}, {result.million_tokens}M tokens: {counts}")
    figures: list[dict[str, Any]] = [asdict(result) for result in results]
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
