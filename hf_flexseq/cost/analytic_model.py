"""Cost models estimated from a model's and a device's figures: FLOPs over FLOP/s and bytes over
bytes/s.

Good enough to rank plans on an unmeasured machine; a measured model is better.
"""

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.devices import DeviceSpec
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.layer_bytes import FLOAT32_BYTES, activations_of
from hf_flexseq.cost.model import EXCHANGES, EXCHANGES_AGAIN, looked_up
from hf_flexseq.cost.shapes import HeadShape, ModelShape
from hf_flexseq.cost.sharding import TRIPS, gathered_params, shards_span_nodes
from hf_flexseq.cost.tower import TowerCost

# Bytes of one trained parameter, all float32: the weight, its gradient, and Adam's two moments.
WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
PARAMETER_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + MOMENT_BYTES

# Share of a device's memory to plan with.
MEMORY_FRACTION = 0.85

# Tokens of a chunk of a scan (`kernels/scans`).
SCAN_CHUNK = 64


def analytic_cost_model(
    shape: ModelShape,
    device: DeviceSpec,
    topology: Topology,
    *,
    checkpointing: bool = True,
    chunked_loss: bool = True,
    zero_stage: int = 0,
    replicas: int = 1,
    expert_ranks: int = 1,
) -> CostModel:
    """Return a cost model estimated from plain numbers.

    checkpointing: True if layers are recomputed in the backward, except for attention.
    chunked_loss: True if logits exist for a few tokens at a time; then a float32 gradient of the
    head is held from the forward on. zero_stage: 0 shards nothing, 1 the optimizer, 2 also
    gradients, 3 also parameters (FSDP). replicas: copies of the sharded state, as in HSDP.
    expert_ranks: neighbouring ranks that hold all experts together. Raises ValueError for another
    zero_stage, and for `expert_ranks` above 1 that do not divide the ranks or the experts, with a
    model that has no experts, or without FSDP, which shards them.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}: must be 0, 1, 2 or 3")
    moved = shape.dtype_bytes  # bytes of one number
    exchanges = EXCHANGES + EXCHANGES_AGAIN * checkpointing
    activations = _activations(shape, device, checkpointing)
    token_bytes = activations.token_bytes(activations.as_set)
    if not chunked_loss:
        # logits in the model's dtype, in float32, and their gradient
        token_bytes += shape.vocab * (shape.dtype_bytes + 2 * FLOAT32_BYTES)
    state_bytes = _held_bytes(shape, chunked_loss)
    sharded_bytes = sum((MOMENT_BYTES, GRADIENT_BYTES, WEIGHT_BYTES)[:zero_stage])  # a parameter
    trained = shape.params - shape.frozen_params
    sharded = float(sharded_bytes * trained)
    whole = float((PARAMETER_BYTES - sharded_bytes) * trained)
    if zero_stage == 3:
        sharded += shape.frozen_bytes
    else:
        whole += shape.frozen_bytes
    experts = _experts(shape, device, topology, checkpointing, expert_ranks)
    if experts is not None:
        experts.check_ranks(topology.world_size // replicas)
        if zero_stage != 3:
            raise ValueError(
                f"zero_stage={zero_stage} with experts over {expert_ranks} ranks, which FSDP "
                "shards: use zero_stage=3"
            )
    tower = None
    if shape.tower is not None:
        tower = TowerCost.of(
            shape.tower,
            flops=device.flops,
            dtype_bytes=shape.dtype_bytes,
            checkpointing=checkpointing,
            is_sharded=zero_stage == 3,
        )
    parameters_s = 0.0
    if zero_stage == 3:
        parameters_s = _parameters_s(shape, device, topology, replicas, expert_ranks)
    # A layer with attention and a scan exchanges twice, each time as often as Ulysses.
    exchanging_layers = shape.attention_count + sum(layers for layers, _ in shape.recurrent)
    return CostModel(
        name=f"analytic-{device.name}",
        attention_s=shape.full_layers * _pair_s(shape.heads_of(FULL), device),
        linear_s=_linear_s(shape, device, checkpointing, expert_ranks),
        micro_batch_s=shape.layers * device.layer_s + parameters_s,
        group_s=exchanging_layers * device.exchange_s,
        group_rank_s=exchanging_layers * device.ring_step_s,
        pass_s=moved * (shape.query_numbers + shape.kv_numbers) / device.memory_rate,
        summary_bytes=_moved_summaries(shape),
        all_to_all_bytes=moved * exchanges * (2 * shape.query_numbers + shape.kv_numbers),
        # keys and values in both directions, and their gradients
        ring_bytes=moved * 3.0 * shape.kv_numbers,
        overlap=device.overlap,
        bandwidths=_bandwidths(device, topology),
        heads=shape.heads,
        token_bytes=token_bytes,
        state_bytes=state_bytes + whole,
        sharded_state_bytes=sharded * replicas,
        budget_bytes=MEMORY_FRACTION * device.memory_bytes,
        kernel=device.kernel,
        widest_window=max((_window(reach) for _, reach in shape.reaches), default=0),
        experts=experts,
        tower=tower,
        activations=activations,
    )


def _activations(shape: ModelShape, device: DeviceSpec, checkpointing: bool) -> Activations:
    """Return the activations that layers keep, as means over all layers."""
    log_sum_exps = 0  # bytes, of all layers
    for layers, _, heads in shape.attention_layers():
        log_sum_exps += layers * heads.heads * FLOAT32_BYTES
    outputs = float(shape.dtype_bytes * shape.query_numbers + log_sum_exps)
    mixers = outputs + shape.dtype_bytes * (shape.query_numbers + shape.kv_numbers)
    if shape.head_norms:
        normalised = shape.query_numbers + shape.kv_numbers // 2  # queries and keys
        mixers += (FLOAT32_BYTES + shape.dtype_bytes) * normalised
    for layers, sizes in shape.recurrent:
        outputs += layers * shape.dtype_bytes * sizes.value_heads * sizes.value_dim
        mixers += layers * _scan_bytes(shape, sizes)
    return activations_of(
        shape,
        device,
        checkpointing=checkpointing,
        mixer_bytes=mixers / shape.layers,
        output_bytes=outputs / shape.layers,
    )


def _held_bytes(shape: ModelShape, chunked_loss: bool) -> float:
    """Return the bytes that a rank holds whatever its tokens, without parameters."""
    # The copies that autocast makes of weights exist until the forward has ended.
    state = 0.0
    if shape.hidden_bytes not in (None, shape.dtype_bytes):
        state += float(shape.dtype_bytes * shape.params)
    if chunked_loss:
        state += float(FLOAT32_BYTES * shape.vocab * shape.hidden)
    return state


def _linear_s(
    shape: ModelShape, device: DeviceSpec, checkpointing: bool, expert_ranks: int
) -> float:
    """Return the seconds per token of everything whose work grows with the tokens, forward and
    backward, without experts that several ranks hold together."""
    active = shape.params if shape.active_params is None else shape.active_params
    computed = active - shape.vocab * shape.hidden  # embeddings are looked up without arithmetic
    if expert_ranks > 1 and shape.experts is not None:
        computed -= shape.experts.active_params
    linear_s = computed * _weight_flops(shape, checkpointing) / device.flops
    return linear_s + _windows_s(shape, device) + _scans_s(shape, device, checkpointing)


def _weight_flops(shape: ModelShape, checkpointing: bool) -> float:
    """Return the FLOPs per weight and token, forward and backward."""
    # two FLOPs in each pass; a second forward where layers run again
    return 2 * (shape.linear_passes + checkpointing)


def _experts(
    shape: ModelShape,
    device: DeviceSpec,
    topology: Topology,
    checkpointing: bool,
    expert_ranks: int,
) -> ExpertLayers | None:
    """Return the layers with experts on several ranks; None if every rank computes its own
    tokens."""
    if expert_ranks == 1:
        return None
    if shape.experts is None:
        raise ValueError(f"expert_ranks={expert_ranks} for a model without experts: use 1")
    if shape.experts.of_layer % expert_ranks:
        raise ValueError(
            f"expert_ranks={expert_ranks} for {shape.experts.of_layer} experts: use a number of "
            "ranks that divides them"
        )
    token_flops = shape.experts.active_params * _weight_flops(shape, checkpointing)
    row_bytes = shape.experts.active * shape.hidden * shape.dtype_bytes
    # There and back, for gradients too, and again where the layer runs again.
    exchanges = 6 if checkpointing else 4
    return ExpertLayers(
        ranks=expert_ranks,
        token_s=token_flops / device.flops,
        exchanged_bytes=float(shape.experts.layers * exchanges * row_bytes),
        rate=_speed(device, min(1.0, (topology.ranks_per_node - 1) / (expert_ranks - 1))),
    )


def _parameters_s(
    shape: ModelShape,
    device: DeviceSpec,
    topology: Topology,
    replicas: int,
    expert_ranks: int,
) -> float:
    """Return the seconds per micro-batch of gathering parameters and scattering gradients."""
    if topology.world_size <= replicas:
        return 0.0
    shards = topology.world_size // replicas
    spans_nodes = shards_span_nodes(topology, replicas)
    speed = looked_up(_bandwidths(device, topology), shards, spans_nodes)
    gathered = gathered_params(shape, shards, expert_ranks)
    return TRIPS * gathered * shape.dtype_bytes / speed


def _pair_s(heads: HeadShape, device: DeviceSpec) -> float:
    """Return the seconds of a layer's attention per two (query, key) pairs, forward and
    backward."""
    # 2 FLOPs for each of 7 products, two of them in the forward; half of the pairs are causal
    return 7.0 * heads.query_width / device.attention_flops


def _window(reach: Reach) -> int:
    """Return the tokens of a layer's window or chunk."""
    size = reach.window if reach.window is not None else reach.chunk
    assert size is not None, "a full layer has neither"
    return size


