"""Tiny models and datasets with images, beside those of `hub.py`.

The processors of Qwen models have one of videos, which needs torchvision; `without_videos` makes
them do with images, which transformers can process by PIL.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from datasets import Dataset, Features, Image, List, Value
from transformers import ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from exchange.hub import EXPERTS, OWNER, SIZES, TEMPLATES, save_dataset_card, talk, tokenizer_of

TEXT = {**SIZES, "hidden_size": 16}
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PICTURE = "<image>"  # of Llava
# Tokens that a tokenizer of Gemma knows by attribute.
NAMES = {
    "Gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "Gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
}
TURNS = ("<bos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>")
SPECIAL = (*TOKENS.values(), PICTURE, *NAMES["Gemma3"].values(), *NAMES["Gemma4"].values(), *TURNS)
BEGINNING = "system\nYou are a helpful assistant.\nuser\nWhat does the Zen of Python say about"
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {  # Qwen3.5's layers
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 2, 2]},
}
CLIP = {
    "model_type": "clip_vision_model",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
PINPOINTS = [[56, 56], [56, 112], [112, 56]]
QWEN = {"depth": 2, "hidden_size": 16, "num_heads": 4, "intermediate_size": 32}

# name: (family of classes, options of text, options of the tower, chat template)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "tiny-Qwen2VLForConditionalGeneration": (
        "Qwen2VL",
        {"rope_parameters": {**MROPE, "mrope_section": [1, 1]}},
        {"depth": 2, "hidden_size": 16, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 2},
        "qwen2_5_vl",
    ),
    "tiny-Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VL",
        {"rope_parameters": {**MROPE, "mrope_section": [1, 1]}},
        {**QWEN, "fullatt_block_indexes": [1], "out_hidden_size": 16},
        "qwen2_5_vl",
    ),
    "tiny-Qwen3VLForConditionalGeneration": (
        "Qwen3VL",
        {"head_dim": 12, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2]}},
        {**QWEN, "deepstack_visual_indexes": [1], "out_hidden_size": 16},
        "qwen3_vl",
    ),
    "tiny-LlavaForConditionalGeneration": (
        "Llava",
        {"model_type": "llama"},
        CLIP,
        "llava_next",
    ),
    "tiny-LlavaNextForConditionalGeneration": (
        "LlavaNext",
        {"model_type": "mistral", "sliding_window": None},
        CLIP,
        "llava_next",
    ),
    "tiny-Gemma3ForConditionalGeneration": (
        "Gemma3",
        {"head_dim": 4, "query_pre_attn_scalar": 4},
        {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        "gemma3",
    ),
    "tiny-Gemma4ForConditionalGeneration": (
        "Gemma4",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 4,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 16,
        },
        {
            **CLIP,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 4,
            "head_dim": 4,
            "patch_size": 4,
            "position_embedding_size": 630,
        },
        "gemma4",
    ),
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": (
        "Qwen3_5",
        LINEAR,
        {**QWEN, "out_hidden_size": 16},
        "qwen3_5_nothink",
    ),
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": (
        "Qwen3_5Moe",
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
        {**QWEN, "out_hidden_size": 16},
        "qwen3_6",
    ),
}


def without_videos() -> None:
    """Let processors be made, saved and loaded without those of videos and audio."""
    base = ProcessorMixin.__init__
    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Gemma4"):
        processor: Any = getattr(transformers, f"{family}Processor")
        own = processor.__init__
        others = {"feature_extractor": None} if family == "Gemma4" else {}

        def create(
            self: Any,
            image_processor: Any = None,
            tokenizer: Any = None,
            chat_template: Any = None,
            own: Any = own,
            others: dict[str, Any] = others,
            **ignored: Any,
        ) -> None:
            def without(self: Any, *parts: Any, **named: Any) -> None:
                base(self, image_processor, tokenizer, chat_template=chat_template)

            given = {"image_processor": image_processor, "tokenizer": tokenizer, **others}
            with patch.object(ProcessorMixin, "__init__", without):
                own(self, video_processor=None, chat_template=chat_template, **given)

        processor.__init__ = create


def make_pictures(folder: Path, lines: list[str]) -> None:
    """Fill `folder` with models of images and datasets for them."""
    without_videos()
    # what all prompts begin with has a few tokens, as with a real tokenizer
    tokenizer = tokenizer_of([*lines, *[BEGINNING] * len(lines)], SPECIAL)
    tokenizer.padding_side = "left"
    for name, (family, text, tower, template) in MODELS.items():
        own = with_names(tokenizer, NAMES[family]) if family in NAMES else tokenizer
        processor = processor_of(family, own)
        processor.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
        place = folder / OWNER / name
        processor.save_pretrained(place)
        save_model(place, family, text, tower, tokenizer)
    for name, most in (("zen-image", 1), ("zen-multi-image", 3)):
        rows = rows_with_images(lines, most)
        save_images(folder / OWNER / name, rows, column="image" if most == 1 else "images")


def with_names(tokenizer: Any, names: dict[str, str]) -> Any:
    """Return a tokenizer that knows tokens of images by the names of attributes."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        bos_token="<bos>",
        padding_side="left",
        extra_special_tokens=names,
    )


