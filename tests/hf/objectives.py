"""Trainers whose loss is computed on whole samples, in pairs: as they come, and with
FlexSeqMixin in front.

Both train in one process, one after the other, on the same data with the same random numbers, so
that their weights and logs can be compared. `scripts/benchmarks/objectives.py` uses this, too.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
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
from tests.hf.test_exactness import whole
from tests.hf.test_sharding import ZERO
from tests.hf.test_trainer import training_arguments
from tests.hf.tiny import VOCAB, tiny_llama, torch_norm

Array = np.ndarray[Any, np.dtype[np.float64]]
OPTIONS = {"max_tokens_per_rank": 60, "cost_model": "estimate"}
ROWS, EVALUATED = 64, 6  # examples to train on, and to evaluate
CLOCKS = ("runtime", "per_second", "time", "total_flos", "flexseq/")  # parts of names of figures

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
    "sequences": FLOAT64_BOUND,
    "tokens": FLOAT64_BOUND,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer, and how it is set."""

    kind: str
    """A key of BOUNDS."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the trainer's configuration, beside the ones that all cases have."""

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

    sharding: str = "ddp"
    """"fsdp2", sharded at load, or a stage of ZeRO: "zero1", "zero2", "zero3". These are in
    float32."""

    dtype: torch.dtype = torch.float64

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration of the reference model of DPO and KTO."""

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Further columns of the data, whose values are repeated."""


# ---- data


def word_tokenizer(vocabulary: int = VOCAB) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words, such as w17 for the number 17; 0 pads and 1 ends."""
    words = {f"w{number}": number for number in range(2, vocabulary)}
    model = models.WordLevel({"<pad>": 0, "<end>": 1, **words}, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )


def words_of(rng: random.Random, count: int, vocabulary: int = VOCAB) -> str:
    """So many random words of `word_tokenizer`."""
    return " ".join(f"w{rng.randrange(2, vocabulary)}" for _ in range(count))


def pairs(count: int) -> Dataset:
    """Prompts with a chosen and a rejected completion."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        prompt = words_of(rng, rng.randrange(3, 9))
        chosen = " " + words_of(rng, rng.randrange(2, 30))
        rejected = " " + words_of(rng, rng.randrange(2, 12))
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def labelled(count: int) -> Dataset:
    """Prompts with a completion that is good or bad."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        prompt = words_of(rng, rng.randrange(3, 9))
        completion = " " + words_of(rng, rng.randrange(2, 30))
        rows.append({"prompt": prompt, "completion": completion, "label": rng.random() < 0.5})
    return Dataset.from_list(rows)


def prompts(count: int) -> Dataset:
    """Prompts alone."""
    rng = random.Random(0)
    return Dataset.from_list(
        [{"prompt": words_of(rng, rng.randrange(3, 9))} for _ in range(count)]
    )


def classified(count: int, *, tokens: bool) -> Dataset:
    """Sequences of one class, or of one for each token, some of them without."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        ids = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(3, 40))]
        labels: Any = rng.randrange(3)
        if tokens:
            labels = [rng.choice([-100, 0, 1, 2]) for _ in ids]
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


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


class TorchNormLlama(LlamaForCausalLM):
    """The model of `tiny_llama`, which transformers can load."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = torch_norm(layer.input_layernorm)
            layer.post_attention_layernorm = torch_norm(layer.post_attention_layernorm)
        self.model.norm = torch_norm(self.model.norm)


def classifier(cls: Any, labels: int, dtype: torch.dtype) -> Any:
    """A model of the size of `tiny_llama` with a classification head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    model = cls(
        LlamaConfig(**sizes, **heads, num_labels=labels, pad_token_id=0, classifier_dropout=0.0)
    )
    for layer in model.model.layers:
        layer.input_layernorm = torch_norm(layer.input_layernorm)
        layer.post_attention_layernorm = torch_norm(layer.post_attention_layernorm)
    model.model.norm = torch_norm(model.model.norm)
    return model.to(dtype)


def save_inputs(folder: Path) -> None:
    """Save `tiny_llama` under a folder, for trainers that load their reference by its name, and
    data, for those that precompute what a reference gives on it."""
    tiny_llama().save_pretrained(folder / "model")
    for name, make in DATA.items():
        for rows in (ROWS, EVALUATED):
            make(rows).save_to_disk(folder / f"{name}-{rows}")


