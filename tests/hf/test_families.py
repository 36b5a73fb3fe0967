"""Families with layers of several kinds: steps of the Trainer on two ranks against those of the
plain Trainer in one process. With `-m nightly` ten families take ten steps in every way to train
them."""

from functools import partial

import pytest
from transformers import Trainer
from trl import SFTTrainer

from tests.differential.case import Case
from tests.differential.runs import both
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import make_model
from tests.hf.trainers import assert_logged_alike, weights_apart

WAYS = ("mixin", "callback", "sft", "zero3")


def model_of(way, family):
    """A model of this family. SFTTrainer looks for the decoder by the model's prefix, which in
    Llama 4's is that of another part."""
    model = make_hybrid(family) if family in HYBRIDS else make_model(family)
    if way == "zero3":
        model = model.float()
    if way == "sft" and not hasattr(model, model.base_model_prefix):
        model.base_model_prefix = "model"
    model.set_attn_implementation("eager")
    return model


def case_of(way, family, steps):
    """The plain Trainer takes one document at a time: a window that shows padding alone makes NaN
    in some families. Two ranks share the documents of more than 40 tokens."""
    settings = {"max_steps": steps}
    if way == "callback":
        settings["callback"] = True
    if way == "sft":  # asks models of experts for their router loss, unless it is weighed with 0
        settings["router_aux_loss_coef"] = 0.0
    if way == "zero3":  # rounding of weights is small beside a larger update
        settings["learning_rate"] = 0.1
    return Case(
        base=SFTTrainer if way == "sft" else Trainer,
        model=partial(model_of, way, family),
        settings=settings,
        stock_settings={"batch": 1, "accumulation": 4},
        stage=3 if way == "zero3" else None,
    )


def assert_equal(folder, way, family, *, steps, bound):
    """bound: of the error of the update, which is small beside the loss's float32."""
    cases = {family: case_of(way, family, steps)}
    for _, stock, by_rank in both(cases, folder, seconds=300):
        for ours in by_rank:
            assert weights_apart(stock, ours) < bound
            assert_logged_alike(stock, ours, ["loss"], rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("mixin", "Gemma3"),
        ("callback", "GptOss"),
        ("sft", "DeepseekV3"),
        pytest.param("zero3", "GptOss", marks=pytest.mark.nightly),
        pytest.param("mixin", "Qwen3Next", marks=pytest.mark.nightly),
    ],
)
def test_steps_of_a_family_equal_the_plain_trainer(tmp_path, way, family):
    assert_equal(tmp_path, way, family, steps=3, bound=2e-6)


TRAINED = ("Gemma2", "Gemma3", "Gemma4", "GptOss", "Mistral with a window", "Olmo3", "Cohere2")
TRAINED += ("Exaone4", "Llama4", "DeepseekV3")
PAIRS = [(way, family) for way in WAYS for family in TRAINED]
# experts that run one by one, of which ranks choose others
PAIRS += [("zero3", one) for one in ("Qwen3Next", "Qwen3_5Moe", "NemotronH", "Lfm2Moe")]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("way", "family"), PAIRS)
def test_ten_steps_of_a_family_equal_the_plain_trainer(tmp_path, way, family):
    """With ZeRO-3 weights are float32: the plain Trainer is as far from its float64 ones."""
    assert_equal(tmp_path, way, family, steps=10, bound=1e-5 if way == "zero3" else 2e-6)
