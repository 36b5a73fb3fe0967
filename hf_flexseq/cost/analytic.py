"""Cost models estimated from a model's and a device's figures: FLOPs over FLOP/s and bytes over
bytes/s.

Good enough to rank plans on a machine nobody has measured; a measured model is better.
"""

from dataclasses import dataclass

from hf_flexseq.cost import PIECE_ROWS, CostModel
from hf_flexseq.topology import Topology

EXCHANGES = 4  # a layer's in Ulysses: to heads and back, forward and backward


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Llama-like decoder in numbers. params: all parameters, embeddings included. dtype_bytes:
    of activations."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    params: int
    dtype_bytes: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """What one rank's device achieves (not its peak).

    flops: FLOP/s in training kernels. memory_bytes: what one rank can use. intra_bytes,
    inter_bytes: bytes/s a rank moves to ranks of its own node and of others. layer_s: seconds a
    layer's forward and backward cost beside their arithmetic (launches). transfer_s: seconds until
    a transfer between ranks begins. overlap: share of a transfer that costs no arithmetic
    meanwhile: a CPU core moves its bytes itself. own_nic: whether a rank has a link of its own to
    other nodes; otherwise those of a node share one. piece_rows: as in `CostModel`.
    """

    name: str
    flops: float
    memory_bytes: float
    intra_bytes: float
    inter_bytes: float
    layer_s: float
    transfer_s: float = 3e-5
    overlap: float = 1.0
    own_nic: bool = True
    piece_rows: int = PIECE_ROWS["cuda"]


# Achieved rates: about 45 % of the dense bf16 peak, 70 % of NVLink one way, one 400 (A100: 200)
# Gb/s NIC per rank.
DEVICES = {
    device.name: device
    for device in (
        DeviceSpec(
            name="H200",
            flops=4.4e14,
            memory_bytes=139 * 2**30,
            intra_bytes=3e11,
            inter_bytes=4e10,
            layer_s=5e-4,
        ),
        DeviceSpec(
            name="H100",
            flops=4.4e14,
            memory_bytes=79 * 2**30,
            intra_bytes=3e11,
            inter_bytes=4e10,
            layer_s=5e-4,
        ),
        DeviceSpec(
            name="A100-80GB",
            flops=1.4e14,
            memory_bytes=79 * 2**30,
            intra_bytes=2e11,
            inter_bytes=2e10,
            layer_s=5e-4,
        ),
        DeviceSpec(
            name="A100-40GB",
            flops=1.4e14,
            memory_bytes=39 * 2**30,
            intra_bytes=2e11,
            inter_bytes=2e10,
            layer_s=5e-4,
        ),
        DeviceSpec(
            name="CPU",
            flops=3e10,
            memory_bytes=4 * 2**30,
            intra_bytes=1e9,
            inter_bytes=1e8,
            layer_s=1e-3,
            transfer_s=3e-4,
            overlap=0.0,
            own_nic=False,
            piece_rows=PIECE_ROWS["cpu"],
        ),
    )
}


def analytic_cost_model(
    shape: ModelShape,
    device: DeviceSpec,
    topology: Topology,
    *,
    checkpointing: bool = True,
    chunked_loss: bool = True,
    zero_stage: int = 0,
    memory_fraction: float = 0.85,
) -> CostModel:
    """An estimate from plain numbers.

    checkpointing: layers are recomputed in the backward, attention is not (its outputs are kept).
    chunked_loss: no logits of all tokens at once, but a float32 gradient of the head from the
    forward on. zero_stage: 0 nothing sharded, 1 optimizer, 2 also gradients, 3 also parameters
    (FSDP). memory_fraction: share of the device's memory to plan with.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}: must be 0, 1, 2 or 3")
    query, key_value = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    # looking up embeddings costs no arithmetic
    computed = shape.params - shape.vocab * shape.hidden
    flops_per_weight = 8 if checkpointing else 6  # 2 forward, 4 backward, 2 for the second forward
    moved = shape.layers * shape.dtype_bytes
    # of q, k, v and the output: forward, again for the backward, gradients
    exchanges = 3.0 if checkpointing else 2.0
    replicated, sharded = _state_bytes(shape.params, zero_stage)
    # in the model's dtype, in float32, and the gradient
    logits = shape.vocab * (shape.dtype_bytes + 8)
    gathered = (
        3 * shape.params * shape.dtype_bytes if zero_stage == 3 and topology.world_size > 1 else 0
    )
    return CostModel(
        name=f"analytic-{device.name}",
        # causal: 2 s^2 q forward, 5 s^2 q backward
        attention_s=shape.layers * 7.0 * query / device.flops,
        linear_s=computed * flops_per_weight / device.flops,
        micro_batch_s=shape.layers * device.layer_s + gathered / _bandwidth(device, topology),
        group_s=shape.layers * EXCHANGES * device.transfer_s,
        all_to_all_bytes=moved * exchanges * (2 * query + key_value),
        # keys and values in both directions, and their gradients
        ring_bytes=moved * 3.0 * key_value,
        query_bytes=float(moved * query),
        ring_overlap=device.overlap,
        bandwidths=_bandwidths(device, topology),
        heads=shape.heads,
        token_bytes=_token_bytes(shape, checkpointing) + (0.0 if chunked_loss else logits),
        state_bytes=replicated + (4.0 * shape.vocab * shape.hidden if chunked_loss else 0.0),
        sharded_state_bytes=sharded,
        budget_bytes=memory_fraction * device.memory_bytes,
        nics_per_node=topology.ranks_per_node if device.own_nic else 1,
        transfer_s=device.transfer_s,
        all_to_all_overlap=device.overlap,
        piece_rows=device.piece_rows,
    )


def _state_bytes(params: int, zero_stage: int) -> tuple[float, float]:
    """Bytes every rank holds whole, and bytes the world holds together: 4 a parameter for the
    weight, 4 for its gradient and 8 for Adam's moments."""
    sharded = (0, 8, 12, 16)[zero_stage]
    return float((16 - sharded) * params), float(sharded * params)


def _token_bytes(shape: ModelShape, checkpointing: bool) -> float:
    """Activation bytes per token, without the logits."""
    query, key_value = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    attention_kept = query * shape.dtype_bytes + shape.heads * 4  # output and log-sum-exp
    whole_layer = (
        5 * shape.hidden + 2 * query + key_value + 4 * shape.intermediate
    ) * shape.dtype_bytes
    if not checkpointing:
        return float(shape.layers * (whole_layer + shape.heads * 4))
    return float(
        shape.layers * (shape.hidden * shape.dtype_bytes + attention_kept) + 2 * whole_layer
    )


def _bandwidth(device: DeviceSpec, topology: Topology) -> float:
    return device.intra_bytes if topology.nodes == 1 else device.inter_bytes


def _bandwidths(device: DeviceSpec, topology: Topology) -> tuple[tuple[int, float], ...]:
    """Bandwidth of each power of two: the node's as far as groups inside a node are looked up
    there. Those that span nodes are wider, or looked up under 16."""
    widest_inside = 1 << (topology.ranks_per_node - 1).bit_length()
    degree, pairs = 2, []
    while degree <= max(16, 2 * topology.world_size):
        pairs.append(
            (degree, device.intra_bytes if degree <= widest_inside else device.inter_bytes)
        )
        degree *= 2
    return tuple(pairs)
