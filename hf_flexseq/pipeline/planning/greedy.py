"""Order the stages' actions by playing the step: a stage that is free runs its most urgent action.

    I, F    take turns while both are ready. I is the gradient of the input, for which the previous
            stage waits; F is a forward, which needs room for its activations.
    W       when neither is ready, and on an F's turn if only room is missing. W is the gradient of
            the weights, which no stage waits for: it fills gaps and makes room.

One pass over the step, without a flush:

1. Units start in the given order and go backward in that order. A unit that has begun can
   therefore always finish, and the only limit is that each unit alone must fit.
2. The limit on chunks in flight is in bytes, so every sequence counts by its size: a short one
   leaves room for others.
3. A backward stays whole (B) if a chunk would hold more from I to W than before, as with
   checkpointed layers, which are recomputed in I.
4. I and W become one B if the previous stage did not wait for the I (`actions_of`).

The slow reference, a search over all orders, is `tests/pipeline/exact_orders.py`.

Rejected:

* I before F: a unit's gradients come in a burst and its room is free too late, up to a quarter
  slower with equal sequences and Seq1F1B's memory.
* F before I: 1 % slower.
* W only when neither is ready: up to 8 % slower with few chunks and little room.
* A window of P - r - 1 + k chunks per sequence instead of bytes: half a percent slower at the
  same peak.
* Splitting only the last backwards: 1 % slower with 4 stages and ample room, 9 % with 8 and
  little. When memory is full, earlier W's fill the gaps.
* Several of these rules tried in turn, and single actions put off: 0.3 % slower on long-tailed
  batches in the same planning time, 1 % faster with at most five chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from hf_flexseq.pipeline.planning.orders import backward_names, forward_names
from hf_flexseq.pipeline.planning.plan import KINDS, Action, Actions
from hf_flexseq.pipeline.planning.stage_cost import ChunkCosts

NEVER = 1 << 62  # a time in nanoseconds that no step reaches

# An order of a stage's actions as ints: 4 x index of the chunk + index of the kind in KINDS.
Order = list[int]
# (nanoseconds, stage) at which a stage may have work, as a heap.
Events = list[tuple[int, int]]
# The kinds as indices in KINDS.
F, B, I, W = range(4)


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


class _Stage:
    """One stage during a play: the costs of its chunks, its finished actions, and the inputs for
    which it waits.

    Lists have one value for each chunk unless their comment says otherwise.
    """

    def __init__(
        self,
        number: int,
        sizes: Sequence[int],
        costs: ChunkCosts,
        limit: int,
        backward_order: list[int],
        events: Events,
    ) -> None:
        """backward_order: the n-th backward -> its chunk. events: of all stages"""
        count = sum(sizes)
        held, owed, carried = costs.held[number], costs.owed[number], costs.carried[number]
        self.number = number
        self.count = count
        self.events = events
        self.before: _Stage | None = None
        self.after: _Stage | None = None
        # what is known of every chunk
        self.f_ns = costs.forward[number]
        self.i_ns = costs.input_grad[number]
        self.w_ns = costs.weight_grad[number]
        self.send_ns = costs.send
        self.backward_order = backward_order
        self.memory_limit = limit - max(carried, default=0)
        self.f_bytes = list(held)
        self.weight_grad_bytes = owed
        self.may_split: list[bool] = []
        for size in sizes:
            first = len(self.may_split)
            # keys and values of a cut sequence come with its first chunk's F and go with its I
            self.f_bytes[first] += carried[first]
            # rule 3, for all chunks of the unit
            self.may_split += [owed[first] <= held[first]] * size
        # what happens: when the inputs of F and I arrive, when backwards began and W's ended
        self.f_input_at = [NEVER if number else 0] * count
        self.gradient_at = [NEVER] * count
        self.begun = [0] * count
        self.ended = [0] * count
        self.order: Order = []  # actions done
        self.split: list[int] = []  # chunks in the order of their I's
        self.forwards_done = 0
        self.backwards_done = 0  # I's and B's
        self.weights_done = 0
        self.free_at = 0
        self.held_bytes = 0
        self.f_is_next = False  # True if an F comes before an I when both are ready

    @property
    def owes_w(self) -> bool:
        """True if an I of the stage lacks its W."""
        return self.weights_done < len(self.split)

    def most_urgent(self, now: int) -> Callable[[int], None] | None:
        """Return the method that runs the most urgent action; None if none is ready."""
        number = self.backwards_done
        next_f = self.forwards_done
        i_ready = number < self.count and self.gradient_at[self.backward_order[number]] <= now
        f_arrived = next_f < self.count and self.f_input_at[next_f] <= now
        if i_ready and not self.f_is_next:
            return self._backward
        if f_arrived and self.held_bytes + self.f_bytes[next_f] <= self.memory_limit:
            return self._forward
        if i_ready and not (f_arrived and self.owes_w):
            return self._backward
        return self._weight_grad if self.owes_w else None

    def _forward(self, now: int) -> None:
        """Run F. On the last stage its gradient is there when it ends."""
        chunk = self.forwards_done
        self.free_at = now + self.f_ns[chunk]
        self.forwards_done = chunk + 1
        self.f_is_next = False
        self.held_bytes += self.f_bytes[chunk]
        self.order.append(4 * chunk + F)
        if self.after is None:
            self.gradient_at[chunk] = self.free_at
        else:
            self._send(self.after, self.after.f_input_at, chunk)

    def _backward(self, now: int) -> None:
        """Run I, or B where the backward stays whole."""
        number = self.backwards_done
        chunk = self.backward_order[number]
        self.free_at = now + self.i_ns[chunk]
        self.backwards_done = number + 1
        self.f_is_next = True
        self.begun[chunk] = now
        self.held_bytes -= self.f_bytes[chunk]
        kind = I
        if self.may_split[chunk]:
            self.held_bytes += self.weight_grad_bytes[chunk]
            self.split.append(chunk)
        else:
            kind = B
            self.free_at += self.w_ns[chunk]
        self.order.append(4 * chunk + kind)
        if self.before is not None:
            self._send(self.before, self.before.gradient_at, chunk)

    def _weight_grad(self, now: int) -> None:
        """Run W."""
        chunk = self.split[self.weights_done]
        self.free_at = now + self.w_ns[chunk]
        self.weights_done += 1
        self.ended[chunk] = self.free_at
        self.held_bytes -= self.weight_grad_bytes[chunk]
        self.order.append(4 * chunk + W)

    def _send(self, to: "_Stage", inputs_at: list[int], chunk: int) -> None:
        """Note when a chunk that is done at `free_at` arrives at a neighbour."""
        arrival = self.free_at + self.send_ns[chunk]
        inputs_at[chunk] = arrival
        if to.free_at <= arrival:
            heappush(self.events, (arrival, to.number))


def play(sizes: Sequence[int], costs: ChunkCosts, memory_limit: Sequence[int]) -> Played | None:
    """Play one step and return every stage's order and times; None if a unit alone does not fit.

    sizes: how many chunks each unit has
    costs: nanoseconds and bytes of every chunk on every stage
    memory_limit: bytes of each stage
    """
    first_chunks = list(accumulate(sizes, initial=0))
    backward_order = [first_chunks[unit] + index for unit, index in backward_names(sizes)]
    events: Events = [(0, number) for number in range(len(memory_limit))]
    stages = []
    for number, limit in enumerate(memory_limit):
        stages.append(_Stage(number, sizes, costs, limit, backward_order, events))
    for before, after in pairwise(stages):
        before.after = after
        after.before = before
    while events:
        now, number = heappop(events)
        stage = stages[number]
        if now < stage.free_at:
            continue  # at work: an event of its own follows when it is free
        action = stage.most_urgent(now)
        if action is not None:  # otherwise what a neighbour sends comes with an event
            action(now)
            heappush(events, (stage.free_at, number))
    if any(stage.backwards_done < stage.count or stage.owes_w for stage in stages):
        return None
    return Played(
        makespan=max((stage.free_at for stage in stages), default=0),
        orders=[stage.order for stage in stages],
        begun=[stage.begun for stage in stages],
        ended=[stage.ended for stage in stages],
    )


def actions_of(played: Played, sizes: Sequence[int], costs: ChunkCosts) -> Actions:
    """Return [stage] the played order as actions, I and W joined to B if that delays no stage."""
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
    """Return the order with a B for every I that its W follows at once, if no stage needed the I
    alone.

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
