"""Cost models estimated from a model's and a device's figures: FLOPs over FLOP/s and bytes over
bytes/s.

Good enough to rank plans on an unmeasured machine; a measured model is better.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import PIECE_ROWS, CostModel
from hf_flexseq.cost.kinds import NearLayers, halo_tokens
from hf_flexseq.cost.launches import EXCHANGES
from hf_flexseq.cost.recurrent import SCAN_CHUNK, RecurrentLayers, scan_chunk
from hf_flexseq.cost.sharding import TRIPS, shards_span_nodes

# Bytes of one parameter, all float32: the weight, its gradient, and Adam's two moments.
WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
PARAMETER_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES

FLOAT32_BYTES = 4

# What the host takes on a GPU machine, in seconds. Measure your own with `flexseq calibrate`.
#
# * A launch: PyTorch's way from an operation to its kernel, on an H100, 5 to 25 us
#   (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html). Most of
#   ours are small operations without autograd, which are near its lower end.
# * A post: c10d's all-reduce, reduce-scatter and all-gather over NCCL take the host 89, 122 and
#   131 us (https://github.com/pytorch/pytorch/issues/138773); a batch of sends and receives goes
#   the same way. The figure holds the messages of a call, so these have none of their own.
# * A first contact: the first ncclSend and ncclRecv between two H100 of a node, about 700 ms
#   (https://github.com/NVIDIA/nccl/issues/1487).
CUDA_LAUNCH_S = 8e-6
CUDA_POST_S = 1e-4
NCCL_CONTACT_S = 0.7

# A kernel computes whole blocks of about so many keys, and so on average one block more than a
# window has (FlashAttention's blocks, https://github.com/Dao-AILab/flash-attention).
BLOCK_KEYS = 128

# Share of a GPU's FLOP/s, as it has them in training, that a chunked scan achieves: 32,768 tokens
# of 64 Gated DeltaNet heads of 128 take an H800 15.56 ms forward and backward
# (https://github.com/fla-org/flash-linear-attention/pull/691), and `_scan_flops` counts 1.16 TFLOP
# for these. By the same page a quarter of it on each of four ranks takes 5.73 ms, transfers
# included, 47 % more than the quarter alone; the arithmetic of the second pass is 36 % more.
SCAN_EFFICIENCY = 0.17

# Share of a device's memory to plan with.
MEMORY_FRACTION = 0.85


# Under checkpointing so many layers are whole at once: the one that is recomputed, and what the
# backward of the one behind it has left.
WHOLE_LAYERS = 2

# Slices of a sequence that a rank has at most.
SLICES = 2


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


class Mixers(NamedTuple):
    """Counts of recurrent and attention-free layers."""

    recurrent: tuple[tuple[int, str], ...] = ()
    """(layers, kind) of those that are recurrent."""
    without_attention: int = 0
    """Layers that have no attention."""


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
    """Width inside the MLP; with experts, inside all those of one token together."""
    vocab: int
    """Tokens of the vocabulary."""
    params: int
    """All parameters, embeddings included."""
    dtype_bytes: int = 2
    """Bytes of one activation."""
    reaches: tuple[tuple[int, Reach], ...] = ()
    """(layers, reach) of the layers that read a window or a chunk only; all others read all
    keys."""
    recurrent: tuple[tuple[int, RecurrentShape], ...] = ()
    """(layers, sizes) of layers that go through a sequence from its first token to its last."""
    without_attention: int = 0
    """Layers that have no attention."""
    active_params: int | None = None
    """Parameters that work on one token, embeddings included: with experts fewer than all, and
    more by an embedding that is the head, too. None: all."""
    head_shapes: tuple[tuple[Reach, HeadShape], ...] = ()
    """(reach, heads of its layers) where layers differ; () where all have `heads`, `kv_heads` and
    `head_dim`."""

    def __post_init__(self) -> None:
        with_attention = self.layers - self.without_attention
        if self.full_layers < 0:
            raise ValueError(
                f"{with_attention - self.full_layers} layers with a window or a chunk, of "
                f"{with_attention} layers"
            )
        for layers, shape in self.recurrent:
            if layers > self.layers:
                raise ValueError(f"{layers} {shape} layers, of {self.layers} layers")

    @property
    def full_layers(self) -> int:
        """Layers that read all keys."""
        return self.attention_count - sum(layers for layers, _ in self.reaches)

    @property
    def attention_count(self) -> int:
        """Layers with attention."""
        return self.layers - self.without_attention

    def heads_of(self, reach: Reach) -> HeadShape:
        """Return the heads of the layers of a reach."""
        same = HeadShape(self.heads, self.kv_heads, self.head_dim)
        return dict(self.head_shapes).get(reach, same)

    def attention_layers(self) -> Iterator[tuple[int, Reach, HeadShape]]:
        """Yield (layers, their reach, their heads) of all layers with attention."""
        for layers, reach in ((self.full_layers, FULL), *self.reaches):
            yield layers, reach, self.heads_of(reach)

    @property
    def mixers(self) -> "Mixers":
        """The recurrent layers, and those without attention."""
        recurrent = tuple((layers, sizes.kind) for layers, sizes in self.recurrent)
        return Mixers(recurrent, self.without_attention)

    @property
    def query_numbers(self) -> int:
        """Numbers in a token's queries, all layers."""
        return sum(layers * heads.query_width for layers, _, heads in self.attention_layers())

    @property
    def kv_numbers(self) -> int:
        """Numbers in a token's keys and values, all layers."""
        return sum(layers * heads.kv_width for layers, _, heads in self.attention_layers())


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """What one rank's device achieves (not its peak)."""

    name: str
    """The device's name."""
    flops: float
    """FLOP/s in training kernels."""
    memory_bytes: float
    """Memory one rank can use, in bytes."""
    memory_rate: float = 2.3e12
    """Bytes/s that kernels move between the device and its memory."""
    scan_efficiency: float = SCAN_EFFICIENCY
    """Share of `flops` in the scans of recurrent layers."""
    intra_bytes: float
    """Bytes/s a rank moves to ranks of its own node."""
    inter_bytes: float
    """Bytes/s a rank moves to ranks of other nodes."""
    layer_s: float
    """Seconds a layer's forward and backward cost besides their arithmetic (launches)."""
    transfer_s: float = 3e-5
    """Seconds until a transfer between ranks begins."""
    launch_s: float = CUDA_LAUNCH_S
    """Seconds of the host per operation that it launches."""
    post_s: float = CUDA_POST_S
    """Seconds of the host per call that posts messages."""
    contact_s: float = NCCL_CONTACT_S
    """Seconds of the first message between two ranks that are not connected."""
    overlap: float = 1.0
    """Share of a transfer, and of the host's work, that costs no arithmetic meanwhile: a CPU core
    moves its bytes and launches its operations itself."""
    own_nic: bool = True
    """Whether a rank has a link of its own to other nodes; otherwise the ranks of a node share
    one."""
    block_keys: int = BLOCK_KEYS
    """Keys of the blocks in which a kernel computes a window, of which it computes one more than
    the window has."""
    piece_rows: int = PIECE_ROWS["cuda"]
    """Query heads x tokens that make a piece worth a kernel call, as in `CostModel`."""


