"""Steps on several ranks against those of the plain trainers in one process: optimizers, packed
rows, smoothed labels, families with layers of several kinds. With `-m nightly` ten families take
ten steps in every way to train them."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
)
from trl import SFTTrainer

from tests.differential.case import Case, make_trainer, sft_trainer
from tests.differential.runs import assert_alike, both, both_on_ranks, here, run, stock_run
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.plain import dataset, float64_loss, logged, ordered_gloo
from tests.hf.test_reach import make_model
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import (
    OwnLoss,
    assert_logged_alike,
    trainer_of,
    weights_apart,
    word_tokenizer,
)


def case_of(ranks, accumulation, optim, callback=False, **options):
    """A rank draws one document in a batch; some need two ranks. 72 documents are a whole number
    of steps in every case: repeats that fill the last batch depend on the number of ranks."""
    return Case(
        settings={"optim": optim, "train_dataset": dataset(72), "callback": callback},
        batch=ranks * accumulation,
        accumulation=accumulation,
        stock_loss=float64_loss,
        flexseq={"lookahead": 2},
        **options,
    )


RUNS = {  # by number of ranks
    2: {
        "AdamW": case_of(2, 3, "adamw_torch"),
        "SGD": case_of(2, 3, "sgd", callback=True),
        "as over NCCL": case_of(2, 3, "sgd", around=ordered_gloo),
    },
    3: {"SGD": case_of(3, 2, "sgd")},
    4: {"AdamW": case_of(4, 1, "adamw_torch", callback=True)},
}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", RUNS)
def test_steps_equal_the_plain_trainer(tmp_path, ranks):
    for _, stock, by_rank in both(RUNS[ranks], tmp_path, ranks=ranks, seconds=150):
        for ours in by_rank:
            assert weights_apart(stock, ours) < 1e-8
            assert_logged_alike(stock, ours, ["loss"], rel=1e-6)
            assert_logged_alike(stock, ours, ["grad_norm"], rel=1e-8)


@pytest.mark.processes
def test_the_last_partial_step_holds_the_plain_trainers_samples(tmp_path):
    """On as many ranks as the plain run: 13 documents end in a batch that is filled up with
    a repeat, in a step of fewer batches than the others."""
    case = Case(
        settings={"train_dataset": dataset(13), "max_steps": 5},
        batch=6,
        accumulation=3,
        stock_loss=float64_loss,
        stock_settings={"batch": 1, "accumulation": 3},
    )
    for _, stock, ours in both_on_ranks({"partial": case}, tmp_path):
        assert weights_apart(stock, ours) < 1e-8
        assert logged(ours.log, "epoch") == logged(stock.log, "epoch")


# ---- rows that SFTTrainer has packed

PACKED = {"packing": True, "max_length": 40}
ROWS = {  # by name: settings of the SFTConfig
    "bfd": PACKED,
    "wrapped": PACKED | {"packing_strategy": "wrapped"},
    "padding-free rows": {"padding_free": True},
}
OF_PACKED = {
    "dataset_kwargs": None,
    "train_dataset": Dataset.from_list(dataset(24)),
    "eval_dataset": Dataset.from_list(dataset(9)),
    "per_device_eval_batch_size": 64,  # all of it: the plain trainer averages means of batches
    "max_steps": 2,
}
PACKINGS = {
    name: Case(base=SFTTrainer, settings=OF_PACKED | own, evaluates=True)
    for name, own in ROWS.items()
}
FIGURES = ["loss", "grad_norm", "mean_token_accuracy", "entropy", "eval_loss", "num_tokens"]


@pytest.mark.processes
def test_packed_rows_train_as_under_the_plain_trainer(tmp_path):
    assert_alike(PACKINGS, tmp_path, weights=2e-6, figures=FIGURES, seconds=120)


def test_sequences_of_a_packed_row_are_planned_one_by_one(tmp_path):
    lengths = {}
    for name in ("bfd", "wrapped"):
        trainer = make_trainer(PACKINGS[name], tmp_path, is_ours=True)
        rows = list(trainer.train_dataset)
        lengths[name] = trainer.data_collator(rows)["lengths"]
        if name == "bfd":
            assert lengths[name] == [length for row in rows for length in row["seq_lengths"]]
    assert len(lengths["bfd"]) == 24 > len(lengths["wrapped"]) == len(rows)


def test_documents_stay_apart_with_a_cache_and_the_log_says_so(tmp_path, caplog):
    """Unlike those of the plain Trainer, which it lets see each other in its own attention."""
    case = Case(
        settings={"data_collator": DataCollatorWithFlattening(), "use_cache": True},
        flexseq={"max_tokens_per_rank": 64},
    )
    without = replace(case, settings={**case.settings, "use_cache": False})
    stock, apart = (stock_run(each, tmp_path) for each in (case, without))
    assert weights_apart(apart, run(0, 1, case, tmp_path)) < 1e-6
    assert weights_apart(apart, stock) > 1e-3
    assert "documents of a packed row see each other" in caplog.text


# ---- training mode and evaluation mode


def in_two_modes():
    """A model whose last hidden states are doubled in training mode."""
    model = tiny_llama()
    model.model.norm.register_forward_hook(
        lambda module, args, outputs: outputs * 2 if module.training else outputs
    )
    return model


class InTwoModes(torch.optim.SGD):
    """As schedule-free optimizers, it has other weights in evaluation mode: halves."""

    is_halved = False

    def train(self):
        self._scale(2.0 if self.is_halved else 1.0)
        self.is_halved = False

    def eval(self):
        self._scale(1.0 if self.is_halved else 0.5)
        self.is_halved = True

    def _scale(self, factor):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(factor)


def with_modes(model):
    return {"optimizers": (InTwoModes(model.parameters(), lr=0.1), None)}


class Evaluates(TrainerCallback):
    """Puts a module into evaluation mode, which the plain Trainer undoes with each batch."""

    def on_step_begin(self, args, state, control, model, **objects):
        model.model.norm.eval()


@pytest.mark.parametrize("base", [Trainer, OwnLoss])
def test_a_step_runs_in_training_mode_after_evaluations_and_callbacks(tmp_path, base):
    case = Case(
        base=base,
        model=in_two_modes,
        settings={
            "callbacks": [Evaluates()],
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": dataset(2),
        },
        of_model=with_modes,
        accumulation=2,
        stock_loss=float64_loss,
        flexseq={"max_tokens_per_rank": 64},
    )
    stock, ours = here(case, tmp_path)
    assert weights_apart(stock, ours) < 1e-8
    assert_logged_alike(stock, ours, ["loss", "eval_loss"], rel=1e-6)


# ---- smoothed labels

SMOOTHED = {"label_smoothing_factor": 0.2, "learning_rate": 0.1}
CLASSES = {
    "train_dataset": [
        {"input_ids": one["input_ids"], "labels": i % 3} for i, one in enumerate(dataset(16))
    ],
    "data_collator": DataCollatorWithPadding(word_tokenizer()),
}
classifier = partial(tiny_llama, cls=LlamaForSequenceClassification, num_labels=3, pad_token_id=0)
SMOOTHINGS = {
    "tokens": Case(settings=SMOOTHED),
    "classes": Case(model=classifier, settings=SMOOTHED | CLASSES),
    "a loss of one's own": Case(base=OwnLoss, settings=SMOOTHED),
}


@pytest.mark.processes
def test_smoothed_labels_train_as_under_the_plain_trainer(tmp_path):
    # the plain Trainer adds up smoothed losses in float32
    assert_alike(SMOOTHINGS, tmp_path, weights=1e-6)
    for case in SMOOTHINGS.values():
        hard = replace(case, stock_settings={"label_smoothing_factor": 0.0})
        apart = weights_apart(stock_run(case, tmp_path), stock_run(hard, tmp_path))
        assert apart > 1e-3, "smoothing makes a difference"


def test_smoothed_labels_are_refused_where_the_loss_is_not_ours(tmp_path):
    model = tiny_llama()
    model.loss_function = lambda logits, labels, **others: logits.sum()
    message = "label_smoothing_factor=0.2 with LlamaForCausalLM: labels are smoothed where"
    with pytest.raises(NotImplementedError, match=message):
        trainer_of(Trainer, tmp_path, flexseq={}, model=model, label_smoothing_factor=0.2)
    with pytest.raises(NotImplementedError, match="label_smoothing_factor=0.2 of FlexSFTTrainer"):
        sft_trainer(SFTTrainer, tmp_path, 2, flexseq={}, label_smoothing_factor=0.2)


# ---- families


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


WAYS = ("mixin", "callback", "sft", "zero3")
TRAINED = ("Gemma2", "Gemma3", "Gemma4", "GptOss", "Mistral with a window", "Olmo3", "Cohere2")
TRAINED += ("Exaone4", "Llama4", "DeepseekV3")
PAIRS = [(way, family) for way in WAYS for family in TRAINED]
# experts that run one by one, of which ranks choose others
PAIRS += [("zero3", one) for one in ("Qwen3Next", "Qwen3_5Moe", "NemotronH", "Lfm2Moe")]
PAIRS += [("mixin", "Qwen3Next")]
STEPS = [(3, "mixin", "Gemma3"), (3, "callback", "GptOss"), (3, "sft", "DeepseekV3")]
STEPS += [pytest.param(10, *pair, marks=pytest.mark.nightly) for pair in PAIRS]


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("steps", "way", "family"), STEPS)
def test_steps_of_a_family_equal_the_plain_trainer(tmp_path, steps, way, family):
    """The plain Trainer takes one document at a time: a window that shows padding alone makes NaN
    in some families. Two ranks share the documents of more than 40 tokens."""
    settings = {"max_steps": steps, "callback": way == "callback"}
    if way == "sft":  # asks models of experts for their router loss, unless it is weighed with 0
        settings["router_aux_loss_coef"] = 0.0
    if way == "zero3":  # rounding of weights is small beside a larger update
        settings["learning_rate"] = 0.1
    case = Case(
        base=SFTTrainer if way == "sft" else Trainer,
        model=partial(model_of, way, family),
        settings=settings,
        stock_settings={"batch": 1, "accumulation": 4},
        stage=3 if way == "zero3" else None,
    )
    # of the update, which is small beside the loss's float32; with ZeRO-3 weights are float32: the
    # plain Trainer is as far from its float64 ones
    bound = 1e-5 if way == "zero3" else 2e-6
    assert_alike({family: case}, tmp_path, weights=bound, seconds=300)