def data_of(name: str, case: Case, path: Path, rows: int) -> Dataset:
    """One of DATA; from its folder where ranks have to find what one of them has precomputed."""
    if case.settings.get("precompute_ref_log_probs"):
        return load_from_disk(path.parent / f"{name}-{rows}")
    return DATA[name](rows)


def causal_model(case: Case, path: Path) -> Any:
    """The trained model of a case. path: of `save_inputs`."""
    if case.sharding == "fsdp2":
        return sharded_at_load(case, path)
    if case.kind in ("grpo", "rloo"):
        model: Any = TorchNormLlama.from_pretrained(path, dtype=case.dtype)
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


def sharded_at_load(case: Case, path: Path) -> Any:
    """The model that was saved, sharded over all ranks by transformers."""
    config = DistributedConfig(fsdp_size=torch.distributed.get_world_size())
    return TorchNormLlama.from_pretrained(path, dtype=case.dtype, distributed_config=config)


def lora_config() -> LoraConfig:
    """Adapters of attention."""
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])


# ---- trainers


def trainer_class(cls: Any, is_ours: bool) -> Any:
    """`cls` itself, or with FlexSeqMixin in front."""
    return type(f"FlexSeq{cls.__name__}", (FlexSeqMixin, cls), {}) if is_ours else cls


def make_trainer(
    case: Case, is_ours: bool | type, folder: Path, *, model: Any = None, **given: Any
) -> Any:
    """The trainer of a case, stock or ours.

    is_ours: or a class of ours to take. folder: where `save_inputs` has saved. model: in place of
    the case's own. given: further arguments of the trainer.
    """
    config, cls, arguments = _ARGUMENTS[case.kind](case, folder / "model", model)
    batch = case.batch * (2 if case.kind in ("grpo", "rloo") else 1)
    settings = {
        "optim": "sgd",
        "bf16": False,
        "learning_rate": 0.5,
        "max_steps": case.steps,
        "gradient_checkpointing": False,
        **case.settings,
    }
    if case.sharding.startswith("zero"):
        deepspeed.init_distributed("gloo")
        stage = {"stage": int(case.sharding[-1]), "stage3_param_persistence_threshold": 0}
        settings["deepspeed"] = copy.deepcopy(ZERO) | {"zero_optimization": stage}
    args = training_arguments(
        config, folder / "out", batch=batch, accumulation=case.accumulation, **settings
    )
    if case.adapter == "new":
        given["peft_config"] = lora_config()
    if is_ours:
        given.setdefault("flexseq_args", FlexSeqArguments(**OPTIONS))
    cls = is_ours if isinstance(is_ours, type) else trainer_class(cls, is_ours)
    for name, values in case.columns.items():
        rows = arguments["train_dataset"]
        filled = [values[index % len(values)] for index in range(len(rows))]
        arguments["train_dataset"] = rows.add_column(name, filled)
    return cls(args=args, **(arguments | given))


def _dpo(case: Case, path: Path, model: Any) -> Any:
    arguments = {
        "model": model or causal_model(case, path),
        "train_dataset": data_of("pairs", case, path, case.rows),
        "eval_dataset": data_of("pairs", case, path, EVALUATED),
        "processing_class": word_tokenizer(),
    }
    if case.reference and case.adapter is None:
        arguments["ref_model"] = tiny_llama(case.dtype, seed=1, **case.changes)
    return _max_length_none(DPOConfig, beta=0.5), DPOTrainer, arguments


def _kto(case: Case, path: Path, model: Any) -> Any:
    _, _, arguments = _dpo(case, path, model)
    arguments |= {
        "train_dataset": data_of("labelled", case, path, case.rows),
        "eval_dataset": data_of("labelled", case, path, EVALUATED),
    }
    return _max_length_none(KTOConfig, beta=0.5), KTOTrainer, arguments


def _reward(case: Case, path: Path, model: Any) -> Any:
    arguments = {
        "model": model or classifier(LlamaForSequenceClassification, 1, case.dtype),
        "train_dataset": data_of("pairs", case, path, case.rows),
        "eval_dataset": data_of("pairs", case, path, EVALUATED),
        "processing_class": word_tokenizer(),
    }
    return _max_length_none(RewardConfig), RewardTrainer, arguments


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
        return _with(config, defaults), cls, arguments

    return of_case


