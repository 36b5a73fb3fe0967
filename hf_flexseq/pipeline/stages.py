"""A decoder-only HF model, cut in place into one stage of a pipeline.

    stage 0        embedding, layers
    in between     layers
    last stage     layers (perhaps none), final norm, LM head

With V virtual stages per rank the model has V times as many stages as there are ranks, and rank r
has the stages r, r + P, r + 2 P, ... of it in one model, of which it runs one at a time.

Layers of other stages become a `Skip`, which hands its input on: so every parameter keeps its
global name, and the model's own forward still works, given hidden states as `inputs_embeds`. That
forward must do nothing between the embedding and the norm but call the layers; `cut` tries it on a
stack of skips, which must change nothing.

Tied embeddings: the first stage has the embedding, the last the head, each a copy of the one
tensor. Both keep its name, `tied_name`, and their gradients are summed once per step.

Rejected: transformers' own pipeline split (even, 1.2 to 1.6 times slower at large vocabularies,
inference only), and a forward of our own over the layers, which would have to know every model's
position embeddings and masks.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_flexseq.pipeline.divide import NONE, divide_layers

# Names of a decoder's last norm.
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")
# Tokens of a sequence, where attention is weighed against the rest of a layer: the model is cut
# before any length is known. An assumption, not tuned.
TYPICAL_CONTEXT = 4096

Spans = tuple[tuple[int, int], ...]  # [start, stop) of the layers of every stage


# ---- what stands in for modules of other stages


class Skip(nn.Module):
    """A module of another stage, which hands its input on.

    It keeps plain attributes, because decoders read some of their layers'.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if isinstance(value, int | float | str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return hidden [1, tokens, hidden_size] as it is. Raises ValueError where the layer is
        given another tensor of that shape, which is not sent from stage to stage."""
        for other in (*args, *kwargs.values()):
            if isinstance(other, torch.Tensor) and other.shape == hidden.shape:
                raise ValueError("its layers are given the embeddings, too")
        return hidden


class Elsewhere(nn.Module):
    """The embedding or the head of another stage: nothing may call it, least of all `generate`,
    which would go on with hidden states instead of logits."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raise NotImplementedError in place of returning [1, tokens, ...]."""
        raise NotImplementedError(
            "this model is one stage of a pipeline: save it, and load the whole one to call it or "
            "to generate"
        )


# ---- the whole model


class LayerSizes(NamedTuple):
    """Counts of the numbers that multiply each token."""

    layers: tuple[int, ...]  # of every layer
    head: int  # of the LM head


class Stack:
    """The parts of a decoder-only model: embedding, layers, norm, head, by the names they have in
    it."""

    __slots__ = ("decoder", "embedding_name", "head_name", "model", "norm_name", "width")

    def __init__(self, model: nn.Module) -> None:
        """Find the parts. Raises NotImplementedError, naming the model and the reason, for one
        that is no plain stack of layers."""
        prefix = getattr(model, "base_model_prefix", "base model")
        decoder = getattr(model, prefix, None)
        if decoder is None:
            decoder = getattr(model, "model", None)  # Llama 4's prefix names what it has not
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise _no_stack(model, f"its {prefix!r} has no list `layers`")
        self.model = model
        self.decoder: nn.Module = decoder
        self.embedding_name = _name_of(decoder, model.get_input_embeddings())
        self.head_name = _name_of(model, model.get_output_embeddings())
        self.norm_name = ""
        for name in NORMS:
            if not self.norm_name and hasattr(decoder, name):
                self.norm_name = name
        parts = {
            "embedding": self.embedding_name,
            "LM head": self.head_name,
            "norm": self.norm_name,
        }
        for part, name in parts.items():
            if not name:
                raise _no_stack(model, f"it has no {part} where a plain decoder has it")
        self._check_nothing_else()
        self._check_nothing_shared()
        self.width = self.embedding.weight.shape[1]  # hidden_size

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def embedding(self) -> nn.Module:
        return self.decoder.get_submodule(self.embedding_name)

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self.head_name)

    @property
    def norm(self) -> nn.Module:
        return self.decoder.get_submodule(self.norm_name)

    def tied_name(self) -> str | None:
        """Return the global name of the tensor [vocabulary, hidden_size] that is both embedding
        and head; None when they are two."""
        embedding = getattr(self.embedding, "weight", None)
        head = getattr(self.head, "weight", None)
        if embedding is None:
            return None
        # A model without memory is tied only after it has been loaded.
        will_be_tied = embedding.is_meta and self.model.config.tie_word_embeddings
        if embedding is not head and not will_be_tied:
            return None
        names = (name for name, weight in self.model.named_parameters() if weight is embedding)
        return next(names)

    def sizes(self) -> LayerSizes:
        """Return how many numbers multiply each token, in every layer and in the head."""
        return LayerSizes(tuple(map(_weights, self.layers)), _weights(self.head))

    def inseparable(self) -> range:
        """Return the layers that share keys: from the first one that stores its keys to the last
        one that reads them. None where every layer has its own."""
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        modes = list(getattr(config, "kv_sharing_modes", None) or ())
        readers = [layer for layer, mode in enumerate(modes) if mode not in (None, "store")]
        if not readers:
            return NONE
        return range(modes.index("store"), readers[-1] + 1)

    def _check_nothing_else(self) -> None:
        """Raise NotImplementedError for a parameter outside of the parts: it would belong to no
        stage, or to all."""
        known: set[int] = set()
        for part in (self.embedding, self.layers, self.norm, self.head):
            known.update(id(parameter) for parameter in part.parameters())
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise _no_stack(
                    self.model, f"{name} is outside of embedding, layers, norm and head"
                )

    def _check_nothing_shared(self) -> None:
        """Raise NotImplementedError for a parameter of two layers, which may be in two stages."""
        layer_of: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                first = layer_of.setdefault(id(parameter), index)
                if first != index:
                    raise _no_stack(self.model, f"layers {first} and {index} share {name}")