# Achieved rates: about 45 % of the dense bf16 peak, 70 % of NVLink one way and of the memory's
# (3.35 TB/s of an H100, 4.8 of an H200, 2.0 and 1.6 of the A100s), one 400 (A100: 200) Gb/s NIC
# per rank.
_H100 = DeviceSpec(
    name="H100",
    flops=4.4e14,
    memory_bytes=79 * 2**30,
    intra_bytes=3e11,
    inter_bytes=4e10,
    layer_s=5e-4,
)
_A100 = DeviceSpec(
    name="A100-80GB",
    flops=1.4e14,
    memory_bytes=79 * 2**30,
    memory_rate=1.4e12,
    intra_bytes=2e11,
    inter_bytes=2e10,
    layer_s=5e-4,
)
_CPU = DeviceSpec(
    name="CPU",
    flops=3e10,
    memory_bytes=4 * 2**30,
    memory_rate=5e9,
    scan_efficiency=1.0,
    intra_bytes=1e9,
    inter_bytes=1e8,
    layer_s=1e-3,
    transfer_s=3e-4,
    launch_s=1e-5,
    post_s=3e-4,
    contact_s=0.0,  # gloo connects all ranks at the start
    overlap=0.0,
    own_nic=False,
    piece_rows=PIECE_ROWS["cpu"],
)
DEVICES = {
    "H200": replace(_H100, name="H200", memory_bytes=139 * 2**30, memory_rate=3.4e12),
    "H100": _H100,
    "A100-80GB": _A100,
    "A100-40GB": replace(_A100, name="A100-40GB", memory_bytes=39 * 2**30, memory_rate=1.1e12),
    "CPU": _CPU,
}


