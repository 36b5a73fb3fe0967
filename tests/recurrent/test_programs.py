"""Programs of recurrent layers that one micro-batch takes over from another."""

import random

import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan.rows import shards_of
from hf_flexseq.program.compile import HALO, LINEAR_TO_ATTENTION
from hf_flexseq.program.instructions import RowShape
from tests.hf.by_hand import TWO_NODES
from tests.plans import random_plan
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
LENGTHS = [30, 2, 17, 5, 23, 3, 40, 11]


def prepared(rank, world_size, plan):
    """For every pair of micro-batches of which the first alone is remapped, what the second has
    prepared of the first one's programs."""
    communicator = join(TWO_NODES)
    kernel = choose_kernel(CPU, torch.float32, 8)
    contexts = []
    for shard in shards_of(plan, rank, TWO_NODES):
        contexts.append(SequenceContext(shard, communicator, kernel, CPU))
    keys = [(HALO, RowShape(8, "float32", 4)), (LINEAR_TO_ATTENTION, RowShape(8, "float32", 1))]
    taken_over = []
    for first in contexts:
        for second in contexts:
            if first.programs.parts.remap and not second.programs.parts.remap:
                first.programs.prepare(keys)
                second.programs.prepare(first.programs.keys)
                taken_over.append((len(first.programs.keys), len(second.programs.keys)))
    return taken_over


def test_rows_move_in_remapped_micro_batches_alone():
    seen = []
    for seed in range(20):
        plan = random_plan(LENGTHS, 4, random.Random(seed), micro_batches=3, nodes=2)
        for taken_over in run_threads(prepared, 4, plan):
            seen += taken_over
    assert set(seen) == {(2, 1)}
