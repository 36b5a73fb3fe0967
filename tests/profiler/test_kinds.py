"""Calibration of models whose layers differ: what is timed, on which copies, and what the fit
finds."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli.calibrate import _attention
from hf_flexseq.cost.analytic import DEVICES, HeadShape, ModelShape, analytic_cost_model
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.choose import fit_key
from hf_flexseq.hf.calibration.probe import ModelProbes, kept_layers, shortened
from hf_flexseq.hf.model.facts import (
    _head_shapes,
    attention_shape,
    model_facts,
    model_shape,
)
from hf_flexseq.hf.model.layer_kinds import layer_kinds
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.profiler.design import LayerType, ProbeLayout, ProbeShape, in_groups

WINDOW = Reach(window=512)
CHUNK = Reach(chunk=700)
ONE = Topology(nodes=1, ranks_per_node=1)
SHAPE = ModelShape(
    layers=24,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=4096,
    vocab=32000,
    params=200_000_000,
    reaches=((15, WINDOW), (3, CHUNK)),
)


def alone(*lengths: int) -> ProbeLayout:
    return in_groups(ProbeShape(strategy="local", degree=1, lengths=lengths), ONE)


def sized(model_type: str, **options: Any) -> Any:
    return AutoConfig.for_model(
        model_type, vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, **options
    )  # fmt: skip


def test_a_shortened_config_keeps_the_layers_that_were_chosen() -> None:
    config = sized("gemma3_text", num_hidden_layers=12, sliding_window=16)
    kept = kept_layers(config, {LayerType(Reach(window=16), None): 2, LayerType(FULL, None): 1})
    assert kept == [0, 1, 5]
    short = shortened(config, kept)
    assert [kind.reach for kind in layer_kinds(short)] == [*[Reach(window=16)] * 2, FULL]
    assert config.num_hidden_layers == 12
    assert shortened(config, range(12)).layer_types == config.layer_types


def test_dense_layers_at_the_start_do_not_stand_for_layers_with_experts() -> None:
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=3)
    assert shortened(config, [0, 1]).first_k_dense_replace == 0


class Recording(Reference):
    """A kernel that writes down the windows that it is called with."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []
        self.softcaps: list[float | None] = []

    def forward(self, call):
        self.windows.append(call.segments.window)
        self.softcaps.append(call.softcap)
        return super().forward(call)


def test_a_copy_runs_windows_and_full_layers() -> None:
    config = sized("gemma3_text", num_hidden_layers=12, sliding_window=16)
    model = AutoModelForCausalLM.from_config(config)
    facts = model_facts(model, Accelerator(cpu=True))
    assert facts.shape.reaches == ((10, Reach(window=16)),)
    probes = ModelProbes(facts, Communicator(), torch.device("cpu"))
    window, full = LayerType(Reach(window=16), None), LayerType(FULL, None)
    assert probes.layers == {window: 10, full: 2}
    probe = probes({window: 2, full: 1})
    probe.kernel = kernel = Recording()
    probe.run(alone(40, 3))()
    assert kernel.windows == [16, 16, None]


def test_kernels_are_timed_with_the_softcap_of_their_layers() -> None:
    config = sized("gemma2", num_hidden_layers=2, sliding_window=16, attn_logit_softcapping=7.0)
    model = AutoModelForCausalLM.from_config(config)
    probes = ModelProbes(
        model_facts(model, Accelerator(cpu=True)), Communicator(), torch.device("cpu")
    )
    probe = probes(probes.layers)
    probe.run(alone(40))()
    probe.kernel = kernel = Recording()
    probe.run(alone(40))()
    assert (kernel.windows, kernel.softcaps) == ([16, None], [7.0, 7.0])


def test_a_model_without_kinds_has_the_key_of_earlier_versions() -> None:
    shapes = []
    for options in ({"model_type": "llama"}, {"model_type": "gemma3_text", "sliding_window": 16}):
        model = AutoModelForCausalLM.from_config(sized(num_hidden_layers=6, **options))
        facts = model_facts(model, Accelerator(cpu=True))
        shapes.append(fit_key(facts, ONE, torch.device("cpu"))["shape"])
    plain, windows = shapes
    assert not {"reaches", "active_params"} & plain.keys()
    assert json.loads(json.dumps(windows))["reaches"] == [[5, {"window": 16, "chunk": None}]]


def test_an_embedding_that_is_the_head_works_twice() -> None:
    shapes = []
    for tied in (True, False):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                sized("llama", num_hidden_layers=2, tie_word_embeddings=tied)
            )
        shapes.append(model_shape(model))
    tied_shape, untied_shape = shapes
    assert untied_shape.active_params is None
    assert tied_shape.active_params == untied_shape.params == tied_shape.params + 61 * 32


def test_heads_that_differ_by_reach_are_read() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            sized("gemma3_text", num_hidden_layers=6, sliding_window=16, tie_word_embeddings=False)
        )
    assert model_shape(model).head_shapes == ()
    config = AutoConfig.for_model(
        "mimo_v2_flash", vocab_size=61, hidden_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=8, num_key_value_heads=2, v_head_dim=8, sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    found = dict(_head_shapes(layer_kinds(config), attention_shape(config)))
    assert found == {FULL: HeadShape(8, 2, 8), Reach(window=16): HeadShape(8, 4, 8)}


def test_a_summary_says_which_layers_the_seconds_are_of() -> None:
    shape = dataclasses.replace(SHAPE, reaches=((15, WINDOW),))
    windows = dataclasses.replace(SHAPE, reaches=((24, WINDOW),))
    lines = []
    for one in (dataclasses.replace(SHAPE, reaches=()), shape, windows):
        cost = analytic_cost_model(one, DEVICES["CPU"], ONE)
        lines.append(_attention(cost.to_record()).split(" ps")[0].rstrip(" .0123456789e+"))
    assert lines == ["attention", "full attention", ""]


@pytest.mark.parametrize(
    "model_type, options, width, share",
    [
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
         48, 2 / 8),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 3}, 3 * 48, 3 / 4),
        ("llama", {}, 48, 1),
    ],
)  # fmt: skip
def test_experts_that_do_not_work_on_a_token_are_not_active(
    model_type: str, options: dict[str, Any], width: int, share: float
) -> None:
    config = sized(model_type, num_hidden_layers=2, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert shape.intermediate == width
    if share == 1:
        assert shape.active_params is None
    else:
        assert shape.active_params == shape.params - round((1 - share) * experts)
