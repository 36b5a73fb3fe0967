"""The longest sequence that all ranks hold together, under each choice for activations that
planners have (`cost/choices.py`), and the cost of each choice."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import MAX_RANKS, MAX_TOKENS
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.choices import choices_of, most_tokens, token_bytes, with_choice
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.planner.problem import cheapest


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One sequence on all ranks, under one choice for its activations."""

    choice: MemoryChoice
    """Which activations are kept, offloaded or computed again."""
    tokens_per_rank: int
    """Most tokens of a rank under this choice."""
    longest: int
    """Tokens of the longest sequence that all ranks hold under this choice."""
    length: int
    """Tokens of the sequence that the figures below are of."""
    seconds: float
    """Seconds of this sequence, alone in a micro-batch, by its cheapest strategy."""
    device_bytes: float
    """Bytes of a rank's device: model states, and activations of its share of the sequence."""
    host_bytes: float
    """Bytes of the host that a rank uses for its share of the sequence."""


def fit_of(cost: CostModel, topology: Topology, choice: MemoryChoice, length: int | None) -> Fit:
    """Return the figures of a sequence on all ranks under a choice.

    length: tokens of the sequence, which need not fit; None for the longest that fits, which must
    have a token.
    """
    assert cost.activations is not None, "only a cost model with activations has choices"
    world = topology.world_size
    tokens = most_tokens(cost, choice, world)
    longest = min(tokens * world, MAX_TOKENS)
    if length is None:
        length = longest
    on_rank = -(-length // world)
    states = cost.budget_bytes - cost.free_bytes(world)
    return Fit(
        choice=choice,
        tokens_per_rank=tokens,
        longest=longest,
        length=length,
        seconds=seconds_of(cost, topology, choice, length),
        device_bytes=states + on_rank * token_bytes(cost, choice),
        host_bytes=on_rank * cost.activations.host_token_bytes(choice),
    )


def seconds_of(cost: CostModel, topology: Topology, choice: MemoryChoice, length: int) -> float:
    """Return the seconds of a sequence of `length` tokens alone on all ranks, under a choice."""
    priced = with_choice(cost, choice)
    world = topology.world_size
    shape = (world, topology.spans_nodes(0, world))
    allowed = cost.allowed("auto", topology)
    each, _ = cheapest(priced, np.array([length]), shape, allowed, alone=True)
    nanoseconds = int(each[0]) + cost.micro_batch_ns
    if priced.experts is not None:
        nanoseconds += int(priced.experts.groups_ns([-(-length // world)] * world).max())
    return nanoseconds / 1e9


# ---- the ladder


def ladder(cost: CostModel, topology: Topology, length: int | None = None) -> tuple[Fit, ...]:
    """Return a fit for each choice that planners have, by rising tokens; () where the cost model
    has no choices, or none holds a token.

    length: tokens of the sequence whose seconds and bytes are counted; None for the longest one
    of each choice.
    """
    world = topology.world_size
    rungs = []
    for choice in choices_of(cost, world):
        if most_tokens(cost, choice, world):
            rungs.append(fit_of(cost, topology, choice, length))
    return tuple(rungs)


def fastest(cost: CostModel, topology: Topology, length: int) -> Fit | None:
    """Return the choice under which a sequence on all ranks takes the fewest seconds; None if none
    holds it."""
    holding = [rung for rung in ladder(cost, topology, length) if rung.longest >= length]
    return min(holding, key=lambda rung: rung.seconds, default=None)


def ranks_for(cost: CostModel, topology: Topology, length: int) -> int | None:
    """Return the fewest ranks, in whole nodes and whole expert groups, of which some choice lets
    all together hold a sequence; None if that takes more than `MAX_RANKS`."""
    unit = topology.ranks_per_node
    if cost.experts is not None:
        unit = math.lcm(unit, cost.experts.ranks)

    def holds(world: int) -> bool:
        return most_tokens(cost, choices_of(cost, world)[-1], world) * world >= length

    # more ranks never hold less: each has a smaller share of the states
    worlds = range(unit, MAX_RANKS + 1, unit)
    first = bisect_left(worlds, True, key=holds)
    return worlds[first] if first < len(worlds) else None


# ---- words


def next_levers(cost: CostModel, topology: Topology, rungs: Sequence[Fit]) -> list[str]:
    """Return a line for each rung of a ladder: the choice that allows a longer sequence, and the
    share of its seconds that this costs. After the last rung only more ranks or more memory
    help."""
    lines = []
    for rung, higher in pairwise(rungs):
        price = _price_of(cost, topology, rung, higher)
        lines.append(f"to go beyond {rung.longest:,} tokens: {higher.choice} costs {price}")
    for last in rungs[-1:]:
        assert cost.activations is not None, "a rung has a choice"
        on_device = cost.free_bytes(topology.world_size) // token_bytes(cost, last.choice)
        host_gib = cost.activations.host_bytes / 2**30
        host = ""
        if last.choice.uses_host and last.tokens_per_rank < on_device:
            host = f" or more of the host than {host_gib:.0f} GiB a rank,"
        lines.append(
            f"to go beyond {last.longest:,} tokens: more ranks,{host} or devices with more memory"
        )
    return lines


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
        price = _price_of(cost, topology, rungs[0], found)
        return f"Set planner='auto', which holds it with {found.choice} at {price}"
    last = rungs[-1]
    ranks = ranks_for(cost, topology, length)
    advice = "Use devices with more memory" if ranks is None else f"Use {ranks} ranks"
    return f"At most {last.longest:,} tokens fit, with {last.choice}. {advice}"


def _price_of(cost: CostModel, topology: Topology, rung: Fit, higher: Fit) -> str:
    """Return how many more seconds the longest sequence of a rung takes on a higher one."""
    ours = seconds_of(cost, topology, rung.choice, rung.longest)
    theirs = seconds_of(cost, topology, higher.choice, rung.longest)
    return f"{100 * (theirs / ours - 1):+.1f} % seconds"
