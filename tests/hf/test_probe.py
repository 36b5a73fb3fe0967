"""The probe for silent wrongness passes models that are exact, and sees faults that are planted.
All families are probed by `test_every_model.py`, with `-m nightly`."""

import pytest
import torch
import transformers

import hf_flexseq.hf.model.attention as hf_attention
from hf_flexseq.base.layers import Reach
from hf_flexseq.hf.model.probe import SEQUENCES, SHARED, probe_model
from tests.budget import others_slow
from tests.hf.hybrids import HYBRIDS
from tests.hf.test_checks import SIZES
from tests.hf.test_reach import FAMILIES

WINDOW, CHUNK = FAMILIES["GptOss"]["sliding_window"], FAMILIES["Llama4"]["attention_chunk_size"]
MODELS = {
    "Llama": {},
    "Gemma2": FAMILIES["Gemma2"],
    # No layer reads everything, so that changes end where windows and chunks do.
    "GptOss": FAMILIES["GptOss"] | {"layer_types": ["sliding_attention"] * 2},
    "Llama4": FAMILIES["Llama4"] | {"layer_types": ["chunked_attention"] * 2},
    "Phi3": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    },
}
# Without attention, which would carry what a state has lost.
RECURRENT = {
    "Qwen3Next": HYBRIDS["Qwen3Next"] | {"layer_types": ["linear_attention"] * 2},
    "KimiLinear": HYBRIDS["KimiLinear"] | {"layer_types": ["linear_attention"] * 2},
    "Bamba": HYBRIDS["Bamba without attention"],
    "Lfm2": {"layer_types": ["conv"] * 2},
}


def tiny(name):
    kind = getattr(transformers, name + "ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **(MODELS | RECURRENT)[name]})
    return kind._from_config(config, experts_implementation="eager")


def found(model, **options):
    """What a quick probe finds: one strategy, one changed token."""
    quick = {"strategies": ("zigzag",), "changes": ((0, 19), (2, 1)), "gradients": False}
    return probe_model(model, **{**quick, **options})


def test_what_is_to_be_seen_is_shorter_than_the_sequences():
    assert max(WINDOW, CHUNK, 16) < sorted(SEQUENCES)[-2]


@pytest.mark.parametrize("name", others_slow(MODELS | RECURRENT, tried=("Llama", "Lfm2")))
def test_an_exact_model_passes(name):
    strategy = SHARED[list(MODELS | RECURRENT).index(name) % len(SHARED)]
    assert found(tiny(name), strategies=(strategy,), gradients=True) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, planted, is_seen_by_changes",
    [
        ("GptOss", {"reach": Reach(window=WINDOW + 1)}, True),
        ("GptOss", {"reach": Reach(window=WINDOW - 1)}, True),
        ("Llama4", {"reach": Reach(chunk=CHUNK + 1)}, True),
        ("GptOss", {"sinks": None}, False),
        ("Gemma2", {"softcap": None}, False),
    ],
)
def test_wrong_attention_is_seen(name, planted, is_seen_by_changes, monkeypatch):
    read_call = hf_attention.read_call

    def wrongly_read(*args):
        asked = read_call(*args)
        return asked._replace(**planted)

    monkeypatch.setattr(hf_attention, "read_call", wrongly_read)
    wrong = found(tiny(name))
    assert any("differ by up to" in line for line in wrong)
    assert any("otherwise than in one process" in line for line in wrong) == is_seen_by_changes


@pytest.mark.parametrize("name", ["Llama4", "Phi3"])
def test_positions_counted_from_the_row_are_seen(name):
    """Llama 4 scales by a count, longrope chooses by the longest position."""
    assert found(tiny(name), attach=lambda model: model.set_attn_implementation("flexseq"))


# ---- recurrent layers


def test_parameters_whose_gradient_is_lost_are_seen():
    model = tiny("GptOss")

    def attach(rank):
        rank.set_attn_implementation("flexseq")
        for layer in rank.model.layers:
            layer.self_attn.sinks.requires_grad_(False)

    wrong = found(model, attach=attach, gradients=True)
    assert any("gradients are missing" in line and "sinks" in line for line in wrong)
