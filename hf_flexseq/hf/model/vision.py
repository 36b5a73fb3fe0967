"""Images of vision-language models: what examples bring of them, and how the model gets their
features.

transformers' models for images have a method for each modality, `get_image_features` and
`get_video_features`, which run the tower and the projector. Their `forward` takes the results as
`mm_encoder_outputs` and puts row after row at the tokens that stand for images. So a rank with a
part of a sequence gives the model the rows of its own tokens, and the model itself is unchanged:

    read       which tensors of an example belong to which image, how many tokens stand for it, and
               the positions of all tokens, which the model counts on whole sequences
    encode     runs the tower on images, of any sequences
    attached   gives every micro-batch's features to the model, inside its own call, so that
               autocast and the hooks of DDP, FSDP2 and ZeRO hold
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.hf.model.image_masks import MasksOfImages, UnsupportedImages
from hf_flexseq.hf.model.image_rows import KINDS, NUMBERS, images_of_rows
from hf_flexseq.hf.model.images import placeholders_of
from hf_flexseq.hf.model.noise import has_noise
from hf_flexseq.hf.model.towers import tower_parameters
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.images import MODALITIES, ImageSize
from hf_flexseq.steps.calls import Call
from hf_flexseq.steps.drawn import SourceRow
from hf_flexseq.steps.image_parts import batches_of, grid_of, parts_of
from hf_flexseq.steps.images import TYPES, Image, RowImages

_FEATURES = "mm_encoder_outputs"
_POSITIONS = "get_rope_index"  # the method of models whose positions have three axes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Modality:
    """How a model takes images, or videos."""

    name: str
    method: str
    """Name of the method that encodes them."""
    arguments: tuple[str, ...]
    """Names of what it takes of them."""
    placeholder: int
    """Token that stands for a part of one."""


class VisionModel:
    """The images of one model, before and while it trains."""

    def __init__(self, base: PreTrainedModel) -> None:
        """Raises UnsupportedImages for a model without the methods that are needed."""
        self._inner: Any = base.base_model
        self._tower = tower_parameters(base)
        self._modalities = {one.name: one for one in _modalities(base)}
        self._masks = MasksOfImages(base)
        self.both_ways = self._masks.layers
        """Numbers of the layers in which the tokens of an image see each other both ways."""
        taken = {one.placeholder for one in self._modalities.values()}
        self._others = {n: t for n, t in placeholders_of(base.config).items() if t not in taken}
        self._positions = getattr(self._inner, _POSITIONS, None)
        self._patch = _patch_size(base.config)
        self._forms: dict[str, _Form] = {}

    # ---- what examples bring

    def read(self, row: SourceRow) -> SourceRow:
        """Return a row with its images as the model takes them. Raises ValueError for tensors that
        the model does not take, and for images that do not fit their tokens."""
        placeholders = {one.name: one.placeholder for one in self._modalities.values()}
        images: list[Image] = []
        blocks = {}
        positions = []
        none: Mapping[str, torch.Tensor] = {}
        given = row.given_images or [none for _ in row.lengths]
        stop = 0
        for sequence, (length, tensors) in enumerate(zip(row.lengths, given, strict=True)):
            start, stop = stop, stop + length
            ids = row.columns["input_ids"][start:stop]
            types = {n: row.columns[n][start:stop] for n in TYPES if n in row.columns}
            try:
                own = self._images_of(sequence, ids, tensors)
                of_sequence = self._masks.blocks(types, has_images=bool(own))
            except ValueError as error:
                raise ValueError(f"sequence {sequence} of this rank's step: {error}") from error
            images += own
            if of_sequence:
                blocks[sequence] = of_sequence
            if self._positions is not None and row.given_images:
                positions.append(self._positions_of(ids, tensors))
        known = RowImages(
            images=tuple(images),
            placeholders=placeholders,
            has_axes=self._positions is not None,
            blocks=blocks,
            positions=torch.cat(positions) if positions else None,
        )
        return replace(row, images=known)

    def _images_of(
        self, sequence: int, ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> list[Image]:
        """Return the images of a sequence. ids: [tokens]. tensors: what the example brings."""
        self._check_names(tensors)
        for name, token in self._others.items():
            if (ids == token).any():
                raise ValueError(
                    f"it has the token {token}, config.{name}: the model takes text and "
                    f"{' and '.join(self._modalities)}s here"
                )
        images = []
        for modality in self._modalities.values():
            own = {name: tensors[name] for name in modality.arguments if name in tensors}
            tokens = int((ids == modality.placeholder).sum())
            if not own and not tokens:
                continue
            if not own or not tokens:
                raise ValueError(
                    f"it has {tokens} tokens {modality.placeholder}, which stand for parts of "
                    f"{modality.name}s, and {', '.join(own) or 'no pixels'}: cut examples neither "
                    "in the middle nor without their images"
                )
            images += self._split(sequence, modality.name, own, tokens)
        return images

    def _check_names(self, tensors: Mapping[str, torch.Tensor]) -> None:
        known = {name for one in self._modalities.values() for name in one.arguments}
        if self._positions is not None:
            known |= set(inspect.signature(self._positions).parameters)
        unknown = sorted(set(tensors) - known)
        if unknown:
            raise ValueError(
                f"it has {', '.join(unknown)}, which {type(self._inner).__name__} does not take "
                f"for images (it takes {', '.join(sorted(known))}); leave the columns out"
            )

    def _split(
        self, sequence: int, modality: str, tensors: dict[str, torch.Tensor], tokens: int
    ) -> list[Image]:
        """Return the images of one modality, of which `tokens` stand for all. They are one where
        their tokens cannot be told apart."""
        parts, weights = parts_of(tensors)
        total = sum(weights)
        counts = [tokens * weight // total for weight in weights]
        if any(tokens * weight % total for weight in weights):
            parts, counts = [tensors], [tokens]
        images = []
        for own, count in zip(parts, counts, strict=True):
            patches, pairs = self._work_of(own)
            images.append(
                Image(
                    sequence=sequence,
                    modality=modality,
                    arguments=own,
                    tokens=count,
                    patches=patches,
                    pairs=pairs,
                )
            )
        return images

    def _work_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Return the patches of an image, and the pairs of patches that attend to each other."""
        grid = grid_of(tensors)
        if grid is not None:
            frames = grid[:, :-2].prod(dim=-1)
            of_frame = grid[:, -2:].prod(dim=-1)
            return int((frames * of_frame).sum()), int((frames * of_frame**2).sum())
        pixels = next(value for name, value in tensors.items() if name.startswith("pixel_values"))
        if pixels.dim() >= 4:  # [..., channels, height, width]
            of_frame = max(1, pixels.shape[-1] * pixels.shape[-2] // self._patch**2)
            frames = pixels.shape[:-3].numel()
        else:  # [..., patches, values of a patch]
            of_frame = pixels.shape[-2]
            frames = pixels.shape[:-2].numel()
        return frames * of_frame, frames * of_frame**2

    def _positions_of(
        self, ids: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return positions of a sequence's tokens in time, height and width, [tokens, 3]."""
        if not tensors:
            return torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
        assert self._positions is not None, "the model counts positions itself"
        types = torch.zeros_like(ids)
        for name, modality in self._modalities.items():
            types[ids == modality.placeholder] = NUMBERS[name]
        given = {"input_ids": ids.unsqueeze(0), KINDS: types.unsqueeze(0), **tensors}
        taken = inspect.signature(self._positions).parameters
        positions, _ = self._positions(**{n: v for n, v in given.items() if n in taken})
        return positions[:, 0].T.contiguous()  # [3, 1, tokens] -> [tokens, 3]

    def of_rows(self, call: Call) -> list[dict[str, torch.Tensor]]:
        """Return the tensors of each row of a padded batch. Raises ValueError where it is not
        known which images belong to which row."""
        modalities = self._modalities.values()
        placeholders = {one.name: one.placeholder for one in modalities}
        return images_of_rows(call, placeholders, {one.name: one.arguments for one in modalities})

    # ---- the tower

    @property
    def is_trained(self) -> bool:
        """True if a parameter outside of the text model gets gradients."""
        return any(parameter.requires_grad for parameter in self._tower)

    def forget_gradients(self) -> None:
        """Set the tower's gradients under ZeRO-3 to 0, before a step. DeepSpeed overwrites
        gradients in the first micro-batch of a step alone and adds to them in later ones; those of
        the tower come with the last, and in a step without images not at all."""
        for parameter in self._tower:
            if parameter.requires_grad and hasattr(parameter, "_z3_optimizer"):
                from deepspeed.utils import safe_set_local_grad  # there is one where it shards

                safe_set_local_grad(parameter, torch.zeros_like(parameter.ds_tensor))

    @property
    def draws_noise(self) -> bool:
        """True if the tower draws random numbers, as for dropout, each time that it runs."""
        return has_noise(self._inner, self._inner.config)

    def calls(self, images: Sequence[Image]) -> int:
        """Return how often the tower is called for `images`."""
        return len(batches_of(images))

    def encode(self, images: Sequence[Image], calls: int) -> torch.Tensor:
        """Return the features of all tokens of `images`, [tokens, width], one image after the
        other; those of layers stand beside those of the embedding. calls: see `Tower`."""
        batches = batches_of(images)
        encoded: dict[int, torch.Tensor] = {}
        for together in batches:
            rows = self._encode_together([images[index] for index in together])
            sizes = [images[index].tokens for index in together]
            encoded.update(zip(together, rows.split(sizes), strict=True))
        parts = [encoded[index] for index in range(len(images))]
        tokens = sum(len(part) for part in parts)
        for _ in range(calls - len(batches)):
            parts.append(self._encode_together(images[:1]))
        return torch.cat(parts)[:tokens]

    def _encode_together(self, images: Sequence[Image]) -> torch.Tensor:
        """Return the features of images that one call of the tower takes, [tokens, width]."""
        modality = self._modalities[images[0].modality]
        device = self._inner.device
        arguments = {}
        for name in images[0].arguments:
            joined = torch.cat([image.arguments[name] for image in images])
            arguments[name] = to_device(joined, device)
        outputs = getattr(self._inner, modality.method)(**arguments, return_dict=True)
        form, streams = _Form.of(outputs)
        self._forms[modality.name] = form
        wanted = sum(image.tokens for image in images)
        for stream in streams:
            if len(stream) != wanted:
                raise ValueError(
                    f"{type(self._inner).__name__} makes {len(stream)} rows of features of "
                    f"{len(images)} {modality.name}s, for which {wanted} tokens stand: let the "
                    "model's own processor make the examples"
                )
        return torch.cat(streams, dim=1)

    # ---- the model

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Give the model the features of each micro-batch inside the block."""
        begin = self._inner.register_forward_pre_hook(self._give, with_kwargs=True)
        try:
            yield
        finally:
            begin.remove()

    def _give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the features of a micro-batch to the arguments of a call."""
        images = getattr(kwargs.get("seq_ctx"), "images", None)
        if images is None:
            return None
        outputs = {}
        for name, rows in images.features(self).items():
            # A rank may have encoded images alone, and need rows of a video.
            form = self._forms.get(name) or next(iter(self._forms.values()))
            outputs[name] = form.outputs(rows)
        return args, {**kwargs, _FEATURES: outputs}


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionReader:
    """Reads images as a model takes them, and counts their memory; see `ImageReader`."""

    model: VisionModel
    tower: TowerCost
    token_bytes: float
    """Bytes of a token of text."""
    world_size: int

    def read(self, row: SourceRow) -> SourceRow:
        """See `VisionModel.read`."""
        return self.model.read(row)

    @property
    def draws_noise(self) -> bool:
        """See `VisionModel.draws_noise`."""
        return self.model.draws_noise

    def held_tokens(self, images: Sequence[ImageSize]) -> int:
        """Return the tokens whose memory the images of a step take on a rank."""
        if not images:
            return 0
        placement = self.tower.placed(images, self.world_size)
        return self.tower.held_tokens(images, placement, self.token_bytes)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of the features that a model's forward reads."""

    kind: type[ModelOutput]
    """Class of the outputs."""
    is_list: bool
    """True if they are a tensor for each image, instead of one for all."""
    widths: tuple[int, ...]
    """Values of a row: of the embedding, then of each layer that gets features of its own."""

    @classmethod
    def of(cls, outputs: Any) -> tuple["_Form", list[torch.Tensor]]:
        """Return the form of a method's outputs, and its streams of rows, [rows, width] each."""
        pooled = outputs.pooler_output
        of_layers = getattr(outputs, "deepstack_features", None) or ()
        streams = [_rows(value) for value in (pooled, *of_layers)]
        widths = tuple(stream.shape[1] for stream in streams)
        return cls(type(outputs), not isinstance(pooled, torch.Tensor), widths), streams

    def outputs(self, rows: torch.Tensor) -> ModelOutput:
        """Return rows [rows, width] as a method's outputs."""
        given = list(rows.split(self.widths, dim=1))
        if self.is_list:
            given = [(stream,) for stream in given]
        made = self.kind(pooler_output=given[0])
        if len(given) > 1:
            made["deepstack_features"] = given[1:]
        return made


def _rows(value: Any) -> torch.Tensor:
    """Return features of one image or of several as rows, [rows, width]."""
    parts = [value] if isinstance(value, torch.Tensor) else list(value)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


# ---- what a model has


def _modalities(base: PreTrainedModel) -> list[_Modality]:
    """Return the modalities of a model. Raises UnsupportedImages without any."""
    inner = base.base_model
    name = type(base).__name__
    if _FEATURES not in inspect.signature(inner.forward).parameters:
        raise UnsupportedImages(f"{name} does not take {_FEATURES}")
    found = []
    for modality in MODALITIES:
        method = getattr(inner, f"get_{modality}_features", None)
        placeholder = _placeholder(base.config, modality)
        if method is None or placeholder is None:
            continue
        parameters = inspect.signature(method).parameters.values()
        named = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        found.append(
            _Modality(
                name=modality,
                method=method.__name__,
                arguments=tuple(named),
                placeholder=placeholder,
            )
        )
    if not found:
        raise UnsupportedImages(f"{name} has no method for features of images, or no token")
    return found


def _placeholder(config: Any, modality: str) -> int | None:
    for option in (f"{modality}_token_id", f"{modality}_token_index"):
        token: int | None = getattr(config, option, None)
        if token is not None:
            return token
    return None


def _patch_size(config: Any) -> int:
    """Return the width of a patch in pixels, for what a tower costs."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", 14)
    if isinstance(size, (list, tuple)):
        size = size[-1]
    return int(size or 14)
