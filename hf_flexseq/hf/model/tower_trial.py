"""Try how a model takes images: how its forward calls the tower, which features it reads, and
whether the frames of a video depend on each other.

The forward of an empty copy of the model runs on stand-ins for images, and shows two things.

call    The arguments of the forward's call to its method for features: which tensors of an example
        become which arguments, and the values of other arguments, such as the layer of the tower
        that a configuration names. Features of the same call equal the forward's own.
reads   Which fields of the features the forward reads, when it is given them. Rows of features
        travel to the ranks that need them. A field that is something else would be missing there.

A trial may end before a forward has read everything. So the features that a model is given in
training refuse every other field as well (`feature_form.GivenFeatures`).

A video of t frames, the t of its grid (t, h, w), is t images, which different ranks may encode, if
each frame is encoded independently of the others. A small video of three frames, and its middle
one alone, are encoded by a copy of the tower with random numbers, in float64. Features are
independent if the frame has the same in both. So nothing needs to be known of a model's attention
or its positions: a tower whose patches attend to frames before or after, or whose features depend
on the number of a frame, fails the trial. That copy has the sizes of the model's own tower, and
next to no memory: a weight is a view of as many random numbers as its shape adds up to, [i, j] of
them the number i + j. The text model stays empty.

Rejected: to try a tower of fewer layers, since configurations name layers by number.
"""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import IMAGES_FROM, is_older, needs
from hf_flexseq.hf.model.rehearsal import FAULTS, class_copy, rehearse, row_of, take_users_modules
from hf_flexseq.hf.model.towers import placeholder_of, tower_parameters
from hf_flexseq.plan.images import MODALITIES, frames_of_parts
from hf_flexseq.steps.feature_form import OF_LAYERS, FeatureForm, GivenFeatures
from hf_flexseq.steps.image_parts import Tensors, grid_of, parts_of_video, values_of_video
from hf_flexseq.steps.images import TYPES, UnsupportedImages

logger = logging.getLogger(__name__)


FEATURES = "mm_encoder_outputs"
"""Argument of a model's forward that takes features, by modality."""

ROWS = ("pooler_output", "last_hidden_state")
"""Fields of features that may have a row for each token of an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """How a model takes images, or videos."""

    name: str
    placeholder: int
    """Token that stands for a part of one."""
    method: str
    """Name of the method that encodes them."""
    arguments: Mapping[str, str]
    """Name of the method's argument, by name of the tensor which examples bring."""
    casts: frozenset[str]
    """Tensors that the forward casts to the dtype of its embedding."""
    options: Mapping[str, Any]
    """Other arguments of the method, as the forward gives them."""
    rows: str
    """Field of the features that the forward reads, of ROWS."""
    takes_embedding: bool
    """True if the features are rows of the text's embedding, as of a tower that makes tokens."""
    parts: frozenset[str]
    """Names of the modules that the method calls, as it is written."""


def try_features(base: PreTrainedModel) -> list[Modality]:
    """Return the modalities that a model takes. Raises UnsupportedImages without any, and for
    features that ranks cannot share."""
    name = type(base).__name__
    inner = base.base_model
    if FEATURES not in inspect.signature(inner.forward).parameters:
        reason = f"{name} does not take {FEATURES}"
        reads_images = any(placeholder_of(base.config, modality) for modality in MODALITIES)
        if reads_images and is_older("transformers", IMAGES_FROM):
            reason += f"; {needs('transformers', IMAGES_FROM)}"
        raise UnsupportedImages(reason)
    asked = {}
    for modality in MODALITIES:
        placeholder = placeholder_of(base.config, modality)
        if hasattr(inner, f"get_{modality}_features") and placeholder is not None:
            asked[modality] = placeholder
    if not asked:
        raise UnsupportedImages(f"{name} has no method for features of images, or no token")
    tried = class_copy(base, attention="eager")
    return [_try(tried, modality, placeholder) for modality, placeholder in asked.items()]


def _try(tried: PreTrainedModel, modality: str, placeholder: int) -> Modality:
    """Return how an empty model takes a modality."""
    call = _try_call(tried, modality)
    inner = tried.base_model
    names = inspect.unwrap(getattr(type(inner), call["method"])).__code__.co_names
    return Modality(
        name=modality,
        placeholder=placeholder,
        **call,
        rows=_try_reads(tried, modality),
        takes_embedding="get_input_embeddings" in names,
        parts=frozenset(n for n in names if isinstance(getattr(inner, n, None), nn.Module)),
    )


