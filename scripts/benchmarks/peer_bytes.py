"""What a layer of other stacks holds of each token, counted from its code, for published.py.

A recomputed layer has two moments at which it may hold most:

    mlp         all that its backward needs, and gradients inside of the MLP
    attention   what its backward needs before the MLP, and gradients around attention

With h the width of hidden states, q that of all queries, k that of all keys, i that inside of the
MLP (e of an expert, of which a work on a token), all numbers in bfloat16 but for norms:

                 transformers' own layers            with fused kernels (Liger's, Unsloth's)
    norms        2 (4 h + 2 h) + 2 * 2 h             4 * 2 h
    heads' norms 6 (q + k)                           2 (q + k)
    attention    2 (2 q + 2 k) + log-sum-exps        the same
    MLP          4 rows of i, 2 gradients more       3 rows of i, 1 gradient more
    experts      a (6 h + 8 e), a (2 h + 6 e) more   a (4 h + 6 e), 2 a e more

A ring of torch's context parallelism has keys and values repeated for each query head, and either
gathers those of all ranks, or passes them around. Ulysses has attention's output twice, before and
after its exchange. FlashAttention 2 has float32 gradients of queries, and those of keys for each
query head.
"""

from dataclasses import dataclass, replace

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.activations import LayerBytes
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.choices import with_choice
from hf_flexseq.cost.devices import DeviceSpec
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan.memory import MemoryChoice

BF16 = 2  # bytes of a number
FLOAT32 = 4
PLENTY = 1e15  # bytes of a host that is no limit

# What a multi-billion-parameter layer has gathered: its own weights and those fetched ahead.
GATHERED_LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model, and what `ModelShape` leaves out of it."""

    name: str
    shape: ModelShape
    has_head_norms: bool = False
    """True if queries and keys are normalised, head by head."""
    experts: int = 0
    """Experts that work on a token; 0 for a dense model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Settings of a published run."""

    kernels: str = "plain"
    """`plain` for transformers' own layers, `fused` for Liger's or Unsloth's."""
    exchange: str = "none"
    """How ranks share attention: `none`, `gather` or `rotate` in a ring, `ulysses`."""
    is_flash2: bool = False
    """True for FlashAttention 2, False for cuDNN's attention."""
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
    if model.has_head_norms:
        head_norms = (BF16 if is_fused else FLOAT32 + BF16) * (queries + keys)
    attention = BF16 * (2 * queries + 2 * keys) + FLOAT32 * shape.heads
    if stack.exchange in ("gather", "rotate"):
        attention += BF16 * 2 * (queries - keys)
    elif stack.exchange == "ulysses":
        attention += BF16 * queries
    if model.experts:
        width = shape.intermediate // model.experts
        rows = (4 * hidden + 6 * width) if is_fused else (6 * hidden + 8 * width)
        mlp = model.experts * rows
    else:
        mlp = (3 if is_fused else 4) * BF16 * shape.intermediate
    return float(norms + head_norms + attention), float(mlp)


def work_bytes(model: Model, stack: Stack, world: int) -> float:
    """Return what a layer holds at its peak besides what its backward needs."""
    shape = model.shape
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    _, mlp = kept_bytes(model, stack)
    # 1. in the MLP: the gradients of its output, and inside of it
    is_fused = stack.kernels == "fused"
    rows = 1 if is_fused else 2
    inside = float(rows * BF16 * shape.intermediate)
    if model.experts and not is_fused:
        inside = float(2 * model.experts * hidden + 6 * shape.intermediate)
    in_mlp = inside + 2 * BF16 * hidden
    if stack.tiles == "split":
        in_mlp = inside / 8 + 2 * BF16 * hidden
    elif stack.tiles == "again":
        in_mlp = 3 * BF16 * hidden - mlp
    # 2. in attention: gradients of the layer's output, of attention's, of queries, keys, values
    gradients = 2 * BF16 * hidden + 4 * BF16 * queries
    if stack.is_flash2:
        gradients += FLOAT32 * queries
    if stack.exchange == "gather":
        gradients += world * 2 * BF16 * queries
    elif stack.exchange == "rotate":
        gradients += 2 * 2 * BF16 * queries
    elif stack.exchange == "ulysses":
        gradients += BF16 * queries
    in_attention = gradients - mlp
    return max(in_mlp, in_attention)


def peer_cost(
    model: Model, stack: Stack, device: DeviceSpec, topology: Topology, held_bytes: float = 0.0
) -> CostModel:
    """Return the cost model of a published run.

    held_bytes: of a device, besides states and activations.
    """
    shape = model.shape
    world = topology.world_size
    choice = stack.choice(shape.layers)
    cost = with_choice(analytic_cost_model(shape, device, topology, zero_stage=3), choice)
    activations = cost.activations
    assert activations is not None, "the estimate has activations"
    outside, mlp = kept_bytes(model, stack)
    work = work_bytes(model, stack, world)
    queries = shape.heads * shape.head_dim
    if stack.tiles == "again":
        # autograd keeps nothing of the inside, which `work_bytes` has taken off
        work, mlp = work + mlp, 0.0
    (plain,) = activations.kinds
    # An input that comes from the host is counted as the one that is on its way.
    given = 0.0 if stack.inputs_on_host else plain.input_bytes
    peak = given + outside + mlp + work
    layer = LayerBytes(
        input_bytes=plain.input_bytes,
        output_bytes=float(BF16 * queries),
        kept_bytes=outside + mlp,
        mlp_bytes=0.0,
        peak_bytes=peak,
        tiled_bytes=0.0,
        rest_bytes=peak,
    )
    peer = replace(activations, kinds=(layer,), host_bytes=PLENTY, as_set=choice, base_bytes=0.0)
    whole = held_bytes
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
