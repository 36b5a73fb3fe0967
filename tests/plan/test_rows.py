"""Where every token of a plan stands, by arrays: the same as `shard.py` says, rank by rank."""

import random

import numpy as np
import pytest

from hf_flexseq.plan import Plan
from hf_flexseq.plan.rows import Destinations, parts_of, shards_of, zone_rows
from hf_flexseq.plan.shard import make_shard, remapped
from hf_flexseq.topology import Topology
from tests.plans import random_plan


def drawn(seed):
    """A random plan, many of its groups of several sequences, and its topology."""
    rng = random.Random(seed)
    nodes = rng.choice((1, 1, 2, 3))
    topology = Topology(nodes=nodes, ranks_per_node=rng.randint(1, 9 // nodes))
    lengths = [rng.choice((1, 2, 3, rng.randint(1, 60))) for _ in range(rng.randint(1, 25))]
    shared = 0.8 if topology.world_size > 1 else None
    return random_plan(lengths, topology.world_size, rng, nodes=nodes, shared=shared), topology


def shards_one_by_one(plan, rank, topology):
    shards = []
    for micro_batch in plan.micro_batches:
        shard = make_shard(micro_batch, plan.lengths, rank)
        if micro_batch.remap:
            shard = remapped(shard, micro_batch, plan.lengths, topology)
        shards.append(shard)
    return shards


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("is_received", [False, True])
def test_shards_are_those_that_are_made_one_by_one(seed, is_received):
    plan, topology = drawn(seed)
    taken = Plan.from_bytes(plan.to_bytes()) if is_received else plan
    for rank in range(topology.world_size):
        assert shards_of(taken, rank, topology) == shards_one_by_one(plan, rank, topology)


@pytest.mark.parametrize("seed", range(30))
def test_every_part_of_a_sequence_is_where_a_shard_has_it(seed):
    """Rows of all ranks, of one sequence after the other."""
    plan, topology = drawn(seed)
    arrays = plan.arrays
    zones = zone_rows(plan, topology.world_size)
    found = {}
    for place, sequence in enumerate(arrays.sequences.tolist()):
        group = arrays.group_of[place]
        indices = np.arange(arrays.degrees[group])
        parts = parts_of(arrays, np.full_like(indices, place), indices)
        for index, start, stop, row in zip(*map(np.ndarray.tolist, parts), strict=True):
            rank = int(arrays.starts[group]) + index
            row += int(zones.row[zones.first[group] + index])
            found[int(arrays.batch_of[group]), rank, row] = (sequence, start, stop)
    wanted = {}
    for batch, micro_batch in enumerate(plan.micro_batches):
        for rank in range(topology.world_size):
            shard = make_shard(micro_batch, plan.lengths, rank)
            assert zones.tokens[batch, rank] == shard.attention_tokens
            row = 0
            for part in shard.slices:
                wanted[batch, rank, row] = (part.sequence, part.start, part.stop)
                row += part.tokens
    assert found == wanted


@pytest.mark.parametrize("seed", range(30))
def test_rows_go_to_whom_the_moves_say(seed):
    plan, topology = drawn(seed)
    world_size = topology.world_size
    tokens = zone_rows(plan, world_size).tokens
    shards = [shards_one_by_one(plan, rank, topology) for rank in range(world_size)]
    where = Destinations(tokens, [shard.moves for shard in shards[0]])
    for batch in range(len(plan.micro_batches)):
        # by rank, (rank, row in attention) of every row outside of it
        rows = []
        for rank in range(world_size):
            held = [(rank, row) for row in range(tokens[batch, rank])]
            rows.append(held[: tokens[batch, rank] - sum(n for _, n in shards[rank][batch].given)])
        for move in shards[0][batch].moves:
            source = shards[move.source][batch]
            first = tokens[batch, move.source] - sum(n for _, n in source.given)
            first += sum(n for target, n in source.given if target < move.target)
            rows[move.target] += [(move.source, first + row) for row in range(move.tokens)]
        for rank, wanted in enumerate(rows):
            assert len(wanted) == shards[rank][batch].linear_tokens
            for row, (source, row_there) in enumerate(wanted):
                counted = where.first_row[batch * world_size + source] + row_there
                _, _, _, holder, found = where.cut(np.array([counted]), np.array([1]))
                assert (int(holder[0]), int(found[0])) == (batch * world_size + rank, row)
        # stretches of several rows are cut where they part
        whole = tokens[batch].sum()
        if whole:
            _, _, sizes, holders, _ = where.cut(
                where.first_row[[batch * world_size]], np.array([whole])
            )
            held = np.bincount(holders, weights=sizes, minlength=(batch + 1) * world_size)
            assert held[batch * world_size :][:world_size].tolist() == [len(r) for r in rows]
