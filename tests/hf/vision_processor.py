"""A processor of Qwen3-VL for words and small images, and datasets for TRL with both."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.hf.vision_families import END, IMAGE, START, VIDEO

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


def _rows(
    count: int,
    row: Callable[[random.Random, int], dict[str, Any]],
    images: Sequence[int] = (1, 0, 2, 1),
) -> Dataset:
    """Rows with so many images each, again and again."""
    rng = random.Random(0)
    rows = []
    for index in range(count):
        pictures = [picture(rng) for _ in range(images[index % len(images)])]
        rows.append({"images": pictures, **row(rng, len(pictures))})
    return Dataset.from_list(rows)


def _with_pictures(text: str, images: int) -> str:
    return " ".join([PICTURE] * images + [text])


def texts(count: int) -> Dataset:
    """Images, and words after them."""
    return _rows(count, lambda rng, images: {"text": _with_pictures(words(rng, 2, 20), images)})


def completions(count: int) -> Dataset:
    """Prompts with images, and completions."""

    def row(rng: random.Random, images: int) -> dict[str, Any]:
        prompt = _with_pictures(words(rng, 2, 6), images)
        return {"prompt": prompt + " ", "completion": words(rng, 2, 20)}

    return _rows(count, row)


def talks(count: int) -> Dataset:
    """Conversations with images in the first message."""

    def row(rng: random.Random, images: int) -> dict[str, Any]:
        asked = {"role": "user", "content": words(rng, 2, 6)}
        return {"messages": [asked, {"role": "assistant", "content": words(rng, 2, 20)}]}

    return _rows(count, row)


def pairs(count: int) -> Dataset:
    """Prompts with images, and a chosen and a rejected completion."""

    def row(rng: random.Random, images: int) -> dict[str, Any]:
        return {
            "prompt": _with_pictures(words(rng, 2, 6), images) + " ",
            "chosen": words(rng, 2, 20),
            "rejected": words(rng, 2, 12),
        }

    return _rows(count, row)


def labelled(count: int) -> Dataset:
    """Prompts with images, and a completion that is good or bad."""

    def row(rng: random.Random, images: int) -> dict[str, Any]:
        prompt = _with_pictures(words(rng, 2, 6), images) + " "
        return {"prompt": prompt, "completion": words(rng, 2, 20), "label": rng.random() < 0.5}

    return _rows(count, row)


def prompts(count: int) -> Dataset:
    """Prompts with images alone. All have some: a rank whose samples have none waits for the
    others in TRL's log of images."""

    def row(rng: random.Random, images: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": words(rng, 2, 6)}]}

    return _rows(count, row, images=(1, 2))
