"""InfiniPipe's planner (arXiv 2509.21275), re-created from the paper's text; its code is not
public.

For every number K of slices of the longest sequence

1. `chunking.py` makes the chunks;
2. units are grouped by how many chunks they have, and every group is a 1F1B pipeline of its own,
   more chunks first, flushed before the next: a dynamic program over chunk counts (equation 14)
   weighs the cost of a flush, (P - 1) x the mean chunk's time, against recomputing;
3. where a group holds more than there is room for, a program chooses the layers to recompute on
   every diagonal of the pipeline (`checkpointing.py`).

The best K is the one whose step is shortest when simulated; the paper optimises it "in the solving
process". The window of a group is P - p + the chunks of its longest sequence (equation 7), as in
1F1B's order.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from statistics import fmean

from hf_flexseq.pipeline.planning.cuts import CutWork
from hf_flexseq.pipeline.planning.orders import backward_names, one_forward_one_backward
from hf_flexseq.pipeline.planning.plan import Action
from hf_flexseq.pipeline.planning.stage_cost import ChunkCosts, chunk_costs
from hf_flexseq.pipeline.planning.units import (
    Layers,
    PipelineAnswer,
    PipelineTask,
    Unit,
    plan_of,
    shapes_of,
)
from hf_flexseq.pipeline.planning.walk import makespan_ns
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.published.infinipipe.chunking import Moment, infinipipe_units

COUNTS = range(1, 97)  # the K that are tried

# Grouping a K takes a dynamic program, and with recomputing integer programs too. A K is therefore
# passed over when the best plan so far, times this factor, is faster than the K without a limit.
HOPELESS_FLUSHING = 1.02
HOPELESS_RECOMPUTING = 1.005  # closer, since its programs are slow


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Units [start, stop) as one pipeline, flushed before the next."""

    start: int

    stop: int

    layers: tuple[int, ...]
    """Layers recomputed on each diagonal, () for none."""
    price: float
    """Nanoseconds of recomputing and of the flush."""


def infinipipe_pipeline(task: PipelineTask) -> PipelineAnswer:
    """Return the best plan over all K. Raises PlanInfeasible if no K has a plan."""
    # 1. the chunks of every K, and how long they take without a limit
    work = CutWork.of(task.cost)
    trials = []
    for number, k in enumerate(COUNTS):
        units = infinipipe_units(task.lengths, k, work, task.options.max_tokens)
        unlimited_ns = _makespan(_answer(units, [_whole(units)], task), task)
        trials.append((unlimited_ns, number, units))
    trials.sort(key=lambda trial: trial[:2])

    # 2. groups and recomputed layers for those that may be best. Flushing alone comes first: it is
    # quickly found, and bounds what is worth solving.
    best: tuple[int, PipelineAnswer] | None = None
    for recompute in (False, True):
        hopeless = HOPELESS_RECOMPUTING if recompute else HOPELESS_FLUSHING
        for unlimited_ns, _, units in trials:
            spare_ns = math.inf if best is None else hopeless * best[0] - unlimited_ns
            if spare_ns <= 0:
                continue
            groups = _grouped(units, task, spare_ns, recompute=recompute)
            if groups is None:
                continue
            answer = _answer(units, groups, task)
            makespan = _makespan(answer, task)
            if best is None or makespan < best[0]:
                best = (makespan, answer)
    if best is None:
        longest = task.lengths.index(max(task.lengths))
        raise PlanInfeasible(
            f"sequence {longest} fits for no number of chunks: not even all layers checkpointed "
            "save enough. Give more memory or use more stages"
        )
    makespan, answer = best
    return replace(answer, makespan_ns=makespan)


# ---- groups


def _whole(units: Sequence[Unit]) -> _Group:
    """Return all units as one pipeline without recomputing."""
    return _Group(start=0, stop=len(units), layers=(), price=0.0)