def _classes(head: Any, collator: Any, *, tokens: bool) -> Any:
    def of_case(case: Case, path: Path, model: Any) -> Any:
        arguments = {
            "model": model or classifier(head, 3, case.dtype),
            "train_dataset": classified(case.rows, tokens=tokens),
            "eval_dataset": classified(7, tokens=tokens),
            "data_collator": collator(word_tokenizer()),
            "compute_metrics": classes_metrics,
        }
        return _with(TrainingArguments, {"per_device_eval_batch_size": 2}), Trainer, arguments

    return of_case


def _with(config: Any, defaults: Mapping[str, Any]) -> Any:
    return lambda **options: config(**{**defaults, **options})


def _max_length_none(config: Any, **defaults: Any) -> Any:
    return _with(config, {"max_length": None, **defaults})


_ARGUMENTS = {
    "dpo": _dpo,
    "kto": _kto,
    "reward": _reward,
    "grpo": _rolling_out(GRPOConfig, GRPOTrainer),
    "rloo": _rolling_out(RLOOConfig, RLOOTrainer),
    "sequences": _classes(LlamaForSequenceClassification, DataCollatorWithPadding, tokens=False),
    "tokens": _classes(
        LlamaForTokenClassification, DataCollatorForTokenClassification, tokens=True
    ),
}


# ---- both of a pair


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trainer has made of its model."""

    start: dict[str, Array]
    weights: dict[str, Array]
    log: list[dict[str, float]]


def trained(trainer: Any, *, evaluates: bool = False) -> Run:
    """Train, and return the weights before and after, in float64, and all that was logged."""
    start = weights_of(trainer.model)
    trainer.train()
    if evaluates:  # not before: the plain Trainer would never wrap the model in DDP then
        trainer.evaluate()
    return Run(start=start, weights=weights_of(trainer.model), log=trainer.state.log_history)


def weights_of(model: Any) -> dict[str, Array]:
    """A copy of all weights, whole and in float64, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):  # nothing happens without ZeRO-3
            value = whole(parameter.detach())
            found[name] = value.double().numpy().copy()
    return found


def run_case(case: Case, is_ours: bool, folder: Path, **given: Any) -> Run:
    """Make a case's trainer, and train it as `trained` does. Collective over the world.

    given: further arguments of the trainer.
    """
    # another trainer may have run in this process
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(5)
    return trained(make_trainer(case, is_ours, folder, **given), evaluates=case.evaluates)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far ours is from stock."""

    weights: float
    """||ours - stock|| over ||stock - start||, all weights together."""

    metrics: float
    """The largest difference of a figure that was logged, over its size where that exceeds 1;
    see `size_of`."""

    metric: str
    """The name of that figure."""

    missing: tuple[str, ...]
    """Figures that stock logs and ours does not."""

    figures: int
    """So many were compared."""


def difference(stock: Run, ours: Run) -> Difference:
    """Compare weights and logs."""
    apart = _distance(stock.weights, ours.weights)
    update = _distance(stock.weights, stock.start)
    worst, missing, count = (0.0, ""), [], 0
    assert len(stock.log) == len(ours.log), "both log as often"
    for wanted, found in zip(stock.log, ours.log, strict=True):
        for name, value in wanted.items():
            if not isinstance(value, int | float) or any(clock in name for clock in CLOCKS):
                continue
            if name not in found:
                missing.append(name)
                continue
            count += 1
            if math.isnan(value) and math.isnan(found[name]):
                continue
            worst = max(worst, (abs(value - found[name]) / size_of(name, wanted), name))
    return Difference(
        weights=apart / update,
        metrics=worst[0],
        metric=worst[1],
        missing=tuple(missing),
        figures=count,
    )


def size_of(name: str, entry: Mapping[str, float]) -> float:
    """What the rounding of a figure in an entry of a log is measured by: its own size, at least 1.
    Rewards of DPO and KTO are differences of log-probabilities of whole sequences, and have their
    rounding."""
    names = [name]
    if name.removeprefix("eval_").startswith("rewards/"):
        names += [other for other in entry if "logps/" in other]
    return max(1.0, *(abs(entry[one]) for one in names))


def _distance(some: Mapping[str, Array], others: Mapping[str, Array]) -> float:
    """||some - others||, all weights together."""
    return math.hypot(*(float(np.linalg.norm(others[n] - own)) for n, own in some.items()))


def compare(case: Case, folder: Path) -> Difference:
    """Train stock and ours, and compare them. Collective over the world."""
    return difference(run_case(case, False, folder), run_case(case, True, folder))
