"""Pipelines of models whose layers are no plain attention: windows, chunks, sinks, softcaps, heads
of two sizes, keys that later layers share, recurrent layers, and positions that do not follow from
position_ids alone. Under a random plan with cut sequences and checkpointed layers, loss and
gradients are those of one process; evaluation gives its loss. Ranks are threads."""

import random
from dataclasses import replace
from functools import partial

import pytest
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from hf_flexseq.hf.model.positions import attach_positions
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.pipeline.stages import cut
from tests.hf import test_positions
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import documents, reference_gradients, tiny_gpt2, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import (
    LENGTHS,
    columns_of,
    gradients_of,
    largest_error,
    make_executor,
    step_errors,
    targets_of,
)
from tests.ranks import join, run_threads

LENGTHS_OF_HYBRIDS = [1, 2, 17, 5, 131, 3, 70, 11]
LAYERS = 5
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Layers 1 and 2 store keys, layers 3 and 4 read them.
SHARED_KEYS = {
    "layer_types": ["sliding_attention", *MIXED],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
}
KINDS = {  # what a configuration has beside that of `FAMILIES`
    "Gemma2": {"layer_types": [*MIXED, "sliding_attention"]},
    "GptOss": {"layer_types": [*MIXED, "sliding_attention"]},
    "Gemma4 with shared keys": SHARED_KEYS,
    "DeepseekV3": {},
    "MiMoV2Flash": {"layer_types": [*MIXED, "sliding_attention"]},
}


@pytest.fixture(autouse=True)
def float64_and_shared_keys_without_layer_embeddings(monkeypatch):
    """Models compute in float64. A Gemma 4 may share keys and have no embeddings for each layer:
    transformers slices those of the layers that share, even where there are none."""

    def unsliced(model, hidden, of_layers, positions, masks, *args, **kwargs):
        return hidden, of_layers, positions, masks

    keep_float64(monkeypatch)
    monkeypatch.setattr(Gemma4TextModel, "_maybe_slice_kv_shared_inputs", unsliced)


def model_of(family):
    if family in HYBRIDS:
        return make_hybrid(family)
    if family in test_positions.FAMILIES:
        return test_positions.make_model(family)
    return make_model(family, num_hidden_layers=LAYERS, **KINDS[family])


def lengths_of(family):
    return LENGTHS_OF_HYBRIDS if family in HYBRIDS else LENGTHS


def errors_of(rank, world_size, family, degree, wanted, checkpoints_itself):
    """degree: ranks that share each chunk. checkpoints_itself: whether the model checkpoints all
    layers, as a Trainer makes it do."""
    communicator = join()
    stages = world_size // degree
    model = model_of(family)
    if checkpoints_itself:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    attach_recurrent(model)
    executor = make_executor(model, stages, degree, communicator)
    attach_positions(model)
    lengths = lengths_of(family)
    options = {"checkpointing": True, "split_weights": True}
    options["layers"] = model.config.num_hidden_layers
    plan = random_pipeline_plan(lengths, stages, random.Random(family), **options)
    return step_errors(communicator, executor, plan, *wanted, lengths=lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stages", "checkpoints_itself"),
    [
        ("Gemma2", 3, False),
        ("GptOss", 3, False),
        ("Gemma4 with shared keys", 2, False),
        ("DeepseekV3", 2, False),
        pytest.param("MiMoV2Flash", 2, False, marks=pytest.mark.nightly),  # windows, and sinks
        ("Qwen3_5", 2, False),
        ("Qwen3_5", 2, True),
        ("KimiLinear", 2, False),
        pytest.param("GraniteMoeHybrid", 2, False, marks=pytest.mark.nightly),  # Mamba 2
        ("NemotronH", 2, False),
        ("Lfm2", 2, False),
        ("Lfm2", 2, True),
        ("Llama", 2, False),  # with longrope
        ("Llama4", 2, False),  # which counts tokens
    ],
)
def test_stages_are_exact(family, stages, checkpoints_itself):
    examples = documents(lengths_of(family))
    wanted = reference_gradients(model_of(family), examples, attention="eager")
    degree = 2 if family == "Llama4" else 1
    arguments = (family, degree, wanted, checkpoints_itself)
    for of_gradients, of_loss in run_threads(errors_of, stages * degree, *arguments):
        assert of_gradients < 1e-10
        assert of_loss < 1e-12


def make_frozen(family):
    """A model of two layers, in the first of which no mixer and no norm is trained, and with it no
    embedding."""
    model = tiny_llama(num_hidden_layers=2) if family == "Llama" else make_hybrid(family)
    model.get_input_embeddings().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if ".layers.0." in name and "mlp" not in name:
            parameter.requires_grad_(False)
    return model


def error_of_frozen(rank, world_size, family, wanted):
    """The largest error of this stage's gradients, where all chunks of the first layer drop their
    activations."""
    model = make_frozen(family)
    attach_recurrent(model)
    executor = make_executor(model, world_size, 1, join())
    plan = random_pipeline_plan([131], world_size, random.Random(0), layers=2)
    assert len(plan.chunks) > 1
    plan = replace(plan, checkpointed=((1,) * len(plan.chunks),) * world_size)
    examples = documents([131])
    executor.train(plan, columns_of(plan, examples), targets_of(examples))
    return largest_error(gradients_of(executor), wanted)


@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
def test_layers_are_replayed_though_their_mixers_need_no_gradient(family):
    _, wanted = reference_gradients(make_frozen(family), documents([131]), attention="eager")
    assert max(run_threads(error_of_frozen, 2, family, wanted)) < 1e-10


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_gpt2, "GPT2LMHeadModel cannot be cut into pipeline stages.*has no list `layers`"),
        (partial(make_hybrid, "Zamba2"), "layers 0 and 2 share shared_transformer"),
        (partial(make_hybrid, "FalconH1"), "changes hidden states between its embedding and its"),
        (partial(make_hybrid, "Bamba"), "does not run on hidden states"),
    ],
)
def test_what_is_no_plain_stack_is_refused_and_left_alone(make, reason):
    model = make()
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(NotImplementedError, match=f"{reason}.*; set pipeline_parallel_size=1"):
        cut(model, 0, 2)
    assert [name for name, _ in model.named_parameters()] == before


def test_layers_that_share_keys_are_in_one_stage():
    for index in range(2):
        stage = cut(model_of("Gemma4 with shared keys"), index, 2)
        assert stage.spans == ((0, 1), (1, 5))
    with pytest.raises(ValueError, match="1 to 4 share keys and stay in one stage, make at"):
        cut(model_of("Gemma4 with shared keys"), 0, 4)
    with pytest.raises(NotImplementedError, match="embed_tokens_per_layer.weight is outside"):
        cut(make_model("Gemma4 with shared keys"), 0, 2)
