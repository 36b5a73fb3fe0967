"""Calibration of models whose layers differ, recurrent ones too: what is timed, on which copies,
and what the fit finds."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli.calibrate import _attention, _summary
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.shapes import HeadShape, ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.choose import fit_key
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.calibration.probe import ModelProbes, kept_layers, layer_types, shortened
from hf_flexseq.hf.model.facts import model_facts, model_shape
from hf_flexseq.hf.model.layer_kinds import layer_kinds, layers_of
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import Effort, LayerType, ProbeShape, in_groups
from hf_flexseq.profiler.fit import fit
from tests.kernels.reference import Reference

WINDOW = Reach(window=512)
ONE = Topology(nodes=1, ranks_per_node=1)
CPU = torch.device("cpu")
DELTA = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
SIZES = {"hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "intermediate": 4096}
SHAPE = ModelShape(layers=24, vocab=32000, params=200_000_000, **SIZES)
RECURRENT = LayerType(None, "gated_delta")
ATTENTION = LayerType(FULL, None)
SHORT = Reach(window=16)
HYBRID = {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WITHOUT_ATTENTION = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 48,
}


def sized(model_type, **options):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoConfig.for_model(model_type, **{**sizes, **heads, **options})


def gemma3(layers):
    """Five windows of 16 tokens before each full layer."""
    return sized("gemma3_text", num_hidden_layers=layers, sliding_window=16)


def hybrid(layers):
    """Three recurrent layers before each with attention."""
    return sized(num_hidden_layers=layers, **HYBRID)


def facts_of(config):
    """What is read from a model of a configuration, which has no values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model_facts(model, Accelerator(cpu=True))


# ---- copies


def test_a_copy_keeps_the_first_layers_of_each_type():
    config = gemma3(12)
    kept = kept_layers(config, {LayerType(SHORT, None): 2, ATTENTION: 1})
    assert kept == [0, 1, 5]
    assert [kind.reach for kind in layer_kinds(shortened(config, kept))] == [SHORT, SHORT, FULL]
    assert config.num_hidden_layers == 12
    assert shortened(config, range(12)).layer_types == config.layer_types

    assert Counter(layer_types(hybrid(8))) == {RECURRENT: 6, ATTENTION: 2}
    kept = kept_layers(hybrid(8), {RECURRENT: 2, ATTENTION: 1})
    assert kept == [0, 1, 3]
    short = shortened(hybrid(8), kept)
    found = [(one.attention is None, one.recurrent is None) for one in layers_of(short)]
    assert found == [(True, False), (True, False), (False, True)]


def test_numbers_of_layers_in_a_configuration_are_those_of_the_copy():
    config = sized("bamba", num_hidden_layers=6, attn_layer_indices=[2, 4], mamba_n_heads=8)
    assert shortened(config, [0, 2, 3, 4]).attn_layer_indices == [1, 3]
    # dense layers at the start do not stand for layers with experts
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=3)
    assert shortened(config, [0, 1]).first_k_dense_replace == 0


class Recording(Reference):
    """A kernel that writes down the windows and softcaps that it is called with."""

    def __init__(self):
        self.calls = []

    def forward(self, call):
        self.calls.append((call.segments.window, call.softcap))
        return super().forward(call)


def test_a_copy_runs_windows_and_full_layers_with_their_softcap():
    config = sized("gemma2", num_hidden_layers=4, sliding_window=16, attn_logit_softcapping=7.0)
    facts = model_facts(AutoModelForCausalLM.from_config(config), Accelerator(cpu=True))
    assert facts.shape.reaches == ((2, SHORT),)
    probes = ModelProbes(facts, Communicator(), CPU)
    window = LayerType(SHORT, None)
    assert probes.layers == {window: 2, ATTENTION: 2}
    probe = probes({window: 2, ATTENTION: 1})
    layout = in_groups(ProbeShape(strategy="local", degree=1, lengths=(40, 3)), ONE)
    for _ in range(2):
        probe.kernel = kernel = Recording()
        probe.run(layout)()
    assert kernel.calls == [(16, 7.0), (None, 7.0), (16, 7.0)]


# ---- what is read from a model


