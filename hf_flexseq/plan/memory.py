"""The activations that a rank keeps, offloads or computes again in one micro-batch: tensors that
its layers compute in the forward and need again in the backward.

Layers count from the first that a token goes through. Of L layers,

    recomputed_layers     the first keep their input alone and run again in the backward; the
                          others keep all tensors that their backward needs
    inputs_on_host        the first of these keep that input in the memory of the host
    outputs_on_host       the first of these keep there the output of their attention or scan
    outputs_recomputed    the next ones compute attention again; the rest keep its output on the
                          device and run it once

Tensors on the host come back one layer ahead of their use. `mlp_tiles` cuts the tokens of every
layer's MLP into so many pieces, forward and backward: tensors inside an MLP exist for one piece at
a time, and are computed again in the backward.

The language model's head needs no number here: it always computes its logits for a fixed number of
bytes at a time (`kernels/chunked_loss.py`), however many tokens there are.
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_flexseq.base.records import Constants, Whole
from hf_flexseq.base.values import whole


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChoice(Constants):
    """Where the activations of one micro-batch are between forward and backward."""

    what: ClassVar[str] = "a memory choice"

    recomputed_layers: int = 0
    """Layers, from the first, that keep their input alone and run again in the backward."""
    inputs_on_host: int = 0
    """How many of these, from the first, keep their input on the host."""
    outputs_on_host: int = 0
    """How many of these, from the first, keep the output of attention on the host."""
    outputs_recomputed: int = 0
    """How many of these, after those on the host, compute attention again."""
    mlp_tiles: Whole = 1
    """Pieces of tokens in which an MLP is computed; 1 for all tokens at once."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        for name in ("inputs_on_host", "outputs_on_host"):
            whole(name, getattr(self, name), most=self.recomputed_layers)
        not_on_host = self.recomputed_layers - self.outputs_on_host
        whole("outputs_recomputed", self.outputs_recomputed, most=not_on_host)

    @property
    def uses_host(self) -> bool:
        """True if anything is on the host."""
        return bool(self.inputs_on_host or self.outputs_on_host)

    # ---- by layer

    def recomputes(self, layer: int) -> bool:
        """Return True if this layer runs again in the backward."""
        return layer < self.recomputed_layers

    def input_on_host(self, layer: int) -> bool:
        """Return True if the input of this layer is on the host."""
        return layer < self.inputs_on_host

    def output_on_host(self, layer: int) -> bool:
        """Return True if the output of this layer's attention is on the host."""
        return layer < self.outputs_on_host

    def recomputes_output(self, layer: int) -> bool:
        """Return True if this layer's attention runs again in the backward."""
        after_host = layer - self.outputs_on_host
        return 0 <= after_host < self.outputs_recomputed

    # ---- words

    def __str__(self) -> str:
        parts = []
        if not self.recomputed_layers:
            parts.append("nothing recomputed")
        else:
            parts.append(f"{self.recomputed_layers} layers recomputed")
        if self.inputs_on_host:
            parts.append(f"inputs of {self.inputs_on_host} on the host")
        if self.outputs_on_host:
            parts.append(f"attention outputs of {self.outputs_on_host} on the host")
        if self.outputs_recomputed:
            parts.append(f"attention of {self.outputs_recomputed} recomputed")
        if self.mlp_tiles > 1:
            parts.append(f"MLPs in {self.mlp_tiles} tiles")
        return ", ".join(parts)
