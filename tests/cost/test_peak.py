"""Bytes of a token as the device has held them."""

from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import choices_of, most_tokens
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.peak import LEAST_FACTOR, MOST_FACTOR, Peak, peak_share, with_measured_peak
from hf_flexseq.cost.presets import LLAMA_8B

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