def test_a_model_without_kinds_has_the_key_of_earlier_versions():
    configs = (sized("llama", num_hidden_layers=6), gemma3(6))
    plain, windows = (fit_key(facts_of(one), ONE, CPU)["shape"] for one in configs)
    assert not {"reaches", "active_params"} & plain.keys()
    assert json.loads(json.dumps(windows))["reaches"] == [[5, {"window": 16, "chunk": None}]]


def test_sizes_of_layers_are_read():
    assert facts_of(gemma3(6)).shape.head_shapes == ()
    shape = facts_of(hybrid(8)).shape
    sizes = dataclasses.replace(DELTA, key_dim=8, channels=64)
    assert (shape.recurrent, shape.without_attention) == (((6, sizes),), 6)
    config = sized(
        "mimo_v2_flash",
        num_hidden_layers=2,
        num_attention_heads=8,
        v_head_dim=8,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
    )
    found = dict(facts_of(config).shape.head_shapes)
    assert found == {FULL: HeadShape(8, 2, 8), SHORT: HeadShape(8, 4, 8)}


@pytest.mark.parametrize(
    "config, width, share",
    [
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
            },
            48,
            2 / 8,
        ),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 3},
            3 * 48,
            3 / 4,
        ),
        ({"model_type": "llama"}, 48, 1),
    ],
)
def test_experts_that_do_not_work_on_a_token_are_not_active(config, width, share):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sized(num_hidden_layers=2, **config))
    shape = model_shape(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert shape.intermediate == width
    active = None if share == 1 else shape.params - round((1 - share) * experts)
    assert shape.active_params == active


def test_an_embedding_that_is_the_head_works_twice():
    tied, untied = (
        facts_of(sized("llama", num_hidden_layers=2, tie_word_embeddings=is_tied)).shape
        for is_tied in (True, False)
    )
    assert untied.active_params is None
    assert tied.active_params == untied.params == tied.params + 61 * 32


# ---- what comes out


def test_a_summary_says_which_layers_the_seconds_are_of():
    lines = []
    for reaches in ((), ((15, WINDOW),), ((24, WINDOW),)):
        shape = dataclasses.replace(SHAPE, reaches=reaches)
        cost = analytic_cost_model(shape, DEVICES["CPU"], ONE)
        lines.append(_attention(cost.to_record()).split(" ps")[0].rstrip(" .0123456789e+"))
    assert lines == ["attention", "full attention", ""]


def test_recurrent_layers_that_take_no_time_make_no_sense():
    shape = dataclasses.replace(SHAPE, without_attention=18, recurrent=((18, DELTA),))
    cost = analytic_cost_model(shape, DEVICES["H100"], ONE)
    without = dataclasses.replace(cost.recurrent[0], token_s=0.0)
    objections = []
    for one in (cost, dataclasses.replace(cost, recurrent=(without,))):
        objections.append(Calibration(cost=one, errors=(0.1,), tokens=1).objection())
    assert objections == [None, "gated_delta layers take no measurable time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, kind, share",
    [
        ({"num_hidden_layers": 4, **HYBRID}, "gated_delta", 0.25),
        pytest.param(WITHOUT_ATTENTION, "mamba2", 0.0, marks=pytest.mark.nightly),
    ],
)
def test_a_hybrid_is_calibrated(config, kind, share, monkeypatch):
    # So tiny a model shows little but noise: any fit will do.
    monkeypatch.setattr(Calibration, "objection", lambda self: None)
    monkeypatch.setattr(profiler, "fit", lambda *args: fit(*args) | {"head": 1e-12})
    effort = Effort(budget_s=1e-3, rounds=1, held_out=1)
    record = calibrate(sized(**config).to_dict(), dtype="float32", effort=effort)
    cost = CostModel.from_record(record["cost_model"])
    assert cost.attention_share == share
    (layers,) = cost.recurrent
    assert layers.kind == kind
    assert layers.token_s >= 0
    assert layers.summary_bytes > 0
    assert "us more where ranks share a sequence" in _summary(record)


def test_frozen_parameters_are_counted_with_the_bytes_of_their_weights():
    model = AutoModelForCausalLM.from_config(sized("llama", num_hidden_layers=2))
    model = model.to(torch.bfloat16)
    assert model_shape(model).frozen_params == 0
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    shape = model_shape(model)
    trained = model.model.norm.weight.numel()
    assert shape.frozen_params == shape.params - trained
    assert shape.frozen_bytes == 2 * shape.frozen_params
