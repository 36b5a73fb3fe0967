"""What a layer of other stacks holds of each token, counted from its code, for published.py.

A recomputed layer has moments at which it may hold most:

    mlp         all that its backward needs, and gradients inside of the MLP
    attention   what its backward needs before the MLP, and gradients around attention, 4 q each
    norms       the same, and 18 h, or 12 q less 2 h, in layers of transformers' own

With h the width of hidden states, q that of all queries, k that of all keys, i that inside of the
MLP (e of an expert, of which a work on a token), all numbers in bfloat16 but for norms:

                 transformers' own layers            with fused kernels (Liger's, Unsloth's)
    norms        2 (4 h + 2 h) + 2 * 2 h             4 * 2 h
    heads' norms 6 (q + k)                           2 (q + k)
    attention    2 (2 q + 2 k) + log-sum-exps        the same
    MLP          4 rows of i, 2 gradients more       3 rows of i, 1 gradient more
    experts      a (4 h + 8 e), 6 a h more           a (4 h + 6 e), 2 a e more

A ring of torch's context parallelism has keys and values repeated for each query head, and either
gathers those of all ranks, or passes them around. Ulysses has attention's output twice, before and
after its exchange. FlashAttention has float32 gradients of queries, and those of keys for each
query head. ArcticTraining and Unsloth, which use fused kernels, recompute a layer inside of an
autograd function, which holds its output and that output's gradient to its end.

Transformers' own layers without exchanges have the bytes of `hf_flexseq/cost/layer_bytes.py`,
which tests/scripts/test_benchmarks.py holds this file to. Others are counted by reading them.
"""

from dataclasses import dataclass, replace

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.activations import LayerBytes
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.devices import DeviceSpec
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan.memory import MemoryChoice

BF16 = 2  # bytes of a number
FLOAT32 = 4
PLENTY = 1e15  # bytes of a host that is no limit

# What a multi-billion-parameter layer has gathered: its own weights and those fetched ahead.
GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its name and sizes."""

    name: str
    shape: ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Settings of a published run."""

    kernels: str = "plain"
    """`plain` for transformers' own layers, `fused` for Liger's or Unsloth's."""
    exchange: str = "none"
    """How ranks share attention: `none`, `gather` or `rotate` in a ring, `ulysses`."""
    is_flash: bool = False
    """True for FlashAttention 2 or 3, False for cuDNN's attention."""
    inputs_on_host: bool = False
    """True if inputs of layers are on the host."""
    tiles: str = "none"
    """`none`; `split`: MLPs cut into 8 pieces, whose insides autograd keeps; `again`: into pieces
    that are computed again, so that one piece's inside exists."""
    parameter_bytes: float = 16.0
    """Bytes of a parameter's weight, gradient and moments on the devices, sharded over all."""
    gathers_weights: bool = True
    """True if weights of whole layers and of the embeddings are gathered in bfloat16."""

    def choice(self, layers: int) -> MemoryChoice:
        """Return the choice that the stack makes for all layers alike."""
        return MemoryChoice(
            recomputed_layers=layers,
            inputs_on_host=layers if self.inputs_on_host else 0,
            outputs_recomputed=layers,
            mlp_tiles=16 if self.tiles == "again" else 1,
        )

    @property
    def strategy(self) -> str:
        """The strategy that computes attention as the stack does."""
        if self.exchange in ("gather", "rotate"):
            return "zigzag"
        return "ulysses" if self.exchange == "ulysses" else "local"


def kept_bytes(model: Model, stack: Stack) -> tuple[float, float]:
    """Return what a layer's backward needs of each token: (outside, inside) of its MLP."""
    shape = model.shape
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    is_fused = stack.kernels == "fused"
    norms = 4 * BF16 * hidden if is_fused else (2 * (FLOAT32 + BF16) + 2 * BF16) * hidden
    head_norms = 0
    if shape.head_norms:
        head_norms = (BF16 if is_fused else FLOAT32 + BF16) * (queries + keys)
    attention = BF16 * (2 * queries + 2 * keys) + FLOAT32 * shape.heads
    if stack.exchange in ("gather", "rotate"):
        attention += BF16 * 2 * (queries - keys)
    elif stack.exchange == "ulysses":
        attention += BF16 * queries
    if shape.active_experts:
        width = shape.intermediate // shape.active_experts
        mlp = shape.active_experts * (4 * hidden + (6 if is_fused else 8) * width)
    else:
        mlp = (3 if is_fused else 4) * BF16 * shape.intermediate
    return float(norms + head_norms + attention), float(mlp)


