"""TRL's trainers on images, with a processor: the plain trainer's weights and figures."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM
from trl import SFTTrainer

from hf_flexseq import FlexSeqArguments
from hf_flexseq.steps.features import StepImages
from tests.budget import others_nightly
from tests.differential.case import Case as SftCase
from tests.differential.runs import both
from tests.hf.objectives import OPTIONS, Case, run_case
from tests.hf.trainers import Difference, Run, difference
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
from tests.ranks import run_cases

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


def sft(data: Any, **settings: Any) -> SftCase:
    """A case of SFTTrainer on some of the data of `vision_processor.py`."""
    defaults = {
        "train_dataset": data(20),
        "eval_dataset": data(7),
        "per_device_eval_batch_size": 2,
        "dataset_kwargs": None,
        "processing_class": vision_processor(),
        "train_sampling_strategy": "sequential",
    }
    return SftCase(
        base=SFTTrainer,
        model=partial(tiny_vision_model, "qwen3_vl"),
        settings={**defaults, **settings},
        stock_settings={"per_device_eval_batch_size": 7},
        flexseq={"max_tokens_per_rank": 30},
        evaluates=True,
    )


SFT = {
    "completions": lambda: sft(completions),
    "talks": lambda: sft(talks),
    # TRL takes the column of texts for one that it does not read
    "texts": lambda: sft(texts, remove_unused_columns=False),
    "lora": lambda: sft(completions, peft_config=LORA, gradient_checkpointing=True),
}


@pytest.mark.parametrize("name", others_nightly(SFT, tried=["completions"]))
def test_sft_on_two_ranks_trains_as_on_one(tmp_path, name):
    for _, stock, by_rank in both({name: SFT[name]()}, tmp_path, seconds=120):
        for ours in by_rank:
            assert_alike(difference(stock, ours))


# ---- losses on whole samples


class Whole(NamedTuple):
    """A trainer whose loss is computed on the source ranks."""

    case: Case
    family: str = "qwen3_vl"
    """Of `tests/hf/vision_families.py`."""
    cap: int = FEW


def whole(
    kind: str,
    *,
    accumulation: int = 1,
    family: str = "qwen3_vl",
    cap: int = FEW,
    adapted: bool = False,
    **settings: Any,
) -> Whole:
    settings = {"learning_rate": 0.05, **settings}
    case = Case(
        kind=kind,
        steps=2,
        accumulation=accumulation,
        rows=24,
        evaluates=True,
        reference=not adapted,
        settings=settings,
    )
    return Whole(case, family, cap)


def reward(completions: Any, **given: Any) -> list[float]:
    """The share of an eighth of different words in each completion."""
    return [len(set(completion[0]["content"].split())) / 8 for completion in completions]


def loaded(folder: Path) -> Any:
    """The model of a saved folder, as trainers need it that load their reference themselves."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


DATA = {"dpo": pairs, "kto": labelled}
# the argument that takes a reference or teacher of its own
OTHER_MODELS = {"dpo": "ref_model", "kto": "ref_model", "distillation": "teacher_model"}
WHOLE = {
    "dpo": whole("dpo"),
    "dpo in one micro-batch": whole("dpo", cap=MANY),
    "dpo, accumulated": whole("dpo", accumulation=2, gradient_checkpointing=True),
    "dpo, recurrent layers": whole("dpo", family="qwen3_5", cap=MANY),
    "dpo, adapters": whole("dpo", adapted=True),
    "kto": whole("kto", accumulation=2),
    "grpo": whole("grpo"),
    "grpo, again": whole("grpo", accumulation=2, num_iterations=2, steps_per_generation=4),
    "grpo, adapters": whole("grpo", adapted=True),
    "rloo": whole("rloo"),
    "distillation": whole("distillation"),
}


def whole_run(one: Whole, folder: Path, *, ours: bool, **given: Any) -> Run:
    """Train and evaluate a trainer of a case on this rank. given: arguments of the trainer."""
    kind, data = one.case.kind, DATA.get(one.case.kind, prompts)
    if not one.case.reference:  # adapters, in place of a reference of its own
        given["peft_config"] = LORA
    elif kind in OTHER_MODELS:
        other = tiny_vision_model(one.family, seed=1)
        # eager attention makes NaN of padding on the left in float64
        other.set_attn_implementation("sdpa")
        given.setdefault(OTHER_MODELS[kind], other)
    if kind in ("grpo", "rloo"):
        given["reward_funcs"] = reward
    if ours:
        given["flexseq_args"] = FlexSeqArguments(**OPTIONS | {"max_tokens_per_rank": one.cap})
    return run_case(
        one.case,
        ours,
        folder,
        model=loaded(folder / one.family),
        train_dataset=data(24),
        eval_dataset=data(4),
        processing_class=vision_processor(),
        **given,
    )


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
    kind = WHOLE[name].case.kind
    for apart, runs in by_rank:
        assert_alike(apart)
        trained_steps = [of_step for of_step in runs if of_step[1]]
        assert len(trained_steps) == 2, "the steps of training"
        for times, with_graph in trained_steps:
            assert with_graph == 1, "the tower of the trained model runs once"
            # and once for a reference that was not asked while samples were made; the images of a
            # teacher are counted for themselves
            # GRPO's runs again as long as it equals the policy
            most = 2 if kind in ("dpo", "kto", "grpo") else 1
            assert times == most or (kind == "grpo" and times == 1)


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
    with pytest.raises(NotImplementedError, match="no images from a Qwen3ForCausalLM"):
        whole_run(WHOLE["distillation"], tmp_path, ours=True, teacher_model=teacher)