def _weights(module: nn.Module) -> int:
    """Return how many numbers multiply each token in `module`: those of its matrices."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() == 2)


def _name_of(parent: nn.Module, child: nn.Module | None) -> str:
    """Return the name under which `parent` has `child` as a direct child, "" without one."""
    for name, module in parent.named_children():
        if module is child:
            return name
    return ""


def _no_stack(model: nn.Module, reason: str) -> NotImplementedError:
    """Return the error for a model that cannot be cut."""
    return NotImplementedError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}; set "
        "pipeline_parallel_size=1"
    )


# ---- one rank's part of it


class Stage:
    """The part of the model that one rank has, which is several stages with virtual ones."""

    __slots__ = ("count", "index", "sizes", "spans", "stack", "tied_name", "virtual", "width")

    def __init__(self, stack: Stack, index: int, count: int, spans: Spans) -> None:
        """Take everything out of a whole stack that is not on this rank.

        index: of the rank in its pipeline; count: ranks of the pipeline
        spans: [start, stop) of the layers of all stages, `count` times those of a rank
        """
        self.stack = stack
        self.index = index
        self.count = count
        self.spans = spans
        # of the whole model, hence before the cut
        self.tied_name = stack.tied_name()  # None without a tied tensor
        self.width = stack.width  # hidden_size
        self.sizes = stack.sizes()
        self._cut()
        self.virtual: dict[int, VirtualStage] = {}  # this rank's stages by number
        for number in range(index, len(spans), count):
            self.virtual[number] = VirtualStage(self, number)

    @property
    def is_first(self) -> bool:
        """True where this rank has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True where this rank has the norm and the head."""
        return self.index == self.count - 1

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        """The layers of this rank by their index in the model."""
        layers = {}
        for start, stop in self.spans[self.index :: self.count]:
            for index in range(start, stop):
                layers[index] = self.stack.layers[index]
        return layers

    def _cut(self) -> None:
        """Replace the modules that other ranks have."""
        stack = self.stack
        own_layers = self.own_layers
        for index, layer in enumerate(stack.layers):
            if index not in own_layers:
                stack.layers[index] = Skip(layer)
        if not self.is_first:
            setattr(stack.decoder, stack.embedding_name, Elsewhere())
        if not self.is_last:
            setattr(stack.decoder, stack.norm_name, Skip(stack.norm))
            setattr(stack.model, stack.head_name, Elsewhere())

    def tied_parameter(self) -> nn.Parameter | None:
        """Return this rank's copy of the tied tensor [vocabulary, hidden_size], if it has one."""
        if self.tied_name is None:
            return None
        if self.is_first:
            return self.stack.embedding.weight
        if self.is_last:
            return self.stack.head.weight
        return None

    def global_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name in the whole model, parameter) of this rank; both copies of a tied tensor
        have its one name."""
        tied = self.tied_parameter()
        parameters = []
        for name, parameter in self.stack.model.named_parameters():
            global_name = name
            if parameter is tied and self.tied_name is not None:
                global_name = self.tied_name
            parameters.append((global_name, parameter))
        return parameters


class Loss(NamedTuple):
    """The loss of a chunk, and where its graph is divided from that of the layers."""

    loss: torch.Tensor  # a scalar
    hidden: torch.Tensor  # [1, tokens, hidden_size], with which the layers' graph ends
    entry: torch.Tensor  # the same values, with which the loss' graph begins


class VirtualStage:
    """A stage of the model, on a rank that may have several."""

    __slots__ = ("_alone", "_stack", "is_first", "is_last", "layers", "number")

    def __init__(self, stage: Stage, number: int) -> None:
        """number: the stage's among all stages of the model"""
        self._stack = stage.stack
        self.number = number
        self.layers = stage.spans[number]  # [start, stop) of the model's
        self.is_first = number == 0
        self.is_last = number == len(stage.spans) - 1
        # A rank with one stage need not hide its other layers: it has none.
        self._alone: _View | None = None
        if len(stage.spans) > stage.count:
            self._alone = _view_of(stage.stack, self)

    def hidden(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return hidden states [1, tokens, hidden_size] after the stage's layers, and on the last
        stage after the norm.

        source: token ids [1, tokens] on the first stage, hidden states [1, tokens, hidden_size]
            elsewhere
        """
        with _replaced(self._stack, self._alone):
            output = self._stack.decoder(**self._entry(source), use_cache=False, **kwargs)
        return output.last_hidden_state

    def loss(self, source: torch.Tensor, **kwargs: Any) -> Loss:
        """Return the last stage's loss of a chunk, whose graph begins after the norm, so that it
        can go backward at once.

        source: as in `hidden`, [1, tokens] or [1, tokens, hidden_size]
        kwargs: `labels` and `num_items_in_batch` are among them
        """
        divided: list[tuple[torch.Tensor, torch.Tensor]] = []

        def divide(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output.last_hidden_state  # [1, tokens, hidden_size]
            entry = hidden.detach().requires_grad_(hidden.requires_grad)
            output.last_hidden_state = entry
            divided.append((hidden, entry))

        hook = self._stack.decoder.register_forward_hook(divide)
        try:
            with _replaced(self._stack, self._alone):
                output = self._stack.model(**self._entry(source), use_cache=False, **kwargs)
        finally:
            hook.remove()
        hidden, entry = divided[0]
        return Loss(output.loss, hidden, entry)

    def _entry(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `source`, [1, tokens] or [1, tokens, hidden_size], as the model's keyword
        argument."""
        return {"input_ids" if self.is_first else "inputs_embeds": source}


# ---- cutting


def cut(
    model: nn.Module,
    index: int,
    count: int,
    *,
    virtual: int = 1,
    division: Callable[[Stack], Spans] | None = None,
    check: bool = True,
) -> Stage:
    """Reduce `model` in place to the part that rank `index` of `count` has of it, and return it.

    virtual: stages of each rank
    division: gives the layers of each stage; by default `modelled_division`
    check: whether to try the model on hidden states, which one without memory cannot do: then call
        `check_identity` later

    Raises ValueError for more stages than layers + 1, layers that share keys being one, and
    NotImplementedError for a model without a plain decoder stack.
    """
    stack = Stack(model)
    stages = count * virtual
    spans = division(stack) if division is not None else modelled_division(stack, stages)
    assert len(spans) == stages, f"{len(spans)} spans of layers for {count} x {virtual} stages"
    if check:
        check_identity(stack)
    return Stage(stack, index, count, spans)


def modelled_division(stack: Stack, count: int) -> Spans:
    """Return the division into `count` stages by multiplications per token: one per weight, and
    attention over a typical context."""
    attention = TYPICAL_CONTEXT * stack.width  # two products with half of the context's keys
    sizes = stack.sizes()
    return divide_layers(
        [size + attention for size in sizes.layers],
        count,
        last=sizes.head,
        inseparable=stack.inseparable(),
    )


def check_identity(stack: Stack) -> None:
    """Raise NotImplementedError unless the decoder, all of whose layers are skips, hands hidden
    states on as they are. The model may have been cut."""
    parameter = next(stack.model.parameters())
    hidden = torch.ones(1, 2, stack.width, dtype=parameter.dtype, device=parameter.device)
    positions = torch.arange(2, device=parameter.device).unsqueeze(0)  # [2] -> [1, 2]
    with torch.no_grad(), _emptied(stack):
        try:
            output = stack.decoder(inputs_embeds=hidden, position_ids=positions, use_cache=False)
            found = output.last_hidden_state  # [1, 2, hidden_size]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _no_stack(stack.model, f"it does not run on hidden states ({error})") from error
    if found.shape != hidden.shape or not torch.equal(found, hidden):
        raise _no_stack(
            stack.model, "it changes hidden states between its embedding and its layers"
        )


# ---- a stack with other layers for a while


class _View(NamedTuple):
    """Layers and norm that a decoder may have for a while."""

    layers: nn.ModuleList
    norm: nn.Module


def _view_of(stack: Stack, stage: VirtualStage) -> _View:
    """Return the view in which the decoder has the layers of `stage` alone."""
    start, stop = stage.layers
    layers = nn.ModuleList()
    for index, layer in enumerate(stack.layers):
        layers.append(layer if start <= index < stop else Skip(layer))
    return _View(layers, stack.norm if stage.is_last else Skip(stack.norm))


def _emptied(stack: Stack) -> AbstractContextManager[None]:
    """Return a block inside which all layers and the norm are skips."""
    layers = nn.ModuleList(map(Skip, stack.layers))
    return _replaced(stack, _View(layers, Skip(stack.norm)))


@contextmanager
def _replaced(stack: Stack, view: _View | None) -> Iterator[None]:
    """Give the decoder the layers and the norm of `view`, if there is one, inside this block."""
    if view is None:
        yield
        return
    own = _View(stack.layers, stack.norm)
    _put(stack, view)
    try:
        yield
    finally:
        _put(stack, own)


def _put(stack: Stack, view: _View) -> None:
    """Make layers and norm of `view` those of the decoder."""
    stack.decoder.layers = view.layers
    setattr(stack.decoder, stack.norm_name, view.norm)
