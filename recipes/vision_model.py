"""The vision-language model: a trained one by hub id or path, or a new one from a config, with
its tokenizer and image processor, frozen parts and LoRA."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
)

from albums import PATCH, SIDES, START, STOP, VIDEO, word_tokenizer
from arguments import AnyModelArguments
from model import lora_config


@dataclass
class VisionModelArguments(AnyModelArguments):
    """A vision-language model, what of it is trained, and LoRA."""

    freeze: Literal["none", "tower", "text"] = field(
        default="none",
        metadata={
            "help": "What is not trained: the tower and what projects its features, or the text "
            "model. With lora_r, what gets no adapters."
        },
    )


def load_processors(args: VisionModelArguments) -> tuple[PreTrainedTokenizerBase, Any]:
    """Return the named model's tokenizer and image processor, or those of a new model. The image
    processor works on PIL's images, without torchvision."""
    if args.model_name_or_path:
        named = {"revision": args.model_revision or "main"}
        named["trust_remote_code"] = args.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, **named)
        return tokenizer, AutoImageProcessor.from_pretrained(
            args.model_name_or_path, backend="pil", **named
        )
    vision = new_config(args, word_tokenizer()).vision_config
    side = vision.patch_size * vision.spatial_merge_size
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": side**2, "longest_edge": max(SIDES) ** 2},
    )
    return word_tokenizer(), image_processor


def load_model(args: VisionModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the named model or a new one, with frozen parts and adapters as they were asked
    for."""
    if args.model_name_or_path:
        model = AutoModelForImageTextToText.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision or "main",
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
        )
    else:
        dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
        config = new_config(args, tokenizer)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    if args.lora_r:
        return _with_adapters(model, args)
    frozen = {"none": set(), "tower": _tower(model), "text": _text(model)}[args.freeze]
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in frozen)
    return model


def new_config(args: VisionModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the configuration of a new model, with the tokens of a tokenizer."""
    tokens = {
        "image_token_id": PATCH,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": STOP,
    }
    numbers = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    if isinstance(args.model_config, dict):
        config = AutoConfig.for_model(**(numbers | args.model_config))
    else:
        config = AutoConfig.from_pretrained(args.model_config, **numbers)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.pad_token_id = tokenizer.pad_token_id
    text.eos_token_id = tokenizer.eos_token_id
    return config


def _text(model: PreTrainedModel) -> set[int]:
    """Return the ids of the text model's parameters, embedding and head included."""
    parts = (model.base_model.get_decoder(), model.get_input_embeddings())
    head = model.get_output_embeddings()
    return {id(parameter) for part in (*parts, head) for parameter in part.parameters()}


def _tower(model: PreTrainedModel) -> set[int]:
    """Return the ids of all other parameters: of the tower, and of what projects its features."""
    return {id(parameter) for parameter in model.parameters()} - _text(model)


def _with_adapters(model: PreTrainedModel, args: VisionModelArguments) -> Any:
    """Return a model with LoRA on all that is not frozen."""
    from peft import get_peft_model

    without = {"none": set(), "tower": _tower(model), "text": _text(model)}[args.freeze]
    config = lora_config(args)
    config.exclude_modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) in without
    ]
    return get_peft_model(model, config)
