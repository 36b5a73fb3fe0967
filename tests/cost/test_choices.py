"""Choices for activations: the bytes and seconds that they take, relative to the user's own, and
bytes of a token as the device has held them."""

from dataclasses import asdict, astuple, replace
from itertools import pairwise, product

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns, step_ns
from hf_flexseq.cost.activations import Activations, LayerBytes
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens, token_bytes, with_choice
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.peak import LEAST_FACTOR, MOST_FACTOR, Peak, peak_share, with_measured_peak
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.plan.memory import MemoryChoice
from tests.plans import group, plan_of_groups

NODES = Topology(nodes=8, ranks_per_node=8)
PLAIN = MemoryChoice()
ALL = MemoryChoice(recomputed_layers=32)
ON_HOST = MemoryChoice(recomputed_layers=32, inputs_on_host=32, outputs_on_host=32)
AGAIN = MemoryChoice(recomputed_layers=32, outputs_recomputed=32)


def llama(*, checkpointing: bool) -> CostModel:
    return analytic_cost_model(
        LLAMA_8B, DEVICES["H100"], NODES, zero_stage=3, checkpointing=checkpointing
    )


LAYER = LayerBytes(
    input_bytes=2,
    output_bytes=3,
    kept_bytes=40,
    mlp_bytes=16,
    peak_bytes=60,
    tiled_bytes=28,
    rest_bytes=36,
)
SMALL = Activations(
    kinds=(LAYER,),
    order=(0, 0, 0, 0),
    base_bytes=1,
    head_bytes=7,
    mlp_share=0.5,
    linear_passes=3.0,
    out_rate=1.0,
    back_rate=1.0,
    host_bytes=100.0,
    as_set=PLAIN,
)


def test_a_small_model_holds_what_is_counted_by_hand():
    held = SMALL.token_bytes
    assert held(PLAIN) == 1 + 3 * 40 + 60
    assert held(MemoryChoice(recomputed_layers=4)) == 1 + 3 * (2 + 3) + 60
    assert held(MemoryChoice(recomputed_layers=2)) == 1 + 2 * 5 + 40 + 60
    # an input and an output are on their way
    on_host = MemoryChoice(recomputed_layers=4, inputs_on_host=4, outputs_on_host=3)
    assert held(on_host) == 1 + 2 + 3 + 60
    assert SMALL.host_token_bytes(on_host) == 4 * 2 + 3 * 3
    again = MemoryChoice(recomputed_layers=4, outputs_recomputed=4)
    assert held(again) == 1 + 3 * 2 + 60
    # of what tiles divide a quarter is left, and MLPs keep nothing
    assert held(MemoryChoice(mlp_tiles=4)) == 1 + 3 * 24 + (60 - 28 * 3 / 4)
    assert held(MemoryChoice(mlp_tiles=16)) == 1 + 3 * 24 + 36  # the rest of a layer is more
    # a head that is larger than a layer's backward
    assert replace(SMALL, head_bytes=30).token_bytes(PLAIN) == 1 + 4 * 40 + 30


def test_what_runs_again_is_what_takes_longer():
    cost = llama(checkpointing=False)
    again = with_choice(cost, AGAIN)
    assert again.linear_s == pytest.approx(cost.linear_s * 4 / 3)
    assert again.attention_s == pytest.approx(cost.attention_s * 4.5 / 3.5)
    assert again.all_to_all_bytes == pytest.approx(cost.all_to_all_bytes * 4 / 3)
    assert again.ring_bytes == pytest.approx(cost.ring_bytes * 4 / 3)
    kept = with_choice(cost, ALL)
    assert kept.attention_s == cost.attention_s
    tiled = with_choice(cost, MemoryChoice(mlp_tiles=8))
    assert cost.linear_s < tiled.linear_s < cost.linear_s * 4 / 3


