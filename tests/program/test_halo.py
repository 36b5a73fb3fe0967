"""Zones of windows and chunks: what they move is the halo of every slice, and no more. Recurrent
layers move as little."""

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.rings import chunks_per_rank
from hf_flexseq.plan.shard import group_slices
from hf_flexseq.program.compile import BACKWARD, FORWARD
from hf_flexseq.program.instructions import LayerShape, RowShape
from tests.plans import one_group
from tests.program.rank_programs import moved_bytes, programs_of_group

HALO_STRATEGIES = ("zigzag", "balanced")
LAYER = LayerShape(4, 2, 16, "bfloat16")
TOKEN = 2 * 2 * 16 * 2  # bytes of keys and values: two tensors, KV heads, size, bfloat16


def compiled(strategy, lengths, degree, reach):
    """Forward and backward of each rank."""
    shape = LAYER._replace(reach=reach)
    programs = programs_of_group(
        strategy, degree, lengths, shape, whats=(FORWARD, BACKWARD)
    ).values()
    return list(zip(*(by_rank.values() for by_rank in programs), strict=True))


@pytest.mark.parametrize("strategy", HALO_STRATEGIES)
def test_a_window_of_1024_moves_its_halo_once_there_and_once_back(strategy):
    halo = (1024 - 1) * TOKEN * chunks_per_rank(strategy)
    for there, back in compiled(strategy, (65536,), 8, Reach(window=1024)):
        assert moved_bytes(there, LAYER) <= 1.1 * halo
        assert moved_bytes(back, LAYER) <= 2 * 1.1 * halo  # gradients come back in float32


@pytest.mark.parametrize("strategy", HALO_STRATEGIES)
@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=9), Reach(chunk=10)], ids=str)
def test_a_rank_receives_what_its_queries_read_and_it_has_not(strategy, reach):
    degree, lengths = 3, (50, 1, 7, 23)
    (group,) = one_group(range(degree), len(lengths), strategy).groups
    for rank, (there, _) in enumerate(compiled(strategy, lengths, degree, reach)):
        held = set()
        read = set()
        for part in group_slices(group, lengths, rank):
            for position in range(part.start, part.stop):
                held.add((part.sequence, position))
                first = reach.first_key(position)
                read |= {(part.sequence, key) for key in range(first, position + 1)}
        assert moved_bytes(there, LAYER) == len(read - held) * TOKEN


def test_chunks_that_end_with_slices_move_nothing():
    for program in compiled("balanced", (64,), 4, Reach(chunk=16))[2]:
        assert program.messages == 0


def test_a_window_that_no_sequence_exceeds_is_no_window_to_the_kernel():
    there, _ = compiled("zigzag", (64,), 4, Reach(window=64))[1]
    (call,) = [one for one in there.instructions if one.operation == "attend"]
    lengths = call.constants[0].lengths
    assert lengths.window is None
    # rank 1 has tokens 8 to 15 and 48 to 55
    assert lengths.q_lens == (8, 8)
    assert lengths.k_lens == (16, 56)


# ---- recurrent layers


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "ulysses", "hybrid"])
def test_a_rank_gets_few_rows_of_a_long_sequence(strategy):
    """Whatever the length: W - 1 rows for each of its segments, and a summary of each segment of
    another rank."""
    degree, width, row = 8, 4, 4  # a row has four bytes
    shape = RowShape(columns=1, dtype="float32", width=width)
    most = row if strategy in ("ulysses", "balanced") else 2 * row  # of all segments of a rank
    for length in (6400, 64000):
        programs = programs_of_group(strategy, degree, (length,), shape, per_node=4)
        halos, returned, *summaries = programs.values()
        for rank in range(degree):
            assert moved_bytes(halos[rank], shape) <= most * (width - 1)
            back = moved_bytes(returned[rank], shape)
            assert back == moved_bytes(halos[rank], shape, is_sent=True)
            for of_ranks in summaries:
                assert moved_bytes(of_ranks[rank], shape) <= most * (degree - 1)
