"""TRL's trainers on images, with a processor: the plain trainer's weights and figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from tests.budget import others_nightly
from tests.hf.trainers import Run, difference, trained, trainer_of
from tests.hf.vision import tiny_vision_model
from tests.hf.vision_processor import completions, talks, texts, vision_processor
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

# of text and of the tower
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)


def assert_as_stock(stock: Run, ours: Run) -> None:
    apart = difference(stock, ours)
    assert apart.weights < 2e-6
    assert apart.metrics < 1e-6, apart.metric
    assert not apart.missing
    assert apart.figures > 15


# ---- SFT


@dataclass(frozen=True, kw_only=True)
class Sft:
    """What SFTTrainer trains on, and its settings besides those of all cases."""

    data: Callable[[int], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)


SFT = {
    "completions": Sft(data=completions),
    "talks": Sft(data=talks),
    # TRL takes the column of texts for one that it does not read
    "texts": Sft(data=texts, settings={"remove_unused_columns": False}),
    "lora": Sft(
        data=completions, settings={"peft_config": LORA, "activation_checkpointing": True}
    ),
}


def sft_run(rank: int, world_size: int, name: str, folder: Path) -> Run:
    """A run of ours on two ranks, of stock on one."""
    case, ours = SFT[name], world_size > 1
    torch.manual_seed(5)
    defaults = {"activation_checkpointing": False}
    trainer = trainer_of(
        SFTTrainer,
        folder,
        config=SFTConfig,
        flexseq={"max_tokens_per_rank": 30} if ours else None,
        batch=4 // world_size,
        model=tiny_vision_model("qwen3_vl"),
        train_dataset=case.data(20),
        eval_dataset=case.data(7),
        per_device_eval_batch_size=2 if ours else 7,
        data_collator=None,
        processing_class=vision_processor(),
        max_length=None,
        max_steps=5,
        bf16=False,
        train_sampling_strategy="sequential",
        **(defaults | case.settings),
    )
    return trained(trainer, evaluates=True)


@pytest.mark.parametrize("name", others_nightly(SFT, tried=["completions"]))
def test_sft_on_two_ranks_trains_as_on_one(tmp_path, name):
    by_rank = run_ranks(sft_run, 2, name, tmp_path, seconds=120)
    stock = sft_run(0, 1, name, tmp_path)
    for ours in by_rank:
        assert_as_stock(stock, ours)
