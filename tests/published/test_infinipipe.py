"""The re-creation of InfiniPipe's planner: its chunks, its groups, and its checkpointing
program."""

import itertools
import random

import pytest

from hf_flexseq.pipeline.planning.cuts import CutWork
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.walk import check, check_memory
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.published.infinipipe.checkpointing import solve
from hf_flexseq.published.infinipipe.chunking import infinipipe_units
from tests.budget import for_seeds
from tests.pipelines import peak_bytes, pipelined, stage_cost


def price(stages, **changed):
    return PipelineCost.even(stages, stage_cost(kv_bytes=0.0, **changed))


def test_sequences_are_cut_on_the_longest_ones_mesh_and_tails_are_filled():
    work = CutWork(linear=1.0, square=0.0)
    units = infinipipe_units([100, 400, 250, 30, 50, 90], 4, work)
    assert units[0] == [[(1, a, a + 100)] for a in (0, 100, 200, 300)]
    # a hybrid chunk, now full
    assert units[1] == [[(2, 0, 100)], [(2, 100, 200)], [(2, 200, 250), (4, 0, 50)]]
    assert sorted(units[2:]) == [[[(0, 0, 100)]], [[(3, 0, 30)]], [[(5, 0, 90)]]]


# ---- the checkpointing program


def is_enough(moments, layers):
    """Whether the layers of the diagonals save the excess of every moment."""
    return all(sum(layers[j] * saved for j, saved in terms) >= excess for excess, terms in moments)


def fewest_layers(moments, *, variables, most, limit):
    """The least layers in all, by trying all; None if even all are too few."""
    choices = itertools.product(range(most + 1), repeat=variables)
    enough = [sum(layers) for layers in choices if is_enough(moments, layers)]
    return min((total for total in enough if total <= limit), default=None)


def drawn_moments(rng, *, count, variables, flying, excess, saved):
    """Random moments. flying, excess, saved: the least and the most of each."""
    moments = []
    for _ in range(count):
        diagonals = rng.sample(range(variables), rng.randint(*flying))
        terms = tuple((diagonal, rng.randint(*saved)) for diagonal in diagonals)
        moments.append((rng.randint(*excess), terms))
    return tuple(moments)


@for_seeds(25)
def test_the_program_checkpoints_the_fewest_layers(seed):
    rng = random.Random(seed)
    variables, most = rng.randint(2, 5), rng.randint(1, 3)
    limit = rng.choice([rng.randint(1, 6), variables * most])
    ranges = {"flying": (1, variables), "excess": (1, 60), "saved": (5, 20)}
    moments = drawn_moments(rng, count=rng.randint(1, 4), variables=variables, **ranges)
    options = {"variables": variables, "most": most, "limit": limit}
    layers, fewest = solve(moments, **options), fewest_layers(moments, **options)
    assert (layers is None) == (fewest is None)
    if layers is not None:
        assert is_enough(moments, layers)
        assert sum(layers) <= fewest * 1.02


# ---- plans


def plans_of(lengths, cost, share, chunks):
    """Plans without a limit, and with a limit of this share of the memory that the first takes."""
    free = pipelined(lengths, cost, schedule="infinipipe", chunks=chunks)
    limit = (int(share * peak_bytes(free, cost)[0]),) * 3
    tight = pipelined(lengths, cost, schedule="infinipipe", chunks=chunks, memory_limit=limit)
    check(tight)
    check_memory(tight, cost, limit)
    assert not free.checkpointed
    assert tight.objective_s >= free.objective_s
    return free, tight


def test_short_of_memory_it_flushes_or_checkpoints():
    lengths = [4000, 3900, 900, 800, 700, 600, *[300] * 30]
    plans = [plans_of(lengths, price(3), share, 8)[1] for share in (0.9, 0.75)]
    assert any(plan.checkpointed for plan in plans)


@pytest.mark.parametrize("share", [0.85, 0.9, 0.95])
def test_gradients_of_keys_and_values_need_room_too(share):
    plans_of([4000], PipelineCost.even(3, stage_cost(kv_bytes=8.0, token_bytes=10.0)), share, 3)


def test_layers_lie_on_diagonals():
    """The k-th backward of stage p recomputes as much as the (k + 1)-th of stage p + 1."""
    _, plan = plans_of([4000], price(3), 0.7, 8)
    # one sequence goes backward from its last chunk
    backward = [layers[::-1] for layers in plan.checkpointed]
    assert any(map(any, backward))
    for stage, following in itertools.pairwise(backward):
        assert stage[:-1] == following[1:]


def test_what_never_fits_is_named():
    with pytest.raises(PlanInfeasible, match="sequence 1 fits for no number of chunks"):
        pipelined(
            [100, 5000], price(2), schedule="infinipipe", chunks=4, memory_limit=(5000, 5000)
        )
