"""Try the vision tower of a model on drawn images without memory: which images it takes, and what
autograd saves for its backward.

A copy of the model has fake parameters, of which shapes alone are known, and images are real.
What depends on parameters is fake, too; everything else, such as the numbers of patches, is
computed, since towers need these numbers. Tensors that are saved are counted by storage. The
bytes of a patch are those that the second of two equal images adds, so that nothing counts that
does not grow with the images, such as copies that autocast makes of weights.

Of layers that are alike one runs for all; the others pass their input on. Checkpointed layers keep
their inputs, and one of them holds all of its bytes in its backward.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_flexseq.hf.calibration.drawn_images import ImageForm, image_forms
from hf_flexseq.hf.calibration.fake_model import CPU, fake_copy, without_complaints
from hf_flexseq.hf.calibration.layer_trial import pass_on, signature_of
from hf_flexseq.hf.model.equal_models import text_of
from hf_flexseq.hf.model.facts import ModelFacts
from hf_flexseq.hf.model.meta_model import without_sharding
from hf_flexseq.hf.model.towers import ADAPTERS, attention_of_tower, tower_parameters, train_tower
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.images import IMAGE
from hf_flexseq.steps.images import Image, UnsupportedImages

logger = logging.getLogger(__name__)

# Patches of the images whose bytes are counted, about.
_COUNTED_PATCHES = 64
# Attention that runs on fake tensors. The first keeps what FlashAttention keeps.
_ON_SHAPES = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedTower:
    """What a trial has shown."""

    form: ImageForm
    """How images are drawn."""
    patches: tuple[int, ...]
    """Patches of the images that can be drawn, ascending, as they are counted in training."""
    patches_per_token: float
    """Patches that are merged into one token of the text model."""
    patch_bytes: float
    """Bytes that are held of a patch from forward to backward; 0 for a frozen tower."""
    token_bytes: float
    """Bytes of the features of one token, with their gradients."""

    def draw(self, patches: int) -> Image:
        """Return an image of so many patches, drawn without the run's random numbers."""
        with torch.random.fork_rng(devices=[]):
            tensors = self.form.draw(patches)
        return _image(tensors, round(patches / self.patches_per_token))


def _image(tensors: dict[str, torch.Tensor], tokens: int) -> Image:
    return Image(sequence=0, modality=IMAGE, arguments=tensors, tokens=tokens, patches=0, pairs=0)


_known: dict[object, TriedTower | str] = {}


def try_tower(facts: ModelFacts) -> TriedTower | None:
    """Return what a trial shows of the tower of a model; None where it cannot be tried, or is not
    there. Equal towers are tried once in a process."""
    if facts.shape.tower is None:
        return None
    key = (
        *(facts.kind, text_of(facts.config), facts.checkpointing, facts.trained_tower),
        *(facts.dtype_in_training, facts.autocast, attention_of_tower(facts.config)),
    )
    if key not in _known:
        try:
            with without_complaints(), torch.random.fork_rng(devices=[]):
                _known[key] = _try(facts)
        except Exception as error:  # a run that would train does not end for it
            _known[key] = " ".join(str(error).split()) or type(error).__name__
    found = _known[key]
    if isinstance(found, str):
        logger.info(
            "the vision tower of %s is priced by its configuration, since it does not run on "
            "drawn images: %s",
            facts.kind.__name__,
            found,
        )
        return None
    return found


