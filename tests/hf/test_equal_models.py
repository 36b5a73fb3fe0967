"""A trial of a model runs once for equal models, and again when anything it depends on differs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    masking_utils,
    modeling_layers,
)
from transformers.models.llama import modeling_llama

from hf_flexseq.hf.model import rehearsal
from hf_flexseq.hf.model.rehearsal import once_for_equal_models
from tests.hf.tiny import tiny_llama


@pytest.fixture
def tried():
    """A trial, and the models that it has run for."""
    models = []

    @once_for_equal_models
    def trial(model):
        models.append(model)
        return SimpleNamespace(number=len(models))

    return SimpleNamespace(trial=trial, models=models)


def test_equal_models_share_a_result(tried):
    found = tried.trial(tiny_llama())
    assert tried.trial(tiny_llama().double().eval()) is found
    assert len(tried.models) == 1


def test_what_no_forward_reads_is_no_difference(tried, monkeypatch):
    """A trainer sets the ends of sequences to its tokenizer's, and use_cache. And when a class is
    first given another attention, transformers notes on it that it can be."""
    model = tiny_llama()
    for name in list(vars(LlamaForCausalLM)):
        if name.endswith("_cached_value"):
            monkeypatch.delattr(LlamaForCausalLM, name)
    before = set(vars(LlamaForCausalLM))
    found = tried.trial(model)
    model.config.eos_token_id = 7
    model.config.use_cache = not model.config.use_cache
    model.set_attn_implementation("eager")
    assert set(vars(LlamaForCausalLM)) - before
    assert tried.trial(model) is found


def double(function):
    return lambda *args, **kwargs: function(*args, **kwargs)


class OwnLinear(nn.Linear):
    pass


def test_other_models_are_tried(tried, monkeypatch):
    model = tiny_llama()
    first = tried.trial(model)
    model.config.rms_norm_eps *= 2
    assert tried.trial(model) is not first
    model.config.rms_norm_eps /= 2
    assert tried.trial(model) is first
    with monkeypatch.context() as patch:
        for place, name in (
            (modeling_llama, "apply_rotary_pos_emb"),
            (modeling_llama.LlamaAttention, "forward"),
        ):
            before = len(tried.models)
            patch.setattr(place, name, double(getattr(place, name)))
            tried.trial(model)
            assert len(tried.models) == before + 1
    assert tried.trial(model) is first
    model.model.layers[0].mlp.act_fn = nn.GELU()
    assert tried.trial(model) is not first


def test_changed_base_classes_and_masks_are_seen(tried, monkeypatch):
    model = LlamaForSequenceClassification(tiny_llama().config)
    first = tried.trial(model)
    for place, name in (
        (modeling_layers.GenericForSequenceClassification, "forward"),
        (masking_utils, "sliding_window_overlay"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, double(getattr(place, name)))
            assert tried.trial(model) is not first
    assert tried.trial(model) is first


def test_a_configuration_that_is_not_of_json_is_tried_every_time(tried):
    model = tiny_llama()
    model.config.note = lambda: None
    assert tried.trial(model) is not tried.trial(model)


def test_a_model_with_modules_of_the_user_s_is_tried_every_time(tried):
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj = OwnLinear(2, 2)
    assert tried.trial(model) is not tried.trial(model)


def test_results_of_the_last_models_are_kept(tried, monkeypatch):
    monkeypatch.setattr(rehearsal, "MOST_MODELS", 2)
    models = [tiny_llama() for _ in range(3)]
    for number, model in enumerate(models):
        model.config.rope_theta = 100.0 + number
        tried.trial(model)
    assert tried.trial(models[2]).number == 3
    assert tried.trial(models[0]).number == 4


def test_a_fault_is_not_kept():
    faults = [ValueError("once")]

    @once_for_equal_models
    def trial(model):
        if faults:
            raise faults.pop()
        return torch.ones(1)

    with pytest.raises(ValueError, match="once"):
        trial(tiny_llama())
    assert trial(tiny_llama()).item() == 1
