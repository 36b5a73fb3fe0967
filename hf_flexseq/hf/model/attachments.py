"""The attachments of a whole model while it runs planned steps.

| attached | by |
|---|---|
| attention of the plan's groups | `attention.py`, registered with transformers |
| a count of its calls in every forward | `model/call_count.py` |
| loss in chunks, inside the head's own call | `model/loss.py` |
| positions and lengths of whole sequences | `model/positions.py` |
| recurrent layers over a sequence's ranks | `model/recurrent.py` |
| Liger's norms, MLPs and rotary embeddings, if asked for | `model/liger.py` |
| MLPs and norms compiled, if asked for | `compiled_regions.py` |
| NEFTune's noise on embedded tokens, if asked for | `model/noise.py` |
| embeddings of PEFT's virtual tokens | `model/adapters.py` |
| AdaLoRA's term, once in a step | `adapters.py` |
| router loss of the whole step | `model/router.py` |
| gradients of experts on several ranks, where torch divides them twice | `model/experts.py` |
| features of images | `model/vision.py` |
| layers that obey a micro-batch's choice for memory | `model/layer_memory.py` |
| checkpointing that is never reentrant | `model/checkpointing.py` |
| MLPs in tiles, from the first plan that has them on | `tiles.py` |
| DDP buckets with early reduction | `early_buckets` |

A call without `seq_ctx` is outside of planned steps, for example when a callback generates a
sample. Such a call uses the model's own attention and loss (`AttentionByCall`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, SupportsIndex

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch, unpatched
from hf_flexseq.hf.model.adapters import attach_prompt, term_of_step, virtual_tokens_of
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.call_count import counted_calls
from hf_flexseq.hf.model.checkpointing import NonReentrant
from hf_flexseq.hf.model.compiled_regions import compiled_regions
from hf_flexseq.hf.model.experts import right_gradients
from hf_flexseq.hf.model.image_masks import layers_told_causal
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.liger import liger_kernels
from hf_flexseq.hf.model.loss import Total, attach_chunked_loss
from hf_flexseq.hf.model.noise import attach_noise
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.hf.model.router import RouterLoss, asks_for_router_loss
from hf_flexseq.hf.model.shared_prefixes import refuse_noise
from hf_flexseq.hf.model.tiles import MlpTiles
from hf_flexseq.hf.model.towers import attention_of_text, reader_of_text
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.kernels.chunked_loss import chunked_cross_entropy_sum
from hf_flexseq.steps.calls import ModelCall, in_first_row, joined
from hf_flexseq.steps.forward_hooks import around_forward
from hf_flexseq.steps.images import UnsupportedImages
from hf_flexseq.steps.prefetch import NO_IMAGES, ImageReader
from hf_flexseq.steps.users_code import FORWARD_HOOKS, package


class AttentionByCall:
    """Gives a model our attention in planned calls, which have `seq_ctx`, its own in all others.
    These come between planned ones, to a trained model as well as to a reference."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._own: Any = attention_of_text(base)
        self._other_call: tuple[nn.Module, ExitStack] | None = None  # call without `seq_ctx`
        self.in_others: Callable[[], AbstractContextManager[None]] = nullcontext
        """Returns what else surrounds a call without `seq_ctx`."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Look at all calls of the model inside the block."""
        self._set(ours=True)
        with ExitStack() as attached:
            for entry in {self._base, self._base.base_model}:  # and the decoder below the head
                attached.enter_context(around_forward(entry, self._begin, self._end))
            try:
                yield
            finally:
                self._set(ours=False)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Restore our attention for a planned call, the model's own for one without `seq_ctx`."""
        if kwargs.get("seq_ctx") is not None:
            self._end_interrupted()
            self._set(ours=True)
        elif self._is_ours:
            own = ExitStack()
            own.enter_context(self.own())
            own.enter_context(self.in_others())
            self._other_call = (module, own)

    def _end(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Undo what `_begin` of the same module has done for a call without `seq_ctx`."""
        if self._other_call is not None and self._other_call[0] is module:
            _, own = self._other_call
            self._other_call = None
            own.close()

    def _end_interrupted(self) -> None:
        """Undo what `_begin` has done for a call that an interrupt has ended, such as Ctrl-C
        in a generation: torch runs no hook after it. A planned call inside of another call is
        given our attention by its caller."""
        if self._other_call is not None and not self._is_ours:
            self._end(self._other_call[0], (), None)

    def own(self) -> AbstractContextManager[None]:
        """Restore the model's own attention inside a block, for generation."""
        return self._chosen(ours=False)

    def planned(self) -> AbstractContextManager[None]:
        """Use our attention inside a block, even within `own`."""
        return self._chosen(ours=True)

    @contextmanager
    def _chosen(self, *, ours: bool) -> Iterator[None]:
        former = self._is_ours
        self._set(ours=ours)
        try:
            yield
        finally:
            self._set(ours=former)

    @property
    def _is_ours(self) -> bool:
        return bool(self._base.config.get_text_config()._attn_implementation == NAME)

    def _set(self, *, ours: bool) -> None:
        """Give the model our attention, or its own, which the user may have changed."""
        if ours == self._is_ours:
            return
        if ours:
            self._own = attention_of_text(self._base)
        chosen = attention_of_text(self._base, NAME) if ours else self._own
        self._base.set_attn_implementation(chosen)


@contextmanager
def on_micro_batches(
    model: PreTrainedModel, layers: Mapping[int, nn.Module] | None = None
) -> Iterator[AttentionByCall]:
    """Give a model our attention, recurrent layers and positions inside the block, for planned
    calls. layers: of a stage, by number; None for a whole model."""
    attention = AttentionByCall(model)
    attach_recurrent(model)
    with (
        attention.attached(),
        attach_positions(model),
        layers_told_causal(model),
        counted_calls(model, layers),
    ):
        yield attention


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """A trainer's own settings for the models that it trains, besides the options of
    hf_flexseq."""

    label_smoothing: float = 0.0
    """As of transformers' `LabelSmoother`, in the loss in chunks."""
    liger: Mapping[str, Any] | None = None
    """Liger's norms, MLPs and rotary embeddings, as `liger_kernel_config` has them; None without
    them."""
    noise: tuple[float, int] | None = None
    """alpha of NEFTune's noise on embedded tokens, and the seed of the run; None without noise."""
    reason_as_set: str | None = None
    """Why no plan may choose where activations are, in a few words; None if it may."""


class AttachedModel:
    """A model that runs planned steps until it is detached."""

    def __init__(
        self,
        model: nn.Module,
        base: PreTrainedModel,
        accelerator: Accelerator,
        layers: LayerMemory,
        settings: ModelSettings,
    ) -> None:
        """model: may be a PEFT model, with `base` inside. layers: of `base`."""
        self.base = base
        self.layers = layers
        with ExitStack() as attached:
            ddp_handler = early_buckets(accelerator.ddp_handler, model)
            attached.enter_context(Patch(accelerator, ddp_handler=ddp_handler))
            self.attention = attached.enter_context(on_micro_batches(base))
            """Attention of the model, of its own or ours."""
            if settings.liger is not None:
                attached.enter_context(liger_kernels(base, settings.liger))
            attached.enter_context(compiled_regions(base, accelerator))
            attached.enter_context(layers.attached())
            self._checkpointing = NonReentrant(base)
            attached.callback(self._checkpointing.restore)
            attached.enter_context(right_gradients(base))
            self.vision: VisionModel | None = None
            """How the model takes images, if it does."""
            self.images: ImageReader = NO_IMAGES
            """Reads the images of rows, or refuses them."""
            try:
                self.vision = VisionModel(base)
            except UnsupportedImages as reason:
                self.images = reader_of_text(base.config, str(reason))
            else:
                attached.enter_context(self.vision.attached())
            total: Total = chunked_cross_entropy_sum
            if settings.label_smoothing:
                total = partial(total, smoothing=settings.label_smoothing)
            self.chunked_loss = attach_chunked_loss(model, total)
            """Its loss in chunks; None if it computes the loss itself, of all logits at once."""
            if self.chunked_loss is not None:
                attached.callback(self.chunked_loss.detach)
                self.attention.in_others = self.chunked_loss.disabled
            self.router = RouterLoss(model, base) if asks_for_router_loss(base) else None
            """Router loss, if the model computes one."""
            if self.router is not None:
                attached.callback(self.router.detach)
            self.tiles = MlpTiles(base)
            """Computes MLPs in tiles, once a plan asks for it."""
            attached.callback(self.tiles.detach)
            self.token_columns = needed_columns(base)
            """Columns to dispatch with every token, besides those that were drawn."""
            begin = base.base_model.register_forward_pre_hook(
                self._begin_planned, with_kwargs=True, prepend=True
            )
            attached.callback(begin.remove)
            if settings.noise is not None:
                attached.enter_context(attach_noise(base))
            self.virtual_tokens = virtual_tokens_of(model)
            """Virtual tokens that the model puts in front of each sequence."""
            if self.virtual_tokens:
                attached.enter_context(attach_prompt(model, base))
            if hasattr(model.base_model, "trainable_adapter_name"):  # of AdaLoRA
                attached.enter_context(term_of_step(model))
            attached.enter_context(refuse_noise(base))
            for entry in {model, base}:
                copied = partial(self._copy, entry)
                reduced = partial(self._reduce, entry)
                attached.enter_context(Patch(entry, __deepcopy__=copied, __reduce_ex__=reduced))
            self._attached = attached.pop_all()  # what `detach` undoes, as does an error before

    def rows_of(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        """Yield the sequences of all calls as one batch of the engine; nothing without any. Raises
        NotImplementedError for types of tokens in a model that takes no images here, ValueError
        where it is not known which images belong to which sequence."""
        types = sorted({name for call in calls for name in call.types})
        if types and self.vision is None:
            raise NotImplementedError(
                f"a loss calls the model with {types[0]}: {type(self.base).__name__} takes no "
                "images here; leave the column out"
            )
        row = joined(calls, in_first_row if self.vision is None else self.vision.of_rows)
        if row is not None:
            yield row

    def detach(self) -> None:
        """Restore the model's attention and loss, and accelerate's DDP handler."""
        self._attached.close()

    def _copy(self, entry: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the model as it is without attachments: for a callback that
        averages weights, which calls its copy as any model."""
        modules = list(entry.modules())
        with self.attention.own(), unpatched(modules), ExitStack() as without:
            for module in modules:
                for name in FORWARD_HOOKS:
                    hooks: dict[int, Any] = getattr(module, name)
                    theirs = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
                    if len(theirs) < len(hooks) and id(hooks) not in memo:
                        without.enter_context(Patch(module, **{name: type(hooks)(theirs)}))
            return copy.deepcopy(entry, memo)

    def _reduce(self, entry: nn.Module, protocol: SupportsIndex) -> Any:
        """Return what pickle keeps of the model: a copy's."""
        return copy.deepcopy(entry).__reduce_ex__(protocol)

    def _begin_planned(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare a planned call of the decoder, which makes no cache unless asked for one."""
        if kwargs.get("seq_ctx") is None:
            return None
        self._checkpointing.replace()
        if kwargs.get("use_cache") is not None:
            return None
        # The Trainer's use_cache=False does not reach a text model with options of its own.
        return args, {**kwargs, "use_cache": False}

    def need_columns(self, names: Iterable[str]) -> None:
        """Dispatch more columns, without duplicates, with every token from now on."""
        self.token_columns = tuple(dict.fromkeys((*self.token_columns, *names)))


def _is_ours(hook: Any) -> bool:
    """Tell if a hook is a function of this package."""
    return package(hook.func if isinstance(hook, partial) else hook) == package(AttachedModel)


# ---- DDP

BUCKETS = 8  # buckets of a small model at most; each has a MB or more
MB = 2**20  # bytes


def early_buckets(
    asked: DistributedDataParallelKwargs | None, model: nn.Module
) -> DistributedDataParallelKwargs:
    """Return the options for DDP, from the user's, with which it reduces gradients while the last
    backward still runs. A bucket size other than the default stays.

    DDP waits until a bucket is full, 25 MB by default. A model that is not much larger has all its
    gradients in one or two buckets, whose transfers begin when no backward is left to hide them.
    Such a model gets smaller buckets; large models keep the default.
    """
    asked = asked or DistributedDataParallelKwargs()
    if asked.bucket_cap_mb != DistributedDataParallelKwargs.bucket_cap_mb:
        return asked
    gradient_bytes = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient_bytes += parameter.numel() * parameter.element_size()
    bucket_mb = max(1, ceil(gradient_bytes / MB / BUCKETS))
    return replace(asked, bucket_cap_mb=min(asked.bucket_cap_mb, bucket_mb))
