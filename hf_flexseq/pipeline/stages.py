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

from hf_flexseq.pipeline.divide import divide_layers

NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
# tokens a query reads, where attention is weighed against the rest of a layer
TYPICAL_CONTEXT = 4096


class Skip(nn.Module):
    """A module of another stage. It keeps plain attributes, because decoders read some of their
    layers'."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if isinstance(value, int | float | str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class Elsewhere(nn.Module):
    """The embedding or the head of another stage: nothing may call it, least of all `generate`,
    which would go on with hidden states instead of logits."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(
            "this model is one stage of a pipeline: save it, and load the whole one to call it or "
            "to generate"
        )


class Loss(NamedTuple):
    """The loss of a chunk, [] in size; hidden states [1, t, C] that it was made from, twice: as
    the layers' graph ends with them, and as the loss' graph begins with them."""

    loss: torch.Tensor
    hidden: torch.Tensor
    entry: torch.Tensor


class LayerSizes(NamedTuple):
    """How many numbers multiply each token, in every layer and in the LM head."""

    layers: tuple[int, ...]
    head: int


class Stack:
    """The parts of a decoder-only model: embedding, layers, norm, head, by the names they have in
    it."""

    __slots__ = ("decoder", "embedding_name", "head_name", "model", "norm_name", "width")

    def __init__(self, model: nn.Module) -> None:
        """Raises NotImplementedError, naming the model and the reason, for one that is no plain
        stack of layers."""
        self.model = model
        self.decoder: nn.Module = getattr(model, getattr(model, "base_model_prefix", ""), None)  # type: ignore[assignment]
        if not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList):
            raise _no_stack(
                model,
                f"its {getattr(model, 'base_model_prefix', 'base model')!r} has no list `layers`",
            )
        self.embedding_name = _name_of(self.decoder, model.get_input_embeddings())
        self.head_name = _name_of(model, model.get_output_embeddings())
        self.norm_name = next((name for name in NORMS if hasattr(self.decoder, name)), "")
        for part, name in (
            ("embedding", self.embedding_name),
            ("LM head", self.head_name),
            ("norm", self.norm_name),
        ):
            if not name:
                raise _no_stack(model, f"it has no {part} where a plain decoder has it")
        self._check_nothing_else()
        self.width = self.embedding.weight.shape[1]

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers  # type: ignore[return-value]

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
        """The global name of the tensor that is both embedding and head; None when they are
        two."""
        embedding, head = (getattr(part, "weight", None) for part in (self.embedding, self.head))
        # A model without memory is tied only after it has been loaded.
        to_be = (
            embedding is not None and embedding.is_meta and self.model.config.tie_word_embeddings
        )
        if embedding is None or not (embedding is head or to_be):
            return None
        return next(
            name for name, parameter in self.model.named_parameters() if parameter is embedding
        )

    def sizes(self) -> "LayerSizes":
        """How many numbers multiply each token."""
        return LayerSizes(tuple(map(_weights, self.layers)), _weights(self.head))

    def _check_nothing_else(self) -> None:
        """A parameter elsewhere would belong to no stage, or to all."""
        parts = (self.embedding, self.layers, self.norm, self.head)
        known = {id(p) for part in parts for p in part.parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise _no_stack(
                    self.model, f"{name} is outside of embedding, layers, norm and head"
                )


class Stage:
    """What one rank has of the model.

    index, count: the rank's place in its pipeline, and how many there are. spans: [start, stop) of
    the layers of all stages, `count` times the virtual stages of a rank. virtual: those of this
    rank, by number. width: of the hidden states. sizes: of the whole model. tied_name: the global
    name of the tensor that is both embedding and head, on every rank; None without one.
    """

    __slots__ = ("count", "index", "sizes", "spans", "stack", "tied_name", "virtual", "width")

    def __init__(
        self, stack: Stack, index: int, count: int, spans: tuple[tuple[int, int], ...]
    ) -> None:
        """To be made of a whole stack; everything else is taken out of it."""
        self.stack, self.index, self.count, self.spans = stack, index, count, spans
        self.tied_name, self.width, self.sizes = stack.tied_name(), stack.width, stack.sizes()
        self._cut()
        self.virtual = {
            number: VirtualStage(self, number) for number in range(index, len(spans), count)
        }

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the norm and the head."""
        return self.index == self.count - 1

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        """The layers of this rank, by their index in the model."""
        spans = self.spans[self.index :: self.count]
        return {
            place: self.stack.layers[place]
            for start, stop in spans
            for place in range(start, stop)
        }

    def _cut(self) -> None:
        stack, own = self.stack, self.own_layers
        for place, layer in enumerate(stack.layers):
            if place not in own:
                stack.layers[place] = Skip(layer)
        if not self.is_first:
            setattr(stack.decoder, stack.embedding_name, Elsewhere())
        if not self.is_last:
            setattr(stack.decoder, stack.norm_name, Skip(stack.norm))
            setattr(stack.model, stack.head_name, Elsewhere())

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of the tied tensor, if it has one."""
        if self.tied_name is None or not (self.is_first or self.is_last):
            return None
        return (self.stack.embedding if self.is_first else self.stack.head).weight  # type: ignore[return-value]

    def global_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter) of this rank; both copies of a tied tensor under
        its one name."""
        tied = self.tied_parameter()
        return [
            (self.tied_name if parameter is tied and self.tied_name else name, parameter)
            for name, parameter in self.stack.model.named_parameters()
        ]


class VirtualStage:
    """One stage of the model, on a rank that may have several.

    number: among all stages. layers: [start, stop) of the model's.
    """

    __slots__ = ("_alone", "_stack", "is_first", "is_last", "layers", "number")

    def __init__(self, stage: Stage, number: int) -> None:
        self._stack, self.number, self.layers = stage.stack, number, stage.spans[number]
        self.is_first, self.is_last = number == 0, number == len(stage.spans) - 1
        self._alone = _view(stage, self) if len(stage.spans) > stage.count else None

    def hidden(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Hidden states [1, t, C] after the stage's layers, and on the last stage after the norm.
        source: token ids [1, t] on the first stage, hidden states elsewhere."""
        with _replaced(self._stack, self._alone):
            return self._stack.decoder(
                **self._entry(source), use_cache=False, **kwargs
            ).last_hidden_state

    def loss(self, source: torch.Tensor, **kwargs: Any) -> "Loss":
        """The last stage's loss of a chunk; `labels` and `num_items_in_batch` are among `kwargs`.
        The graph of the loss begins after the norm, so that it can go backward at once."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def divide(_: nn.Module, __: Any, output: Any) -> None:
            hidden = output.last_hidden_state
            output.last_hidden_state = hidden.detach().requires_grad_(hidden.requires_grad)
            found.append((hidden, output.last_hidden_state))

        hook = self._stack.decoder.register_forward_hook(divide)
        try:
            with _replaced(self._stack, self._alone):
                loss = self._stack.model(**self._entry(source), use_cache=False, **kwargs).loss
        finally:
            hook.remove()
        return Loss(loss, *found[0])

    def _entry(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids" if self.is_first else "inputs_embeds": source}


def cut(
    model: nn.Module,
    index: int,
    count: int,
    *,
    virtual: int = 1,
    division: Callable[[Stack], tuple[tuple[int, int], ...]] | None = None,
    check: bool = True,
) -> Stage:
    """Make `model` what rank `index` of `count` has of it, in place.

    virtual: stages of each rank. division: which layers each stage gets; by default what
    `modelled_division` says. check: whether to try the model on hidden states, which one without
    memory cannot do: then call `check_identity` later. Raises ValueError for more stages than
    layers + 1, NotImplementedError for a model without a plain decoder stack.
    """
    stack = Stack(model)
    spans = division(stack) if division is not None else modelled_division(stack, count * virtual)
    assert len(spans) == count * virtual, (
        f"{len(spans)} spans of layers for {count} x {virtual} stages"
    )
    if check:
        check_identity(stack)
    return Stage(stack, index, count, spans)


def modelled_division(stack: Stack, count: int) -> tuple[tuple[int, int], ...]:
    """The division by multiplications per token: one per weight, and attention over a typical
    context."""
    attention = TYPICAL_CONTEXT * stack.width  # two products with half of the context's keys
    sizes = stack.sizes()
    return divide_layers([size + attention for size in sizes.layers], count, last=sizes.head)


def _weights(module: nn.Module) -> int:
    """How many numbers multiply each token in `module`."""
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def check_identity(stack: Stack) -> None:
    """Raise NotImplementedError unless the decoder, all of whose layers are skips, hands hidden
    states on as they are. The model may have been cut."""
    like = next(stack.model.parameters())
    hidden = torch.ones(1, 2, stack.width, dtype=like.dtype, device=like.device)
    positions = torch.arange(2, device=like.device).unsqueeze(0)
    with torch.no_grad(), _emptied(stack):
        try:
            found = stack.decoder(
                inputs_embeds=hidden, position_ids=positions, use_cache=False
            ).last_hidden_state
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _no_stack(stack.model, f"it does not run on hidden states ({error})") from error
    if found.shape != hidden.shape or not torch.equal(found, hidden):
        raise _no_stack(
            stack.model, "it changes hidden states between its embedding and its layers"
        )


class _View(NamedTuple):
    """Layers and norm as one stage of several sees them."""

    layers: nn.ModuleList
    norm: nn.Module


def _view(stage: Stage, one: VirtualStage) -> _View:
    """With the layers of `one` alone."""
    start, stop = one.layers
    layers = [
        layer if start <= place < stop else Skip(layer)
        for place, layer in enumerate(stage.stack.layers)
    ]
    return _View(
        nn.ModuleList(layers), stage.stack.norm if one.is_last else Skip(stage.stack.norm)
    )


def _emptied(stack: Stack) -> AbstractContextManager[None]:
    """All layers and the norm are skips inside this block."""
    return _replaced(stack, _View(nn.ModuleList(map(Skip, stack.layers)), Skip(stack.norm)))


@contextmanager
def _replaced(stack: Stack, view: _View | None) -> Iterator[None]:
    """The decoder has the layers and the norm of `view`, if there is one, inside this block."""
    own = _View(stack.layers, stack.norm)
    _put(stack, view or own)
    try:
        yield
    finally:
        _put(stack, own)


def _put(stack: Stack, view: _View) -> None:
    stack.decoder.layers = view.layers
    setattr(stack.decoder, stack.norm_name, view.norm)


def _name_of(parent: nn.Module, child: nn.Module | None) -> str:
    return next((name for name, module in parent.named_children() if module is child), "")


def _no_stack(model: nn.Module, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}"
    )
