"""Calibration of models with recurrent layers: what is timed, on which copies, and what the fit
finds."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_flexseq.base.layers import FULL, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli.calibrate import _summary
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.calibration.probe import kept_layers, layer_types, shortened
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import Effort, LayerType
from hf_flexseq.profiler.fit import Sample, Term, Terms, fit

ONE = Topology(nodes=1, ranks_per_node=1)
DELTA = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
SHAPE = ModelShape(
    layers=24, hidden=1024, heads=8, kv_heads=2, head_dim=128, intermediate=4096, vocab=32000,
    params=200_000_000, without_attention=18, recurrent=((18, DELTA),),
)  # fmt: skip
RECURRENT = LayerType(None, "gated_delta")
ATTENTION = LayerType(FULL, None)
QUICK = Effort(budget_s=0.05, rounds=1, held_out=1)


def sized(model_type: str, **options: Any) -> Any:
    return AutoConfig.for_model(
        model_type, vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, **options
    )  # fmt: skip


def hybrid(layers: int) -> Any:
    return sized(
        "qwen3_5_text", head_dim=8, num_hidden_layers=layers, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip


# ---- copies


def test_the_layers_of_a_copy_are_the_first_of_their_types() -> None:
    config = hybrid(8)
    kept = kept_layers(config, {RECURRENT: 2, ATTENTION: 1})
    assert kept == [0, 1, 3]
    short = shortened(config, kept)
    found = [(one.attention is None, one.recurrent is None) for one in layers_of(short)]
    assert found == [(True, False), (True, False), (False, True)]


def test_the_numbers_of_attention_layers_are_those_of_the_copy() -> None:
    config = sized("bamba", num_hidden_layers=6, attn_layer_indices=[2, 4], mamba_n_heads=8)
    assert shortened(config, [0, 2, 3, 4]).attn_layer_indices == [1, 3]


def test_the_sizes_of_recurrent_layers_are_read_from_a_model() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hybrid(8))
    shape = model_facts(model, Accelerator(cpu=True)).shape
    sizes = dataclasses.replace(DELTA, key_dim=8, channels=64)
    assert (shape.recurrent, shape.without_attention) == (((6, sizes),), 6)


def test_layers_of_two_kinds_are_told_apart() -> None:
    found = Counter(layer_types(hybrid(8)))
    assert found == {RECURRENT: 6, ATTENTION: 2}


def test_recurrent_layers_that_take_no_time_make_no_sense() -> None:
    cost = analytic_cost_model(SHAPE, DEVICES["H100"], ONE)
    nothing = dataclasses.replace(
        cost, recurrent=(dataclasses.replace(cost.recurrent[0], token_s=0.0),)
    )
    objections = []
    for one in (cost, nothing):
        objections.append(Calibration(cost=one, errors=(0.1,), tokens=1).objection())
    assert objections == [None, "gated_delta layers take no measurable time"]


def some_fit(samples: list[Sample], terms: Terms) -> dict[Term, float]:
    return fit(samples, terms) | {"head": 1e-12}


@pytest.mark.parametrize("model", ["hybrid", "without attention"])
def test_a_hybrid_is_calibrated(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So tiny a model shows little but noise: any fit will do.
    monkeypatch.setattr(Calibration, "objection", lambda self: None)
    monkeypatch.setattr(profiler, "fit", some_fit)
    config = hybrid(4)
    if model == "without attention":
        config = sized(
            "granitemoehybrid", num_hidden_layers=2, layer_types=["linear_attention"] * 2,
            mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_expand=2,
            num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=48,
        )  # fmt: skip
    record = calibrate(config.to_dict(), dtype="float32", effort=QUICK)
    cost = CostModel.from_record(record["cost_model"])
    (kind,) = cost.recurrent
    assert cost.attention_share == (0.25 if model == "hybrid" else 0.0)
    assert kind.kind == ("gated_delta" if model == "hybrid" else "mamba2")
    assert kind.token_s >= 0
    assert kind.summary_bytes > 0
    assert "us more where ranks share a sequence" in _summary(record)
