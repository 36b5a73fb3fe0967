"""Order the stages' actions by playing the step: whoever is free does the most urgent thing that
is there.

    I and F   in turns, as far as both are there: the gradient of the input, which the stage before
              waits for, and a
              forward, while its activations find room
    W         when there is neither: the gradient of the weights, which nobody waits for, fills
              gaps and makes room

Units start in the given order and go backward in that order, so a unit that has begun can always
finish, and the only limit is that each alone must fit. This is one pass over the step without a
flush. What is in flight is bounded by bytes, hence by every sequence's own size: behind a short
one there is room for its successors.

A backward is whole where a chunk would hold more from I to W than before, as with checkpointed
layers, which are computed again in I.

I and W become one B where the stage before did not wait for the I: the split stays where it paid.
In steps of very many chunks backwards are whole but for the last ones: bubbles are short there,
and a plan must not take long.

There are other `Manner`s, each the best at times, and single actions can be put off
(`deviations`): of few chunks the best order is seldom what any rule gives.

Rejected as the only rule: I before F (a unit's gradients come in a burst and its room is free too
late: up to a quarter slower with equal sequences and Seq1F1B's memory); F before I (1 % slower); a
window of P - r - 1 + k chunks per sequence in place of bytes (half a percent slower at the same
peak); splitting only the last backwards (1 % slower with 4 stages and ample room, 9 % with 8 and
little: what fills the gaps of a full memory are earlier W's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, repeat

from hf_flexseq.cost.stages import ChunkCosts
from hf_flexseq.plan.pipeline import KINDS, Action
from hf_flexseq.schedule.pipeline.orders import backward_names, forward_names

NEVER = 1 << 62
# backwards: up to how many chunks all are split, and of more the last how many
SPLIT_ALL, SPLIT_LAST = 400, 100
Order = list[int]  # 4 x place of the chunk + place of the action's kind in KINDS
F, B, I, W, NOTHING, WAIT = range(6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """first: when I and F are both there, the one that did not come last ("turns"), "I" or "F".
    prompt: every W follows its I at once. patience: no W begins when an I or F will be there
    before this share of it is done, in halves."""

    first: str = "turns"
    prompt: bool = False
    patience: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A played step. makespan: nanoseconds. orders: of each stage. begun: [stage][place] when each
    backward began. ended: when each W was done, of split ones."""

    makespan: int
    orders: list[Order]
    begun: list[list[int]]
    ended: list[list[int]]


def play(
    sizes: Sequence[int],
    costs: ChunkCosts,
    room: Sequence[int],
    manner: Manner = Manner(),
    deviations: Mapping[int, int] | None = None,
) -> Played | None:
    """Play the step of units of these many chunks. room: bytes of each stage. deviations: the
    action of this number (of all stages' together) is not the most urgent one but the second (1),
    the third (2), or waits when there is none. None where a unit alone does not fit, or where a
    stage was made to wait for ever.
    """
    # One loop over local lists, since every planned step runs it up to tens of thousands of times.
    stages, count = len(costs.forward), sum(sizes)
    whole = count - SPLIT_LAST if count > SPLIT_ALL else 0
    firsts = list(accumulate(sizes, initial=0))
    backward = [firsts[unit] + index for unit, index in backward_names(sizes)]
    gains, drains = _carries(firsts[:-1], costs)
    room = [
        limit - max(carried, default=0) for limit, carried in zip(room, costs.carried, strict=True)
    ]
    prompt, patience = manner.prompt, manner.patience
    after_i, after_f = {"turns": (True, False), "I": (False, False), "F": (True, True)}[
        manner.first
    ]
    forward_ns, input_ns, weight_ns = costs.forward, costs.input_grad, costs.weight_grad
    holds, owed, send, lean = costs.held, costs.owed, costs.send, _lean(sizes, costs)
    others, number = dict(deviations or {}), 0
    # when each forward's input is there
    ahead = [[NEVER if stage else 0] * count for stage in range(stages)]
    back = [[NEVER] * count for _ in range(stages)]  # when each gradient is there
    begun, ended = ([[0] * count for _ in range(stages)] for _ in range(2))
    orders: list[Order] = [[] for _ in range(stages)]
    due: list[Order] = [[] for _ in range(stages)]  # places of split backwards
    # forwards, backwards and W's done; time; bytes
    f, i, w, free, held = ([0] * stages for _ in range(5))
    turn = [after_f] * stages  # whether a forward comes before an I
    events, last = [(0, stage) for stage in range(stages)], stages - 1
    while events:
        now, s = heappop(events)
        if now < free[s]:
            continue
        done_i, done_f = i[s], f[s]
        due_i = back[s][backward[done_i]] if done_i < count else NEVER
        due_f = (
            ahead[s][done_f] if done_f < count and held[s] + gains[s][done_f] <= room[s] else NEVER
        )
        owes = w[s] < len(due[s])
        if owes and prompt:
            kind = W
        elif due_i <= now:
            kind = F if due_f <= now and turn[s] else I
        elif due_f <= now:
            kind = F
        elif owes and min(due_i, due_f) >= now + patience * weight_ns[s][due[s][w[s]]] // 2:
            kind = W
        else:
            kind = WAIT if owes else NOTHING
        if others and number in others and kind < NOTHING:
            kind = _other(kind, others.pop(number), due_i <= now, due_f <= now, owes)
        if kind >= NOTHING:
            later = [due for due in (due_i, due_f) if now < due < NEVER]
            if kind == WAIT and later:
                heappush(events, (min(later), s))
            continue
        number += 1
        if kind == I:
            place, turn[s] = backward[done_i], after_i
            stop = now + input_ns[s][place]
            held[s] -= drains[s][place] + holds[s][place]
            begun[s][place] = now
            if done_i < whole or not lean[s][place]:
                kind, stop = B, stop + weight_ns[s][place]
            else:
                held[s] += owed[s][place]
                due[s].append(place)
            i[s] = done_i + 1
            if s:
                back[s - 1][place] = at = stop + send[place]
                if free[s - 1] <= at:
                    heappush(events, (at, s - 1))
        elif kind == F:
            place, turn[s] = done_f, after_f
            stop = now + forward_ns[s][place]
            f[s] = done_f + 1
            held[s] += gains[s][place]
            if s < last:
                ahead[s + 1][place] = at = stop + send[place]
                if free[s + 1] <= at:
                    heappush(events, (at, s + 1))
            else:
                back[s][place] = stop
        else:
            place = due[s][w[s]]
            ended[s][place] = stop = now + weight_ns[s][place]
            w[s] += 1
            held[s] -= owed[s][place]
        orders[s].append(4 * place + kind)
        free[s] = stop
        heappush(events, (stop, s))
    if min(i, default=count) < count or any(
        done < len(places) for done, places in zip(w, due, strict=True)
    ):
        return None
    return Played(makespan=max(free, default=0), orders=orders, begun=begun, ended=ended)


