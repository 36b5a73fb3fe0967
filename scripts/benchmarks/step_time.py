"""Measured: what the host of one rank does for a step outside of the model.

    python scripts/benchmarks/step_time.py
    python scripts/benchmarks/step_time.py --steps 2 --only "1024 x 8192"

Steps are planned by `make_plan` as in a run, and then run, all but the model, as one rank of many
that is all alone: what it would get from the others is there at once (`RecordedCpuGroup`). So
times are those of the rank's own work, the wire apart:

    plan        received, on a rank other than rank 0
    dispatch    shards, tokens exchanged, inputs of the model; without contexts
    contexts    what attention is told about each micro-batch
    figures     of the finished step
    rank 0      what it does beside: the planner's answer read, checked, made ready to be sent

The ranks are the first, one in the middle, and the last of the widest group. Milliseconds are CPU
time of the thread, of the steps and ranks; each step is run once, for a run never meets one twice.
Costs are those of the preset flexsp-gpt-7b-a100.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from common import (
    ROOT,
    argument_parser,
    load_average,
    machine,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attachments import ModelSettings
from hf_flexseq.hf.calibration.source import CostSource
from hf_flexseq.hf.engine_setup import EngineSetup
from hf_flexseq.hf.whole_model import WholeModel
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.steps.prefetch import PrefetchedSteps
from hf_flexseq.steps.source_row import DrawnStep, SourceRow
from hf_flexseq.steps.trace import PlanTrace
from lengths import DOCUMENTS, WIKIPEDIA, K, batch, common_crawl_like
from planners import CAP, COST, SETS, LengthSet
from tiny import tiny_llama_config

sys.path.insert(0, str(ROOT / "scripts"))
from stub import StubCpuGroup, StubTransport

DTYPES = {"input_ids": torch.int64, "labels": torch.int64, "position_ids": torch.int64}
PARTS = ("plan", "dispatch", "contexts", "figures")
COLUMNS = ("ranks x sequences", "steps", *PARTS, "all but contexts", "worst", "rank 0")


def large(sequences: int) -> LengthSet:
    """Return the set of 1,024 ranks with so many sequences, one distribution after the other."""
    draws = (WIKIPEDIA, DOCUMENTS, common_crawl_like)
    return replace(
        SETS["1024 ranks"],
        draw=lambda seed: batch(draws[seed % 3], 192 * K, sequences, seed),
    )


def small() -> LengthSet:
    """Return the set of 64 ranks with 512 sequences, one distribution after the other."""
    names = ("wikipedia", "documents", "cc-like")
    return replace(SETS["documents"], draw=lambda seed: SETS[names[seed % 3]].draw(seed))


SIZES = {"64 x 512": small(), "1024 x 4096": large(4096), "1024 x 8192": large(8192)}


# ---- the recording


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A planned step, as the planner's process has sent it."""

    chosen: LengthSet
    record: str
    """The plan's record, as JSON."""
    plan: Plan

    @property
    def sources(self) -> tuple[int, ...]:
        """The rank that drew each sequence: equally many each."""
        world_size = self.chosen.topology.world_size
        sequences = len(self.plan.lengths)
        return tuple(index * world_size // sequences for index in range(sequences))

    def ranks(self) -> list[int]:
        """Return the first rank, one in the middle, and the last of the widest group."""
        widest = max(
            (group for batch in self.plan.micro_batches for group in batch.groups),
            key=lambda group: group.degree,
        )
        return [0, self.chosen.topology.world_size // 2 + 1, widest.ranks[-1]]


def recorded(chosen: LengthSet, seed: int) -> Recorded:
    """Plan one step."""
    plan = make_plan(
        chosen.draw(seed), chosen.topology, COST, PlanOptions(max_tokens_per_rank=CAP)
    )
    return Recorded(chosen=chosen, record=plan.to_json(), plan=plan)


class RecordedCpuGroup(StubCpuGroup):
    """Exchanges that give one rank what the others of a recorded step would give it."""

    __slots__ = ("answer",)

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.answer: bytes | None = None
        """What rank 0 sends: a plan, behind the line that says so. None before the first step,
        where rank 0 sends what this rank has, too."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        return data if self.answer is None else self.answer


# ---- one rank


@dataclass
class Clock:
    """CPU milliseconds of this thread, by part."""

    milliseconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        taken = 1e3 * (time.thread_time() - began)
        self.milliseconds[part] = self.milliseconds.get(part, 0.0) + taken


class OneRank:
    """One rank of many, with all that a run has made before its first step."""

    def __init__(self, chosen: LengthSet, rank: int) -> None:
        self.rank = rank
        transport = StubTransport(rank, chosen.topology.world_size)
        self.cpu_group = transport.cpu_group = RecordedCpuGroup(chosen.topology.world_size)
        self.communicator = Communicator(chosen.topology, transport=transport)
        accelerator = Accelerator(cpu=True)
        setup = EngineSetup(
            accelerator=accelerator,
            args=FlexSeqArguments(cost_model=COST.name),
            communicator=self.communicator,
            costs=CostSource(COST.name, COST, accelerator, self.communicator),
        )
        network = LlamaForCausalLM(tiny_llama_config())
        self.model = WholeModel(setup, network, ModelSettings(), lockstep=True, lowered=None)
        self.kernel = setup.kernel_for(network, self.model.planning.degrees)
        self.contexts = self.model._contexts_by(self.kernel)
        self.trace = PlanTrace(None, self.communicator)

    def run(self, step: Recorded) -> dict[str, float]:
        """Run one step, all but the model, and return its milliseconds by part."""
        self.cpu_group.answer = json.dumps(["plan", ""]).encode() + b"\n" + step.plan.to_bytes()
        clock = Clock()
        drawn = self._drawn(step)
        steps = PrefetchedSteps(
            self.communicator,
            None,
            0,
            dispatch=partial(self.model.dispatch, kernel=self.kernel),
            check=self.model.planning.check,
            read=Plan.from_bytes,
        )

        def timed_context(*given: Any, **named: Any) -> Any:
            with clock.timing("contexts"):
                return self.contexts(*given, **named)

        self.model._contexts = timed_context
        with clock.timing("plan"):
            planned = steps._plan(drawn)
        with clock.timing("dispatch"):
            rank_step = self.model.dispatch(planned, self.kernel)
        clock.milliseconds.setdefault("contexts", 0.0)
        clock.milliseconds["dispatch"] -= clock.milliseconds["contexts"]
        with clock.timing("figures"):
            self.trace.record(rank_step, COST)
        return clock.milliseconds

    def _drawn(self, step: Recorded) -> DrawnStep:
        sources = step.sources
        own = [
            length
            for length, source in zip(step.plan.lengths, sources, strict=True)
            if source == self.rank
        ]
        columns = {name: torch.zeros(sum(own), dtype=dtype) for name, dtype in DTYPES.items()}
        return DrawnStep(
            number=0,
            request=0,
            row=SourceRow(columns=columns, lengths=tuple(own)),
            lengths=step.plan.lengths,
            sources=sources,
            targets=step.plan.lengths,
        )


def of_rank_0(step: Recorded) -> float:
    """Return milliseconds of what rank 0 does beside: the planner's answer, from text that has
    been parsed by another thread, to what is sent."""
    record = json.loads(step.record)
    began = time.thread_time()
    plan = Plan.from_record(record)
    check(plan, step.chosen.topology, CAP)
    plan.to_bytes()
    return 1e3 * (time.thread_time() - began)


def measured(chosen: LengthSet, steps: int) -> dict[str, Any]:
    """Return milliseconds by part of every step on every rank, and those of rank 0 beside."""
    warm_up = recorded(chosen, steps)
    found: dict[str, Any] = {"steps": [], "rank 0": [], "micro_batches": []}
    plans = [recorded(chosen, seed) for seed in range(steps)]
    gc.collect()
    gc.freeze()  # a run has no other plans than its own for Python to look through
    for which in range(3):
        for step in plans:
            rank = OneRank(chosen, step.ranks()[which])
            rank.run(warm_up)
            found["steps"].append(rank.run(step) | {"rank": rank.rank})
    of_rank_0(warm_up)
    for step in plans:
        found["rank 0"].append(of_rank_0(step))
        found["micro_batches"].append(len(step.plan.micro_batches))
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=6, help="of each size")
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"step_time.py {' '.join(sys.argv[1:])}\non {machine('torch')}, load {load_average()}\n")
    print(table_head(COLUMNS))
    figures = {}
    for name in asked.only:
        found = measured(SIZES[name], asked.steps)
        figures[name] = found
        exposed = [sum(of[part] for part in PARTS if part != "contexts") for of in found["steps"]]
        cells = [name, str(asked.steps)]
        for part in PARTS:
            cells.append(f"{median(of[part] for of in found['steps']):.2f}")
        cells += [f"{median(exposed):.2f}", f"{max(exposed):.2f}"]
        cells.append(f"{median(found['rank 0']):.2f}")
        print(table_row(cells), flush=True)
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