def processor_of(family: str, tokenizer: Any) -> Any:
    """Return the processor of a family of models, for small images."""
    size = {"height": 56, "width": 56}
    if family == "Gemma3":
        return transformers.Gemma3Processor(
            Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=4
        )
    if family == "Gemma4":
        return transformers.Gemma4Processor(
            image_processor=Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
            tokenizer=tokenizer,
        )
    if family.startswith("Llava"):
        options: dict[str, Any] = {"size": {"shortest_edge": 56}, "crop_size": size}
        images: Any = CLIPImageProcessorPil(**options)
        if family == "LlavaNext":
            images = LlavaNextImageProcessorPil(**options, image_grid_pinpoints=PINPOINTS)
        return getattr(transformers, f"{family}Processor")(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token=PICTURE,
            num_additional_image_tokens=1,
        )
    is_third = family.startswith("Qwen3")
    patch_size = 16 if is_third else 14
    kind = "Qwen3VL" if is_third else family
    return getattr(transformers, f"{kind}Processor")(
        Qwen2VLImageProcessorPil(patch_size=patch_size, min_pixels=56 * 56), tokenizer
    )


def save_model(
    place: Path, family: str, text: dict[str, Any], tower: dict[str, Any], tokenizer: Any
) -> None:
    """Save a model of random weights."""
    options: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()
    }
    if family.startswith("Llava"):
        options = {"image_token_index": tokenizer.convert_tokens_to_ids(PICTURE)}
    if family == "LlavaNext":
        options["image_grid_pinpoints"] = PINPOINTS
    if family in NAMES:
        ending = "_index" if family == "Gemma3" else "_id"
        options = {
            name + ending: tokenizer.convert_tokens_to_ids(token)
            for name, token in NAMES[family].items()
        }
    if family == "Gemma3":
        options["mm_tokens_per_image"] = 4
    if family == "Gemma4":
        text = {**text, "vocab_size_per_layer_input": len(tokenizer)}
        options["eoa_token_index"] = options.pop("eoa_token_id")
        options["audio_config"] = None
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    configuration = getattr(transformers, f"{family}Config")(
        text_config={**TEXT, **text, **ends, "vocab_size": len(tokenizer)},
        vision_config=tower,
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(configuration)
    model.save_pretrained(place)


# ---- datasets


def rows_with_images(lines: list[str], most: int) -> list[dict[str, Any]]:
    """Return a conversation for each sentence, with 1 image, or with 0 to `most`."""
    rng = random.Random(0)
    rows = []
    for number, line in enumerate(lines):
        count = 1 if most == 1 else number % (most + 1)
        question, answer = talk(line)
        if most > 1:
            question = with_parts(question, count)
            answer = with_parts(answer, 0)
        rows.append({"talk": [question, answer], "images": [picture(rng) for _ in range(count)]})
    return rows


def with_parts(message: dict[str, str], images: int) -> dict[str, Any]:
    """Return a message whose content is in parts, images first."""
    parts: list[dict[str, Any]] = [{"type": "image", "text": None} for _ in range(images)]
    return {**message, "content": [*parts, {"type": "text", "text": message["content"]}]}


def picture(rng: random.Random) -> Any:
    """Return an image of random pixels, 32 to 63 wide and high."""
    from PIL import Image as Picture

    shape = (rng.randrange(32, 64), rng.randrange(32, 64), 3)
    values = np.random.default_rng(rng.randrange(1000)).integers(0, 255, shape, dtype=np.uint8)
    return Picture.fromarray(values)


def configurations(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the columns of text of each configuration of the dataset."""
    talks = [row["talk"] for row in rows]
    yield "conversational_language_modeling", [{"messages": both} for both in talks]
    yield "conversational_prompt_only", [{"prompt": both[:1]} for both in talks]
    asked = [{"prompt": both[:1], "completion": both[1:]} for both in talks]
    yield "conversational_prompt_completion", asked
    others = talks[1:] + talks[:1]
    pairs = zip(asked, others, strict=True)
    yield (
        "conversational_preference",
        [
            {"prompt": own["prompt"], "chosen": own["completion"], "rejected": other[1:]}
            for own, other in pairs
        ],
    )
    yield (
        "conversational_unpaired_preference",
        [{**own, "label": number % 2 == 0} for number, own in enumerate(asked)],
    )


def save_images(place: Path, rows: list[dict[str, Any]], column: str) -> None:
    """Save a dataset with a `train` and a `test` split of 2 rows per configuration."""
    has_parts = isinstance(rows[0]["talk"][0]["content"], list)
    content: Any = Value("string")
    if has_parts:
        content = List({"type": Value("string"), "text": Value("string")})
    message = List({"role": Value("string"), "content": content})
    files: dict[str, dict[str, str]] = {}
    for name, texts in configurations(rows):
        of_column = {column: Image() if column == "image" else List(Image())}
        kinds = {key: Value("bool") if key == "label" else message for key in texts[0]}
        made = []
        for text, row in zip(texts, rows, strict=True):
            made.append({**text, column: row["images"][0] if column == "image" else row["images"]})
        files[name] = {}
        for split, part in (("train", made[:-2]), ("test", made[-2:])):
            path = place / name / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            columns = {key: [row[key] for row in part] for key in part[0]}
            Dataset.from_dict(columns, features=Features({**kinds, **of_column})).to_parquet(path)
            files[name][split] = f"{name}/{split}.parquet"
    save_dataset_card(place, files)
