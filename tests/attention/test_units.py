"""Attention over units of rows with shared prefixes, against dense softmax attention of every row
by itself, in float64: every strategy, every kind of layer, trees of several depths."""

import pytest

from tests.attention.exact import KINDS, SHARED, Case, assert_exact, run_cases
from tests.attention.trees import TREES, units_of
from tests.ranks import run_threads

HEADS = (4, 2)


def case_of(kind, *trees):
    units, lengths = units_of(trees)
    return Case(kind, HEADS, lengths, units)


OF_KINDS = [case_of(kind, *TREES.values()) for kind in KINDS]
CASES = [*(case_of("full", one) for one in TREES.values()), *OF_KINDS]


@pytest.mark.on_device
def test_units_are_exact_on_one_rank():
    assert_exact(run_threads(run_cases, 1, ["local"], CASES))


@pytest.mark.slow
@pytest.mark.on_device
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3, 4])
def test_units_are_exact_under_every_strategy(world_size):
    assert_exact(run_threads(run_cases, world_size, SHARED, CASES, seconds=100))