def _try(facts: ModelFacts) -> TriedTower:
    """Try a tower in the first form of images that works. Raises UnsupportedImages without any,
    and whatever making a copy raises."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    config = copy.deepcopy(facts.config)
    if attention_of_tower(config) not in (None, *_ON_SHAPES):
        config.vision_config._attn_implementation = _ON_SHAPES[0]
    with torch.device("meta"), without_sharding():
        made = facts.kind(config)
    model = fake_copy(made, facts.dtype_in_training, mode)
    train_tower(model, facts.trained_tower)
    if ADAPTERS in facts.trained_tower:  # which keep what trained weights keep
        for parameter in tower_parameters(model):
            parameter.requires_grad_()
    vision = VisionModel(model)
    if IMAGE not in vision.modalities:
        raise UnsupportedImages(f"{facts.kind.__name__} takes no images")
    trial = TowerTrial(model, vision, mode, facts.autocast)
    problems = []
    for form in image_forms(facts.config, vision.arguments_of(IMAGE)):
        try:
            return trial.of_form(form, checkpointing=facts.checkpointing)
        except Exception as error:
            problems.append(" ".join(str(error).split()))
    unknown = "its images are of a form that is not drawn here"
    raise UnsupportedImages("; ".join(dict.fromkeys(problems)) or unknown)


class TowerTrial:
    """Runs of one copy."""

    def __init__(
        self,
        model: PreTrainedModel,
        vision: VisionModel,
        mode: FakeTensorMode,
        autocast: torch.dtype | None,
    ) -> None:
        self._model = model
        self._vision = vision
        self._mode = mode
        self._autocast = autocast
        own = (*model.parameters(), *model.buffers())
        self._own = {_memory_of(one) for one in own}

    def of_form(self, form: ImageForm, *, checkpointing: bool) -> TriedTower:
        """Return what the tower does with images of a form. Raises what the tower raises for a
        form that it does not take. checkpointing: True if its layers run again in the backward."""
        able = [patches for patches in form.patches if patches <= _COUNTED_PATCHES]
        patches = able[-1] if able else form.patches[0]
        tensors = form.draw(patches)
        layers = _Layers(self._model)
        with self._running(), torch.no_grad(), layers.watched():
            rows = self._vision.features_of(_image(tensors, 0))
        tokens, row_bytes = len(rows), rows.shape[1] * rows.element_size()
        with layers.one_of_each_kind():
            sizes = self._sizes_of(form)
        counted, _ = self._vision.work_of(tensors)
        is_trained = self._vision.is_trained
        patch_bytes = 0.0
        if is_trained:
            image = _image(tensors, tokens)
            with layers.one_of_each_kind():
                of_one, of_two = (self._saved_of([image] * n, layers) for n in (1, 2))
                held = layers.held_bytes(of_one, of_two, checkpointing=checkpointing)
            patch_bytes = held / counted
        return TriedTower(
            form=form,
            patches=tuple(self._vision.work_of(form.draw(one))[0] for one in sizes),
            patches_per_token=counted / tokens,
            patch_bytes=patch_bytes,
            token_bytes=float(row_bytes * (2 if is_trained else 1)),
        )

    def _sizes_of(self, form: ImageForm) -> Sequence[int]:
        """Return the patches of images of a form that the tower takes, ascending: a table of
        places, for example, ends somewhere."""
        sizes = list(form.patches)
        while len(sizes) > 1:
            try:
                with self._running(), torch.no_grad():
                    self._vision.features_of(_image(form.draw(sizes[-1]), 0))
            except Exception:
                sizes.pop()
            else:
                break
        return sizes

    def _saved_of(self, images: Sequence[Image], layers: "_Layers") -> "_Saved":
        """Return the bytes that a forward saves for the backward, without parameters."""
        kept: dict[int, torch.Tensor] = {}  # by memory, all of which lives meanwhile

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if _memory_of(tensor) not in self._own:
                kept.setdefault(_memory_of(tensor), tensor)
            return tensor

        with (
            self._running(),
            layers.watched(kept),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            features = self._vision.encode(images, self._vision.calls(images))
        assert features.requires_grad, "a trained tower has a graph"
        return layers.saved(kept)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Surround a forward of the copy."""
        autocast: Any = nullcontext()
        if self._autocast is not None:
            autocast = torch.autocast(CPU.type, self._autocast)
        with self._mode, _WithoutParameters(), autocast:
            yield


# ---- layers


class _Saved(NamedTuple):
    """Bytes that a forward has saved."""

    outside: int
    """Outside of layers, and what all layers share."""
    layers: Sequence[int]
    """In each layer that ran, its input among them."""
    inputs: Sequence[int]
    """The input of each of them."""


