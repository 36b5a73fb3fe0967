"""A trial of a model runs once for equal models, and again when anything it depends on differs."""

from types import SimpleNamespace

import pytest
from torch import nn
from transformers.models.llama import modeling_llama

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


def test_a_model_with_modules_of_the_user_s_is_tried_every_time(tried):
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj = OwnLinear(2, 2)
    assert tried.trial(model) is not tried.trial(model)
