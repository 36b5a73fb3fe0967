"""TRL's trainers on images, with a processor: the plain trainer's weights and figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_flexseq.steps.features import StepImages
from tests.budget import others_nightly
from tests.hf.trainers import Difference, Run, difference, trained, trainer_of
from tests.hf.vision import tiny_vision_model
from tests.hf.vision_processor import (
    completions,
    labelled,
    pairs,
    prompts,
    talks,
    texts,
    vision_processor,
)
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes

# of text and of the tower
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
FEW, MANY = 40, 400  # tokens of a rank in a micro-batch: several of them, or one


def assert_alike(apart: Difference) -> None:
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
        max_steps=3,
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
        assert_alike(difference(stock, ours))


# ---- losses on whole samples


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A trainer whose loss is computed on the source ranks, and how it is set."""

    kind: str
    """A key of KINDS."""

    family: str = "qwen3_vl"
    """Of `tests/hf/vision_families.py`."""

    accumulation: int = 1
    cap: int = FEW
    settings: Mapping[str, Any] = field(default_factory=dict)


def reward(completions: Any, **given: Any) -> list[float]:
    """The share of an eighth of different words in each completion."""
    return [len(set(completion[0]["content"].split())) / 8 for completion in completions]


def loaded(folder: Path) -> Any:
    """The model of a saved folder, as trainers need it that load their reference themselves."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


_ROLLING_OUT = {
    "beta": 0.1,
    "num_generations": 4,
    "max_completion_length": 12,
    "reward_funcs": reward,
    "batch": 4,
    "per_device_eval_batch_size": 4,
}
# trainer, its configuration, its data, its settings
KINDS = {
    "dpo": (DPOTrainer, DPOConfig, pairs, {"beta": 0.5, "max_length": None}),
    "kto": (KTOTrainer, KTOConfig, labelled, {"beta": 0.5, "max_length": None}),
    "grpo": (GRPOTrainer, GRPOConfig, prompts, _ROLLING_OUT),
    "rloo": (RLOOTrainer, RLOOConfig, prompts, _ROLLING_OUT),
    "distillation": (
        DistillationTrainer,
        DistillationConfig,
        prompts,
        {"beta": 0.5, "max_completion_length": 12},
    ),
}
OF_OWN = "a reference or teacher of its own"
WHOLE = {
    "dpo": Whole(kind="dpo", settings={"ref_model": OF_OWN}),
    "dpo in one micro-batch": Whole(kind="dpo", cap=MANY, settings={"ref_model": OF_OWN}),
    "dpo, accumulated": Whole(
        kind="dpo",
        accumulation=2,
        settings={"ref_model": OF_OWN, "activation_checkpointing": True},
    ),
    "dpo, recurrent layers": Whole(
        kind="dpo", family="qwen3_5", cap=MANY, settings={"ref_model": OF_OWN}
    ),
    "dpo, adapters": Whole(kind="dpo", settings={"peft_config": LORA}),
    "kto": Whole(kind="kto", accumulation=2, settings={"ref_model": OF_OWN}),
    "grpo": Whole(kind="grpo"),
    "grpo, again": Whole(
        kind="grpo",
        accumulation=2,
        settings={"num_iterations": 2, "steps_per_generation": 4},
    ),
    "grpo, adapters": Whole(kind="grpo", settings={"peft_config": LORA}),
    "rloo": Whole(kind="rloo"),
    "distillation": Whole(kind="distillation", settings={"teacher_model": OF_OWN}),
}


def whole_run(case: Whole, folder: Path, *, ours: bool) -> Run:
    """Train and evaluate a trainer of a case on this rank."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(5)
    cls, config, data, settings = KINDS[case.kind]
    defaults = {"activation_checkpointing": False, "batch": 2, "learning_rate": 0.05}
    given = {**defaults, **settings, **case.settings}
    for name, value in given.items():
        if value == OF_OWN:
            given[name] = tiny_vision_model(case.family, seed=1)
            # eager attention makes NaN of padding on the left in float64
            given[name].set_attn_implementation("sdpa")
    trainer = trainer_of(
        cls,
        folder / "out",
        config=config,
        flexseq={"max_tokens_per_rank": case.cap} if ours else None,
        accumulation=case.accumulation,
        model=loaded(folder / case.family),
        train_dataset=data(24),
        eval_dataset=data(4),
        data_collator=None,
        processing_class=vision_processor(),
        max_steps=2,
        bf16=False,
        **given,
    )
    return trained(trainer, evaluates=True)


def compare(
    rank: int, world_size: int, name: str, folder: Path
) -> tuple[Difference, list[tuple[int, int]]]:
    """How far ours is from stock on this rank; and of each step with images how often the tower
    ran on this rank, and how often with a graph."""
    datasets.disable_progress_bars()
    runs: dict[StepImages, list[bool]] = {}
    encode = StepImages._encode

    def noted(images: StepImages, tower: Any) -> Any:
        runs.setdefault(images, []).append(torch.is_grad_enabled())
        return encode(images, tower)

    stock = whole_run(WHOLE[name], folder, ours=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepImages, "_encode", noted)
        ours = whole_run(WHOLE[name], folder, ours=True)
    return difference(stock, ours), [(len(own), sum(own)) for own in runs.values()]


def apart_by_rank(names: list[str], folder: Path) -> list[Any]:
    for family in {WHOLE[name].family for name in names}:
        tiny_vision_model(family).save_pretrained(folder / family)
    return run_cases(compare, 2, [(name, folder) for name in names], seconds=300)


def check_case(name: str, by_rank: Any) -> None:
    case = WHOLE[name]
    for apart, runs in by_rank:
        assert_alike(apart)
        trained_steps = [of_step for of_step in runs if of_step[1]]
        assert len(trained_steps) == 2, "the steps of training"
        for times, with_graph in trained_steps:
            assert with_graph == 1, "the tower of the trained model runs once"
            # and once for a reference that was not asked while samples were made; the images of a
            # teacher are counted for themselves
            # GRPO's runs again as long as it equals the policy
            most = 2 if case.kind in ("dpo", "kto", "grpo") else 1
            assert times == most or (case.kind == "grpo" and times == 1)


def test_losses_on_whole_samples_are_those_of_the_plain_trainers(tmp_path):
    names = ["dpo", "grpo"]
    for name, by_rank in zip(names, apart_by_rank(names, tmp_path), strict=True):
        check_case(name, by_rank)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in WHOLE if name not in ("dpo", "grpo")])
def test_other_losses_on_whole_samples(tmp_path, name):
    (by_rank,) = apart_by_rank([name], tmp_path)
    check_case(name, by_rank)


def test_a_teacher_of_text_distills_no_images(tmp_path):
    tiny_vision_model("qwen3_vl").save_pretrained(tmp_path / "qwen3_vl")
    config = tiny_vision_model("qwen3_vl").config.text_config
    teacher = Qwen3ForCausalLM(Qwen3Config(**config.to_dict() | {"model_type": "qwen3"})).double()
    case = Whole(kind="distillation", settings={"teacher_model": teacher})
    with pytest.raises(NotImplementedError, match="no images from a Qwen3ForCausalLM"):
        whole_run(case, tmp_path, ours=True)
