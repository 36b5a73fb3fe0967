"""Trainers whose loss is computed on whole samples, in pairs: as they come, and with
FlexSeqMixin in front.

Both train in one process, one after the other, on the same data with the same random numbers, so
that their weights and logs can be compared.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from tests.differential.runs import begin_anew
from tests.hf.plain import dataset, padded, training_arguments
from tests.hf.tiny import VOCAB, loadable, tiny_llama
from tests.hf.trainers import (
    Difference,
    Run,
    difference,
    flexseq_class,
    loss_of_squares,
    trained,
    word_tokenizer,
    zero,
)

OPTIONS = {"max_tokens_per_rank": 60, "cost_model": "estimate"}
ROWS, EVALUATED = 64, 6  # examples to train on, and to evaluate

# Bounds of weights over the update: trainers of TRL that read log-probabilities compute those in
# float32, the others stay in the model's float64.
FLOAT32_BOUND = 2e-6
FLOAT64_BOUND = 1e-7
METRICS_BOUND = 1e-6
BOUNDS = {
    "dpo": FLOAT32_BOUND,
    "kto": FLOAT32_BOUND,
    "reward": FLOAT64_BOUND,
    "grpo": FLOAT32_BOUND,
    "rloo": FLOAT32_BOUND,
    "distillation": FLOAT32_BOUND,
    "sequences": FLOAT64_BOUND,
    "tokens": FLOAT64_BOUND,
    "own": FLOAT64_BOUND,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer, and how it is set."""

    kind: str
    """A key of BOUNDS."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the trainer's configuration, besides those that all cases have."""
    steps: int = 3
    accumulation: int = 1
    batch: int = 2
    """Examples of a rank's batch; GRPO and RLOO have twice as many."""
    rows: int = ROWS
    """Examples to train on."""
    adapter: str | None = None
    """"new" or "retrained": the trained model has LoRA; then the reference is that model with its
    adapter off, or with the copy named `ref` of what the adapter was."""
    reference: bool = True
    """Whether a trainer that takes a reference model is given one."""
    evaluates: bool = False
    """Whether an evaluation follows."""
    multiple: int | None = None
    """What rows are padded to multiples of, if they are."""
    lookahead: int = 0
    """Steps that ours plans ahead, in a process of its own, which takes a while to start."""
    flexseq: Mapping[str, Any] = field(default_factory=dict)
    """Options of ours, besides OPTIONS."""
    sharding: str = "ddp"
    """"fsdp2", sharded at load, or a stage of ZeRO: "zero1", "zero2", "zero3". These are in
    float32."""
    dtype: torch.dtype = torch.float64

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration of the reference model of DPO and KTO."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Further columns of the data, whose values are repeated."""


# ---- data


def words_of(rng: random.Random, count: int) -> str:
    """So many random words of `word_tokenizer`."""
    return " ".join(f"w{rng.randrange(2, VOCAB)}" for _ in range(count))


def _rows(count: int, row: Callable[[random.Random], dict[str, Any]]) -> Dataset:
    rng = random.Random(0)
    return Dataset.from_list([row(rng) for _ in range(count)])


def pairs(count: int) -> Dataset:
    """Prompts with a chosen and a rejected completion."""

    def row(rng: random.Random) -> dict[str, Any]:
        return {
            "prompt": words_of(rng, rng.randrange(3, 9)),
            "chosen": " " + words_of(rng, rng.randrange(2, 30)),
            "rejected": " " + words_of(rng, rng.randrange(2, 12)),
        }

    return _rows(count, row)


def labelled(count: int) -> Dataset:
    """Prompts with a completion that is good or bad."""

    def row(rng: random.Random) -> dict[str, Any]:
        return {
            "prompt": words_of(rng, rng.randrange(3, 9)),
            "completion": " " + words_of(rng, rng.randrange(2, 30)),
            "label": rng.random() < 0.5,
        }

    return _rows(count, row)


def prompts(count: int) -> Dataset:
    """Prompts alone."""
    return _rows(count, lambda rng: {"prompt": words_of(rng, rng.randrange(3, 9))})


def classified(count: int, *, tokens: bool) -> Dataset:
    """Sequences of one class, or of one for each token, some of them without."""

    def row(rng: random.Random) -> dict[str, Any]:
        ids = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 40))]
        if tokens:
            return {"input_ids": ids, "labels": [rng.choice([-100, 0, 1, 2]) for _ in ids]}
        return {"input_ids": ids, "labels": rng.randrange(3)}

    return _rows(count, row)


DATA = {"pairs": pairs, "labelled": labelled}


