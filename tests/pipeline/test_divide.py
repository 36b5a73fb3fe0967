"""The division of layers against every division there is."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from hf_flexseq.pipeline.divide import NONE, divide_layers
from tests.budget import for_seeds


def slowest(division, costs, last):
    sums = [sum(costs[start:stop]) for start, stop in division]
    sums[-1] += last
    return max(sums)


def every_division(layers, stages, together):
    for cuts in combinations_with_replacement(range(layers + 1), stages - 1):
        division = tuple(pairwise((0, *cuts, layers)))
        has_layers = all(stop > start for start, stop in division[:-1])
        if has_layers and not any(start in together[1:] for start, _ in division):
            yield division


@for_seeds(90)
def test_equals_the_best_of_all_divisions(seed):
    """In a third of the cases some layers are inseparable."""
    rng = random.Random(seed)
    layers = rng.randint(2, 9) if seed % 3 == 0 else rng.randint(1, 9)
    together = NONE
    if seed % 3 == 0:
        start = rng.randint(0, layers - 2)
        together = range(start, rng.randint(start + 2, layers))
    separable = layers - max(len(together) - 1, 0)
    stages = rng.randint(1, min(separable + 1, 5))
    costs = [rng.randint(1, 9) for _ in range(layers)] if seed % 2 else [4] * layers
    last = rng.randint(0, 30)
    division = divide_layers(costs, stages, last=last, inseparable=together)
    allowed = set(every_division(layers, stages, together))
    assert division in allowed
    best = min(slowest(one, costs, last) for one in allowed)
    assert slowest(division, costs, last) == best


def test_the_last_stage_may_be_without_layers():
    assert divide_layers([1, 1], 2, last=10) == ((0, 2), (2, 2)), "the head is heavy"
    assert divide_layers([1, 1], 3) == ((0, 1), (1, 2), (2, 2))


@pytest.mark.parametrize(
    ("layers", "inseparable", "message"),
    [
        (2, NONE, "2 layers make at most 3 stages, not 4"),
        (5, range(1, 5), "5 layers, of which 1 to 4 share keys and stay in one"),
    ],
)
def test_too_many_stages_are_refused(layers, inseparable, message):
    with pytest.raises(ValueError, match=message):
        divide_layers([1] * layers, 4, inseparable=inseparable)
