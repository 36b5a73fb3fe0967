"""Bytes that a rank holds of the activations of a micro-batch, by the choice made for them.

A choice (`plan/memory.py`) has five numbers. The first R layers run again in the backward; of
these, the first I have their inputs on the host, and the first O the outputs of their attention; N
more outputs are computed again; and MLPs are computed in T tiles. With the bytes per token

    input    a layer's input
    output   the output of a layer's attention or scan, with log-sum-exps
    kept     everything that a layer keeps for a backward that computes nothing again; `mlp` of
             these are inside of its MLP, and tiles do without them
    peak     the most that a layer holds in its backward, or in its forward where that runs again,
             including its input and kept bytes; `tiled` of these exist for one tile at a time
    rest     the most of it outside of its MLP, if that is tiled
    base     tensors that all layers share, such as a token's position
    head     final hidden states and their gradients

the first layers hold between forward and backward

    held(l) = base + sum over layers before l of:
                  kept - [T > 1] mlp                                where nothing runs again
                  [not on host] input + [neither on host nor again] output      in the others

and a rank's peak is the most of these moments:

    head       held(all layers) + head                  when the loss is computed
    layer l    held(l) + peak                           when its backward runs
               held(l) + max(rest, peak - (1 - 1/T) tiled)          in tiles

Where anything is on the host, one layer's input or output more is on the device: it leaves while
the next layer computes, and arrives while the one behind it computes. A layer that runs again has
its kept bytes once more when its backward begins, so its peak is the same as without.

`choices.py` has the seconds of a choice.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hf_flexseq.base.records import Amount, Bounds, Constants, Positive, Share
from hf_flexseq.base.values import number, whole
from hf_flexseq.plan.memory import MemoryChoice

# Layers of a model, at most: choices are compared layer by layer.
MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes(Constants):
    """Bytes of one token in a layer, on the rank that holds it."""

    what: ClassVar[str] = "the bytes of a layer"

    input_bytes: Positive
    """Bytes of the layer's input."""
    output_bytes: Amount
    """Bytes of the output of its attention or its scan."""
    kept_bytes: Positive
    """Bytes that the layer keeps for a backward that computes nothing again."""
    mlp_bytes: Amount
    """Bytes of these inside of its MLP; 0 where that cannot be tiled."""
    peak_bytes: Positive
    """Bytes that it holds at its peak, in backward or forward, the input and those kept
    included."""
    tiled_bytes: Amount
    """Bytes of these that tiles divide."""
    rest_bytes: Amount
    """Bytes at its peak outside of its MLP, if that is tiled."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        number("mlp_bytes", self.mlp_bytes, most=self.kept_bytes)
        for name in ("output_bytes", "tiled_bytes", "rest_bytes"):
            number(name, getattr(self, name), most=self.peak_bytes)

    def held(self, choice: MemoryChoice, layer: int) -> float:
        """Return the bytes that this layer holds between forward and backward."""
        if not choice.recomputes(layer):
            return self.kept_bytes - (self.mlp_bytes if choice.mlp_tiles > 1 else 0.0)
        held = 0.0
        if not choice.input_on_host(layer):
            held += self.input_bytes
        if not choice.output_on_host(layer) and not choice.recomputes_output(layer):
            held += self.output_bytes
        return held

    def peak(self, tiles: int) -> float:
        """Return the bytes that its backward holds at its peak, with an MLP in so many tiles."""
        if tiles == 1:
            return self.peak_bytes
        return max(self.rest_bytes, self.peak_bytes - (1 - 1 / tiles) * self.tiled_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations(Constants):
    """Activations of one model in training, and the host that may hold a part of them."""

    what: ClassVar[str] = "the activations of a cost model"

    kinds: tuple[LayerBytes, ...]
    """The kinds of its layers."""
    order: tuple[int, ...]
    """The kind of each layer, by its place in `kinds`."""
    base_bytes: Amount
    """Bytes per token that all layers share."""
    head_bytes: Amount
    """Bytes per token of final hidden states and their gradients, when the loss is computed."""
    mlp_share: Share
    """Share of `linear_s` that MLPs take which can be tiled."""
    linear_passes: Annotated[float, Bounds(least=2, most=3)]
    """Passes of linear layers where nothing runs again: one forward, one for the gradients of
    their inputs, and one for the gradients of trained weights."""
    out_rate: Positive
    """Bytes/s of a rank to its host."""
    back_rate: Positive
    """Bytes/s of a rank from its host."""
    host_bytes: Amount
    """Bytes of the host's memory that one rank may use."""
    as_set: MemoryChoice
    """The user's choice for the run, which the seconds of the cost model assume."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        whole("order, number of layers", len(self.order), least=1, most=MAX_LAYERS)
        whole("kinds, number of kinds", len(self.kinds), least=1)
        for kind in self.order:
            whole("order, kind of a layer", kind, most=len(self.kinds) - 1)
        whole("as_set, recomputed_layers", self.as_set.recomputed_layers, most=self.layers)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.order)

    # ---- bytes

    def token_bytes(self, choice: MemoryChoice) -> float:
        """Return the bytes that a rank holds of each token at the peak of a micro-batch."""
        return _token_bytes(self, choice)

    def host_token_bytes(self, choice: MemoryChoice) -> float:
        """Return the bytes per token that are on the host."""
        on_host = 0.0
        for layer, kind in enumerate(self.order):
            if choice.input_on_host(layer):
                on_host += self.kinds[kind].input_bytes
            if choice.output_on_host(layer):
                on_host += self.kinds[kind].output_bytes
        return on_host

    def within_host(self, tokens: int, choice: MemoryChoice) -> int:
        """Return as many of a rank's tokens as the host has room for under a choice."""
        on_host = self.host_token_bytes(choice)
        return min(tokens, int(self.host_bytes // on_host)) if on_host else tokens


@functools.lru_cache(maxsize=4096)
def _token_bytes(activations: Activations, choice: MemoryChoice) -> float:
    """Return the most of the moments that this page describes, in bytes per token."""
    held = activations.base_bytes
    kinds = activations.kinds
    if choice.inputs_on_host:
        held += max(kind.input_bytes for kind in kinds)
    if choice.outputs_on_host:
        held += max(kind.output_bytes for kind in kinds)
    most = 0.0
    for layer, kind in enumerate(activations.order):
        most = max(most, held + kinds[kind].peak(choice.mlp_tiles))
        held += kinds[kind].held(choice, layer)
    return max(most, held + activations.head_bytes)