def analytic_cost_model(
    shape: ModelShape,
    device: DeviceSpec,
    topology: Topology,
    *,
    checkpointing: bool = True,
    chunked_loss: bool = True,
    zero_stage: int = 0,
    replicas: int = 1,
    memory_fraction: float = MEMORY_FRACTION,
) -> CostModel:
    """Return a cost model estimated from plain numbers.

    checkpointing: layers are recomputed in the backward, attention is not (its outputs are kept).
    chunked_loss: the logits of all tokens never stand at once; a float32 gradient of the head
    does, from the forward on. zero_stage: 0 nothing sharded, 1 the optimizer, 2 also gradients, 3
    also parameters (FSDP). replicas: how often what is sharded is there, as in HSDP.
    memory_fraction: share of the device's memory to plan with. Raises ValueError for another
    zero_stage.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}: must be 0, 1, 2 or 3")
    moved = shape.dtype_bytes  # bytes of one number
    # of q, k, v and the output: forward, again for the backward, gradients
    exchanges = 3.0 if checkpointing else 2.0
    memory = _memory(shape, topology, checkpointing, chunked_loss, zero_stage)
    parameters_s = _parameters_s(shape, device, topology, zero_stage, replicas)
    return CostModel(
        name=f"analytic-{device.name}",
        attention_s=shape.full_layers * _pair_flops(shape.heads_of(FULL)) / device.flops,
        linear_s=_linear_s(shape, device, checkpointing),
        micro_batch_s=shape.layers * device.layer_s + parameters_s,
        group_s=_exchanging_layers(shape) * EXCHANGES * _beyond_post(device),
        all_to_all_bytes=moved * exchanges * (2 * shape.query_numbers + shape.kv_numbers),
        # keys and values in both directions, and their gradients
        ring_bytes=moved * 3.0 * shape.kv_numbers,
        query_bytes=float(moved * shape.query_numbers),
        ring_overlap=device.overlap,
        bandwidths=_bandwidths(device, topology),
        heads=shape.heads,
        token_bytes=memory.token,
        state_bytes=memory.state,
        sharded_state_bytes=memory.sharded_state * replicas,
        budget_bytes=memory_fraction * device.memory_bytes,
        nics_per_node=topology.ranks_per_node if device.own_nic else 1,
        transfer_s=device.transfer_s,
        all_to_all_overlap=device.overlap,
        piece_rows=device.piece_rows,
        launch_s=shape.layers * device.launch_s,
        post_s=shape.layers * device.post_s,
        host_overlap=device.overlap,
        contact_s=device.contact_s,
        kinds=_kinds(shape, device),
        recurrent=_recurrent(shape, device, checkpointing),
        attention_share=shape.attention_count / shape.layers,
    )


class _MemoryBytes(NamedTuple):
    """Bytes of memory by what they grow with."""

    token: float
    """Bytes per token."""
    state: float
    """Bytes on every rank."""
    sharded_state: float
    """Bytes of all ranks together."""


def _memory(
    shape: ModelShape,
    topology: Topology,
    checkpointing: bool,
    chunked_loss: bool,
    zero_stage: int,
) -> _MemoryBytes:
    """Return the bytes that activations and model state take. See `analytic_cost_model`."""
    state, sharded = _state_bytes(shape.params, zero_stage)
    token = _token_bytes(shape, checkpointing)
    if topology.world_size > 1:
        state += _halo_bytes(shape, checkpointing)
        state += _summary_bytes(shape, topology.world_size)
    if chunked_loss:
        state += float(FLOAT32_BYTES * shape.vocab * shape.hidden)
    else:
        # logits in the model's dtype, in float32, and their gradient
        token += shape.vocab * (shape.dtype_bytes + 2 * FLOAT32_BYTES)
    return _MemoryBytes(token=token, state=state, sharded_state=sharded)


def _linear_s(shape: ModelShape, device: DeviceSpec, checkpointing: bool) -> float:
    """Return the seconds per token of linear layers, forward and backward."""
    # 2 FLOPs a weight in the forward, 4 in the backward, 2 in the second forward
    flops_per_weight = 8 if checkpointing else 6
    active = shape.params if shape.active_params is None else shape.active_params
    computed = active - shape.vocab * shape.hidden  # looking up embeddings is no arithmetic
    return computed * flops_per_weight / device.flops


def _parameters_s(
    shape: ModelShape, device: DeviceSpec, topology: Topology, zero_stage: int, replicas: int
) -> float:
    """Return the seconds per micro-batch of gathering parameters and scattering gradients."""
    if zero_stage < 3 or topology.world_size <= replicas:
        return 0.0
    spans_nodes = shards_span_nodes(topology, replicas)
    speed = device.inter_bytes if spans_nodes else device.intra_bytes
    return TRIPS * shape.params * shape.dtype_bytes / speed


def _pair_flops(heads: HeadShape) -> float:
    """Return the FLOPs of a layer's attention per two (query, key) pairs, forward and backward."""
    # 2 FLOPs for each of 7 products, two of them in the forward, of which half are causal
    return 7.0 * heads.query_width


