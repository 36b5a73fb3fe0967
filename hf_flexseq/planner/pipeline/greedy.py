"""Order the stages' actions by playing the step: a stage that is free runs its most urgent action.

    I, F    alternate while both are ready. I is the gradient of the input, for which the previous
            stage waits; F is a forward, which needs room for its activations.
    W       when neither is ready. W is the gradient of the weights, which no stage waits for: it
            fills gaps and makes room.

One pass over the step, without a flush:

1. Units start in the given order and go backward in that order. A unit that has begun can
   therefore always finish, and the only limit is that each unit alone must fit.
2. Bytes limit what is in flight, so every sequence counts by its size: after a short one there is
   room for others.
3. A backward stays whole (B) if a chunk would hold more from I to W than before, as with
   checkpointed layers, which are recomputed in I.
4. I and W become one B if the previous stage did not wait for the I (`actions_of`).
5. In steps of very many chunks only the last backwards are split: bubbles are short there, and
   planning must not take long.

There are other `Policy`s, each sometimes the best, and single actions can be delayed
(`deviations`): the best order of few chunks seldom follows a rule.

The slow reference, a search over all orders, is `tests/planner/pipeline_exact.py`.

Rejected as the only rule:

* I before F: a unit's gradients come in a burst and its room is free too late, up to a quarter
  slower with equal sequences and Seq1F1B's memory.
* F before I: 1 % slower.
* A window of P - r - 1 + k chunks per sequence instead of bytes: half a percent slower at the
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
from hf_flexseq.planner.pipeline.orders import backward_names, forward_names

# Rule 5, in chunks of the step. It bounds planning time, which the benchmark of pipelines
# (scripts/benchmarks/pipeline.py --parts planning) prints.
SPLIT_ALL = 400  # up to so many chunks, every backward may be split
SPLIT_LAST = 100  # of more chunks, only the last so many

NEVER = 1 << 62  # a time in nanoseconds that no step reaches

# An order of a stage's actions as ints: 4 x index of the chunk + index of the kind in KINDS.
Order = list[int]
# The kinds as indices in KINDS, and two without an action: NOTHING is ready, or WAIT delays one
# until the next I or F is due.
F, B, I, W, NOTHING, WAIT = range(6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A rule for choosing between actions that are ready."""

    first: str = "turns"
    """First of I and F when both are ready: "I", "F", or the one that was not last ("turns")."""

    w_first: bool = False
    """True if every W follows its I at once."""

    w_delay: int = 0
    """Halves of a W's time: no W begins if an I or F will be ready within them."""


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
    """One stage during a play: the costs of its chunks, what it has done, and what it waits for.

    Lists have one value for each chunk unless their comment says otherwise.
    """

    def __init__(self, number: int, sizes: Sequence[int], costs: ChunkCosts, limit: int) -> None:
        count = sum(sizes)
        self.number = number
        # what is known of every chunk
        self.f_ns = costs.forward[number]
        self.i_ns = costs.input_grad[number]
        self.w_ns = costs.weight_grad[number]
        self.activation_bytes = costs.held[number]
        self.weight_grad_bytes = costs.owed[number]
        carried = costs.carried[number]
        self.f_bytes, self.i_frees = _bytes_of_actions(sizes, self.activation_bytes, carried)
        self.may_split = _may_split(sizes, self.weight_grad_bytes, self.activation_bytes)
        self.memory_limit = limit - max(carried, default=0)
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


