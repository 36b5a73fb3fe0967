"""Families of vision-language models that tests make tiny models of, and how their images look."""

from collections.abc import Mapping
from typing import Any, NamedTuple

VOCAB = 64
OTHERS = (50, 51, 52, 53, 54, 55, 56)  # tokens that no example has
IMAGE, VIDEO, START, END = 57, 58, 59, 60


class Family(NamedTuple):
    """What a family's images are, and what `small_model` does not make small."""

    kind: str
    """Name of the function in IMAGES that draws an image."""
    video: str | None = None
    """Name of the function in IMAGES that draws a video."""
    types: str | None = None
    """The column that its processor makes besides, of what each token stands for."""
    is_prefix: bool = False
    """True if the types are 0 up to the end of the prompt and 1 after it."""
    options: Mapping[str, Any] = {}
    """Of the model's configuration."""


_QUANTIZER = {
    "embed_dim": 4,
    "num_embeddings": 8,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}
_SAM = {"output_channels": 16, "mlp_dim": 40}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLICES = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


def _alike(*kinds: str, names: str) -> dict[str, Family]:
    """Families whose images look alike, and that need no options."""
    return dict.fromkeys(names.split(), Family(*kinds))


FAMILIES = {
    **_alike("grid", names="glm4v qwen2_5_omni_thinker glm46v glm4v_moe glm_ocr"),
    **_alike(
        "grid",
        "grid_video",
        names="qwen2_vl qwen2_5_vl exaone4_5 hyperclovax_vision_v2 lfm3_vl minimax_m3_vl",
    ),
    **_alike(
        "grid",
        "frames",
        names="qwen3_vl qwen3_5 cosmos3_omni qwen3_5_moe qwen3_vl_moe cohere_compass",
    ),
    **_alike("square", names="llava deepseek_vl vipllava"),
    **_alike("sizes", names="mistral3 lighton_ocr"),
    **_alike("tiles", names="internvl aya_vision"),
    **_alike("nested", names="idefics2 idefics3 smolvlm"),
    **_alike("any_size", "clip", names="llava_next_video llava_onevision"),
    **_alike("packed", names="minicpm_ocr minicpmv4_6"),
    "aria": Family("masked"),
    "cohere2_vision": Family("tiles", options={"alignment_intermediate_size": 32}),
    "cosmos3_edge": Family("flat_grid", "flat_frames"),
    "ernie4_5_vl_moe": Family(
        "flat_grid",
        "flat_video",
        types="moe_mm_token_type_ids",
        options={"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    ),
    "fuyu": Family("patches"),
    "gemma4": Family(
        "positioned",
        "positioned_video",
        options={
            "vision_config": {
                "model_type": "gemma4_vision",
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            }
        },
    ),
    "got_ocr2": Family("wide", options={"vision_config": {**_SAM, "image_size": 32}}),
    "janus": Family(
        "square", options={"vq_config": {**_QUANTIZER, "num_patches": 4, "projection_dim": 32}}
    ),
    "kimi_k25": Family("pixel_grid", "pixel_still", options={"projection_hidden_size": 32}),
    "lfm2_vl": Family("shaped"),
    "llama4": Family("tiles", options={"text_config": {"intermediate_size_mlp": 48}}),
    "llava_next": Family("any_size"),
    "muse_glimmer": Family("grid", "grid_video", options={"out_hidden_size": 128}),
    "muse_spark": Family(
        "grid",
        "grid_video",
        options={
            "out_hidden_size": 128,
            "audio_config": {
                "patch_sizes": [4, 2, 2, 2],
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1],
            },
        },
    ),
    "paddleocr_vl": Family(
        "pixel_grid",
        options={"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}},
    ),
    "qianfan_ocr": Family("tiles", options={"vision_config": {"drop_path_rate": 0.0}}),
    "qwen3_omni_moe_thinker": Family(
        "grid", options={"audio_config": {"downsample_hidden_size": 8}}
    ),
    "video_llama_3": Family("merged", "merged_video"),
    "video_llava": Family("square", "clip"),
    "chameleon": Family(
        "square",
        options={
            "vq_config": {**_QUANTIZER, "resolution": 16},
            "vocabulary_map": {
                "<image>": IMAGE,
                **{f"IMGIMG{letter}Z": 40 + i for i, letter in enumerate("ABCDEFGH")},
            },
        },
    ),
    "hunyuan_vl": Family("flat_grid"),
    "minicpmv4_7": Family(
        "packed", options={name: index for index, name in enumerate(_SLICES, start=1)}
    ),
    "step3p7": Family("wide"),
    "deepseek_vl_hybrid": Family(
        "two_sizes",
        options={"high_res_vision_config": {**_SAM, "image_size": 32, "num_pos_feats": 16}},
    ),
    "deepseek_ocr2": Family(
        "wide",
        options={"vision_config": {"sam_config": {**_SAM, "downsample_channels": [16, 32]}}},
    ),
    "nemotron_h_omni": Family(
        "flat_hw",
        options={
            "text_config": {"layers_block_type": ["mlp", "full_attention"]},
            "vision_hidden_size": 32,
            "vision_config": {
                "patch_dim": 48,
                "max_img_size": 32,
                "video_patch_dim": 96,
                "video_temporal_patch_size": 2,
            },
        },
    ),
    "gemma3": Family("square", types="token_type_ids"),
    "paligemma": Family("square", types="token_type_ids", is_prefix=True),
}
