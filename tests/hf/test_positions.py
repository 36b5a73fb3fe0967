"""Positions that are no function of position_ids alone: longrope's tables by the length of a
token's own sequence, and the counts of Llama 4's layers without rotary embeddings.

Each model is compared with itself, unattached, on one document at a time. `original_max_position_
embeddings` and `floor_scale` are below some documents' lengths and above others', otherwise there
would be nothing to see. Ranks are threads."""

import random

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.counting import count_in
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.steps.exchange import SourceRow
from hf_flexseq.steps.token_columns import INDICES, LENGTHS, with_token_columns
from hf_flexseq.topology import Topology
from tests.hf.by_hand import attach, run_plan
from tests.hf.test_checks import EXPERTS, SIZES
from tests.hf.test_reach import stays_in_float64  # noqa: F401  (a fixture)
from tests.hf.tiny import documents, reference_gradients, relative_errors
from tests.plans import random_plan
from tests.ranks import join, run_threads

LENGTHS_OF_DOCUMENTS = [1, 15, 16, 17, 5, 40, 3, 23]
LIMIT = 16  # tokens that the short table is for
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
}
LAYER_TYPES = {"layer_types": ["full_attention"] * 2}
FAMILIES = {
    "Phi3": {
        "rope_parameters": {**LONGROPE, "factor": 4.0},
        "original_max_position_embeddings": LIMIT,
    },
    "Llama": {"rope_parameters": {**LONGROPE, "factor": 4.0}},
    "MiniCPM3": {
        "rope_parameters": {**LONGROPE, "factor": 4.0},
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
    },
    "Phimoe": {
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
        **EXPERTS,
    },
    "Llama4": {
        "head_dim": 8,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 64,
        "attn_temperature_tuning": True,
        "floor_scale": 6,
        "attn_scale": 0.5,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "moe_layers": [1],
        **LAYER_TYPES,
    },
}


def make_model(family):
    kind = getattr(transformers, family + "ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**SIZES, **FAMILIES[family]})
    model = kind._from_config(config, dtype=torch.float64, experts_implementation="eager")
    return model.train()


def errors_of(rank, world_size, topology, family, plans, wanted, is_attached):
    """The largest relative error of loss and gradients under each plan, plain and
    checkpointed."""
    communicator = join(topology)
    model = make_model(family)
    model.set_attn_implementation("flexseq")
    if is_attached:
        attach_positions(model)
    wanted_loss, wanted_gradients = wanted
    worst = []
    for plan, checkpointing in zip(plans, (False, True), strict=True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss, gradients, _ = run_plan(model, plan, documents(LENGTHS_OF_DOCUMENTS), communicator)
        errors = relative_errors(gradients, wanted_gradients)
        worst.append(max(abs(loss / wanted_loss - 1), *errors.values()))
    return worst


def run(family, nodes, *, is_attached=True):
    """The errors of all ranks under two random plans, beside one process."""
    topology = Topology(nodes=nodes, ranks_per_node=2)
    examples = documents(LENGTHS_OF_DOCUMENTS)
    wanted = reference_gradients(make_model(family), examples, attention="eager")
    rng = random.Random(f"{family} {nodes}")
    plans = []
    for _ in range(2):
        plan = random_plan(LENGTHS_OF_DOCUMENTS, topology.world_size, rng, nodes=nodes)
        plans.append(plan)
    found = run_threads(
        errors_of, topology.world_size, topology, family, plans, wanted, is_attached
    )
    return [error for errors in found for error in errors]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_stands_where_one_process_has_it(family, nodes, stays_in_float64):  # noqa: F811
    assert max(run(family, nodes)) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_without_its_columns_a_model_is_wrong(family, stays_in_float64):  # noqa: F811
    """The documents above would show it."""
    assert min(run(family, 1, is_attached=False)) > 1e-3
