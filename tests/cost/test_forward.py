"""Forwards alone cost less than with their backwards, each part by its own share."""

import numpy as np
import pytest

from hf_flexseq.cost.forward import forward_only
from hf_flexseq.cost.presets import load_cost_model as preset

LENGTHS = np.array([100, 5_000, 60_000])


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b-h200", "qwen3.5-35b-a3b-h100", "gpt-oss-120b-h100"]
)
@pytest.mark.parametrize("strategy", ["local", "ulysses", "zigzag"])
def test_forwards_take_between_a_quarter_and_a_half(name, strategy):
    cost = preset(name)
    degree = 1 if strategy == "local" else 8
    both = cost.sequences_ns(LENGTHS, degree, strategy, False)
    forward = forward_only(cost).sequences_ns(LENGTHS, degree, strategy, False)
    share = forward / both
    assert (share > 0.25).all()
    assert (share < 0.51).all()


def test_a_forward_has_the_room_of_training():
    cost = preset("llama-3.1-8b-h200")
    assert forward_only(cost).max_tokens_per_rank(64) == cost.max_tokens_per_rank(64)
