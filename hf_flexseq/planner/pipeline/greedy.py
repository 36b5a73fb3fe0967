"""Order the stages' actions by playing the step: whoever is free does the most urgent thing that is there.

    I and F   in turns, as far as both are there: the gradient of the input, which the stage before waits for, and a
              forward, while its activations find room
    W         when there is neither, or at once: the gradient of the weights, which nobody waits for, fills gaps and
              makes room

Units start in the given order and go backward in that order, so a unit that has begun can always finish, and the only
limit is that each alone must fit. This is one pass over the step without a flush. What is in flight is bounded by
bytes, hence by every sequence's own size: behind a short one there is room for its successors.

I and W become one B where the stage before did not wait for the I: the split stays where it paid. In steps of very
many chunks backwards are whole but for the last ones: bubbles are short there, and a plan must not take long.

Rejected: I before F, and F before I (a unit's gradients come in a burst and its room is free too late: up to a quarter
slower with equal sequences and Seq1F1B's memory); a window of P - r - 1 + k chunks per sequence in place of bytes
(half a percent slower at the same peak); splitting only the backwards of the last chunks (one percent slower with 4
stages and ample room, 9 % with 8 and little: what fills the gaps of a full memory are earlier W's).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, repeat

from hf_flexseq.schedule.pipeline.actions import KINDS, Action
from hf_flexseq.schedule.pipeline.cost import ChunkCosts
from hf_flexseq.schedule.pipeline.orders import backward_names, forward_names

NEVER = 1 << 62
SPLIT_ALL, SPLIT_LAST = 400, 200  # backwards: up to how many chunks all are split, and of more the last how many
Order = list[int]  # 4 x place of the chunk + place of the action's kind in KINDS
F, B, I, W = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A played step. makespan: nanoseconds. orders: of each stage. begun, ended: [stage][place] when each I began and
    each W was done, of split backwards."""

    makespan: int
    orders: list[Order]
    begun: list[list[int]]
    ended: list[list[int]]


def play(sizes: Sequence[int], costs: ChunkCosts, room: Sequence[int], *, prompt: bool = False) -> Played | None:
    """Play the step of units of these many chunks. room: bytes of each stage. prompt: every W follows its I at once.
    None where a unit alone does not fit."""
    # One loop over local lists, since every planned step runs it up to tens of thousands of times.
    stages, count = len(costs.forward), sum(sizes)
    whole = count - SPLIT_LAST if count > SPLIT_ALL else 0
    firsts = list(accumulate(sizes, initial=0))
    backward = [firsts[unit] + index for unit, index in backward_names(sizes)]
    gains, drains = _carries(firsts[:-1], costs)
    room = [limit - max(carried, default=0) for limit, carried in zip(room, costs.carried, strict=True)]
    forward_ns, input_ns, weight_ns, frees, send = (
        costs.forward,
        costs.input_grad,
        costs.weight_grad,
        costs.held,
        costs.send,
    )
    ahead = [[NEVER if stage else 0] * count for stage in range(stages)]  # when each forward's input is there
    back = [[NEVER] * count for _ in range(stages)]  # when each gradient is there
    begun, ended = ([[0] * count for _ in range(stages)] for _ in range(2))
    orders: list[Order] = [[] for _ in range(stages)]
    f, i, w, free, held = ([0] * stages for _ in range(5))  # forwards, I's and W's done; time; bytes
    turn = [False] * stages  # whether a forward's turn has come
    events, last = [(0, stage) for stage in range(stages)], stages - 1
    while events:
        now, s = heappop(events)
        if now < free[s]:
            continue
        gradient = i[s] < count and back[s][backward[i[s]]] <= now
        forward = f[s] < count and ahead[s][f[s]] <= now and held[s] + gains[s][f[s]] <= room[s]
        if prompt and w[s] < i[s]:
            gradient = forward = False
        if gradient and not (forward and turn[s]):
            place, turn[s] = backward[i[s]], True
            stop = now + input_ns[s][place]
            held[s] -= drains[s][place]
            if i[s] < whole:
                stop += weight_ns[s][place]
                held[s] -= frees[s][place]
                w[s] += 1
                orders[s].append(4 * place + B)
            else:
                begun[s][place] = now
                orders[s].append(4 * place + I)
            i[s] += 1
            if s:
                back[s - 1][place] = at = stop + send[place]
                if free[s - 1] <= at:
                    heappush(events, (at, s - 1))
        elif forward:
            place, turn[s] = f[s], False
            stop = now + forward_ns[s][place]
            f[s] += 1
            held[s] += gains[s][place]
            if s < last:
                ahead[s + 1][place] = at = stop + send[place]
                if free[s + 1] <= at:
                    heappush(events, (at, s + 1))
            else:
                back[s][place] = stop
            orders[s].append(4 * place + F)
        elif w[s] < i[s]:
            place = backward[w[s]]
            ended[s][place] = stop = now + weight_ns[s][place]
            w[s] += 1
            held[s] -= frees[s][place]
            orders[s].append(4 * place + W)
        else:
            continue
        free[s] = stop
        heappush(events, (stop, s))
    if min(w, default=count) < count:
        return None
    return Played(makespan=max(free, default=0), orders=orders, begun=begun, ended=ended)


def actions_of(played: Played, sizes: Sequence[int], costs: ChunkCosts) -> tuple[tuple[Action, ...], ...]:
    """The orders as actions of a plan, I and W joined where that delays nobody."""
    names = forward_names(sizes)
    units, indices = [unit for unit, _ in names], [index for _, index in names]
    lists = []
    for stage, order in enumerate(played.orders):
        joined = _joined(order, played.begun[stage - 1] if stage else None, played.ended[stage], costs.send)
        places = [code >> 2 for code in joined]
        kinds = [KINDS[code & 3] for code in joined]
        lists.append(
            tuple(map(Action, repeat(stage), kinds, map(units.__getitem__, places), map(indices.__getitem__, places)))
        )
    return tuple(lists)


def _joined(order: Order, wanted: list[int] | None, ended: list[int], send: list[int]) -> Order:
    """B for every I that its W follows at once, where the stage before began its own after that (`wanted`)."""
    joined: Order = []
    for code in order:
        place = code >> 2
        follows = code & 3 == W and joined[-1] == code - W + I
        if follows and (wanted is None or wanted[place] >= ended[place] + send[place]):
            joined[-1] = code - W + B
        else:
            joined.append(code)
    return joined


def _carries(firsts: Sequence[int], costs: ChunkCosts) -> tuple[list[list[int]], list[list[int]]]:
    """[stage][place] bytes that a forward takes, and that an I gives back: keys and values of a cut sequence come
    with its first chunk and go with its gradient."""
    gains = [list(held) for held in costs.held]
    drains = [[0] * len(held) for held in costs.held]
    for stage, carried in enumerate(costs.carried):
        for place in firsts:
            gains[stage][place] += carried[place]
            drains[stage][place] = carried[place]
    return gains, drains
