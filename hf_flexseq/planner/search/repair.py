"""Repair a complete candidate by small changes: the fullest rank of each micro-batch gives
something away.

Only the fullest rank of a micro-batch sets its seconds, so only a change that takes time off that
rank can help. Round by round, until nothing helps:

1. Move or swap. A sequence that is on the fullest rank alone goes to the (micro-batch, rank) with
   the most slack, or is swapped with a shorter sequence of another rank. All pairs are priced at
   once, and the best is made:

       value = min(what the fullest rank loses, slack that is left where it goes)

2. Reshape. Where that does not help, any sequence with a part on the fullest rank goes to the
   block with the most slack left, which may have more ranks or fewer than its block now.

Each change is the best of all, so few are needed. On free ranks, whose clocks run on from
micro-batch to micro-batch, step 1 alone relieves the rank that ends last.

The slow twin is a fresh count of the repaired plan, in tests/planner/test_parts.py: the tests
"filling and repair agree with a fresh count and never worsen" and "repair keeps groups laminar".
"""

from dataclasses import dataclass, replace

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, completed, free_clocks, lockstep_objective


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """A change between two ranks, possibly of two micro-batches."""

    row: int
    """The sequence that moves, on one rank."""
    slot: int
    """The slot that it goes to: micro-batch x world + rank."""
    partner: int | None
    """The sequence that comes from there in exchange, on one rank, too."""


def repair(problem: Problem, filled: Filled) -> Filled:
    """Return a candidate after moves and swaps off its fullest ranks, never slower than before."""
    state = replace(  # arrays of its own, which are changed in place
        filled,
        load=filled.load.copy(),
        tokens=filled.tokens.copy(),
        row2block=filled.row2block.copy(),
        row2batch=filled.row2batch.copy(),
    )
    if problem.free:
        return _repair_free(problem, state)
    active = list(range(len(state.load)))  # micro-batches that the last round has improved
    reshapes = EFFORT.reshape_cells // (len(state.load) * len(problem.blocks.ranks))
    for _ in range(EFFORT.repair_rounds):
        # 1. Moves and swaps.
        stuck = [batch for batch in active if not _relieve(problem, state, batch)]
        # 2. Reshapes, as many as are affordable.
        reshaped = [batch for batch in stuck[:reshapes] if _reshape(problem, state, batch)]
        reshapes = max(0, reshapes - len(stuck))
        active = [batch for batch in active if batch in reshaped or batch not in stuck]
        if not active:
            break
    return replace(state, objective=lockstep_objective(problem, state.load))


def _repair_free(problem: Problem, state: Filled) -> Filled:
    """Return the candidate after exchanges off the free rank that ends last."""
    batches = len(state.load)
    clock = free_clocks(problem, state.row2block, state.row2batch, state.load)  # [ranks]
    for _ in range(EFFORT.repair_rounds):
        last = int(clock.argmax())
        # A rank that has nothing in a micro-batch yet would pay the constant for it.
        opening = (state.tokens == 0) * problem.constant  # [micro_batches, ranks]
        slack = clock[last] - clock - opening  # [micro_batches, ranks]
        movers = np.flatnonzero(state.row2block == last)  # [movers]
        exchange = _best_exchange(problem, state, movers, slack.ravel())
        if exchange is None:
            break
        row2block_before = state.row2block.copy()
        row2batch_before = state.row2batch.copy()
        end_before = clock.max()
        _make_exchange(problem, state, exchange)
        clock = free_clocks(problem, state.row2block, state.row2batch, state.load)
        if clock.max() > end_before:
            # A group waits for what was moved: take it back.
            return completed(problem, row2block_before, row2batch_before, batches)
    return completed(problem, state.row2block, state.row2batch, batches)


# ---- moves and swaps between single ranks


