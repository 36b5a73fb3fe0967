"""Bytes of activations, computed from a model's sizes, for a decoder layer as transformers writes
it: norms in float32, a gated MLP, residual sums.

With h the width of hidden states, i that inside of the MLP, q of all queries, k of all keys and
values, and b the bytes of a number, a layer keeps for each token

    two norms        2 (4 h + b h)      the input in float32, and the normalised rows
    their results    2 b h              inputs of the projections, and of the MLP
    attention        b (2 q + k) + lse  queries, output, keys and values
    MLP              4 b i              gate, its activation, the other half, their product

and its backward holds besides, at its peak inside of the MLP, three of these four as gradients.
The first of a layer's norms reads the layer's input, which is kept where the layer runs again.

A measured model (`hf/calibration`) counts the layer itself instead. Fused kernels keep less.
"""

from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.devices import DeviceSpec
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan.memory import MemoryChoice

FLOAT32_BYTES = 4

# Rows of the MLP's width that a layer keeps, and that its backward holds besides.
MLP_ROWS = 4
MLP_GRADIENT_ROWS = 3


def activations_of(
    shape: ModelShape,
    device: DeviceSpec,
    *,
    checkpointing: bool,
    mixer_bytes: float,
    output_bytes: float,
) -> Activations:
    """Return the activations of a model on a device, where the user recomputes all layers or none.

    mixer_bytes: of a token, what the attention or the scan of a layer keeps with its output, on
    the mean. output_bytes: its output and log-sum-exps.
    """
    moved = shape.dtype_bytes
    between = shape.hidden_bytes or moved  # bytes of a number between layers
    hidden = shape.hidden
    norms = 2 * (FLOAT32_BYTES + moved) * hidden + 2 * moved * hidden
    mlp = float(MLP_ROWS * moved * shape.intermediate)
    mlp_work = float(MLP_GRADIENT_ROWS * moved * shape.intermediate)
    return Activations(
        layers=shape.layers,
        input_bytes=float(between * hidden),
        output_bytes=output_bytes,
        layer_bytes=norms + mixer_bytes + mlp,
        mlp_bytes=mlp,
        work_bytes=mlp_work + float(between * hidden),
        mlp_work_bytes=mlp_work,
        head_bytes=float(2 * between * hidden + FLOAT32_BYTES * hidden),
        mlp_share=_mlp_share(shape),
        out_rate=device.host_rate,
        back_rate=device.host_rate,
        host_bytes=device.host_bytes,
        as_set=MemoryChoice(recomputed_layers=shape.layers if checkpointing else 0),
    )


def _mlp_share(shape: ModelShape) -> float:
    """Return the share of the weights that work on a token which are in MLPs; 0 with experts,
    whose grouping tiles would break."""
    if shape.has_experts:
        return 0.0
    active = shape.params if shape.active_params is None else shape.active_params
    computed = active - shape.vocab * shape.hidden
    return min(1.0, 3 * shape.layers * shape.hidden * shape.intermediate / computed)
