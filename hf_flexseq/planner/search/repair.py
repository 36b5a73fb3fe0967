"""Repair a complete candidate by small changes: the fullest rank of each micro-batch gives
something away.

Only the fullest rank of a micro-batch sets its seconds, so only a change that takes time off that
rank can help. In a change, one of its rows goes to another block or micro-batch, and nothing or a
row from there comes to where the row was. All changes of a micro-batch are priced at once, and the
best is made. Round by round, until nothing helps:

1. Between ranks. A row on the fullest rank alone goes to another rank, or is swapped with a row
   that is on another rank alone. The change is worth

       value = min(time that the fullest rank loses, slack that is left where it goes)

2. Between blocks. Where that does not help, and the ranks of the micro-batch idle for more than a
   fraction of it, any row with a part on the fullest rank goes to any block, or is swapped with
   any row. Such changes matter where memory is tight. Here a change may also lengthen another
   micro-batch by less than it shortens this one. A gain of the step counts `PERMILLE` times.

The slow twin is a fresh count of the repaired plan, in tests/planner/test_parts.py: the tests
"filling and repair agree with a fresh count and never worsen" and "repair keeps groups laminar".
"""

from dataclasses import dataclass, replace

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import PERMILLE, Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, lockstep_objective

# First index of arrays that hold nanoseconds and tokens.
TIME, TOKENS = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """A row goes to another slot: a block in a micro-batch."""

    row: int
    batch: int
    """Micro-batch that the row goes to."""
    block: int
    """Block that the row goes to."""
    partner: int | None
    """Row that comes from there in exchange."""


def repair(problem: Problem, filled: Filled) -> Filled:
    """Return a candidate after changes off its fullest ranks, never slower than before."""
    state = replace(  # arrays of its own, which are changed in place
        filled,
        load=filled.load.copy(),
        tokens=filled.tokens.copy(),
        row2block=filled.row2block.copy(),
        row2batch=filled.row2batch.copy(),
    )
    batches = len(state.load)
    stuck: set[int] = set()  # micro-batches that no change helps
    pairs_each = len(problem.lengths) + batches * len(problem.blocks.start)
    tries = EFFORT.repair_pairs // pairs_each  # of changes between blocks
    for _ in range(EFFORT.repair_rounds):
        for batch in [batch for batch in range(batches) if batch not in stuck]:
            change = _between_ranks(problem, state, batch)
            if change is None and tries > 0 and idles(state.load[batch], EFFORT.idle):
                tries -= 1
                change = _between_blocks(problem, state, batch)
            if change is None:
                stuck.add(batch)
            else:
                _make(problem, state, change)
                stuck.discard(change.batch)
        if len(stuck) == batches:
            break
    return replace(state, objective=lockstep_objective(problem, state.load))


def idles(load: Int64Array, permille: int) -> bool:
    """Return True if the ranks of a micro-batch idle for more than a fraction of it. load: [ranks]
    nanoseconds."""
    work, most = int(load.sum()), int(load.max()) * len(load)
    return (most - work) * PERMILLE > most * permille


def _make(problem: Problem, state: Filled, change: _Change) -> None:
    """Change where rows are."""
    old = state.row2batch[change.row], state.row2block[change.row]
    moves = [(change.row, (change.batch, change.block))]
    if change.partner is not None:
        moves.append((change.partner, old))
    for row, new in moves:
        _count(problem, state, row, -1)
        state.row2batch[row], state.row2block[row] = new
        _count(problem, state, row, 1)


def _count(problem: Problem, state: Filled, row: int, sign: int) -> None:
    """Add a row to the ranks of its block (sign 1), or take it away from them (sign -1)."""
    batch, block = state.row2batch[row], state.row2block[row]
    shape = problem.blocks.shape_of[block]
    ranks = slice(problem.blocks.start[block], problem.blocks.stop[block])
    state.load[batch, ranks] += sign * problem.times[row, shape]
    state.tokens[batch, ranks] += sign * problem.needs[row, shape]


# ---- between ranks


def _between_ranks(problem: Problem, state: Filled, batch: int) -> _Change | None:
    """Return the best change between a micro-batch's fullest rank and another rank, or None."""
    world = problem.world
    fullest = int(state.load[batch].argmax())
    movers = np.flatnonzero((state.row2batch == batch) & (state.row2block == fullest))
    if not len(movers):
        return None
    times = problem.times[:, 0]  # [sequences] nanoseconds on one rank
    lengths = problem.lengths  # [sequences] tokens
    # 1. Partners: every sequence that is alone on a rank, and no sequence at all on every rank of
    #    every micro-batch.
    slack = (state.load.max(axis=1)[:, None] - state.load).ravel()
    memory = (problem.cap - state.tokens).ravel()  # [micro_batches * ranks]
    alone = np.flatnonzero(state.row2block < world)  # [alone]
    alone_slots = state.row2batch[alone] * world + state.row2block[alone]
    nothing = np.zeros(len(slack), dtype=np.int64)
    partner_slots = np.concatenate([alone_slots, np.arange(len(slack))])  # [partners]
    partner_times = np.concatenate([times[alone], nothing])  # [partners]
    partner_lengths = np.concatenate([lengths[alone], nothing])  # [partners]
    # 2. What the mover's rank loses, and the other rank gets: [movers, partners].
    gain = times[movers][:, None] - partner_times
    tokens = lengths[movers][:, None] - partner_lengths
    # 3. What the change is worth: the lesser of what is lost and what is then left of the slack.
    value = np.minimum(gain, slack[partner_slots] - gain)  # [movers, partners]
    no_memory = tokens > memory[partner_slots]
    no_memory |= -tokens > memory[batch * world + fullest]
    value[no_memory] = -1
    mover, partner = divmod(int(value.argmax()), len(partner_slots))
    if value[mover, partner] <= 0:
        return None
    new_batch, rank = divmod(int(partner_slots[partner]), world)
    is_swap = partner < len(alone)
    return _Change(
        row=int(movers[mover]),
        batch=new_batch,
        block=rank,  # block r < world is rank r alone
        partner=int(alone[partner]) if is_swap else None,
    )


