"""Calibration of models with recurrent layers: what is timed, on which copies, and what the fit
finds."""

import dataclasses
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from hf_flexseq.attention import SequenceContext
from hf_flexseq.cli.calibrate import _summary
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import DEVICES, Mixers, ModelShape, analytic_cost_model
from hf_flexseq.cost.recurrent import RecurrentLayers
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.calibration.probe import kept_layers, shortened
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.layers import FULL, Reach, RecurrentShape
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import (
    Effort,
    LayerType,
    ProbeShape,
    alone,
    layer_types,
    make_design,
    mixers_of_copy,
    types_of_copy,
)
from hf_flexseq.profiler.fit import Compute, Sample, fit_compute
from hf_flexseq.profiler.recurrent_runs import ScanRun, SecondPassRun
from hf_flexseq.topology import Topology

ONE = Topology(nodes=1, ranks_per_node=1)
DELTA = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
MAMBA = RecurrentShape(
    kind="mamba2", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
KIMI = dataclasses.replace(DELTA, kind="kimi_delta", key_heads=4, channels=160)
CONVOLUTION = RecurrentShape(kind="convolution", width=3, channels=32)
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


@pytest.mark.parametrize(
    "layers, without, recurrent, reaches, expected",
    [
        (8, 6, 6, (), {RECURRENT: 6, ATTENTION: 2}),
        (8, 6, 3, (), {RECURRENT: 3, LayerType(None, None): 3, ATTENTION: 2}),
        (8, 0, 8, (), {LayerType(FULL, "gated_delta"): 8}),
        (8, 6, 8, (), {RECURRENT: 6, LayerType(FULL, "gated_delta"): 2}),
        (
            8, 5, 5, ((2, Reach(window=4)),),
            {RECURRENT: 5, ATTENTION: 1, LayerType(Reach(window=4), None): 2},
        ),
    ],
)  # fmt: skip
def test_the_types_of_all_layers_follow_from_their_numbers(
    layers: int,
    without: int,
    recurrent: int,
    reaches: tuple[tuple[int, Reach], ...],
    expected: dict[LayerType, int],
) -> None:
    shape = dataclasses.replace(
        SHAPE,
        layers=layers,
        without_attention=without,
        recurrent=((recurrent, DELTA),),
        reaches=reaches,
    )
    assert {kind: count for count, kind in layer_types(shape)} == expected


def test_a_copy_has_recurrent_layers_and_attention() -> None:
    assert types_of_copy(SHAPE, 1) == {RECURRENT: 1, ATTENTION: 0}
    assert types_of_copy(SHAPE, 3) == {RECURRENT: 2, ATTENTION: 1}
    assert mixers_of_copy(SHAPE, 3) == Mixers(((2, "gated_delta"),), 2)
    assert mixers_of_copy(SHAPE, 24) == SHAPE.mixers


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


# ---- the fit


def synthetic(shape: ProbeShape, layers: int, mixers: Mixers, truth: Compute) -> Sample:
    """Time a shape by the closed form of `truth`."""
    (one,) = truth.recurrent
    if shape.strategy == "local":
        cost = truth.fill(analytic_cost_model(SHAPE, DEVICES["CPU"], ONE), layers, (), mixers)
        layout = alone(shape.lengths, ONE)
        (nanoseconds,) = lockstep_ns(cost, [layout.micro_batch], layout.lengths, ONE)
        seconds = nanoseconds / 1e9
    else:
        (tokens,) = shape.lengths
        filled = -(-tokens // 64) * 64
        seconds = {
            "kernel": truth.attention_s * tokens**2 + 1e-8 * tokens + 1e-5,
            "scan": one.token_s * filled + 2e-5,
            "again": one.again_s * filled + 3e-5,
        }[shape.strategy]
        mixers = Mixers(((1, shape.recurrent),), 1) if shape.recurrent else Mixers()
    return Sample(
        strategy=shape.strategy,
        degree=1,
        layers=layers,
        lengths=shape.lengths,
        seconds=seconds,
        mixers=mixers,
    )


def test_a_fit_recovers_the_seconds_of_recurrent_layers() -> None:
    estimate = analytic_cost_model(SHAPE, DEVICES["H100"], ONE)
    (of_estimate,) = estimate.recurrent
    one = dataclasses.replace(of_estimate.one_layer(24), token_s=2e-6, again_s=6e-7)
    truth = Compute(
        attention_s=2e-10, linear_s=3e-7, layer_s=1e-4, head_s=5e-7, base_s=2e-3, recurrent=(one,)
    )
    design = make_design(SHAPE, estimate, ONE, Effort())
    samples = []
    for shape in design.shapes:
        if shape.strategy in ("kernel", "scan", "again"):
            samples.append(synthetic(shape, 1, Mixers(), truth))
    for layers, mixers in zip(design.depths, design.mixers, strict=True):
        for shape in design.shapes:
            if shape.strategy == "local":
                samples.append(synthetic(shape, layers, mixers, truth))
    found = fit_compute(samples, [of_estimate.one_layer(24)])
    assert found.attention_s == pytest.approx(2e-10, rel=0.01)
    assert found.linear_s == pytest.approx(3e-7, rel=0.01)
    (fitted,) = found.recurrent
    assert fitted.token_s == pytest.approx(2e-6, rel=0.01)
    assert fitted.again_s == pytest.approx(6e-7, rel=0.01)
    cost = found.fill(estimate, 24, (), SHAPE.mixers)
    assert cost.recurrent[0].token_s == pytest.approx(18 * 2e-6, rel=0.01)
    assert cost.recurrent[0].summary_bytes == pytest.approx(of_estimate.summary_bytes)
    assert cost.attention_share == 0.25


def test_recurrent_layers_that_take_no_time_make_no_sense() -> None:
    cost = analytic_cost_model(SHAPE, DEVICES["H100"], ONE)
    nothing = dataclasses.replace(
        cost, recurrent=(dataclasses.replace(cost.recurrent[0], token_s=0.0),)
    )
    objections = []
    for one in (cost, nothing):
        calibration = Calibration(
            cost=one, errors=(0.1,), latencies_s=(), ring_latencies_s=(), host=None, tokens=1
        )  # type: ignore[arg-type]
        objections.append(calibration.objection())
    assert objections == [None, "gated_delta layers take no measurable time"]


# ---- runs


@pytest.mark.parametrize(
    "sizes",
    [DELTA, KIMI, MAMBA, CONVOLUTION],
    ids=lambda sizes: sizes.kind,
)
@pytest.mark.parametrize("replays", [False, True])
def test_a_recurrent_layer_of_every_kind_can_be_timed(
    sizes: RecurrentShape, replays: bool
) -> None:
    layout = alone((70,), ONE)
    cpu = torch.device("cpu")
    context = SequenceContext(
        make_shard(layout.micro_batch, layout.lengths, 0), Communicator(), Reference(), cpu
    )
    ScanRun(sizes, context, 70, replays=replays, dtype=torch.float32, device=cpu)()
    if sizes.kind != "convolution":
        run = SecondPassRun(sizes, context, 70, dtype=torch.float32, device=cpu)
        assert all(x is None or x.isfinite().all() for x in run.saved)
        run()


def some_fit(samples: list[Sample], recurrent: list[RecurrentLayers]) -> Compute:
    found = fit_compute(samples, recurrent)
    return dataclasses.replace(found, linear_s=max(found.linear_s, 1e-12))


@pytest.mark.parametrize("model", ["hybrid", "without attention"])
def test_a_hybrid_is_calibrated(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So tiny a model shows little but noise: any fit will do.
    monkeypatch.setattr(Calibration, "objection", lambda self: None)
    monkeypatch.setattr(profiler, "fit_compute", some_fit)
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
