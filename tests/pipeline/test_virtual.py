"""Several stages per rank, which take turns, never hang: gradients flow in a circle. (Exactness is
in `test_exactness.py`, the Trainer in `test_trainer.py`.)"""

import random
import time
from unittest import mock

import pytest

from hf_flexseq.pipeline.executor import _ChunkRun
from tests.hf.tiny import documents, tiny_llama
from tests.matching import Launches
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import TARGETS, columns_of, make_executor
from tests.ranks import join, run_ranks, run_threads

SIZES = ((4, 2), (2, 4))  # ranks, and stages of each


def steps(rank, world_size, virtual, plans):
    """Steps of random plans. Where a send waits for a receive that is posted only when it is
    needed, two ranks of four stages each hang."""
    model = tiny_llama(num_hidden_layers=8, hidden_size=16, intermediate_size=16)
    executor = make_executor(model, world_size, 1, join(), virtual)
    for seed in range(plans):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(3, 20))]
        plan = random_pipeline_plan(lengths, world_size, rng, virtual=virtual, split_weights=True)
        columns = columns_of(plan, documents(lengths))
        executor.train(plan, columns, TARGETS)
        executor.evaluate(plan, columns, TARGETS)
    return plans


@pytest.mark.slow
@pytest.mark.parametrize("launches", Launches)
@pytest.mark.parametrize(("world_size", "virtual"), SIZES)
def test_steps_never_hang_however_posts_are_carried_out(world_size, virtual, launches):
    found = run_threads(steps, world_size, virtual, 1, launches=launches, seed=0)
    assert found == [1] * world_size


def delayed_steps(rank, world_size, virtual, plans):
    """Ranks that fall behind at random."""
    pace, obey = random.Random(rank), _ChunkRun.obey

    def slow(step, action):
        if pace.random() < 0.3:
            time.sleep(pace.random() / 100)
        obey(step, action)

    with mock.patch.object(_ChunkRun, "obey", slow):
        return steps(rank, world_size, virtual, plans)


@pytest.mark.processes
@pytest.mark.parametrize(("world_size", "virtual"), SIZES)
def test_ranks_that_fall_behind_never_hang(world_size, virtual):
    assert run_ranks(delayed_steps, world_size, virtual, 2, seconds=90) == [2] * world_size
