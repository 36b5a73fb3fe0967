"""Images of vision-language models: the tensors that examples bring, and how the model gets their
features.

transformers' models for images have a method for each modality, `get_image_features` and
`get_video_features`, which run the tower and the projector. Their `forward` takes the results as
`mm_encoder_outputs` and puts row after row at the tokens that stand for images. So a rank with a
part of a sequence gives the model the rows of its own tokens, and the model itself is unchanged:

    read       which tensors of an example belong to which image, how many tokens stand for it, and
               the positions of all tokens, which the model counts on whole sequences; long videos
               whose frames the model encodes independently are divided into several images
    encode     runs the tower on images, of any sequences
    attached   gives every micro-batch's features to the model, inside its own call, so that
               autocast and the hooks of DDP, FSDP2 and ZeRO hold
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.hf.model.facts import adapter_states
from hf_flexseq.hf.model.image_masks import MasksOfImages
from hf_flexseq.hf.model.rehearsal import FAULTS
from hf_flexseq.hf.model.tower_trial import FEATURES, VideoParts, try_features
from hf_flexseq.hf.model.towers import (
    modules_outside_text,
    patch_size,
    placeholders_of,
    tower_parameters,
    towers_draw_noise,
)
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.early_encoding import Weights, first_values, weights_of
from hf_flexseq.steps.feature_form import FeatureForm, fits
from hf_flexseq.steps.image_parts import batches_of, grid_of, images_in
from hf_flexseq.steps.image_rows import KINDS, NUMBERS, images_of_rows
from hf_flexseq.steps.images import TYPES, Image, RowImages, UnsupportedImages, data_bytes_of
from hf_flexseq.steps.source_row import SourceRow

_POSITIONS = "get_rope_index"  # the method of models whose positions have several axes


class VisionModel:
    """The images of one model, before and while it trains."""

    def __init__(self, base: PreTrainedModel) -> None:
        """Raises UnsupportedImages for a model without the methods that are needed."""
        self._inner: Any = base.base_model
        self._base = base
        self._modalities = {one.name: one for one in try_features(base)}
        self._takes_embedding = any(one.takes_embedding for one in self._modalities.values())
        self._masks = MasksOfImages(base)
        _check_norms(base)
        self.both_ways = self._masks.layers
        """Numbers of the layers in which the tokens of an image see each other both ways."""
        taken = {one.placeholder for one in self._modalities.values()}
        self._others = {n: t for n, t in placeholders_of(base.config).items() if t not in taken}
        self._positions = getattr(self._inner, _POSITIONS, None)
        self._axes, self._positions_dtype = self._kind_of_positions()
        self._patch = patch_size(base.config)
        self._forms: dict[str, FeatureForm] = {}
        self._agreed: set[str] = set()  # modalities whose form all ranks know
        self._videos = VideoParts(base)

    @property
    def modalities(self) -> list[str]:
        """Names of the modalities that it takes, of `plan.images.MODALITIES`."""
        return list(self._modalities)

    def arguments_of(self, modality: str) -> list[str]:
        """Return the names of the tensors that examples bring of a modality."""
        return list(self._modalities[modality].arguments)

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
                own = self._images_of(sequence, ids, tensors, types.get(KINDS))
                of_sequence = self._masks.blocks(types, has_images=bool(own))
                if self._positions is not None and row.given_images:
                    given_positions = row.columns["position_ids"][start:stop]
                    positions.append(self._positions_of(ids, tensors, given_positions))
            except ValueError as error:
                raise ValueError(f"sequence {sequence} of this rank's step: {error}") from error
            images += own
            if of_sequence:
                blocks[sequence] = of_sequence
        known = RowImages(
            images=tuple(images),
            placeholders=placeholders,
            axes=self._axes,
            positions_dtype=self._positions_dtype,
            blocks=blocks,
            positions=torch.cat(positions) if positions else None,
        )
        return replace(row, images=known)

    def _images_of(
        self,
        sequence: int,
        ids: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        types: torch.Tensor | None,
    ) -> list[Image]:
        """Return the images of a sequence. ids: [tokens]. tensors: of the example, by name. types:
        [tokens] the column KINDS, if it has one."""
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
            is_part = ids == modality.placeholder
            tokens = int(is_part.sum())
            # A model may sample the token: its type is that of text, which it is read as.
            is_text = types is not None and not types[is_part].any()
            if not own and (not tokens or is_text):
                continue
            if not tokens or not any(name.startswith("pixel_values") for name in own):
                raise ValueError(
                    f"it has {tokens} tokens {modality.placeholder}, which stand for parts of "
                    f"{modality.name}s, and {', '.join(own) or 'no pixels'}: cut examples neither "
                    "in the middle nor without their images"
                )
            parts = []
            for tensors_of_one, count in images_in(own, is_part):
                parts += self._videos.parts(modality, tensors_of_one, count)
            for part, count in parts:
                patches, pairs = self.work_of(part)
                size = ImageSize(
                    sequence=sequence,
                    modality=modality.name,
                    tokens=count,
                    patches=patches,
                    pairs=pairs,
                    data_bytes=data_bytes_of(part),
                )
                images.append(Image(size=size, arguments=part))
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

    def work_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
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
        self, ids: torch.Tensor, tensors: Mapping[str, torch.Tensor], given_positions: torch.Tensor
    ) -> torch.Tensor:
        """Return positions of a sequence's tokens on all axes, [tokens, axes]. given_positions:
        [tokens], the column of the example, or the tokens' numbers."""
        if not tensors:
            own = given_positions.to(self._positions_dtype)
            return own.unsqueeze(1).expand(-1, self._axes)
        if (given_positions != torch.arange(len(ids))).any():
            raise ValueError(
                "it has position_ids, and the model counts those of examples with images itself: "
                "leave the column out"
            )
        types = torch.zeros_like(ids)
        for name, modality in self._modalities.items():
            if tensors.keys() & set(modality.arguments):
                types[ids == modality.placeholder] = NUMBERS[name]
        columns = {"input_ids": ids, KINDS: types, "attention_mask": types * 0 + 1}
        given = {name: column.unsqueeze(0) for name, column in columns.items()} | dict(tensors)
        positions = self._counted(given)
        if positions.dtype != self._positions_dtype:  # that of rows without images
            raise ValueError(
                f"{type(self._inner).__name__}.{_POSITIONS} counts in {positions.dtype} beside "
                f"images, and in {self._positions_dtype} in text: train on text alone"
            )
        return positions[:, 0].T.contiguous()  # [axes, 1, tokens] -> [tokens, axes]

    def _counted(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the model's own positions [axes, 1, tokens]. given: arguments of which its method
        takes some."""
        assert self._positions is not None, "the model counts positions itself"
        taken = inspect.signature(self._positions).parameters
        positions: torch.Tensor = self._positions(**{n: given[n] for n in taken if n in given})[0]
        return positions

    def _kind_of_positions(self) -> tuple[int, torch.dtype]:
        """Return how many axes positions have, such as time, height and width, and of which dtype
        they are; no axes for a model whose positions are one number."""
        if self._positions is None:
            return 0, torch.int64
        text = torch.zeros(1, 2, dtype=torch.int64)
        try:
            positions = self._counted({"input_ids": text, KINDS: text, "attention_mask": text + 1})
        except FAULTS as error:
            raise UnsupportedImages(
                f"{type(self._inner).__name__}.{_POSITIONS} fails on text ({error})"
            ) from error
        return len(positions), positions.dtype

    def of_rows(self, call: ModelCall) -> list[dict[str, torch.Tensor]]:
        """Return the tensors of each row of a padded batch. Raises ValueError where it is not
        known which images belong to which row."""
        modalities = self._modalities.values()
        placeholders = {one.name: one.placeholder for one in modalities}
        arguments = {one.name: tuple(one.arguments) for one in modalities}
        return images_of_rows(call, placeholders, arguments)

    # ---- the tower

    @property
    def has_separate_towers(self) -> bool:
        """True if modalities are encoded by modules of which each lacks some of the other's."""
        parts = [one.parts for one in self._modalities.values() if one.parts]
        return any(some - others and others - some for some, others in combinations(parts, 2))

    @cached_property
    def _tower(self) -> list[nn.Parameter]:
        """Its parameters, as they are once the model is prepared: those from before would be kept
        whole beside FSDP2's shards."""
        return tower_parameters(self._base)

    @property
    def is_trained(self) -> bool:
        """True if a parameter outside of the text model gets gradients, or one of the embedding
        of which a tower takes its features."""
        if self._takes_embedding and self._embedding_is_trained:
            return True
        return any(parameter.requires_grad for parameter in self._tower)

    @property
    def weights(self) -> Weights:
        """Marks of the parameters that features depend on, and of active adapters: they differ
        once parameters have been changed, or adapters switched."""
        return weights_of(self._read), adapter_states(modules_outside_text(self._base))

    def first_values(self) -> torch.Tensor:
        """Return the first value of each parameter that features depend on, [parameters]."""
        return first_values(self._read)

    @property
    def _read(self) -> list[nn.Parameter]:
        """The parameters that features depend on."""
        if not self._takes_embedding:
            return self._tower
        return [*self._tower, *self._inner.get_input_embeddings().parameters()]

    @property
    def _embedding_is_trained(self) -> bool:
        embedding = self._inner.get_input_embeddings()
        return any(parameter.requires_grad for parameter in embedding.parameters())

    def forget_gradients(self) -> None:
        """Set the tower's gradients under ZeRO-3 to 0, before a step. DeepSpeed overwrites
        gradients in the first micro-batch of a step alone and adds to them in later ones; the
        tower's gradients come with the last, and in a step without images not at all."""
        for parameter in self._tower:
            if parameter.requires_grad and hasattr(parameter, "_z3_optimizer"):
                from deepspeed.utils import safe_set_local_grad  # there is one where it shards

                safe_set_local_grad(parameter, torch.zeros_like(parameter.ds_tensor))

    @cached_property
    def draws_noise(self) -> bool:
        """True if the tower draws random numbers, as for dropout, each time that it runs; known
        from the first look on."""
        return towers_draw_noise(self._base)

    def calls(self, images: Sequence[Image]) -> int:
        """Return how often the tower is called for `images`."""
        return len(batches_of(images))

    def encode(self, images: Sequence[Image], calls: int) -> torch.Tensor:
        """Return the features of all tokens of `images`, [tokens, width], one image after the
        other. A row has the embedding's features first, then the features of each layer that gets
        its own. calls: see `Tower`."""
        batches = batches_of(images)
        encoded: dict[int, torch.Tensor] = {}
        for together in batches:
            rows = self._encode_together([images[index] for index in together])
            sizes = [images[index].size.tokens for index in together]
            encoded.update(zip(together, rows.split(sizes), strict=True))
        parts = [encoded[index] for index in range(len(images))]
        tokens = sum(len(part) for part in parts)
        for _ in range(calls - len(batches)):
            parts.append(self._encode_together(images[:1]))
        return torch.cat(parts)[:tokens]

    def features_of(self, image: Image) -> torch.Tensor:
        """Return the features of an image, [rows, width], whose tokens are not known yet: as many
        as there are rows."""
        _, streams = FeatureForm.of(
            self._outputs([image]), self._modalities[image.size.modality].rows
        )
        return torch.cat(streams, dim=1)

    def _outputs(self, images: Sequence[Image]) -> Any:
        """Return the outputs of the model's method for features, called once on `images`."""
        modality = self._modalities[images[0].size.modality]
        arguments = dict(modality.options)
        for name in images[0].arguments:
            joined = torch.cat([image.arguments[name] for image in images])
            value = to_device(joined, self._inner.device)
            if name in modality.casts:
                value = value.to(self._inner.dtype)
            arguments[modality.arguments[name]] = value
        with self._embedding_refused():
            return getattr(self._inner, modality.method)(**arguments, return_dict=True)

    def _encode_together(self, images: Sequence[Image]) -> torch.Tensor:
        """Return the features of images that one call of the tower takes, [tokens, width]."""
        modality = self._modalities[images[0].size.modality]
        outputs = self._outputs(images)
        form, streams = FeatureForm.of(outputs, modality.rows)
        self._forms[modality.name] = form
        counts = [image.size.tokens for image in images]
        if not fits(getattr(outputs, modality.rows), counts):
            raise ValueError(
                f"{type(self._inner).__name__} makes {len(streams[0])} rows of features of "
                f"{len(images)} {modality.name}s, for which {' + '.join(map(str, counts))} tokens "
                "stand: let the model's own processor make the examples"
            )
        return torch.cat(streams, dim=1)

    @contextmanager
    def _embedding_refused(self) -> Iterator[None]:
        """Refuse a frozen tower inside the block whose features come from the text's embedding:
        they would be made without gradients."""
        if self.is_trained or not self._embedding_is_trained:
            yield
            return

        def refuse(*args: Any) -> NoReturn:
            raise UnsupportedImages(
                f"{type(self._inner).__name__} takes features from its embedding, which is "
                "trained while the tower is frozen: freeze both, or none"
            )

        with self._inner.get_input_embeddings().register_forward_pre_hook(refuse):
            yield

    def agree(self, modalities: Collection[str], cpu_group: CpuGroup) -> None:
        """Learn the form of the features of all `modalities` from the ranks that have encoded
        them. Collective over the world."""
        if set(modalities) <= self._agreed:
            return
        known = {name: astuple(form) for name, form in self._forms.items()}
        for of_rank in cpu_group.gather_values(known):
            for name, (field, is_list, leading, widths) in of_rank.items():
                self._forms[name] = FeatureForm(field, is_list, leading, tuple(widths))
        self._agreed.update(modalities)

    # ---- the model

    def attached(self) -> AbstractContextManager[Any]:
        """Give the model the features of each micro-batch inside a block."""
        hook: AbstractContextManager[Any] = self._inner.register_forward_pre_hook(
            self._give, with_kwargs=True
        )
        return hook

    def _give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the features of a micro-batch to the arguments of a call."""
        images = getattr(kwargs.get("seq_ctx"), "images", None)
        if images is None:
            return None
        outputs = {}
        for name, rows in images.features(self).items():
            outputs[name] = self._forms[name].features(rows)
        return args, {**kwargs, FEATURES: outputs}


# ---- what a model has


def _check_norms(base: PreTrainedModel) -> None:
    """Raise UnsupportedImages for a model whose features depend on which images a call has."""
    for name, module in base.named_modules():
        if isinstance(module, _BatchNorm):
            raise UnsupportedImages(
                f"{name} of {type(base).__name__} normalizes over all images of a call (batch "
                "norm), so features of an image would depend on the others"
            )