def test_transfers_to_the_host_count_where_layers_do_not_hide_them():
    cost = llama(checkpointing=False)
    assert with_choice(cost, ON_HOST).linear_s == with_choice(cost, ALL).linear_s
    slow = replace(cost.activations, out_rate=1e8, back_rate=1e8)
    moved_s = slow.host_token_bytes(ON_HOST) / 1e8
    hidden_s = with_choice(cost, ALL).linear_s
    of_slow = with_choice(replace(cost, activations=slow), ON_HOST)
    assert of_slow.linear_s == pytest.approx(2 * moved_s)
    assert of_slow.linear_s > hidden_s


def test_the_host_and_the_device_bound_the_tokens_of_a_rank():
    cost = llama(checkpointing=False)
    device_tokens = cost.free_bytes(64) // token_bytes(cost, ON_HOST)
    host_tokens = cost.activations.host_bytes // cost.activations.host_token_bytes(ON_HOST)
    assert most_tokens(cost, ON_HOST, 64) == min(device_tokens, host_tokens)
    small = replace(cost, activations=replace(cost.activations, host_bytes=0.0))
    assert most_tokens(small, ON_HOST, 64) == 0
    assert most_tokens(small, ALL, 64) == most_tokens(cost, ALL, 64)
    # the user's own choice is bounded by the host, too
    offloads = replace(cost, activations=replace(cost.activations, as_set=ON_HOST))
    assert offloads.max_tokens_per_rank(64) <= host_tokens


@pytest.mark.parametrize(
    "as_set", [PLAIN, ALL, AGAIN, ON_HOST, MemoryChoice(recomputed_layers=8, mlp_tiles=4)], ids=str
)
@pytest.mark.parametrize("host_gib", [0, 20, 1000])
def test_rungs_rise_in_room_and_seconds_and_keep_what_the_user_has_set(as_set, host_gib):
    cost = llama(checkpointing=False)
    host_bytes = host_gib * 2.0**30
    token = cost.activations.token_bytes(as_set)
    activations = replace(cost.activations, as_set=as_set, host_bytes=host_bytes)
    cost = replace(cost, activations=activations, token_bytes=token)
    choices = choices_of(cost, 64)
    assert choices[0] == as_set
    assert len(choices) <= 5
    rooms = [most_tokens(cost, choice, 64) for choice in choices]
    assert rooms == sorted(set(rooms))
    # the last one holds what no mixture of all levers exceeds
    assert rooms[-1] == max(most_tokens(cost, choice, 64) for choice in mixtures(as_set))
    priced = [with_choice(cost, choice) for choice in choices]
    for lower, higher in pairwise(priced):
        assert lower.linear_s <= higher.linear_s
        assert lower.attention_s <= higher.attention_s
    for choice in choices:
        for name in ("recomputed_layers", "inputs_on_host", "outputs_on_host", "mlp_tiles"):
            assert getattr(choice, name) >= getattr(as_set, name)
        assert choice.outputs_recomputed >= as_set.outputs_recomputed


def mixtures(as_set: MemoryChoice) -> list[MemoryChoice]:
    """Return what levers can do with layers taken by quarters, each at least as set."""
    made = []
    quarters = (0, 8, 16, 24, 32)
    for again, inputs, outputs, attention in product(quarters, repeat=4):
        for tiles in (1, 4, 16):
            values = (again, inputs, outputs, attention, tiles)
            if inputs > again or outputs + attention > again:
                continue
            if all(one >= least for one, least in zip(values, astuple(as_set), strict=True)):
                made.append(MemoryChoice(**dict(zip(asdict(as_set), values, strict=True))))
    return made


