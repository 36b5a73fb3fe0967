"""Every token, with all of its columns, comes to the row that its shard and the moves give it."""

import random

import pytest
import torch

from hf_flexseq.plan import Plan
from hf_flexseq.plan.rows import shards_of
from hf_flexseq.steps.exchange import RowExchange, SourceRow
from tests.plan.test_rows import drawn, shards_one_by_one
from tests.ranks import join, run_threads

DTYPES = {
    "token_weights": torch.float32,
    "input_ids": torch.int64,
    "is_prompt": torch.bool,
    "labels": torch.int64,
    "scores": torch.bfloat16,
}


def columns_of(rows):
    """Columns [rows] that tell rows (sequence, position) apart, each of another dtype."""
    numbers = torch.tensor([100 * sequence + position for sequence, position in rows])
    columns = {}
    for name, dtype in DTYPES.items():
        value = numbers % 3 == 0 if dtype == torch.bool else numbers % 256
        columns[name] = value.to(dtype)
    columns["input_ids"] = numbers.to(torch.int64)
    return columns


def rows_one_by_one(plan, rank, topology):
    """By micro-batch, (sequence, position) of every row of a rank outside of attention: what it
    keeps of its own rows, then the last rows of those that give it some."""
    batches = []
    shards = [shards_one_by_one(plan, r, topology) for r in range(topology.world_size)]
    for batch in range(len(plan.micro_batches)):
        held = []  # by rank, in attention
        for shards_of_rank in shards:
            shard = shards_of_rank[batch]
            held.append([(s.sequence, t) for s in shard.slices for t in range(s.start, s.stop)])
        left = {
            r: len(held[r]) - sum(n for _, n in shards[r][batch].given) for r in range(len(held))
        }
        own = held[rank][: left[rank]]
        for move in shards[rank][batch].moves:
            if move.target == rank:
                own += held[move.source][left[move.source] :][: move.tokens]
            left[move.source] += move.tokens
        batches.append(own)
    return batches


def exchanged(rank, world_size, plan, topology, sources):
    own = [sequence for sequence, source in enumerate(sources) if source == rank]
    rows = [(sequence, position) for sequence in own for position in range(plan.lengths[sequence])]
    names = list(DTYPES)
    random.Random(rank).shuffle(names)  # ranks may have their columns in different orders
    columns = columns_of(rows)
    row = SourceRow(
        columns={name: columns[name] for name in names},
        lengths=tuple(plan.lengths[sequence] for sequence in own),
    )
    plan = Plan.from_bytes(plan.to_bytes())
    communicator = join(topology)
    shards = shards_of(plan, rank, topology)
    meetings = communicator.transport.hub.meetings
    before = meetings._next[rank]
    found = RowExchange(communicator)(row, plan, sources, shards)
    assert meetings._next[rank] - before == 1, "token exchange is one collective"
    assert [len(of["labels"]) for of in found] == [shard.linear_tokens for shard in shards]
    return found


@pytest.mark.parametrize("seed", range(25))
def test_tokens_come_to_their_rows(seed):
    plan, topology = drawn(seed)
    world_size = topology.world_size
    rng = random.Random(seed)
    sources = sorted(rng.randrange(world_size) for _ in plan.lengths)  # some draw nothing
    by_rank = run_threads(exchanged, world_size, plan, topology, sources)
    for rank, found in enumerate(by_rank):
        wanted = rows_one_by_one(plan, rank, topology)
        for columns, rows in zip(found, wanted, strict=True):
            assert set(columns) == set(DTYPES)
            for name, value in columns_of(rows).items():
                assert columns[name].dtype == DTYPES[name]
                assert torch.equal(columns[name], value), (rank, name)


def test_the_drawn_plans_remap_and_share():
    plans = [drawn(seed)[0] for seed in range(25)]
    batches = [batch for plan in plans for batch in plan.micro_batches]
    assert sum(batch.remap for batch in batches) >= 5
    strategies = {group.strategy for batch in batches for group in batch.groups}
    assert strategies >= {"local", "ulysses", "zigzag", "balanced", "hybrid"}
