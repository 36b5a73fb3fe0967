"""The kinds of layers that configurations describe, as data; and steps that are no text."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.hf.model.layer_kinds import (
    UnknownLayers,
    _keys_of,
    layer_kinds,
    layer_reach,
    reach_counts,
)
from hf_flexseq.hf.model.towers import reader_of_text
from hf_flexseq.steps.source_row import SourceRow
from tests.hf.tiny import refused


@pytest.mark.parametrize(
    ("name", "options", "reaches"),
    [
        (
            "Gemma3Text",
            {"num_hidden_layers": 12, "sliding_window": 1024},
            {Reach(window=1024): 10, FULL: 2},
        ),
        (
            "Llama4Text",
            {"num_hidden_layers": 8, "attention_chunk_size": 64},
            {Reach(chunk=64): 6, FULL: 2},
        ),
        ("GptOss", {"num_hidden_layers": 2}, {Reach(window=128): 1, FULL: 1}),
        ("Mistral", {"sliding_window": 16}, {Reach(window=16): 32}),
        ("Mistral", {"sliding_window": None}, {FULL: 32}),
        ("Mistral", {"sliding_window": 16, "use_sliding_window": False}, {FULL: 32}),
    ],
)
def test_windows_chunks_and_full_layers(name, options, reaches):
    config = getattr(transformers, name + "Config")(**options)
    assert reach_counts(layer_kinds(config)) == reaches
    if len(reaches) == 1:
        assert layer_reach(config, None) in reaches


def test_a_layer_without_a_number_among_layers_of_several_kinds():
    with pytest.raises(UnknownLayers, match=r"which of config\.layer_types it has is not known"):
        layer_reach(transformers.Gemma3TextConfig(num_hidden_layers=6), None)


# ---- steps that are no text


IMAGES = transformers.Gemma3Config(image_token_id=9)
TYPES = {"token_type_ids": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("config", "columns", "message"),
    [
        (IMAGES, TYPES, "token_type_ids marks tokens of images"),
        (IMAGES, {"mm_token_type_ids": torch.tensor([0, 2])}, "mm_token_type_ids marks tokens"),
        (IMAGES, {"input_ids": torch.tensor([5, 9])}, "the token 9, config.image_token_id"),
        (IMAGES, {"token_type_ids": torch.tensor([0, 0])}, None),
        (transformers.GPT2Config(), TYPES, None),
    ],
)
def test_tokens_of_images_are_refused_where_a_model_takes_text(config, columns, message):
    text = {"input_ids": torch.tensor([5, 6])}
    row = SourceRow(columns=text | columns, lengths=(2,))
    reader = reader_of_text(config, "its layers see both ways")
    if message is None:
        assert reader is None or reader.read(row).columns is row.columns
        return
    with refused(message):
        reader.read(row)


def test_a_layer_that_reads_keys_of_another_model_is_named():
    config = SimpleNamespace(kv_sharing_modes=["store", "reuse", "reuse"])
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    with refused("its layer 2 reads keys of sliding_attention that no layer stores"):
        _keys_of(config, kinds)