def _kinds(shape: ModelShape, device: DeviceSpec) -> tuple[NearLayers, ...]:
    """Return the kinds of a model's layers."""
    kinds = []
    for layers, reach in shape.reaches:
        blocks = 1.0
        if reach.window is not None:
            blocks += device.block_keys / reach.window
        layer_s = _pair_flops(shape.heads_of(reach)) / device.flops  # of two pairs
        kind = NearLayers(
            reach=reach,
            share=layers / shape.attention_count,
            attention_s=layers * layer_s * blocks,
        )
        kinds.append(kind)
    return tuple(kinds)


def _exchanging_layers(shape: ModelShape) -> int:
    """Count the layers that exchange something, twice where one has attention and a scan; each of
    them as often as Ulysses."""
    return shape.attention_count + sum(layers for layers, _ in shape.recurrent)


def _recurrent(
    shape: ModelShape, device: DeviceSpec, checkpointing: bool
) -> tuple[RecurrentLayers, ...]:
    """Return the recurrent layers of a model: modelled, by arithmetic and bytes."""
    passes = 4 if checkpointing else 3  # forward, two in the backward, forward again
    kinds = []
    for layers, sizes in shape.recurrent:
        scan_flops = device.flops * device.scan_efficiency
        # A convolution reads and writes its rows: forward, and there and back in the backward.
        rows = 5 + 2 * checkpointing
        row_bytes = sizes.channels * shape.dtype_bytes
        scan_s = passes * _scan_flops(sizes) / scan_flops
        convolution_s = rows * row_bytes / device.memory_rate
        kinds.append(
            RecurrentLayers(
                kind=sizes.kind,
                share=layers / shape.layers,
                token_s=layers * (scan_s + convolution_s),
                again_s=layers * _again_flops(sizes) / scan_flops,
                chunk=scan_chunk(sizes.kind),
                summary_bytes=float(layers * _summary_numbers(sizes) * FLOAT32_BYTES),
                halo_bytes=float(layers * (sizes.width - 1) * row_bytes),
                # there and back around the convolution and the scan
                row_bytes=layers * (3.0 if checkpointing else 2.0) * _row_bytes(shape, sizes),
            )
        )
    return tuple(kinds)


def _scan_flops(sizes: RecurrentShape) -> float:
    """Return the FLOPs of a layer's scan per token, forward, with keys of K and values of V
    numbers and chunks of C tokens.

    A chunk of a delta rule has five products of [C, C] with keys or values and an inverse, and
    three of [C, K] with a state; one of Mamba 2 has two, one of them once for all heads of a
    group, and two with a state.
    """
    chunk, key, value = SCAN_CHUNK, sizes.key_dim, sizes.value_dim
    if sizes.kind == "mamba2":
        of_group = 2 * chunk * key
        of_head = 2 * chunk * value + 4 * key * value
        return float(sizes.key_heads * of_group + sizes.value_heads * of_head)
    of_head = 2 * chunk * (3 * key + 2 * value) + 6 * key * value + chunk * chunk
    return float(sizes.value_heads * of_head)


def _again_flops(sizes: RecurrentShape) -> float:
    """Return the FLOPs of a layer's second pass per token: end states and transitions in the
    forward, gradients of the states in the backward."""
    chunk, key, value = SCAN_CHUNK, sizes.key_dim, sizes.value_dim
    if sizes.kind == "mamba2":
        return float(sizes.value_heads * 4 * key * value)
    forward = 4 * key * (key + value)
    backward = 6 * key * value + 2 * chunk * value
    return float(sizes.value_heads * (forward + backward))


def _summary_numbers(sizes: RecurrentShape) -> int:
    """Return the numbers of a segment's summary in one layer, float32."""
    return sizes.state_numbers + sizes.transition_numbers


def _row_bytes(shape: ModelShape, sizes: RecurrentShape) -> int:
    """Return the bytes of a token's rows into and out of a layer's convolution and scan."""
    numbers = 2 * sizes.channels
    if sizes.kind != "convolution":
        keys = 2 * sizes.key_heads * sizes.key_dim
        decays = sizes.key_dim if sizes.kind == "kimi_delta" else 1
        # queries and keys; values in and out; decays and steps
        numbers += keys + sizes.value_heads * (2 * sizes.value_dim + decays + 1)
    return numbers * shape.dtype_bytes


