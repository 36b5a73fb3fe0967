"""Zones of windows and chunks: what they move is the halo of every slice, and no more."""

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.rings import chunks_per_rank
from hf_flexseq.plan.shard import group_slices, make_shard
from hf_flexseq.program.compile import Machine, MicroBatchLayout, backward, forward
from hf_flexseq.program.instructions import LayerShape
from tests.program.memory import nbytes

HALO_STRATEGIES = ("zigzag", "balanced")


def programs_of(strategy, lengths, degree, reach, rank):
    """A rank's forward and backward, and the shape of the layer."""
    group = Group(
        ranks=tuple(range(degree)), sequences=tuple(range(len(lengths))), strategy=strategy
    )
    machine = Machine(
        topology=Topology(nodes=1, ranks_per_node=degree), device="cuda", wide_gradients=False
    )
    shard = make_shard(MicroBatch(groups=(group,)), lengths, rank)
    shape = LayerShape(4, 2, 16, "bfloat16", reach)
    parts = MicroBatchLayout(shard, machine).parts
    there = forward(parts, shape)
    return group, there, backward(parts, shape, there.saved), shape


def received_bytes(program, shape):
    """Bytes of all messages that come to this rank."""
    total = 0
    for one in program.instructions:
        if one.operation == "post":
            for message in one.constants[1].recvs:
                total += nbytes(program.all_values[message.value], shape)
    return total


@pytest.mark.parametrize("strategy", HALO_STRATEGIES)
def test_a_window_of_1024_moves_its_halo_once_there_and_once_back(strategy):
    window, degree, lengths = 1024, 8, (65536,)
    token = 2 * 2 * 16 * 2  # bytes of keys and values: two tensors, KV heads, size, bfloat16
    halo = (window - 1) * token * chunks_per_rank(strategy)
    for rank in range(degree):
        _, there, back, shape = programs_of(strategy, lengths, degree, Reach(window=window), rank)
        assert received_bytes(there, shape) <= 1.1 * halo
        # gradients come back in float32
        assert received_bytes(back, shape) <= 2 * 1.1 * halo


@pytest.mark.parametrize("strategy", HALO_STRATEGIES)
@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=9), Reach(chunk=10)], ids=str)
def test_a_rank_receives_what_its_queries_read_and_it_has_not(strategy, reach):
    degree, lengths = 3, (50, 1, 7, 23)
    for rank in range(degree):
        group, there, _, shape = programs_of(strategy, lengths, degree, reach, rank)
        held = set()
        read = set()
        for part in group_slices(group, lengths, rank):
            for position in range(part.start, part.stop):
                held.add((part.sequence, position))
                first = reach.first_key(position)
                read |= {(part.sequence, key) for key in range(first, position + 1)}
        token = 2 * 2 * 16 * 2
        assert received_bytes(there, shape) == len(read - held) * token


def test_chunks_that_end_with_slices_move_nothing():
    _, there, back, _ = programs_of("balanced", (64,), 4, Reach(chunk=16), 2)
    for program in (there, back):
        assert program.operations()["post"] == 0


def test_a_window_that_no_sequence_exceeds_is_no_window_to_the_kernel():
    _, there, _, _ = programs_of("zigzag", (64,), 4, Reach(window=64), 1)
    (call,) = [one for one in there.instructions if one.operation == "attend"]
    lengths = call.constants[0].lengths
    assert lengths.window is None
    # rank 1 has tokens 8 to 15 and 48 to 55
    assert lengths.q_lens == (8, 8)
    assert lengths.k_lens == (16, 56)
