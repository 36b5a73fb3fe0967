"""FlexSeqMixin on TRL's SFTTrainer, whose own fused head stays, and LoRA through PEFT."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_flexseq import (
    DataCollatorForFlexSeq,
    FlexSeqArguments,
    FlexSeqConfig,
    FlexSeqMixin,
    FlexSeqTrainer,
)
from tests.hf.test_trainer import (
    OPTIONS,
    dataset,
    float64_loss,
    logged,
    padded,
    training_arguments,
    update_error,
)
from tests.hf.tiny import VOCAB, tiny_llama
from tests.ranks import run_cases, run_ranks


class FlexSeqSFTTrainer(FlexSeqMixin, SFTTrainer):
    pass


def tokenizer():
    """Of words between spaces, "t5" is token 5; no word is part of another one's text."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def sft_trainer(
    cls,
    folder,
    batch,
    *,
    accumulation=1,
    model=None,
    settings=None,
    train_dataset=None,
    **options,
):
    args = training_arguments(
        SFTConfig,
        folder,
        batch=batch,
        accumulation=accumulation,
        **{
            "optim": "sgd",
            "max_length": None,
            "gradient_checkpointing": False,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "bf16": False,
            **(settings or {}),
        },
    )
    return cls(
        model=model or tiny_llama(),
        args=args,
        train_dataset=train_dataset or Dataset.from_list(dataset()),
        processing_class=tokenizer(),
        **options,
    )


def sft_run(rank, world_size, folder):
    trainer = sft_trainer(FlexSeqSFTTrainer, folder, 2, flexseq_args=FlexSeqArguments(**OPTIONS))
    trainer.train()
    return {
        n: p.detach().numpy() for n, p in trainer.model.named_parameters()
    }, trainer.state.log_history


@pytest.mark.processes
def test_sft_trainer_with_its_own_head(tmp_path):
    plain = sft_trainer(SFTTrainer, tmp_path, 4)
    before = {n: p.detach().clone() for n, p in plain.model.named_parameters()}
    plain.train()
    wanted = {n: p.detach() for n, p in plain.model.named_parameters()}
    for found, log in run_ranks(sft_run, 2, tmp_path, seconds=120):
        assert update_error(before, wanted, found) < 2e-6
        for key in ("loss", "grad_norm", "num_tokens"):
            assert logged(log, key) == pytest.approx(
                logged(plain.state.log_history, key), rel=1e-5
            ), key
        assert logged(log, "flexseq/micro_batches")


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("cls", [SFTTrainer, FlexSeqSFTTrainer])
def test_evaluating_masks_without_labels_is_refused_as_by_the_plain_sft_trainer(
    tmp_path, cls, named, mask
):
    flexseq = {"flexseq_args": FlexSeqArguments(**OPTIONS)} if cls is FlexSeqSFTTrainer else {}
    trainer = sft_trainer(cls, tmp_path, 2, **flexseq)
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4], mask: [0, 0, 1, 1]}])
    with pytest.raises(ValueError, match="dataset has mask columns but no 'labels'"):
        trainer.evaluate({"held out": data} if named else data)


def test_masks_without_labels_are_refused_when_the_collator_was_wrapped_by_the_user(tmp_path):
    collator = DataCollatorForFlexSeq(DataCollatorForLanguageModeling(pad_token_id=0))
    data = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 1, 1]}])
    with pytest.raises(ValueError, match="train dataset has mask columns but no 'labels'"):
        sft_trainer(
            FlexSeqSFTTrainer,
            tmp_path,
            2,
            train_dataset=data,
            data_collator=collator,
            flexseq_args=FlexSeqArguments(**OPTIONS),
        )


