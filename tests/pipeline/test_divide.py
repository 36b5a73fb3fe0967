"""The division of layers against every division there is."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from hf_flexseq.pipeline.divide import divide_layers
from tests.budget import for_seeds


def slowest(division, costs, first, last):
    sums = [sum(costs[start:stop]) for start, stop in division]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def every_division(layers, stages):
    for cuts in combinations_with_replacement(range(layers + 1), stages - 1):
        bounds = (0, *cuts, layers)
        division = tuple(pairwise(bounds))
        if all(stop > start for start, stop in division[:-1]):
            yield division


@for_seeds(60)
def test_equals_the_best_of_all_divisions(seed):
    rng = random.Random(seed)
    layers = rng.randint(1, 9)
    stages = rng.randint(1, min(layers + 1, 5))
    costs = [rng.randint(1, 9) for _ in range(layers)] if seed % 2 else [4] * layers
    first, last = rng.randint(0, 3), rng.randint(0, 30)
    division = divide_layers(costs, stages, first=first, last=last)
    best = min(slowest(d, costs, first, last) for d in every_division(layers, stages))
    assert division in set(every_division(layers, stages))
    assert slowest(division, costs, first, last) == best


@for_seeds(30)
def test_inseparable_layers_are_in_one_stage(seed):
    rng = random.Random(seed)
    layers = rng.randint(2, 9)
    start = rng.randint(0, layers - 2)
    together = range(start, rng.randint(start + 2, layers))
    stages = rng.randint(1, min(layers - len(together) + 2, 4))
    costs = [rng.randint(1, 9) for _ in range(layers)]
    first, last = rng.randint(0, 3), rng.randint(0, 30)
    division = divide_layers(costs, stages, first=first, last=last, inseparable=together)
    allowed = {
        one
        for one in every_division(layers, stages)
        if not any(begin in together[1:] for begin, _ in one)
    }
    assert division in allowed
    assert slowest(division, costs, first, last) == min(
        slowest(one, costs, first, last) for one in allowed
    )


def test_a_heavy_head_leaves_the_last_stage_without_layers():
    assert divide_layers([1, 1], 2, last=10) == ((0, 2), (2, 2))


def test_as_many_stages_as_layers_and_one_more():
    assert divide_layers([1, 1], 3) == ((0, 1), (1, 2), (2, 2))


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="2 layers make at most 3 stages, not 4"):
        divide_layers([1, 1], 4)


def test_too_many_stages_for_inseparable_layers_are_refused():
    with pytest.raises(ValueError, match="5 layers, of which 1 to 4 share keys and stay in one"):
        divide_layers([1] * 5, 4, inseparable=range(1, 5))
