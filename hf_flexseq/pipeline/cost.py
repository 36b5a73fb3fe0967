"""The cost of chunks on the stages of one model, from the cost model of the whole: seconds by
weights, bytes by layers.

    linear part                        by the weights that multiply a token, so that the stage with
                                       the LM head is priced with it
    attention, launches, activations   by layers; besides, a stage keeps its result, and the last
                                       one the rows of the final norm and the head
    model state                        by parameters, copies of weights in 16 bits included

Where ranks share every chunk of a stage by Ulysses, each has a part of a chunk's work and bytes,
and their exchanges are added to the linear part: with the bandwidth across nodes where some of the
stage's ranks share chunks with a rank of another node.
"""

from dataclasses import dataclass, replace

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.pipeline.planning.stage_cost import WEIGHT_CHUNK, PipelineCost, StageCost
from hf_flexseq.pipeline.stages import Stage

NS = 1e9  # nanoseconds of a second


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTokenBytes:
    """Bytes of one token on a stage."""

    hidden: int
    """Hidden states between two layers."""
    head: int
    """Whatever the final norm and the head keep until the backward: the norm's input and its
    normalised rows, the head's input and the gradient of it."""
    kv: int
    """Keys and values of one layer, on the mean of all."""
    owed: int
    """Inputs and gradients that the weight gradients of one layer are made of."""


def pipeline_cost(
    cost: CostModel,
    stage: Stage,
    token: StageTokenBytes,
    *,
    checkpointed: bool,
    degree: int,
    topology: Topology,
) -> PipelineCost:
    """Return the cost of all stages.

    cost: of the whole model
    stage: of any rank; each knows the sizes and spans of all
    checkpointed: True if all layers are checkpointed in any case
    degree: ranks that share every chunk of a stage by Ulysses
    topology: of the world, in which ranks with the same stage are neighbours
    """
    stages = []
    for index in range(len(stage.spans)):
        stage_cost = _stage_cost(cost, stage, index, token, checkpointed)
        if degree > 1:
            share_of_layers = stage_cost.layers / len(stage.sizes.layers)
            spans_nodes = _spans_nodes(stage, index, degree, topology)
            bandwidth = cost.bandwidth(degree, spans_nodes)
            stage_cost = _shared(cost, stage_cost, share_of_layers, degree, bandwidth)
        stages.append(stage_cost)
    send_ns = NS * token.hidden / degree / cost.bandwidth(2, False)
    across_ns = NS * token.hidden / degree / cost.bandwidth(2, True)
    send_ns += _crossing_share(stage, topology) * (across_ns - send_ns)
    return PipelineCost(stages=tuple(stages), send_ns=send_ns)


def _crossing_share(stage: Stage, topology: Topology) -> float:
    """Return the share of the hops between stages that cross nodes, for any rank of their stage:
    all are priced at their mean."""
    hops = len(stage.spans) - 1
    across = 0
    for number in range(hops):
        ranks = _ranks_of(stage, number, topology)
        ranks_after = _ranks_of(stage, number + 1, topology)
        for rank, rank_after in zip(ranks, ranks_after, strict=True):
            if rank // topology.ranks_per_node != rank_after // topology.ranks_per_node:
                across += 1
                break
    return across / max(1, hops)


def _spans_nodes(stage: Stage, number: int, degree: int, topology: Topology) -> bool:
    """Return whether any `degree` ranks that share the chunks of stage `number` sit on more than
    one node: the slowest of them set the stage's pace."""
    for first in _ranks_of(stage, number, topology)[::degree]:
        if topology.spans_nodes(first, first + degree):
            return True
    return False


def _ranks_of(stage: Stage, number: int, topology: Topology) -> range:
    """Return the ranks of the world that have stage `number`."""
    ranks_per_stage = topology.world_size // stage.count
    first = number % stage.count * ranks_per_stage
    return range(first, first + ranks_per_stage)


def _shared(
    cost: CostModel, stage: StageCost, share_of_layers: float, degree: int, bandwidth: float
) -> StageCost:
    """Return the cost on one of `degree` ranks that share the stage's chunks. share_of_layers: of
    all layers of the model. bandwidth: bytes/s of the ranks' exchanges."""
    # A third of the exchanges are in the forward, as of the linear part, which they add to.
    exchanged_ns = NS * cost.all_to_all_bytes * share_of_layers / 3 / bandwidth
    stretch = cost.head_stretch(degree) / degree
    owed_bytes = stage.owed_bytes
    if owed_bytes is not None:
        owed_bytes = owed_bytes / degree
    return replace(
        stage,
        linear_ns=(stage.linear_ns + exchanged_ns) / degree,
        head_ns=stage.head_ns / degree,
        attention_ns=stage.attention_ns * stretch,
        token_bytes=stage.token_bytes / degree,
        kv_bytes=stage.kv_bytes / degree,
        input_bytes=stage.input_bytes / degree,
        owed_bytes=owed_bytes,
    )