def test_evaluating_masks_that_preparation_reads_gives_the_plain_loss(tmp_path):
    data = Dataset.from_list(
        [{"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 0, 1, 1, 1]}] * 2
    )
    settings = {"dataset_kwargs": None, "completion_only_loss": True}
    plain = sft_trainer(SFTTrainer, tmp_path, 2, settings=settings)
    wanted = plain.evaluate(data)["eval_loss"]
    trainer = sft_trainer(
        FlexSeqSFTTrainer, tmp_path, 2, settings=settings, flexseq_args=FlexSeqArguments(**OPTIONS)
    )
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    whole = trainer.evaluate(data.remove_columns("completion_mask"))["eval_loss"]
    assert whole != pytest.approx(wanted, rel=1e-3)


def bf16_sft_trainer(folder, evaluates_first):
    trainer = sft_trainer(
        FlexSeqSFTTrainer,
        folder,
        2,
        model=tiny_llama(torch.float32),
        settings={"bf16": True, "max_steps": 3},
        flexseq_args=FlexSeqArguments(**OPTIONS),
    )
    if evaluates_first:
        before = dict(vars(trainer.model))
        trainer.evaluate(Dataset.from_list(dataset(8)))
        assert vars(trainer.model).keys() == before.keys()
        assert trainer.model.forward == before["forward"]  # TRL's, with its own head
    return trainer


def bf16_sft_run(rank, world_size, folder, evaluates_first):
    torch.set_default_dtype(torch.float32)
    trainer = bf16_sft_trainer(folder, evaluates_first)
    trainer.train()
    return {n: p.detach().numpy() for n, p in trainer.model.named_parameters()}


@pytest.mark.processes
def test_evaluating_first_in_bf16_keeps_the_head_of_the_sft_trainer(tmp_path):
    cases = [(tmp_path, True), (tmp_path, False)]
    with_evaluation, without = run_cases(bf16_sft_run, 2, cases, seconds=120)
    for name, wanted in without[0].items():
        for found in (*with_evaluation, without[1]):
            assert (found[name] == wanted).all(), name


# ---- what a collator has


class CollatorWithTokenizer:
    def __init__(self):
        self.tokenizer = tokenizer()

    def __call__(self, examples):
        return padded(examples)


@pytest.mark.parametrize(
    "collator", [CollatorWithTokenizer, lambda: DataCollatorWithPadding(tokenizer())]
)
def test_the_tokenizer_of_a_collator_is_saved_with_the_model(tmp_path, collator):
    for cls, config in ((Trainer, TrainingArguments), (FlexSeqTrainer, FlexSeqConfig)):
        folder = tmp_path / cls.__name__
        args = training_arguments(config, folder, batch=1, accumulation=1)
        model = tiny_llama(torch.float32)
        cls(model=model, args=args, train_dataset=dataset(), data_collator=collator()).save_model()
    saved, wanted = (
        {path.name for path in (tmp_path / name).iterdir()}
        for name in ("FlexSeqTrainer", "Trainer")
    )
    assert "tokenizer.json" in wanted
    assert saved == wanted


# ---- arguments


class ArgsThird(Trainer):
    """The parameters of TRL's trainers that compare two models."""

    def __init__(self, model, ref_model=None, args=None, train_dataset=None, *, beta=0.1):
        super().__init__(model=model, args=args, train_dataset=train_dataset)
        self.ref_model, self.beta = ref_model, beta


class HandsOn(ArgsThird):
    def __init__(self, model, *args, gamma=1, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.gamma = gamma


class FlexSeqArgsThird(FlexSeqMixin, ArgsThird):
    pass


class FlexSeqHandsOn(FlexSeqMixin, HandsOn):
    pass


def config_of(folder, **options):
    return training_arguments(FlexSeqConfig, folder, batch=2, accumulation=1, **OPTIONS, **options)


@pytest.mark.parametrize("cls", [FlexSeqArgsThird, FlexSeqHandsOn])
@pytest.mark.parametrize("positional", [0, 1, 2, 3, 4])
def test_arguments_reach_the_next_class_as_they_were_given(tmp_path, cls, positional):
    arguments = {
        "model": tiny_llama(),
        "ref_model": tiny_llama(seed=1),
        "args": config_of(tmp_path),
        "train_dataset": dataset(8),
    }
    names = list(arguments)
    given = [arguments[name] for name in names[:positional]]
    named = {name: arguments[name] for name in names[positional:]}
    trainer = cls(*given, **named, beta=0.5)
    for name, wanted in arguments.items():
        assert getattr(trainer, name) is wanted, name
    assert trainer.beta == 0.5
    assert trainer.flexseq.args.max_tokens_per_rank == OPTIONS["max_tokens_per_rank"]


def test_left_out_arguments_keep_the_defaults_of_the_next_class(tmp_path):
    trainer = FlexSeqArgsThird(tiny_llama(), args=config_of(tmp_path), train_dataset=dataset(8))
    assert trainer.ref_model is None
    assert trainer.beta == 0.1


def test_a_wrong_argument_is_refused_by_the_next_class(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_argument'"):
        FlexSeqArgsThird(tiny_llama(), None, config_of(tmp_path), no_such_argument=1)


@pytest.mark.parametrize("cls", [FlexSeqTrainer, FlexSeqArgsThird, FlexSeqHandsOn])
@pytest.mark.parametrize("positional", [0, 1, 3])
def test_a_named_model_of_a_pipeline_is_loaded_by_the_options_wherever_they_stand(
    tmp_path, monkeypatch, cls, positional
):
    stage, args = tiny_llama(), config_of(tmp_path, pipeline_parallel_size=2)
    loaded = []

    def load(name, training, options):
        loaded.append((name, training, options.pipeline_parallel_size))
        return stage

    monkeypatch.setattr("hf_flexseq.hf.pipeline.constructor.load_own_stage", load)
    monkeypatch.setattr(cls, "_setup_flexseq", lambda self, flexseq_args: None)
    second = {} if cls is FlexSeqTrainer else {"ref_model": None}
    arguments = {"model": "a/name", **second, "args": args}
    names = list(arguments)
    given = [arguments[name] for name in names[:positional]]
    named = {name: arguments[name] for name in names[positional:]}
    trainer = cls(*given, **named)
    assert loaded == [("a/name", args, 2)]
    assert trainer.model is stage
    assert trainer.args is args


# ---- TRL's trainers whose loss is no sum over tokens


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    pass


class FlexSeqGRPOTrainer(FlexSeqMixin, GRPOTrainer):
    pass


def trl_arguments(cls, folder, **options):
    return training_arguments(
        cls, folder, batch=2, accumulation=1, gradient_checkpointing=False, bf16=False, **options
    )


@pytest.mark.parametrize("positional", [False, True])
def test_a_dpo_trainer_takes_its_arguments_by_position_too(tmp_path, positional):
    names = ("model", "ref_model", "args")
    values = (
        tiny_llama(torch.float32),
        tiny_llama(torch.float32),
        trl_arguments(DPOConfig, tmp_path),
    )
    given = values if positional else ()
    named = {} if positional else dict(zip(names, values, strict=True))
    trainer = FlexSeqDPOTrainer(
        *given,
        **named,
        train_dataset=Dataset.from_list([{"prompt": "t1", "chosen": "t2", "rejected": "t3"}] * 4),
        processing_class=tokenizer(),
        flexseq_args=FlexSeqArguments(**OPTIONS),
    )
    assert trainer.model is values[0]
    assert trainer.ref_model is values[1]


class MeansTrainer(FlexSeqTrainer):
    """A loss that is a mean over each batch."""

    loss_is_scaled_for_ga = False


class SamplesTrainer(FlexSeqTrainer):
    """Samples that are made of prompts."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["prompt"]


@pytest.mark.parametrize(
    "cls, message",
    [
        (MeansTrainer, "support the loss of MeansTrainer: it is not divided by the tokens"),
        (SamplesTrainer, "support samples made in SamplesTrainer: it makes samples"),
    ],
)
def test_losses_of_unknown_trainers_are_refused_when_they_are_made(tmp_path, cls, message):
    args = training_arguments(FlexSeqConfig, tmp_path, batch=2, accumulation=1, **OPTIONS)
    with pytest.raises(NotImplementedError, match=message) as raised:
        cls(model=tiny_llama(torch.float32), args=args, train_dataset=dataset())
    assert "\n" not in str(raised.value)


def lora_llama():
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return get_peft_model(tiny_llama(), config)


def lora_run(rank, world_size, folder):
    model = lora_llama()
    args = training_arguments(
        FlexSeqConfig, folder, batch=2, accumulation=1, optim="sgd", **OPTIONS
    )
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
    trainer.train()
    return {n: p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.processes
def test_lora(tmp_path):
    model = lora_llama()
    model.get_base_model().loss_function = float64_loss
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    args = training_arguments(TrainingArguments, tmp_path, batch=4, accumulation=1, optim="sgd")
    Trainer(model=model, args=args, train_dataset=dataset(), data_collator=padded).train()
    wanted = {n: p.detach() for n, p in trained.items()}
    for found in run_ranks(lora_run, 2, tmp_path, seconds=120):
        assert update_error(before, wanted, found) < 1e-8