def reward(completions: Sequence[str], **given: Any) -> list[float]:
    """The share of an eighth of different words in each completion."""
    return [len(set(completion.split())) / 8 for completion in completions]


def classes_metrics(prediction: Any) -> dict[str, float]:
    """Accuracy, and the sum of all logits' sizes."""
    labels, logits = prediction.label_ids, prediction.predictions
    keep = labels != -100
    is_right = (logits.argmax(-1) == labels)[keep]
    return {"accuracy": float(is_right.mean()), "sizes": float(np.abs(logits[keep]).sum())}


# ---- models


HEADS = {  # of classification: the class, and its labels
    "reward": (LlamaForSequenceClassification, 1),
    "sequences": (LlamaForSequenceClassification, 3),
    "tokens": (LlamaForTokenClassification, 3),
}


def classifier(cls: Any, labels: int, dtype: torch.dtype = torch.float64) -> Any:
    """A model of the size of `tiny_llama` with a classification head."""
    return tiny_llama(dtype, cls=cls, num_labels=labels, pad_token_id=0, classifier_dropout=0.0)


def save_inputs(folder: Path) -> None:
    """Save models under a folder, `tiny_llama` for trainers that load their reference by its name,
    too; and data, for those that precompute what a reference gives on it."""
    tiny_llama().save_pretrained(folder / "model")
    for name, (cls, labels) in HEADS.items():
        classifier(cls, labels).save_pretrained(folder / name)
    for name, make in DATA.items():
        for rows in (ROWS, EVALUATED):
            make(rows).save_to_disk(folder / f"{name}-{rows}")


def data_of(name: str, case: Case, path: Path, rows: int) -> Dataset:
    """One of DATA; from its folder where ranks have to find what one of them has precomputed."""
    if case.settings.get("precompute_ref_log_probs"):
        return load_from_disk(path.parent / f"{name}-{rows}")
    return DATA[name](rows)


def sharded(cls: Any, path: Path, dtype: torch.dtype) -> Any:
    """A saved model, sharded by FSDP2 at load."""
    shards = DistributedConfig(fsdp_size=torch.distributed.get_world_size())
    return loadable(cls).from_pretrained(path, dtype=dtype, distributed_config=shards)


def classifying_model(case: Case, path: Path) -> Any:
    """The trained model of a case with a classification head. path: of the saved model."""
    cls, labels = HEADS[case.kind]
    if case.sharding == "fsdp2":
        return sharded(cls, path.parent / case.kind, case.dtype)
    return classifier(cls, labels, case.dtype)


def causal_model(case: Case, path: Path) -> Any:
    """The trained model of a case. path: of the saved model."""
    if case.sharding == "fsdp2":
        return sharded(LlamaForCausalLM, path, case.dtype)
    if case.kind in ("grpo", "rloo"):
        model: Any = loadable(LlamaForCausalLM).from_pretrained(path, dtype=case.dtype)
    else:
        model = tiny_llama(case.dtype)
    if case.adapter != "retrained":
        return model

    torch.manual_seed(3)
    model = get_peft_model(model, lora_config())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # begins with zeros: an adapter that has been trained does not
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(case.dtype)


def lora_config() -> LoraConfig:
    """Adapters of attention."""
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])


# ---- trainers


def make_trainer(
    case: Case, is_ours: bool | type, folder: Path, *, model: Any = None, **given: Any
) -> Any:
    """The trainer of a case, stock or ours.

    is_ours: or a class to take. folder: where `save_inputs` has saved. model: instead of
    the case's own. given: further arguments of the trainer.
    """
    config, cls, arguments = ARGUMENTS[case.kind](case, folder / "model", model)
    batch = case.batch * (2 if case.kind in ("grpo", "rloo") else 1)
    settings = {
        "optim": "sgd",
        "bf16": False,
        "learning_rate": 0.5,
        "max_steps": case.steps,
        "gradient_checkpointing": False,
        **case.settings,
    }
    if case.multiple is not None and config.func is not TrainingArguments:
        settings["pad_to_multiple_of"] = case.multiple
    if case.sharding.startswith("zero"):
        settings["deepspeed"] = zero(int(case.sharding[-1]))
    args = training_arguments(
        config, folder / "out", batch=batch, accumulation=case.accumulation, **settings
    )
    if case.adapter == "new":
        given["peft_config"] = lora_config()
    if isinstance(is_ours, type):
        cls = is_ours
    elif is_ours:
        cls = flexseq_class(cls)
    if issubclass(cls, FlexSeqMixin):
        options = {**OPTIONS, "lookahead": case.lookahead, **case.flexseq}
        given.setdefault("flexseq_args", FlexSeqArguments(**options))
    for name, values in case.columns.items():
        rows = arguments["train_dataset"]
        filled = [values[index % len(values)] for index in range(len(rows))]
        arguments["train_dataset"] = rows.add_column(name, filled)
    return cls(args=args, **(arguments | given))


