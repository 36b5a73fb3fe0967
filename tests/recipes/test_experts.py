"""The recipe of Qwen3-30B-A3B: its options go together, and its longest contexts have a plan."""

from pathlib import Path

import pytest
from transformers.distributed import DistributedConfig

from arguments import parse
from hf_flexseq import FlexSeqConfig
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import MODELS
from hf_flexseq.planner import make_plan
from model import load_base

RECIPE = Path(__file__).parents[2] / "recipes/qwen3-30b-a3b/long_context.yaml"
QWEN = MODELS["qwen3-30b-a3b"]


def parsed(tmp_path, *argv):
    words = ["--config", str(RECIPE), "--output_dir", str(tmp_path), *argv]
    return parse(words, FlexSeqConfig, {"use_cpu": True})


def test_its_rope_reaches_as_far_as_its_context(tmp_path):
    model, data, _ = parsed(tmp_path)
    rope = model.config_overrides["rope_parameters"]
    reach = rope["factor"] * rope["original_max_position_embeddings"]
    assert data.max_length <= reach == model.config_overrides["max_position_embeddings"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_its_longest_contexts_have_a_plan(tmp_path, nodes):
    spread = f'{{"fsdp_size": {8 * nodes}, "ep_size": 8, "fsdp_mixed_precision": true}}'
    model, data, training = parsed(tmp_path, "--distributed_config", spread)
    distributed = DistributedConfig(**model.distributed_config)
    assert QWEN.experts.of_layer % distributed.ep_size == 0
    assert training.gradient_checkpointing
    topology = Topology(nodes=nodes, ranks_per_node=8)
    cost = analytic_cost_model(
        QWEN,
        DEVICES["H100"],
        topology,
        zero_stage=3,
        expert_ranks=distributed.ep_size,
        checkpointing=True,
    )
    lengths = [data.max_length] * 4 + [30_000] * 12 + [10_000] * 48
    plan = make_plan(lengths, topology, cost)
    most = cost.max_tokens_per_rank(topology.world_size)
    for group in (group for one in plan.micro_batches for group in one.groups):
        if 0 in group.sequences:
            assert group.degree * most >= data.max_length > most


def test_a_model_over_other_ranks_than_were_launched_is_refused(tmp_path):
    model, _, _ = parsed(tmp_path)
    with pytest.raises(ValueError, match="over 8 ranks .* but 1 were launched"):
        load_base(model, tokenizer=None)
