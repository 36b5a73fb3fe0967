"""Tiny vision-language models, and examples with images for each of them.

The processors of these models need torchvision; what they would make of drawn pixels is written
here by hand. How many tokens stand for an image is asked of the model: as many as its tower makes
rows of features of this image alone.
"""

import random
from functools import lru_cache
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_flexseq.hf.model import small
from tests.hf.model_families import GIVEN, image_families
from tests.hf.test_reach import keep_float64
from tests.hf.vision_families import END, FAMILIES, IMAGE, OTHERS, START, VIDEO

TOKENS = {"image_token": IMAGE, "video_token": VIDEO}
TOKENS |= {"vision_start_token": START, "vision_end_token": END}


def tiny_config(name, **changes):
    """The configuration of a tiny model of a family: a layer of each kind, two at least. changes:
    options in place of the family's own."""
    options = _joined_options(GIVEN.get(name, {}), FAMILIES[name].options)
    with mock.patch.object(small, "LAYERS", 2):
        config = small.small_config(image_families()[name].kind, {**options, **changes})
    _set(config, FAMILIES[name].options)
    others = iter(OTHERS)
    for option in small._tokens_of_parts(config, vars(config)):
        token = TOKENS.get(option.removesuffix("_id").removesuffix("_index"))
        setattr(config, option, next(others) if token is None else token)
    return config


def _set(config, options):
    """Give a configuration and its parts sizes that are not those of all small ones."""
    for option, value in options.items():
        if isinstance(getattr(config, option), PreTrainedConfig):
            _set(getattr(config, option), value)
        else:
            setattr(config, option, value)


def _joined_options(first, second):
    """Options of a configuration and of its parts."""
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict):
            joined[name] = {**first[name], **second[name]}
    return joined


def tiny_vision_model(name, seed=0):
    """A tiny model of a family, in float64, that computes attention and experts plainly."""
    torch.manual_seed(seed)
    model = image_families()[name].kind._from_config(
        tiny_config(name), attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # features of zeros have no direction
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


def keep_all_float64(monkeypatch):
    """As `keep_float64`, also for what towers and experts make in float32."""
    keep_float64(monkeypatch)
    grid_sample, to_float = F.grid_sample, torch.Tensor.float
    new_zeros = torch.Tensor.new_zeros

    def zeros(tensor, *size, dtype=None, **how):
        kept = tensor.dtype == torch.float64 and dtype == torch.float32
        return new_zeros(tensor, *size, dtype=None if kept else dtype, **how)

    # GLM-4V interpolates its positions, Ernie collects logits of routers, Gemma 4 pools patches,
    # Kimi K2.5 adds up frames.
    monkeypatch.setattr(torch.Tensor, "new_zeros", zeros)
    monkeypatch.setattr(
        F, "grid_sample", lambda x, grid, **how: grid_sample(x, grid.double(), **how)
    )
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(
        torch.Tensor,
        "float",
        lambda tensor: to_float(tensor) if tensor.is_floating_point() else tensor.double(),
    )


# ---- one image each: the tensors that the family's method for features takes


def _grid(rng, generator, shape, frames=1, *, name="pixel_values", grid="image_grid_thw"):
    """A row of values, or a small image, for each patch, with the numbers of patches."""
    height, width = 2 * rng.randint(1, 3), 2 * rng.randint(1, 3)
    pixels = torch.rand(frames * height * width, *shape, generator=generator)
    return {name: pixels, grid: torch.tensor([[frames, height, width]])}


def grid_image(shape, **names):
    return lambda rng, generator: _grid(rng, generator, shape, **names)


def grid_video(shape, each=1):
    """Of some frames; each: the number of frames is a multiple of it."""
    names = {"name": "pixel_values_videos", "grid": "video_grid_thw"}
    return lambda rng, generator: _grid(rng, generator, shape, each * rng.randint(1, 3), **names)


def flat_hw(rng, generator):
    """As a grid whose sizes have no frames."""
    tensors = _grid(rng, generator, (48,))
    return {
        "pixel_values": tensors["pixel_values"],
        "image_grid_hw": tensors["image_grid_thw"][:, 1:],
    }


def merged(rng, generator):
    """As a grid, with how many patches are merged into a token."""
    merge = rng.choice([1, 2])
    return {**_grid(rng, generator, (48,)), "image_merge_sizes": torch.tensor([merge])}


def merged_video(rng, generator):
    names = {"name": "pixel_values_videos", "grid": "video_grid_thw"}
    tensors = _grid(rng, generator, (48,), rng.randint(1, 3), **names)
    return {**tensors, "video_merge_sizes": torch.tensor([2])}


def square(size):
    """Of one size."""
    return lambda rng, generator: {
        "pixel_values": torch.rand(1, 3, size, size, generator=generator)
    }


def two_sizes(rng, generator):
    """Of one size, once more with more pixels."""
    high = torch.rand(1, 3, 32, 32, generator=generator)
    return {**square(16)(rng, generator), "high_res_pixel_values": high}


def tiles(rng, generator):
    """An image that is cut into tiles of one size."""
    return {"pixel_values": torch.rand(rng.randint(1, 3), 3, 16, 16, generator=generator)}


def patches(rng, generator):
    """Of one size, as rows of values of a patch."""
    return {"pixel_values": torch.rand(1, 16, 48, generator=generator)}


def masked(rng, generator):
    """Of one size, with a mask of its pixels."""
    tensors = square(16)(rng, generator)
    return {**tensors, "pixel_mask": torch.ones(1, 16, 16, dtype=torch.bool)}


def nested(rng, generator):
    """Of one size, in a dimension for the images of an example."""
    pixels = torch.rand(1, 1, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 1, 16, 16, dtype=bool)}