def _grouped(
    units: list[Unit], task: PipelineTask, spare_ns: float, *, recompute: bool
) -> list[_Group] | None:
    """Return the cheapest groups, more chunks first; None when no grouping fits, or none that
    costs at most `spare_ns` nanoseconds more than one pipeline without recomputing."""
    if task.options.memory_limit is None:
        return [_whole(units)]
    sizes = [len(unit) for unit in units]
    ends = [0]  # a group may end where the number of chunks changes
    for stop in range(1, len(units)):
        if sizes[stop] != sizes[stop - 1]:
            ends.append(stop)
    ends.append(len(units))

    shapes = shapes_of(units, task.lengths)
    everything = [[stage.layers] * len(shapes) for stage in task.cost.stages]
    full = chunk_costs(task.cost, shapes)
    bare = chunk_costs(task.cost, shapes, everything)

    # The price of every group includes a flush, that of the last group too.
    _, both_ns = _passes(full, slice(None))
    spare_ns += both_ns * (task.stages - 1)
    cheapest: dict[int, tuple[float, list[_Group]]] = {0: (0.0, [])}  # of units [0, stop)
    for stop in ends[1:]:
        for start in reversed(ends):
            if start >= stop or start not in cheapest:
                continue
            price, groups = cheapest[start]
            known = cheapest[stop][0] if stop in cheapest else spare_ns
            group = _group(
                start, stop, sizes, full, bare, task, beat=known - price, recompute=recompute
            )
            if group is not None:
                cheapest[stop] = (price + group.price, [*groups, group])
    if len(units) not in cheapest:
        return None
    return cheapest[len(units)][1]


def _group(
    start: int,
    stop: int,
    sizes: Sequence[int],
    full: ChunkCosts,
    bare: ChunkCosts,
    task: PipelineTask,
    *,
    beat: float,
    recompute: bool,
) -> _Group | None:
    """Return units [start, stop) as a pipeline, with the layers that have to be recomputed.

    sizes: chunks of each unit of the step
    full, bare: costs of all chunks without any and with all layers checkpointed
    beat: nanoseconds that the price must stay below

    Returns None when the group cannot fit, costs no less than `beat`, or has to recompute and may
    not.
    """
    first_chunks = list(accumulate(sizes, initial=0))
    first = first_chunks[start]
    end = first_chunks[stop]

    # 1. the flush
    forward_ns, both_ns = _passes(full, slice(first, end))
    flush_ns = (task.stages - 1) * both_ns
    if flush_ns >= beat:
        return None

    # 2. moments at which a stage would hold too much
    found = _moments(sizes[start:stop], first, full, bare, task)
    if not recompute:
        found = islice(found, 1)  # a single one is too many
    moments = tuple(found)
    if not moments:
        return _Group(start=start, stop=stop, layers=(), price=flush_ns)
    if not recompute:
        return None

    # 3. layers to recompute: a lower bound, then the program. A diagonal's layer delays the step
    # by that layer's share of a mean forward.
    most = min(stage.layers for stage in task.cost.stages)
    if flush_ns + _least_layers(moments) * forward_ns / most >= beat:
        return None
    # its solver is an optional dependency
    from hf_flexseq.published.infinipipe.checkpointing import solve

    diagonals = (end - first) + task.stages - 1
    limit = int(min(diagonals * most, (beat - flush_ns) * most / forward_ns))
    layers = solve(moments, variables=diagonals, most=most, limit=limit)
    if layers is None:
        return None
    price = flush_ns + sum(layers) * forward_ns / most
    return _Group(start=start, stop=stop, layers=layers, price=price)


def _passes(costs: ChunkCosts, chunks: slice) -> tuple[float, float]:
    """Return mean nanoseconds of a chunk's forward on a stage, and of its forward and backward."""
    means = []
    for table in (costs.forward, costs.input_grad, costs.weight_grad):  # [stage][chunk] each
        means.append(fmean(chain.from_iterable(row[chunks] for row in table)))
    return means[0], sum(means)


# ---- recomputing