# ---- what the method is called with


class _Called(Exception):
    """The forward has called its method for features."""


def _try_call(tried: PreTrainedModel, modality: str) -> dict[str, Any]:
    """Return how the forward of an empty model calls its method for features: method, arguments,
    casts and options of a `Modality`."""
    inner: Any = tried.base_model
    method = f"get_{modality}_features"
    signature = inspect.signature(getattr(inner, method))
    given = _stand_ins(tried, signature)
    arguments: dict[str, str] = {}
    casts: set[str] = set()
    options: dict[str, Any] = {}

    def note(*args: Any, **kwargs: Any) -> NoReturn:
        for argument, value in signature.bind(*args, **kwargs).arguments.items():
            is_named = signature.parameters[argument].kind is not inspect.Parameter.VAR_KEYWORD
            if isinstance(value, torch.Tensor):
                for name, tensor in given.items():
                    if value.shape == tensor.shape:
                        arguments[name] = argument
                        if value.dtype != tensor.dtype:
                            casts.add(name)
            elif is_named and argument != "return_dict":
                options[argument] = value
        raise _Called

    name = type(tried).__name__
    with Patch(inner, **{method: note}):
        try:
            _run(tried, given)
        except _Called:
            if any(tensor.startswith("pixel_values") for tensor in arguments):
                found = {"method": method, "arguments": arguments, "options": options}
                return found | {"casts": frozenset(casts)}
            raise UnsupportedImages(
                f"the forward of {name} gives {method} something else than the tensors of an "
                "example"
            ) from None
        except FAULTS as error:
            reason = " ".join(str(error).split())
            raise UnsupportedImages(
                f"{name} could not be tried on {modality}s ({reason})"
            ) from error
    raise UnsupportedImages(f"the forward of {name} does not call {method}")


def _stand_ins(tried: PreTrainedModel, signature: inspect.Signature) -> dict[str, torch.Tensor]:
    """Return an empty tensor for each argument of a forward that its method for features may take,
    of a shape by which it is known."""
    names: set[str] = set()
    for forward in (type(tried).forward, type(tried.base_model).forward):
        names |= set(inspect.signature(forward).parameters)
    own = {one.name for one in signature.parameters.values() if "Tensor" in str(one.annotation)}
    given = {}
    for index, name in enumerate(sorted(own & names)):
        given[name] = torch.empty(1, 3, 1009 + index, 4, dtype=torch.float32, device="meta")
    return given


# ---- what is read


class _Noting(GivenFeatures):
    """Features whose fields are noted when they are read."""

    def __init__(self, is_list: bool, width: int) -> None:
        super().__init__(noted=True)  # forwards ask whether there are any
        rows = torch.empty(0, width, device="meta")
        self._value = (rows,) if is_list else rows.unsqueeze(0)
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.read.append(name)
        return [self._value] if name == OF_LAYERS else self._value


def _try_reads(tried: PreTrainedModel, modality: str) -> str:
    """Return which of ROWS the forward of an empty model reads of features. Raises
    UnsupportedImages if it reads others than those that can be sent."""
    read = []
    end = ""
    for is_list in (False, True):
        noting = _Noting(is_list, tried.config.get_text_config().hidden_size)
        try:
            _run(tried, {FEATURES: {modality: noting}})
        except FAULTS as error:  # It counts rows, and an empty model has no numbers.
            end = f"; the trial ended with {type(error).__name__}: {' '.join(str(error).split())}"
        read += noting.read
    others = sorted(set(read) - {*ROWS, OF_LAYERS})
    rows = sorted(set(read) & set(ROWS))
    name = type(tried).__name__
    if others:
        raise UnsupportedImages(
            f"the forward of {name} reads {', '.join(others)} of the features of {modality}s, "
            "which is more than a row for each token"
        )
    if len(rows) != 1:
        raise UnsupportedImages(
            f"the forward of {name} reads {' and '.join(rows) or 'none'} of {' and '.join(ROWS)}, "
            f"the rows of features of {modality}s; it must read one{end}"
        )
    return rows[0]


def _run(tried: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Run the forward of an empty model on a short sequence."""
    taken = inspect.signature(type(tried).forward).parameters
    types = [name for name in TYPES if name in taken]
    rehearse(tried, {**row_of("input_ids", "position_ids", *types), **given})


# ---- whether frames are independent


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