def _windows_s(shape: ModelShape, device: DeviceSpec) -> float:
    """Return the seconds per token of layers with a window or a chunk, whose sequences are longer.

    A token reads its window, and on average one block of the kernel besides, or half of its chunk.
    """
    block = 0 if device.kernel is None else device.kernel.block
    seconds = 0.0
    for layers, reach in shape.reaches:
        keys = _window(reach) / 2 if reach.window is None else reach.window + block
        seconds += layers * 2 * keys * _pair_s(shape.heads_of(reach), device)
    return seconds


def _scans_s(shape: ModelShape, device: DeviceSpec, checkpointing: bool) -> float:
    """Return the seconds per token of recurrent layers: convolution and scan, by arithmetic and
    bytes."""
    passes = 4 if checkpointing else 3  # forward, two in the backward, forward again
    # A convolution reads and writes its rows: forward, and there and back in the backward.
    rows = 5 + 2 * checkpointing
    seconds = 0.0
    for layers, sizes in shape.recurrent:
        scan_s = passes * _scan_flops(sizes) / (device.flops * device.scan_efficiency)
        convolution_s = rows * sizes.channels * shape.dtype_bytes / device.memory_rate
        seconds += layers * (scan_s + convolution_s)
    return seconds


def _moved_summaries(shape: ModelShape) -> float:
    """Return the bytes that recurrent layers send for a segment of a sequence, forward and
    backward: its summary in float32, and the rows that the convolution behind it reads."""
    moved = 0.0
    for layers, sizes in shape.recurrent:
        summary = FLOAT32_BYTES * (sizes.state_numbers + sizes.transition_numbers)
        halo = (sizes.width - 1) * sizes.channels * shape.dtype_bytes
        moved += 2.0 * layers * (summary + halo)
    return moved


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


