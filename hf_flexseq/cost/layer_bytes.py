"""Bytes of activations, computed from a model's sizes, for a decoder layer as transformers writes
it: norms in float32, a gated MLP or experts, residual sums.

With h the width of hidden states, i the width inside of the MLP (e inside of an expert, of which a
work on a token), q the width of all queries, k of all keys, b the bytes of a number and w the
bytes of a number between layers, a layer keeps for each token

    two norms        2 (4 h + w h)         the input in float32, and the normalised rows
    their results    2 b h                 inputs of the projections, and of the MLP; under
                     5 b h                 autocast a copy for each of their matrices
    norms of heads   (4 + b) (q + k)       where queries and keys are normalised
    attention        b (2 q + 2 k) + lse   queries, output, keys and values
    MLP              4 b i                 gate, its activation, the other half, their product
    experts          a b (2 h + 4 e)       the same of each, its input and its output

Its backward holds its input and the gradient of its output besides, and at its peak

    in the MLP       2 b i                 gradients of gate and other half, and of their product
                                           instead of it; of experts 3 a b h, of their rows
    in a norm        16 h                  gradients in float32; nothing of the MLP any more

With experts on several ranks, the busiest rank computes more tokens than its own. It holds so many
times the rows of experts, except for one of 2 h: the outputs of experts go back to the token's
rank (`with_uneven_experts`).

The loss needs 24 h for the last norm. Compared with counts on the layers themselves in bfloat16
(`scripts/benchmarks/results/activation_bytes_2026-11-26.md`), bytes per token are within 1 % for
Llama-3.1-8B, Qwen3-8B and Qwen3-30B-A3B. They are a quarter too few for Gemma 3, which has
twice the norms, and for gpt-oss, whose experts clamp both halves, and up to a half for models with
scans.

A run counts its model's layers itself (`hf/engine/layer_trial.py`). Fused kernels keep less.
"""

from dataclasses import replace

from hf_flexseq.cost.activations import Activations, LayerBytes
from hf_flexseq.cost.devices import DeviceSpec
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.plan.memory import MemoryChoice

FLOAT32_BYTES = 4
INT64_BYTES = 8

# Rows of the MLP's width that a layer keeps, and that its backward holds besides.
MLP_ROWS = 4
MLP_GRADIENT_ROWS = 2
# Rows of the width of hidden states that experts keep of each token that they get, and that their
# backward holds besides.
EXPERT_ROWS = 2
EXPERT_GRADIENT_ROWS = 3
# Matrices that read normalised rows: of queries, keys, values, gate and other half.
READERS = 5
# Rows in float32 of a norm's backward, and of all that is there with the last one.
NORM_ROWS = 4
HEAD_ROWS = 6


def activations_of(
    shape: ModelShape,
    device: DeviceSpec,
    *,
    checkpointing: bool,
    mixer_bytes: float,
    output_bytes: float,
) -> Activations:
    """Return the activations of a model on a device, where the user recomputes all layers or none.

    mixer_bytes: mean bytes per token that a layer's attention or scan keeps, its output included.
    output_bytes: mean bytes per token of its output and log-sum-exps.
    """
    between = shape.hidden_bytes or shape.dtype_bytes  # bytes of a number between layers
    layer = _layer(shape, between, mixer_bytes=mixer_bytes, output_bytes=output_bytes)
    mlp_share = 0.0  # with experts, whose grouping tiles would break
    if not shape.has_experts:
        mlp_share = shape.share_of(3 * shape.layers * shape.hidden * shape.intermediate)
    rotary = 2 * shape.head_dim * between  # cosines and sines
    return Activations(
        kinds=(layer,),
        order=(0,) * shape.layers,
        base_bytes=float(rotary + 2 * INT64_BYTES),  # with its number and its position
        head_bytes=float(HEAD_ROWS * FLOAT32_BYTES * shape.hidden),
        mlp_share=mlp_share,
        linear_passes=shape.linear_passes,
        out_rate=device.host_rate,
        back_rate=device.host_rate,
        host_bytes=device.host_bytes,
        as_set=MemoryChoice(recomputed_layers=shape.layers if checkpointing else 0),
    )


def _layer(
    shape: ModelShape, between: int, *, mixer_bytes: float, output_bytes: float
) -> LayerBytes:
    """Return the bytes of a layer, as this page has them. between: bytes of a number there."""
    moved = shape.dtype_bytes
    hidden = shape.hidden
    stream = float(between * hidden)
    # 1. what is kept
    copies = READERS if between > moved else 2
    norms = (2 * (FLOAT32_BYTES + between) + copies * moved) * hidden
    mlp = MLP_ROWS * moved * shape.intermediate
    inside = MLP_GRADIENT_ROWS * moved * shape.intermediate
    if shape.active_experts:
        rows = shape.active_experts * moved * hidden
        mlp += EXPERT_ROWS * rows
        inside = EXPERT_GRADIENT_ROWS * rows
    kept = norms + mixer_bytes + mlp
    is_tiled = not shape.active_experts
    # 2. what the backward holds; a norm keeps its input itself if that is in float32
    besides = stream if between == FLOAT32_BYTES else 2 * stream
    peak = besides + kept + inside
    in_norm = besides + kept - mlp + NORM_ROWS * FLOAT32_BYTES * hidden
    return LayerBytes(
        input_bytes=stream,
        output_bytes=output_bytes,
        kept_bytes=kept,
        mlp_bytes=float(mlp) if is_tiled else 0.0,
        peak_bytes=peak,
        # The gradient of the MLP's input is whole, whatever the tiles.
        tiled_bytes=max(0.0, float(mlp + inside - moved * hidden)) if is_tiled else 0.0,
        rest_bytes=min(peak, in_norm) if is_tiled else peak,
    )


def with_uneven_experts(layer: LayerBytes, shape: ModelShape, imbalance: float) -> LayerBytes:
    """Return the bytes per token in a layer with experts on several ranks, on the rank that
    computes `imbalance` times the mean. layer: where every rank computes its own tokens."""
    rows = shape.active_experts * shape.dtype_bytes * shape.hidden
    kept = (EXPERT_ROWS - 1) * rows + MLP_ROWS * shape.dtype_bytes * shape.intermediate
    more_kept = (imbalance - 1) * kept
    more_inside = (imbalance - 1) * (kept + EXPERT_GRADIENT_ROWS * rows)
    return replace(
        layer,
        kept_bytes=layer.kept_bytes + more_kept,
        peak_bytes=layer.peak_bytes + more_inside,
        rest_bytes=layer.rest_bytes + more_inside,
    )
