"""TRL's trainers on images, with a processor: the plain trainer's weights and figures."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import SFTTrainer

from hf_flexseq.steps.features import StepImages
from tests.budget import others_nightly
from tests.differential.case import Case as SftCase
from tests.differential.runs import both
from tests.hf.objectives import Case, assert_alike, run_case
from tests.hf.trainers import Difference, Run, difference
from tests.hf.vision import tiny_vision_model
from tests.hf.vision_families import END, IMAGE, START, VIDEO
from tests.ranks import run_cases

WORDS = range(2, 50)  # the numbers of the tokens that are words
SPECIAL = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + PICTURE + " {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


class ImagesAndWords(Qwen3VLProcessor):
    """The processor of Qwen3-VL without the one of videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = IMAGE, VIDEO
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def vision_processor() -> ImagesAndWords:
    """A processor whose tokens are words, such as w17 for the number 17; 0 pads and 1 ends."""
    vocabulary = {"<pad>": 0, "<end>": 1, **{f"w{n}": n for n in range(2, 57)}, **SPECIAL}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",  # as GRPO pads prompts
        additional_special_tokens=list(SPECIAL),
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=8 * 8, max_pixels=24 * 24
    )
    return ImagesAndWords(images, words, chat_template=TEMPLATE)


# ---- data


def picture(rng: random.Random) -> Image.Image:
    """A small image of random colours."""
    shape = (8 * rng.randint(1, 3), 8 * rng.randint(1, 3), 3)
    return Image.fromarray(
        np.random.default_rng(rng.randrange(1000)).integers(0, 255, shape, "u1")
    )


def words(rng: random.Random, least: int, most: int) -> str:
    """So many random words."""
    return " ".join(f"w{rng.choice(WORDS)}" for _ in range(rng.randint(least, most)))


def rows_of(
    row: Callable[[random.Random, str], dict[str, Any]], images: Sequence[int] = (1, 0, 2, 1)
) -> Callable[[int], Dataset]:
    """What makes so many rows. row: makes one from the text of its images. images: how many each
    row has, again and again."""

    def make(count: int) -> Dataset:
        rng = random.Random(0)
        rows = []
        for index in range(count):
            pictures = [picture(rng) for _ in range(images[index % len(images)])]
            text = f"{PICTURE} " * len(pictures)
            rows.append({"images": pictures, **row(rng, text)})
        return Dataset.from_list(rows)

    return make


def said(role: str, content: str) -> dict[str, str]:
    """A message of a conversation."""
    return {"role": role, "content": content}


texts = rows_of(lambda rng, images: {"text": images + words(rng, 2, 20)})
completions = rows_of(
    lambda rng, images: {
        "prompt": f"{images}{words(rng, 2, 6)} ",
        "completion": words(rng, 2, 20),
    }
)
talks = rows_of(
    lambda rng, images: {
        "messages": [said("user", words(rng, 2, 6)), said("assistant", words(rng, 2, 20))]
    }
)
pairs = rows_of(
    lambda rng, images: {
        "prompt": f"{images}{words(rng, 2, 6)} ",
        "chosen": words(rng, 2, 20),
        "rejected": words(rng, 2, 12),
    }
)
labelled = rows_of(
    lambda rng, images: {
        "prompt": f"{images}{words(rng, 2, 6)} ",
        "completion": words(rng, 2, 20),
        "label": rng.random() < 0.5,
    }
)
# All have some: a rank whose samples have none waits for the others in TRL's log of images.
prompts = rows_of(lambda rng, images: {"prompt": [said("user", words(rng, 2, 6))]}, images=(1, 2))


# ---- cases


pytestmark = pytest.mark.processes

# of text and of the tower
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
FEW, MANY = 40, 400  # tokens of a rank in a micro-batch: several of them, or one


def check(apart: Difference) -> None:
    assert_alike(apart, weights=2e-6)
    assert apart.figures > 15


# ---- SFT


