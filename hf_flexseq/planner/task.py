"""The question to a planner of groups: one optimizer step's sequences, ranks, costs and limits."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.plan.options import PlanOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTask:
    """One step to plan. Its longest sequence fits on the ranks that may share it."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, by id; at least one sequence."""
    topology: Topology
    """The ranks and their nodes."""
    cost: CostModel
    """Nanoseconds and bytes of groups."""
    cap: int
    """Most tokens of a rank in a micro-batch."""
    strategy: str = "auto"
    """Strategy that groups of two ranks and more may use; "auto" for any."""
    sync: str = "lockstep"
    """"lockstep" if all ranks run every micro-batch together, "free" if they meet in groups."""
    sp_degree: int | None = None
    """Ranks of every group, for the planner `static`."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        topology: Topology,
        cost: CostModel,
        options: PlanOptions,
        *,
        cap: int,
    ) -> "PlanTask":
        """Return the task of a step with a run's options. cap: most tokens of a rank."""
        return cls(
            lengths=tuple(lengths),
            topology=topology,
            cost=cost,
            cap=cap,
            strategy=cost.allowed(options.strategy, topology),
            sync=options.sync,
            sp_degree=options.sp_degree,
        )


def checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as Python ints. Raises ValueError for a sequence without tokens."""
    tokens = tuple(map(operator.index, lengths))
    shortest = min(tokens, default=1)
    if shortest < 1:
        raise ValueError(
            f"sequence {tokens.index(shortest)} has length {shortest}: every sequence needs at "
            "least one token"
        )
    return tokens


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the ids of sequences by falling length, equal ones by id."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
