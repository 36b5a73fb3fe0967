"""Lines for people on what was decided: why the widest groups are as wide as they are, where
attention's seconds are, and which ranks meet that are not connected at the start.

Memory forces a degree where the longest sequence fits on no fewer ranks. Otherwise the planner
chose the degree by cost, and the line says what the longest sequence alone takes on fewer and on
more ranks.
"""

from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.kinds import doubled_pairs
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.blocks import ALL_RANGES, tree_ranges
from hf_flexseq.planner.bound import Bounds, shapes_of
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.registry import RINGS
from hf_flexseq.topology import Topology

LEAST_TIGHTER = 0.001  # part of the bound; less is not worth a line

# Planners that choose degrees by the cost model; the others do by a rule of their own.
BY_COST = ("auto", "flexsp", "batch-ada")

# Strategies in which any two ranks of a group exchange messages. In the others ranks of different
# nodes meet that have the same index on their nodes.
MEETING = ("ulysses", *RINGS)


def degree_note(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    planner: str,
    strategy: str,
    sp_degree: int | None,
    cap: int,
) -> str:
    """Return the reason for the degree of a plan's widest groups.

    micro_batches: at least one. lengths: tokens of every sequence, by sequence id. strategy: what
    groups of two ranks and more may use. sp_degree: the degree of every sequence, None for no
    such. cap: most tokens of a rank in a micro-batch.
    """
    if sp_degree is not None:
        return f"degree {sp_degree} for every sequence, as sp_degree asks"
    if planner == "batch-rebalance" or strategy == "local" or topology.world_size == 1:
        return "degree 1 for every sequence, since none may be split"
    # 1. the widest groups, and the longest sequence in them
    groups = [group for micro_batch in micro_batches for group in micro_batch.groups]
    degree = max(group.degree for group in groups)
    widest = [group for group in groups if group.degree == degree]
    sequence = _longest(widest, lengths)
    tokens = lengths[sequence]
    subject = f"the widest groups, {len(widest)} of degree {degree}, are"
    longest = f"sequence {sequence} of {tokens:,} tokens"
    room = f"at {cap:,} tokens a rank"
    # 2. the least degree that the sequence fits
    spans = _degrees(topology, planner)
    spans[degree] = topology.spans_nodes(widest[0].start, widest[0].stop)
    least = min(d for d in spans if -(-tokens // d) <= cap)
    if least == degree > 1:
        return f"{subject} forced by memory: {longest} fits on no fewer ranks {room}"
    # 3. its seconds on fewer and on more ranks
    seconds = []
    for other in sorted({least, degree // 2, degree, 2 * degree}):
        if other < least or other not in spans:
            continue
        shape = (other, spans[other])
        each, _ = cheapest(cost, np.array([tokens]), shape, strategy, alone=True)
        nanoseconds = int(each[0])
        if nanoseconds < NEVER:
            seconds.append(f"{nanoseconds / 1e9:.3g} s on {other}")
    chooser = "the cost model" if planner in BY_COST else f"planner={planner!r}"
    return (
        f"{subject} preferred by {chooser}: their longest, {longest}, would fit on "
        f"{_ranks(least)} {room}, and alone takes {', '.join(seconds)}"
    )


def kinds_notes(lengths: Sequence[int], cost: CostModel) -> tuple[str, ...]:
    """Return which kinds of layers take attention's seconds, and how many recurrent layers take,
    where there are several kinds.

    lengths: tokens of every sequence.
    """
    if not cost.kinds and not cost.recurrent:
        return ()
    s = np.array(lengths, dtype=np.float64)
    seconds = [float(kind.attention_s * doubled_pairs(kind.reach, s).sum()) for kind in cost.kinds]
    full_s = float(cost.attention_s * (s * s).sum())
    total_s = full_s + sum(seconds)
    texts = []
    if cost.kinds:
        parts = []
        for kind, kind_s in zip(cost.kinds, seconds, strict=True):
            parts.append(f"{kind.reach} {_percent(kind_s, total_s)}")
        if cost.full_share:
            parts.append(f"full {_percent(full_s, total_s)}")
        texts.append(f"of attention's {total_s:.3g} device-seconds {', '.join(parts)}")
    if cost.recurrent:
        scan_s = float(cost.scan_s(s, 1, "local").sum())
        linear_s = float(cost.linear_s * s.sum())
        texts.append(
            f"recurrent layers take {scan_s:.3g} device-seconds on ranks alone, attention "
            f"{total_s:.3g}, linear layers {linear_s:.3g}"
        )
    return (f"{cost.layers_text()}; {'; '.join(texts)}",)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:.3g} %"


def bound_notes(bounds: Bounds, objective_ns: int) -> tuple[str, ...]:
    """Return how near a plan is to a bound that is tighter than the plan's own, if there is one.

    objective_ns: nanoseconds of the plan.
    """
    if bounds.tighter < (1 + LEAST_TIGHTER) * bounds.plain:
        return ()
    gap = objective_ns / bounds.tighter - 1
    return (
        f"no plan takes less than {bounds.tighter / 1e9:.4g} s, since long sequences have to end "
        f"with their micro-batch: this one is {100 * gap:.1f} % above that",
    )


def contact_notes(
    micro_batches: Sequence[MicroBatch], topology: Topology, cost: CostModel
) -> tuple[str, ...]:
    """Return what a plan takes once in a run, to connect ranks; nothing where that is free.

    Ranks of a node, and those with the same index on their nodes, are connected at the start; a
    group across nodes may have others meet. No plan is chosen by it: plans do not depend on what
    has been run before.
    """
    width = topology.ranks_per_node
    if not cost.contact_s or topology.nodes == 1 or width == 1:
        return ()
    # 1. the nodes [first, last] that each node meets
    first = list(range(topology.nodes))
    last = list(range(topology.nodes))
    for micro_batch in micro_batches:
        for group in micro_batch.groups:
            if group.strategy not in MEETING or not topology.spans_nodes(group.start, group.stop):
                continue
            start, stop = topology.node_of(group.start), topology.node_of(group.stop - 1)
            for node in range(start, stop + 1):
                first[node] = min(first[node], start)
                last[node] = max(last[node], stop)
    # 2. the ranks there that a rank is not connected to
    met = [(b - a) * (width - 1) for a, b in zip(first, last, strict=True)]
    if not any(met):
        return ()
    pairs = sum(met) * width // 2
    return (
        f"once in a run, {pairs:,} pairs of ranks of different nodes connect at their first "
        f"message, up to {max(met):,} of one rank: at {cost.contact_s:.3g} s each up to "
        f"{max(met) * cost.contact_s:.3g} s, not in the objective",
    )


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def _longest(groups: Sequence[Group], lengths: Sequence[int]) -> int:
    """Return the id of the longest sequence of some groups; of equal ones the first."""
    ids = [sequence for group in groups for sequence in group.sequences]
    return min(ids, key=lambda sequence: (-lengths[sequence], sequence))


def _degrees(topology: Topology, planner: str) -> dict[int, bool]:
    """Return the degrees that `planner` chooses from, and whether each spans nodes.

    `blocks.py` says which ranges of ranks they are.
    """
    if planner == "auto" and topology.world_size <= ALL_RANGES:
        return dict(shapes_of(topology))
    degrees = {}
    for start, stop in tree_ranges(topology):
        degrees[stop - start] = topology.spans_nodes(start, stop)
    return degrees
