"""Random plans on ranks that are threads, under every way in which posts may be carried out: each
comes to its end with the gradients of one process. A few of them run on gloo, too.

    python -m tests.random_runs --count 10000

runs more of them and prints what they had (`tests/random_runs.py`).
"""

from collections import Counter

import pytest

from tests import budget, random_runs
from tests.ranks import run_ranks

RUNS = 200
EVERY_TIME = budget.examples(60)  # the others run with `-m nightly`
TOGETHER = 20  # runs of one test
STARTS = range(0, RUNS, TOGETHER)


@pytest.mark.parametrize("first", budget.others_nightly(STARTS, tried=range(EVERY_TIME)))
def test_random_plans_end_with_the_gradients_of_one_process(first):
    runs = min(TOGETHER, EVERY_TIME)
    assert random_runs.run_all(range(first, first + runs))["all"] == runs


def test_what_is_drawn_has_something_of_everything():
    drawn = 800
    counts = Counter()
    for number in range(drawn):
        counts.update(random_runs.had(random_runs.draw(number)))
    assert counts["degree above 1"] >= 0.8 * drawn
    for name in (
        *("local", "ulysses", "zigzag", "balanced", "hybrid"),
        *("BY_TAG", "BY_LANE", "ONE_QUEUE"),
        *(f"{ranks} ranks" for ranks in (2, 3, 4, 6, 8)),
        *("several zones on a rank", "passes", "pipeline"),
        *("checkpointing", "checkpointing, attention kept"),
        *("window", "chunk", "sinks", "softcap", "values of another size"),
        "blocks that see both ways",
        *("convolution", "gated delta", "kimi delta", "mamba2"),
        *("units of rows", "units 1 deep", "units 2 deep"),
    ):
        assert counts[name] >= 0.05 * drawn, name
    for name in ("pipeline: ranks share chunks", "pipeline: several stages per rank"):
        assert counts[name] >= 0.01 * drawn, name


# ---- on gloo

WORLD_SIZE = 4


def several(rank, world_size, runs):
    return [random_runs.attention_rank(rank, world_size, run) for run in runs]


@pytest.mark.processes
def test_random_plans_end_on_gloo_too():
    drawn = [random_runs.draw(number) for number in range(60)]
    runs = [run for run in drawn if isinstance(run, random_runs.AttentionRun)]
    runs = [run for run in runs if run.topology.world_size == WORLD_SIZE]
    assert len(runs) > 6
    by_rank = run_ranks(several, WORLD_SIZE, runs)
    for run, results in zip(runs, zip(*by_rank, strict=True), strict=True):
        assert random_runs.attention_error(run, results) <= random_runs.MOST_ERROR, run
