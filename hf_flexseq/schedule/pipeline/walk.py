"""Go through a pipeline's plan without computing: in which order actions can happen, when, and
what is then held.

A stage takes its inputs from two queues, one from each neighbour, and each queue hands out chunks
in the order in which the neighbour made them: sends are buffered, receives are not reordered. A
plan in which some rank waits for ever under these rules is a deadlock, and so is one that merely
needs a reordered queue: an executor that posts receives in the order of its own list would hang
there.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hf_flexseq.cost.stages import ChunkCosts, PipelineCost, chunk_costs, shape_of
from hf_flexseq.plan.pipeline import Action, PipelinePlan

Key = tuple[str, int]  # (F or B, the stage that sends)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """One action at its time. start, stop: nanoseconds. held: bytes of the rank while it goes on;
    left: after it."""

    rank: int
    action: Action
    start: int
    stop: int
    held: int
    left: int


def walk(plan: PipelinePlan) -> Iterator[tuple[int, Action]]:
    """All (rank, action), every one after what it waits for. Raises ValueError naming where each
    rank is stuck."""
    queues: dict[Key, deque[tuple[int, int]]] = {
        (way, stage): deque() for way in "FB" for stage in range(plan.stages)
    }
    at = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while at[rank] < len(actions) and _take(actions[at[rank]], plan.stages, queues):
                yield rank, actions[at[rank]]
                at[rank] += 1
                moved = True
    stuck = [
        str(actions[place])
        for actions, place in zip(plan.actions, at, strict=True)
        if place < len(actions)
    ]
    if stuck:
        raise ValueError(
            f"deadlock: {', '.join(stuck)} wait for what is never sent, or not sent next"
        )


def _take(action: Action, stages: int, queues: dict[Key, deque[tuple[int, int]]]) -> bool:
    """Take the action's input from its queue and put its output into the next one; False when the
    input is not there."""
    way, step, last = ("F", -1, 0) if action.kind == "F" else ("B", 1, stages - 1)
    if action.kind != "W":
        chunk = (action.unit, action.chunk)
        if action.stage != last:
            queue = queues[way, action.stage + step]
            if not queue or queue[0] != chunk:
                return False
            queue.popleft()
        queues[way, action.stage].append(chunk)
    return True


def timed(plan: PipelinePlan, cost: PipelineCost) -> Iterator[Done]:
    """All actions at the earliest time that their ranks' order allows: the longest path through
    the plan."""
    places = plan.places()
    costs = chunk_costs(
        cost, [shape_of(chunk, plan.lengths) for chunk in plan.chunks], plan.checkpointed
    )
    last = {chunk.unit: chunk.index for chunk in plan.chunks}
    free, held = [0] * plan.ranks, [0] * plan.ranks
    arrived: dict[tuple[str, int, int], int] = {}
    for rank, action in walk(plan):
        place = places[action.unit, action.chunk]
        way = "F" if action.kind == "F" else "B"
        start = max(
            free[rank], arrived.get((way, action.stage, place), 0) if action.kind != "W" else 0
        )
        stop = start + _duration(action, place, costs)
        if action.kind != "W":
            receiver = action.stage + (1 if way == "F" else -1)
            arrived[way, receiver, place] = stop + costs.send[place]
        gained, lost = _bytes(action, place, costs, action.chunk == last[action.unit])
        during = held[rank] + gained
        free[rank], held[rank] = stop, during - lost
        yield Done(rank=rank, action=action, start=start, stop=stop, held=during, left=held[rank])


def makespan_ns(plan: PipelinePlan, cost: PipelineCost) -> int:
    """Nanoseconds of the step."""
    return max((done.stop for done in timed(plan, cost)), default=0)


def peak_bytes(plan: PipelinePlan, cost: PipelineCost) -> tuple[int, ...]:
    """The most bytes each rank holds of what is in flight."""
    peaks = [0] * plan.ranks
    for done in timed(plan, cost):
        peaks[done.rank] = max(peaks[done.rank], done.held)
    return tuple(peaks)


def _duration(action: Action, place: int, costs: ChunkCosts) -> int:
    stage = action.stage
    if action.kind == "F":
        return costs.forward[stage][place]
    parts = {
        "I": (costs.input_grad,),
        "W": (costs.weight_grad,),
        "B": (costs.input_grad, costs.weight_grad),
    }
    return sum(part[stage][place] for part in parts[action.kind])


def _bytes(action: Action, place: int, costs: ChunkCosts, is_last: bool) -> tuple[int, int]:
    """Bytes an action gains when it starts and loses when it stops. is_last: of its unit's
    chunks."""
    held, owed, carried = (
        row[action.stage][place] for row in (costs.held, costs.owed, costs.carried)
    )
    if action.kind == "F":
        return held + (carried if action.chunk == 0 else 0), 0
    if action.kind == "W":
        return 0, owed
    kept = owed if action.kind == "I" else 0
    drained = 2 * carried if action.chunk == 0 else 0
    return (carried if is_last else 0) + max(0, kept - held), drained + max(0, held - kept)
