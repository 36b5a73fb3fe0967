"""Find out by trial whether a model encodes the frames of a video independently of each other.

A video of t frames, the t of its grid (t, h, w), is then t images, which different ranks may
encode. A small video of three frames, and its middle one alone, are encoded by a copy of the tower
with random numbers, in float64. Features are independent if the frame has the same in both. So
nothing needs to be known of a model's attention or its positions: a tower whose patches attend to
frames before or after, or whose features depend on the number of a frame, fails the trial.

The copy has the sizes of the model's own tower, and next to no memory: a weight is a view of as
many random numbers as its shape adds up to, [i, j] of them the number i + j. The text model stays
empty.

Rejected: to try a tower of fewer layers, since configurations name layers by number.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.hf.model.feature_trial import Modality
from hf_flexseq.hf.model.rehearsal import class_copy, take_users_modules
from hf_flexseq.hf.model.towers import tower_parameters
from hf_flexseq.plan.images import frames_of_parts
from hf_flexseq.steps.feature_form import FeatureForm
from hf_flexseq.steps.image_parts import Tensors, grid_of, parts_of_video, values_of_video

logger = logging.getLogger(__name__)

FRAMES = 3  # of the video that is tried
SAME = 1e-6  # of the largest feature; towers compute rotary positions and softmax in float32


class VideoParts:
    """Divides the videos of one model, where that leaves their features as they are."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._tried: dict[tuple[Any, ...], bool] = {}  # by modality and values of a video

    def parts(self, modality: Modality, video: Tensors, tokens: int) -> list[tuple[Tensors, int]]:
        """Return the parts of a video, or of an image, that ranks can encode independently: the
        tensors and the number of tokens of each, in the order of the tokens. It is one part where
        it is short, and where the model's frames depend on each other, which the first long video
        tries."""
        whole = [(video, tokens)]
        grid, values = grid_of(video), values_of_video(video)
        if grid is None or grid.shape != (1, 3) or values is None:
            return whole
        frames, height, width = grid[0].tolist()
        counts = frames_of_parts(frames, height * width)
        if len(counts) == 1 or tokens % frames:
            return whole
        kind = modality.name, values
        if kind not in self._tried:
            self._tried[kind] = has_independent_frames(self._base, modality, video)
        if not self._tried[kind]:
            return whole
        tokens_of_frame = tokens // frames
        parts = parts_of_video(video, counts)
        return [(part, tokens_of_frame * n) for part, n in zip(parts, counts, strict=True)]


def has_independent_frames(base: PreTrainedModel, modality: Modality, video: Tensors) -> bool:
    """Tell if the features of a video's frames do not depend on other frames, nor on how many
    there are before. video: its tensors, of which the trial has a smaller one of the same kind."""
    if modality.takes_embedding:
        return False  # the text model, which makes them, is not copied
    try:
        with torch.device("cpu"):
            tower = _lively_tower(base)
            if take_users_modules(base, tower):
                return False  # what they do is not known
            whole = _small_video(video, _merged(base))
            middle = parts_of_video(whole, [1] * FRAMES)[FRAMES // 2]
            features = _features(tower, modality, whole)
            alone = _features(tower, modality, middle)
    except Exception as error:  # a run that would train does not end for it
        reason = " ".join(str(error).split())
        logger.info(
            "videos of %s are not divided: a trial fails (%s)", type(base).__name__, reason
        )
        return False
    if len(features) != FRAMES * len(alone) or not features.isfinite().all():
        return False
    among_others = features.view(FRAMES, *alone.shape)[FRAMES // 2]
    scale = float(features.abs().max())
    return scale > 0 and float((alone - among_others).abs().max()) <= SAME * scale


def _features(tower: PreTrainedModel, modality: Modality, video: Tensors) -> torch.Tensor:
    """Return the features of a video, [rows, width]."""
    arguments = dict(modality.options)
    for name, value in video.items():
        arguments[modality.arguments[name]] = value
    with torch.no_grad():
        outputs = getattr(tower.base_model, modality.method)(**arguments, return_dict=True)
    _, streams = FeatureForm.of(outputs, modality.rows)
    return torch.cat(streams, dim=1)


def _small_video(video: Tensors, merged: int) -> dict[str, torch.Tensor]:
    """Return a video of few frames with a few random patches, and the other values of `video`."""
    height, width = merged, 2 * merged
    generator = torch.Generator().manual_seed(1)
    grid = grid_of(video)
    small = {}
    for name, value in video.items():
        if grid is not None and value is grid:
            small[name] = grid.new_tensor([[FRAMES, height, width]])
        elif name.startswith("pixel_values"):
            shape = (FRAMES * height * width, *value.shape[1:])
            small[name] = torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            small[name] = value
    return small


def _merged(base: PreTrainedModel) -> int:
    """Return how many patches of a frame are merged into a token, in height and in width."""
    vision = getattr(base.config, "vision_config", None)
    return getattr(vision, "spatial_merge_size", None) or 2


# ---- a tower with numbers


def _lively_tower(base: PreTrainedModel) -> PreTrainedModel:
    """Return an empty copy of a model whose towers have numbers, without dropout."""
    made = class_copy(base, dtype=torch.float64).eval()
    made.set_attn_implementation("eager")
    # 1. buffers, by the model's own rules; what these leave out stays NaN
    _fill_buffers(made, made)
    # 2. parameters
    generator = torch.Generator().manual_seed(0)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for parameter in tower_parameters(made):
        lively = nn.Parameter(_lively(parameter.shape, generator), requires_grad=False)
        for module, name in owners[id(parameter)]:
            setattr(module, name, lively)
    return made


def _fill_buffers(module: nn.Module, owner: PreTrainedModel) -> None:
    """Give the buffers inside a module memory and values. owner: the model whose rules hold."""
    if isinstance(module, PreTrainedModel):
        owner = module
    for child in module.children():
        _fill_buffers(child, owner)
    buffers = dict(module.named_buffers(recurse=False))
    for name, buffer in buffers.items():
        setattr(module, name, _empty(buffer))
    if buffers:
        owner._init_weights(module)  # parameters have no memory yet


def _empty(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer with memory; NaN where it has floating-point numbers."""
    return torch.full(buffer.shape, torch.nan if buffer.is_floating_point() else 0).to(
        buffer.dtype
    )


def _lively(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return a view of random numbers as a weight, small enough that layers keep their scale."""
    numbers = torch.randn(sum(shape) - len(shape) + 1, generator=generator, dtype=torch.float64)
    if len(shape) < 2:
        return 1 + 0.3 * numbers  # norms and biases
    inputs = shape[1:].numel()
    return (numbers * inputs**-0.5).as_strided(shape, (1,) * len(shape))
