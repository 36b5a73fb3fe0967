"""The recipes of long contexts: their options go together, and their longest contexts have a
plan."""

from dataclasses import replace

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from arguments import ModelArguments, parse
from hf_flexseq import FlexSeqConfig
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B, MODELS
from hf_flexseq.planner import make_plan
from model import load_base
from tests.programs import ROOT

MILLION = "llama-3.1-8b/million.yaml"
OF_EXPERTS = "qwen3-30b-a3b/long_context.yaml"
QWEN = MODELS["qwen3-30b-a3b"]


def parsed(recipe, tmp_path, *argv):
    words = ["--config", str(ROOT / "recipes" / recipe), "--output_dir", str(tmp_path), *argv]
    return parse(words, FlexSeqConfig, {"use_cpu": True})


@pytest.mark.parametrize("recipe", [MILLION, OF_EXPERTS])
def test_its_rope_reaches_as_far_as_its_context(recipe, tmp_path):
    model, data, training = parsed(recipe, tmp_path)
    rope = model.config_overrides["rope_parameters"]
    reach = rope["factor"] * rope["original_max_position_embeddings"]
    assert data.max_length <= reach == model.config_overrides["max_position_embeddings"]
    assert rope["rope_type"] in ROPE_INIT_FUNCTIONS
    if recipe == MILLION:
        assert (data.max_length, data.long_sequences) == (1 << 20, "split")
        assert training.activation_memory == "auto"


# ---- a million tokens


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_one_sequence_of_a_million_tokens_has_a_plan_that_computes_no_attention_again(device):
    node = Topology(nodes=1, ranks_per_node=8)
    cost = analytic_cost_model(LLAMA_8B, DEVICES[device], node, zero_stage=3, checkpointing=False)
    plan = make_plan([1 << 20, 90_000, 60_000, 150_000], node, cost)
    holding = next(one for one in plan.micro_batches if 0 in one.groups[0].sequences)
    assert holding.groups[0].degree == 8
    assert holding.memory.recomputed_layers == LLAMA_8B.layers
    assert holding.memory.uses_host or device == "H200"
    assert holding.memory.outputs_recomputed == 0
    # without choices there is none
    plain = replace(cost, activations=None)
    with pytest.raises(ValueError, match="sequence 0 has 1048576 tokens"):
        make_plan([1 << 20], node, plain)


def test_a_trained_model_takes_the_rope_that_is_asked_for(tmp_path, tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    args, _, _ = parsed(MILLION, tmp_path, "--model_name_or_path", str(tmp_path / "model"))
    model = load_base(args, tokenizer)
    asked = yaml.safe_load((ROOT / "recipes" / MILLION).read_text())["config_overrides"]
    assert model.config.rope_parameters == asked["rope_parameters"]
    assert model.config.max_position_embeddings == 1 << 20
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


# ---- experts over ranks


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_longest_contexts_with_experts_have_a_plan(tmp_path, nodes):
    spread = f'{{"fsdp_size": {8 * nodes}, "ep_size": 8, "fsdp_mixed_precision": true}}'
    model, data, training = parsed(OF_EXPERTS, tmp_path, "--distributed_config", spread)
    distributed = DistributedConfig(**model.distributed_config)
    assert QWEN.experts.of_layer % distributed.ep_size == 0
    assert training.gradient_checkpointing
    topology = Topology(nodes=nodes, ranks_per_node=8)
    options = {"zero_stage": 3, "expert_ranks": distributed.ep_size, "checkpointing": True}
    cost = analytic_cost_model(QWEN, DEVICES["H100"], topology, **options)
    lengths = [data.max_length] * 4 + [30_000] * 12 + [10_000] * 48
    plan = make_plan(lengths, topology, cost)
    most = cost.max_tokens_per_rank(topology.world_size)
    for group in (group for one in plan.micro_batches for group in one.groups):
        if 0 in group.sequences:
            assert group.degree * most >= data.max_length > most


def test_a_model_over_other_ranks_than_were_launched_is_refused(tmp_path):
    model, _, _ = parsed(OF_EXPERTS, tmp_path)
    with pytest.raises(ValueError, match="over 8 ranks .* but 1 were launched"):
        load_base(model, tokenizer=None)
