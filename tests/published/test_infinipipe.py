"""The re-creation of InfiniPipe's planner: its chunks, its groups, and its checkpointing
program."""

import itertools
import random

import pytest

from hf_flexseq.cost.pipeline_check import check, check_memory
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.cost.walk import peak_bytes
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.planner.pipeline import make_pipeline_plan
from hf_flexseq.planner.pipeline.cuts import CutWork
from hf_flexseq.published.infinipipe import checkpointing
from hf_flexseq.published.infinipipe.checkpointing import CheckpointingTask, solve
from hf_flexseq.published.infinipipe.chunking import infinipipe_units
from pipelines import stage_cost

LINEAR = CutWork(linear=1.0, square=0.0)


def price(stages, **changed):
    return PipelineCost.even(stages, stage_cost(kv_bytes=0.0, **changed))


def test_sequences_are_cut_on_the_longest_ones_mesh_and_tails_are_filled():
    units = infinipipe_units([100, 400, 250, 30, 50, 90], 4, LINEAR)
    assert units[0] == [[(1, a, a + 100)] for a in (0, 100, 200, 300)]
    # a hybrid chunk, now full
    assert units[1] == [[(2, 0, 100)], [(2, 100, 200)], [(2, 200, 250), (4, 0, 50)]]
    assert sorted(units[2:]) == [[[(0, 0, 100)]], [[(3, 0, 30)]], [[(5, 0, 90)]]]


def test_tails_are_not_packed_together():
    units = infinipipe_units([400, 110, 120, 10], 4, LINEAR)
    tails = [unit[-1] for unit in units if len(unit) == 2]
    assert all(
        sum(stop - start < [400, 110, 120, 10][q] for q, start, stop in row) == 1 for row in tails
    )
    assert [(3, 0, 10)] in [row[1:] for row in tails]  # beside one of them


def test_a_full_tail_is_passed_over_until_time_gives_way():
    """The mesh is 0, 50, 71, 87, 100 and its slices take at most 2,562. Sequence 1's tail takes
    2,280 and has the least time per token, but not the 420 that a short sequence takes; the other
    tail has, where there is one."""
    work = CutWork(linear=1.0, square=1.0)
    assert infinipipe_units([100, 69, 90, 20], 4, work)[1:] == [
        [[(2, 0, 50)], [(2, 50, 71)], [(2, 71, 87)], [(2, 87, 90), (3, 0, 20)]],
        [[(1, 0, 50)], [(1, 50, 69)]],
    ]
    assert infinipipe_units([100, 69, 20], 4, work)[1:] == [
        [[(1, 0, 50)], [(1, 50, 69), (2, 0, 20)]]
    ]


def brute(task):
    """The least layers in all, None where there are none."""
    choices = itertools.product(range(task.most + 1), repeat=task.variables)
    enough = [
        sum(layers)
        for layers in choices
        if all(
            sum(layers[j] * saved for j, saved in terms) >= excess
            for excess, terms in task.moments
        )
    ]
    return min((total for total in enough if total <= task.limit), default=None)


@pytest.mark.parametrize("seed", range(25))
def test_the_program_checkpoints_the_fewest_layers(seed):
    rng = random.Random(seed)
    variables, most = rng.randint(2, 5), rng.randint(1, 3)
    moments = []
    for _ in range(rng.randint(1, 4)):
        flying = rng.sample(range(variables), rng.randint(1, variables))
        moments.append((rng.randint(1, 60), tuple((j, rng.randint(5, 20)) for j in flying)))
    limit = rng.choice([rng.randint(1, 6), variables * most])
    task = CheckpointingTask(variables=variables, most=most, limit=limit, moments=tuple(moments))
    layers, best = solve(task), brute(task)
    assert (layers is None) == (best is None)
    if layers is not None:
        assert all(
            sum(layers[j] * saved for j, saved in terms) >= excess for excess, terms in moments
        )
        assert sum(layers) <= best * 1.02


@pytest.mark.parametrize("seed", [1, 4, 8])
def test_a_program_that_ends_by_its_count_of_nodes_still_saves_enough(seed, monkeypatch):
    monkeypatch.setattr(checkpointing, "NODES", 1)
    rng, moments = random.Random(seed), []
    for _ in range(50):
        flying = rng.sample(range(60), 12)
        moments.append((rng.randint(100, 900), tuple((j, rng.randint(5, 40)) for j in flying)))
    layers = solve(CheckpointingTask(variables=60, most=10, limit=600, moments=tuple(moments)))
    assert layers is not None
    assert all(sum(layers[j] * saved for j, saved in terms) >= excess for excess, terms in moments)


LENGTHS = [4000, 3900, 900, 800, 700, 600, *[300] * 30]


def test_short_of_memory_it_flushes_or_checkpoints():
    cost = price(3)
    free = make_pipeline_plan(LENGTHS, cost, schedule="infinipipe", chunks=8)
    peak = peak_bytes(free, cost)[0]
    plans = {}
    for share in (0.9, 0.75):
        memory_limit = (int(share * peak),) * 3
        plans[share] = make_pipeline_plan(
            LENGTHS, cost, schedule="infinipipe", chunks=8, memory_limit=memory_limit
        )
        check(plans[share])
        check_memory(plans[share], cost, memory_limit)
        assert plans[share].objective_s >= free.objective_s
    assert not free.checkpointed
    assert any(plan.checkpointed for plan in plans.values())


@pytest.mark.parametrize("share", [0.85, 0.9, 0.95])
def test_gradients_of_keys_and_values_need_room_too(share):
    cost = PipelineCost.even(3, stage_cost(kv_bytes=8.0, token_bytes=10.0))
    free = make_pipeline_plan([4000], cost, schedule="infinipipe", chunks=3)
    memory_limit = (int(share * peak_bytes(free, cost)[0]),) * 3
    check_memory(
        make_pipeline_plan(
            [4000], cost, schedule="infinipipe", chunks=3, memory_limit=memory_limit
        ),
        cost,
        memory_limit,
    )


def test_layers_lie_on_diagonals():
    """The k-th backward of stage p recomputes as much as the (k + 1)-th of stage p + 1."""
    cost = price(3)
    free = make_pipeline_plan([4000], cost, schedule="infinipipe", chunks=8)
    memory_limit = (int(0.7 * peak_bytes(free, cost)[0]),) * 3
    plan = make_pipeline_plan(
        [4000], cost, schedule="infinipipe", chunks=8, memory_limit=memory_limit
    )
    # one sequence goes backward from its last chunk
    backward = [layers[::-1] for layers in plan.checkpointed]
    assert any(map(any, backward))
    for stage, following in itertools.pairwise(backward):
        assert stage[:-1] == following[1:]


def test_what_never_fits_is_named():
    with pytest.raises(PlanInfeasible, match="sequence 1 fits for no number of chunks"):
        make_pipeline_plan([100, 5000], price(2), schedule="infinipipe", memory_limit=(5000, 5000))
