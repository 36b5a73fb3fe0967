"""A decoder-only HF model, cut in place into one stage of a pipeline.

    stage 0        embedding, layers
    in between     layers
    last stage     layers (perhaps none), final norm, LM head

With V virtual stages per rank the model has V times as many stages as there are ranks, and rank r
has the stages r, r + P, r + 2 P, ... of it in one model, of which it runs one at a time.

Layers of other stages become a `Skip`, which hands its input on: so every parameter keeps its
global name, and the model's own forward still works, given hidden states as `inputs_embeds`
(`stack.py`).

Tied embeddings: the first stage has the embedding, the last the head, each a copy of the one
tensor. Both keep its name, `tied_name`, and their gradients are summed once per step.

Rejected: transformers' own pipeline split (even, 1.2 to 1.6 times slower at large vocabularies,
inference only), and a forward of our own over the layers, which would have to know every model's
position embeddings and masks.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from hf_flexseq.pipeline.divide import divide_layers
from hf_flexseq.pipeline.stack import Elsewhere, Skip, Stack, View

# Tokens of a sequence, where attention is weighed against the rest of a layer: the model is cut
# before any length is known. An assumption, not tuned.
TYPICAL_CONTEXT = 4096

Spans = tuple[tuple[int, int], ...]  # [start, stop) of the layers of every stage


class Stage:
    """The part of the model that one rank has, which is several stages with virtual ones."""

    def __init__(self, stack: Stack, index: int, count: int, spans: Spans) -> None:
        """Cut a whole stack to the part of rank `index` of `count` in its pipeline. spans: [start,
        stop) of the layers of all stages"""
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

    @property
    def second_copy(self) -> nn.Parameter | None:
        """The last stage's copy of the tied tensor, which no file and no norm counts again."""
        return None if self.is_first or not self.is_last else self.tied_parameter()

    def renamed(self) -> dict[str, str]:
        """Return the global names of parameters that have another one here: the head that copies
        the embedding."""
        tied = self.tied_parameter()
        if tied is None or self.tied_name is None:
            return {}
        names = [name for name, p in self.stack.model.named_parameters() if p is tied]
        return {name: self.tied_name for name in names if name != self.tied_name}

    def global_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (global name, parameter) of this rank; both tied copies have the same name."""
        renamed = self.renamed()
        parameters = self.stack.model.named_parameters()
        return [(renamed.get(name, name), parameter) for name, parameter in parameters]


class Loss(NamedTuple):
    """The loss of a chunk, and where its graph is divided from the layers'."""

    loss: torch.Tensor  # a scalar
    hidden: torch.Tensor  # [1, tokens, hidden_size], with which the layers' graph ends
    entry: torch.Tensor  # the same values, with which the loss' graph begins


class VirtualStage:
    """A stage of the model, on a rank that may have several."""

    def __init__(self, stage: Stage, number: int) -> None:
        """number: the stage's among all stages of the model"""
        self._stack = stage.stack
        self.number = number
        self.layers = stage.spans[number]  # [start, stop) of the model's
        self.is_first = number == 0
        self.is_last = number == len(stage.spans) - 1
        # A rank with one stage need not hide its other layers: it has none.
        self._alone: View | None = None
        if len(stage.spans) > stage.count:
            self._alone = stage.stack.view(*self.layers, has_norm=self.is_last)

    def hidden(self, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return hidden states [1, tokens, hidden_size] after the stage's layers, and any norm.
        source: token ids [1, tokens] on the first stage, else hidden states [1, tokens,
        hidden_size]"""
        with self._stack.replaced(self._alone):
            output = self._stack.decoder(**self._entry(source), use_cache=False, **kwargs)
        return output.last_hidden_state

    def loss(self, source: torch.Tensor, **kwargs: Any) -> Loss:
        """Return the last stage's loss of a chunk, whose graph begins after the norm and can go
        backward at once. source: see `hidden`, [1, tokens, ...]. kwargs: with labels and
        num_items_in_batch."""
        divided: list[tuple[torch.Tensor, torch.Tensor]] = []

        def divide(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output.last_hidden_state  # [1, tokens, hidden_size]
            entry = hidden.detach().requires_grad_(hidden.requires_grad)
            output.last_hidden_state = entry
            divided.append((hidden, entry))

        hook = self._stack.decoder.register_forward_hook(divide)
        try:
            with self._stack.replaced(self._alone):
                output = self._stack.model(**self._entry(source), use_cache=False, **kwargs)
        finally:
            hook.remove()
        hidden, entry = divided[0]
        return Loss(output.loss, hidden, entry)

    def _entry(self, source: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `source` [1, tokens] or [1, tokens, hidden_size] as keyword argument."""
        return {"input_ids" if self.is_first else "inputs_embeds": source}


# ---- cutting


def cut(
    model: nn.Module,
    index: int,
    count: int,
    *,
    virtual: int = 1,
    check: bool = True,
) -> Stage:
    """Reduce `model` in place to the part that rank `index` of `count` has of it, and return it.

    virtual: stages of each rank
    check: True to try the model on hidden states; one without memory cannot do that, so call
        `Stack.check_identity` later

    Raises ValueError for more stages than layers + 1, layers that share keys being one, and
    NotImplementedError for a model without a plain decoder stack.
    """
    stack = Stack(model)
    spans = modelled_division(stack, count * virtual)
    if check:
        stack.check_identity()
    return Stage(stack, index, count, spans)


def modelled_division(stack: Stack, count: int) -> Spans:
    """Return the division by multiplications per token, of weights and a typical context."""
    attention = TYPICAL_CONTEXT * stack.width  # two products with half of the context's keys
    sizes = stack.sizes()
    return divide_layers(
        [size + attention for size in sizes.layers],
        count,
        last=sizes.head,
        inseparable=stack.inseparable(),
    )
