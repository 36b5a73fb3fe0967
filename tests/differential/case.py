"""A training that is compared: one description, of which the stock trainer and ours are made."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from tests import budget
from tests.hf.plain import dataset
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import trainer_of, word_tokenizer, zero


def _nothing(_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A trainer, its model and its options."""

    base: Any = Trainer
    """The class of the trainer, without hf_flexseq."""
    model: Callable[[], Any] = tiny_llama
    """Makes the model."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the trainer and of its configuration, by their names."""
    of_model: Callable[[Any], Mapping[str, Any]] = _nothing
    """Makes further arguments from the model, such as parameter groups."""
    batch: int = 4
    """Examples of a step. The stock trainer has them as one batch; our ranks share them."""

    # ---- of the stock trainer alone

    stock_loss: Callable[..., Any] | None = None
    """Loss function of the model, where the model's own one casts to float32."""
    stock_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that take the place of others."""

    # ---- of ours alone

    flexseq: Mapping[str, Any] = field(default_factory=dict)
    """Options of hf_flexseq."""
    accumulation: int = 1
    """Batches of a rank in a step."""
    stage: int | None = None
    """Of DeepSpeed's ZeRO."""
    prepare: Callable[[Any], object] = _nothing
    """Is called with the trainer before it trains."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes a context for the whole run."""
    evaluates: bool = False
    """Whether an evaluation follows the training of both."""


def make_trainer(case: Case, folder: Path, *, is_ours: bool, ranks: int = 1) -> Any:
    """Return the trainer of a case, stock or ours, on one of so many ranks."""
    model = case.model()
    settings = {**case.settings, **case.of_model(model), "model": model}
    if is_ours:
        settings |= {"flexseq": case.flexseq, "accumulation": case.accumulation}
        settings["batch"] = case.batch // (ranks * case.accumulation)
        if case.stage is not None:
            settings["deepspeed"] = zero(case.stage)
    else:
        settings |= {"batch": case.batch // ranks, **case.stock_settings}
        if case.stock_loss is not None:
            base_of(model).loss_function = case.stock_loss
    if issubclass(case.base, SFTTrainer):
        return sft_trainer(case.base, folder, **settings)
    return trainer_of(case.base, folder, **settings)


def base_of(model: Any) -> Any:
    """Return the model without its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def sft_trainer(
    cls: Any, folder: Path, batch: int, *, settings: Mapping[str, Any] | None = None, **given: Any
) -> Any:
    """Return an SFTTrainer on documents as they are. settings: of its SFTConfig."""
    defaults = {
        "max_length": None,
        "max_steps": budget.trainer_steps,
        "gradient_checkpointing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "bf16": False,
        "train_dataset": Dataset.from_list(dataset()),
        "data_collator": None,
        "processing_class": word_tokenizer(),
    }
    settings = {**defaults, **(settings or {}), **given}
    return trainer_of(cls, folder, config=SFTConfig, batch=batch, **settings)
