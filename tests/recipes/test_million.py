"""The recipe of a million tokens: its options, and a plan of one such sequence."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from arguments import ModelArguments, parse
from hf_flexseq import FlexSeqConfig
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.planner import make_plan
from model import load_base

RECIPE = Path(__file__).parents[2] / "recipes/llama-3.1-8b/million.yaml"
NODE = Topology(nodes=1, ranks_per_node=8)
MILLION = 1 << 20


def parsed(tmp_path, *argv):
    words = ["--config", str(RECIPE), "--output_dir", str(tmp_path), *argv]
    return parse(words, FlexSeqConfig, {"use_cpu": True})


def test_its_rope_reaches_as_far_as_its_context(tmp_path):
    model, data, training = parsed(tmp_path)
    rope = model.config_overrides["rope_parameters"]
    assert rope["factor"] * rope["original_max_position_embeddings"] == data.max_length == MILLION
    assert model.config_overrides["max_position_embeddings"] == MILLION
    assert rope["rope_type"] in ROPE_INIT_FUNCTIONS
    assert training.activation_memory == "auto"


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_one_sequence_of_a_million_tokens_has_a_plan_that_computes_no_attention_again(device):
    cost = analytic_cost_model(LLAMA_8B, DEVICES[device], NODE, zero_stage=3, checkpointing=False)
    plan = make_plan([MILLION, 90_000, 60_000, 150_000], NODE, cost)
    holding = next(one for one in plan.micro_batches if 0 in one.groups[0].sequences)
    assert holding.groups[0].degree == 8
    assert holding.memory.recomputed_layers == LLAMA_8B.layers
    assert holding.memory.uses_host or device == "H200"
    assert holding.memory.outputs_recomputed == 0
    # without choices there is none
    plain = replace(cost, activations=None)
    with pytest.raises(ValueError, match="sequence 0 has 1048576 tokens"):
        make_plan([MILLION], NODE, plain)


def test_a_trained_model_takes_the_rope_that_is_asked_for(tmp_path, tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    args, _, _ = parsed(tmp_path, "--model_name_or_path", str(tmp_path / "model"))
    model = load_base(args, tokenizer)
    asked = yaml.safe_load(RECIPE.read_text())["config_overrides"]
    assert model.config.rope_parameters == asked["rope_parameters"]
    assert model.config.max_position_embeddings == MILLION
    assert model.model.rotary_emb.rope_type == "yarn"


@pytest.mark.parametrize(
    "overrides, model, message",
    [
        ("[1]", "some/model", "config_overrides must be a mapping"),
        ("{x", "some/model", "config_overrides is not JSON"),
        ('{"a": 1}', None, "config_overrides needs model_name_or_path"),
    ],
)
def test_overrides_that_cannot_be_are_refused(overrides, model, message):
    with pytest.raises(ValueError, match=message):
        ModelArguments(
            model_name_or_path=model,
            model_config={"model_type": "llama"},
            config_overrides=overrides,
        )
