"""Tiny vision-language models, and examples with images for each of them.

The processors of these models need torchvision; what they would make of drawn pixels is written
here by hand: as many placeholders as the model has features, and the tensors that its method for
features takes.
"""

import random
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

VOCAB = 61
IMAGE, VIDEO, START, END = 57, 58, 59, 60  # tokens
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


class Family(NamedTuple):
    """A tiny model, and how its images look."""

    config: dict[str, Any]
    """Of the model, by name of option."""
    kind: str
    """Name of the function in IMAGES that draws an image, or several of them."""
    has_videos: bool = False
    types: str | None = None
    """The column that its processor makes besides, of what each token stands for."""
    is_prefix: bool = False
    """True if the types are 0 up to the end of the prompt and 1 after it."""


FAMILIES = {
    "qwen2_vl": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
            },
            **TOKENS,
        },
        "grid",
        has_videos=True,
    ),
    "qwen2_5_vl": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 40,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **TOKENS,
        },
        "grid",
        has_videos=True,
    ),
    "qwen3_vl": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 40,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **TOKENS,
        },
        "grid",
    ),
    "qwen3_5": Family(
        {
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 40,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "num_position_embeddings": 64,
            },
            **TOKENS,
        },
        "grid",
    ),
    "glm4v": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE, "partial_rotary_factor": 1.0},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "intermediate_size": 40,
                "patch_size": 4,
                "temporal_patch_size": 2,
                "spatial_merge_size": 2,
                "image_size": 32,
            },
            **TOKENS,
            "image_start_token_id": 53,
            "image_end_token_id": 54,
            "video_start_token_id": 55,
            "video_end_token_id": 56,
        },
        "grid",
    ),
    "llava": Family(
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **CLIP},
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        "square",
    ),
    "mistral3": Family(
        {
            "text_config": {"model_type": "mistral", **TEXT},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 4,
                "head_dim": 8,
            },
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "sizes",
    ),
    "internvl": Family(
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**CLIP, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
        },
        "tiles",
    ),
    "gemma3": Family(
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 5,
                "query_pre_attn_scalar": 8,
            },
            "vision_config": CLIP,
            "image_token_id": IMAGE,
            "mm_tokens_per_image": 4,
        },
        "squeezed",
        types="token_type_ids",
    ),
    "paligemma": Family(
        {
            "text_config": {"model_type": "gemma", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **CLIP, "projection_dim": 32},
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "projection_dim": 32,
        },
        "square",
        types="token_type_ids",
        is_prefix=True,
    ),
}


def tiny_vision_model(name, seed=0):
    """A tiny model of a family, in float64, that computes attention plainly."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **FAMILIES[name].config)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # features of zeros have no direction
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


# ---- images: (placeholders of one or several images, their tensors)


def grid(rng, generator, count):
    """Images of different sizes, as rows of patches, with grids."""
    grids, patches, tokens = [], [], []
    for _ in range(count):
        height, width = 2 * rng.randint(1, 3), 2 * rng.randint(1, 3)
        grids.append([1, height, width])
        patches.append(torch.rand(height * width, 3 * 2 * 4 * 4, generator=generator))
        tokens.append([START, *[IMAGE] * (height * width // 4), END])
    tensors = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    return tokens, tensors


def video(rng, generator):
    """One video of some frames."""
    frames, height, width = rng.randint(1, 3), 2 * rng.randint(1, 2), 2 * rng.randint(1, 2)
    pixels = torch.rand(frames * height * width, 3 * 2 * 4 * 4, generator=generator)
    tokens = [START, *[VIDEO] * (frames * height * width // 4), END]
    grid_thw = torch.tensor([[frames, height, width]])
    return tokens, {"pixel_values_videos": pixels, "video_grid_thw": grid_thw}


def square(rng, generator, count):
    """Images of one size."""
    tokens = [[START, *[IMAGE] * 16, END] for _ in range(count)]
    return tokens, {"pixel_values": torch.rand(count, 3, 16, 16, generator=generator)}


def squeezed(rng, generator, count):
    """Images of one size, of four tokens each."""
    tokens = [[START, *[IMAGE] * 4, END] for _ in range(count)]
    return tokens, {"pixel_values": torch.rand(count, 3, 16, 16, generator=generator)}


def tiles(rng, generator, count):
    """Images that are cut into tiles of one size, each of which has four tokens."""
    counts = [rng.randint(1, 3) for _ in range(count)]
    tokens = [[START, *[IMAGE] * (4 * count), END] for count in counts]
    return tokens, {"pixel_values": torch.rand(sum(counts), 3, 16, 16, generator=generator)}


def sizes(rng, generator, count):
    """Images of different sizes, padded to one, with their sizes."""
    shapes = [(8 * rng.randint(2, 3), 8 * rng.randint(1, 3)) for _ in range(count)]
    pixels = torch.zeros(count, 3, max(h for h, _ in shapes), max(w for _, w in shapes))
    tokens = []
    for index, (height, width) in enumerate(shapes):
        pixels[index, :, :height, :width] = torch.rand(3, height, width, generator=generator)
        tokens.append([START, *[IMAGE] * (height * width // 64), END])
    return tokens, {"pixel_values": pixels, "image_sizes": torch.tensor(shapes)}


IMAGES = {"grid": grid, "square": square, "squeezed": squeezed, "tiles": tiles, "sizes": sizes}


def vision_examples(name, counts, seed=0, videos=()):
    """Examples with so many images each, between words. videos: indices of those that have a
    video as well."""
    family = FAMILIES[name]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def words():
        return [rng.randrange(3, 50) for _ in range(rng.randint(1, 6))]

    examples = []
    for index, count in enumerate(counts):
        ids, tensors = words(), {}
        if count:
            runs, tensors = IMAGES[family.kind](rng, generator, count)
            for run in runs:
                ids += [*run, *words()]
        if index in videos and family.has_videos:
            run, of_video = video(rng, generator)
            ids += [*run, *words()]
            tensors = {**tensors, **of_video}
        ids += words()
        labels = [token if token < 50 else -100 for token in ids]
        if family.types is not None:
            tensors = {**tensors, family.types: types_of(ids, family)}
        tensors = {n: v.double() if v.is_floating_point() else v for n, v in tensors.items()}
        examples.append({"input_ids": ids, "labels": labels, **tensors})
    return examples


def types_of(ids, family):
    """The column of types that the family's processor would make."""
    tokens = torch.tensor(ids)
    if family.is_prefix:
        last = max([index for index, token in enumerate(ids) if token == IMAGE], default=-1)
        return (torch.arange(len(ids)) > last + 2).long()  # two words of the prompt follow
    return (tokens == IMAGE).long()


def called_with(example):
    """What the model is called with for one example alone, by the model's own processor."""
    ids = torch.tensor([example["input_ids"]])
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    tensors = {n: v for n, v in example.items() if n not in ("input_ids", "labels")}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in tensors:
            tensors[name] = tensors[name].unsqueeze(0)
    return {"input_ids": ids, "mm_token_type_ids": types, **tensors}
