"""Repair a complete candidate by small changes: the fullest rank of each micro-batch gives
something away.

Only the fullest rank of a micro-batch sets its seconds, so only a change that takes time off that
rank can help. In a change, a row on it alone goes to another rank or micro-batch, and nothing or a
row from there comes to where the row was. All changes of a micro-batch are priced at once, and the
best is made, round by round, until nothing helps. A change is worth

    value = min(time that the fullest rank loses, slack that is left where it goes)

Rejected: changes of rows on several ranks. On 1,200 steps they gained 0.02 % beside the search of
single micro-batches (`auto.py`), and 7 % at best.

The slow twin is a fresh count of the repaired plan, in tests/planner/test_parts.py.
"""

from dataclasses import dataclass, replace

import numpy as np

from hf_flexseq.cost import Int64Array
from hf_flexseq.planner.problem import PERMILLE, Problem
from hf_flexseq.planner.search.effort import EFFORT
from hf_flexseq.planner.search.fill import Filled, lockstep_objective


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """A row goes from one rank to another."""

    row: int
    batch: int
    """Micro-batch that the row goes to."""
    rank: int
    """Rank that the row goes to."""
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
    for _ in range(EFFORT.repair_rounds):
        for batch in [batch for batch in range(batches) if batch not in stuck]:
            change = _between_ranks(problem, state, batch)
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
    """Change where rows are. Block r < world is rank r alone."""
    old = state.row2batch[change.row], state.row2block[change.row]
    moves = [(change.row, (change.batch, change.rank))]
    if change.partner is not None:
        moves.append((change.partner, old))
    for row, new in moves:
        for sign, slot in ((-1, (state.row2batch[row], state.row2block[row])), (1, new)):
            state.load[slot] += sign * problem.times[row, 0]
            state.tokens[slot] += sign * problem.lengths[row]
        state.row2batch[row], state.row2block[row] = new


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
        rank=rank,
        partner=int(alone[partner]) if is_swap else None,
    )
