"""Layers that read a window or a chunk in the cost model: pairs, halos, seconds."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.cost import nodes_spanned
from hf_flexseq.cost.kinds import NearLayers, busiest_pairs, doubled_pairs, halos
from tests.costs import simple_cost

RINGS = ["zigzag", "balanced"]
WINDOW = NearLayers(reach=Reach(window=4), share=0.75, attention_s=0.5)
SIMPLE = simple_cost(
    attention_s=2.0,
    all_to_all_bytes=16.0,
    ring_bytes=12.0,
    query_bytes=1.0,
    heads=8,
    kinds=(WINDOW,),
)
SLICE = 12  # tokens


def slices_of(degree: int, strategy: str) -> list[tuple[int, ...]]:
    """The slices of each rank, of all in a sequence."""
    if strategy == "balanced":
        return [(rank,) for rank in range(degree)]
    return [(rank, 2 * degree - 1 - rank) for rank in range(degree)]


@pytest.mark.parametrize(
    "reach",
    [FULL, *(Reach(window=n) for n in (1, 5, 64)), *(Reach(chunk=n) for n in (1, 7))],
    ids=str,
)
def test_pairs_of_arrays_are_those_of_single_sequences(reach):
    lengths = np.arange(0, 200)
    counted = [2 * reach.pairs(int(length)) for length in lengths]
    assert doubled_pairs(reach, lengths.astype(np.float64)).tolist() == counted


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize(
    "reach",
    [
        *(Reach(window=n) for n in (1, 2, 5, 13, 64, 100, 1000)),
        *(Reach(chunk=n) for n in (1, 5, 12, 16, 24, 48, 100, 1000)),
    ],
    ids=str,
)
def test_the_busiest_rank_has_the_pairs_and_halos_that_it_is_priced_with(reach, strategy):
    for degree in (1, 2, 3, 4, 8):
        ranks = slices_of(degree, strategy)
        pairs, received = [], []
        for slices in ranks:
            upto = [reach.pairs(SLICE * (i + 1)) - reach.pairs(SLICE * i) for i in slices]
            pairs.append(2 * sum(upto))
            own = {token for i in slices for token in range(SLICE * i, SLICE * (i + 1))}
            read = {key for i in slices for key in range(reach.first_key(SLICE * i), SLICE * i)}
            received.append(len(read - own))
        s = np.array([float(SLICE * sum(map(len, ranks)))] * 2)
        assert busiest_pairs(reach, s, degree, strategy).tolist() == [max(pairs)] * 2
        priced = halos(reach, s, degree, strategy).tolist()
        assert priced[0] == priced[1] >= max(received)
        # windows longer than a slice, and of three zigzag ranks, are priced with a little more
        short = reach.chunk or (
            reach.window <= SLICE + 1 and (degree != 3 or strategy != "zigzag")
        )
        assert priced[0] == max(received) or not short


def test_the_ranks_of_a_hybrid_share_the_pairs_of_the_busiest_node():
    window = NearLayers(reach=Reach(window=64), share=1.0, attention_s=1.0)
    cost = simple_cost(kinds=(window,))
    nodes = nodes_spanned(16)
    most = busiest_pairs(window.reach, np.array([256.0]), nodes, "zigzag")[0]
    assert most > doubled_pairs(window.reach, np.array([256.0]))[0] / nodes
    found = cost.sequence_ns(256, 16, "hybrid", True) / 1e9
    assert found == pytest.approx(most / (16 // nodes))


def test_seconds_are_a_sum_over_kinds_worked_by_hand():
    # A quarter of the layers are full, and have a quarter of the bytes.
    full = 2.0 * 16 * 16
    near = 0.5 * 2 * (4 * 5 / 2 + 12 * 4)  # 10 + 48 pairs
    seconds = {
        "local": full + near,
        "ulysses": (full + near) / 4 + 16 * 16 / 4,
        # 12 x 3 bytes of a token of the rank; the second rank has slices 2 and 5, of two tokens,
        # and so 16 pairs of a window of four; a halo of six tokens makes three trips of 4 bytes
        "zigzag": full / 4 + 0.25 * 12 * 3 * 4 + 0.5 * 2 * 16 + 0.75 * 3 * 4 * 6,
    }
    for strategy, expected in seconds.items():
        degree = 1 if strategy == "local" else 4
        found = SIMPLE.sequence_ns(16, degree, strategy, False)
        assert found == pytest.approx(1e9 * expected, rel=1e-8), strategy


@pytest.mark.parametrize("strategy", ["local", "ulysses"])
def test_a_window_beyond_the_sequence_costs_what_a_full_layer_does(strategy):
    full = replace(SIMPLE, kinds=())
    wide = NearLayers(reach=Reach(window=10**6), share=0.75, attention_s=1.5)
    split = replace(SIMPLE, attention_s=0.5, kinds=(wide,))
    degree = 1 if strategy == "local" else 4
    whole, parts = (one.sequence_ns(9999, degree, strategy, False) for one in (full, split))
    assert parts == pytest.approx(whole, rel=1e-4)  # s (s + 1) for s^2


def test_the_host_of_a_ring_does_less_for_windows():
    cost = replace(SIMPLE, launch_s=1.0, post_s=1.0, message_s=1.0)
    full = replace(cost, kinds=())
    assert cost.host_s(8, "zigzag", False) < 0.5 * full.host_s(8, "zigzag", False)
    assert cost.host_s(8, "ulysses", False) == full.host_s(8, "ulysses", False)
