"""Cost models by name.

* Published: the constants FlexSP was released with (arXiv 2412.01523; repository
  PKU-DAIR/Hetu-Galvatron, branch flexsp, galvatron/flexsp_solver/solver.py): GPT-7B, 13B and 30B
  on 64 A100-40GB in 8 nodes, ZeRO-3, Ulysses only.
* Estimated: Llama-3.1-8B on nodes of eight A800 or H200 with a NIC per GPU, kinds of clusters that
  Zeppelin was evaluated on (arXiv 2509.21841, section 5).
* Estimated: a model of the sizes of Qwen3-8B on nodes of eight H100 or H200.
* Estimated, with a trained vision tower: a model of the sizes of Qwen3-VL-8B on nodes of eight
  H100 or H200. Of the tower its layers count; its mergers, 0.16 billion parameters for a quarter
  of the rows, would add a tenth to the seconds of a patch.
* Estimated, with the kinds of their layers: models of the sizes of Gemma-3-27B, gpt-oss-120B,
  Qwen3-30B-A3B, Qwen3.5-35B-A3B and Nemotron-3-Nano-30B-A3B on nodes of eight H100 or H200, under
  FSDP with checkpointing. Parameters come from transformers' models with the published
  configurations. Seconds of recurrent layers are computed from arithmetic, at the share of FLOP/s
  that a measured scan achieves (`SCAN_EFFICIENCY` in devices.py), and from bytes.
* Estimated, the same for Qwen3-30B-A3B and gpt-oss-120B with their experts over the eight ranks of
  a node ("-ep8"): a rank gathers an eighth of the experts. `load_cost_model` makes them for any
  model with experts and any number of ranks that divides them.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_flexseq.base.layers import Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES, DeviceSpec
from hf_flexseq.cost.shapes import ExpertShape, ModelShape
from hf_flexseq.cost.tower import TowerShape

MIB = 2**20

# ---- published

# By model: a1, a2 and b1 in milliseconds; MiB of a token's activations; layers; hidden size;
# billions of parameters, which include the learned positions of a context of 384K.
FLEXSP = {
    "gpt-7b": (5.128e-6, 0.18396, 629.4, 4.480, 32, 4096, 7.850),
    "gpt-13b": (9.2852e-6, 0.30602, 1132.6, 4.220, 40, 5120, 14.032),
    "gpt-30b": (15.4262e-6, 0.80357, 2789.4, 3.417, 60, 6656, 32.715),
}
# (degree, GB/s) as released.
FLEXSP_BANDWIDTHS = ((2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))

# Memory of a rank that the release plans with.
FLEXSP_BUDGET_MIB = 28 * 1024


def _flexsp(model: str) -> CostModel:
    """Return a released FlexSP model.

    The release divides MiB by GB/s and reads the result as milliseconds, so its GB/s are 1000
    MiB/s. A parameter takes 16 bytes.
    """
    attention_ms, linear_ms, micro_batch_ms, token_mib, layers, hidden, billions = FLEXSP[model]
    return CostModel(
        name=f"flexsp-{model}-a100",
        attention_s=attention_ms / 1e3,
        linear_s=linear_ms / 1e3,
        micro_batch_s=micro_batch_ms / 1e3,
        group_s=0.0,  # the release has no latency
        # 4 tensors, forward and backward, 2 bytes each
        all_to_all_bytes=4 * 2 * layers * hidden * 2.0,
        ring_bytes=None,
        bandwidths=tuple((degree, speed * 1000 * MIB) for degree, speed in FLEXSP_BANDWIDTHS),
        heads=None,
        token_bytes=token_mib * MIB,
        state_bytes=0.0,
        sharded_state_bytes=billions * 16 * 1024 * MIB,
        budget_bytes=float(FLEXSP_BUDGET_MIB * MIB),
    )


# ---- estimated

# Zeppelin's clusters A and C: 60 % of the dense bf16 peak, NVLink and one NIC per rank, one way.
CLUSTERS = {
    "a800": replace(DEVICES["A100-80GB"], flops=1.87e14, intra_bytes=1.8e11, inter_bytes=2.5e10),
    "h200": replace(
        DEVICES["H100"],
        flops=5.93e14,
        memory_bytes=139 * 2**30,
        intra_bytes=4e11,
        inter_bytes=4.5e10,
    ),
}

# Columns of `SIZES`: the intermediate size is that of all experts of a token together.
_COLUMNS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim",
    "intermediate", "vocab", "params", "active_params",
)  # fmt: skip
SIZES: dict[str, tuple[Any, ...]] = {
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, 8_030_261_248, None),
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, 8_190_735_360, None),
    # https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json (text_config), without the
    # vision tower. The head is the embedding, so its weights work twice on a token.
    "gemma-3-27b": (62, 5376, 32, 16, 128, 21504, 262208, 27_009_346_304, 28_418_976_512),
    # https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json: 4 of 128 experts to a
    # token. Active without the embedding 5.13 B: arXiv 2508.10925, table 1.
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 4 * 2880, 201088, 116_829_156_672, 5_711_982_912),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json: 8 of 128 experts of 768.
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 8 * 768, 151936, 30_532_122_624, 3_353_032_704),
    # https://huggingface.co/Qwen/Qwen3.5-35B-A3B/blob/main/config.json (text_config), without the
    # vision tower: 8 of 256 experts of 512 and a shared one; active with embedding and head.
    "qwen3.5-35b-a3b": (40, 2048, 16, 2, 256, 9 * 512, 248320, 34_660_610_688, 3_454_988_928),
    # https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/blob/main/config.json: 6 of
    # 128 experts of 1,856 and a shared one of 3,712; active with the embeddings: arXiv 2512.20848.
    "nemotron-3-nano-30b-a3b": (52, 2688, 32, 2, 128, 14848, 131072, 31577937344, 3580073408),
    # https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct/blob/main/config.json: text_config, and 0.58
    # billion parameters of the tower, which work on no token of text; 8.77 billion in all.
    "qwen3-vl-8b": (36, 4096, 32, 8, 128, 12288, 151936, 8_767_123_696, 8_190_735_360),
}
# vision_config of the same file. A token has features for the embedding, and for three layers of
# the text model ("DeepStack" of arXiv 2511.21631).
QWEN3_VL_TOWER = TowerShape(
    layers=27,
    hidden=1152,
    intermediate=4304,
    patches_per_token=4.0,
    row_numbers=(1 + 3) * 4096,
)
GATED_DELTA = RecurrentShape(
    kind="gated_delta",
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    width=4,
    channels=8192,
)
MAMBA2 = RecurrentShape(
    kind="mamba2",
    key_heads=8,
    value_heads=64,
    key_dim=128,
    value_dim=64,
    width=4,
    channels=6144,
)
GPT_OSS_EXPERTS = ExpertShape(36, 128, 4, 114_701_598_720)
# Layers of other kinds than full attention, norms of heads, experts of a token, and towers.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"head_norms": True},
    # five window layers to a full one, which is every sixth: arXiv 2503.19786, section 2
    "gemma-3-27b": {"reaches": ((52, Reach(window=1024)),), "head_norms": True},
    # every other layer has a window
    "gpt-oss-120b": {"reaches": ((18, Reach(window=128)),), "experts": GPT_OSS_EXPERTS},
    "qwen3-30b-a3b": {"head_norms": True, "experts": ExpertShape(48, 128, 8, 28_991_029_248)},
    # three Gated DeltaNet layers to a full one
    "qwen3.5-35b-a3b": {
        "without_attention": 30,
        "recurrent": ((30, GATED_DELTA),),
        "head_norms": True,
        "experts": ExpertShape(40, 256, 8, 32_212_254_720),
    },
    # 23 Mamba 2 layers, 6 of full attention, 23 of experts alone
    "nemotron-3-nano-30b-a3b": {
        "without_attention": 46,
        "recurrent": ((23, MAMBA2),),
        "experts": ExpertShape(23, 128, 6, 29_374_808_064),
    },
    "qwen3-vl-8b": {"tower": QWEN3_VL_TOWER, "head_norms": True},
}
SHAPES = {
    model: ModelShape(**dict(zip(_COLUMNS, sizes, strict=True)), **KINDS.get(model, {}))
    for model, sizes in SIZES.items()
}
MODELS = dict(SHAPES)  # all of them, for `flexseq fit`
LLAMA_8B = SHAPES.pop("llama-3.1-8b")


# Models whose experts the ranks of a node may hold together, as transformers'
# DistributedConfig(ep_size=8) has them: all experts of gpt-oss-120b do not fit on each rank.
OVER_EIGHT_RANKS = ("qwen3-30b-a3b", "gpt-oss-120b")


def _estimated(
    model: str, shape: ModelShape, device_name: str, device: DeviceSpec, *, expert_ranks: int = 1
) -> CostModel:
    """Return the cost of a model under FSDP with checkpointing on eight nodes of eight devices;
    nothing can be chosen for its activations."""
    topology = Topology(nodes=8, ranks_per_node=8)
    cost = analytic_cost_model(shape, device, topology, zero_stage=3, expert_ranks=expert_ranks)
    over = f"-ep{expert_ranks}" if expert_ranks > 1 else ""
    return replace(cost, name=f"{model}{over}-{device_name.lower()}", activations=None)


def _all_models() -> list[CostModel]:
    """Return all presets."""
    models = [_flexsp(model) for model in FLEXSP]
    for name, device in CLUSTERS.items():
        models.append(_estimated("llama-3.1-8b", LLAMA_8B, name, device))
    for name in ("H100", "H200"):
        for model, shape in SHAPES.items():
            models.append(_estimated(model, shape, name, DEVICES[name]))
        for model in OVER_EIGHT_RANKS:
            models.append(_estimated(model, SHAPES[model], name, DEVICES[name], expert_ranks=8))
    return models


PRESETS = {model.name: model for model in _all_models()}

# The names of estimated models with their experts over ranks.
_OVER_RANKS = re.compile(
    rf"({'|'.join(map(re.escape, SHAPES))})-ep([1-9][0-9]{{0,4}})-(h100|h200)"
)


def load_cost_model(name_or_path: str) -> CostModel:
    """Return a preset by its name, or the cost model in a JSON file.

    "-epN" before the device of an estimated preset puts its experts over N ranks. Raises
    ValueError for ranks that do not divide the experts, or the 64 ranks of these presets; and,
    listing the presets, for anything else.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    over_ranks = _OVER_RANKS.fullmatch(name_or_path)
    if over_ranks is not None:
        model, ranks, device = over_ranks.groups()
        return _estimated(
            model, SHAPES[model], device, DEVICES[device.upper()], expert_ranks=int(ranks)
        )
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"cost_model={name_or_path!r} is neither a file nor one of the presets "
            f"{', '.join(PRESETS)}"
        )
    return CostModel.load(name_or_path)
