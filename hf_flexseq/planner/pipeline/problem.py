"""What a pipeline planner is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.cost.stages import ChunkCosts, PipelineCost
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.pipeline import Action
from hf_flexseq.planner.pipeline.units import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A step to plan on one rank per stage.

    lengths: tokens of each sequence. chunks: of the longest sequence; None to be planned.
    most_tokens: of a chunk. room: bytes of each stage for what is in flight. None: no limit.
    """

    lengths: tuple[int, ...]
    cost: PipelineCost
    chunks: int | None
    most_tokens: int | None
    room: tuple[int, ...] | None

    @property
    def stages(self) -> int:
        return len(self.cost.stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was decided. actions: of every rank. checkpointed: [stage][place] layers, () for none.
    makespan_ns: the step's, where the planner knows it."""

    units: list[Unit]
    actions: tuple[tuple[Action, ...], ...]
    checkpointed: tuple[tuple[int, ...], ...] = ()
    makespan_ns: int | None = None


def unit_bytes(sizes: Sequence[int], held: Sequence[int], carried: Sequence[int]) -> list[int]:
    """What each unit holds on a stage when all of it is in flight, with the gradients of keys and
    values of whichever unit needs most for them, since one after the other goes backward."""
    found, place, gradients = [], 0, max(carried, default=0)
    for size in sizes:
        found.append(sum(held[place : place + size]) + carried[place] + gradients)
        place += size
    return found


def layers_to_fit(
    units: Sequence[Unit],
    full: ChunkCosts,
    bare: ChunkCosts,
    cost: PipelineCost,
    room: Sequence[int],
    beside: Sequence[int],
) -> list[list[int]]:
    """[stage][unit] the fewest checkpointed layers that leave `beside` bytes of the room free, or
    all that there are.

    full, bare: costs without any and with all layers checkpointed. Raises PlanInfeasible, naming
    the sequence, where not even all layers make a unit fit alone.
    """
    sizes, layers = [len(unit) for unit in units], []
    for number, stage in enumerate(cost.stages):
        most = unit_bytes(sizes, full.held[number], full.carried[number])
        least = unit_bytes(sizes, bare.held[number], bare.carried[number])
        needed = []
        for unit, high, low in zip(units, most, least, strict=True):
            if low > room[number]:
                raise PlanInfeasible(
                    f"sequence {unit[0][0][0]} and what is packed with it hold {low} bytes on "
                    f"stage {number} with all "
                    f"its layers checkpointed, the limit is {room[number]}. Give more memory, use "
                    f"more stages, or "
                    "shorten the sequence"
                )
            over = max(0, high - max(low, room[number] - beside[number]))
            rounded = over + len(unit)  # every chunk's bytes are rounded
            needed.append(
                min(stage.layers, -(-rounded * stage.layers // (high - low))) if over else 0
            )
        layers.append(needed)
    return layers
