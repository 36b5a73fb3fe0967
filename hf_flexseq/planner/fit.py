"""What fits: the longest sequence that all ranks hold together, by what is chosen for its
activations, and what each choice costs.

Choices are those that a planner compares (`cost/choices.py`). They make a short ladder: each rung
may use one lever more than the rung before it, and is the choice that holds the most tokens with
these. Levers come in the order of `LEVERS`, roughly the cheap ones first; a rung that holds no
more than the one before it is left out.

    longest sequence    tokens of a rank x ranks
    seconds             of this sequence alone, on all ranks, by its cheapest strategy, in one
                        micro-batch
    bytes               model states and activations on the device, activations on the host
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import MAX_RANKS, MAX_TOKENS
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.choices import choices_of, most_tokens, token_bytes, with_choice
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.planner.problem import cheapest

# The fields of a choice that save memory, in the order in which a ladder may use them.
LEVERS = (
    "recomputed_layers",
    "inputs_on_host",
    "outputs_on_host",
    "mlp_tiles",
    "outputs_recomputed",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One sequence on all ranks, under one choice for its activations."""

    choice: MemoryChoice
    """What is done with activations."""
    tokens_per_rank: int
    """Most tokens of a rank under this choice."""
    longest: int
    """Tokens of the longest sequence that all ranks hold under this choice."""
    length: int
    """Tokens of the sequence that the figures below are of."""
    seconds: float
    """Seconds of this sequence, forward and backward."""
    device_bytes: float
    """Bytes of a rank's device: model states, and activations of its share of the sequence."""
    host_bytes: float
    """Bytes of the host that a rank uses for its share of the sequence."""

    def to_record(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return {**asdict(self), "choice": self.choice.to_record()}


def fit_of(
    cost: CostModel,
    topology: Topology,
    choice: MemoryChoice,
    length: int | None = None,
    *,
    strategy: str = "auto",
) -> Fit:
    """Return the figures of a sequence on all ranks under a choice.

    length: tokens of the sequence, which need not fit; None for the longest that does, of which
    there has to be one. strategy: what the ranks may use, as in `CostModel.strategies`.
    """
    world = topology.world_size
    tokens = most_tokens(cost, choice, world)
    longest = min(tokens * world, MAX_TOKENS)
    if length is None:
        length = longest
    on_rank = -(-length // world)
    activations = cost.activations
    assert activations is not None, "only a cost model with activations has choices"
    return Fit(
        choice=choice,
        tokens_per_rank=tokens,
        longest=longest,
        length=length,
        seconds=seconds_of(cost, topology, choice, length, strategy=strategy),
        device_bytes=cost.budget_bytes
        - cost.free_bytes(world)
        + on_rank * token_bytes(cost, choice),
        host_bytes=on_rank * activations.host_token_bytes(choice),
    )


def seconds_of(
    cost: CostModel,
    topology: Topology,
    choice: MemoryChoice,
    length: int,
    *,
    strategy: str = "auto",
) -> float:
    """Return the seconds of a sequence of `length` tokens alone on all ranks, under a choice."""
    priced = with_choice(cost, choice)
    world = topology.world_size
    shape = (world, topology.spans_nodes(0, world))
    allowed = cost.allowed(strategy, topology)
    each, _ = cheapest(priced, np.array([length]), shape, allowed, alone=True)
    nanoseconds = int(each[0]) + cost.micro_batch_ns
    if priced.experts is not None:
        nanoseconds += int(priced.experts.groups_ns([-(-length // world)] * world).max())
    return nanoseconds / 1e9


# ---- the ladder


def ladder(
    cost: CostModel, topology: Topology, length: int | None = None, *, strategy: str = "auto"
) -> tuple[Fit, ...]:
    """Return what fits under each choice of a short ladder, by rising tokens; () where the cost
    model has no choices, or none holds a token.

    length: tokens of the sequence whose seconds and bytes are counted; None for the longest one
    of each choice.
    """
    if cost.activations is None:
        return ()
    world = topology.world_size
    as_set = cost.activations.as_set
    rungs: list[Fit] = []
    for count in range(len(LEVERS) + 1):
        able = []
        for choice in choices_of(cost):
            if levers_of(choice, as_set) <= set(LEVERS[:count]):
                able.append(choice)
        most = max(most_tokens(cost, choice, world) for choice in able)
        if most <= (rungs[-1].tokens_per_rank if rungs else 0):
            continue
        holding = [choice for choice in able if most_tokens(cost, choice, world) == most]
        rungs.append(_fastest(cost, topology, holding, length, strategy))
    return tuple(rungs)


def levers_of(choice: MemoryChoice, as_set: MemoryChoice) -> set[str]:
    """Return the fields in which a choice differs from the one of the run."""
    return {name for name in LEVERS if getattr(choice, name) != getattr(as_set, name)}


def fastest(
    cost: CostModel, topology: Topology, length: int, *, strategy: str = "auto"
) -> Fit | None:
    """Return the choice under which a sequence on all ranks takes the fewest seconds; None if none
    holds it."""
    world = topology.world_size
    on_rank = -(-length // world)
    holding = []
    for choice in choices_of(cost):
        if most_tokens(cost, choice, world) >= on_rank:
            holding.append(choice)
    if not holding:
        return None
    return _fastest(cost, topology, holding, length, strategy)


def _fastest(
    cost: CostModel,
    topology: Topology,
    choices: Sequence[MemoryChoice],
    length: int | None,
    strategy: str,
) -> Fit:
    """Return the figures of the fastest choice; of equal ones that with the least on the host."""
    fits = [fit_of(cost, topology, choice, length, strategy=strategy) for choice in choices]
    return min(fits, key=lambda fit: (fit.seconds, fit.host_bytes, fit.device_bytes))


# ---- words


def next_levers(
    cost: CostModel, topology: Topology, rungs: Sequence[Fit], *, strategy: str = "auto"
) -> list[str]:
    """Return a line for each rung of a ladder: what takes a longest sequence further, and the
    share of its seconds that this costs. Behind the last rung are more ranks."""
    lines = []
    for rung, higher in pairwise(rungs):
        ours = seconds_of(cost, topology, rung.choice, rung.longest, strategy=strategy)
        theirs = seconds_of(cost, topology, higher.choice, rung.longest, strategy=strategy)
        price = 100 * (theirs / ours - 1)
        lines.append(
            f"to go beyond {rung.longest:,} tokens: {higher.choice} costs {price:+.1f} % seconds"
        )
    if rungs:
        lines.append(_beyond_the_last(cost, topology, rungs[-1]))
    return lines


def _beyond_the_last(cost: CostModel, topology: Topology, last: Fit) -> str:
    """Return what a sequence needs that no choice holds."""
    assert cost.activations is not None, "a rung has a choice"
    on_host = cost.activations.host_token_bytes(last.choice)
    device_tokens = cost.free_bytes(topology.world_size) // token_bytes(cost, last.choice)
    host = ""
    if on_host and device_tokens > last.tokens_per_rank:
        host = f" or more of the host than {cost.activations.host_bytes / 2**30:.0f} GiB a rank,"
    return f"to go beyond {last.longest:,} tokens: more ranks,{host} or devices with more memory"


def where_it_fits(cost: CostModel, topology: Topology, length: int) -> str:
    """Return what to do about a sequence that does not fit: the choice that holds it, for planners
    that make none, or else the longest that fits, and the ranks that this one needs. "" where the
    cost model has no choices, or none holds a token.

    `make_plan` has it in its refusal.
    """
    rungs = ladder(cost, topology)
    if not rungs:
        return ""
    found = fastest(cost, topology, length)
    if found is not None:
        first = rungs[0]
        ours = seconds_of(cost, topology, first.choice, first.longest)
        theirs = seconds_of(cost, topology, found.choice, first.longest)
        percent = f"{100 * (theirs / ours - 1):+.1f} %"
        return f"Set planner='auto', which holds it with {found.choice} at {percent} seconds"
    last = rungs[-1]
    ranks = ranks_for(cost, topology, length)
    advice = "Use devices with more memory" if ranks is None else f"Use {ranks} ranks"
    return f"At most {last.longest:,} tokens fit, with {last.choice}. {advice}"


def ranks_for(cost: CostModel, topology: Topology, length: int) -> int | None:
    """Return the fewest ranks, in whole nodes and whole expert groups, of which some choice lets
    all together hold a sequence; None if that takes more than `MAX_RANKS`."""
    unit = topology.ranks_per_node
    if cost.experts is not None:
        unit = math.lcm(unit, cost.experts.ranks)
    most_units = MAX_RANKS // unit

    def holds(units: int) -> bool:
        world = units * unit
        most = max(most_tokens(cost, choice, world) for choice in choices_of(cost))
        return most * world >= length

    if not most_units or not holds(most_units):
        return None
    # more ranks never hold less: each has a smaller share of the states
    low, high = 0, most_units  # the former does not hold it, the latter does
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high * unit
