"""Which choice for activations (`plan/memory.py`) the micro-batches of a step are planned with.

What the user has set for the run is the fastest choice for what fits. Another one takes longer for
each token, and lets a rank hold more of them: a long sequence then needs fewer ranks, which takes
it fewer transfers, and the step fewer micro-batches. So a choice is taken where that promises to
gain more than it costs.

1. Promise. `least area` is a sequence's cheapest device-seconds on any ranks that can hold it. For
   every choice the step is promised

       (sum of least areas under its bound on tokens, at its price) / ranks
           + fewest micro-batches x constant

   once for a step that takes it in all micro-batches, and once for one that takes it for the
   sequences that gain by it, beside as many short ones as their ranks' neighbours have time for.
2. Plan. The best promise is planned, if it is better by `LEAST_GAIN` than what is set for the run;
   sequences with a choice and sequences without are planned apart, by the same planner. Of ways
   with equal promises those of most and of least room are both planned.
3. Relax. Every micro-batch takes the cheapest choice that holds its fullest rank.
4. Compare. A step that is slower than the bound on steps without a choice is planned without one,
   too, and the faster one is taken.

The promise is computed from one table of the step's sequences, so that a step which needs no
choice is planned as if there were none, and hardly later.

Rejected: a choice for each rank. Ranks of a group must agree on what they compute again, and the
others wait for the slowest anyway. Rejected: one search over micro-batches of unequal bounds. It
is slower by the number of choices, and two searches on parts of a step take as long as one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, FloatArray, step_ns
from hf_flexseq.cost.choices import choices_of, most_tokens, price_of, token_bytes, with_choice
from hf_flexseq.cost.lengths import Lengths, shares_of
from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.blocks import shapes_of_ranges
from hf_flexseq.planner.bound import step_bound_ns
from hf_flexseq.planner.problem import NEVER, cheapest
from hf_flexseq.planner.task import PlanTask, longest_first

# Share of a step's seconds that a choice must promise to gain.
LEAST_GAIN = 0.03

# Share of all memory that long sequences can fill together: with less left, groups come to stand
# where memory allows, not where time does.
FILLED = 0.95

# Ways whose promises differ by less are as good: the one with most room makes the best plan.
AS_GOOD = 0.001

IntArray = NDArray[np.integer]

Planned = Callable[[PlanTask], tuple[MicroBatch, ...]]


class Bound(NamedTuple):
    """A choice with the tokens that a rank can hold under it."""

    choice: MemoryChoice
    tokens: int
    linear: float
    """Seconds of linear layers, relative to those under the user's own choice."""
    attention: float
    """The same for attention and its transfers."""


