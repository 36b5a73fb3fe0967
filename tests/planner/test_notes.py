"""Notes of plans on what is done once in a run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.plan import Group, MicroBatch, widest_first
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.notes import contact_notes, kinds_notes
from hf_flexseq.topology import Topology

H200 = replace(PRESETS["llama-3.1-8b-h200"], contact_s=0.5)
FOUR_NODES = Topology(nodes=4, ranks_per_node=2)


def test_a_note_says_which_layers_take_attention_s_seconds() -> None:
    (note,) = kinds_notes([1000, 100_000], PRESETS["gemma-3-27b-h100"])
    assert note.startswith("layers 83.9 % window 1024, 16.1 % full; of attention's 7.3 device-")
    assert kinds_notes([1000, 100_000], H200) == ()
    plan = make_plan([1000, 9000], FOUR_NODES, PRESETS["gemma-3-27b-h100"])
    assert sum("window 1024" in line for line in plan.notes) == 1


def micro_batches(*groups: tuple[int, int, str]) -> list[MicroBatch]:
    """A micro-batch for each group, given by its first rank, one past its last, and strategy."""
    return [
        MicroBatch(
            groups=widest_first(
                [Group(ranks=tuple(range(start, stop)), sequences=(0,), strategy=strategy)]
            )
        )
        for start, stop, strategy in groups
    ]


def met_one_by_one(made: Sequence[MicroBatch], topology: Topology) -> dict[int, set[int]]:
    """The slow twin: the ranks of other nodes and with another index that each rank meets."""
    met: dict[int, set[int]] = {rank: set() for rank in range(topology.world_size)}
    for micro_batch in made:
        for group in micro_batch.groups:
            for a in group.ranks:
                for b in group.ranks:
                    same_index = (a - b) % topology.ranks_per_node == 0
                    if topology.node_of(a) != topology.node_of(b) and not same_index:
                        met[a].add(b)
    return met


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 4, "ulysses")],
        [(0, 4, "zigzag"), (2, 6, "ulysses")],
        [(0, 8, "balanced"), (0, 4, "zigzag"), (4, 8, "zigzag")],
        [(0, 4, "zigzag"), (4, 8, "zigzag"), (0, 2, "zigzag")],
    ],
)
def test_the_pairs_that_connect_are_counted(groups: list[tuple[int, int, str]]) -> None:
    made = micro_batches(*groups)
    met = met_one_by_one(made, FOUR_NODES)
    pairs = sum(map(len, met.values())) // 2
    most = max(map(len, met.values()))
    (note,) = contact_notes(made, FOUR_NODES, H200)
    assert f" {pairs:,} pairs of ranks" in note
    assert f"up to {most} of one rank: at 0.5 s each up to {most * 0.5:.3g} s" in note


def test_nothing_is_said_where_no_strangers_meet() -> None:
    inside = micro_batches((0, 2, "zigzag"), (0, 8, "hybrid"))
    assert contact_notes(inside, FOUR_NODES, H200) == ()
    across = micro_batches((0, 4, "ulysses"))
    assert contact_notes(across, FOUR_NODES, replace(H200, contact_s=0.0)) == ()
    assert contact_notes(across, Topology(nodes=4, ranks_per_node=1), H200) == ()
    assert contact_notes(across, Topology(nodes=1, ranks_per_node=4), H200) == ()


def test_a_plan_says_what_connecting_takes_and_is_not_decided_by_it() -> None:
    lengths, options = [60_000, 500, 600], {"max_tokens_per_rank": 10_000}
    plan = make_plan(lengths, FOUR_NODES, H200, **options)
    assert any(note.startswith("once in a run, ") for note in plan.notes)
    free = make_plan(lengths, FOUR_NODES, replace(H200, contact_s=0.0), **options)
    assert free.micro_batches == plan.micro_batches
    assert free.objective_s == plan.objective_s