def _other(kind: int, option: int, has_i: bool, has_f: bool, has_w: bool) -> int:
    """What a stage does in place of `kind`: the option-th other thing that is there, or it
    waits."""
    others = [
        other for other, there in ((I, has_i), (F, has_f), (W, has_w)) if there and other != kind
    ]
    return others[option - 1] if option <= len(others) else WAIT


def actions_of(
    played: Played, sizes: Sequence[int], costs: ChunkCosts
) -> tuple[tuple[Action, ...], ...]:
    """The orders as actions of a plan, I and W joined where that delays nobody."""
    names = forward_names(sizes)
    units, indices = [unit for unit, _ in names], [index for _, index in names]
    lists = []
    for stage, order in enumerate(played.orders):
        joined = _joined(
            order, played.begun[stage - 1] if stage else None, played.ended[stage], costs.send
        )
        places = [code >> 2 for code in joined]
        kinds = [KINDS[code & 3] for code in joined]
        named = zip(
            repeat(stage), kinds, map(units.__getitem__, places), map(indices.__getitem__, places)
        )
        # as Action(*named), in half the time
        lists.append(tuple(map(partial(tuple.__new__, Action), named)))
    return tuple(lists)


def _joined(order: Order, wanted: list[int] | None, ended: list[int], send: list[int]) -> Order:
    """B for every I that its W follows at once, where the stage before began its own after that
    (`wanted`)."""
    joined: Order = []
    for code in order:
        place = code >> 2
        follows = code & 3 == W and joined[-1] == code - W + I
        if follows and (wanted is None or wanted[place] >= ended[place] + send[place]):
            joined[-1] = code - W + B
        else:
            joined.append(code)
    return joined


def _lean(sizes: Sequence[int], costs: ChunkCosts) -> list[list[bool]]:
    """[stage][place] whether the chunks of a unit hold no more from I to W than before."""
    firsts = list(accumulate(sizes, initial=0))[:-1]
    return [
        [
            fits
            for first, size in zip(firsts, sizes, strict=True)
            for fits in [owed[first] <= held[first]] * size
        ]
        for owed, held in zip(costs.owed, costs.held, strict=True)
    ]


def _carries(firsts: Sequence[int], costs: ChunkCosts) -> tuple[list[list[int]], list[list[int]]]:
    """[stage][place] bytes that a forward takes, and that an I gives back: keys and values of a
    cut sequence come with its first chunk and go with its gradient."""
    gains = [list(held) for held in costs.held]
    drains = [[0] * len(held) for held in costs.held]
    for stage, carried in enumerate(costs.carried):
        for place in firsts:
            gains[stage][place] += carried[place]
            drains[stage][place] = carried[place]
    return gains, drains