class _Play:
    """A play of one step: stages, and events at which a stage may have work."""

    def __init__(
        self,
        sizes: Sequence[int],
        costs: ChunkCosts,
        memory_limit: Sequence[int],
        policy: Policy,
        deviations: Mapping[int, int],
    ) -> None:
        self.count = sum(sizes)
        self.send_ns = costs.send
        self.policy = policy
        self.backward_order = _backward_order(sizes)  # the n-th backward -> its chunk
        self.first_split = self.count - SPLIT_LAST if self.count > SPLIT_ALL else 0
        self.f_after_i = policy.first != "I"
        self.f_after_f = policy.first == "F"
        self.stages = []
        for number, limit in enumerate(memory_limit):
            stage = _Stage(number, sizes, costs, limit)
            stage.f_is_next = self.f_after_f
            self.stages.append(stage)
        self.deviations = dict(deviations)
        self.actions = 0  # done so far, of all stages
        self.events = [(0, stage.number) for stage in self.stages]  # (time, stage)

    def run(self) -> Played | None:
        """Run every action. See `play`."""
        run_action = {F: self._forward, I: self._backward, W: self._weight_grad}
        while self.events:
            now, number = heappop(self.events)
            stage = self.stages[number]
            if now < stage.free_at:
                continue  # at work: an event of its own follows when it is free
            i_at, f_at = self._ready_times(stage)
            kind = self._choice(stage, now, i_at, f_at)
            if kind == NOTHING:
                continue  # what a neighbour sends comes with an event
            if kind == WAIT:
                later = [at for at in (i_at, f_at) if now < at < NEVER]
                if later:
                    heappush(self.events, (min(later), number))
                continue
            self.actions += 1
            stage.free_at = run_action[kind](stage, now)
            heappush(self.events, (stage.free_at, number))
        return self._played()

    def _played(self) -> Played | None:
        """Return the step; None if a stage has a backward or a weight gradient left to do."""
        for stage in self.stages:
            if stage.backwards_done < self.count or stage.owes_w:
                return None
        return Played(
            makespan=max((stage.free_at for stage in self.stages), default=0),
            orders=[stage.order for stage in self.stages],
            begun=[stage.begun for stage in self.stages],
            ended=[stage.ended for stage in self.stages],
        )

    # ---- choose

    def _ready_times(self, stage: _Stage) -> tuple[int, int]:
        """Return the nanoseconds from which on the next I and the next F of a stage are ready."""
        i_at = NEVER
        f_at = NEVER
        if stage.backwards_done < self.count:
            i_at = stage.gradient_at[self.backward_order[stage.backwards_done]]
        next_f = stage.forwards_done
        if next_f < self.count:
            held_bytes = stage.held_bytes + stage.f_bytes[next_f]
            if held_bytes <= stage.memory_limit:
                f_at = stage.f_input_at[next_f]
        return i_at, f_at

    def _choice(self, stage: _Stage, now: int, i_at: int, f_at: int) -> int:
        """Return the action that a stage does now, by the policy and its deviations."""
        kind = self._most_urgent(stage, now, i_at, f_at)
        if kind < NOTHING and self.actions in self.deviations:
            option = self.deviations.pop(self.actions)
            return _other(kind, option, i_at <= now, f_at <= now, stage.owes_w)
        return kind

    def _most_urgent(self, stage: _Stage, now: int, i_at: int, f_at: int) -> int:
        """Return the action that the policy chooses, NOTHING or WAIT."""
        owes_w = stage.owes_w
        if owes_w and self.policy.w_first:
            return W
        if i_at <= now:
            return F if f_at <= now and stage.f_is_next else I
        if f_at <= now:
            return F
        if not owes_w:
            return NOTHING
        if self.policy.w_delay:
            w_ns = stage.w_ns[stage.split[stage.weights_done]]
            if min(i_at, f_at) < now + self.policy.w_delay * w_ns // 2:
                return WAIT
        return W

    # ---- run

    def _backward(self, stage: _Stage, now: int) -> int:
        """Run I, or B where the backward stays whole. Return when it ends."""
        number = stage.backwards_done
        chunk = self.backward_order[number]
        stop = now + stage.i_ns[chunk]
        stage.backwards_done = number + 1
        stage.f_is_next = self.f_after_i
        stage.begun[chunk] = now
        stage.held_bytes -= stage.i_frees[chunk] + stage.activation_bytes[chunk]
        kind = I
        if number >= self.first_split and stage.may_split[chunk]:
            stage.held_bytes += stage.weight_grad_bytes[chunk]
            stage.split.append(chunk)
        else:
            kind = B
            stop += stage.w_ns[chunk]
        stage.order.append(4 * chunk + kind)
        if stage.number:
            before = self.stages[stage.number - 1]
            self._send(before, before.gradient_at, chunk, stop)
        return stop

    def _forward(self, stage: _Stage, now: int) -> int:
        """Run F. Return when it ends; on the last stage its gradient is there then."""
        chunk = stage.forwards_done
        stop = now + stage.f_ns[chunk]
        stage.forwards_done = chunk + 1
        stage.f_is_next = self.f_after_f
        stage.held_bytes += stage.f_bytes[chunk]
        stage.order.append(4 * chunk + F)
        if stage.number + 1 == len(self.stages):
            stage.gradient_at[chunk] = stop
        else:
            after = self.stages[stage.number + 1]
            self._send(after, after.f_input_at, chunk, stop)
        return stop

    def _weight_grad(self, stage: _Stage, now: int) -> int:
        """Run W. Return when it ends."""
        chunk = stage.split[stage.weights_done]
        stop = now + stage.w_ns[chunk]
        stage.weights_done += 1
        stage.ended[chunk] = stop
        stage.held_bytes -= stage.weight_grad_bytes[chunk]
        stage.order.append(4 * chunk + W)
        return stop

    def _send(self, to: _Stage, inputs_at: list[int], chunk: int, stop: int) -> None:
        """Note when a chunk that is done at `stop` arrives at a neighbour."""
        arrival = stop + self.send_ns[chunk]
        inputs_at[chunk] = arrival
        if to.free_at <= arrival:
            heappush(self.events, (arrival, to.number))


