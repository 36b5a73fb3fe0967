"""The note under a plan: why its widest groups are as wide as they are.

Memory forces a degree if the longest sequence fits on no fewer ranks. Otherwise the note compares
the seconds of that sequence alone on this degree, on the narrowest possible one, on half and on
twice as many ranks.

Other notes say how much of the step experts on several ranks take, and which choices for
activations were made.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hf_flexseq.cost import experts_ns
from hf_flexseq.cost.lengths import shares_of
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.planner.blocks import shapes_of_ranges
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.planner.task import PlanTask


def degree_note(micro_batches: Sequence[MicroBatch], task: PlanTask) -> str:
    """Return the reason for the degree of a plan's widest groups."""
    lengths, topology, cap = task.lengths, task.topology, task.cap
    if task.sp_degree is not None:
        return f"degree {task.sp_degree} for every sequence, set by sp_degree"
    # 1. the widest groups, and the longest sequence in them
    groups = [group for micro_batch in micro_batches for group in micro_batch.groups]
    degree = max(group.degree for group in groups)
    if degree == 1:
        return "degree 1 for every sequence"
    widest = [group for group in groups if group.degree == degree]
    sequence = _longest(widest, lengths)
    tokens = lengths[sequence]
    # 2. the least degree that the sequence fits
    spans = dict(shapes_of_ranges(topology))
    spans[degree] = topology.spans_nodes(widest[0].start, widest[0].stop)
    least = min(d for d in spans if -(-tokens // d) <= cap)
    subject = f"degree {degree} for sequence {sequence} ({tokens:,} tokens"
    if least == degree:
        return f"{subject}): the fewest ranks with enough memory"
    # 3. its seconds on this degree, then on others
    seconds = []
    for other in (degree, *sorted({least, degree // 2, 2 * degree} - {degree})):
        if other < least or other not in spans:
            continue
        shape = (other, spans[other])
        each, _ = cheapest(
            task.cost,
            np.array([tokens]),
            shape,
            task.strategy,
            alone=True,
            shares=shares_of(lengths, [sequence]),
        )
        nanoseconds = int(each[0])
        if nanoseconds < NEVER:
            where = "" if other == degree else f" on {other}"
            seconds.append(f"{nanoseconds / 1e9:.3g} s{where}")
    return f"{subject}, fits on {least}): {', '.join(seconds)}"


def experts_note(micro_batches: Sequence[MicroBatch], task: PlanTask, objective_ns: int) -> str:
    """Return the share of the ranks' time that experts on several ranks take. objective_ns: of the
    step."""
    assert task.cost.experts is not None, "only a cost model with experts prices them"
    spent = 0.0  # nanoseconds of a rank, on the mean
    for micro_batch in micro_batches:
        spent += experts_ns(task.cost, micro_batch, task.lengths, task.topology).mean()
    text = task.cost.experts.text(task.topology.world_size)
    return f"{text}: {100 * spent / objective_ns:.1f} % of the ranks' time"


def choice_note(
    micro_batches: Sequence[MicroBatch],
    lengths: Sequence[int],
    objective_ns: int,
    as_set_ns: float,
) -> str:
    """Return the choices that a plan made for activations, with the reason. as_set_ns: lower bound
    of the step as set for the run; infinite where a sequence fits nowhere so."""
    chosen = Counter(str(one.memory or "as set for the run") for one in micro_batches)
    parts = [f"{count} of {len(micro_batches)} {name}" for name, count in chosen.items()]
    if math.isinf(as_set_ns):
        longest = max(range(len(lengths)), key=lambda i: (lengths[i], -i))
        why = f"sequence {longest} ({lengths[longest]:,} tokens) fits nowhere otherwise"
    else:
        gain = 100 * (1 - objective_ns / as_set_ns)
        why = f"at least {gain:.0f} % faster than as set for the run"
    return f"activations: micro-batches {'; '.join(parts)}: {why}"


def _longest(groups: Sequence[Group], lengths: Sequence[int]) -> int:
    """Return the id of the longest sequence of some groups; of equal ones the first."""
    ids = [sequence for group in groups for sequence in group.sequences]
    return min(ids, key=lambda sequence: (-lengths[sequence], sequence))