def _relieve(problem: Problem, state: Filled, batch: int) -> bool:
    """Lower the fullest rank of a micro-batch by the best move or swap; False when none helps."""
    fullest = int(state.load[batch].argmax())
    on_fullest = (state.row2batch == batch) & (state.row2block == fullest)  # [sequences]
    slack = state.load.max(axis=1)[:, None] - state.load  # [micro_batches, ranks]
    exchange = _best_exchange(problem, state, np.flatnonzero(on_fullest), slack.ravel())
    if exchange is None:
        return False
    _make_exchange(problem, state, exchange)
    return True


def _best_exchange(
    problem: Problem, state: Filled, movers: Int64Array, slack: Int64Array
) -> _Exchange | None:
    """Return the exchange that gains most, or None when no exchange gains anything.

    movers: [movers] rows on one rank each, of which one may go. slack: [micro_batches * ranks]
    nanoseconds that each slot may take, 0 where the movers are.
    """
    if not len(movers):
        return None
    times = problem.times[:, 0]  # [sequences] nanoseconds on one rank
    lengths = problem.lengths  # [sequences] tokens
    # 1. Partners: every sequence that is alone on a rank, and no sequence at all on every slot.
    alone = np.flatnonzero(state.row2block < problem.world)  # [alone]
    alone_slots = state.row2batch[alone] * problem.world + state.row2block[alone]
    nothing = np.zeros(state.tokens.size, dtype=np.int64)  # [slots]
    partner_slots = np.concatenate([alone_slots, np.arange(state.tokens.size)])  # [partners]
    partner_times = np.concatenate([times[alone], nothing])  # [partners]
    partner_lengths = np.concatenate([lengths[alone], nothing])  # [partners]
    # 2. What the mover's rank loses, and the other rank gets: [movers, partners].
    gain = times[movers][:, None] - partner_times
    tokens = lengths[movers][:, None] - partner_lengths
    # 3. What the exchange is worth: the lesser of what is lost and what is then left of the slack.
    value = np.minimum(gain, slack[partner_slots] - gain)  # [movers, partners]
    memory = problem.cap - state.tokens  # [micro_batches, ranks]
    no_memory_there = tokens > memory.ravel()[partner_slots]
    memory_here = memory[state.row2batch[movers], state.row2block[movers]]  # [movers]
    no_memory_here = -tokens > memory_here[:, None]
    value[no_memory_there | no_memory_here] = -1
    mover, partner = np.unravel_index(int(value.argmax()), value.shape)
    if value[mover, partner] <= 0:
        return None
    is_swap = partner < len(alone)
    return _Exchange(
        row=int(movers[mover]),
        slot=int(partner_slots[partner]),
        partner=int(alone[partner]) if is_swap else None,
    )


def _make_exchange(problem: Problem, state: Filled, exchange: _Exchange) -> None:
    """Move a row to a slot, and its partner from that slot to where the row was."""
    row = exchange.row
    old = (int(state.row2batch[row]), int(state.row2block[row]))  # (micro-batch, rank)
    new = divmod(exchange.slot, problem.world)
    time = problem.times[row, 0]
    tokens = problem.lengths[row]
    state.row2batch[row], state.row2block[row] = new
    if exchange.partner is not None:
        time = time - problem.times[exchange.partner, 0]
        tokens = tokens - problem.lengths[exchange.partner]
        state.row2batch[exchange.partner], state.row2block[exchange.partner] = old
    state.load[old] -= time
    state.load[new] += time
    state.tokens[old] -= tokens
    state.tokens[new] += tokens


# ---- moves to blocks of any shape