class _Layers:
    """The layers of a tower that transformers can checkpoint. Of those that are alike one is
    counted for all."""

    def __init__(self, model: PreTrainedModel) -> None:
        of_tower = {id(parameter) for parameter in tower_parameters(model)}
        self._kinds: dict[object, list[Any]] = {}
        inside: set[nn.Module] = set()
        for module in model.modules():
            first = next(module.parameters(), None)
            is_layer = isinstance(module, GradientCheckpointingLayer)
            if is_layer and module not in inside and id(first) in of_tower:
                self._kinds.setdefault(signature_of(module), []).append(module)
                inside |= set(module.modules())
        self._can_pass_on = True
        self._running = [(layer, 1) for layers in self._kinds.values() for layer in layers]
        # index of the layer of each call, what was saved before and behind it, its input's bytes
        self._spans: list[tuple[int, int, int, int]] = []
        self._shared: set[int] = set()  # memory of other arguments than hidden states

    @contextmanager
    def one_of_each_kind(self) -> Iterator[None]:
        """Let the other layers give back what they are given inside the block, if all of them have
        returned hidden states like theirs before."""
        former = self._running
        if self._can_pass_on:
            self._running = [(layers[0], len(layers)) for layers in self._kinds.values()]
            for layers in self._kinds.values():
                for layer in layers[1:]:
                    layer.forward = pass_on
        try:
            yield
        finally:
            for layer, _ in former:
                vars(layer).pop("forward", None)
            self._running = former

    @contextmanager
    def watched(self, kept: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
        """Note what running layers keep inside the block. kept: tensors that are saved."""
        self._spans, self._shared = [], set()
        kept = {} if kept is None else kept
        begun: list[int] = []

        def begin(layer: nn.Module, args: Any, kwargs: Any) -> None:
            _, *others = _tensors((args, kwargs))
            self._shared.update(map(_memory_of, others))
            begun.append(len(kept))

        def end(index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            hidden, *_ = _tensors((args, kwargs))
            is_alike = isinstance(output, torch.Tensor) and output.shape == hidden.shape
            self._can_pass_on = self._can_pass_on and is_alike
            given = hidden.untyped_storage().nbytes()
            self._spans.append((index, begun.pop(), len(kept), given))

        hooks = []
        for index, (layer, _) in enumerate(self._running):
            hooks.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(layer.register_forward_hook(partial(end, index), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def saved(self, kept: Mapping[int, torch.Tensor]) -> _Saved:
        """Return what the last run has saved."""
        sizes = []
        for memory, tensor in kept.items():
            is_shared = memory in self._shared
            sizes.append((tensor.untyped_storage().nbytes(), is_shared))
        layers = [0] * len(self._running)
        inputs = [0] * len(self._running)
        for index, start, stop, given in self._spans:
            layers[index] += sum(size for size, is_shared in sizes[start:stop] if not is_shared)
            inputs[index] += given
        total = sum(size for size, _ in sizes)
        return _Saved(total - sum(layers), layers, inputs)

    def held_bytes(self, of_one: _Saved, of_two: _Saved, *, checkpointing: bool) -> float:
        """Return the bytes that the second of two images adds, until its backward has ended."""
        counts = [count for _, count in self._running]
        layers = [two - one for one, two in zip(of_one.layers, of_two.layers, strict=True)]
        inputs = [two - one for one, two in zip(of_one.inputs, of_two.inputs, strict=True)]
        outside = of_two.outside - of_one.outside
        each = inputs if checkpointing else layers
        held = outside + sum(count * size for count, size in zip(counts, each, strict=True))
        if checkpointing and layers:
            held += max(layers)
        return float(held)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, the hidden states first."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> int:
    """Return what tells the memory of tensors apart."""
    key: int = tensor.untyped_storage()._cdata
    return key


class _WithoutParameters(TorchDispatchMode):
    """Computes what depends on no fake tensor, inside of a FakeTensorMode."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        options = kwargs or {}
        given = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        if any(isinstance(one, FakeTensor) for one in given):
            if func is torch.ops.aten.embedding.default:
                _check_rows(*args[:2])
            if func is torch.ops.aten.index.Tensor:
                return func(args[0], _without_masks(args[1]))
            return func(*args, **options)
        with unset_fake_temporarily():
            return func(*args, **options)


def _check_rows(table: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise IndexError for rows that a fake table does not have, which it would not notice."""
    if isinstance(rows, FakeTensor) or not rows.numel():
        return
    with unset_fake_temporarily():
        last = int(rows.max())
    if last >= len(table):
        raise IndexError(f"row {last} of a table of {len(table)}")


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices with the places that masks choose instead of these. All places are chosen by
    a mask that depends on parameters: drawn images have no padding."""
    result: list[torch.Tensor | None] = []
    for one in indices:
        if one is None or one.dtype != torch.bool:
            result.append(one)
            continue
        with unset_fake_temporarily():
            mask = torch.ones(one.shape, dtype=torch.bool) if isinstance(one, FakeTensor) else one
            result += mask.nonzero(as_tuple=True)
    return result
