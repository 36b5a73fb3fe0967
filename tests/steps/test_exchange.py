"""Every token, with all of its columns, comes to the row that its shard gives it."""

import random

import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Plan
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.exchange import micro_batch_routes, united
from hf_flexseq.steps.source_row import SourceRow
from tests.budget import for_seeds
from tests.plans import random_plan
from tests.published.zeppelin.gainful_passes import Always
from tests.ranks import host_exchanges, join, run_threads

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


def drawn(seed):
    """A random plan, many of its groups of several sequences, its topology, and passes over it."""
    rng = random.Random(seed)
    nodes = rng.choice((1, 1, 2, 3))
    topology = Topology(nodes=nodes, ranks_per_node=rng.randint(1, 9 // nodes))
    lengths = [rng.choice((1, 2, 3, rng.randint(1, 60))) for _ in range(rng.randint(1, 25))]
    shared = 0.8 if topology.world_size > 1 else None
    plan = random_plan(lengths, topology.world_size, rng, nodes=nodes, shared=shared)
    return plan, topology, Always(topology) if seed % 3 == 0 else None


def rows_one_by_one(plan, rank, passes):
    """By micro-batch, (sequence, position) of every row of a rank outside of attention."""
    batches = []
    for micro_batch in plan.micro_batches:
        shards = passes and passes.shards(micro_batch, plan.lengths)
        shard = shards[rank] if shards else make_shard(micro_batch, plan.lengths, rank)
        batches.append([(s.sequence, t) for s in shard.slices for t in range(s.start, s.stop)])
    return batches


def exchanged(rank, world_size, plan, topology, sources, passes):
    own = [sequence for sequence, source in enumerate(sources) if source == rank]
    rows = [(sequence, position) for sequence in own for position in range(plan.lengths[sequence])]
    names = list(DTYPES)
    random.Random(rank).shuffle(names)  # ranks may have their columns in different orders
    columns = columns_of(rows)
    row = SourceRow(
        columns={name: columns[name] for name in names},
        lengths=tuple(plan.lengths[sequence] for sequence in own),
    )
    plan = Plan.from_json(plan.to_json())
    communicator = join(topology)
    layout = PlanLayout(plan, rank, passes and passes.shards)
    before = host_exchanges(communicator)
    routes = micro_batch_routes(row, layout, sources, communicator)
    found = routes.dispatch(row.columns, united)
    assert host_exchanges(communicator) - before == 1, "token exchange is one collective"
    return found


@for_seeds(25)
def test_tokens_come_to_their_rows(seed):
    plan, topology, passes = drawn(seed)
    world_size = topology.world_size
    rng = random.Random(seed)
    sources = sorted(rng.randrange(world_size) for _ in plan.lengths)  # some draw nothing
    by_rank = run_threads(exchanged, world_size, plan, topology, sources, passes)
    for rank, found in enumerate(by_rank):
        wanted = rows_one_by_one(plan, rank, passes)
        for columns, rows in zip(found, wanted, strict=True):
            assert set(columns) == set(DTYPES)
            for name, value in columns_of(rows).items():
                assert columns[name].dtype == DTYPES[name]
                assert torch.equal(columns[name], value), (rank, name)


def test_the_drawn_plans_have_every_strategy():
    plans = [drawn(seed)[0] for seed in range(25)]
    batches = [batch for plan in plans for batch in plan.micro_batches]
    strategies = {group.strategy for batch in batches for group in batch.groups}
    assert strategies >= {"local", "ulysses", "zigzag", "balanced", "hybrid"}
