"""Cost models by name.

* Published: the constants FlexSP was released with (arXiv 2412.01523; repository
  PKU-DAIR/Hetu-Galvatron, branch flexsp, galvatron/flexsp_solver/solver.py): GPT-7B, 13B and 30B
  on 64 A100-40GB in 8 nodes, ZeRO-3, Ulysses only.
* Estimated: Llama-3.1-8B on nodes of eight A800 or H200 with a NIC per GPU, kinds of clusters that
  Zeppelin was evaluated on (arXiv 2509.21841, section 5).
* Estimated, with the kinds of their layers: models of the sizes of Gemma-3-27B, gpt-oss-120B,
  Qwen3-30B-A3B, Qwen3.5-35B-A3B and Nemotron-3-Nano-30B-A3B on nodes of eight H100 or H200, under
  FSDP with checkpointing. Parameters are those of transformers' models with the published
  configurations. The seconds of recurrent layers are modelled: arithmetic at the share of FLOP/s
  that a measured scan achieves (`SCAN_EFFICIENCY` in analytic.py), and bytes.
"""

from dataclasses import replace
from pathlib import Path

from hf_flexseq.base.layers import Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, DeviceSpec, ModelShape, analytic_cost_model

MIB = 2**20

# (degree, GB/s) as released.
FLEXSP_BANDWIDTHS = ((2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))

# Memory of a rank that the release plans with.
FLEXSP_BUDGET_MIB = 28 * 1024


def _flexsp(
    name: str,
    *,
    attention_ms: float,
    linear_ms: float,
    micro_batch_ms: float,
    token_mib: float,
    layers: int,
    hidden: int,
    billion_parameters: float,
) -> CostModel:
    """Return a released FlexSP model.

    The release divides MiB by GB/s and reads the result as milliseconds, so its GB/s are 1000
    MiB/s. Its parameters count the learned positions, and so depend on the context: these are the
    384K ones, at 16 bytes a parameter.

    attention_ms, linear_ms, micro_batch_ms: a1, a2 and b1. token_mib: activations of a token.
    """
    return CostModel(
        name=name,
        attention_s=attention_ms / 1e3,
        linear_s=linear_ms / 1e3,
        micro_batch_s=micro_batch_ms / 1e3,
        group_s=0.0,  # the release knows no latency
        # 4 tensors, forward and backward, 2 bytes each
        all_to_all_bytes=4 * 2 * layers * hidden * 2.0,
        ring_bytes=None,
        query_bytes=0.0,
        ring_overlap=1.0,
        bandwidths=tuple((degree, speed * 1000 * MIB) for degree, speed in FLEXSP_BANDWIDTHS),
        heads=None,
        token_bytes=token_mib * MIB,
        state_bytes=0.0,
        sharded_state_bytes=billion_parameters * 16 * 1024 * MIB,
        budget_bytes=float(FLEXSP_BUDGET_MIB * MIB),
    )


FLEXSP = (
    _flexsp(
        "flexsp-gpt-7b-a100",
        attention_ms=5.128e-6,
        linear_ms=0.18396,
        micro_batch_ms=629.4,
        token_mib=4.480,
        layers=32,
        hidden=4096,
        billion_parameters=7.850,
    ),
    _flexsp(
        "flexsp-gpt-13b-a100",
        attention_ms=9.2852e-6,
        linear_ms=0.30602,
        micro_batch_ms=1132.6,
        token_mib=4.220,
        layers=40,
        hidden=5120,
        billion_parameters=14.032,
    ),
    _flexsp(
        "flexsp-gpt-30b-a100",
        attention_ms=15.4262e-6,
        linear_ms=0.80357,
        micro_batch_ms=2789.4,
        token_mib=3.417,
        layers=60,
        hidden=6656,
        billion_parameters=32.715,
    ),
)

# (name, device): 60 % of the dense bf16 peak, NVLink and one NIC per rank, one way, as in
# Zeppelin's clusters A and C.
CLUSTERS = (
    (
        "llama-3.1-8b-a800",
        DeviceSpec(
            name="A800",
            flops=1.87e14,
            memory_bytes=79 * 2**30,
            intra_bytes=1.8e11,
            inter_bytes=2.5e10,
            layer_s=5e-4,
        ),
    ),
    (
        "llama-3.1-8b-h200",
        DeviceSpec(
            name="H200",
            flops=5.93e14,
            memory_bytes=139 * 2**30,
            intra_bytes=4e11,
            inter_bytes=4.5e10,
            layer_s=5e-4,
        ),
    ),
)
LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    params=8_030_261_248,
)


