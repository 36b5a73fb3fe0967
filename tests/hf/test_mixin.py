"""FlexSeqMixin on TRL's SFTTrainer, whose fused head and figures stay."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqMixin, FlexSeqTrainer
from tests.differential.case import Case, sft_trainer
from tests.differential.runs import both, run, stock_run
from tests.hf.plain import OPTIONS, dataset, logged, padded, training_arguments
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import assert_logged_alike, weights_apart
from tests.hf.trainers import word_tokenizer as tokenizer
from tests.ranks import run_cases


def evaluate_first(trainer):
    model = trainer.model
    before = dict(vars(model))
    trainer.evaluate(Dataset.from_list(dataset(8)))
    assert vars(model).keys() == before.keys()
    assert model.forward == before["forward"]  # TRL's, with its own head


IN_BF16 = Case(base=SFTTrainer, model=partial(tiny_llama, torch.float32), settings={"bf16": True})
KINDS = {
    "sft": Case(base=SFTTrainer),
    "bf16": IN_BF16,
    "bf16, evaluated first": replace(IN_BF16, prepare=evaluate_first),
}


@pytest.mark.processes
def test_sft_with_its_own_head_trains_as_under_the_plain_trainer(tmp_path):
    cases = [(case, tmp_path) for case in KINDS.values()]
    of_sft, of_bf16, of_evaluated = run_cases(run, 2, cases, seconds=120)
    stock = stock_run(KINDS["sft"], tmp_path)
    for ours in of_sft:
        assert weights_apart(stock, ours) < 2e-6
        assert_logged_alike(stock, ours, ["loss", "grad_norm", "num_tokens"], rel=1e-5)
        assert logged(ours.log, "flexseq/micro_batches")
    for ours in (*of_evaluated, of_bf16[1]):
        for name, wanted in of_bf16[0].weights.items():
            assert (ours.weights[name] == wanted).all(), name


@pytest.mark.parametrize("flexseq", [None, {}])
def test_evaluating_masks_without_labels_is_refused_as_by_the_plain_trainer(tmp_path, flexseq):
    trainer = sft_trainer(SFTTrainer, tmp_path, 2, flexseq=flexseq)
    for mask in ("completion_mask", "assistant_masks"):
        data = Dataset.from_list([{"input_ids": [1, 2, 3, 4], mask: [0, 0, 1, 1]}])
        for given in (data, {"held out": data}):
            with pytest.raises(ValueError, match="dataset has mask columns but no 'labels'"):
                trainer.evaluate(given)


def test_masks_without_labels_are_refused_when_the_collator_was_wrapped_by_the_user(tmp_path):
    collator = DataCollatorForFlexSeq(DataCollatorForLanguageModeling(pad_token_id=0))
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}])
    given = {"train_dataset": data, "data_collator": collator, "flexseq": {}}
    with pytest.raises(ValueError, match="train dataset has mask columns but no 'labels'"):
        sft_trainer(SFTTrainer, tmp_path, 2, **given)


def test_evaluating_masks_that_preparation_reads_gives_the_plain_loss(tmp_path):
    row = {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 0, 1, 1, 1]}
    data = Dataset.from_list([row] * 2)
    settings = {"dataset_kwargs": None, "completion_only_loss": True}
    plain, trainer = (
        sft_trainer(SFTTrainer, tmp_path, 2, flexseq=flexseq, **settings) for flexseq in (None, {})
    )
    wanted = plain.evaluate(data)["eval_loss"]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    whole = trainer.evaluate(data.remove_columns("completion_mask"))["eval_loss"]
    assert whole != pytest.approx(wanted, rel=1e-3)


# ---- what a collator has


class CollatorWithTokenizer:
    def __init__(self, words):
        self.tokenizer = words

    def __call__(self, examples):
        return padded(examples)


@pytest.mark.parametrize("collator", [CollatorWithTokenizer, DataCollatorWithPadding])
def test_the_tokenizer_of_a_collator_is_saved_with_the_model(tmp_path, collator):
    saved = []
    for cls, config in ((Trainer, TrainingArguments), (FlexSeqTrainer, FlexSeqConfig)):
        folder = tmp_path / cls.__name__
        args = training_arguments(config, folder, batch=1, accumulation=1)
        given = {"train_dataset": dataset(), "data_collator": collator(tokenizer())}
        cls(model=tiny_llama(torch.float32), args=args, **given).save_model()
        saved.append({path.name for path in folder.iterdir()})
    assert "tokenizer.json" in saved[0]
    assert saved[0] == saved[1]


# ---- arguments


class ArgsThird(Trainer):
    """The parameters of TRL's trainers that compare two models."""

    def __init__(self, model, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        super().__init__(model=model, args=args, train_dataset=train_dataset)
        self.ref_model, self.beta = ref_model, beta


class FlexSeqArgsThird(FlexSeqMixin, ArgsThird):
    pass


def config_of(folder, **options):
    return training_arguments(FlexSeqConfig, folder, batch=2, accumulation=1, **OPTIONS, **options)


def split_at(count, arguments):
    """The first arguments by their place, the others by their names."""
    names = list(arguments)
    given = [arguments[name] for name in names[:count]]
    return given, {name: arguments[name] for name in names[count:]}


def test_arguments_reach_the_next_class_as_they_were_given(tmp_path):
    arguments = {
        "model": tiny_llama(),
        "ref_model": tiny_llama(seed=1),
        "args": config_of(tmp_path),
        "train_dataset": dataset(8),
    }
    for positional in range(len(arguments) + 1):
        given, named = split_at(positional, arguments)
        trainer = FlexSeqArgsThird(*given, **named, beta=0.5)
        for name, wanted in arguments.items():
            assert getattr(trainer, name) is wanted, (positional, name)
        assert trainer.beta == 0.5
        assert trainer.flexseq.args.max_tokens_per_rank == OPTIONS["max_tokens_per_rank"]


@pytest.mark.parametrize("cls", [FlexSeqTrainer, FlexSeqArgsThird])
def test_a_named_model_of_a_pipeline_is_loaded_by_the_options_wherever_they_stand(
    tmp_path, monkeypatch, cls
):
    stage, args = tiny_llama(), config_of(tmp_path, pipeline_parallel_size=2)
    loaded = []

    def load(name, training, options):
        loaded.append((name, training, options.pipeline_parallel_size))
        return stage

    monkeypatch.setattr("hf_flexseq.pipeline.trainer.mixin.PipelineMixin.load_own_stage", load)
    monkeypatch.setattr(cls, "_setup_flexseq", lambda self, flexseq_args: None)
    second = {} if cls is FlexSeqTrainer else {"ref_model": None}
    for positional in (0, 1, 3):
        given, named = split_at(positional, {"model": "a/name", **second, "args": args})
        trainer = cls(*given, **named)
        assert loaded.pop() == ("a/name", args, 2)
        assert trainer.model is stage
        assert trainer.args is args


# ---- figures that SFTTrainer notes with every micro-batch are means over a step's targets

TRAINED = ("loss", "mean_token_accuracy", "entropy", "num_tokens")
OF_STEPS = Dataset.from_list(dataset(18))
MEANS = Case(
    base=SFTTrainer,
    settings={"train_dataset": OF_STEPS, "eval_dataset": OF_STEPS.select(range(7))},
    batch=6,
    stock_settings={"per_device_eval_batch_size": 7},
    evaluates=True,
)


def evaluate_one_by_one(trainer):
    trainer.args.per_device_eval_batch_size = 1


BY_CAP = {  # tokens of a rank in a micro-batch
    60: replace(
        MEANS, accumulation=2, flexseq={"max_tokens_per_rank": 60}, prepare=evaluate_one_by_one
    ),
    400: replace(MEANS, flexseq={"max_tokens_per_rank": 400}),
}


@pytest.mark.processes
def test_figures_of_the_sft_trainer_do_not_depend_on_plan_or_ranks(tmp_path):
    micro_batches = {}
    for cap, stock, by_rank in both(BY_CAP, tmp_path, ranks=3):
        for ours in by_rank:
            keys = (*TRAINED, *(f"eval_{name}" for name in TRAINED))
            assert_logged_alike(stock, ours, keys, rel=1e-6)
            micro_batches[cap] = max(logged(ours.log, "flexseq/micro_batches"))
    assert micro_batches[60] > micro_batches[400]


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
def test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made(base):
    with pytest.raises(TypeError, match=r"class Mine has Trainer before FlexSeqMixin.*name Flex"):
        type("Mine", (base, FlexSeqMixin), {})
