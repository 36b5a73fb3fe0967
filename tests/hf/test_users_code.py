"""Code of the user's own in the loss and in the model: it trains as under the plain Trainer, or is
refused with one line."""

import logging
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.steps.collator import OTHER_ROWS
from hf_flexseq.steps.users_code import is_known, users_forward_hooks, users_modules
from tests.differential.case import Case, sft_trainer
from tests.differential.runs import here
from tests.hf.test_overrides import make
from tests.hf.test_own_losses import Focal, figures_of
from tests.hf.test_trainer import dataset, float64_loss, logged, padded
from tests.hf.tiny import VOCAB, refused, tiny_llama
from tests.hf.trainers import assert_logged_alike, weights_apart
from tests.ranks import run_cases


def refuses_to_train(base, folder, said, *, model=None):
    with refused(said):
        make(base, folder, model=model).train()


def changing_loss(change, base=Trainer):
    """A class of trainers whose loss is `change(trainer, loss, inputs)`."""

    class ChangesLoss(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return change(self, loss, inputs)

    return ChangesLoss


def changing_inputs(change, base=Trainer):
    """A class of trainers whose prepared inputs are those with `change(inputs)`."""

    class ChangesInputs(base):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, **change(inputs)}

    return ChangesInputs


def editing(edit, base=Trainer):
    """A class of trainers that edits the inputs in its compute_loss."""

    class Edits(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            edit(inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    return Edits


# ---- compute_loss


def masks_labels(inputs):
    inputs["labels"][inputs["input_ids"] < 20] = -100


class Scales(Trainer):
    """A sum over tokens: honoured."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (0.25 * loss, outputs) if return_outputs else 0.25 * loss


class PassesItems(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch or 50)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def replaced_tokens(inputs):
    """Each token by itself: honoured."""
    ids = inputs["input_ids"]
    return {"input_ids": torch.where(ids == 3, 5, ids)}


class SkipsCounts(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(model, inputs, num_items_in_batch)


def labels_masked(inputs):
    return {"labels": inputs["labels"].masked_fill(inputs["input_ids"] < 20, -100)}


class Means(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def with_penalty(trainer, loss, inputs):
    return loss + 1e-2 * sum(p.square().sum() for p in trainer.model.parameters())


class Unscaled(Means):
    """Lets the Trainer divide by the batches of a step."""

    loss_is_scaled_for_ga = False


def times_rows(trainer, loss, inputs):
    """Additive over packed rows, of which a micro-batch has one, and not over those of stock."""
    return loss * len(inputs["input_ids"])


def with_ids(trainer, loss, inputs):
    """Not 0 without labels."""
    return loss + 1e-3 * inputs["input_ids"].sum()


def at_random(trainer, loss, inputs):
    """Of random numbers that nothing else has drawn from."""
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    return loss * torch.rand((), generator=generator)


def first_token_replaced(inputs):
    """The first token of a row, whatever the sequences in it."""
    ids = inputs["input_ids"].clone()
    ids[:, 0] = 1
    return {"input_ids": ids}


def hooked_gradients():
    model = tiny_llama()
    mask = torch.arange(VOCAB)[:, None] > 30
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * mask)
    return model


def hooked_gradients_halved():
    model = tiny_llama()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    return model


def hooked():
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda module, args, output: 0.5 * output)
    model.model.layers[1].register_forward_hook(lambda module, args, output: 1.5 * output)
    return model


def hooked_with_own_loss():
    """Under a hook on its head a model keeps its own loss, with logits."""
    model = hooked()
    model.loss_function = float64_loss
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "model", "rel"),
    [
        (PassesItems, tiny_llama, 1e-6),
        (changing_inputs(replaced_tokens), tiny_llama, 1e-6),
        (SkipsCounts, tiny_llama, 1e-6),
        (changing_inputs(labels_masked), tiny_llama, 1e-6),
        (changing_inputs(labels_masked, Focal), tiny_llama, 1e-6),
        (editing(masks_labels), tiny_llama, 1e-6),
        (editing(masks_labels, Focal), tiny_llama, 1e-6),
        (changing_inputs(first_token_replaced), tiny_llama, 1e-6),
        (Means, tiny_llama, 1e-6),
        (Unscaled, tiny_llama, 1e-6),
        (changing_loss(times_rows), tiny_llama, 1e-6),
        (changing_loss(with_ids), tiny_llama, 1e-6),
        (changing_loss(at_random), tiny_llama, 1e-6),
        (Trainer, hooked_gradients, 1e-6),
        (changing_loss(with_penalty), hooked_gradients_halved, 1e-6),
        (Trainer, hooked_with_own_loss, 1e-9),
    ],
)
def test_users_code_trains_as_under_the_plain_trainer(tmp_path, base, model, rel):
    case = Case(
        base=base,
        model=model,
        batch=8,
        accumulation=2,
        stock_loss=None if issubclass(base, Focal) else float64_loss,
        stock_settings={"batch": 4, "accumulation": 2},
        settings={"max_steps": 2},
        flexseq={"max_tokens_per_rank": 61},
    )
    runs = here(case, tmp_path)
    assert weights_apart(*runs) < 1e-8
    assert_logged_alike(*runs, ["loss"], rel=rel)


class WithoutRanks:
    """In front of a trainer: a loss of the model's, without the factor of ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class WithRanks(WithoutRanks):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self.accelerator.num_processes


class HalfOfSuper:
    """As `WithoutRanks` on two ranks."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) / 2


def loss_and_factors(rank, world_size, in_front, base, how, folder):
    """The loss of the first step, and of which losses the log says that ranks are missing."""
    cls = base if in_front is None else type("Mine", (in_front, base), {})
    said = []

    def note(record):
        said.append(record.getMessage())
        return False

    log = logging.getLogger("hf_flexseq.hf.losses.on_samples")
    log.addFilter(note)
    if base is SFTTrainer:
        flexseq = None if how == "stock" else {}
        trainer = sft_trainer(cls, folder, 2, flexseq=flexseq, settings={"max_steps": 1})
    else:
        trainer = make(cls, folder, how=how, max_steps=1, eval_strategy="no")
    trainer.train()
    log.removeFilter(note)
    (loss,) = logged(trainer.state.log_history, "loss")
    return loss, said


@pytest.mark.processes
def test_a_loss_that_is_the_plain_one_but_for_the_ranks_trains_as_stock_and_is_told_so(tmp_path):
    fronts = [None, WithRanks, WithoutRanks]
    cases = [(one, Trainer, how, tmp_path) for how in ("stock", "mixin") for one in fronts]
    for how in ("stock", "mixin"):
        cases += [(one, SFTTrainer, how, tmp_path) for one in (None, HalfOfSuper)]
    results = run_cases(loss_and_factors, 2, cases, seconds=150)
    for (in_front, base, how, _), by_rank in zip(cases, results, strict=True):
        plain = results[0 if base is Trainer else 6][0][0]
        is_short = in_front in (WithoutRanks, HalfOfSuper)
        for rank, (loss, said) in enumerate(by_rank):
            assert loss == pytest.approx(plain / 2 if is_short else plain, rel=1e-5), in_front
            if how == "mixin" and is_short and rank == 0:
                (line,) = said
                assert line.startswith("the loss of FlexMine is ")
                assert "divided by the 2 ranks" in line
                assert "return loss * self.accelerator.num_processes" in line
            else:
                assert said == [], "one rank speaks, and only where the factor is missing"


class MeansOfSft(SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return model(**inputs, fused_lm_head=True).log_probs.mean()


class ScalesSft(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


class PlainCallsOfSft(SFTTrainer):
    """Calls the model as `Trainer` does, and not as SFTTrainer."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


def mean_of_log_probs(outputs, labels, num_items_in_batch=None):
    return figures_of(outputs, labels)[0].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (ScalesSft, {}),
        (ScalesSft, {"padding_free": True}),
        (MeansOfSft, {}),
        (PlainCallsOfSft, {}),
        (SFTTrainer, {"compute_loss_func": mean_of_log_probs}),
    ],
)
def test_losses_of_the_users_on_the_sft_trainer(tmp_path, base, settings):
    options = {"max_tokens_per_rank": 64}
    case = Case(base=base, settings=settings, stock_loss=float64_loss, flexseq=options)
    runs = here(case, tmp_path)
    assert weights_apart(*runs) < 2e-6
    figures = ["loss", "grad_norm"]
    if base is ScalesSft or "compute_loss_func" in settings:
        figures += ["num_tokens", "entropy", "mean_token_accuracy"]
    assert_logged_alike(*runs, figures, rel=1e-5)