def _preferences(config: Any, cls: Any, data: str, **defaults: Any) -> Any:
    def of_case(case: Case, path: Path, model: Any) -> Any:
        arguments = {
            "train_dataset": data_of(data, case, path, case.rows),
            "eval_dataset": data_of(data, case, path, EVALUATED),
            "processing_class": word_tokenizer(),
        }
        if cls is RewardTrainer:
            model = model or classifying_model(case, path)
        elif case.reference and case.adapter is None:
            arguments["ref_model"] = tiny_llama(case.dtype, seed=1, **case.changes)
        arguments["model"] = model or causal_model(case, path)
        return partial(config, max_length=None, **defaults), cls, arguments

    return of_case


def _rolling_out(config: Any, cls: Any) -> Any:
    def of_case(case: Case, path: Path, model: Any) -> Any:
        arguments = {
            "model": model or causal_model(case, path),
            "reward_funcs": reward,
            "train_dataset": prompts(case.rows),
            "eval_dataset": prompts(4),
            "processing_class": word_tokenizer(),
        }
        defaults = {"num_generations": 4, "max_completion_length": 12, "beta": 0.1}
        return partial(config, **defaults), cls, arguments

    return of_case


def _classes(collator: Any, *, tokens: bool) -> Any:
    def of_case(case: Case, path: Path, model: Any) -> Any:
        arguments = {
            "model": model or classifying_model(case, path),
            "train_dataset": classified(case.rows, tokens=tokens),
            "eval_dataset": classified(7, tokens=tokens),
            "data_collator": collator(word_tokenizer(), pad_to_multiple_of=case.multiple),
            "compute_metrics": classes_metrics,
        }
        return partial(TrainingArguments, per_device_eval_batch_size=2), Trainer, arguments

    return of_case


def _own_loss(case: Case, path: Path, model: Any) -> Any:
    arguments = {
        "model": model or causal_model(case, path),
        "train_dataset": dataset(case.rows),
        "eval_dataset": dataset(EVALUATED),
        "data_collator": partial(padded, multiple=case.multiple or 1),
        "compute_loss_func": loss_of_squares,
    }
    return partial(TrainingArguments, prediction_loss_only=True), Trainer, arguments


def _distillation(case: Case, path: Path, model: Any) -> Any:
    from trl import DistillationConfig, DistillationTrainer  # TRL 1.16 and later

    arguments = {
        "model": model or causal_model(case, path),
        "teacher_model": tiny_llama(case.dtype, seed=1),
        "train_dataset": prompts(case.rows),
        "eval_dataset": prompts(4),
        "processing_class": word_tokenizer(),
    }
    defaults = {"max_completion_length": 12, "beta": 0.5}
    return partial(DistillationConfig, **defaults), DistillationTrainer, arguments


ARGUMENTS = {
    "dpo": _preferences(DPOConfig, DPOTrainer, "pairs", beta=0.5),
    "kto": _preferences(KTOConfig, KTOTrainer, "labelled", beta=0.5),
    "reward": _preferences(RewardConfig, RewardTrainer, "pairs"),
    "grpo": _rolling_out(GRPOConfig, GRPOTrainer),
    "rloo": _rolling_out(RLOOConfig, RLOOTrainer),
    "distillation": _distillation,
    "sequences": _classes(DataCollatorWithPadding, tokens=False),
    "tokens": _classes(DataCollatorForTokenClassification, tokens=True),
    "own": _own_loss,
}


# ---- both of a pair


def run_case(case: Case, is_ours: bool, folder: Path, **given: Any) -> Run:
    """Make a case's trainer, and train it as `trained` does. Collective over the world.

    given: further arguments of the trainer.
    """
    begin_anew(5)
    return trained(make_trainer(case, is_ours, folder, **given), evaluates=case.evaluates)


def compare(rank: int, world_size: int, folder: Path, case: Case) -> Difference:
    """Train stock and ours on this rank, and compare them. Collective over the world."""
    datasets.disable_progress_bars()
    return difference(run_case(case, False, folder), run_case(case, True, folder))


def assert_alike(apart: Difference, *, weights: float) -> None:
    """weights: bound of their difference."""
    assert apart.weights < weights
    assert apart.metrics < METRICS_BOUND, apart.metric
    assert not apart.missing
