"""Models with the chunked loss against their own logits, and models that keep their own loss."""

import logging
import pickle
import re
import types
from functools import partial

import pytest
import torch
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.head_trial import try_head
from hf_flexseq.hf.model.loss import NO_LOGITS, attach_chunked_loss
from hf_flexseq.kernels.chunked_loss import chunked_cross_entropy_sum
from tests.hf.tiny import (
    SIZES,
    documents,
    refused,
    relative_errors,
    taken_gradients,
    tiny_gpt2,
    tiny_llama,
    tiny_model,
)
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.kernels.test_chunked_loss import difference


def attached_model(name="Llama", dtype=torch.float64, **config):
    """A tiny model with a chunked loss."""
    model = tiny_model(name, dtype, **config)
    assert attach_chunked_loss(model) is not None
    return model


def make_batch(length=11, rows=1):
    """input_ids, labels and shift_labels [rows, length], the latter two alike."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 61, (rows, length + 1), generator=random)
    labels = tokens[:, 1:].clone()
    labels[:, ::4] = IGNORE_INDEX
    return {"input_ids": tokens[:, :-1], "labels": labels, "shift_labels": labels}


def full_loss(model, batch, items=None):
    """The reference: the loss from the logits of a call without labels."""
    logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    targets = batch["shift_labels"].flatten()
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    return total / ((targets != IGNORE_INDEX).sum() if items is None else items)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return taken_gradients(model)


def assert_chunked_equals_full(model, batch, tolerance=1e-12):
    for items in (None, 29, torch.tensor(29)):
        outputs = model(**batch, num_items_in_batch=items)
        wanted = full_loss(model, batch, items)
        assert outputs.logits is NO_LOGITS
        assert difference(outputs.loss, wanted) < tolerance
        errors = relative_errors(gradients(model, outputs.loss), gradients(model, wanted))
        assert max(errors.values()) <= tolerance


# float64 has no grouped matrix product.
MIXTURE = {
    "experts_implementation": "eager",
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize("name", ["Llama", "Phi3", "GPTNeoX"])
def test_suitable_models(name):
    assert_chunked_equals_full(attached_model(name, pad_token_id=0), make_batch())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_router_loss_is_added_to_ours(name):
    model, batch = attached_model(name, **MIXTURE), make_batch()
    assert_chunked_equals_full(model, batch)
    outputs = model(**batch, output_router_logits=True)
    wanted = full_loss(model, batch) + model.router_aux_loss_coef * outputs.aux_loss.detach()
    assert outputs.aux_loss > 0
    assert difference(outputs.loss, wanted) < 1e-12


def keeps_its_loss(model, caplog):
    """The one line that says why a model keeps its own loss."""
    with caplog.at_level(logging.INFO):
        assert attach_chunked_loss(model) is None
    (record,) = caplog.records
    return record.getMessage()


def test_a_model_that_changes_its_logits_keeps_its_loss(caplog):
    model, batch = tiny_model("Granite"), make_batch()
    before, keys = model(**batch).loss, set(vars(model))
    assert "more with the logits" in keeps_its_loss(model, caplog)
    outputs = model(**batch)
    assert torch.equal(outputs.loss, before)
    assert outputs.logits.shape == (1, 11, 61)
    assert set(vars(model)) == keys


def own_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()


def adapted_head(**settings):
    return lambda model: get_peft_model(model, LoraConfig(r=2, **settings))


def wrapped(plain):
    return lambda self, *args, **kwargs: plain(*args, **kwargs)


def own_forward(model):
    model.forward = types.MethodType(wrapped(model.forward), model)


def replaced_head_forward(model):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden)


def hooked_head(model):
    model.lm_head.register_forward_hook(lambda module, args, output: 0.5 * output)


def no_head(model):
    model.lm_head = nn.Identity()


def split_head(model):
    model._tp_size = 2


PLAIN = "expected a plain nn.Linear"
LOW_RANK = {"target_modules": ["lm_head"]}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_loss, "its loss is <lambda>"),
        (adapted_head(**LOW_RANK), PLAIN),
        (adapted_head(**SAVED), PLAIN),
        (no_head, PLAIN),
        (replaced_head_forward, "replaced forward"),
        (hooked_head, "a hook on its lm_head reads logits"),
        (own_forward, "forward has been replaced"),
        (split_head, "tensor parallelism"),
    ],
)
def test_changed_models_keep_their_loss(change, reason, caplog):
    model = tiny_model("Llama")
    change(model)
    assert reason in keeps_its_loss(model, caplog)


def test_a_forward_wrapped_by_accelerate_is_looked_through():
    model, batch = tiny_model("Llama"), make_batch()
    model._original_forward, model.forward = model.forward, convert_outputs_to_fp32(model.forward)
    assert attach_chunked_loss(model) is not None
    assert model(**batch).logits is NO_LOGITS
    assert difference(model(**batch).loss, full_loss(tiny_model("Llama"), batch)) < 1e-6


class Llama(transformers.LlamaForCausalLM):
    """A model whose parts can be changed one by one."""

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.logits_of(hidden)
        loss = None if labels is None else self.loss_of(logits, labels, **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    def logits_of(self, hidden):
        return self.lm_head(hidden)

    def loss_of(self, logits, labels, **kwargs):
        return self.loss_function(logits=logits, labels=labels, vocab_size=61, **kwargs)


def without(name):
    """The loss of a model that does not pass an argument on."""

    def loss_of(self, logits, labels, **kwargs):
        kwargs.pop(name, None)
        return Llama.loss_of(self, logits, labels, **kwargs)

    return loss_of


def changed(change):
    """The loss of a model that changes it. change: of model, loss, logits and labels."""

    def loss_of(self, logits, labels, **kwargs):
        return change(self, Llama.loss_of(self, logits, labels, **kwargs), logits, labels)

    return loss_of


def relabelling(self, logits, labels, **kwargs):
    return Llama.loss_of(self, logits, labels.flip(1), **kwargs)


def second_loss(self, loss, logits, labels):
    weight = self.model.embed_tokens.weight
    return loss + F.cross_entropy(weight, labels[0, :1].expand(61))


def loss_twice(self, logits, labels, **kwargs):
    first = Llama.loss_of(self, logits, labels, **kwargs)
    return 2 * first - Llama.loss_of(self, logits, labels, **kwargs)


def loss_of_its_own(self, logits, labels, **kwargs):
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())


def head_twice(self, hidden):
    return self.lm_head(hidden + self.lm_head(hidden).sum())


PASS_ON = "more with the logits than to pass them on"


@pytest.mark.parametrize(
    ("part", "changed_part", "reason"),
    [
        ("logits_of", lambda self, h: self.lm_head(h).mul_(2), rf"{PASS_ON} \(mul_\)"),
        ("logits_of", lambda self, h: self.lm_head(h).float(), PASS_ON),
        ("logits_of", lambda self, h: self.lm_head(h) / 2, PASS_ON),
        ("logits_of", head_twice, "calls its lm_head 2 times"),
        ("loss_of", without("num_items_in_batch"), "does not give num_items_in_batch"),
        ("loss_of", without("shift_labels"), "does not give shift_labels"),
        ("loss_of", relabelling, "changes the labels"),
        (
            "loss_of",
            changed(lambda self, loss, logits, labels: loss + logits.logsumexp(-1).mean()),
            rf"{PASS_ON} \(logsumexp\)",
        ),
        ("loss_of", changed(second_loss), "loss_function just once"),
        ("loss_of", loss_twice, "loss_function just once"),
        ("loss_of", loss_of_its_own, "loss_function just once"),
        (
            "loss_of",
            changed(lambda self, loss, logits, labels: loss * labels.max().item()),
            "could not be tried with labels",
        ),
    ],
)
def test_forwards_that_would_be_computed_wrongly_are_refused(part, changed_part, reason):
    model = type("Changed", (Llama,), {part: changed_part})(transformers.LlamaConfig(**SIZES))
    assert attach_chunked_loss(model) is None
    assert re.search(reason, try_head(model).reason)


def test_labels_alone_are_shifted():
    model, batch = attached_model(), make_batch(rows=2)
    ids, labels = batch["input_ids"], batch["labels"]
    shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    wanted = full_loss(model, batch | {"shift_labels": shifted})
    assert difference(model(input_ids=ids, labels=labels).loss, wanted) < 1e-12
    positional = model(ids, None, None, None, None, labels)
    assert positional.logits is NO_LOGITS
    assert difference(positional.loss, wanted) < 1e-12


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 29])
def test_a_batch_without_targets_has_zero_loss_and_zero_gradients(items):
    model, batch = attached_model(), make_batch(length=1)
    batch["shift_labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    loss = model(**batch, num_items_in_batch=items).loss
    assert loss == 0
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tied_embeddings_and_activation_checkpointing(checkpointing):
    model = attached_model(tie_word_embeddings=True).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_chunked_equals_full(model, make_batch(rows=2))


def test_under_autocast_only_the_operands_are_rounded():
    model, seen = attached_model(dtype=torch.float32), []
    head, targets = model.lm_head, make_batch()["labels"].flatten()
    head.register_forward_pre_hook(
        lambda module, args: seen.append(args[0]) or args[0].retain_grad()
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**make_batch()).loss
    loss.backward()
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (seen[0], head.weight))
    total = chunked_cross_entropy_sum(hidden.flatten(0, 1), weight, None, targets)
    wanted = total / (targets != IGNORE_INDEX).sum()
    wanted.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, wanted)
    assert torch.equal(seen[0].grad, hidden.grad)
    assert torch.equal(head.weight.grad, weight.grad.float())


def test_calls_without_labels_and_disabled_ones_run_as_before():
    model, batch = tiny_model("Llama"), make_batch()
    inputs = {"input_ids": batch["input_ids"]}
    plain, with_loss = model(**inputs).logits, model(**batch)
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    handle = attach_chunked_loss(model)
    assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), generated)
    with handle.disabled():
        outputs = model(**batch)
    assert torch.equal(outputs.logits, plain)
    assert torch.equal(outputs.loss, with_loss.loss)
    assert model(**batch).logits is NO_LOGITS
    # another ignore_index is left to the model as well
    labels = batch["labels"].masked_fill(batch["labels"] == IGNORE_INDEX, 0)
    outputs = model(**inputs, labels=labels, shift_labels=labels, ignore_index=0)
    assert outputs.logits is not NO_LOGITS
    assert difference(outputs.loss, with_loss.loss) < 1e-6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (own_loss, "model.loss_function was set while the model trains"),
        (hooked_head, "hook was registered on the head"),
    ],
)
def test_what_comes_later_is_refused(change, said):
    model, batch = tiny_model("Llama"), make_batch()
    handle = attach_chunked_loss(model)
    change(model)
    with refused(said):
        model(**batch)
    handle.detach()
    assert model(**batch).logits.shape == (1, 11, 61)


def test_a_forward_that_names_no_argument_gets_labels_by_name():
    class Passing(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model, batch = tiny_llama(cls=Passing), make_batch()
    wanted = model(**batch).loss
    attach_chunked_loss(model)
    outputs = model(**batch)
    assert outputs.logits is NO_LOGITS
    assert difference(outputs.loss, wanted) < 1e-6


def test_tuples_keep_their_places():
    model, batch = tiny_model("Llama"), make_batch()
    loss, _, cache = model(**batch, return_dict=False, use_cache=True)
    names = list(model(**batch, use_cache=True))
    attach_chunked_loss(model)
    ours = model(**batch, return_dict=False, use_cache=True)
    assert difference(ours[0], loss) < 1e-6  # transformers' own loss is in float32
    assert ours[1] is NO_LOGITS
    assert type(ours[2]) is type(cache)
    assert list(model(**batch, use_cache=True)) == names


def test_an_exception_leaves_no_labels_behind():
    model, batch = attached_model(), make_batch()
    hidden = torch.zeros(1, 11, 32, dtype=torch.float64)
    hook = model.model.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    hook.remove()
    assert model.lm_head(hidden).shape == (1, 11, 61)
    with pytest.raises(ValueError, match="11 hidden states but 10 labels"):
        model(batch["input_ids"], labels=batch["labels"][:, 1:])
    assert model.lm_head(hidden).shape == (1, 11, 61)


def test_attaching_twice_gives_the_same_handle_and_detaching_restores():
    model, batch = tiny_model("Llama"), make_batch()
    before = [set(vars(module)) for module in model.modules()]
    pickled, loss = pickle.dumps(model), model(**batch).loss
    handle = attach_chunked_loss(model)
    assert attach_chunked_loss(model) is handle
    handle.detach()
    handle.detach()
    assert [set(vars(module)) for module in model.modules()] == before
    assert len(pickle.dumps(model)) == len(pickled)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch).loss, loss)
    assert attach_chunked_loss(model) not in (None, handle)


def test_a_loss_function_set_by_hand_comes_back():
    model = tiny_model("Llama")
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    attach_chunked_loss(model).detach()
    assert vars(model)["_loss_function"] is transformers.loss.loss_utils.ForCausalLMLoss


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_low_rank_adapters_train_and_a_frozen_head_gets_no_gradient(task):
    config = LoraConfig(task_type=task, target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = tiny_model("Llama")
    adapted = get_peft_model(model, config).double()
    attach_chunked_loss(adapted)
    adapted(**make_batch()).loss.backward()
    assert model.lm_head.weight.grad is None
    assert_chunked_equals_full(adapted, make_batch())


# ---- losses that a class name or a user chooses


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


def trainer_of_loss(ours, folder, model, **settings):
    flexseq = {"lookahead": 0, "max_tokens_per_rank": 12} if ours else None
    settings = {"batch": 4, "model": model, "train_dataset": DATA, **settings}
    trainer = trainer_of(Trainer, folder, flexseq=flexseq, **settings)
    trainer.args.max_grad_norm = 0
    return trainer


def apart(model, folder):
    """How far ours is from the plain Trainer, in parts of the update."""
    return weights_apart(
        *(trained(trainer_of_loss(ours, folder, model())) for ours in (False, True))
    )


@pytest.mark.slow
@pytest.mark.parametrize(("make", "wrap"), [(llama, lambda model: model), (gpt2, adapted)])
def test_a_class_without_a_known_loss_is_named_with_what_makes_both_equal(
    tmp_path, caplog, make, wrap
):
    def with_loss_type():
        model = make()
        model.loss_type = "ForCausalLM"
        return wrap(model)

    def warnings():
        """Of hf_flexseq alone: transformers has one that it says once per process."""
        ours = [record for record in caplog.records if record.name.startswith("hf_flexseq")]
        return [said for said in (record.getMessage() for record in ours) if "loss_type=" in said]

    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        trainer_of_loss(True, tmp_path, wrap(make()))
        said = warnings()
        assert len(said) == 1
        assert ".loss_type = " in said[0]
        assert ("get_base_model()" in said[0]) == (wrap is adapted)
        caplog.clear()
        assert apart(with_loss_type, tmp_path) < 1e-5
    assert not warnings()
    assert apart(lambda: wrap(make()), tmp_path) > 1e-3, "no warning would be needed"


# ---- a loss function of the user's own


def doubled(logits, labels, vocab_size, **kwargs):
    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def shifts_itself(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / num_items_in_batch


def mean(logits, labels, vocab_size, shift_labels=None, **kwargs):
    return ForCausalLMLoss(logits, labels, vocab_size, shift_labels=shift_labels)


def without_a_value(logits, labels, vocab_size, **kwargs):
    return torch.nan * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def takes_no_more(logits, labels, vocab_size, num_items_in_batch=None):
    return shifts_itself(logits, labels, vocab_size, num_items_in_batch)


def with_loss(function):
    model = llama(LlamaForCausalLM)
    model.loss_function = function
    return model


def test_a_sum_over_tokens_of_the_users_own_trains_as_under_the_plain_trainer(tmp_path):
    assert apart(lambda: with_loss(doubled), tmp_path) < 1e-5


def on_samples(outputs, labels, num_items_in_batch):
    return outputs.loss


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        (partial(with_loss, shifts_itself), {}, "shifts_itself gives .* on two parts"),
        (partial(with_loss, mean), {}, "mean gives .* on two parts"),
        (partial(with_loss, without_a_value), {}, "without_a_value gives nan on a sequence"),
        (partial(with_loss, takes_no_more), {}, "takes_no_more could not be .*take shift_labels"),
        (
            partial(with_loss, doubled),
            {"compute_loss_func": on_samples},
            "outputs.loss is next-token loss",
        ),
        (partial(llama, MyLlamaForMaskedLM), {}, "MyLlamaForMaskedLM: its loss is For"),
        (
            partial(llama, MyLlamaForTokenClassification),
            {},
            "MyLlamaForTokenClassification: its loss is For",
        ),
    ],
)
def test_other_losses_are_refused(tmp_path, make, settings, said):
    with refused(said):
        trainer_of_loss(True, tmp_path, make(), **settings)
