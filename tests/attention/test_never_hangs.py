"""Random plans on ranks that are threads, under every way in which posts may be carried out: each
comes to its end with the gradients of one process. A few of them run on gloo, too.

    python -m tests.random_runs --count 10000

runs more of them (`tests/random_runs.py`).
"""

from collections import Counter

import pytest

from tests import budget, random_runs
from tests.random_runs import HEAD_DIM
from tests.ranks import run_ranks

RUNS = 200
EVERY_TIME = budget.examples(60)  # the others run with `-m nightly`
TOGETHER = 20  # runs of one test
STARTS = range(0, RUNS, TOGETHER)


@pytest.mark.parametrize("first", budget.others_nightly(STARTS, tried=range(EVERY_TIME)))
def test_random_plans_end_with_the_gradients_of_one_process(first):
    runs = min(TOGETHER, EVERY_TIME)
    random_runs.run_all(range(first, first + runs))


def parts_of(run):
    """The names of a run's parts."""
    if isinstance(run, random_runs.PipelineRun):
        ranks = run.stages * run.degree
        named = {
            "pipeline": True,
            "pipeline: ranks share chunks": run.degree > 1,
            "degree above 1": run.degree > 1,
            "pipeline: several stages per rank": run.virtual > 1,
        }
    else:
        ranks, kinds, batches = run.topology.world_size, run.kinds, run.plan.micro_batches
        groups = [group for one in batches for group in one.groups]
        zones = [len(one.groups_of(rank)) for one in batches for rank in range(ranks)]
        later = [b - a > 1 for blocks in run.blocks.values() for a, b in blocks]
        named = {
            **{group.strategy: True for group in groups},
            "degree above 1": any(group.degree > 1 for group in groups),
            "several zones on a rank": max(zones) > 1,
            "passes": run.passes is not None,
            "checkpointing": run.checkpoints,
            "checkpointing, attention kept": run.checkpoints and run.keeps_attention,
            **{f"units {max(unit.layout.depths)} deep": True for unit in run.plan.units},
            "window": any(kind.reach.window for kind in kinds),
            "chunk": any(kind.reach.chunk for kind in kinds),
            "sinks": any(kind.sinks for kind in kinds),
            "blocks that see both ways": any(later) and any(kind.both_ways for kind in kinds),
            "softcap": any(kind.softcap for kind in kinds),
            "values of another size": any(kind.value_size != HEAD_DIM for kind in kinds),
            **{kind.recurrent: True for kind in kinds},
        }
    return {run.launches.name, f"{ranks} ranks", *(name for name, is_so in named.items() if is_so)}


def test_what_is_drawn_has_something_of_everything():
    drawn = 800
    counts = Counter()
    for number in range(drawn):
        counts.update(parts_of(random_runs.draw(number)))
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
        *("units 1 deep", "units 2 deep"),
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
    parts = set().union(*map(parts_of, runs))
    assert {"ulysses", "zigzag", "balanced", "hybrid", "several zones on a rank"} <= parts
    assert {"blocks that see both ways", "units 2 deep", "checkpointing", "passes"} <= parts
    assert {"convolution", "gated delta", "mamba2", "window", "sinks"} <= parts
    by_rank = run_ranks(several, WORLD_SIZE, runs)
    for run, results in zip(runs, zip(*by_rank, strict=True), strict=True):
        assert random_runs.attention_error(run, results) <= random_runs.MOST_ERROR, run
