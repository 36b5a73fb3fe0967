"""A pipeline planner's task, its working data, and its answer.

    PipelineOptions   schedule and limits
    PipelineTask      lengths, costs and options of one step
    Row               slices of one chunk
    Unit              its rows, first to last: one cut sequence with short ones packed along, or a
                      pack
    PipelineAnswer    units, actions of every rank, checkpointed layers

A planner may try many units before one becomes chunks, so they are plain lists while it works.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from hf_flexseq.base.records import Constants
from hf_flexseq.base.registry import PIPELINE_SCHEDULES, entry_of
from hf_flexseq.pipeline.planning.plan import Actions, Chunk, PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import ChunkCosts, ChunkShape, PipelineCost, shape_of
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.shard import Slice

Row = list[Slice]
Unit = list[Row]

Layers = tuple[tuple[int, ...], ...]  # [stage][chunk]; () for none


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions(Constants):
    """Options of planning a step. Raises ValueError for invalid values, alone or together."""

    what: ClassVar[str] = "the options of a pipeline's plan"

    schedule: str = "auto"
    """Name of the schedule, one of PIPELINE_SCHEDULES."""
    max_tokens: int | None = None
    """Maximum tokens of a chunk; None for no limit."""
    memory_limit: tuple[int, ...] | None = None
    """Bytes that each rank has for chunks in flight; None for no limit."""

    def __post_init__(self) -> None:
        entry_of("schedule", self.schedule, PIPELINE_SCHEDULES)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTask:
    """A step to plan. Raises ValueError for options that do not fit the stages."""

    lengths: tuple[int, ...]
    """Tokens per sequence; at least one sequence."""
    cost: PipelineCost
    """Nanoseconds and bytes of chunks on every stage."""
    options: PipelineOptions
    """Schedule and limits."""

    def __post_init__(self) -> None:
        if self.stages % self.stages_per_rank:
            raise ValueError(
                f"{self.stages} stages cannot be spread evenly, {self.stages_per_rank} on each "
                "rank"
            )
        limit = self.options.memory_limit
        if limit is not None and (len(limit) != self.ranks or min(limit) < 1):
            raise ValueError(
                f"memory_limit={limit}: give the positive bytes of each of {self.ranks} ranks"
            )

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank; several are interleaved."""
        return PIPELINE_SCHEDULES[self.options.schedule].stages_per_rank

    @property
    def stages(self) -> int:
        return len(self.cost.stages)

    @property
    def ranks(self) -> int:
        return self.stages // self.stages_per_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineAnswer:
    """A planner's decision."""

    units: list[Unit]

    actions: Actions
    """[rank] the rank's actions, in order."""
    checkpointed: Layers = ()
    """[stage][chunk] layers that are computed again in the backward; () for none."""
    makespan_ns: int | None = None
    """Nanoseconds of the step; None if the planner has seen neither to time nor to memory."""


def plan_of(task: PipelineTask, answer: PipelineAnswer) -> PipelinePlan:
    """Return an answer as a plan, without its seconds."""
    return PipelinePlan(
        lengths=task.lengths,
        ranks=task.ranks,
        stages=task.stages,
        chunks=chunks_of(answer.units),
        actions=answer.actions,
        checkpointed=answer.checkpointed,
        schedule=task.options.schedule,
        objective_s=0.0,
        planning_s=0.0,
    )


# ---- units


def unit_of(sequence: int, cuts: Sequence[int]) -> Unit:
    """Return the unit of one sequence, cut into tokens [cuts[i], cuts[i + 1])."""
    unit = []
    for start, stop in pairwise(cuts):
        unit.append([Slice(sequence, start, stop)])
    return unit


def chunks_of(units: Sequence[Unit]) -> tuple[Chunk, ...]:
    """Return the units' rows as the chunks of a plan."""
    chunks = []
    for number, unit in enumerate(units):
        for index, row in enumerate(unit):
            chunks.append(Chunk(unit=number, index=index, slices=tuple(row)))
    return tuple(chunks)


def shapes_of(units: Sequence[Unit], lengths: Sequence[int]) -> list[ChunkShape]:
    """Return the shape of every row, on which its cost depends, unit by unit."""
    return [shape_of(row, lengths) for unit in units for row in unit]


# ---- bytes


def unit_bytes(sizes: Sequence[int], held: Sequence[int], carried: Sequence[int]) -> list[int]:
    """Return the bytes that each unit holds on a stage when all of it is in flight.

    Units go backward one after the other, so every unit counts the same gradients of keys and
    values: as many bytes as the largest unit needs.

    sizes: how many chunks each unit has
    held, carried: of every chunk, as in `ChunkCosts`
    """
    gradients = max(carried, default=0)
    units = []
    first = 0  # the unit's first chunk
    for size in sizes:
        activations = sum(held[first : first + size])
        units.append(activations + carried[first] + gradients)
        first += size
    return units


def layers_to_fit(
    units: Sequence[Unit],
    full: ChunkCosts,
    bare: ChunkCosts,
    cost: PipelineCost,
    memory_limit: Sequence[int],
) -> list[list[int]]:
    """Return [stage][unit] the fewest checkpointed layers that make a unit fit alone.

    full, bare: costs without any and with all layers checkpointed
    memory_limit: bytes of each stage

    Raises PlanInfeasible, naming the sequence, where not even all layers make a unit fit alone.
    """
    sizes = [len(unit) for unit in units]
    layers = []
    for number, stage in enumerate(cost.stages):
        most = unit_bytes(sizes, full.held[number], full.carried[number])
        least = unit_bytes(sizes, bare.held[number], bare.carried[number])
        of_stage = []
        for unit, high, low in zip(units, most, least, strict=True):
            if low > memory_limit[number]:
                sequence = unit[0][0][0]
                raise PlanInfeasible(
                    f"sequence {sequence} and what is packed with it hold {low} bytes on stage "
                    f"{number} with all its layers checkpointed, the limit is "
                    f"{memory_limit[number]}. Give more memory, use more stages, or shorten the "
                    "sequence"
                )
            over = max(0, high - memory_limit[number])
            needed = 0
            if over:
                over += len(unit)  # the bytes of every chunk are rounded
                needed = min(stage.layers, -(-over * stage.layers // (high - low)))
            of_stage.append(needed)
        layers.append(of_stage)
    return layers