# ---- between blocks


def _between_blocks(problem: Problem, state: Filled, batch: int) -> _Change | None:
    """Return the best change of a row with a part on a micro-batch's fullest rank, or None."""
    blocks = problem.blocks
    rows, width = len(problem.lengths), len(blocks.start)
    ranks = np.stack([state.load, state.tokens])  # [2, micro_batches, ranks]
    slots = _fullest(problem, ranks)  # [2, micro_batches, blocks]
    slowest = state.load.max(axis=1)  # [micro_batches]
    amounts = np.stack([problem.times, problem.needs])  # [2, sequences, shapes]
    # 1. Movers, and what the other ranks of their micro-batch have.
    on_fullest = blocks.inside[state.row2block, int(state.load[batch].argmax())]  # [sequences]
    movers = np.flatnonzero((state.row2batch == batch) & on_fullest)  # [movers]
    old_block = state.row2block[movers]  # [movers]
    old_shape = blocks.shape_of[old_block]  # [movers]
    gone = amounts[:, movers, old_shape]  # [2, movers]
    on_rank = blocks.inside[old_block, : problem.world]  # [movers, ranks]
    outside = np.where(on_rank, 0, state.load[batch]).max(axis=1)  # [movers]
    # 2. Partners: every sequence, and no sequence at all on every block of every micro-batch.
    nothing = np.zeros((2, slots[0].size, amounts.shape[2]), dtype=np.int64)
    partner_amounts = np.concatenate([amounts, nothing], axis=1)  # [2, partners, shapes]
    row_slots = state.row2batch * width + state.row2block
    partner_slots = np.concatenate([row_slots, np.arange(slots[0].size)])  # [partners]
    new_batch, new_block = np.divmod(partner_slots, width)
    shape = blocks.shape_of[new_block]  # [partners]
    left = slots[:, new_batch, new_block] - partner_amounts[:, np.arange(len(shape)), shape]
    # 3. Only those partners that may gain anything, by the least that a mover brings.
    least = left + amounts[:, movers].min(axis=1)[:, shape]  # [2, partners]
    most_gain = slowest[batch] - outside.min()
    possible = (least[TIME] < slowest[new_batch] + most_gain) & (least[TOKENS] <= problem.cap)
    possible[rows + batch * width :][:width] = True  # the movers may be what their ranks have
    chosen = np.flatnonzero(possible & (slowest[new_batch] > 0))
    new_batch, new_block, shape = new_batch[chosen], new_block[chosen], shape[chosen]
    # 4. What the fullest ranks of both blocks then have, [2, movers, partners].
    come = amounts[:, movers][:, :, shape]
    back = partner_amounts[:, chosen][:, :, old_shape].swapaxes(1, 2)
    there = left[:, None, chosen] + come
    here = (slots[:, batch, old_block] - gone)[:, :, None] + back
    # Inside the micro-batch, moves go to blocks without the mover; nested blocks are not swapped.
    is_move = chosen >= rows
    is_inside = new_batch == batch
    within = np.flatnonzero(is_inside & is_move)
    without = _fullest(problem, ranks[:, batch, None] - gone[:, :, None] * on_rank)
    there[:, :, within] = without[:, :, new_block[within]] + come[:, :, within]
    is_nested = (blocks.inside | blocks.around)[old_block[:, None], new_block]
    is_nested &= is_inside & ~is_move
    # 5. What the step gains, or else what the fullest rank gains.
    gain = slowest[batch] - here[TIME]
    slack = slowest[new_batch] - there[TIME]
    shorter = np.minimum(gain, (slowest[batch] - outside)[:, None])
    step = np.where(is_inside, np.minimum(shorter, slack), shorter + np.minimum(slack, 0))
    value = np.where(step > 0, step * PERMILLE, np.where(step == 0, np.minimum(gain, slack), -1))
    value[(np.maximum(there, here)[TOKENS] > problem.cap) | is_nested] = -1
    mover, index = divmod(int(value.argmax()), len(chosen))
    if value[mover, index] <= 0:
        return None
    return _Change(
        row=int(movers[mover]),
        batch=int(new_batch[index]),
        block=int(new_block[index]),
        partner=None if is_move[index] else int(chosen[index]),
    )


def _fullest(problem: Problem, ranks: Int64Array) -> Int64Array:
    """Return the value of each block's fullest rank: [..., ranks] -> [..., blocks]."""
    blocks = problem.blocks
    fullest: Int64Array = np.maximum.reduceat(ranks[..., blocks.ranks], blocks.first, axis=-1)
    return fullest
