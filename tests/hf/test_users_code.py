"""Code of the user's own in the loss and in collators: it trains as under the plain Trainer, or is
refused with one line. Single changes of a user's are those of `test_drawn_settings.py`."""

import logging

import numpy as np
import pytest
from transformers import DataCollatorForLanguageModeling, Trainer
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.steps.collator import OTHER_ROWS
from tests.differential.case import Case, sft_trainer
from tests.differential.runs import here
from tests.hf.plain import dataset, float64_loss, logged, padded
from tests.hf.test_overrides import make
from tests.hf.test_own_losses import figures_of
from tests.hf.tiny import refused
from tests.hf.trainers import assert_logged_alike, weights_apart, word_tokenizer
from tests.ranks import run_cases

# ---- compute_loss


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


def mean_of_log_probs(outputs, labels, num_items_in_batch=None):
    return figures_of(outputs, labels)[0].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (MeansOfSft, {}),
        (SFTTrainer, {"compute_loss_func": mean_of_log_probs, "padding_free": True}),
    ],
)
def test_losses_of_the_users_on_the_sft_trainer(tmp_path, base, settings):
    options = {"max_tokens_per_rank": 64}
    case = Case(base=base, settings=settings, stock_loss=float64_loss, flexseq=options)
    runs = here(case, tmp_path)
    assert weights_apart(*runs) < 2e-6
    figures = ["loss", "grad_norm"]
    if base is SFTTrainer:
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


def test_a_collator_that_looks_at_a_whole_batch_is_noticed():
    examples = dataset(4)
    assert OTHER_ROWS not in DataCollatorForFlexSeq(padded)(examples)
    batch = DataCollatorForFlexSeq(lambda examples: masks_longest(padded(examples)))(examples)
    assert batch[OTHER_ROWS] > 0


def test_a_collator_that_masks_at_random_is_noticed():
    words = word_tokenizer()
    words.mask_token = "<pad>"
    examples = [{"input_ids": row["input_ids"]} for row in dataset(4)]
    for mlm in (False, True):
        masks = DataCollatorForLanguageModeling(words, mlm=mlm, mlm_probability=0.5)
        assert (OTHER_ROWS in DataCollatorForFlexSeq(masks)(examples)) == mlm


class Masks:
    """A user's collator, which masks labels by a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, examples):
        rows = []
        for row in examples:
            is_masked = self.generator.random(len(row["input_ids"])) < 0.5
            rows.append({**row, "labels": np.where(is_masked, -100, row["input_ids"]).tolist()})
        return padded(rows)


def masks_of_library():
    words = word_tokenizer()
    words.mask_token = "<pad>"
    return DataCollatorForLanguageModeling(words, mlm_probability=0.5, seed=0)


@pytest.mark.parametrize("make", [Masks, masks_of_library])
def test_a_collator_that_is_compared_keeps_its_own_random_numbers(make):
    examples = [{"input_ids": row["input_ids"]} for row in dataset(4)]
    compared, other = make(), make()
    DataCollatorForFlexSeq(compared)(examples)
    for row in examples:
        other([row])
    states = [
        own.generator.get_state().tolist()
        if hasattr(own.generator, "get_state")
        else own.generator.bit_generator.state
        for own in (compared, other)
    ]
    assert states[0] == states[1]
