"""What the programs of every rank send and receive, in bfloat16.

A unit is one [tokens / ranks, heads, head_dim] tensor; g is the share of heads that are key and
value heads.
"""

import pytest

from hf_flexseq.program.compile import BACKWARD, FORWARD
from hf_flexseq.program.instructions import LayerShape
from tests.program.rank_programs import moved_bytes, programs_of_group

HEAD_DIM, CHUNK = 128, 16
CASES = {  # (heads, key and value heads, tokens of the sequences for one rank)
    "MHA": (2, 2, (CHUNK,)),
    "GQA": (4, 1, (CHUNK,)),
    "two sequences": (4, 1, (CHUNK // 2, CHUNK // 2)),
}


def units(strategy, ranks, per_node=None):
    """By case and phase the units of a rank: on average, and the most that any one sends or
    receives."""
    found = {}
    for case, (heads, kv_heads, shares) in CASES.items():
        shape = LayerShape(heads, kv_heads, HEAD_DIM, "bfloat16")
        lengths = [share * ranks for share in shares]
        options = {"per_node": per_node, "device": "cpu", "whats": (FORWARD, BACKWARD)}
        programs = programs_of_group(strategy, ranks, lengths, shape, **options)
        unit = 2 * CHUNK * heads * HEAD_DIM
        for phase, by_rank in programs.items():
            sent, received = (
                [moved_bytes(program, shape, is_sent=way) / unit for program in by_rank.values()]
                for way in (True, False)
            )
            assert sum(sent) == sum(received)
            found[case, phase] = sum(sent) / ranks, max(sent + received)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_keys_are_fetched_by_need(world_size):
    found = units("zigzag", world_size)
    for case, (heads, kv_heads, _) in CASES.items():
        of_others = (world_size - 1) * kv_heads / heads
        busy = 1.5 if case == "two sequences" else 2
        assert found[case, FORWARD] == pytest.approx((1.5 * of_others, busy * of_others))
        mean, busiest = found[case, BACKWARD]
        assert mean == pytest.approx(2 * 1.5 * of_others)
        assert busiest <= 2 * 2 * of_others


def test_helpers_at_eight_ranks():
    found = units("balanced", 8)
    mean, busiest = found["MHA", FORWARD]
    assert mean <= 7.02
    assert busiest <= 11.1
    # the rest are log-sum-exps
    assert found["MHA", BACKWARD] == pytest.approx((14.0, 17.0), rel=5e-3)
    assert found["two sequences", FORWARD][1] < 0.85 * found["GQA", FORWARD][1]


def test_ulysses_moves_a_share_of_four_tensors():
    found = units("ulysses", 2)
    for phase in (FORWARD, BACKWARD):
        assert found["MHA", phase][0] == pytest.approx(4 * (1 / 2) * 1)


def test_a_hybrid_moves_one_share_of_the_keys_across_nodes():
    """Four ranks: q, k, v and out between the two of a node, and then half of the KV heads between
    two nodes."""
    found = units("hybrid", 4, per_node=2)
    # a node's tokens are two ranks', each has half of the heads
    inside, across = 4 / 2, 1.5 * (2 - 1)
    assert found["MHA", FORWARD][0] == pytest.approx(inside + across)