def sft(data: Any, **settings: Any) -> SftCase:
    """A case of SFTTrainer on some of the data of `test_vision_trl.py`."""
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
            check(difference(stock, ours))


# ---- losses on whole samples


def whole(
    kind: str, *, accumulation: int = 1, cap: int = FEW, adapted: bool = False, **settings: Any
) -> Case:
    """A trainer whose loss is computed on the source ranks."""
    return Case(
        kind=kind,
        steps=2,
        accumulation=accumulation,
        rows=24,
        evaluates=True,
        reference=not adapted,
        settings={"learning_rate": 0.05, **settings},
        flexseq={"max_tokens_per_rank": cap},
    )


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
    "dpo, recurrent layers": whole("dpo", cap=MANY),
    "dpo, adapters": whole("dpo", adapted=True),
    "kto": whole("kto", accumulation=2),
    "grpo": whole("grpo"),
    "grpo, again": whole("grpo", accumulation=2, num_iterations=2, steps_per_generation=4),
    "grpo, adapters": whole("grpo", adapted=True),
    "rloo": whole("rloo"),
    "distillation": whole("distillation"),
}


def family_of(name: str) -> str:
    """The model of a case, of `tests/hf/vision_families.py`."""
    return "qwen3_5" if "recurrent" in name else "qwen3_vl"


def whole_run(name: str, folder: Path, *, ours: bool, **given: Any) -> Run:
    """Train and evaluate a trainer of a case on this rank. given: arguments of the trainer."""
    case, family = WHOLE[name], family_of(name)
    kind, data = case.kind, DATA.get(case.kind, prompts)
    if not case.reference:  # adapters, in place of a reference of its own
        given["peft_config"] = LORA
    elif kind in OTHER_MODELS:
        other = tiny_vision_model(family, seed=1)
        # eager attention makes NaN of padding on the left in float64
        other.set_attn_implementation("sdpa")
        given.setdefault(OTHER_MODELS[kind], other)
    if kind in ("grpo", "rloo"):
        given["reward_funcs"] = reward
    return run_case(
        case,
        ours,
        folder,
        model=loaded(folder / family),
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

    stock = whole_run(name, folder, ours=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepImages, "_encode", noted)
        ours = whole_run(name, folder, ours=True)
    return difference(stock, ours), [(len(own), sum(own)) for own in runs.values()]


def check_case(name: str, by_rank: Any) -> None:
    kind = WHOLE[name].kind
    for apart, runs in by_rank:
        check(apart)
        trained_steps = [of_step for of_step in runs if of_step[1]]
        assert len(trained_steps) == 2, "the steps of training"
        for times, with_graph in trained_steps:
            assert with_graph == 1, "the tower of the trained model runs once"
            # and once for a reference that was not asked while samples were made; the images of a
            # teacher are counted for themselves
            # GRPO's runs again as long as it equals the policy
            most = 2 if kind in ("dpo", "kto", "grpo") else 1
            assert times == most or (kind == "grpo" and times == 1)


@pytest.mark.parametrize("name", others_nightly(WHOLE, tried=["dpo", "grpo"]))
def test_losses_on_whole_samples_are_those_of_the_plain_trainers(tmp_path, name):
    family = family_of(name)
    tiny_vision_model(family).save_pretrained(tmp_path / family)
    (by_rank,) = run_cases(compare, 2, [(name, tmp_path)], seconds=300)
    check_case(name, by_rank)


def test_a_teacher_of_text_distills_no_images(tmp_path):
    tiny_vision_model("qwen3_vl").save_pretrained(tmp_path / "qwen3_vl")
    config = tiny_vision_model("qwen3_vl").config.text_config
    teacher = Qwen3ForCausalLM(Qwen3Config(**config.to_dict() | {"model_type": "qwen3"})).double()
    with pytest.raises(NotImplementedError, match="no images from a Qwen3ForCausalLM"):
        whole_run("distillation", tmp_path, ours=True, teacher_model=teacher)
