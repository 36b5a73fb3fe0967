"""Nanoseconds and bytes of a chunk on a stage, by which every pipeline schedule is decided and
scored.

A chunk of t tokens whose queries see p keys in all (the causal area of its slices) takes on a
stage

    F  linear t + attention p + 3 head t + chunk
    I  linear t + 2.5 attention p + chunk                     and its forward again for
                                                              checkpointed layers
    W  linear t + chunk / 2
    B  I + W

Attention backward has no weights and five matrix products for the forward's two; a linear layer
has one product each for the gradient of its input and of its weight. The LM head goes backward in
F (pipeline/executor.py). Constants are per stage, so a stage with the head, or with fewer layers,
has its true price: the papers (Seq1F1B 2406.03488, InfiniPipe 2509.21275 equation 1) price the
model and divide by the number of stages, which hides the head.

The work of layers with a window or a chunk is part of the linear one. They are priced to carry
keys and values as full layers do.

A chunk holds its activations from F to B or I, and from I to W the factors of its weight
gradients: the inputs of the linear layers and the gradients of their outputs. A cut sequence also
holds keys and values, allocated once at its full length, from its first F to its last B or I, and
their gradients from its first B or I to its last. Checkpointed layers hold their input only, up to
I.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from hf_flexseq.base.records import Amount, Bounds, Constants, Positive, Whole
from hf_flexseq.base.values import MAX_BYTES
from hf_flexseq.cost.kernels import FloatArray
from hf_flexseq.cost.model import ATTENTION_BACKWARD, LINEAR_PASSES, CostModel
from hf_flexseq.pipeline.planning.plan import MAX_STAGES
from hf_flexseq.plan.shard import Slice

# Nanoseconds of a token, of a pair or of a chunk: those of `MAX_SECONDS`.
Nanoseconds = Annotated[float, Bounds(most=1e18)]

WEIGHT_CHUNK = 0.5  # a W's constant over that of a forward


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost(Constants):
    """Constants of one stage; nanoseconds cover the forward."""

    what: ClassVar[str] = "the cost of a stage"

    linear_ns: Nanoseconds
    """Nanoseconds per token of the stage's layers."""
    attention_ns: Nanoseconds
    """Nanoseconds per (query, key) pair, layers that read all keys."""
    chunk_ns: Nanoseconds
    """Nanoseconds per chunk, whatever is in it."""
    head_ns: Nanoseconds = 0.0
    """Nanoseconds per token of the LM head with the loss."""
    layers: Whole = 1
    """Number of decoder layers."""
    token_bytes: Positive = 1.0
    """Activation bytes per token, keys and values left out."""
    kv_bytes: Amount = 0.0
    """Bytes per token of keys and values."""
    input_bytes: Amount = 0.0
    """Bytes that a token keeps when all layers are checkpointed."""
    owed_bytes: Amount | None = None
    """Bytes that a token keeps from I to W. None: as many as it kept before I."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCost(Constants):
    """Constants of all stages of a pipeline."""

    what: ClassVar[str] = "the cost of a pipeline"
    is_versioned: ClassVar[bool] = True

    stages: tuple[StageCost, ...]
    """[stages] The constants of each stage."""
    send_ns: Nanoseconds = 0.0
    """Nanoseconds per token from a stage to its neighbour, besides its computing."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        if len(self.stages) > MAX_STAGES:
            raise ValueError(f"{len(self.stages):,} stages: at most {MAX_STAGES:,} can be priced")

    @classmethod
    def even(cls, stages: int, stage: StageCost) -> "PipelineCost":
        """Return the cost of `stages` equal stages."""
        return cls(stages=(stage,) * stages)

    @classmethod
    def of_model(cls, cost: CostModel, stages: int) -> "PipelineCost":
        """Return a whole model's cost, divided evenly over `stages`.

        Each stage has one rank. The even division replaces measurements of single stages. Raises
        ValueError for experts on several ranks.
        """
        if cost.experts is not None:
            raise ValueError(
                f"cost model {cost.name!r} has experts over {cost.experts.ranks} ranks, and the "
                "stages of a pipeline hold whole layers: give one without"
            )
        stage = StageCost(
            linear_ns=cost.forward_linear_s * 1e9 / stages,
            attention_ns=cost.forward_pair_s * 1e9 / stages,
            # a chunk pays the constant in its F and its I, and half of it in its W
            chunk_ns=cost.micro_batch_s * 1e9 / (2 + WEIGHT_CHUNK) / stages,
            token_bytes=cost.token_bytes / stages,
        )
        return cls.even(stages, stage)


