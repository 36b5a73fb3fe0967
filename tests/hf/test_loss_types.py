"""transformers chooses a loss, and what it is divided by, by the name of a model's class; a user
may set another one."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.hf.tiny import documents, refused, tiny_gpt2, tiny_llama
from tests.hf.trainers import trained, trainer_of, weights_apart

DATA = documents([2 + (i * i * 7) % 8 for i in range(24)])


class MyLlama(LlamaForCausalLM):
    pass


class MyLlamaForTokenClassification(LlamaForCausalLM):
    pass


class MyLlamaForMaskedLM(LlamaForCausalLM):
    pass


def llama(cls=MyLlama):
    return tiny_llama(torch.float32, cls=cls)


def gpt2():
    return tiny_gpt2(torch.float32)


def adapted(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False))


def make(ours, folder, model, **settings):
    flexseq = {"lookahead": 0, "max_tokens_per_rank": 12} if ours else None
    settings = {"batch": 4, "model": model, "train_dataset": DATA, **settings}
    trainer = trainer_of(Trainer, folder, flexseq=flexseq, **settings)
    trainer.args.max_grad_norm = 0
    return trainer


def difference(model, folder):
    """How far ours is from the plain Trainer, in parts of the update."""
    return weights_apart(*(trained(make(ours, folder, model())) for ours in (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "wrap"), [(llama, lambda model: model), (gpt2, adapted)])
def test_a_class_without_a_known_loss_is_named_with_what_makes_both_equal(
    tmp_path, caplog, make_model, wrap
):
    def with_loss_type():
        model = make_model()
        model.loss_type = "ForCausalLM"
        return wrap(model)

    def warnings():
        """Of hf_flexseq alone: transformers has one that it says once per process."""
        ours = [record for record in caplog.records if record.name.startswith("hf_flexseq")]
        return [said for said in (record.getMessage() for record in ours) if "loss_type=" in said]

    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        make(True, tmp_path, wrap(make_model()))
        said = warnings()
        assert len(said) == 1
        assert ".loss_type = " in said[0]
        assert ("get_base_model()" in said[0]) == (wrap is adapted)
        caplog.clear()
        assert difference(with_loss_type, tmp_path) < 1e-5
    assert not warnings()
    assert difference(lambda: wrap(make_model()), tmp_path) > 1e-3, "no warning would be needed"


@pytest.mark.parametrize("cls", [MyLlamaForTokenClassification, MyLlamaForMaskedLM])
def test_a_class_named_after_another_loss_is_refused(tmp_path, cls):
    with refused(f"{cls.__name__}: its loss is For"):
        make(True, tmp_path, llama(cls))


# ---- a loss function of the user's own


def doubled(logits, labels, vocab_size, **kwargs):
    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def shifts_itself(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / num_items_in_batch


def mean(logits, labels, vocab_size, shift_labels=None, **kwargs):
    return ForCausalLMLoss(logits, labels, vocab_size, shift_labels=shift_labels)


def takes_no_more(logits, labels, vocab_size, num_items_in_batch=None):
    return shifts_itself(logits, labels, vocab_size, num_items_in_batch)


def with_loss(function):
    model = llama(LlamaForCausalLM)
    model.loss_function = function
    return model


def test_a_sum_over_tokens_of_the_users_own_trains_as_under_the_plain_trainer(tmp_path):
    assert difference(lambda: with_loss(doubled), tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (shifts_itself, "shifts_itself gives .* on two parts"),
        (mean, "mean gives .* on two parts"),
        (takes_no_more, "takes_no_more could not be called .*take shift_labels"),
    ],
)
def test_other_loss_functions_are_refused(tmp_path, function, said):
    with refused(said):
        make(True, tmp_path, with_loss(function))


def test_an_own_loss_function_under_a_loss_on_samples_is_refused(tmp_path):
    def on_samples(outputs, labels, num_items_in_batch):
        return outputs.loss

    with refused("outputs.loss is next-token loss"):
        make(True, tmp_path, with_loss(doubled), compute_loss_func=on_samples)
