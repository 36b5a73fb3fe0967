"""The documents of a step that is proven, with the lengths at which mistakes show.

    long          shared by all ranks under every plan, of a length that no degree divides
    one token     has no target
    prompt        begins as the long one does, which may be computed once for both; most labels are
                  ignored, so that documents count by their targets
    no target     all labels are ignored
    others        shorter than the number of ranks, equal to a window, packed beside each other

Documents with images are long by them: the first has two, the second begins with the same tokens
and the same image, one has three, and others have none. No processor is needed: images are drawn,
by `drawn_images.py` in the first form that the model takes.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.probe import usual_tokens
from hf_flexseq.hf.model.rehearsal import FAULTS
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.images import IMAGE, ImageSize
from hf_flexseq.prove.drawn_images import ImageForm, Tensors, image_forms
from hf_flexseq.steps.images import Image, UnsupportedImages

LENGTHS = (41, 23, 14, 3, 1, 11, 9, 12, 2, 13, 7, 5)
LONGEST = max(LENGTHS)
PROMPT, NO_TARGET = 1, 6  # indices of the documents with these labels
PROMPT_TOKENS = 17
COMMON_TOKENS = 19  # of the long document and of the prompt

IMAGE_COUNTS = (2, 1, 0, 1, 0, 3, 0, 0)
"""Images of each document of a step with images."""
ONE_IMAGE = (1, 0, 0, 0)
"""Of a step whose image leaves all ranks but one without any."""
WORDS = (7, 9, 14, 3, 1, 5, 11, 2)  # of the documents with images, before and after each image
PREFIX_MODELS = ("paligemma",)  # whose types are 0 up to the end of the prompt, and 1 after it

# Options that name the tokens before and after an image.
_STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
_ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")

Rows = list[dict[str, Any]]


def documents(config: Any, world_size: int) -> Rows:
    """Return as many documents for each rank, the same on every rank and in every run.

    config: of the model; no document has its special tokens.
    """
    usual = usual_tokens(config)
    drawn = random.Random(0)
    rows: Rows = []
    count = -(-len(LENGTHS) // world_size) * world_size
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = [drawn.choice(usual) for _ in range(length)]
        if index == PROMPT:
            ids[:COMMON_TOKENS] = rows[0]["input_ids"][:COMMON_TOKENS]
        labels = list(ids)
        if index == PROMPT:
            labels[:PROMPT_TOKENS] = [IGNORE_INDEX] * PROMPT_TOKENS
        if index == NO_TARGET:
            labels = [IGNORE_INDEX] * length
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def tokens_per_rank(rows: Rows, world_size: int) -> int:
    """Return a limit with which a step has several micro-batches, and the longest document is
    shared by all ranks."""
    lengths = [len(row["input_ids"]) for row in rows]
    return max(-(-max(lengths) // world_size), -(-sum(lengths) // (3 * world_size))) + 1


# ---- with images


class DrawnImages(NamedTuple):
    """The form of a model's images, and their tokens."""

    form: ImageForm
    """With the sides of images, one after the other."""
    model: PreTrainedModel
    vision: VisionModel
    placeholder: int
    """Token for a part of an image."""

    def draw(self, number: int) -> Tensors:
        """Return the tensors of an image, with values in the dtype of the model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            values = self.form.draw(self.form.sides[number % len(self.form.sides)])
        dtype = self.model.dtype
        return {n: v.to(dtype) if v.is_floating_point() else v for n, v in values.items()}

    def tokens(self, image: Tensors) -> list[int]:
        """Return the tokens of an image: as many as the tower makes rows of it alone."""
        nothing = {"sequence": 0, "tokens": 0, "patches": 0, "pairs": 0, "data_bytes": 0}
        one = Image(size=ImageSize(modality=IMAGE, **nothing), arguments=image)
        with torch.no_grad():
            rows = len(self.vision.features_of(one))
        start, end = (_first_of(self.model.config, names) for names in (_STARTS, _ENDS))
        return [*start, *[self.placeholder] * rows, *end]


def _first_of(config: Any, names: Sequence[str]) -> list[int]:
    """Return the token of the first of some options that a configuration has; [] without any."""
    tokens = [getattr(config, name, None) for name in names]
    return [token for token in tokens if token is not None][:1]


def drawn_images(
    model: PreTrainedModel, call: Callable[[PreTrainedModel, dict[str, Any]], Any]
) -> DrawnImages:
    """Return how the images of a model look. call: runs a model on a row, on one process.

    Raises UnsupportedImages for a model that takes no images, or none of the forms that are drawn
    here.
    """
    vision = VisionModel(model)
    if IMAGE not in vision.modalities:
        raise UnsupportedImages(f"it takes {' and '.join(vision.modalities)}s alone")
    if getattr(model.config, "vision_config", None) is None:
        raise UnsupportedImages("its configuration has no vision_config")
    said: list[str] = []
    for form in image_forms(model.config, vision.arguments_of(IMAGE)):
        for count in (2, 1):  # of sizes; not every tower takes several
            fewer = form._replace(sides=form.sides[:count])
            drawn = DrawnImages(fewer, model, vision, _placeholder(model))
            try:
                row = image_documents(drawn, counts=(2,))[0]
                with torch.no_grad():
                    call(model, row)
            except FAULTS as error:
                said.append(" ".join(str(error).split()))
                continue
            return drawn
    reason = said[0] if said else "its images are of a form that is not drawn here"
    raise UnsupportedImages(f"no image could be drawn for its tower ({reason})")


def _placeholder(model: PreTrainedModel) -> int:
    (token,) = _first_of(model.config, ("image_token_id", "image_token_index"))
    return token


def image_documents(drawn: DrawnImages, counts: Sequence[int], world_size: int = 1) -> Rows:
    """Return documents with so many images each, the same on every rank and in every run: as many
    for each rank."""
    usual = usual_tokens(drawn.model.config)
    rng = random.Random(0)
    types = _names_of_types(drawn.model)
    first: list[int] = []  # tokens of the first document up to the end of its first image
    first_image: Tensors = {}
    so_far = 0  # images
    rows: Rows = []
    for index in range(-(-len(counts) // world_size) * world_size):
        words = WORDS[index % len(WORDS)]
        ids: list[int] = []
        images = []
        for number in range(counts[index % len(counts)]):
            image = drawn.draw(so_far)
            so_far += 1
            if index == PROMPT and number == 0:  # it begins as the first document does
                ids, image = list(first), first_image
            else:
                ids += [rng.choice(usual) for _ in range(words)]
                ids += drawn.tokens(image)
            if index == number == 0:
                first, first_image = list(ids), image
            images.append(image)
        ids += [rng.choice(usual) for _ in range(words)]
        known = set(usual)
        row: dict[str, Any] = {
            "input_ids": ids,
            "labels": [token if token in known else IGNORE_INDEX for token in ids],
        }
        for name in types:
            row[name] = _types_of(ids, drawn)
        if images:
            row |= _joined(images)
        rows.append(row)
    return rows


def _joined(images: Sequence[Tensors]) -> Tensors:
    """Return the tensors of an example with several images."""
    along = dict.fromkeys(images[0], 0)
    pixels = images[0]["pixel_values"]
    if "target_sizes" in along:  # patches stand side by side
        along["pixel_values"] = pixels.dim() - 1
    elif pixels.dim() == 5 and pixels.shape[1] == 1:  # a dimension for the images of an example
        along = {name: int(value.dim() > 2) for name, value in images[0].items()}
    return {name: torch.cat([one[name] for one in images], dim=dim) for name, dim in along.items()}


def _names_of_types(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's columns of token types."""
    names: set[str] = set()
    for one in (model, model.base_model):
        names |= set(inspect.signature(type(one).forward).parameters)
    return sorted(name for name in names if name.endswith("token_type_ids"))


def _types_of(ids: list[int], drawn: DrawnImages) -> list[int]:
    """Return the column of types that the family's processor would make."""
    if drawn.model.config.model_type not in PREFIX_MODELS:
        return [int(token == drawn.placeholder) for token in ids]
    last = max((at for at, token in enumerate(ids) if token == drawn.placeholder), default=-1)
    return [int(at > last + 2) for at in range(len(ids))]
