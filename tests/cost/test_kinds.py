"""Layers that read a window or a chunk in the cost model: pairs, halos, seconds, records."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, nodes_spanned
from hf_flexseq.cost.analytic import (
    BLOCK_KEYS,
    DEVICES,
    HeadShape,
    ModelShape,
    analytic_cost_model,
)
from hf_flexseq.cost.kinds import NearLayers, busiest_pairs, doubled_pairs, halos
from hf_flexseq.cost.presets import PRESETS, SHAPES
from hf_flexseq.cost.stages import PipelineCost, StageCost

REACHES = [Reach(window=1), Reach(window=5), Reach(window=64), Reach(chunk=1), Reach(chunk=7)]
RINGS = ["zigzag", "balanced"]
SIMPLE = CostModel(
    name="simple",
    attention_s=2.0,
    linear_s=1e-9,
    micro_batch_s=0.0,
    group_s=0.0,
    all_to_all_bytes=16.0,
    ring_bytes=12.0,
    query_bytes=1.0,
    ring_overlap=0.0,
    bandwidths=((2, 1.0),),
    heads=8,
    token_bytes=1.0,
    state_bytes=0.0,
    sharded_state_bytes=0.0,
    budget_bytes=1e6,
    kinds=(NearLayers(reach=Reach(window=4), share=0.75, attention_s=0.5),),
)


def slices_of(degree: int, strategy: str) -> list[tuple[int, ...]]:
    """The slices of each rank, of all in a sequence."""
    if strategy == "balanced":
        return [(rank,) for rank in range(degree)]
    return [(rank, 2 * degree - 1 - rank) for rank in range(degree)]


@pytest.mark.parametrize("reach", [*REACHES, FULL], ids=str)
def test_pairs_of_arrays_are_those_of_single_sequences(reach: Reach) -> None:
    lengths = np.arange(0, 200)
    counted = [2 * reach.pairs(int(length)) for length in lengths]
    assert doubled_pairs(reach, lengths.astype(np.float64)).tolist() == counted


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
def test_the_busiest_rank_of_a_window_has_the_pairs_that_it_is_priced_with(
    window: int, degree: int, strategy: str
) -> None:
    reach, size = Reach(window=window), 12  # of a slice
    ranks = slices_of(degree, strategy)
    counted = []
    for slices in ranks:
        of_rank = [reach.pairs(size * (i + 1)) - reach.pairs(size * i) for i in slices]
        counted.append(2 * sum(of_rank))
    s = np.array([float(size * sum(map(len, ranks)))])
    assert busiest_pairs(reach, s, degree, strategy)[0] == max(counted)


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 5, 12, 16, 24, 48, 100, 1000])
def test_the_busiest_rank_of_chunks_has_the_pairs_and_halos_that_it_is_priced_with(
    chunk: int, degree: int, strategy: str
) -> None:
    reach, size = Reach(chunk=chunk), 12
    ranks = slices_of(degree, strategy)
    pairs, received = [], []
    for slices in ranks:
        of_rank = [reach.pairs(size * (i + 1)) - reach.pairs(size * i) for i in slices]
        pairs.append(2 * sum(of_rank))
        own = {token for i in slices for token in range(size * i, size * (i + 1))}
        read = {key for i in slices for key in range(reach.first_key(size * i), size * i)}
        received.append(len(read - own))
    s = np.array([float(size * sum(map(len, ranks)))] * 2)
    assert busiest_pairs(reach, s, degree, strategy).tolist() == [max(pairs)] * 2
    assert halos(reach, s, degree, strategy).tolist() == [max(received)] * 2


def test_the_ranks_of_a_hybrid_share_the_pairs_of_the_busiest_node() -> None:
    window = NearLayers(reach=Reach(window=64), share=1.0, attention_s=1.0)
    cost = replace(SIMPLE, attention_s=0.0, all_to_all_bytes=0.0, ring_bytes=0.0, kinds=(window,))
    nodes = nodes_spanned(16)
    most = busiest_pairs(window.reach, np.array([256.0]), nodes, "zigzag")[0]
    assert most > doubled_pairs(window.reach, np.array([256.0]))[0] / nodes
    found = cost.sequence_ns(256, 16, "hybrid", True) / 1e9
    assert found == pytest.approx(most / (16 // nodes))


@pytest.mark.parametrize("strategy", RINGS)
@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [1, 2, 5, 13, 64, 1000])
def test_the_busiest_rank_receives_no_more_than_its_halos_are_priced_with(
    window: int, degree: int, strategy: str
) -> None:
    reach, size = Reach(window=window), 12
    ranks = slices_of(degree, strategy)
    received = []
    for slices in ranks:
        own = {token for i in slices for token in range(size * i, size * (i + 1))}
        read = {key for i in slices for key in range(reach.first_key(size * i), size * i)}
        received.append(len(read - own))
    s = np.array([float(size * sum(map(len, ranks)))])
    priced = halos(reach, s, degree, strategy)[0]
    assert max(received) <= priced
    if window <= size + 1 and (degree != 3 or strategy == "balanced"):
        assert max(received) == priced


def test_seconds_are_a_sum_over_kinds_worked_by_hand() -> None:
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


def test_a_window_halo_does_not_grow_with_the_sequence() -> None:
    only_windows = replace(
        SIMPLE,
        attention_s=0.0,
        kinds=(NearLayers(reach=Reach(window=4), share=1.0, attention_s=0.0),),
    )
    short, long = (only_windows.sequence_ns(n, 4, "zigzag", False) for n in (1 << 10, 1 << 20))
    assert long - short < 1e6  # linear layers are a nanosecond per token


@pytest.mark.parametrize("strategy", ["local", "ulysses"])
def test_a_window_beyond_the_sequence_costs_what_a_full_layer_does(strategy: str) -> None:
    full = replace(SIMPLE, kinds=())
    wide = NearLayers(reach=Reach(window=10**6), share=0.75, attention_s=1.5)
    split = replace(SIMPLE, attention_s=0.5, kinds=(wide,))
    degree = 1 if strategy == "local" else 4
    whole, parts = (one.sequence_ns(9999, degree, strategy, False) for one in (full, split))
    assert parts == pytest.approx(whole, rel=1e-4)  # s (s + 1) for s^2


def test_hybrids_and_groups_on_nodes_have_a_price_with_windows() -> None:
    cost = PRESETS["gemma-3-27b-h100"]
    for strategy in (*RINGS, "hybrid", "ulysses"):
        short, long = (cost.sequence_ns(n, 16, strategy, True) for n in (1 << 14, 1 << 18))
        assert 0 < short < long


def test_the_host_of_a_ring_does_less_for_windows() -> None:
    cost = replace(SIMPLE, launch_s=1.0, post_s=1.0, message_s=1.0)
    full = replace(cost, kinds=())
    assert cost.host_s(8, "zigzag", False) < 0.5 * full.host_s(8, "zigzag", False)
    assert cost.host_s(8, "ulysses", False) == full.host_s(8, "ulysses", False)


def test_kinds_survive_json_and_are_seen_by_the_digest() -> None:
    chunks = NearLayers(reach=Reach(chunk=8192), share=0.25, attention_s=1e-9)
    cost = replace(SIMPLE, kinds=(*SIMPLE.kinds, chunks))
    assert CostModel.from_record(cost.to_record()) == cost
    without = replace(SIMPLE, kinds=())
    assert len({cost.digest(), SIMPLE.digest(), without.digest()}) == 3


def test_a_model_from_before_there_were_kinds_is_read_and_has_its_digest() -> None:
    cost = replace(SIMPLE, kinds=())
    record = cost.to_record()
    del record["kinds"]
    assert CostModel.from_record(record) == cost
    assert cost.digest() == "ba18480790989c9d"


def test_presets_from_before_there_were_kinds_have_their_digests() -> None:
    digests = {
        "flexsp-gpt-7b-a100": "afa882b7c5c26842",
        "flexsp-gpt-13b-a100": "898a36c6280d8868",
        "flexsp-gpt-30b-a100": "6fd399ba0147bfd0",
        "llama-3.1-8b-a800": "c64f28e64e850e73",
        "llama-3.1-8b-h200": "3557c278873c7139",
    }
    assert {name: PRESETS[name].digest() for name in digests} == digests


@pytest.mark.parametrize(
    "kinds, message",
    [
        ([{"share": 0.5, "attention_s": 1.0}], "full layers are in attention_s"),
        ([{"share": 0.5, "attention_s": 1.0, "window": 0}], "kinds, window=0"),
        ([{"share": 0.5, "attention_s": 1.0, "window": 2, "chunk": 2}], "set one of them"),
        ([{"share": 1.5, "attention_s": 1.0, "window": 2}], "window 2, share=1.5"),
        ([{"share": 0.5, "attention_s": -1.0, "window": 2}], "window 2, attention_s=-1.0"),
        ([{"share": 0.5, "attention_s": 1.0, "window": 2}] * 2, "window 2 is listed twice"),
        (
            [{"share": 0.6, "attention_s": 1.0, name: 2} for name in ("window", "chunk")],
            "1.2 of the layers",
        ),
        ([{"share": 0.5, "window": 2}], "attention_s"),
        ([{"share": 0.0, "attention_s": 1.0, "window": 2}], "window 2: .* of no layers"),
        ({"window": 2}, "kinds"),
    ],
)
def test_kinds_without_meaning_are_refused(kinds: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.from_record(SIMPLE.to_record() | {"kinds": kinds})


def test_windows_of_a_stage_are_refused_by_their_name() -> None:
    stage = StageCost(
        linear_ns=1.0, attention_ns=1.0, chunk_ns=1.0, near_ns=((Reach(window=4), 1.0),)
    )
    record = PipelineCost.even(2, stage).to_record()
    record["stages"][1]["near_ns"][0]["window"] = 0
    with pytest.raises(ValueError, match="the cost of stage 1: near_ns, window=0"):
        PipelineCost.from_record(record)


# ---- estimated and published


def test_an_estimate_counts_pairs_of_windows_and_weights_of_active_experts() -> None:
    shape = ModelShape(
        layers=12, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=10,
        params=10_000, active_params=4_000, reaches=((9, Reach(window=256)),),
    )  # fmt: skip
    full = replace(shape, reaches=(), active_params=None)
    topology = Topology(nodes=1, ranks_per_node=8)
    cost, plain = (
        analytic_cost_model(one, DEVICES["H100"], topology, zero_stage=3) for one in (shape, full)
    )
    (kind,) = cost.kinds
    assert cost.attention_s == pytest.approx(plain.attention_s / 4)
    assert kind.share == 0.75
    blocks = 1 + BLOCK_KEYS / 256
    assert kind.attention_s == pytest.approx(0.75 * blocks * plain.attention_s)
    assert cost.linear_s / plain.linear_s == pytest.approx((4000 - 640) / (10_000 - 640))
    for name in ("token_bytes", "sharded_state_bytes", "micro_batch_s"):
        assert getattr(cost, name) == getattr(plain, name)
    # keys and values of two halos, in the two layers that are whole
    assert cost.state_bytes - plain.state_bytes == 2 * 2 * 255 * (2 * 2 * 16) * 2
    (lone, kept) = (
        analytic_cost_model(shape, DEVICES["H100"], Topology(nodes=1, ranks_per_node=n),
                            checkpointing=n == 1) for n in (1, 2)
    )  # fmt: skip
    params = 16.0 * shape.params + 4 * shape.vocab * shape.hidden
    assert lone.state_bytes == params
    assert kept.state_bytes - params == 9 * 2 * 255 * (2 * 2 * 16) * 2


def test_heads_that_differ_by_kind_count_by_kind() -> None:
    shape = ModelShape(
        layers=4, hidden=64, heads=4, kv_heads=4, head_dim=32, intermediate=128, vocab=10,
        params=10_000, reaches=((3, Reach(window=256)),),
        head_shapes=((FULL, HeadShape(4, 1, 32)), (Reach(window=256), HeadShape(4, 4, 16))),
    )  # fmt: skip
    topology = Topology(nodes=1, ranks_per_node=8)
    cost, uneven = (
        analytic_cost_model(one, DEVICES["H100"], topology)
        for one in (replace(shape, head_shapes=()), shape)
    )
    # queries, and keys with values, of one full layer and three with a window
    queries, keys = 4 * 32 + 3 * 4 * 16, 2 * 32 + 3 * 2 * 4 * 16
    assert uneven.query_bytes == 2 * queries
    assert uneven.ring_bytes == 2 * 3 * keys
    assert uneven.all_to_all_bytes == 2 * 3 * (2 * queries + keys)
    assert uneven.attention_s == cost.attention_s
    assert uneven.kinds[0].attention_s == pytest.approx(cost.kinds[0].attention_s / 2)
    assert cost.token_bytes - uneven.token_bytes == 2 * 3 * 4 * 16  # what attention gave


def test_a_model_has_no_more_windows_than_layers() -> None:
    with pytest.raises(ValueError, match="63 layers with a window or a chunk, of 62 layers"):
        replace(SHAPES["gemma-3-27b"], reaches=((63, Reach(window=8)),))


@pytest.mark.parametrize(
    "model, full, billions, active",
    [("gemma-3-27b", 10 / 62, 27.0, 27.0), ("gpt-oss-120b", 0.5, 116.8, 5.13),
     ("qwen3-30b-a3b", 1.0, 30.53, 3.04)],
)  # fmt: skip
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_presets_with_kinds_have_the_published_sizes(
    model: str, full: float, billions: float, active: float, device: str
) -> None:
    cost = PRESETS[f"{model}-{device}"]
    assert cost.full_share == pytest.approx(full)
    assert cost.sharded_state_bytes == pytest.approx(16e9 * billions, rel=1e-3)
    # 8 FLOPs for every weight that works on a token, at 440 TFLOP/s
    assert cost.linear_s == pytest.approx(8e9 * active / 4.4e14, rel=2e-3)
    assert cost.max_tokens_per_rank(64) > 30_000