def _reshape(problem: Problem, state: Filled, batch: int) -> bool:
    """Lower the fullest rank of a micro-batch by moving a row to any block; False when none helps.

    The row may be on several ranks, the fullest among them, and the block wider or narrower.
    """
    fullest = int(state.load[batch].argmax())
    on_fullest = problem.blocks.inside[state.row2block, fullest]  # [sequences]
    movers = np.flatnonzero((state.row2batch == batch) & on_fullest)  # [movers]
    if not len(movers):
        return False
    slack = _slack_after(problem, state, movers, batch)  # [movers, micro_batches, blocks]
    shape = problem.blocks.shape_of[state.row2block[movers]]  # [movers]
    gain = problem.times[movers, shape]  # [movers] nanoseconds that the fullest rank loses
    value = np.minimum(slack, gain[:, None, None])  # [movers, micro_batches, blocks]
    best = int(value.argmax())
    if value.flat[best] <= 0:
        return False
    mover, new_batch, new_block = np.unravel_index(best, value.shape)
    row = int(movers[mover])
    _count_row(problem, state, row, -1)
    state.row2block[row] = new_block
    state.row2batch[row] = new_batch
    _count_row(problem, state, row, 1)
    return True


def _slack_after(problem: Problem, state: Filled, movers: Int64Array, batch: int) -> Int64Array:
    """Return [movers, micro_batches, blocks] nanoseconds of slack once a mover is on a block.

    Slack is what the block's ranks have left below the fullest rank of their micro-batch as it is
    now; -1 where memory or an overlapping block forbids the move. The movers are in micro-batch
    `batch`.
    """
    blocks = problem.blocks
    load = _fullest_after(problem, state, movers, batch, (state.load, problem.times))
    tokens = _fullest_after(problem, state, movers, batch, (state.tokens, problem.needs))
    slowest = state.load.max(axis=1)  # [micro_batches]
    slack: Int64Array = slowest[None, :, None] - load
    slack[tokens > problem.cap] = -1
    if blocks.overlap:
        for used in np.unique(state.row2batch):
            in_use = state.row2block[state.row2batch == used]
            crossed = blocks.crossing[in_use].any(axis=0)  # [blocks]
            slack[:, used, crossed] = -1
    return slack


def _fullest_after(
    problem: Problem,
    state: Filled,
    movers: Int64Array,
    batch: int,
    figures: tuple[Int64Array, Int64Array],
) -> Int64Array:
    """Return [movers, micro_batches, blocks] what a block's fullest rank has with a mover on it.

    figures: [micro_batches, ranks] what each rank has now, and [sequences, shapes] what each row
    adds to the ranks of a block: nanoseconds or tokens.
    """
    rank_total, row_amount = figures
    blocks = problem.blocks
    shape = blocks.shape_of[state.row2block[movers]]  # [movers]
    on_rank = blocks.inside[state.row2block[movers], : problem.world]  # [movers, ranks]
    # 1. Without the mover: only its own micro-batch differs.
    fullest = np.repeat(_fullest_of_blocks(problem, rank_total)[None], len(movers), axis=0)
    own_amount = row_amount[movers, shape]  # [movers]
    without = rank_total[batch] - own_amount[:, None] * on_rank  # [movers, ranks]
    fullest[:, batch] = _fullest_of_blocks(problem, without)
    # 2. With the mover on the block.
    return fullest + row_amount[movers][:, None, blocks.shape_of]


def _fullest_of_blocks(problem: Problem, rank_total: Int64Array) -> Int64Array:
    """Return [..., blocks] what the fullest rank of each block has, of [..., ranks]."""
    blocks = problem.blocks
    fullest: Int64Array = np.maximum.reduceat(rank_total[:, blocks.ranks], blocks.first, axis=1)
    return fullest


def _count_row(problem: Problem, state: Filled, row: int, sign: int) -> None:
    """Add a row to the ranks of its block (sign 1), or take it away from them (sign -1)."""
    batch = state.row2batch[row]
    block = state.row2block[row]
    shape = problem.blocks.shape_of[block]
    ranks = slice(problem.blocks.start[block], problem.blocks.stop[block])
    state.load[batch, ranks] += sign * problem.times[row, shape]
    state.tokens[batch, ranks] += sign * problem.needs[row, shape]