def sizes(rng, generator):
    """Of different sizes, padded to one."""
    height, width = 8 * rng.randint(1, 3), 8 * rng.randint(1, 3)
    pixels = torch.zeros(1, 3, 24, 24)
    pixels[0, :, :height, :width] = torch.rand(3, height, width, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def any_size(rng, generator):
    """Cut into tiles by the size of the image, with a small copy before them."""
    height, width = rng.choice([(16, 16), (12, 30), (32, 16), (30, 32)])
    pixels = torch.rand(1, 5, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}


def clip(rng, generator):
    """A video of two frames."""
    return {"pixel_values_videos": torch.rand(1, 2, 3, 16, 16, generator=generator)}


def shaped(rng, generator):
    """Rows of values of a patch, padded to one number, with the numbers of patches."""
    height, width = 2 * rng.randint(1, 2), 2 * rng.randint(1, 2)
    mask = torch.zeros(1, 16, dtype=torch.int64)
    mask[:, : height * width] = 1
    return {
        "pixel_values": torch.rand(1, 16, 48, generator=generator) * mask.unsqueeze(2),
        "spatial_shapes": torch.tensor([[height, width]]),
        "pixel_attention_mask": mask,
    }


def _positioned(rng, generator, frames):
    """Rows of values of a patch, padded to one number, with the place of each."""
    height, width = 2 * rng.randint(1, 2), 2 * rng.randint(1, 2)
    places = torch.full((frames, 16, 2), -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places[:, : height * width] = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    return torch.rand(frames, 16, 48, generator=generator), places


def positioned(rng, generator):
    pixels, places = _positioned(rng, generator, 1)
    return {"pixel_values": pixels, "image_position_ids": places}


def positioned_video(rng, generator):
    pixels, places = _positioned(rng, generator, 2)
    return {
        "pixel_values_videos": pixels,
        "video_position_ids": places,
        "num_frames_per_video": torch.tensor([2]),
    }


def packed(rng, generator):
    """Patches side by side, with the numbers of patches."""
    height, width = 4 * rng.randint(1, 2), 4 * rng.randint(1, 2)
    pixels = torch.rand(1, 3, 4, height * width * 4, generator=generator)
    return {
        "pixel_values": pixels,
        "target_sizes": torch.tensor([[height, width]], dtype=torch.int32),
    }


QWEN, FLAT, PIXELS = (96,), (48,), (3, 4, 4)  # values of a patch
IMAGES = {
    "grid": grid_image(QWEN),
    "grid_video": grid_video(QWEN),
    "frames": grid_video(QWEN),
    "flat_grid": grid_image(FLAT),
    "flat_video": grid_video(FLAT, each=2),
    "flat_frames": grid_video(FLAT),
    "flat_hw": flat_hw,
    "pixel_grid": grid_image(PIXELS),
    "pixel_still": lambda rng, generator: _grid(
        rng, generator, PIXELS, name="pixel_values_videos", grid="video_grid_thw"
    ),
    "two_sizes": two_sizes,
    "merged": merged,
    "merged_video": merged_video,
    "square": square(16),
    "wide": square(32),
    "tiles": tiles,
    "patches": patches,
    "masked": masked,
    "nested": nested,
    "sizes": sizes,
    "any_size": any_size,
    "clip": clip,
    "shaped": shaped,
    "positioned": positioned,
    "positioned_video": positioned_video,
    "packed": packed,
}
OF_FRAMES = ("frames", "flat_frames")  # kinds of videos whose frames have tokens between them


# ---- examples


@lru_cache
def _model(name):
    return tiny_vision_model(name).base_model


def _rows_of(name, modality, tensors):
    """How many rows of features a model makes of one image."""
    with torch.no_grad():
        made = getattr(_model(name), f"get_{modality}_features")(**doubled(tensors))
    rows = made.last_hidden_state if made.pooler_output is None else made.pooler_output
    parts = [rows] if isinstance(rows, torch.Tensor) else rows
    return sum(part.shape[:-1].numel() for part in parts)


def _run_of(name, kind, tensors, words):
    """The tokens of an image or a video."""
    modality = "video" if any(n.endswith(("videos", "_video")) for n in tensors) else "image"
    token = VIDEO if modality == "video" else IMAGE
    rows = _rows_of(name, modality, tensors)
    if kind not in OF_FRAMES:
        return [START, *[token] * rows, END]
    frames = int(tensors["video_grid_thw"][0, 0])
    run = []
    for _ in range(frames):
        run += [*words(), START, *[token] * (rows // frames), END]
    return run


def doubled(tensors):
    """Tensors with values in float64."""
    return {n: v.double() if v.is_floating_point() else v for n, v in tensors.items()}


def _joined(kind, images):
    """The tensors of an example with several images."""
    along = {
        "nested": {"pixel_values": 1, "pixel_attention_mask": 1},
        "packed": {"pixel_values": 3},
    }
    dims = along.get(kind, {})
    return {n: torch.cat([one[n] for one in images], dim=dims.get(n, 0)) for n in images[0]}


def vision_examples(name, counts, seed=0, videos=()):
    """Examples with so many images each, between words. videos: indices of those that have a
    video as well."""
    family = FAMILIES[name]
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def words():
        return [rng.randrange(3, 40) for _ in range(rng.randint(1, 6))]

    examples = []
    for index, count in enumerate(counts):
        ids, tensors = words(), {}
        images = [IMAGES[family.kind](rng, generator) for _ in range(count)]
        for image in images:
            ids += [*_run_of(name, family.kind, image, words), *words()]
        if images:
            tensors = _joined(family.kind, images)
        if index in videos and family.video is not None:
            video = IMAGES[family.video](rng, generator)
            ids += [*_run_of(name, family.video, video, words), *words()]
            tensors = {**tensors, **video}
            if name == "qwen2_5_vl":  # whose positions of videos are in seconds
                tensors["second_per_grid_ts"] = torch.tensor([0.5 + index])
        ids += words()
        labels = [token if token < 50 else -100 for token in ids]
        if family.types is not None:
            tensors = {**tensors, family.types: types_of(ids, family)}
        examples.append({"input_ids": ids, "labels": labels, **doubled(tensors)})
    return examples


def types_of(ids, family):
    """The column of types that the family's processor would make."""
    tokens = torch.tensor(ids)
    if family.is_prefix:
        last = max([index for index, token in enumerate(ids) if token == IMAGE], default=-1)
        return (torch.arange(len(ids)) > last + 2).long()  # two words of the prompt follow
    return (tokens == IMAGE).long() + 2 * (tokens == VIDEO).long()


def called_with(example):
    """What the model is called with for one example alone, by the model's own processor."""
    ids = torch.tensor([example["input_ids"]])
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    given = {"mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
    for name, value in example.items():
        if name.endswith("token_type_ids"):
            value = value.unsqueeze(0)
        if name not in ("input_ids", "labels"):
            given[name] = value
    return {"input_ids": ids, **given}