def _scan_bytes(shape: ModelShape, sizes: RecurrentShape) -> float:
    """Return the bytes per token that a recurrent layer holds from its forward to its backward:
    rows around the convolution, and the gate; in float32 the inputs of chunks, the products of
    their tokens with each other, their decays, their written values, and the states before them.
    """
    numbers = 3 * sizes.channels + sizes.value_heads * sizes.value_dim
    held = float(numbers * shape.dtype_bytes)
    if sizes.kind != "convolution":
        keys = 2 if sizes.kind == "mamba2" else 3  # queries and keys, and what is read again
        of_head = keys * sizes.key_dim + 2 * sizes.value_dim + 2 * SCAN_CHUNK
        scan = sizes.value_heads * of_head + sizes.state_numbers / SCAN_CHUNK
        held += FLOAT32_BYTES * scan
    return held


def _bandwidths(device: DeviceSpec, topology: Topology) -> tuple[tuple[int, float], ...]:
    """Return (degree, bytes/s) of each power of two, where every rank sends equally much to every
    other rank.

    Degrees have the node's bandwidth as far as groups inside a node are looked up there. Groups
    that span nodes are wider, or looked up under 16; of n nodes, 1 / n of the bytes stay inside.
    """
    widest_inside = 1 << (topology.ranks_per_node - 1).bit_length()
    widest = max(16, 2 * topology.world_size)
    pairs = []
    degree = 2
    while degree <= widest:
        pairs.append((degree, _speed(device, min(1.0, widest_inside / degree))))
        degree *= 2
    return tuple(pairs)


def _speed(device: DeviceSpec, inside: float) -> float:
    """Return the bytes/s of a rank that sends this share of its bytes inside its node."""
    return 1 / (inside / device.intra_bytes + (1 - inside) / device.inter_bytes)
