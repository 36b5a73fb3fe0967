"""The cost model against the published formula written out, and its evaluation of
micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import (
    experts_ns,
    free_ns,
    group_ns,
    lockstep_ns,
    nodes_spanned,
    step_ns,
)
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.model import STATES, TERMS
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.terms import term_seconds
from hf_flexseq.plan import MicroBatch
from tests.costs import simple_cost
from tests.plans import group, planned

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
H200 = PRESETS["llama-3.1-8b-h200"]
STRATEGIES = ("ulysses", "zigzag", "balanced")


def published_ms(length: int, degree: int, gigabytes_per_s: float) -> float:
    """FlexSP's equations 12 to 14 with the 7B constants, as released: MiB over GB/s read as
    milliseconds."""
    compute = (5.128e-6 * length**2 + 0.18396 * length) / degree
    return compute + 4 * 2 * 32 * 4096 * 2 * length / 2**20 / degree / gigabytes_per_s


@pytest.mark.parametrize(
    "degree, speed", [(2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87)]
)
def test_preset_is_the_published_formula(degree, speed):
    for length in (1, 4096, 100_003, 393_216):
        ours = FLEXSP.sequence_ns(length, degree, "ulysses", spans_nodes=degree > 8)
        assert abs(ours - published_ms(length, degree, speed) * 1e6) <= 1


def test_preset_constants_and_memory_are_the_published_ones():
    assert FLEXSP.sequence_ns(10_000, 1, "local", False) == round((5.128e-6 * 1e8 + 1839.6) * 1e6)
    assert FLEXSP.micro_batch_ns == 629_400_000
    assert PRESETS["flexsp-gpt-13b-a100"].micro_batch_ns == 1_132_600_000
    assert PRESETS["flexsp-gpt-30b-a100"].micro_batch_ns == 2_789_400_000
    # 28 GiB less 16 bytes for each of 7.85 G parameters over 64 ranks, at 4.48 MiB a token
    most = int((28 * 1024 - 7.85 * 16 * 1024 / 64) / 4.48)
    assert FLEXSP.max_tokens_per_rank(64) == most == 5951
    at_192k = replace(FLEXSP, sharded_state_bytes=7.117 * 16 * 2**30)
    assert at_192k.max_tokens_per_rank(64) == 5993


def test_ulysses_with_heads_that_do_not_divide():
    cost = simple_cost(attention_s=1.0, linear_s=1e-6, heads=6)
    attention = [cost.sequence_ns(1000, d, "ulysses", False) / 1e15 for d in (2, 3, 4, 6, 12)]
    assert attention == pytest.approx([1 / 2, 1 / 3, 2 / 6, 1 / 6, 1 / 6], rel=1e-6)


def test_ulysses_moves_heads_before_and_after_its_attention():
    link = {"all_to_all_bytes": 2.0, "bandwidths": ((4, 0.5),), "overlap": 1.0}
    cost = simple_cost(attention_s=1.0, linear_s=1.0, **link)
    for length in (2, 100):
        seconds = length**2 / 4 + 2.0 * length / 4 / 0.5 + length / 4
        assert cost.sequence_ns(length, 4, "ulysses", False) == round(seconds * 1e9)


def test_copies_take_the_passes_of_their_strategy():
    """Ten around exchanges of heads, eleven around a ring and five for each of its steps."""
    cost = simple_cost(linear_s=1e-9, pass_s=1.0)
    passes = {
        ("local", 1, False): 0,
        ("ulysses", 8, False): 10,
        ("zigzag", 8, False): 11 + 5 * 7,
        ("balanced", 4, False): 11 + 5 * 3,
        ("hybrid", 16, True): 10 + 11 + 5 * 1,
    }
    for (strategy, degree, spans), count in passes.items():
        seconds = cost.sequence_ns(80, degree, strategy, spans) / 1e9
        assert seconds == pytest.approx(count * 80 / degree, abs=1e-6)


def test_states_of_recurrent_layers_count_by_segment():
    """Seven ranks before the last have a summary for it, thirteen segments where each has two;
    under Ulysses a group has them once."""
    cost = simple_cost(summary_bytes=3.0, overlap=1.0)
    lengths = np.array([80, 8])
    states = {name: cost.terms(lengths, 8, name, False)[STATES] for name in STRATEGIES}
    assert states["zigzag"].tolist() == [13 * 3.0] * 2
    assert states["balanced"].tolist() == [7 * 3.0] * 2
    assert states["ulysses"].tolist() == [0.0] * 2
    assert cost.waits(8, "ulysses", False) == (21_000_000_000, 0)
    assert cost.waits(8, "zigzag", False) == (0, 0)


def test_a_hybrid_is_ulysses_inside_a_node_and_a_ring_across_nodes():
    """16 ranks on two nodes: 10 bytes a token inside at 5 bytes/s, one trip of 3 bytes a token
    across at 1 byte/s."""
    cost = simple_cost(
        attention_s=1.0,
        linear_s=1.0,
        all_to_all_bytes=10.0,
        ring_bytes=3.0,
        overlap=1.0,
        bandwidths=((8, 5.0), (16, 1.0)),
    )
    inside, across, linear = 10 * 80 / 16 / 5, 3 * 80 / 16, 80 / 16
    attention = 80 * 80 / 16
    assert cost.sequence_ns(80, 16, "hybrid", True) / 1e9 == attention + inside + linear
    no_attention = replace(cost, attention_s=0.0)
    assert no_attention.sequence_ns(80, 16, "hybrid", True) / 1e9 == across + inside + linear
    assert cost.sequence_ns(80, 8, "hybrid", False) == cost.sequence_ns(80, 8, "ulysses", False)
    assert [nodes_spanned(d) for d in (2, 6, 8, 16, 24, 64, 9)] == [2, 2, 2, 2, 3, 8, 3]


@pytest.mark.parametrize("strategy", ["zigzag", "balanced", "hybrid"])
def test_unknown_rings_are_refused(strategy):
    with pytest.raises(ValueError, match="no ring_bytes"):
        FLEXSP.sequence_ns(10, 2, strategy, True)
    with pytest.raises(ValueError, match="no ring_bytes"):
        FLEXSP.strategies(strategy)
    assert FLEXSP.strategies("auto") == ("ulysses",)
    with pytest.raises(ValueError, match="no cost formula"):
        FLEXSP.sequence_ns(10, 2, "ring", False)


# ---- evaluation


SIMPLE = simple_cost(linear_s=1.0, micro_batch_s=100.0)
LENGTHS = (8, 4, 6, 2)
STEP = (
    MicroBatch(groups=(group(0, 2, 0), group(1, 2, 1))),  # rank 0: 4, rank 1: 4 + 4
    MicroBatch(groups=(group(0, 1, 2), group(1, 2, 3))),  # rank 0: 6, rank 1: 2
)


def test_lockstep_waits_for_the_slowest_rank_of_each_micro_batch():
    node = Topology(nodes=1, ranks_per_node=2)
    assert [ns / 1e9 for ns in lockstep_ns(SIMPLE, STEP, LENGTHS, node)] == [108, 106]
    assert step_ns(SIMPLE, STEP, LENGTHS, node, sync="lockstep") == 214e9


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_takes_its_attention_or_its_waits_whichever_is_longer(strategy, overlap):
    """Sequences of a group share its waits; linear layers come on top."""
    waits = {"group_s": 50.0, "group_rank_s": 9.0, "overlap": overlap}
    cost = replace(SIMPLE, attention_s=1.0, ring_bytes=3.0, **waits)
    node = Topology(nodes=1, ranks_per_node=4)
    host_s = 50.0 if strategy == "ulysses" else 50.0 + 4 * 9.0
    for lengths in ((4,), (4, 8, 2), (40,), (40, 30)):
        shared = group(0, 4, *range(len(lengths)), strategy=strategy)
        linear = sum(lengths) / 4
        alone = cost.sequences_ns(np.array(lengths), 4, strategy, False).sum() / 1e9
        device = max(alone - linear, overlap * host_s) + (1 - overlap) * host_s
        priced = group_ns(cost, shared, lengths, node)
        assert priced / 1e9 == pytest.approx(linear + device, rel=1e-9)
        if len(lengths) == 1:
            assert cost.alone_ns(np.array(lengths), 4, strategy, False).tolist() == [priced]
    # a rank alone launches in the constant of the micro-batch
    alone = group(0, 1, 0)
    assert group_ns(cost, alone, (8,), node) == group_ns(SIMPLE, alone, (8,), node) + 64e9


EXPERTS = ExpertLayers(ranks=2, token_s=0.5, exchanged_bytes=2.0, rate=4.0, imbalance=1.5)


def test_terms_of_a_micro_batch_add_up_to_its_seconds():
    """What a fit compares with seconds is what a plan is scored by."""
    node = Topology(nodes=1, ranks_per_node=4)
    lengths = (4000, 300, 20, 70, 5)
    groups = (
        group(0, 4, 0, strategy="zigzag"),
        group(0, 2, 1, strategy="ulysses"),
        group(2, 3, 2, 3),
        group(3, 4, 4),
    )
    for cost in (H200, replace(H200, experts=EXPERTS, summary_bytes=1e6, overlap=0.0)):
        micro_batch = MicroBatch(groups=groups)
        seconds = term_seconds(cost, micro_batch, lengths, node)
        assert seconds.shape == (4, len(TERMS))
        own = replace(cost, experts=None)
        ranks = np.array(free_ns(own, (micro_batch,), lengths, node)) / 1e9
        if cost.experts is not None:
            ranks += np.repeat(experts_ns(cost, micro_batch, lengths, node), 2) / 1e9
        assert seconds.sum(axis=1) == pytest.approx(ranks, abs=1e-8)


def test_free_ranks_wait_only_in_their_groups():
    node = Topology(nodes=1, ranks_per_node=3)
    assert [ns / 1e9 for ns in free_ns(SIMPLE, STEP, LENGTHS, node)] == [210, 210, 0]
    late = (STEP[1], STEP[0])
    # Rank 0 works 106, rank 1 102, then both pay 100 and meet at 206.
    assert [ns / 1e9 for ns in free_ns(SIMPLE, late, LENGTHS, node)] == [210, 214, 0]
    assert step_ns(SIMPLE, late, LENGTHS, node, sync="free") == 214e9
    assert step_ns(SIMPLE, (), (), node, sync="free") == 0
    assert step_ns(SIMPLE, (), (), node, sync="lockstep") == 0


# ---- what is chosen

K = 1024


def test_auto_takes_a_hybrid_that_beats_all_other_strategies():
    """One sequence over two nodes, whose links are slow: one share of the keys crosses them."""
    topology = Topology(nodes=2, ranks_per_node=8)
    slow = replace(H200, bandwidths=((8, 4e11), (16, 4e9)), kernel=None)
    cap = {"max_tokens_per_rank": 200 * K // 16}
    found = planned([200 * K], topology, slow, **cap)
    ((only,),) = (micro_batch.groups for micro_batch in found.micro_batches)
    assert (only.strategy, only.degree) == ("hybrid", 16)
    for other in ("ulysses", "zigzag"):
        forced = planned([200 * K], topology, slow, strategy=other, **cap)
        assert found.objective_s < forced.objective_s