def _cluster(name: str, device: DeviceSpec) -> CostModel:
    """Return the cost of Llama-3.1-8B under FSDP with checkpointing on nodes of eight such
    devices."""
    topology = Topology(nodes=8, ranks_per_node=8)
    cost = analytic_cost_model(LLAMA_8B, device, topology, zero_stage=3)
    # These are Zeppelin's clusters, and its Ulysses hides none of its transfers.
    return replace(cost, name=name, all_to_all_overlap=0.0)


# https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json (text_config): sizes, windows
# of 1,024; five window layers to a full one, which is every sixth: arXiv 2503.19786, section 2.
# The vision tower is left out. The head is the embedding, so that its weights work twice on a
# token.
GEMMA_3_27B = ModelShape(
    layers=62,
    hidden=5376,
    heads=32,
    kv_heads=16,
    head_dim=128,
    intermediate=21504,
    vocab=262208,
    params=27_009_346_304,
    active_params=27_009_346_304 + 262208 * 5376,
    reaches=((52, Reach(window=1024)),),
)
# https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json: sizes, windows of 128 in every
# other layer, 4 of 128 experts to a token. 116.83 B parameters, 5.13 B active without the
# embedding: arXiv 2508.10925, table 1.
GPT_OSS_120B = ModelShape(
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    intermediate=4 * 2880,
    vocab=201088,
    params=116_829_156_672,
    active_params=5_711_982_912,
    reaches=((18, Reach(window=128)),),
)
# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json: sizes, 8 of 128 experts of 768
# to a token. 30.5 B parameters, 3.3 B active: https://huggingface.co/Qwen/Qwen3-30B-A3B.
QWEN3_30B_A3B = ModelShape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=8 * 768,
    vocab=151936,
    params=30_532_122_624,
    active_params=3_353_032_704,
)
# https://huggingface.co/Qwen/Qwen3.5-35B-A3B/blob/main/config.json (text_config): sizes, three
# Gated DeltaNet layers to a full one, 8 of 256 experts of 512 and a shared one to a token. Its
# card says 35 B parameters, 3 B active; here with the embedding and the head, without the vision
# tower.
QWEN3_5_35B_A3B = ModelShape(
    layers=40,
    hidden=2048,
    heads=16,
    kv_heads=2,
    head_dim=256,
    intermediate=9 * 512,
    vocab=248320,
    params=34_660_610_688,
    active_params=3_454_988_928,
    without_attention=30,
    recurrent=(
        (
            30,
            RecurrentShape(
                kind="gated_delta",
                key_heads=16,
                value_heads=32,
                key_dim=128,
                value_dim=128,
                width=4,
                channels=8192,
            ),
        ),
    ),
)
# https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/blob/main/config.json: sizes,
# 23 Mamba 2 layers, 6 of full attention, 23 of experts alone; 6 of 128 experts of 1,856 and a
# shared one of 3,712 to a token. 31.6 B parameters, 3.6 B active with the embeddings: arXiv
# 2512.20848.
NEMOTRON_3_NANO = ModelShape(
    layers=52,
    hidden=2688,
    heads=32,
    kv_heads=2,
    head_dim=128,
    intermediate=6 * 1856 + 3712,
    vocab=131072,
    params=31_577_937_344,
    active_params=3_580_073_408,
    without_attention=46,
    recurrent=(
        (
            23,
            RecurrentShape(
                kind="mamba2",
                key_heads=8,
                value_heads=64,
                key_dim=128,
                value_dim=64,
                width=4,
                channels=6144,
            ),
        ),
    ),
)
SHAPES = {
    "gemma-3-27b": GEMMA_3_27B,
    "gpt-oss-120b": GPT_OSS_120B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.5-35b-a3b": QWEN3_5_35B_A3B,
    "nemotron-3-nano-30b-a3b": NEMOTRON_3_NANO,
}


def _estimated(model: str, device: str) -> CostModel:
    """Return the cost of a model of `SHAPES` on eight nodes of eight such devices."""
    topology = Topology(nodes=8, ranks_per_node=8)
    cost = analytic_cost_model(SHAPES[model], DEVICES[device], topology, zero_stage=3)
    return replace(cost, name=f"{model}-{device.lower()}")


PRESETS = {model.name: model for model in FLEXSP}
PRESETS |= {name: _cluster(name, device) for name, device in CLUSTERS}
for _device in ("H100", "H200"):
    for _model in SHAPES:
        PRESETS[f"{_model}-{_device.lower()}"] = _estimated(_model, _device)


def load_cost_model(name_or_path: str) -> CostModel:
    """Return a preset by its name, or the cost model in a JSON file.

    Raises ValueError, listing the presets, for anything else.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"cost_model={name_or_path!r} is neither a file nor one of the presets "
            f"{', '.join(PRESETS)}"
        )
    return CostModel.load(name_or_path)