@pytest.mark.slow
def test_a_loss_is_called_as_often_as_by_the_plain_trainer(tmp_path):
    calls = []

    class Counts(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            calls.append(tuple(inputs["input_ids"].shape))
            self.seen = getattr(self, "seen", 0) + 1
            return super().compute_loss(model, inputs, *args, **kwargs)

    by_trainer = []
    for how in ("stock", "mixin"):
        calls.clear()
        trainer = make(Counts, tmp_path, how=how, max_steps=2)
        trainer.train()
        trainer.evaluate()
        assert trainer.seen == len(calls)
        by_trainer.append([*calls])
    assert by_trainer[0] == by_trainer[1]


def test_a_loss_that_is_set_after_the_trainer_was_made_is_refused(tmp_path):
    trainer = make(Trainer, tmp_path)
    trainer.compute_loss = lambda *args, **kwargs: 0.0
    for run in (trainer.train, trainer.evaluate):
        with refused("compute_loss of this FlexTrainer was set after"):
            run()


# ---- collators that look at a whole batch


def masks_longest(batch):
    batch["labels"][batch["attention_mask"].sum(1).argmax()] = -100
    return batch


def masks_at_random(batch):
    batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
    return batch


@pytest.mark.parametrize(
    "change",
    [
        masks_longest,
        masks_at_random,
        lambda batch: {**batch, "labels": batch["input_ids"].clone()},
        lambda batch: {name: value.flip(1) for name, value in batch.items()},
    ],
)
def test_a_collator_that_looks_at_a_whole_batch_is_noticed(change):
    examples = dataset(4)
    assert OTHER_ROWS not in DataCollatorForFlexSeq(padded)(examples)
    batch = DataCollatorForFlexSeq(lambda examples: change(padded(examples)))(examples)
    assert batch[OTHER_ROWS] > 0


def joined(examples, *, first_labels=False):
    """A batch of one row without padding, whose positions begin again with each example."""
    batch = {"input_ids": [], "labels": [], "position_ids": []}
    for example in examples:
        ids = list(example["input_ids"])
        batch["position_ids"] += range(len(ids))
        batch["labels"] += ids if first_labels else [-100, *ids[1:]]
        batch["input_ids"] += ids
    return {name: torch.tensor([values]) for name, values in batch.items()}


def longer_labels(row):
    """A joined row with labels that tell its length."""
    return {**row, "labels": row["labels"] + row["labels"].shape[1]}


def one_more(row):
    """A joined row with another token at its end."""
    return {name: torch.cat((value, value[:, -1:] + 1), dim=1) for name, value in row.items()}


def test_a_collator_that_joins_a_batch_into_one_row_is_compared_example_by_example():
    examples = dataset(4)
    assert OTHER_ROWS not in DataCollatorForFlexSeq(joined)(examples)
    for change in (longer_labels, one_more):
        collate = DataCollatorForFlexSeq(lambda some, change=change: change(joined(some)))
        assert collate(examples)[OTHER_ROWS] == 4
    labelled = DataCollatorForFlexSeq(partial(joined, first_labels=True))
    assert labelled(examples)[OTHER_ROWS] == 3


@pytest.mark.slow
def test_a_collator_that_looks_at_a_whole_batch_is_named_in_the_log(tmp_path, caplog):
    def collate(examples):
        return masks_longest(padded(examples))

    make(Trainer, tmp_path, collator=collate, max_steps=3).train()
    (line,) = (record.message for record in caplog.records if "data_collator" in record.message)
    assert "rows otherwise of a whole batch than of each example" in line


# ---- labels and logits


def replaces_tokens(inputs):
    inputs["input_ids"][:, 0] = 1


class WithoutMask(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, labels = inputs["input_ids"], inputs["labels"]
        return model(input_ids=ids, labels=labels, num_items_in_batch=num_items_in_batch).loss


class ReadsLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss + F.log_softmax(outputs.logits, -1).amax()


class ChangesGradients(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)
        return loss


class ChangesGradientsOfSamples(Focal):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        model.zero_grad()
        return loss


OTHERS = r" computes a loss from tokens or labels that its batch does not have"
GRADIENTS = r"\.training_step changes gradients .* on_pre_optimizer_step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "said"),
    [
        (editing(replaces_tokens), f"Edits{OTHERS}"),
        (editing(replaces_tokens, Focal), f"FlexEdits{OTHERS}"),
        (WithoutMask, f"WithoutMask{OTHERS}"),
        (ReadsLogits, r"outputs\.logits.*flexseq_figures"),
        (ChangesGradients, f"ChangesGradients{GRADIENTS}"),
        (ChangesGradientsOfSamples, f"ChangesGradientsOfSamples{GRADIENTS}"),
    ],
)
def test_changed_labels_gradients_and_calls_are_refused(tmp_path, base, said):
    refuses_to_train(base, tmp_path, said)


# ---- hooks, besides those of `test_replaced_code.py`


def masks_all(module, args, kwargs):
    return args, {**kwargs, "shift_labels": torch.full_like(kwargs["input_ids"], -100)}


@pytest.mark.slow
def test_a_hook_on_the_model_leaves_the_labels_of_a_micro_batch(tmp_path):
    model = tiny_llama()
    model.register_forward_pre_hook(masks_all, with_kwargs=True)
    said = "FlexTrainer or a hook changes the labels of a micro-batch.*data_collator"
    refuses_to_train(Trainer, tmp_path, said, model=model)


def doubles_the_loss(module, args, outputs):
    outputs.loss = 2 * outputs.loss if outputs.loss is not None else None
    return outputs


@pytest.mark.slow
def test_a_loss_of_the_models_own_is_none_that_a_compute_loss_gets(tmp_path):
    model = tiny_llama()
    model.register_forward_hook(doubles_the_loss)
    said = (
        r"doubles_the_loss on the model: two sequences have the loss .* by the log-probabilities"
    )
    refuses_to_train(Scales, tmp_path, said, model=model)


def test_a_hook_on_the_head_keeps_the_models_own_loss():
    assert attach_chunked_loss(hooked()) is None
    model = tiny_llama()
    handle = attach_chunked_loss(model)
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    ids = torch.tensor([[1, 2, 3]])
    with refused("hook was registered on the head"):
        model(input_ids=ids, labels=ids)
    handle.detach()
    assert model(input_ids=ids, labels=ids).logits.shape == (1, 3, VOCAB)


# ---- calls of the model between steps


class Looks(TrainerCallback):
    """Reads logits and generates in every event of a training."""

    def __init__(self):
        self.found = []

    def look(self, args, state, control, model=None, **kwargs):
        was_training = model.training
        ids = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        model.eval()
        with torch.no_grad():
            called = model(input_ids=ids, attention_mask=mask, labels=ids)
            hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            sample = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=3, pad_token_id=0
            )
        model.train(was_training)
        self.found.append((called.loss, called.logits, hidden, sample))

    on_train_begin = on_step_begin = on_step_end = on_evaluate = on_train_end = look


@pytest.mark.slow
def test_callbacks_call_the_model_as_under_the_plain_trainer(tmp_path):
    found = []
    for how in ("stock", "mixin", "callback"):
        looks = Looks()
        torch.manual_seed(0)
        make(Trainer, tmp_path, how=how, callbacks=[looks]).train()
        found.append(looks.found)
    stock, *ours = found
    for own in ours:
        assert len(own) == len(stock) > 6
        for values, wanted in zip(own, stock, strict=True):
            torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-8)


# ---- whose code it is


def test_code_is_told_apart_by_its_package():
    assert is_known(Trainer.compute_loss)
    assert is_known(LlamaForCausalLM)
    assert not is_known(Scales)
    assert not is_known(lambda: None)
    model = tiny_llama()
    assert not list(users_modules(model))
    assert not list(users_forward_hooks(model))
