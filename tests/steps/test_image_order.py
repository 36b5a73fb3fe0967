"""The exchanges of features and of their gradients have their place in the one order of launches:
any plan ends, with gradients of one rank, even where a rank carries out one post after the other,
of all lanes and collectives together, and runs only its own micro-batches."""

import random
from contextlib import nullcontext

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.process_groups import as_tuples
from hf_flexseq.plan.images import IMAGE, ImagePlan, ImageSize
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.early_encoding import EarlyEncoder, first_values, weights_of
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.images import Image, row_starts
from hf_flexseq.steps.inputs import indices_to_run
from tests.kernels.reference import Reference
from tests.matching import Launches
from tests.plans import group, plan_of_groups, random_plan
from tests.ranks import host_exchanges, join, run_threads
from tests.threads import ThreadTransport

HEADS, HEAD_DIM = 4, 4
WIDTH = HEADS * HEAD_DIM
LENGTHS = (23, 1, 8, 40, 5, 13)
TOKENS = {0: 9, 2: 8, 3: 17, 5: 2}  # of the image that a sequence begins with
CPU = torch.device("cpu")
PLANS = 6


def drawn(numbers, count):
    """Numbers [count, WIDTH] of a number each."""
    rows = torch.arange(numbers, numbers + count, dtype=torch.float64)
    return torch.sin(rows.unsqueeze(1) * torch.arange(1, WIDTH + 1))


class Tower:
    """A trained tower: what an image says, times a weight."""

    is_trained = True

    def __init__(self):
        self.weight = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64).requires_grad_()

    def encode(self, images, calls):
        rows = [drawn(100 * image.size.sequence, image.size.tokens) for image in images]
        return torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *rows]) * self.weight

    def agree(self, modalities, cpu_group):
        """All ranks know this tower."""


def sizes_of(sequence):
    tokens = TOKENS[sequence]
    shared = {"sequence": sequence, "modality": IMAGE, "tokens": tokens}
    return shared | {"patches": tokens, "pairs": tokens**2}


def rows_of(shard):
    """Numbers of the rows of features that a shard's tokens have, and where these tokens are."""
    images = [ImageSize(**sizes_of(sequence), data_bytes=1) for sequence in TOKENS]
    starts = dict(zip(TOKENS, row_starts(images).tolist(), strict=False))
    rows, places, at = [], [], 0
    for part in shard.slices:
        for token in range(part.start, part.stop):
            if token < TOKENS.get(part.sequence, 0):
                rows.append(starts[part.sequence] + token)
                places.append(at + token - part.start)
        at += part.stop - part.start
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)


def step_of(communicator, shards, owners):
    """The images of a step, as this rank runs its micro-batches."""
    own = [
        Image(size=ImageSize(**sizes_of(sequence), data_bytes=1), arguments={})
        for sequence, owner in zip(TOKENS, owners, strict=True)
        if owner == communicator.rank
    ]
    return StepImages(
        own,
        [rows_of(shard)[0] for shard in shards],
        images=[ImageSize(**sizes_of(sequence), data_bytes=1) for sequence in TOKENS],
        plan=ImagePlan(owners=owners, loads=(1,) * communicator.world_size, cheapest=0),
        calls=1,
        communicator=communicator,
        device=CPU,
        is_sharded=False,
    )


def gradients(rank, world_size, nodes, plans, use_blocks, ends_early=()):
    """Of the tower's weight, plan by plan. ends_early: ranks that take their first micro-batch for
    the last."""
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    communicator = join(topology, use_blocks=use_blocks)
    communicator.open_world()
    found = []
    for number, plan in enumerate(plans):
        shards = [make_shard(one, LENGTHS, rank) for one in plan.micro_batches]
        owners = tuple((number + sequence) % world_size for sequence in TOKENS)
        step, tower = step_of(communicator, shards, owners), Tower()
        indices = indices_to_run(shards, lockstep=False)
        step.begin(indices[0] if rank in ends_early else indices[-1])
        for index in indices:
            shard = shards[index]
            seq_ctx = SequenceContext(shard, communicator, Reference(), CPU)
            features = step.of_micro_batch(index, tower)
            words = torch.zeros(shard.tokens, WIDTH, dtype=torch.float64)
            x = words.index_add(0, rows_of(shard)[1], features)
            heads = (x + 0.1).view(-1, HEADS, HEAD_DIM)
            out = sequence_parallel_attention(heads, heads[:, :2], heads[:, :2], seq_ctx)
            out.square().sum().backward()
        # one reduction, behind the last micro-batch
        total = torch.zeros_like(tower.weight) if tower.weight.grad is None else tower.weight.grad
        communicator.all_reduce(total)
        found.append(total)
    return found


