"""The sizes of a model, as estimates of its cost need them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.cost.tower import TowerShape


class HeadShape(NamedTuple):
    """The heads of an attention layer."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Width of a head."""

    @property
    def query_width(self) -> int:
        """Numbers in a token's queries, all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in a token's keys and values, all heads."""
        return 2 * self.kv_heads * self.head_dim


class ExpertShape(NamedTuple):
    """The experts of a model."""

    layers: int
    """Layers that have experts."""
    of_layer: int
    """Experts of such a layer, without those that work on every token."""
    active: int
    """Experts of these that work on a token."""
    params: int
    """Parameters of all experts of all layers."""

    @property
    def active_params(self) -> int:
        """Parameters that work on one token."""
        return self.params * self.active // self.of_layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Llama-like decoder in numbers."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the hidden states."""
    heads: int
    """Query heads; where layers differ, the most of one."""
    kv_heads: int
    """Heads of keys and values; where layers differ, the most of one."""
    head_dim: int
    """Width of a head; where layers differ, the largest."""
    intermediate: int
    """Width inside the MLP; with experts, the sum over one token's experts."""
    vocab: int
    """Tokens of the vocabulary."""
    params: int
    """All parameters, embeddings included."""
    dtype_bytes: int = 2
    """Bytes of one activation."""
    hidden_bytes: int | None = None
    """Bytes of one number between layers, under autocast as many as of a weight; None: as many as
    of an activation."""
    reaches: tuple[tuple[int, Reach], ...] = ()
    """(layers, reach) of layers with a window or a chunk; all others read all keys."""
    recurrent: tuple[tuple[int, RecurrentShape], ...] = ()
    """(layers, sizes) of recurrent layers."""
    without_attention: int = 0
    """Layers without attention."""
    active_params: int | None = None
    """Parameters that work on one token; a head that is the embedding counts twice. None: all."""
    frozen_params: int = 0
    """Parameters of these that get no gradients, as below adapters."""
    frozen_bytes: int = 0
    """Bytes of their weights."""
    head_shapes: tuple[tuple[Reach, HeadShape], ...] = ()
    """(reach, heads of its layers) if layers differ; () if all have the heads above."""
    head_norms: bool = False
    """True if queries and keys are normalised, head by head."""
    experts: ExpertShape | None = None
    """The experts; None for a model without any."""
    tower: TowerShape | None = None
    """The vision tower, whose parameters work on no token of text; None without one."""

    def __post_init__(self) -> None:
        if self.full_layers < 0:
            raise ValueError(
                f"{self.attention_count - self.full_layers} layers with a window or a chunk, of "
                f"{self.attention_count} layers"
            )
        for layers, shape in self.recurrent:
            if layers > self.layers:
                raise ValueError(f"{layers} {shape} layers, of {self.layers} layers")

    @property
    def active_experts(self) -> int:
        """Experts that work on a token; 0 without experts."""
        return 0 if self.experts is None else self.experts.active

    @property
    def full_layers(self) -> int:
        """Layers that read all keys."""
        return self.attention_count - sum(layers for layers, _ in self.reaches)

    @property
    def attention_count(self) -> int:
        """Layers with attention."""
        return self.layers - self.without_attention

    @property
    def has_experts(self) -> bool:
        """True if less than half of the parameters work on a token."""
        return self.active_params is not None and 2 * self.active_params < self.params

    def with_adapters(self, rank: int) -> "ModelShape":
        """Return the sizes of this model, frozen, with LoRA adapters of a rank at all matrices of
        its layers except experts; weights have the bytes of an activation."""
        widths = 0  # into and out of all adapted matrices
        for layers, _, heads in self.attention_layers():
            of_query = 2 * (self.hidden + heads.query_width)  # and of the output
            of_keys = 2 * self.hidden + heads.kv_width
            widths += layers * (of_query + of_keys)
        if not self.has_experts:
            widths += 3 * self.layers * (self.hidden + self.intermediate)
        adapters = rank * widths
        active = self.active_params
        return replace(
            self,
            params=self.params + adapters,
            active_params=None if active is None else active + adapters,
            frozen_params=self.params,
            frozen_bytes=self.params * self.dtype_bytes,
        )

    def share_of(self, params: int) -> float:
        """Return the share that some parameters are of those that work on a token, with the
        embeddings left out: these are looked up without arithmetic."""
        active = self.params if self.active_params is None else self.active_params
        return min(1.0, params / (active - self.vocab * self.hidden))

    @property
    def linear_passes(self) -> float:
        """Passes through linear layers, forward and backward: a forward, one for the gradients of
        their inputs, and one for the gradients of trained weights."""
        return 3 - self.frozen_params / self.params

    def heads_of(self, reach: Reach) -> HeadShape:
        """Return the heads of the layers of a reach."""
        same = HeadShape(self.heads, self.kv_heads, self.head_dim)
        return dict(self.head_shapes).get(reach, same)

    def attention_layers(self) -> Iterator[tuple[int, Reach, HeadShape]]:
        """Yield (layers, their reach, their heads) of all layers with attention."""
        for layers, reach in ((self.full_layers, FULL), *self.reaches):
            yield layers, reach, self.heads_of(reach)

    @property
    def query_numbers(self) -> int:
        """Numbers in a token's queries, all layers."""
        return sum(layers * heads.query_width for layers, _, heads in self.attention_layers())

    @property
    def kv_numbers(self) -> int:
        """Numbers in a token's keys and values, all layers."""
        return sum(layers * heads.kv_width for layers, _, heads in self.attention_layers())
