"""What chunks cost on the stages of one model, from the cost model of the whole: seconds by
weights, bytes by layers.

A whole model's linear part is divided by the weights that multiply a token, so that the stage with
the LM head is priced with it; attention, launches and activations by layers; parameters' state by
parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.stages import WEIGHT_CHUNK, PipelineCost, StageCost
from hf_flexseq.pipeline.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTokenBytes:
    """Of one token: hidden states between layers, keys and values of one layer, and what the
    gradients of one layer's weights are made of."""

    hidden: int
    kv: int
    owed: int


def pipeline_cost(
    cost: CostModel, stage: Stage, token: StageTokenBytes, *, checkpointed: bool, degree: int = 1
) -> PipelineCost:
    """The cost of all stages. checkpointed: whether all layers are checkpointed in any case.
    degree: ranks that share every chunk of a stage by Ulysses."""
    stages = [
        _stage_cost(cost, stage, index, token, checkpointed) for index in range(len(stage.spans))
    ]
    if degree > 1:
        stages = [
            _shared(cost, one, one.layers / len(stage.sizes.layers), degree) for one in stages
        ]
    return PipelineCost(
        stages=tuple(stages), send_ns=1e9 * token.hidden / degree / cost.bandwidth(2, False)
    )


def _shared(cost: CostModel, stage: StageCost, of_layers: float, degree: int) -> StageCost:
    """A stage whose chunks `degree` ranks share; its exchanges, a third of them in the forward,
    are linear too."""
    exchanged_ns = 1e9 * cost.all_to_all_bytes * of_layers / 3 / cost.bandwidth(degree, False)
    return replace(
        stage,
        linear_ns=(stage.linear_ns + exchanged_ns) / degree,
        head_ns=stage.head_ns / degree,
        attention_ns=stage.attention_ns * cost.head_stretch(degree) / degree,
        token_bytes=stage.token_bytes / degree,
        kv_bytes=stage.kv_bytes / degree,
        input_bytes=stage.input_bytes / degree,
        owed_bytes=None if stage.owed_bytes is None else stage.owed_bytes / degree,
    )


def _stage_cost(
    cost: CostModel, stage: Stage, index: int, token: StageTokenBytes, checkpointed: bool
) -> StageCost:
    start, stop = stage.spans[index]
    layers, sizes = stop - start, stage.sizes
    of_layers = layers / len(sizes.layers)
    linear_ns = cost.forward_linear_s * 1e9 / (sum(sizes.layers) + sizes.head)
    attention_ns = cost.forward_pair_s * 1e9
    kv_bytes, whole_bytes = layers * token.kv, cost.token_bytes * of_layers
    token_bytes = max(whole_bytes - kv_bytes, layers * token.hidden, 1.0)
    return StageCost(
        linear_ns=linear_ns * sum(sizes.layers[start:stop]),
        head_ns=linear_ns * sizes.head if index == len(stage.spans) - 1 else 0.0,
        attention_ns=attention_ns * of_layers,
        chunk_ns=cost.micro_batch_s * 1e9 / (2 + WEIGHT_CHUNK) * of_layers,
        layers=max(layers, 1),
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        input_bytes=token_bytes if checkpointed else min(layers * token.hidden, token_bytes),
        owed_bytes=float(layers * token.owed),
    )


def room_bytes(cost: CostModel, stage: Stage, *, sharded_over: int = 1) -> Sequence[int]:
    """Bytes that each rank of a pipeline has left for what is in flight. Raises ValueError when
    some rank's state takes all.

    sharded_over: ranks that share the state of a stage by FSDP2.
    """
    sizes, state = (
        stage.sizes,
        (cost.state_bytes + cost.sharded_state_bytes) * _held_of_state(sharded_over),
    )
    room = []
    for index in range(stage.count):
        layers = sum(
            sum(sizes.layers[start:stop]) for start, stop in stage.spans[index :: stage.count]
        )
        own = layers + sizes.head * (index in (0, stage.count - 1))
        left = int(cost.budget_bytes - state * own / (sum(sizes.layers) + 2 * sizes.head))
        if left < 1:
            raise ValueError(
                f"cost model {cost.name!r}: the state of rank {index} of the pipeline alone takes "
                f"more than the "
                f"{cost.budget_bytes / 2**30:.1f} GiB of a rank: use more stages, or fsdp=True"
            )
        room.append(left)
    return room


def _held_of_state(ranks: int) -> float:
    """How much of a stage's state one of the `ranks` that share it holds during a step: weights
    and gradients whole (4 bytes each), and its part of the weights (4) and of Adam's moments
    (8)."""
    return 1.0 if ranks == 1 else (4 + 4 + (4 + 8) / ranks) / 16
