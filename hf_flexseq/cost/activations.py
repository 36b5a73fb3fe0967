"""Bytes that a rank holds of the activations of a micro-batch, by the choice made for them.

A choice (`plan/memory.py`) says of L layers that the first R run again in the backward, that of
these the inputs of the first I and the outputs of attention of the first O are on the host, that N
more outputs are computed again, and that MLPs are computed in T tiles. With the bytes of a token

    input    a layer's input
    output   what a layer's attention, or its scan, gave, with log-sum-exps
    layer    all that a layer keeps for a backward that computes nothing again; `mlp` of these
             inside of its MLP, which tiles do without
    work     what a layer's backward holds at its peak besides these; `mlp_work` of these exist for
             one tile at a time
    head     final hidden states and their gradients

a rank holds between forward and backward, for each token,

    kept = (L - R) (layer - [T > 1] mlp) + (R - I) input + (R - O - N) output

and at its peak the most of three moments:

    head     kept + head                     when the loss is computed
    whole    kept + work                     when the last layer's backward runs nothing again
    replay   kept of the first R layers + layer - output + work, when layer R runs again, which
             has its attention's output already, unless that is computed again, too

With tiles, `layer` of the replay and `work` have mlp and mlp_work divided by T. Where anything is
on the host, one layer's input or output more is on the device: it leaves while the next layer
computes, and arrives while the one behind it computes.

`choices.py` has what a choice costs in seconds.
"""

from dataclasses import dataclass, fields
from typing import Any

from hf_flexseq.base.values import fields_of, number, positive, whole
from hf_flexseq.plan.memory import MemoryChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Activations of one model in training, and the host that may hold a part of them.

    All bytes are those of one token on the rank that holds it.
    """

    layers: int
    """Layers of the model."""
    input_bytes: float
    """Bytes of a layer's input."""
    output_bytes: float
    """Bytes of what the attention or the scan of a layer gave, on the mean."""
    layer_bytes: float
    """Bytes that a layer keeps for a backward that computes nothing again, on the mean."""
    mlp_bytes: float
    """Bytes of these inside of the layer's MLP; 0 where MLPs cannot be tiled."""
    work_bytes: float
    """Bytes that a layer's backward holds at its peak besides what the layer keeps."""
    mlp_work_bytes: float
    """Bytes of these that tiles divide."""
    head_bytes: float
    """Bytes of final hidden states and their gradients."""
    mlp_share: float
    """Share of `linear_s` that MLPs take which can be tiled."""
    out_rate: float
    """Bytes/s of a rank to its host."""
    back_rate: float
    """Bytes/s of a rank from its host."""
    host_bytes: float
    """Bytes of the host's memory that one rank may use."""
    as_set: MemoryChoice
    """What the user has chosen for the run; seconds of the cost model are those of this choice."""

    def __post_init__(self) -> None:
        whole("layers", self.layers, least=1)
        whole("as_set, recomputed_layers", self.as_set.recomputed_layers, most=self.layers)
        positive("input_bytes", self.input_bytes)
        positive("layer_bytes", self.layer_bytes)
        number("output_bytes", self.output_bytes, most=self.layer_bytes)
        number("mlp_bytes", self.mlp_bytes, most=self.layer_bytes)
        number("work_bytes", self.work_bytes)
        number("mlp_work_bytes", self.mlp_work_bytes, most=self.work_bytes)
        for name in ("head_bytes", "host_bytes"):
            number(name, getattr(self, name))
        number("mlp_share", self.mlp_share, most=1.0)
        positive("out_rate", self.out_rate)
        positive("back_rate", self.back_rate)

    # ---- bytes

    def token_bytes(self, choice: MemoryChoice) -> float:
        """Return the bytes that a rank holds of each token at the peak of a micro-batch."""
        # 1. what a layer's backward works on
        tiles = choice.mlp_tiles
        layer = self.layer_bytes
        kept_of_layer = layer
        work = self.work_bytes
        if tiles > 1:
            kept_of_layer -= self.mlp_bytes
            layer = kept_of_layer + self.mlp_bytes / tiles
            work -= self.mlp_work_bytes * (1 - 1 / tiles)
        # 2. what is kept between forward and backward
        recomputed = choice.recomputed_layers
        whole_layers = self.layers - recomputed
        inputs = recomputed - choice.inputs_on_host
        outputs = recomputed - choice.outputs_on_host - choice.outputs_recomputed
        kept_of_recomputed = inputs * self.input_bytes + outputs * self.output_bytes
        if choice.inputs_on_host:
            kept_of_recomputed += self.input_bytes
        if choice.outputs_on_host:
            kept_of_recomputed += self.output_bytes
        kept = kept_of_recomputed + whole_layers * kept_of_layer
        # 3. the peak
        moments = [kept + self.head_bytes]
        if whole_layers:
            moments.append(kept + work + (layer - kept_of_layer))
        if recomputed:
            made_anew = layer
            if not choice.recomputes_output(recomputed - 1):
                made_anew -= self.output_bytes
            moments.append(kept_of_recomputed + made_anew + work)
        return max(moments)

    def host_token_bytes(self, choice: MemoryChoice) -> float:
        """Return the bytes of each token that are on the host."""
        return (
            choice.inputs_on_host * self.input_bytes + choice.outputs_on_host * self.output_bytes
        )

    # ---- JSON

    def to_record(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        record: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "as_set":
                record[one.name] = value.to_record()
            elif one.name == "layers":
                record[one.name] = value
            else:
                record[one.name] = float(value)
        return record

    @classmethod
    def from_record(cls, record: Any) -> "Activations":
        """Inverse of `to_record`. Raises ValueError for any other record."""
        needed = [one.name for one in fields(cls)]
        values = dict(fields_of(record, "activations", needed=needed))
        values["as_set"] = MemoryChoice.from_record(values["as_set"])
        return cls(**values)