def mlp_peak(model: Model, stack: Stack) -> float:
    """Return the most of each token that a layer's backward holds in its MLP, without the layer's
    input: what it has kept, gradients inside, and those of hidden states."""
    shape = model.shape
    outside, mlp = kept_bytes(model, stack)
    is_fused = stack.kernels == "fused"
    inside = float((1 if is_fused else 2) * BF16 * shape.intermediate)
    if shape.active_experts and not is_fused:
        inside = float(6 * shape.active_experts * shape.hidden)
    rows = 2 if is_fused else 1
    if stack.tiles == "again":
        mlp, inside, rows = 0.0, 0.0, 3
    elif stack.tiles == "split":
        inside /= 8
    return outside + mlp + inside + rows * BF16 * shape.hidden


def attention_peak(model: Model, stack: Stack, world: int) -> float:
    """Return the same before the MLP: the more of what attention needs, with its exchanges, and
    what the norms and heads of plain layers need."""
    shape = model.shape
    queries = shape.heads * shape.head_dim
    outside, _ = kept_bytes(model, stack)
    is_fused = stack.kernels == "fused"
    held = (3 if is_fused else 2) * BF16 * shape.hidden + 4 * BF16 * queries
    if stack.is_flash:
        held += FLOAT32 * queries
    if stack.exchange == "gather":
        held += world * 2 * BF16 * queries
    elif stack.exchange == "rotate":
        held += 2 * 2 * BF16 * queries
    elif stack.exchange == "ulysses":
        held += BF16 * queries
    if not is_fused:
        held = max(held, 18 * shape.hidden, 12 * queries - BF16 * shape.hidden)
    return float(outside + held)


def layer_of(model: Model, stack: Stack, world: int = 1) -> LayerBytes:
    """Return the bytes of a layer of a stack. MLPs in tiles of the stack's own are in its peak."""
    outside, mlp = kept_bytes(model, stack)
    is_fused = stack.kernels == "fused"
    stream = float(BF16 * model.shape.hidden)
    own_input = 0.0 if is_fused else stream  # fused norms have it already
    before_mlp = attention_peak(model, stack, world)
    can_tile = not model.shape.active_experts and stack.tiles == "none"
    gradient_rows = 1 if is_fused else 2
    inside = mlp + gradient_rows * BF16 * model.shape.intermediate - stream
    return LayerBytes(
        input_bytes=stream,
        output_bytes=float(
            BF16 * model.shape.heads * model.shape.head_dim + FLOAT32 * model.shape.heads
        ),
        kept_bytes=outside + mlp,
        mlp_bytes=mlp if can_tile else 0.0,
        peak_bytes=own_input + max(mlp_peak(model, stack), before_mlp),
        tiled_bytes=inside if can_tile else 0.0,
        rest_bytes=own_input + before_mlp,
    )


def peer_cost(model: Model, stack: Stack, device: DeviceSpec, topology: Topology) -> CostModel:
    """Return the cost model of a published run."""
    shape = model.shape
    world = topology.world_size
    choice = stack.choice(shape.layers)
    cost = with_choice(analytic_cost_model(shape, device, topology, zero_stage=3), choice)
    activations = cost.activations
    assert activations is not None, "the estimate has activations"
    layer = layer_of(model, stack, world)
    peak = layer.peak_bytes
    if stack.inputs_on_host:  # none travels ahead, as one of ours does
        peak -= layer.input_bytes
    # what tiles of the stack leave is in this peak
    layer = replace(layer, peak_bytes=peak, mlp_bytes=0.0, tiled_bytes=0.0, rest_bytes=0.0)
    peer = replace(activations, kinds=(layer,), base_bytes=0.0, host_bytes=PLENTY, as_set=choice)
    whole = 0.0
    if stack.gathers_weights:
        embeddings = 2 * shape.vocab * shape.hidden
        of_layers = (shape.params - embeddings) / shape.layers * GATHERED_LAYERS
        whole += BF16 * (of_layers + embeddings)
    return replace(
        cost,
        activations=peer,
        token_bytes=peer.token_bytes(choice),
        state_bytes=whole,
        sharded_state_bytes=stack.parameter_bytes * shape.params,
        budget_bytes=device.memory_bytes,
    )
