"""FlexSP's parts against exhaustive search, and its plans against the same checks as every
other."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_flexseq.cost import step_ns
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import check
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.published.aligned import aligned_degrees, fit_together, rank_ranges
from hf_flexseq.planner.published.blaster import blast
from hf_flexseq.planner.published.buckets import bucketed
from hf_flexseq.planner.published.flexsp import FlexSP
from hf_flexseq.planner.published.milp import Chosen, GroupingTask, slowest_ns, solve
from hf_flexseq.topology import Topology

MODEL = replace(PRESETS["flexsp-gpt-7b-a100"], micro_batch_s=0.05)
SHAPES = [(1, 1), (1, 2), (1, 3), (1, 6), (2, 2), (2, 6), (3, 4), (6, 8), (8, 8), (2, 7)]


def topology(shape: tuple[int, int]) -> Topology:
    return Topology(nodes=shape[0], ranks_per_node=shape[1])


def pieces_of(count: int, pieces: int) -> Iterator[list[tuple[int, int]]]:
    """(start, stop) of every way to cut `count` items into at most `pieces` contiguous pieces."""
    for cuts in combinations_with_replacement(range(count + 1), pieces - 1):
        yield [(a, b) for a, b in zip((0, *cuts), (*cuts, count), strict=True) if b > a]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
def test_the_blaster_s_largest_piece_is_the_smallest_possible(
    lengths: list[int], pieces: int
) -> None:
    ordered = sorted(lengths, reverse=True)
    made = blast(lengths, pieces)
    assert [lengths[i] for piece in made for i in piece] == ordered
    assert sorted(i for piece in made for i in piece) == list(range(len(lengths)))
    best = min(max(sum(ordered[a:b]) for a, b in cut) for cut in pieces_of(len(ordered), pieces))
    assert max(sum(lengths[i] for i in piece) for piece in made) == best


def test_the_blaster_evens_out_what_a_giant_leaves_open() -> None:
    assert [len(piece) for piece in blast([1000] + [10] * 60, 4)] == [1, 20, 20, 20]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
def test_buckets_add_as_few_tokens_as_possible(lengths: list[int], count: int) -> None:
    made = bucketed(range(len(lengths)), lengths, 10**9, count)
    assert sorted(i for ids in made.members for i in ids) == list(range(len(lengths)))
    assert all(
        max(lengths[i] for i in ids) == s
        for s, ids in zip(made.longest, made.members, strict=True)
    )
    ordered = sorted(lengths)
    best = min(
        sum((b - a) * ordered[b - 1] for a, b in cut) for cut in pieces_of(len(ordered), count)
    )
    assert int((made.longest * made.counts).sum()) == best


def test_buckets_leave_half_of_the_spare_memory_free() -> None:
    lengths = [10 * i for i in range(1, 41)]
    for spare in (0, 100, 1000, 10_000):
        made = bucketed(range(40), lengths, sum(lengths) + spare)
        assert len(made.longest) >= 16
        assert int((made.longest * made.counts).sum()) - sum(lengths) <= spare // 2


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_stand_side_by_side_on_legal_ranks(shape: tuple[int, int]) -> None:
    where, rng, degrees = topology(shape), random.Random(0), aligned_degrees(topology(shape))
    for _ in range(100):
        chosen: list[int] = []
        while fit_together([*chosen, degree := rng.choice(degrees)], where):
            chosen.append(degree)
        ranges = rank_ranges(chosen, where)
        assert [len(ranks) for ranks in ranges] == chosen
        assert all(where.allows(ranks.start, ranks.stop) for ranks in ranges)
        held = [rank for ranks in ranges for rank in ranks]
        assert len(held) == len(set(held))


# ---- the program


def best_chosen(task: GroupingTask, where: Topology) -> int:
    """Nanoseconds of the best solution of the program, by trying every set of degrees and every
    assignment."""
    rows = [q for q, count in enumerate(task.counts.tolist()) for _ in range(count)]
    best = 2**62
    for size in range(1, where.world_size + 1):
        for columns in combinations_with_replacement(range(len(task.degrees)), size):
            if not fit_together([task.degrees[c] for c in columns], where):
                continue
            for homes in product(range(size), repeat=len(rows)):
                tokens, ns = [0] * size, [0] * size
                for q, p in zip(rows, homes, strict=True):
                    tokens[p] += int(task.tokens[q])
                    ns[p] += int(task.times[q, columns[p]])
                if all(
                    t <= task.cap * task.degrees[c] for t, c in zip(tokens, columns, strict=True)
                ):
                    best = min(best, max(ns))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_program_s_optimum_is_found(seed: int) -> None:
    rng = random.Random(seed)
    where = topology(rng.choice([(1, 2), (1, 3), (1, 4), (2, 2)]))
    world = where.world_size
    lengths = [int(2 ** rng.uniform(9, 15)) for _ in range(rng.randint(2, 6 if world < 4 else 5))]
    cap = int(
        max(max(lengths) / world + 1, sum(lengths) / world * rng.choice([1.0, 1.2, 2.0]) + 1)
    )
    planner = FlexSP(lengths, where, MODEL, strategy="auto", cap=cap)
    task = planner._task(bucketed(range(len(lengths)), lengths, cap * world))
    start = planner._one_degree(task, len(task.degrees) - 1)
    assert start is not None
    found = solve(task, start, gap=0.0, nodes=10_000)
    assert legal(task, found, where)
    assert slowest_ns(task, found) == pytest.approx(best_chosen(task, where), rel=1e-5)


def legal(task: GroupingTask, chosen: Chosen, where: Topology) -> bool:
    members = np.array([members for _, members in chosen])
    rooms = [task.cap * task.degrees[column] for column, _ in chosen]
    return bool(
        fit_together([task.degrees[column] for column, _ in chosen], where)
        and (members.sum(axis=0) == task.counts).all()
        and (members @ task.tokens <= rooms).all()
    )


def test_no_nodes_leave_the_start() -> None:
    planner = FlexSP([4000, 300, 200, 100], topology((1, 4)), MODEL, strategy="auto", cap=5000)
    task = planner._task(bucketed(range(4), planner.lengths, 20_000))
    start = planner._one_degree(task, 2)
    assert start is not None
    assert slowest_ns(task, solve(task, start, nodes=0)) <= slowest_ns(task, start)


# ---- the plans


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    st.sampled_from([shape for shape in SHAPES if shape[0] * shape[1] <= 14]),
    st.sampled_from(["auto", "local"]),
    st.integers(0, 20_000),
)
def test_any_lengths_on_any_topology(
    lengths: list[int], shape: tuple[int, int], strategy: str, spare: int
) -> None:
    where = topology(shape)
    cap = -(-max(lengths) // (1 if strategy == "local" else where.world_size)) + spare
    plan = make_plan(
        lengths, where, MODEL, planner="flexsp", strategy=strategy, max_tokens_per_rank=cap
    )
    check(plan, where, cap)
    assert (
        plan.objective_s
        == step_ns(MODEL, plan.micro_batches, lengths, where, sync="lockstep") / 1e9
    )
    assert set(plan.degrees()) <= set(aligned_degrees(where))


def test_it_beats_the_best_single_degree_and_repeats_itself() -> None:
    rng, where = random.Random(5), topology((1, 8))
    lengths = [min(40_000, int(rng.lognormvariate(7, 1.5)) + 1) for _ in range(48)]
    plans = [
        make_plan(lengths, where, MODEL, planner="flexsp", max_tokens_per_rank=9000)
        for _ in range(2)
    ]
    homogeneous = make_plan(lengths, where, MODEL, planner="batch-ada", max_tokens_per_rank=9000)
    assert plans[0].digest() == plans[1].digest()
    assert len(plans[0].degrees()) > 1
    assert plans[0].objective_s < homogeneous.objective_s


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_flexseq.config.find_spec", lambda module: None)
    with pytest.raises(
        ValueError,
        match=r"needs pulp and highspy.*pip install "
        r'"hf_flexseq\[planner\]"',
    ):
        make_plan([4], topology((1, 2)), MODEL, planner="flexsp")