class ChunkShape(NamedTuple):
    """The numbers that a chunk's cost depends on."""

    tokens: int
    """Tokens of all slices."""
    pairs: int
    """(query, key) pairs of all slices."""
    cut: int
    """Tokens of the slice that is a part of a sequence; 0 without one."""
    length: int
    """Tokens of the sequence which that slice is a part of; 0 without one."""


def shape_of(slices: Sequence[Slice], lengths: Sequence[int]) -> ChunkShape:
    """Return the shape of a chunk, of whose slices only the first may be a part of a sequence.

    lengths: tokens per sequence of the plan.
    """
    first = slices[0]
    length = lengths[first.sequence]
    is_cut = first.tokens < length
    return ChunkShape(
        tokens=sum(one.tokens for one in slices),
        pairs=sum(causal_pairs(one.start, one.stop) for one in slices),
        cut=first.tokens if is_cut else 0,
        length=length if is_cut else 0,
    )


def causal_pairs(start: int, stop: int) -> int:
    """Return the causal (query, key) pairs of queries [start, stop)."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCosts:
    """Costs of all chunks on all stages, in whole nanoseconds and bytes."""

    forward: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Nanoseconds of F."""
    input_grad: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Nanoseconds of I."""
    weight_grad: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Nanoseconds of W."""
    held: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Bytes of activations from F to B or I."""
    owed: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Bytes that weights' gradients are made of, from I to W."""
    carried: list[list[int]] = field(default_factory=list)
    """[stages, chunks] Bytes of keys and values of the chunk's cut sequence, and as many again of
    their gradients; the same for every chunk of a unit."""
    send: list[int]
    """[chunks] Nanoseconds to the neighbour."""


def chunk_costs(
    cost: PipelineCost, shapes: Sequence[ChunkShape], checkpointed: Sequence[Sequence[int]] = ()
) -> ChunkCosts:
    """Return the costs of all chunks on all stages.

    shapes: [chunks]. checkpointed: [stages, chunks] layers that compute again, () for none.
    """
    if len(checkpointed) not in (0, len(cost.stages)):
        raise ValueError(
            f"the plan has {len(checkpointed)} stages, the cost {len(cost.stages)}: give the cost "
            "of the plan's pipeline"
        )
    tokens, pairs, cut, length = np.array(shapes, dtype=np.float64).reshape(-1, 4).T
    costs = ChunkCosts(send=_whole(cost.send_ns * tokens))
    for index, stage in enumerate(cost.stages):
        share = np.zeros(len(shapes))  # of the layers that compute again
        if checkpointed:
            share = _recomputed_share(stage, checkpointed[index], index)
        # 1. nanoseconds; the head's passes are all in F
        linear = stage.linear_ns * tokens
        attention = stage.attention_ns * pairs
        head = LINEAR_PASSES * stage.head_ns * tokens
        again = share * (linear + attention)
        backward = linear + ATTENTION_BACKWARD * attention + stage.chunk_ns
        costs.forward.append(_whole(linear + attention + stage.chunk_ns + head))
        costs.input_grad.append(_whole(backward + again))
        costs.weight_grad.append(_whole(linear + WEIGHT_CHUNK * stage.chunk_ns))
        # 2. bytes; keys and values of a cut sequence are carried, not held
        kept = stage.token_bytes * tokens + stage.kv_bytes * (tokens - cut)
        held = (1 - share) * kept + share * stage.input_bytes * tokens
        owed = held if stage.owed_bytes is None else stage.owed_bytes * tokens
        costs.held.append(_whole(held))
        costs.owed.append(_whole(owed))
        costs.carried.append(_whole(stage.kv_bytes * length))
    return costs


def _recomputed_share(stage: StageCost, checkpointed: Sequence[int], index: int) -> FloatArray:
    """Return the share of the stage's layers that compute again, [chunks].

    checkpointed: [chunks] layers. Raises ValueError for more layers than stage `index` has.
    """
    if max(checkpointed, default=0) > stage.layers:
        raise ValueError(
            f"stage {index} has {stage.layers} layers, {max(checkpointed)} of them checkpointed"
        )
    return np.array(checkpointed) / stage.layers


def _whole(values: FloatArray) -> list[int]:
    """Return values [chunks] as whole numbers. Raises ValueError beyond 63 bits."""
    if values.size and not values.max() <= MAX_BYTES:
        raise ValueError(
            f"the cost of a chunk is {values.max():.3g} ns or bytes, at most {MAX_BYTES:.3g} can "
            "be counted: check the constants of the stages and the lengths"
        )
    rounded: list[int] = np.rint(values).astype(np.int64).tolist()
    return rounded