def _beyond_post(device: DeviceSpec) -> float:
    """Return the seconds until a transfer begins that the host has not spent on posting it.

    A host that is ahead of its device posts a transfer long before it can begin.
    """
    return max(0.0, device.transfer_s - (1 - device.overlap) * device.post_s)


def _state_bytes(params: int, zero_stage: int) -> tuple[float, float]:
    """Return the bytes of model state (that every rank holds whole, that the world holds
    together)."""
    sharded = 0  # bytes of a parameter
    if zero_stage >= 1:
        sharded += MOMENT_BYTES
    if zero_stage >= 2:
        sharded += GRADIENT_BYTES
    if zero_stage >= 3:
        sharded += WEIGHT_BYTES
    return float((PARAMETER_BYTES - sharded) * params), float(sharded * params)


def _token_bytes(shape: ModelShape, checkpointing: bool) -> float:
    """Return the activation bytes per token, without the logits."""
    log_sum_exps = 0  # bytes, of all layers
    for layers, _, heads in shape.attention_layers():
        log_sum_exps += layers * heads.heads * FLOAT32_BYTES
    rest = 5 * shape.hidden + 4 * shape.intermediate  # numbers of a layer besides its mixers'
    if not checkpointing:
        numbers = shape.layers * rest + 2 * shape.query_numbers + shape.kv_numbers
        scans = sum(layers * _scan_bytes(shape, sizes) for layers, sizes in shape.recurrent)
        return float(numbers * shape.dtype_bytes + scans + log_sum_exps)
    # Every layer keeps its input and what attention, or a scan, gave; some are whole.
    mixer = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    mixer_bytes = [float(mixer * shape.dtype_bytes)]
    kept = shape.layers * shape.hidden + shape.query_numbers
    for layers, sizes in shape.recurrent:
        kept += layers * sizes.value_heads * sizes.value_dim
        mixer_bytes.append(_scan_bytes(shape, sizes))
    whole = rest * shape.dtype_bytes + max(mixer_bytes)
    return float(kept * shape.dtype_bytes + WHOLE_LAYERS * whole + log_sum_exps)


def _scan_bytes(shape: ModelShape, sizes: RecurrentShape) -> float:
    """Return the bytes of a token that a recurrent layer holds from its forward to its backward:
    rows around the convolution, and the gate; in float32 what chunks are made of, the products of
    their tokens with each other and their decays, what they write, and the states before them."""
    numbers = 3 * sizes.channels + sizes.value_heads * sizes.value_dim
    held = float(numbers * shape.dtype_bytes)
    if sizes.kind != "convolution":
        keys = 2 if sizes.kind == "mamba2" else 3  # queries and keys, and what is read again
        of_head = keys * sizes.key_dim + 2 * sizes.value_dim + 2 * SCAN_CHUNK
        scan = sizes.value_heads * of_head + sizes.state_numbers / SCAN_CHUNK
        held += FLOAT32_BYTES * scan
    return held


def _summary_bytes(shape: ModelShape, ranks: int) -> float:
    """Return the bytes that a rank holds for one sequence which all ranks share: the states and
    transitions of its segments, all layers, and in one layer all summaries that it receives."""
    kept = 0
    received = 0
    for layers, sizes in shape.recurrent:
        summary = _summary_numbers(sizes) * FLOAT32_BYTES
        kept += layers * SLICES * summary
        received = max(received, (SLICES * ranks - 1) * summary)
    return float(kept + received)


def _halo_bytes(shape: ModelShape, checkpointing: bool) -> float:
    """Return the bytes of the halos that a rank holds of one sequence between forward and
    backward, all layers. Short sequences, of which there may be more, have one rank each."""
    of_layers = []
    for layers, reach, heads in shape.attention_layers():
        if not reach.is_full:
            halo = SLICES * halo_tokens(reach) * heads.kv_width * shape.dtype_bytes
            of_layers += [halo] * layers
    if checkpointing:  # the backward fetches them again
        of_layers = sorted(of_layers)[-WHOLE_LAYERS:]
    return float(sum(of_layers))


def _bandwidths(device: DeviceSpec, topology: Topology) -> tuple[tuple[int, float], ...]:
    """Return (degree, bytes/s) of each power of two.

    Degrees have the node's bandwidth as far as groups inside a node are looked up there. Groups
    that span nodes are wider, or looked up under 16.
    """
    widest_inside = 1 << (topology.ranks_per_node - 1).bit_length()
    widest = max(16, 2 * topology.world_size)
    pairs = []
    degree = 2
    while degree <= widest:
        speed = device.intra_bytes if degree <= widest_inside else device.inter_bytes
        pairs.append((degree, speed))
        degree *= 2
    return tuple(pairs)