def bounds_of(cost: CostModel, world_size: int, held_tokens: int = 0) -> tuple[Bound, ...]:
    """Return the choices that hold more tokens than the user's own, cheap ones first; () without
    any. held_tokens: whose memory is taken, counted under the user's own choice."""
    choices = choices_of(cost)
    if not choices:
        return ()
    as_set, *others = choices
    least = most_tokens(cost, as_set, world_size) - held_tokens
    bounds = []
    for choice in others:
        held = -(-held_tokens * cost.token_bytes // token_bytes(cost, choice))
        tokens = most_tokens(cost, choice, world_size) - int(held)
        if tokens > least:
            linear, attention = price_of(cost, choice)
            bounds.append(Bound(choice, tokens, linear, attention))
    return tuple(bounds)


def own_tokens(cost: CostModel, world_size: int, bounds: Sequence[Bound]) -> int:
    """Return the most tokens of a rank under the user's own choice; 0 where only others hold one.

    bounds: from `bounds_of`. Raises ValueError where no choice holds a token.
    """
    if cost.activations is not None and any(bound.tokens >= 1 for bound in bounds):
        return most_tokens(cost, cost.activations.as_set, world_size)
    return cost.max_tokens_per_rank(world_size)


def may_choose(cost: CostModel, options: PlanOptions) -> bool:
    """Return True if a planner may choose for micro-batches: a bound that the user sets is kept,
    and so is what goes with it."""
    takes = PLANNERS[options.planner].takes_choices
    return takes and cost.activations is not None and options.max_tokens_per_rank is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to hold a step: a choice, and the sequences that are planned with it."""

    bound: Bound
    chosen: tuple[int, ...]
    """Ids of the sequences in micro-batches of the choice."""
    others: tuple[int, ...]
    """Ids of all others, in micro-batches of the user's own choice."""
    promised_ns: float
    """Nanoseconds that the step is promised."""
    as_set_ns: float
    """Those without the choice; infinite where a sequence fits nowhere then."""


def planned_by_choice(
    task: PlanTask, bounds: Sequence[Bound], planned: Planned
) -> tuple[tuple[MicroBatch, ...], Way | None]:
    """Return a step's micro-batches, each with its choice, and the way that was taken; None for
    the user's own choice everywhere.

    bounds: from `bounds_of`. planned: plans a task, at least one sequence, for one bound.
    """

    def step_of(micro_batches: tuple[MicroBatch, ...]) -> int:
        return step_ns(task.cost, micro_batches, task.lengths, task.topology, sync=task.sync)

    tried = []
    for index, way in enumerate(best_ways(task, bounds)):
        micro_batches = _planned_so(task, way, bounds, planned)
        tried.append((step_of(micro_batches), index, micro_batches, way))
    if not tried:
        return planned(task), None
    nanoseconds, _, micro_batches, way = min(tried, key=lambda one: one[:2])
    if math.isfinite(way.as_set_ns) and nanoseconds > step_bound_ns(task):
        own = planned(task)
        if step_of(own) <= nanoseconds:
            return own, None
    chosen = any(one.memory is not None for one in micro_batches)
    return micro_batches, way if chosen else None


def _planned_so(
    task: PlanTask, way: Way, bounds: Sequence[Bound], planned: Planned
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a step that is planned one way."""
    made = []
    price = with_choice(task.cost, way.bound.choice)
    for ids, cost, cap in (
        (way.chosen, price, way.bound.tokens),
        (way.others, task.cost, task.cap),
    ):
        if ids:
            part = replace(task, lengths=_taken(task.lengths, ids), cost=cost, cap=cap)
            made += [_with_ids(micro_batch, ids) for micro_batch in planned(part)]
    return tuple(_relaxed(one, task, bounds) for one in made)


def _taken(lengths: Sequence[int], ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of some sequences, with their shares of pairs."""
    tokens = [lengths[i] for i in ids]
    if isinstance(lengths, Lengths):
        return Lengths(tokens, [lengths.shares[i] for i in ids])
    return tuple(tokens)


def _with_ids(micro_batch: MicroBatch, ids: Sequence[int]) -> MicroBatch:
    """Return a micro-batch over sequences 0, 1, ... as one over these ids."""
    groups = []
    for group in micro_batch.groups:
        groups.append(replace(group, sequences=tuple(ids[one] for one in group.sequences)))
    return replace(micro_batch, groups=tuple(groups))


def _relaxed(micro_batch: MicroBatch, task: PlanTask, bounds: Sequence[Bound]) -> MicroBatch:
    """Return a micro-batch with the cheapest choice that holds its fullest rank."""
    world = task.topology.world_size
    fullest = max(micro_batch.tokens_per_rank(task.lengths, world))
    if fullest <= task.cap:
        return replace(micro_batch, memory=None)
    linear_ns, attention_ns = _work_ns(micro_batch, task)
    fitting = [bound for bound in bounds if bound.tokens >= fullest]
    best = min(
        fitting,
        key=lambda bound: bound.linear * linear_ns + bound.attention * attention_ns,
    )
    return replace(micro_batch, memory=best.choice)


def _work_ns(micro_batch: MicroBatch, task: PlanTask) -> tuple[float, float]:
    """Return the device-nanoseconds of a micro-batch: linear layers with experts, attention by its
    pairs."""
    linear_ns = 0.0
    attention_ns = 0.0
    for group in micro_batch.groups:
        for sequence in group.sequences:
            tokens = task.lengths[sequence]
            linear_ns += task.cost.token_s * tokens * 1e9
            attention_ns += task.cost.attention_s * float(tokens) * tokens * 1e9
    return linear_ns, attention_ns


# ---- promises


def best_ways(task: PlanTask, bounds: Sequence[Bound]) -> tuple[Way, ...]:
    """Return the ways that promise the shortest step: of equal ones that with most room and that
    with least, which differ in their micro-batches; () for the user's own choice."""
    if not bounds:
        return ()
    areas = _Areas(task, max(bound.tokens for bound in bounds))
    own_ns = areas.own_ns()
    if own_ns * (1 - LEAST_GAIN) <= areas.least_ns():
        return ()
    ways = [way for bound in bounds for way in areas.ways(bound, own_ns)]
    if not ways:
        return ()
    least_ns = min(way.promised_ns for way in ways)
    if least_ns > own_ns * (1 - LEAST_GAIN):
        return ()
    equal = [way for way in ways if way.promised_ns <= least_ns * (1 + AS_GOOD)]
    equal.sort(key=lambda way: (way.bound.tokens, -way.promised_ns))
    first, last = equal[-1], equal[0]
    return (first,) if first is last else (first, last)


def promise_ns(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    options: PlanOptions,
    *,
    held_tokens: int = 0,
) -> float:
    """Return the nanoseconds that a step is promised with the best choice, if planners may make
    one; infinite where a sequence fits nowhere. Arguments: as of `make_plan`, with memory as the
    only bound on the tokens of a rank."""
    world = topology.world_size
    bounds = bounds_of(cost, world, held_tokens) if may_choose(cost, options) else ()
    try:
        cap = own_tokens(cost, world, bounds) - held_tokens
    except ValueError:  # model states leave no room
        return math.inf
    most = max((cap, *(bound.tokens for bound in bounds)))
    if most < 1:
        return math.inf
    task = PlanTask(
        lengths=tuple(lengths),
        topology=topology,
        cost=cost,
        cap=max(0, cap),
        strategy=cost.allowed(options.strategy, topology),
        sync=options.sync,
        sp_degree=options.sp_degree,
    )
    areas = _Areas(task, most)
    own_ns = areas.own_ns()
    ways = [way.promised_ns for bound in bounds for way in areas.ways(bound, own_ns)]
    return float(min([own_ns, *ways]))


class _Areas:
    """Least device-nanoseconds of a step's sequences under bounds on the tokens of a rank."""

    def __init__(self, task: PlanTask, most_tokens: int) -> None:
        """most_tokens: of a rank under any choice."""
        self._task = task
        self._ids = longest_first(task.lengths)
        tokens = np.array([task.lengths[i] for i in self._ids], dtype=np.int64)
        self._tokens = tokens  # [K], longest first
        self._linear = task.cost.token_s * 1e9 * tokens.astype(np.float64)  # [K]
        experts = self._linear - task.cost.linear_s * 1e9 * tokens  # [K]
        shares = shares_of(task.lengths, self._ids)
        areas = []
        needs = []
        degrees = []
        for shape in sorted(shapes_of_ranges(task.topology)):
            degree, _ = shape
            if task.sp_degree not in (None, degree):
                continue
            times, _ = cheapest(task.cost, tokens, shape, task.strategy, alone=True, shares=shares)
            possible = times < NEVER
            areas.append(np.where(possible, times.astype(np.float64) * degree + experts, np.inf))
            needs.append(-(-tokens // degree))
            degrees.append(degree)
        self._areas = np.stack(areas, axis=1)  # [K, shapes]
        self._needs = np.stack(needs, axis=1)  # [K, shapes]
        self._degrees = np.array(degrees)  # [shapes]
        self._own = self._under(task.cap)  # [K]
        self._all = np.arange(len(self._ids))  # [K]
        self._most_tokens = most_tokens

    def _under(self, cap: int) -> FloatArray:
        """Return the least areas on ranks of so many tokens, [K]; infinite where nothing fits."""
        least: FloatArray = np.where(self._needs <= cap, self._areas, np.inf).min(axis=1)
        return least

    def _step_ns(self, areas: FloatArray, rows: IntArray, cap: int) -> float:
        """Return the nanoseconds of a step of some rows, which have areas [rows]."""
        if not len(rows):
            return 0.0
        batches = self._fewest(areas, rows, cap)
        busy_ns = areas.sum() / self._task.topology.world_size
        return float(busy_ns + batches * self._task.cost.micro_batch_ns)

    def _fewest(self, areas: FloatArray, rows: IntArray, cap: int) -> float:
        """Return the fewest micro-batches that hold some rows well, which have areas [rows].

        Ranks that work equally long hold unequal numbers of tokens: short sequences have most
        tokens to a second. A rank that has such alone must have room for them.
        """
        total = areas.sum()
        if not np.isfinite(total):
            return 1.0
        world = self._task.topology.world_size
        tokens = self._tokens[rows]
        below = np.cumsum(areas[::-1])  # [rows] of the shortest ones
        short = int(np.searchsorted(below, total / 2)) + 1  # those of half of the area
        densest = tokens[-short:].sum() / below[short - 1]  # tokens to a device-nanosecond
        fullest = max(tokens.sum() / (FILLED * world), densest * total / world)
        return float(math.ceil(fullest / cap))

    def own_ns(self) -> float:
        """Return what the user's own choice promises."""
        return self._step_ns(self._own, self._all, max(1, self._task.cap))

    def least_ns(self) -> float:
        """Return what a choice without a price would promise."""
        return self._step_ns(self._under(self._most_tokens), self._all, self._most_tokens)

    def _priced(self, bound: Bound) -> FloatArray:
        """Return the least areas under a choice, at its price, [K]."""
        area = self._under(bound.tokens)
        rest = np.where(np.isfinite(area), area, 0.0) - self._linear
        return area + (bound.linear - 1) * self._linear + (bound.attention - 1) * rest

    def ways(self, bound: Bound, own_ns: float) -> list[Way]:
        """Return the ways to take a choice: in all micro-batches, or in some."""
        area = self._priced(bound)  # [K]
        if not np.isfinite(area).all():
            return []
        everywhere = Way(
            bound=bound,
            chosen=tuple(range(len(self._ids))),
            others=(),
            promised_ns=self._step_ns(area, self._all, bound.tokens),
            as_set_ns=own_ns,
        )
        gains = area < self._own  # [K]
        if gains.all() or not gains.any():
            return [everywhere]
        return [everywhere, self._in_some(bound, area, gains, own_ns)]

    def _in_some(
        self, bound: Bound, area: FloatArray, gains: NDArray[np.bool_], own_ns: float
    ) -> Way:
        """Return the way with a choice for sequences that gain by it, [K], and such that fill
        their micro-batches."""
        world = self._task.topology.world_size
        # 1. what the sequences that gain take, and what their micro-batches have left
        long_area = area[gains].sum()
        long_tokens = int(self._tokens[gains].sum())
        batches = math.ceil(long_tokens / (FILLED * bound.tokens * world))
        slowest_ns = self._fastest_ns(bound, int(np.flatnonzero(gains)[0]))
        room_ns = max(0.0, batches * slowest_ns * world - long_area)
        room_tokens = FILLED * batches * bound.tokens * world - long_tokens
        # 2. the others fill that room evenly, from the longest to the shortest
        short = np.flatnonzero(~gains)
        short_area = area[short].sum()
        short_tokens = int(self._tokens[short].sum())
        share = min(1.0, room_ns / short_area, room_tokens / short_tokens)
        taken = np.floor(np.arange(1, len(short) + 1) * share) > np.floor(
            np.arange(len(short)) * share
        )
        beside, rest = short[taken], short[~taken]
        chosen_ns = (
            max(batches * slowest_ns, (long_area + area[beside].sum()) / world)
            + batches * self._task.cost.micro_batch_ns
        )
        rest_ns = self._step_ns(self._own[rest], rest, max(1, self._task.cap))
        chosen = [*np.flatnonzero(gains).tolist(), *beside.tolist()]
        return Way(
            bound=bound,
            chosen=tuple(sorted(self._ids[row] for row in chosen)),
            others=tuple(sorted(self._ids[row] for row in rest.tolist())),
            promised_ns=chosen_ns + rest_ns,
            as_set_ns=own_ns,
        )

    def _fastest_ns(self, bound: Bound, row: int) -> float:
        """Return the nanoseconds of a sequence where its device-nanoseconds are least."""
        areas = np.where(self._needs[row] <= bound.tokens, self._areas[row], np.inf)
        best = int(areas.argmin())
        return float(self._priced(bound)[row]) / int(self._degrees[best])


# ---- words


def choice_note(micro_batches: Sequence[MicroBatch], way: Way, lengths: Sequence[int]) -> str:
    """Return what a plan chose for activations, and why."""
    chosen: dict[str, int] = {}
    for micro_batch in micro_batches:
        name = "as set for the run" if micro_batch.memory is None else str(micro_batch.memory)
        chosen[name] = chosen.get(name, 0) + 1
    parts = [f"{count} of {len(micro_batches)} {name}" for name, count in chosen.items()]
    if np.isinf(way.as_set_ns):
        longest = max(range(len(lengths)), key=lambda i: (lengths[i], -i))
        why = f"sequence {longest} ({lengths[longest]:,} tokens) fits nowhere otherwise"
    else:
        gain = 100 * (1 - way.promised_ns / way.as_set_ns)
        why = f"promises {gain:.0f} % less than the choice of the run everywhere"
    return f"activations: micro-batches {'; '.join(parts)}: {why}"