def _stage_cost(
    cost: CostModel, stage: Stage, index: int, token: StageTokenBytes, checkpointed: bool
) -> StageCost:
    """Return the cost of stage `index` on a rank alone."""
    sizes = stage.sizes
    start, stop = stage.spans[index]
    layers = stop - start
    share_of_layers = layers / len(sizes.layers)

    # 1. nanoseconds of the forward: per number that multiplies a token, and per causal pair
    linear_ns = cost.forward_linear_s * NS / (sum(sizes.layers) + sizes.head)
    # Layers with attention are taken to be spread evenly over the stages.
    attention_ns = cost.forward_pair_s * NS
    head_ns = 0.0
    result_bytes = token.hidden  # of what the stage sends, and keeps until its backward
    if index == len(stage.spans) - 1:
        head_ns = linear_ns * sizes.head
        result_bytes = token.head

    # 2. bytes of a token: at least the inputs of layers, and the result
    kv_bytes = float(layers * token.kv)
    inputs_bytes = layers * token.hidden
    kept_bytes = max(cost.token_bytes * share_of_layers - kv_bytes, inputs_bytes)
    token_bytes = kept_bytes + result_bytes
    # a layer that is checkpointed anyway saves nothing more
    input_bytes = token_bytes if checkpointed else float(inputs_bytes + result_bytes)
    return StageCost(
        linear_ns=linear_ns * sum(sizes.layers[start:stop]),
        head_ns=head_ns,
        attention_ns=attention_ns * share_of_layers,
        chunk_ns=cost.micro_batch_s * NS / (2 + WEIGHT_CHUNK) * share_of_layers,
        layers=max(layers, 1),
        token_bytes=token_bytes,
        kv_bytes=kv_bytes,
        input_bytes=input_bytes,
        owed_bytes=float(layers * token.owed),
    )


def room_bytes(
    cost: CostModel, stage: Stage, *, sharded_over: int, mixed: bool
) -> tuple[int, ...]:
    """Return the bytes that each rank of a pipeline has left for chunks in flight.

    cost: of the whole model
    stage: of any rank; each knows the sizes and spans of all
    sharded_over: ranks that share the state of a stage by FSDP2
    mixed: True if float32 weights are cast to 16 bits once per step

    Raises ValueError when some rank's state takes all of its memory.
    """
    sizes = stage.sizes
    state_bytes = cost.state_bytes + cost.sharded_state_bytes  # of the whole model
    # The first rank has the embedding, which is as large as the head.
    model_weights = sum(sizes.held) + 2 * sizes.head
    of_layers = _held_of_state(sharded_over, mixed=mixed, casts=mixed)
    of_ends = _held_of_state(sharded_over, mixed=mixed, casts=False)
    memory_limit = []
    for index in range(stage.count):
        held_weights = 0.0  # so many weights have as much state as the rank holds
        for start, stop in stage.spans[index :: stage.count]:
            held_weights += of_layers * sum(sizes.held[start:stop])
        if index in (0, stage.count - 1):
            held_weights += of_ends * sizes.head
        left = int(cost.budget_bytes - state_bytes * held_weights / model_weights)
        if left < 1:
            raise ValueError(
                f"cost model {cost.name!r}: the state of rank {index} of the pipeline alone takes "
                f"more than the {cost.budget_bytes / 2**30:.1f} GiB of a rank: use more stages, "
                "or fsdp=True"
            )
        memory_limit.append(left)
    return tuple(memory_limit)


def _held_of_state(ranks: int, *, mixed: bool, casts: bool) -> float:
    """Return the bytes of a parameter on a rank during a step, per byte of state; FSDP2 shares it
    over `ranks`. mixed, casts: True if gathered, or other, weights have 16 bits."""
    # bytes of a parameter
    weight = 4
    gradient = 4
    moments = 8
    cast = 2
    state = weight + gradient + moments
    if ranks == 1:
        return (state + cast) / state if casts else 1.0
    # weight and gradient are whole, besides a part of weight and moments
    gathered = cast if mixed else weight
    return (gathered + gradient + (weight + moments) / ranks) / state