def test_a_micro_batch_is_priced_by_its_own_choice():
    cost = llama(checkpointing=False)
    plan = plan_of_groups((9000, 2000), [group(0, 2, 0)], [group(0, 1, 1)])
    first, second = plan.micro_batches
    mixed = (replace(first, memory=AGAIN), second)
    of_first, of_second = lockstep_ns(cost, mixed, plan.lengths, NODES)
    assert of_first == lockstep_ns(with_choice(cost, AGAIN), [first], plan.lengths, NODES)[0]
    assert of_second == lockstep_ns(cost, [second], plan.lengths, NODES)[0]
    for sync in ("lockstep", "free"):
        plain_ns = step_ns(cost, plan.micro_batches, plan.lengths, NODES, sync=sync)
        assert step_ns(cost, mixed, plan.lengths, NODES, sync=sync) > plain_ns


def test_records_without_layers_or_kinds_are_refused():
    record = llama(checkpointing=False).to_record()
    record["activations"] |= {"kinds": []}
    with pytest.raises(ValueError, match=r"number of kinds=0: must be at least 1"):
        CostModel.from_record(record)
    record["activations"]["order"] = [0] * 20_000
    with pytest.raises(ValueError, match=r"number of layers=20000: must be at most 10,000"):
        CostModel.from_record(record)


def test_a_host_without_room_for_a_token_is_named():
    cost = llama(checkpointing=True)
    activations = replace(cost.activations, as_set=ON_HOST, host_bytes=1000.0)
    with pytest.raises(ValueError, match=r"may use 1000 bytes of it: raise host_memory_gib"):
        replace(cost, activations=activations).max_tokens_per_rank(64)


def test_a_choice_of_more_layers_than_the_model_has_is_refused():
    cost = llama(checkpointing=False)
    with pytest.raises(ValueError, match="the plan recomputes 33 layers, and the model of"):
        with_choice(cost, MemoryChoice(recomputed_layers=33))


# ---- bytes of a token as the device has held them


NODE = Topology(nodes=1, ranks_per_node=8)
COST = analytic_cost_model(LLAMA_8B, DEVICES["H100"], NODE, zero_stage=3, checkpointing=False)
HALF = COST.max_tokens_per_rank(8) // 2


def peak_of(tokens: int, factor: float, left: int = 0, of_token: float = COST.token_bytes) -> Peak:
    """A micro-batch whose tokens hold `factor` times the predicted bytes."""
    return Peak(before=10**9, most=10**9 + int(factor * tokens * of_token), after=10**9 + left)


def test_a_peak_is_compared_with_the_bytes_of_its_tokens():
    assert peak_share(COST, peak_of(HALF, 1.2), HALF, None, 8) == pytest.approx(1.2)
    chosen = choices_of(COST, 8)[1]
    tokens = most_tokens(COST, chosen, 8)
    of_token = COST.activations.token_bytes(chosen)
    of_token *= COST.token_bytes / COST.activations.token_bytes(COST.activations.as_set)
    peak = peak_of(tokens, 0.9, of_token=of_token)
    assert peak_share(COST, peak, tokens, chosen, 8) == pytest.approx(0.9)


def test_small_micro_batches_and_first_gradients_say_nothing():
    few = HALF // 4
    assert peak_share(COST, peak_of(few, 3.0), few, None, 8) == 0.0
    held = int(HALF * COST.token_bytes)
    assert peak_share(COST, peak_of(HALF, 1.0, left=held // 20), HALF, None, 8) > 0
    assert peak_share(COST, peak_of(HALF, 1.0, left=held // 5), HALF, None, 8) == 0.0


@pytest.mark.parametrize(
    "share, factor", [(0.0, 1.0), (0.9, 0.9), (1.2, 1.2), (0.1, LEAST_FACTOR), (9, MOST_FACTOR)]
)
def test_the_bytes_of_a_token_are_corrected_within_bounds_under_every_choice(share, factor):
    cost = with_measured_peak(COST, share)
    assert replace(cost, token_bytes=COST.token_bytes) == COST
    for choice in choices_of(COST, 8)[:2]:  # the host bounds the others, too
        tokens = most_tokens(COST, choice, 8)
        assert most_tokens(cost, choice, 8) == pytest.approx(tokens / factor, abs=1)
