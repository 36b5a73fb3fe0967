"""The cost model against the published formula written out, and its evaluation of
micro-batches."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import (
    CostModel,
    free_ns,
    group_ns,
    lockstep_ns,
    nodes_spanned,
    rank_ns,
    step_ns,
)
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model
from hf_flexseq.cost.launches import layer_work
from hf_flexseq.cost.model import HOST_CONSTANTS
from hf_flexseq.cost.presets import PRESETS, load_cost_model
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
H200 = PRESETS["llama-3.1-8b-h200"]
LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    params=8_030_261_248,
)
TWO_NODES = Topology(nodes=2, ranks_per_node=8)
SIMPLE = CostModel(
    name="simple",
    attention_s=0.0,
    linear_s=1.0,
    micro_batch_s=100.0,
    group_s=0.0,
    all_to_all_bytes=0.0,
    ring_bytes=None,
    query_bytes=0.0,
    ring_overlap=1.0,
    bandwidths=((2, 1.0),),
    heads=None,
    token_bytes=1.0,
    state_bytes=0.0,
    sharded_state_bytes=0.0,
    budget_bytes=1000.0,
)


def published_ms(length: int, degree: int, gigabytes_per_s: float) -> float:
    """FlexSP's equations 12 to 14 with the 7B constants, as released: MiB over GB/s read as
    milliseconds."""
    compute = (5.128e-6 * length**2 + 0.18396 * length) / degree
    return compute + 4 * 2 * 32 * 4096 * 2 * length / 2**20 / degree / gigabytes_per_s


@pytest.mark.parametrize(
    "degree, speed", [(2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87)]
)
@pytest.mark.parametrize("length", [1, 4096, 100_003, 393_216])
def test_preset_is_the_published_formula(degree: int, speed: float, length: int) -> None:
    ours = FLEXSP.sequence_ns(length, degree, "ulysses", spans_nodes=degree > 8)
    assert abs(ours - published_ms(length, degree, speed) * 1e6) <= 1


def test_preset_constants() -> None:
    assert FLEXSP.sequence_ns(10_000, 1, "local", False) == round((5.128e-6 * 1e8 + 1839.6) * 1e6)
    assert FLEXSP.micro_batch_ns == 629_400_000
    assert PRESETS["flexsp-gpt-13b-a100"].micro_batch_ns == 1_132_600_000
    assert PRESETS["flexsp-gpt-30b-a100"].micro_batch_ns == 2_789_400_000


def test_preset_memory_is_the_published_one() -> None:
    """28 GiB less 16 bytes for each of 7.85 G parameters over 64 ranks, at 4.48 MiB a token."""
    assert (
        FLEXSP.max_tokens_per_rank(64) == int((28 * 1024 - 7.85 * 16 * 1024 / 64) / 4.48) == 5951
    )
    at_192k = replace(FLEXSP, sharded_state_bytes=7.117 * 16 * 2**30)
    assert at_192k.max_tokens_per_rank(64) == 5993


def test_bandwidth_of_unmeasured_degrees() -> None:
    speed = dict(FLEXSP.bandwidths)
    inside, across = [
        [FLEXSP.bandwidth(d, spans) for d in (2, 3, 5, 6, 8)] for spans in (False, True)
    ]
    assert inside == [speed[2], speed[4], speed[8], speed[8], speed[8]]
    assert across == [speed[16]] * 5
    assert [FLEXSP.bandwidth(d, True) for d in (16, 24, 48, 64, 1024)] == [
        speed[d] for d in (16, 32, 64, 64, 64)
    ]


def test_ulysses_with_heads_that_do_not_divide() -> None:
    cost = replace(SIMPLE, attention_s=1.0, linear_s=1e-6, heads=6)
    attention = [cost.sequence_ns(1000, d, "ulysses", False) / 1e15 for d in (2, 3, 4, 6, 12)]
    assert attention == pytest.approx([1 / 2, 1 / 3, 2 / 6, 1 / 6, 1 / 6], rel=1e-6)


def test_a_ring_hides_transfers_behind_attention_or_the_other_way_round() -> None:
    cost = replace(SIMPLE, attention_s=1.0, ring_bytes=2.0, bandwidths=((4, 0.5),))
    moved = 2.0 * 10 * (3 / 4) / 0.5
    assert cost.sequence_ns(10, 4, "zigzag", False) == round((max(100 / 4, moved) + 10 / 4) * 1e9)
    assert cost.sequence_ns(100, 4, "zigzag", False) == round((100**2 / 4 + 100 / 4) * 1e9)


def test_ulysses_hides_all_but_the_first_piece_of_its_heads() -> None:
    """Two heads on each of four ranks: half of the transfers may be hidden, of sixteen heads three
    quarters."""
    link = {"all_to_all_bytes": 2.0, "bandwidths": ((4, 0.5),), "all_to_all_overlap": 0.5}
    cost = replace(SIMPLE, attention_s=1.0, piece_rows=1, **link)
    for heads, share in ((4, 0.0), (8, 0.25), (16, 0.375), (64, 0.375), (None, 0.375)):
        of_heads = replace(cost, heads=heads)
        for length in (2, 100):
            moved, linear = 2.0 * length / 4 / 0.5, length / 4
            seconds = max(length**2 / 4, share * moved) + (1 - share) * moved + linear
            assert of_heads.sequence_ns(length, 4, "ulysses", False) == round(seconds * 1e9)


def test_a_hybrid_is_ulysses_inside_a_node_and_a_ring_across_nodes() -> None:
    """16 ranks on two nodes: 10 bytes a token inside at 5 bytes/s, one trip of 3 bytes a token
    across at 1 byte/s."""
    cost = replace(
        SIMPLE,
        attention_s=1.0,
        all_to_all_bytes=10.0,
        ring_bytes=3.0,
        bandwidths=((8, 5.0), (16, 1.0)),
    )
    inside, across, linear = 10 * 80 / 16 / 5, 3 * 80 / 16, 80 / 16
    assert cost.sequence_ns(80, 16, "hybrid", True) == round(
        (80 * 80 / 16 + inside + linear) * 1e9
    )
    no_attention = replace(cost, attention_s=0.0)
    assert no_attention.sequence_ns(80, 16, "hybrid", True) == round(
        (across + inside + linear) * 1e9
    )
    assert cost.sequence_ns(80, 8, "hybrid", False) == cost.sequence_ns(80, 8, "ulysses", False)
    assert [nodes_spanned(d) for d in (2, 6, 8, 16, 24, 64, 9)] == [2, 2, 2, 2, 3, 8, 3]


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "hybrid"])
def test_unknown_rings_are_refused(strategy: str) -> None:
    with pytest.raises(ValueError, match="no ring_bytes"):
        FLEXSP.sequence_ns(10, 2, strategy, True)
    with pytest.raises(ValueError, match="no ring_bytes"):
        FLEXSP.strategies(strategy)
    assert FLEXSP.strategies("auto") == ("ulysses",)
    with pytest.raises(ValueError, match="no cost formula"):
        FLEXSP.sequence_ns(10, 2, "ring", False)


def test_vector_and_scalar_agree() -> None:
    cost = analytic_cost_model(LLAMA_8B, DEVICES["H100"], TWO_NODES)
    lengths = np.array([1, 17, 4096, 123_457])
    for degree, strategy in ((1, "local"), (6, "ulysses"), (16, "zigzag")):
        together = cost.sequences_ns(lengths, degree, strategy, degree > 8).tolist()
        assert together == [
            cost.sequence_ns(int(s), degree, strategy, degree > 8) for s in lengths
        ]


# ---- evaluation


def group(start: int, stop: int, *sequences: int) -> Group:
    name = "local" if stop - start == 1 else "ulysses"
    return Group(ranks=tuple(range(start, stop)), sequences=sequences, strategy=name)


LENGTHS = (8, 4, 6, 2)
STEP = (
    MicroBatch(groups=(group(0, 2, 0), group(1, 2, 1))),  # rank 0: 4, rank 1: 4 + 4
    MicroBatch(groups=(group(0, 1, 2), group(1, 2, 3))),  # rank 0: 6, rank 1: 2
)


def test_lockstep_waits_for_the_slowest_rank_of_each_micro_batch() -> None:
    node = Topology(nodes=1, ranks_per_node=2)
    assert [ns / 1e9 for ns in lockstep_ns(SIMPLE, STEP, LENGTHS, node)] == [108, 106]
    assert step_ns(SIMPLE, STEP, LENGTHS, node, sync="lockstep") == 214e9


def test_groups_of_two_ranks_and_more_pay_their_latency() -> None:
    cost, node = replace(SIMPLE, group_s=3.0), Topology(nodes=1, ranks_per_node=3)
    ranks, alone = (rank_ns(model, STEP[0].groups, LENGTHS, node) for model in (cost, SIMPLE))
    wide = [
        sum(group.degree > 1 for group in STEP[0].groups if rank in group.ranks)
        for rank in range(3)
    ]
    assert set(wide) == {0, 1}
    assert [a - b for a, b in zip(ranks, alone, strict=True)] == [
        3_000_000_000 * count for count in wide
    ]
    assert free_ns(cost, STEP, LENGTHS, node) > free_ns(SIMPLE, STEP, LENGTHS, node)


def of_host(cost: CostModel, strategy: str, degree: int) -> float:
    """Seconds of the host, from the counts of `launches.py`."""
    work = layer_work(strategy, degree)
    messages = cost.message_s * work.messages
    return cost.launch_s * work.launches + cost.post_s * work.posts + messages


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("strategy", ["ulysses", "zigzag", "balanced"])
def test_a_group_takes_its_attention_or_its_launches_whichever_is_longer(
    strategy: str, overlap: float
) -> None:
    """Sequences of a group share its launches; linear layers and latencies come on top."""
    cost = replace(
        SIMPLE, attention_s=1.0, ring_bytes=3.0, group_s=7.0, launch_s=2.0, post_s=5.0,
        message_s=1.0, host_overlap=overlap,
    )  # fmt: skip
    node, host = Topology(nodes=1, ranks_per_node=4), of_host(cost, strategy, 4)
    for lengths in ((4,), (4, 8, 2), (40,), (40, 30)):
        shared = Group(ranks=(0, 1, 2, 3), sequences=tuple(range(len(lengths))), strategy=strategy)
        linear = sum(lengths) / 4
        alone = cost.sequences_ns(np.array(lengths), 4, strategy, False).sum() / 1e9
        device = max(alone - linear, overlap * host) + (1 - overlap) * host
        expected = linear + device + 7.0
        assert group_ns(cost, shared, lengths, node) / 1e9 == pytest.approx(expected, rel=1e-9)
    for length in (1, 40):
        alone = Group(ranks=(0, 1, 2, 3), sequences=(0,), strategy=strategy)
        (found,) = cost.alone_ns(np.array([length]), 4, strategy, False)
        assert found == group_ns(cost, alone, (length,), node)


def test_a_rank_alone_launches_in_the_constant_of_the_micro_batch() -> None:
    cost = replace(SIMPLE, launch_s=2.0, post_s=5.0, message_s=1.0, host_overlap=0.0)
    alone, node = group(0, 1, 0), Topology(nodes=1, ranks_per_node=1)
    assert group_ns(cost, alone, (8,), node) == group_ns(SIMPLE, alone, (8,), node)


def test_a_hybrid_inside_a_node_launches_what_ulysses_does() -> None:
    cost = replace(SIMPLE, ring_bytes=3.0, launch_s=1.0, post_s=1.0)
    assert cost.waits(4, "hybrid", False) == cost.waits(4, "ulysses", False)
    assert cost.waits(16, "hybrid", True) != cost.waits(16, "ulysses", True)


def test_free_ranks_wait_only_in_their_groups() -> None:
    node = Topology(nodes=1, ranks_per_node=3)
    assert [ns / 1e9 for ns in free_ns(SIMPLE, STEP, LENGTHS, node)] == [210, 210, 0]
    late = (STEP[1], STEP[0])
    # Rank 0 works 106, rank 1 102, then both pay 100 and meet at 206.
    assert [ns / 1e9 for ns in free_ns(SIMPLE, late, LENGTHS, node)] == [210, 214, 0]
    assert step_ns(SIMPLE, late, LENGTHS, node, sync="free") == 214e9
    assert (
        step_ns(SIMPLE, (), (), node, sync="free")
        == step_ns(SIMPLE, (), (), node, sync="lockstep")
        == 0
    )


# ---- estimates


def test_analytic_model_counts_flops_and_bytes() -> None:
    cost = analytic_cost_model(LLAMA_8B, DEVICES["H100"], TWO_NODES, zero_stage=3)
    assert cost.linear_s * DEVICES["H100"].flops == pytest.approx(
        8 * (LLAMA_8B.params - 128256 * 4096)
    )
    assert cost.attention_s * DEVICES["H100"].flops == pytest.approx(32 * 7 * 4096)
    assert cost.all_to_all_bytes == 32 * 2 * 3 * (2 * 4096 + 2 * 1024)
    plain = analytic_cost_model(LLAMA_8B, DEVICES["H100"], TWO_NODES, checkpointing=False)
    assert plain.all_to_all_bytes == 32 * 2 * 2 * (2 * 4096 + 2 * 1024)
    assert cost.ring_bytes == 32 * 2 * 3 * 2 * 1024
    assert cost.state_bytes == 4 * 128256 * 4096  # the gradient of the head
    assert cost.sharded_state_bytes == 16 * LLAMA_8B.params


def test_analytic_memory_depends_on_sharding_and_checkpointing() -> None:
    def tokens(**options: object) -> int:
        return analytic_cost_model(
            LLAMA_8B, DEVICES["H200"], TWO_NODES, **options
        ).max_tokens_per_rank(16)

    assert tokens(zero_stage=3) > tokens(zero_stage=2) > tokens(zero_stage=1)
    assert tokens(zero_stage=3) > 2 * tokens(zero_stage=3, checkpointing=False)
    assert tokens(zero_stage=3) > 2 * tokens(zero_stage=3, chunked_loss=False)
    with pytest.raises(ValueError, match="leaves no room for a token: shard them"):
        tokens(zero_stage=0)
    with pytest.raises(ValueError, match="zero_stage=4"):
        tokens(zero_stage=4)


@pytest.mark.parametrize(
    "nodes, ranks", [(1, 1), (1, 8), (2, 8), (2, 4), (3, 2), (2, 12), (2, 16), (5, 3)]
)
def test_analytic_bandwidth_is_the_node_s_exactly_inside_nodes(nodes: int, ranks: int) -> None:
    topology, device = Topology(nodes=nodes, ranks_per_node=ranks), DEVICES["H100"]
    cost = analytic_cost_model(LLAMA_8B, device, topology, zero_stage=3)
    assert all(cost.bandwidth(d, False) == device.intra_bytes for d in range(2, ranks + 1))
    assert all(cost.bandwidth(n * ranks, True) == device.inter_bytes for n in range(2, nodes + 1))


# ---- files


def test_json_round_trip(tmp_path: Path) -> None:
    for model in (
        *PRESETS.values(),
        SIMPLE,
        analytic_cost_model(LLAMA_8B, DEVICES["CPU"], TWO_NODES),
    ):
        model.save(tmp_path / "cost.json")
        loaded = load_cost_model(str(tmp_path / "cost.json"))
        assert loaded == model
        assert loaded.digest() == model.digest()


def test_digest_sees_every_constant() -> None:
    digests = {FLEXSP.digest()}
    constants = FLEXSP.to_record()
    assert constants.pop("version") == 1
    for name, value in constants.items():
        changed = {
            "heads": 64,
            "ring_bytes": 1.0,
            "ring_overlap": 0.5,
            "all_to_all_overlap": 0.5,
            "host_overlap": 0.5,
            "name": "x",
            "bandwidths": [[2, 1.0]],
            "kinds": [{"window": 8, "share": 0.5, "attention_s": 1.0}],
            "recurrent": [
                {
                    "kind": "mamba2",
                    "share": 0.5,
                    "token_s": 1.0,
                    "again_s": 1.0,
                    "summary_bytes": 1.0,
                    "halo_bytes": 1.0,
                    "row_bytes": 1.0,
                }
            ],
            "attention_share": 0.5,
        }.get(name) or value + 1
        digests.add(CostModel.from_record(constants | {name: changed}).digest())
    assert len(digests) == 1 + len(constants)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_s": "fast"}, "linear_s='fast'"),
        ({"linear_s": 0}, "linear_s=0"),
        ({"attention_s": -1.0}, "attention_s=-1.0"),
        ({"budget_bytes": float("nan")}, "NaN is not a number"),
        ({"budget_bytes": 1e300}, "budget_bytes=1e.300: must be at most"),
        ({"attention_s": True}, "attention_s=True: must be a finite number"),
        ({"attention_s": 10**400}, "attention_s=1000.*: must be at most"),
        ({"name": "\x1b[31m"}, r"name='\\x1b\[31m': must be one line"),
        ({"version": 2}, "version 2: this hf_flexseq reads version 1"),
        ({"heads": 2.5}, "heads=2.5"),
        ({"heads": 0}, "heads=0"),
        ({"nics_per_node": 0}, "nics_per_node=0"),
        ({"nics_per_node": 1.5}, "nics_per_node=1.5: must be a whole number"),
        ({"transfer_s": -1.0}, "transfer_s=-1.0"),
        ({"launch_s": -1.0}, "launch_s=-1.0"),
        ({"post_s": 1e10}, "post_s=1.*: must be at most"),
        ({"message_s": "x"}, "message_s='x'"),
        ({"contact_s": -1.0}, "contact_s=-1.0"),
        ({"host_overlap": 1.5}, "host_overlap=1.5"),
        ({"all_to_all_overlap": 1.5}, "all_to_all_overlap=1.5"),
        ({"name": 3}, "name=3"),
        ({"bandwidths": []}, "at least one"),
        ({"bandwidths": {"2": 1}}, "must be a list"),
        ({"bandwidths": [[4, 1.0], [2, 1.0]]}, "must ascend"),
        ({"bandwidths": [[2, 0.0]]}, "positive"),
        ({"bandwidths": [["2", 1.0]]}, "degree='2': must be a whole number"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
    ],
)
def test_a_file_with_nonsense_is_named(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(FLEXSP.to_record() | change))
    with pytest.raises(ValueError, match=message) as caught:
        load_cost_model(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": "x"}'])
def test_a_file_that_does_not_parse_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        CostModel.load(path)


def test_a_file_that_knows_no_nics_has_one(tmp_path: Path) -> None:
    record = {
        name: value
        for name, value in FLEXSP.to_record().items()
        if name not in ("nics_per_node", "transfer_s", "all_to_all_overlap", "piece_rows")
    }
    assert CostModel.from_record(record) == FLEXSP
    assert (FLEXSP.nics_per_node, FLEXSP.transfer_s, FLEXSP.all_to_all_overlap) == (1, 0.0, 0.0)


def test_models_without_launches_keep_their_digests() -> None:
    """That of the released 7B model is in the records of plans made before there were launches."""
    assert FLEXSP.digest() == "afa882b7c5c26842"
    assert not FLEXSP.has_waits
    record = {
        name: value for name, value in H200.to_record().items() if name not in HOST_CONSTANTS
    }
    old = CostModel.from_record(record)
    assert (old.launch_s, old.post_s, old.message_s, old.contact_s) == (0, 0, 0, 0)
    assert old.digest() != H200.digest()


# ---- what the launches decide on an H200

K = 1024
NODE = Topology(nodes=1, ranks_per_node=8)


def chosen(cost: CostModel, length: int) -> tuple[str, int]:
    """Strategy and degree of the planner for one sequence on eight H200."""
    plan = make_plan([length], NODE, cost, PlanOptions(max_tokens_per_rank=256 * K))
    ((only,),) = (micro_batch.groups for micro_batch in plan.micro_batches)
    return only.strategy, only.degree


def seconds(cost: CostModel, strategy: str, length: int) -> float:
    return int(cost.alone_ns(np.array([length]), 8, strategy, False)[0]) / 1e9


def crossover(cost: CostModel) -> int:
    """The shortest length, in steps of 1K tokens, from which a zigzag of 8 beats Ulysses of 8."""
    lengths = range(K, 129 * K, K)
    beats = [seconds(cost, "zigzag", s) < seconds(cost, "ulysses", s) for s in lengths]
    assert beats == sorted(beats), "once it is faster it stays so"
    return lengths[beats.index(True)]


def test_launches_rule_out_a_zigzag_of_8_at_16k_and_allow_it_at_128k() -> None:
    without = replace(H200, launch_s=0.0, post_s=0.0)
    assert chosen(without, 16 * K) == ("zigzag", 8)
    assert chosen(H200, 16 * K) == ("ulysses", 8)
    assert seconds(H200, "zigzag", 16 * K) > seconds(H200, "ulysses", 16 * K)
    # At 128K it is chosen, and its launches cost nothing: all of them hide under its attention.
    assert chosen(H200, 128 * K) == ("zigzag", 8)
    assert seconds(H200, "zigzag", 128 * K) == seconds(without, "zigzag", 128 * K)


def test_doubling_the_cost_of_a_launch_moves_the_crossover() -> None:
    assert 16 * K < crossover(H200) < 128 * K
    launches_twice = replace(H200, launch_s=2 * H200.launch_s)
    both_twice = replace(launches_twice, post_s=2 * H200.post_s)
    assert crossover(H200) < crossover(launches_twice) < crossover(both_twice) < 128 * K
    lengths = range(16 * K, 40 * K, K)
    first = next(length for length in lengths if chosen(H200, length) == ("zigzag", 8))
    assert chosen(both_twice, first) != ("zigzag", 8)


def test_unknown_names_list_the_presets() -> None:
    assert load_cost_model("flexsp-gpt-7b-a100") is FLEXSP
    with pytest.raises(
        ValueError, match="flexsp-gpt-7b-a100, flexsp-gpt-13b-a100, flexsp-gpt-30b-a100"
    ):
        load_cost_model("gpt-7b")


@pytest.mark.parametrize(
    ("nodes", "per_node", "tried"),
    [(8, 8, True), (2, 4, True), (3, 6, True), (5, 6, False), (4, 1, False), (1, 8, False)],
)
def test_auto_tries_hybrids_where_they_are_priced_for_their_nodes(
    nodes: int, per_node: int, tried: bool
) -> None:
    asked = H200.allowed("auto", Topology(nodes=nodes, ranks_per_node=per_node))
    assert ("hybrid" in H200.strategies(asked)) == tried
    assert "hybrid" not in FLEXSP.strategies(asked)  # which knows no ring


def test_auto_takes_a_hybrid_that_beats_all_other_strategies() -> None:
    """One sequence over two nodes, whose links are slow: one share of the keys crosses them."""
    topology = Topology(nodes=2, ranks_per_node=8)
    slow = replace(H200, bandwidths=((8, 4e11), (16, 4e9)))
    lengths, cap = [200 * K], 200 * K // 16
    found = make_plan(lengths, topology, slow, PlanOptions(max_tokens_per_rank=cap))
    ((group,),) = (micro_batch.groups for micro_batch in found.micro_batches)
    assert (group.strategy, group.degree) == ("hybrid", 16)
    for other in ("ulysses", "zigzag"):
        forced = make_plan(
            lengths, topology, slow, PlanOptions(max_tokens_per_rank=cap, strategy=other)
        )
        assert found.objective_s < forced.objective_s