def play(
    sizes: Sequence[int],
    costs: ChunkCosts,
    memory_limit: Sequence[int],
    policy: Policy = Policy(),
    deviations: Mapping[int, int] | None = None,
) -> Played | None:
    """Play one step and return every stage's order and times.

    sizes: how many chunks each unit has
    costs: nanoseconds and bytes of every chunk on every stage
    memory_limit: bytes of each stage
    deviations: number of an action, counted over all stages -> what is done instead: the second
        most urgent action (1), the third (2), or nothing if there are fewer

    Returns None if a unit alone does not fit, or if a stage would wait for ever.
    """
    return _Play(sizes, costs, memory_limit, policy, deviations or {}).run()


def _other(kind: int, option: int, i_ready: bool, f_ready: bool, w_ready: bool) -> int:
    """Return the option-th other action that is ready instead of `kind`, or WAIT."""
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
    """Return the chunks in backward order: unit by unit, each unit's last chunk first."""
    first_chunks = list(accumulate(sizes, initial=0))
    order = []
    for unit, index in backward_names(sizes):
        order.append(first_chunks[unit] + index)
    return order


def _may_split(
    sizes: Sequence[int], weight_grad_bytes: Sequence[int], activation_bytes: Sequence[int]
) -> list[bool]:
    """Return [chunk] True if its unit's chunks hold no more from I to W than before I."""
    row: list[bool] = []
    for size in sizes:
        first = len(row)
        row += [weight_grad_bytes[first] <= activation_bytes[first]] * size
    return row


def _bytes_of_actions(
    sizes: Sequence[int], activation_bytes: Sequence[int], carried: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return [chunk] the bytes that an F takes, and those that an I frees besides the activations.

    Keys and values of a cut sequence come with its first chunk's F and go with that chunk's I.
    """
    f_bytes = list(activation_bytes)
    i_frees = [0] * len(activation_bytes)
    for chunk in list(accumulate(sizes, initial=0))[:-1]:
        f_bytes[chunk] += carried[chunk]
        i_frees[chunk] = carried[chunk]
    return f_bytes, i_frees


def actions_of(
    played: Played, sizes: Sequence[int], costs: ChunkCosts
) -> tuple[tuple[Action, ...], ...]:
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
