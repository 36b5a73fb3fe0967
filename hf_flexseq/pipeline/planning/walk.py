"""Go through a pipeline's plan without computing: the order in which actions can happen, their
times, and the bytes then held.

    walk          every action after its inputs, or where each rank is stuck
    timed         every action at its earliest time, with the bytes of its rank
    makespan_ns   nanoseconds of the step
    check         refuses a plan that would compute something wrong or hang
    check_memory  refuses a plan that does not fit

A stage takes its inputs from two queues, one from each neighbour, and each queue hands out chunks
in the order in which the neighbour made them: sends are buffered, receives are not reordered. A
plan in which some rank waits for ever under these rules is a deadlock, and so is one that merely
needs a reordered queue: an executor that posts receives in the order of its own list would hang
there.

The slow reference of `timed`, which pulls every edge of the plan's graph until nothing moves,
is `relaxed` in tests/pipelines.py.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_flexseq.pipeline.planning.plan import Action, PipelinePlan
from hf_flexseq.pipeline.planning.stage_cost import ChunkCosts, PipelineCost, chunk_costs, shape_of
from hf_flexseq.pipeline.planning.step_plan import StepPlan

# (F or B, the stage that sends) -> (unit, index) of the chunks that were sent and not yet taken
Queues = dict[tuple[str, int], deque[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """An action at its time."""

    rank: int

    action: Action

    start: int
    """Nanoseconds since the step began."""
    stop: int
    """Nanoseconds since the step began."""
    held: int
    """Bytes of the rank while the action goes on."""
    left: int
    """Bytes of the rank after it."""


def walk(plan: PipelinePlan) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action), each after its inputs; ranks advance side by side, one action
    at a time. Raises ValueError naming the actions at which ranks are stuck."""
    queues: Queues = {}
    for stage in range(plan.stages):
        queues["F", stage] = deque()
        queues["B", stage] = deque()
    done = [0] * plan.ranks  # how many actions of each rank have happened
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            if done[rank] < len(actions) and _take(actions[done[rank]], plan.stages, queues):
                yield rank, actions[done[rank]]
                done[rank] += 1
                moved = True

    stuck = []
    for rank, actions in enumerate(plan.actions):
        if done[rank] < len(actions):
            stuck.append(str(actions[done[rank]]))
    if stuck:
        raise ValueError(
            f"deadlock: {', '.join(stuck)} wait for what is never sent, or not sent next"
        )


def _take(action: Action, stages: int, queues: Queues) -> bool:
    """Move the action's input to its output queue; False if the input is not next in its queue."""
    if action.kind == "W":
        return True  # what it needs is on its stage
    if action.kind == "F":
        direction = "F"
        sender = action.stage - 1
    else:
        direction = "B"
        sender = action.stage + 1
    chunk = (action.unit, action.chunk)
    if 0 <= sender < stages:
        queue = queues[direction, sender]
        if not queue or queue[0] != chunk:
            return False
        queue.popleft()
    queues[direction, action.stage].append(chunk)
    return True


def timed(plan: PipelinePlan, cost: PipelineCost) -> Iterator[Done]:
    """Yield all actions at the earliest time that the order allows: the longest path."""
    chunk_numbers = plan.places()  # (unit, index) -> index in the plan's chunks
    shapes = [shape_of(chunk.slices, plan.lengths) for chunk in plan.chunks]
    costs = chunk_costs(cost, shapes, plan.checkpointed)
    last_index = {chunk.unit: chunk.index for chunk in plan.chunks}
    free_at = [0] * plan.ranks
    held = [0] * plan.ranks
    arrived_at: dict[tuple[str, int, int], int] = {}  # (F or B, receiving stage, chunk)
    for rank, action in walk(plan):
        chunk = chunk_numbers[action.unit, action.chunk]
        stage = action.stage

        # 1. time: when rank and input are there
        direction = "F" if action.kind == "F" else "B"
        start = free_at[rank]
        if action.kind != "W":
            start = max(start, arrived_at.get((direction, stage, chunk), 0))
        stop = start + _duration(action, chunk, costs)
        free_at[rank] = stop
        if action.kind != "W":
            receiver = stage + 1 if direction == "F" else stage - 1
            arrived_at[direction, receiver, chunk] = stop + costs.send[chunk]

        # 2. bytes
        is_last = action.chunk == last_index[action.unit]
        gained, lost = _bytes(action, chunk, costs, is_last)
        during = held[rank] + gained
        held[rank] = during - lost
        yield Done(rank=rank, action=action, start=start, stop=stop, held=during, left=held[rank])


def makespan_ns(plan: PipelinePlan, cost: PipelineCost) -> int:
    """Return the nanoseconds of the step."""
    return max((done.stop for done in timed(plan, cost)), default=0)


def _duration(action: Action, chunk: int, costs: ChunkCosts) -> int:
    """Return the nanoseconds of an action. chunk: its index in the plan."""
    stage = action.stage
    if action.kind == "F":
        return costs.forward[stage][chunk]
    if action.kind == "I":
        return costs.input_grad[stage][chunk]
    if action.kind == "W":
        return costs.weight_grad[stage][chunk]
    return costs.input_grad[stage][chunk] + costs.weight_grad[stage][chunk]


def _bytes(action: Action, chunk: int, costs: ChunkCosts, is_last: bool) -> tuple[int, int]:
    """Return the bytes that an action gains when it starts, and those that it loses when it stops.

    chunk: its index in the plan; is_last: whether it is the last chunk of its unit
    """
    held = costs.held[action.stage][chunk]
    owed = costs.owed[action.stage][chunk]
    carried = costs.carried[action.stage][chunk]
    is_first = action.chunk == 0
    if action.kind == "F":
        gained = held
        if is_first:
            gained += carried  # keys and values of the whole sequence
        return gained, 0
    if action.kind == "W":
        return 0, owed

    kept = owed if action.kind == "I" else 0  # from I to W
    gained = max(0, kept - held)
    lost = max(0, held - kept)
    if is_last:
        gained += carried  # gradients of keys and values: the unit goes backward from here
    if is_first:
        lost += 2 * carried  # keys and values, and their gradients
    return gained, lost


# ---- checks


def check(plan: PipelinePlan) -> None:
    """Raise ValueError, naming chunk or action, unless the plan is legal and runs through."""
    plan.check_form()
    for _ in walk(plan):  # raises where neighbours wait for each other
        pass


def check_step(step: StepPlan) -> None:
    """Raise ValueError unless each sequence is on one replica, and all plans are legal and run."""
    step.check_form()
    for plan in step.plans:
        for _ in walk(plan):
            pass


def check_memory(plan: PipelinePlan, cost: PipelineCost, memory_limit: Sequence[int]) -> None:
    """Raise ValueError, naming the action, if a rank holds more than its `memory_limit` bytes."""
    for done in timed(plan, cost):
        if done.held > memory_limit[done.rank]:
            raise ValueError(
                f"{done.action}: rank {done.rank} holds {done.held} bytes, the limit is "
                f"{memory_limit[done.rank]}"
            )