def _least_layers(moments: Sequence[Moment]) -> int:
    """Return a lower bound on all diagonals' layers, by moments without a common diagonal."""
    used: set[int] = set()
    least = 0
    for excess, terms in moments:
        diagonals = {diagonal for diagonal, _ in terms}
        if not used & diagonals:
            used |= diagonals
            most_saved = max(1, max(saved for _, saved in terms))
            least += -(-excess // most_saved)  # rounded up
    return least


def _moments(
    sizes: Sequence[int], first: int, full: ChunkCosts, bare: ChunkCosts, task: PipelineTask
) -> Iterator[Moment]:
    """Yield the moments at which a stage of a 1F1B pipeline would hold too much.

    sizes: chunks of each unit of the pipeline; first: the first unit's first chunk
    """
    assert task.options.memory_limit is not None, "without a limit nothing is too much"
    first_chunks = list(accumulate(sizes, initial=first))
    backward_number = {}  # chunk -> the number of its backward on any stage
    for number, (unit, index) in enumerate(backward_names(sizes)):
        backward_number[first_chunks[unit] + index] = number

    for stage, actions in enumerate(one_forward_one_backward(sizes, task.stages)):
        held = full.held[stage]
        carried = full.carried[stage]
        layers = task.cost.stages[stage].layers
        saved = []  # of each chunk, bytes per recomputed layer
        for high, low in zip(held, bare.held[stage], strict=True):
            saved.append((high - low) // layers)
        stages_behind = task.stages - 1 - stage
        in_flight: dict[int, int] = {}  # chunk -> diagonal
        total = 0  # bytes
        for action in actions:
            chunk = first_chunks[action.unit] + action.chunk
            grows = False
            if action.kind == "F":
                in_flight[chunk] = backward_number[chunk] + stages_behind
                grows = True
                total += held[chunk]
                if action.chunk == 0:
                    total += carried[chunk]
            elif action.chunk == sizes[action.unit] - 1:
                # The gradients of keys and values come with the unit's first backward.
                grows = carried[chunk] > 0
                total += carried[chunk]
            if grows and total > task.options.memory_limit[stage]:
                terms = tuple((diagonal, saved[other]) for other, diagonal in in_flight.items())
                yield total - task.options.memory_limit[stage], terms
            if action.kind == "B":
                del in_flight[chunk]
                total -= held[chunk]
                if action.chunk == 0:
                    total -= 2 * carried[chunk]  # keys and values, and their gradients


def _layers(sizes: Sequence[int], diagonals: Sequence[int], stages_behind: int) -> list[int]:
    """Return the checkpointed layers of each chunk on a stage. diagonals: layers, () for none."""
    layers = [0] * sum(sizes)
    if not diagonals:
        return layers
    first_chunks = list(accumulate(sizes, initial=0))
    for number, (unit, index) in enumerate(backward_names(sizes)):
        layers[first_chunks[unit] + index] = diagonals[number + stages_behind]
    return layers


# ---- the answer


def _answer(units: list[Unit], groups: Sequence[_Group], task: PipelineTask) -> PipelineAnswer:
    """Return the groups as one pipeline after the other."""
    actions: list[list[Action]] = [[] for _ in range(task.stages)]
    layers: list[list[int]] = [[] for _ in range(task.stages)]
    for group in groups:
        sizes = [len(unit) for unit in units[group.start : group.stop]]
        orders = one_forward_one_backward(sizes, task.stages, first=group.start)
        for stage, order in enumerate(orders):
            actions[stage] += order
            layers[stage] += _layers(sizes, group.layers, task.stages - 1 - stage)
    checkpointed: Layers = ()
    if any(map(any, layers)):
        checkpointed = tuple(map(tuple, layers))
    return PipelineAnswer(
        units=units, actions=tuple(map(tuple, actions)), checkpointed=checkpointed
    )


def _makespan(answer: PipelineAnswer, task: PipelineTask) -> int:
    """Return the simulated nanoseconds of an answer."""
    return makespan_ns(plan_of(task, answer), task.cost)