ALONE = plan_of_groups(LENGTHS, [group(0, 1, *range(len(LENGTHS)))])


@pytest.fixture(scope="module")
def of_one_rank():
    """The gradient of one rank that holds everything."""
    (((gradient,)),) = run_threads(gradients, 1, 1, [ALONE], False)
    assert gradient.norm() > 1
    return gradient


@pytest.mark.parametrize("launches", [Launches.ONE_QUEUE, Launches.BY_LANE])
@pytest.mark.parametrize(("world_size", "nodes", "use_blocks"), [(3, 1, False), (4, 2, True)])
def test_plans_end_with_features_of_images(of_one_rank, launches, world_size, nodes, use_blocks):
    rng = random.Random(world_size)
    plans = [random_plan(LENGTHS, world_size, rng, nodes=nodes) for _ in range(PLANS)]
    assert any(len(plan.micro_batches) > 1 for plan in plans)
    by_rank = run_threads(
        gradients, world_size, nodes, plans, use_blocks, launches=launches, seed=1
    )
    for of_rank in by_rank:
        for found in of_rank:
            torch.testing.assert_close(found, of_one_rank, rtol=1e-10, atol=1e-12)


def test_features_use_the_communicator_of_all_ranks_and_no_other(monkeypatch):
    opened, open_group = set(), ThreadTransport.open_group

    def noting(transport, parts, **options):
        opened.add(as_tuples(parts))
        return open_group(transport, parts, **options)

    monkeypatch.setattr(ThreadTransport, "open_group", noting)
    plans = [plan_of_groups(LENGTHS, [group(0, 3, *range(len(LENGTHS)), strategy="zigzag")])]
    run_threads(gradients, 3, 1, plans, False)
    assert opened == {((0, 1, 2),)}


def test_an_exchange_of_gradients_before_the_last_micro_batch_is_caught(of_one_rank):
    first, second = group(0, 2, 0, 1, 2, strategy="zigzag"), group(0, 2, 3, 4, 5)
    arguments = (2, 1, [plan_of_groups(LENGTHS, [first], [second])], False)
    options = {"launches": Launches.ONE_QUEUE, "seed": 1}
    for (found,) in run_threads(gradients, *arguments, **options):
        torch.testing.assert_close(found, of_one_rank, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="no rank can go on.*rank 1 is in all_to_all"):
        run_threads(gradients, *arguments, (1,), **options)


class Frozen(Tower):
    """A tower that gets no gradients."""

    is_trained = False

    def __init__(self):
        super().__init__()
        self.weight.requires_grad_(False)
        self.weights = weights_of([self.weight])

    def first_values(self):
        return first_values([self.weight])


def ahead_on_one_rank(rank, world_size):
    """Features of the last micro-batch, and exchanges while rank 0 alone encodes ahead."""
    communicator = join(Topology(nodes=1, ranks_per_node=world_size), use_blocks=False)
    communicator.open_world()
    shards = [make_shard(one, LENGTHS, rank) for one in ALONE.micro_batches]
    step, tower = step_of(communicator, shards, (0, 1, 0, 1)), Frozen()
    step.begin(0)
    before = host_exchanges(communicator)
    if rank == 0:
        step.encode_ahead(tower, EarlyEncoder(CPU), nullcontext())
    exchanges = host_exchanges(communicator) - before
    return step.of_micro_batch(0, tower), exchanges, step.runs


def test_encoding_ahead_exchanges_nothing_so_that_ranks_may_differ_in_it():
    (features, *first), (_, *second) = run_threads(
        ahead_on_one_rank, 2, launches=Launches.ONE_QUEUE, seed=1
    )
    assert first == second == [0, 1]
    images = [drawn(100 * sequence, tokens) for sequence, tokens in TOKENS.items()]
    assert torch.equal(features, torch.cat(images) * Frozen().weight)
