"""Pipelines of models whose layers are no plain attention: windows, chunks, sinks, softcaps, heads
of two sizes, and keys that later layers share. Under a random plan with cut sequences and
checkpointed layers, loss and gradients are those of one process. Ranks are threads."""

import random

import pytest
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.stages import cut
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import documents, reference_gradients, relative_errors
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import LENGTHS, TARGETS, columns_of, loss_error, make_executor
from tests.ranks import join, run_threads

LAYERS = 5
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Layers 1 and 2 store keys, layers 3 and 4 read them.
SHARED_KEYS = {
    "layer_types": ["sliding_attention", *MIXED],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
}
KINDS = {  # family -> stages, and what its configuration has beside that of `FAMILIES`
    "Gemma2": (3, {"layer_types": [*MIXED, "sliding_attention"]}),
    "GptOss": (3, {"layer_types": [*MIXED, "sliding_attention"]}),
    "Gemma4 with shared keys": (2, SHARED_KEYS),
}


@pytest.fixture
def shares_without_layer_embeddings(monkeypatch):
    """A Gemma 4 that shares keys and has no embeddings for each layer: transformers slices those
    of the layers that share, even where there are none."""

    def unsliced(model, hidden, of_layers, positions, masks, *args, **kwargs):
        return hidden, of_layers, positions, masks

    monkeypatch.setattr(Gemma4TextModel, "_maybe_slice_kv_shared_inputs", unsliced)


def five_layers(family):
    _, options = KINDS[family]
    return make_model(family, num_hidden_layers=LAYERS, **options)


def errors_of(rank, world_size, family, wanted_loss, wanted):
    """The largest error of this stage's gradients, and that of the loss."""
    communicator = join()
    model = five_layers(family)
    executor = make_executor(model, world_size, 1, communicator)
    options = {"checkpointing": True, "split_weights": True}
    plan = random_pipeline_plan(
        LENGTHS, world_size, random.Random(family), layers=LAYERS, **options
    )
    loss = executor.train(plan, columns_of(plan, documents(LENGTHS)), TARGETS)
    reduce_gradients(executor.stage, executor.neighbours)
    found = {name: p.grad.clone() for name, p in executor.stage.global_parameters()}
    errors = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
    return max(errors.values()), loss_error(loss, wanted_loss, communicator)


@pytest.mark.parametrize("family", KINDS)
def test_stages_are_exact(family, monkeypatch, shares_without_layer_embeddings):
    keep_float64(monkeypatch)
    stages, _ = KINDS[family]
    wanted = reference_gradients(five_layers(family), documents(LENGTHS), attention="eager")
    for of_gradients, of_loss in run_threads(errors_of, stages, family, *wanted):
        assert of_gradients < 1e-10
        assert of_loss < 1e-12


def test_layers_that_share_keys_are_in_one_stage(shares_without_layer_embeddings):
    for index in range(2):
        stage = cut(five_layers("Gemma4 with shared keys"), index, 2)
        assert stage.spans == ((0, 1), (1, 5))


def test_embeddings_of_each_layer_are_refused():
    model = make_model("Gemma4 with shared keys")
    with pytest.raises(NotImplementedError, match="embed_tokens_per_layer.weight is outside"):
        cut(model, 0, 2)


def test_more_stages_than_shared_keys_allow_are_refused():
    with pytest.raises(ValueError, match="1 to 4 share keys and stay in one stage, make at"):
        cut(five_layers("Gemma4 with shared keys"), 0, 4)
