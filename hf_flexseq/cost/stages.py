"""Nanoseconds and bytes of a chunk on a stage: what every pipeline schedule is decided and scored
by.

A chunk of t tokens whose queries see p keys in all (the causal area of its slices) takes on a
stage

    F  linear t + attention p + 3 head t + chunk
    I  linear t + 2.5 attention p + chunk                     and its forward again for
                                                              checkpointed layers
    W  linear t + chunk / 2
    B  I + W

Attention backward has no weights and five matrix products for the forward's two; a linear layer
has one product each for the gradient of its input and of its weight. The LM head goes backward in
F (pipeline/executor.py). Constants are per stage, so that a stage with the head, or with fewer
layers, is priced as what it is: the papers (Seq1F1B 2406.03488, InfiniPipe 2509.21275 equation 1)
price the model and divide by the number of stages, which hides the head.

A chunk holds its activations from F to B or I, and from I to W what its weights' gradients are
made of: the inputs of the linear layers and the gradients of their outputs. A cut sequence also
holds keys and values, allocated once at its full length, from its first F to its last B or I, and
their gradients from its first B or I to its last. Checkpointed layers hold their input only, up to
I.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.cost import CostModel
from hf_flexseq.plan.pipeline import Chunk

ATTENTION_BACKWARD = 2.5  # of the attention's forward
WEIGHT_CHUNK = 0.5  # the constant of a W, of the one of a forward

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage.

    linear_ns, head_ns: forward nanoseconds per token, of the layers and of the LM head with the
    loss. attention_ns: forward nanoseconds per (query, key). chunk_ns: forward nanoseconds per
    chunk, whatever is in it. layers: decoder layers. token_bytes: activations of a token, keys and
    values left out. kv_bytes: keys and values of a token. input_bytes: what a token keeps when all
    layers are checkpointed. owed_bytes: what it keeps from I to W; None for as much as it had
    before.
    """

    linear_ns: float
    attention_ns: float
    chunk_ns: float
    head_ns: float = 0.0
    layers: int = 1
    token_bytes: float = 1.0
    kv_bytes: float = 0.0
    input_bytes: float = 0.0
    owed_bytes: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCost:
    """All stages. send_ns: nanoseconds per token from a stage to its neighbour, beside its
    computing."""

    stages: tuple[StageCost, ...]
    send_ns: float = 0.0

    def __post_init__(self) -> None:
        for number, stage in enumerate(self.stages):
            if (
                min(stage.linear_ns, stage.attention_ns, stage.chunk_ns, stage.head_ns) < 0
                or stage.token_bytes <= 0
            ):
                raise ValueError(
                    f"stage {number}: costs must not be negative, and token_bytes "
                    f"positive: {stage}"
                )

    def to_record(self) -> dict[str, Any]:
        """The costs as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "PipelineCost":
        """The inverse of `to_record`. Raises ValueError for anything that is no cost of a
        pipeline."""
        try:
            return cls(
                stages=tuple(StageCost(**stage) for stage in record["stages"]),
                send_ns=record["send_ns"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not the cost of a pipeline: {error!r} (see PipelineCost.to_record)"
            ) from error

    @classmethod
    def even(cls, stages: int, stage: StageCost) -> "PipelineCost":
        """Equal stages."""
        return cls(stages=(stage,) * stages)

    @classmethod
    def of_model(cls, cost: CostModel, stages: int) -> "PipelineCost":
        """A whole model's cost, divided evenly: the stages of one rank each that nobody has
        measured."""
        return cls.even(
            stages,
            StageCost(
                linear_ns=cost.linear_s * 1e9 / 3 / stages,
                # of the causal half
                attention_ns=2 * cost.attention_s * 1e9 / (1 + ATTENTION_BACKWARD) / stages,
                chunk_ns=cost.micro_batch_s * 1e9 / (2 + WEIGHT_CHUNK) / stages,
                token_bytes=cost.token_bytes / stages,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShape:
    """What a chunk's cost depends on. tokens, pairs: of all its slices. cut: tokens of the slice
    that is a part of a sequence, of which the sequence has `length`; both 0 without one."""

    tokens: int
    pairs: int
    cut: int
    length: int


def shape_of(chunk: Chunk, lengths: tuple[int, ...]) -> StageShape:
    """Tokens and pairs of a chunk."""
    part = chunk.cut(lengths)
    return StageShape(
        tokens=chunk.tokens,
        pairs=sum(causal_pairs(s.start, s.stop) for s in chunk.slices),
        cut=part.tokens if part else 0,
        length=lengths[part.sequence] if part else 0,
    )


def causal_pairs(start: int, stop: int) -> int:
    """(query, key) pairs of tokens [start, stop) with all before them and themselves."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCosts:
    """Costs of all chunks on all stages: [stage][place of the chunk], whole nanoseconds and bytes.

    held: activations from F to B or I; owed: from I to W. carried: keys and values of the chunk's
    cut sequence, as many bytes as their gradients; the same for every chunk of a unit. send:
    [place] nanoseconds to the neighbour.
    """

    forward: list[list[int]]
    input_grad: list[list[int]]
    weight_grad: list[list[int]]
    held: list[list[int]]
    owed: list[list[int]]
    carried: list[list[int]]
    send: list[int]


def chunk_costs(
    cost: PipelineCost, shapes: Sequence[StageShape], checkpointed: Sequence[Sequence[int]] = ()
) -> ChunkCosts:
    """Price all chunks. checkpointed: [stage][place] layers, () for none."""
    tokens, pairs, cut, length = (
        np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)
        for name in ("tokens", "pairs", "cut", "length")
    )
    rows: list[list[list[int]]] = [[] for _ in range(6)]
    for number, stage in enumerate(cost.stages):
        share = (
            np.array(checkpointed[number]) / stage.layers
            if checkpointed
            else np.zeros(len(shapes))
        )
        linear, attention = stage.linear_ns * tokens, stage.attention_ns * pairs
        body = linear + attention + stage.chunk_ns
        again = share * (linear + attention)
        whole = stage.token_bytes * tokens + stage.kv_bytes * (tokens - cut)
        held = (1 - share) * whole + share * stage.input_bytes * tokens
        columns = (
            body + 3 * stage.head_ns * tokens,
            linear + ATTENTION_BACKWARD * attention + stage.chunk_ns + again,
            linear + WEIGHT_CHUNK * stage.chunk_ns,
            held,
            held if stage.owed_bytes is None else stage.owed_bytes * tokens,
            stage.kv_bytes * length,
        )
        for row, column in zip(rows, columns, strict=True):
            row.append(np.rint(column).astype(np.int64).tolist())
    forward, input_grad, weight_grad, activations, owed, carried = rows
    return ChunkCosts(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        held=activations,
        owed=owed,
        carried=carried,
        send=np.rint(cost.send_ns * tokens).astype(np.int64).tolist(),
    )
