"""1F1B, Seq1F1B and its interleaving: their published warm-ups, bubbles and memory."""

import random
from itertools import product

import pytest

from hf_flexseq.cost.pipeline_check import check
from hf_flexseq.cost.walk import makespan_ns, peak_bytes
from hf_flexseq.plan.pipeline import text
from hf_flexseq.planner.pipeline.orders import interleaved, one_forward_one_backward
from pipelines import even_cost, plan_of
from tests.budget import examples, for_seeds


def warm_up(actions):
    return next(place for place, action in enumerate(actions) if action.kind == "B") - 1


def test_two_stages_three_sequences_is_1f1b():
    first, last = one_forward_one_backward([1, 1, 1], 2)
    assert text(first) == "0F0.0 0F1.0 0B0.0 0F2.0 0B1.0 0B2.0"
    assert text(last) == "1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0"


def test_backwards_are_first_in_first_out_over_sequences_and_last_in_first_out_inside():
    (actions,) = one_forward_one_backward([3, 2], 1)
    assert text(a for a in actions if a.kind == "B") == "0B0.2 0B0.1 0B0.0 0B1.1 0B1.0"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_warm_up_bubble_and_memory_are_the_published_ones(ranks):
    for k, sequences in product((1, 2, 3, 4), (1, 4, 8)):
        plan = plan_of(one_forward_one_backward([k] * sequences, ranks), sizes=[k] * sequences)
        check(plan)
        chunks = k * sequences
        for rank, actions in enumerate(plan.actions):
            assert warm_up(actions) == min(ranks - rank - 2 + k, chunks - 1)
        # bubble (P - 1) / k M
        assert makespan_ns(plan, even_cost(ranks)) == 3000 * (chunks + ranks - 1)
        in_flight = [min(ranks - rank - 1 + k, chunks) for rank in range(ranks)]
        assert peak_bytes(plan, even_cost(ranks)) == tuple(8 * count for count in in_flight)


@pytest.mark.parametrize("ranks, k", [(2, 1), (2, 2), (4, 1), (4, 4), (8, 4)])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_interleaved_warm_up_and_bubble(ranks, k, stages_per_rank):
    sequences, stages = 8, ranks * stages_per_rank
    actions = interleaved([k] * sequences, ranks, stages_per_rank)
    plan = plan_of(actions, sizes=[k] * sequences, stages=stages)
    check(plan)
    for rank, own in enumerate(actions):
        count = (stages_per_rank - 1) * ranks + 2 * (ranks - rank - 1) + k - 1
        assert warm_up(own) == min(count, stages_per_rank * k * sequences - 1)
    work = 3000 * stages_per_rank * k * sequences
    # bubble (P - 1) / V k M
    assert makespan_ns(plan, even_cost(stages)) == work + 3000 * (ranks - 1)


@for_seeds(examples(100))
def test_units_of_any_sizes_take_turns(seed):
    """Also where k does not divide P, and where too few chunks are left for a turn of their
    own."""
    rng = random.Random(seed)
    ranks, stages_per_rank, most = rng.randint(1, 8), rng.randint(1, 4), rng.choice([1, 2, 3, 20])
    sizes = [rng.randint(1, most) for _ in range(rng.randint(1, 14))]
    actions = interleaved(sizes, ranks, stages_per_rank)
    check(plan_of(actions, sizes=sizes, stages=ranks * stages_per_rank))
