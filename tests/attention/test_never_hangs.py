"""200 random plan sequences on 4 ranks that wait at random: every one of them comes to its end."""

import random
import time

import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.shard import make_shard
from tests.plans import random_plan
from tests.ranks import run_ranks

PLANS, LAYERS = 200, 2


def run_plans(rank, world_size, free):
    communicator = Communicator()
    kernel = choose_kernel(torch.device("cpu"), torch.float32, 4)
    shared, own = random.Random(7), random.Random(rank)
    calls = 0
    for _ in range(PLANS):
        plan = random_plan([shared.randint(1, 12) for _ in range(shared.randint(1, 9))], world_size, shared)
        for micro_batch in plan.micro_batches:
            shard = make_shard(micro_batch, plan.lengths, rank)
            if free and not shard.zones:
                continue
            calls += run_layers(shard, communicator, kernel, own)
    return calls


def run_layers(shard, communicator, kernel, own):
    """Forward and backward of a few layers with pauses of this rank's own; the number of attention calls."""
    seq_ctx = SequenceContext(shard, communicator, kernel, torch.device("cpu"))
    x = torch.randn(shard.tokens, 2, 4, requires_grad=True)
    if not shard.zones:
        return 0
    y = x
    for _ in range(LAYERS):
        time.sleep(own.choice([0, 0, 0, 0.002]))
        y = sequence_parallel_attention(y, y, y, seq_ctx)
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    return LAYERS


def test_random_plans_never_hang():
    calls = run_ranks(run_plans, 4, True, seconds=120)
    assert all(count > PLANS for count in calls)
