"""Order the stages' actions by playing the step: a stage that is free runs its most urgent action.

    I, F    in turns, as long as both are ready. I is the gradient of the input, for which the
            stage before waits; F is a forward, which needs room for its activations.
    W       when neither is ready. W is the gradient of the weights, for which nobody waits: it
            fills gaps and makes room.

One pass over the step, without a flush:

1. Units start in the given order and go backward in that order. A unit that has begun can
   therefore always finish, and the only limit is that each unit alone must fit.
2. Bytes bound what is in flight, hence the size of every single sequence does: behind a short
   sequence there is room for its successors.
3. A backward stays whole (B) where a chunk would hold more from I to W than before, as with
   checkpointed layers, which are computed again in I.
4. I and W become one B where the stage before did not wait for the I: the split stays where it
   paid (`actions_of`).
5. In steps of very many chunks all backwards but the last ones are whole: bubbles are short there,
   and a plan must not take long.

There are other `Manner`s, each the best at times, and single actions can be put off
(`deviations`): the best order of few chunks is seldom what any rule gives.

The slow, obvious twin, a search over all orders, is `tests/planner/pipeline_exact.py`.

Rejected as the only rule:

* I before F: a unit's gradients come in a burst and its room is free too late, up to a quarter
  slower with equal sequences and Seq1F1B's memory.
* F before I: 1 % slower.
* A window of P - r - 1 + k chunks per sequence in place of bytes: half a percent slower at the
  same peak.
* Splitting only the last backwards: 1 % slower with 4 stages and ample room, 9 % with 8 and
  little. Earlier W's are what fills the gaps of a full memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from hf_flexseq.cost.stages import ChunkCosts
from hf_flexseq.plan.pipeline import KINDS, Action
from hf_flexseq.schedule.pipeline.orders import backward_names, forward_names

# Rule 5, in chunks of the step. It bounds planning time, which the benchmark of pipelines
# (scripts/benchmarks/pipeline.py --parts planning) prints.
SPLIT_ALL = 400  # up to so many chunks, every backward may be split
SPLIT_LAST = 100  # of more chunks, only the last so many

NEVER = 1 << 62  # a time in nanoseconds that no step reaches

# An order of a stage's actions as ints: 4 x index of the chunk + index of the kind in KINDS.
Order = list[int]
# The kinds as indices in KINDS, and two that are no action: with NOTHING no action is ready, with
# WAIT one is put off until the next I or F is due.
F, B, I, W, NOTHING, WAIT = range(6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """A rule for choosing between actions that are ready."""

    first: str = "turns"
    """Which of I and F comes first when both are ready: "I", "F", or the one that did not come
    last ("turns")."""

    prompt: bool = False
    """Every W follows its I at once."""

    patience: int = 0
    """No W begins when an I or F will be ready before this share of the W is done, in halves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A played step."""

    makespan: int
    """Nanoseconds until the last stage is done."""

    orders: list[Order]
    """[stage] the actions of the stage in their order."""

    begun: list[list[int]]
    """[stage][chunk] nanoseconds at which the backward began."""

    ended: list[list[int]]
    """[stage][chunk] nanoseconds at which the W was done; 0 for backwards that were not split."""


def play(
    sizes: Sequence[int],
    costs: ChunkCosts,
    room: Sequence[int],
    manner: Manner = Manner(),
    deviations: Mapping[int, int] | None = None,
) -> Played | None:
    """Play one step and return every stage's order and times.

    sizes: how many chunks each unit has
    costs: nanoseconds and bytes of every chunk on every stage
    room: bytes of each stage
    deviations: number of an action, counted over all stages -> what is done in its place: the
        second most urgent action (1), the third (2), or nothing when there is none

    Returns None where a unit alone does not fit, or where a stage was made to wait for ever.
    """
    # One loop over local lists: the planner runs it up to tens of thousands of times a step.
    stages = len(costs.forward)
    last_stage = stages - 1
    count = sum(sizes)
    prompt = manner.prompt
    patience = manner.patience
    f_after_i, f_after_f = {"turns": (True, False), "I": (False, False), "F": (True, True)}[
        manner.first
    ]

    # ---- what is known of every chunk: [stage][chunk]
    f_ns = costs.forward
    i_ns = costs.input_grad
    w_ns = costs.weight_grad
    send_ns = costs.send
    activations = costs.held
    owed = costs.owed
    f_takes, i_frees = _carried_bytes(sizes, costs)
    may_split = _may_split(sizes, costs)
    first_split = count - SPLIT_LAST if count > SPLIT_ALL else 0
    backward_order = _backward_order(sizes)  # the n-th backward -> its chunk
    limits = [
        limit - max(carried, default=0) for limit, carried in zip(room, costs.carried, strict=True)
    ]

    # ---- what happens: [stage] or [stage][chunk]
    f_input_at = [[NEVER if stage else 0] * count for stage in range(stages)]
    gradient_at = [[NEVER] * count for _ in range(stages)]
    forwards_done = [0] * stages
    backwards_done = [0] * stages  # I's and B's
    weights_done = [0] * stages
    free_at = [0] * stages
    held_bytes = [0] * stages
    f_is_next = [f_after_f] * stages  # an F comes before an I when both are ready
    split: list[list[int]] = [[] for _ in range(stages)]  # chunks in the order of their I's
    begun = [[0] * count for _ in range(stages)]
    ended = [[0] * count for _ in range(stages)]
    orders: list[Order] = [[] for _ in range(stages)]
    left_deviations = dict(deviations or {})
    number = 0  # actions so far, of all stages
    events = [(0, stage) for stage in range(stages)]  # (time, a stage that may have work then)

    while events:
        now, stage = heappop(events)
        if now < free_at[stage]:
            continue  # at work: an event of its own follows when it is free

        # 1. what is due: from when on the next I and the next F are ready, and is a W owed?
        next_i = backwards_done[stage]
        next_f = forwards_done[stage]
        i_at = NEVER
        f_at = NEVER
        if next_i < count:
            i_at = gradient_at[stage][backward_order[next_i]]
        if next_f < count and held_bytes[stage] + f_takes[stage][next_f] <= limits[stage]:
            f_at = f_input_at[stage][next_f]
        owes_w = weights_done[stage] < len(split[stage])

        # 2. choose
        if owes_w and prompt:
            kind = W
        elif i_at <= now:
            kind = F if f_at <= now and f_is_next[stage] else I
        elif f_at <= now:
            kind = F
        elif not owes_w:
            kind = NOTHING
        elif not patience:
            kind = W
        else:
            next_w = split[stage][weights_done[stage]]
            too_soon = now + patience * w_ns[stage][next_w] // 2
            kind = W if min(i_at, f_at) >= too_soon else WAIT
        if left_deviations and number in left_deviations and kind < NOTHING:
            option = left_deviations.pop(number)
            kind = _other(kind, option, i_at <= now, f_at <= now, owes_w)
        if kind == NOTHING:
            continue  # what a neighbour sends comes with an event
        if kind == WAIT:
            later = [at for at in (i_at, f_at) if now < at < NEVER]
            if later:
                heappush(events, (min(later), stage))
            continue
        number += 1

        # 3. run I, or B where the backward stays whole
        if kind == I:
            chunk = backward_order[next_i]
            stop = now + i_ns[stage][chunk]
            backwards_done[stage] = next_i + 1
            f_is_next[stage] = f_after_i
            begun[stage][chunk] = now
            held_bytes[stage] -= i_frees[stage][chunk] + activations[stage][chunk]
            if next_i < first_split or not may_split[stage][chunk]:
                kind = B
                stop += w_ns[stage][chunk]
            else:
                held_bytes[stage] += owed[stage][chunk]
                split[stage].append(chunk)
            if stage > 0:
                arrival = stop + send_ns[chunk]
                gradient_at[stage - 1][chunk] = arrival
                if free_at[stage - 1] <= arrival:
                    heappush(events, (arrival, stage - 1))

        # 4. run F; on the last stage its gradient is there when it is done
        elif kind == F:
            chunk = next_f
            stop = now + f_ns[stage][chunk]
            forwards_done[stage] = next_f + 1
            f_is_next[stage] = f_after_f
            held_bytes[stage] += f_takes[stage][chunk]
            if stage == last_stage:
                gradient_at[stage][chunk] = stop
            else:
                arrival = stop + send_ns[chunk]
                f_input_at[stage + 1][chunk] = arrival
                if free_at[stage + 1] <= arrival:
                    heappush(events, (arrival, stage + 1))

        # 5. run W
        else:
            chunk = split[stage][weights_done[stage]]
            stop = now + w_ns[stage][chunk]
            weights_done[stage] += 1
            ended[stage][chunk] = stop
            held_bytes[stage] -= owed[stage][chunk]

        orders[stage].append(4 * chunk + kind)
        free_at[stage] = stop
        heappush(events, (stop, stage))

    # Is a stage stuck, with a backward or a weight gradient left to do?
    for stage in range(stages):
        if backwards_done[stage] < count or weights_done[stage] < len(split[stage]):
            return None
    return Played(makespan=max(free_at, default=0), orders=orders, begun=begun, ended=ended)


def _other(kind: int, option: int, i_ready: bool, f_ready: bool, w_ready: bool) -> int:
    """Return what a stage does in place of `kind`: the option-th other action that is ready, or
    WAIT."""
    others = []
    if i_ready and kind != I:
        others.append(I)
    if f_ready and kind != F:
        others.append(F)
    if w_ready and kind != W:
        others.append(W)
    if option > len(others):
        return WAIT
    return others[option - 1]


def _backward_order(sizes: Sequence[int]) -> list[int]:
    """Return the chunks in the order of their backwards: unit by unit, each unit's last chunk
    first."""
    first_chunks = list(accumulate(sizes, initial=0))
    order = []
    for unit, index in backward_names(sizes):
        order.append(first_chunks[unit] + index)
    return order


def _may_split(sizes: Sequence[int], costs: ChunkCosts) -> list[list[bool]]:
    """Return [stage][chunk] whether the chunks of its unit hold no more from I to W than before
    the I."""
    table = []
    for owed, held in zip(costs.owed, costs.held, strict=True):
        row: list[bool] = []
        for size in sizes:
            first = len(row)
            row += [owed[first] <= held[first]] * size
        table.append(row)
    return table


def _carried_bytes(
    sizes: Sequence[int], costs: ChunkCosts
) -> tuple[list[list[int]], list[list[int]]]:
    """Return [stage][chunk] the bytes that an F takes, and those that an I gives back beside the
    activations.

    Keys and values of a cut sequence come with its first chunk's F and go with that chunk's I.
    """
    f_takes = [list(held) for held in costs.held]
    i_frees = [[0] * len(held) for held in costs.held]
    first_chunks = list(accumulate(sizes, initial=0))[:-1]
    for stage, carried in enumerate(costs.carried):
        for chunk in first_chunks:
            f_takes[stage][chunk] += carried[chunk]
            i_frees[stage][chunk] = carried[chunk]
    return f_takes, i_frees


def actions_of(
    played: Played, sizes: Sequence[int], costs: ChunkCosts
) -> tuple[tuple[Action, ...], ...]:
    """Return [stage] the played order as a plan's actions, with I and W joined to B where that
    delays nobody."""
    names = forward_names(sizes)  # of every chunk, its (unit, index)
    lists = []
    for stage, order in enumerate(played.orders):
        begun_before = played.begun[stage - 1] if stage else None
        actions = []
        for code in _joined(order, begun_before, played.ended[stage], costs.send):
            unit, index = names[code >> 2]
            # Action(...) takes twice as long, and a step may have tens of thousands
            actions.append(tuple.__new__(Action, (stage, KINDS[code & 3], unit, index)))
        lists.append(tuple(actions))
    return tuple(lists)


def _joined(
    order: Order, begun_before: list[int] | None, ended: list[int], send_ns: list[int]
) -> Order:
    """Return the order with a B for every I that its W follows at once, where nobody needed the
    I alone.

    begun_before: [chunk] when the stage before began its own backward; None for the first stage.
        It did not need the I alone if it began only after the W's end.
    """
    joined: Order = []
    for code in order:
        chunk = code >> 2
        join = False
        if code & 3 == W and joined[-1] == code - W + I:
            arrival = ended[chunk] + send_ns[chunk]
            join = begun_before is None or begun_before[chunk] >= arrival
        if join:
            joined[-1] = code - W + B
        else:
            joined.append(code)
    return joined
