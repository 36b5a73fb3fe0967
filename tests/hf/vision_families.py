"""Tiny configurations of vision-language models, and the forms of their images."""

from typing import Any, NamedTuple

VOCAB = 61
AUDIO, ENDS = 50, (51, 52, 53, 54, 55, 56)  # tokens that no example has
IMAGE, VIDEO, START, END = 57, 58, 59, 60
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
IMAGE_ID = {"image_token_id": IMAGE}
IMAGE_INDEX = {"image_token_index": IMAGE}
VIDEO_IDS = {**IMAGE_ID, "video_token_id": VIDEO}
VIDEO_INDICES = {**IMAGE_INDEX, "video_token_index": VIDEO}
QWEN_IDS = {**VIDEO_IDS, "vision_start_token_id": START, "vision_end_token_id": END}
GLM_IDS = {
    **VIDEO_IDS,
    "image_start_token_id": ENDS[0],
    "image_end_token_id": ENDS[1],
    "video_start_token_id": ENDS[2],
    "video_end_token_id": ENDS[3],
}
LAYERS = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
SQUARE = {**LAYERS, **HEADS, "image_size": 16, "patch_size": 4}
CLIP = {"model_type": "clip_vision_model", **SQUARE}
SIGLIP = {"model_type": "siglip_vision_model", **SQUARE, "vision_use_head": False}
PIXTRAL = {
    "model_type": "pixtral",
    **LAYERS,
    **HEADS,
    "image_size": 32,
    "patch_size": 4,
    "head_dim": 8,
}
QWEN2_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
QWEN_TOWER = {**QWEN2_TOWER, "out_hidden_size": 32, "intermediate_size": 40}
WINDOWS = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 64}
DEEPSTACK = {**QWEN3_TOWER, "deepstack_visual_indexes": [0]}
SAM = {
    **LAYERS,
    **HEADS,
    "output_channels": 16,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 40,
}
MUSE_TOWER = {
    **LAYERS,
    **HEADS,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "max_position_embeddings": 16,
    "layer_types": ["window_attention", "full_attention"],
}
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
MINICPM_TOWER = {**SQUARE, "insert_layer_id": 0}
AUDIO_TOWER = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "d_model": 8,
    "output_dim": 32,
    "n_window": 4,
}
VQ = {
    "embed_dim": 4,
    "num_embeddings": 8,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}


class Family(NamedTuple):
    """A tiny model, and how its images look."""

    config: dict[str, Any]
    """Of the model, by name of option."""
    kind: str
    """Name of the function in IMAGES that draws an image."""
    video: str | None = None
    """Name of the function in IMAGES that draws a video."""
    types: str | None = None
    """The column that its processor makes besides, of what each token stands for."""
    is_prefix: bool = False
    """True if the types are 0 up to the end of the prompt and 1 after it."""


def _of_text(kind: str, **options: Any) -> dict[str, Any]:
    """Options of a text model of another family."""
    return {"model_type": kind, **TEXT, **options}


_MROPE_TEXT = {**TEXT, "rope_parameters": MROPE}
_GLM_TEXT = {**_MROPE_TEXT, "partial_rotary_factor": 1.0}
_GLM_TOWER = {**QWEN_TOWER, "image_size": 32}

FAMILIES = {
    "qwen2_vl": Family(
        {
            "text_config": _MROPE_TEXT,
            "vision_config": {**QWEN2_TOWER, "embed_dim": 32, "mlp_ratio": 2},
            **QWEN_IDS,
        },
        "grid",
        "grid_video",
    ),
    "qwen2_5_vl": Family(
        {"text_config": _MROPE_TEXT, "vision_config": WINDOWS, **QWEN_IDS}, "grid", "grid_video"
    ),
    "qwen3_vl": Family(
        {"text_config": _MROPE_TEXT, "vision_config": DEEPSTACK, **QWEN_IDS}, "grid", "frames"
    ),
    "qwen3_5": Family(
        {"text_config": {**TEXT, **RECURRENT}, "vision_config": QWEN3_TOWER, **QWEN_IDS},
        "grid",
        "frames",
    ),
    "glm4v": Family({"text_config": _GLM_TEXT, "vision_config": _GLM_TOWER, **GLM_IDS}, "grid"),
    "llava": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": CLIP,
            **IMAGE_ID,
            **IMAGE_INDEX,
            "vision_feature_layer": -1,
        },
        "square",
    ),
    "mistral3": Family(
        {
            "text_config": _of_text("mistral"),
            "vision_config": PIXTRAL,
            **IMAGE_ID,
            **IMAGE_INDEX,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "sizes",
    ),
    "internvl": Family(
        {
            "text_config": _of_text("qwen2"),
            "vision_config": {**SQUARE, "image_size": [16, 16], "patch_size": [4, 4]},
            **IMAGE_ID,
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
        },
        "tiles",
    ),
    "aria": Family(
        {
            "text_config": {
                "model_type": "aria_text",
                **TEXT,
                "moe_num_experts": 4,
                "moe_topk": 2,
                "moe_num_shared_experts": 1,
            },
            "vision_config": {"model_type": "idefics3_vision", **SQUARE},
            "projector_patch_to_query_dict": {16: 6},
            "vision_feature_layer": -2,
            **IMAGE_INDEX,
        },
        "masked",
    ),
    "aya_vision": Family(
        {"text_config": _of_text("cohere2", **SLIDING), "vision_config": SIGLIP, **IMAGE_INDEX},
        "tiles",
    ),
    "cohere2_vision": Family(
        {
            "text_config": _of_text("cohere2", **SLIDING),
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 32,
            **IMAGE_ID,
        },
        "tiles",
    ),
    "cosmos3_edge": Family(
        {
            "text_config": _MROPE_TEXT,
            "vision_config": {**LAYERS, **HEADS, "patch_size": 4, "num_patches": 64},
            "projector_hidden_size": 32,
            **QWEN_IDS,
        },
        "flat_grid",
        "flat_frames",
    ),
    "cosmos3_omni": Family(
        {"text_config": _MROPE_TEXT, "vision_config": DEEPSTACK, **QWEN_IDS}, "grid", "frames"
    ),
    "deepseek_vl": Family(
        {"text_config": _of_text("llama"), "vision_config": SIGLIP, **IMAGE_ID}, "square"
    ),
    "ernie4_5_vl_moe": Family(
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
                "moe_intermediate_size": [16, 8],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 4,
                "patch_size": 4,
                "intermediate_size": 40,
            },
            **GLM_IDS,
        },
        "flat_grid",
        "flat_video",
        types="moe_mm_token_type_ids",
    ),
    "exaone4_5": Family(
        {
            "text_config": _of_text("exaone4", **SLIDING),
            "vision_config": {**WINDOWS, "num_key_value_heads": 2},
            **VIDEO_IDS,
        },
        "grid",
        "grid_video",
    ),
    "fuyu": Family(
        {
            "text_config": _of_text("persimmon"),
            "image_size": 16,
            "patch_size": 4,
            **IMAGE_ID,
            "pad_token_id": 0,
        },
        "patches",
    ),
    "gemma4": Family(
        {
            "text_config": {
                **TEXT,
                **SLIDING,
                "global_head_dim": 8,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                **LAYERS,
                **HEADS,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            },
            **VIDEO_IDS,
            "audio_token_id": AUDIO,
        },
        "positioned",
        "positioned_video",
    ),
    "got_ocr2": Family(
        {"text_config": _of_text("qwen2"), "vision_config": SAM, **IMAGE_INDEX}, "wide"
    ),
    "hyperclovax_vision_v2": Family(
        {"text_config": _of_text("hyperclovax"), "vision_config": WINDOWS, **VIDEO_IDS},
        "grid",
        "grid_video",
    ),
    "idefics2": Family(
        {
            "text_config": _of_text("mistral", sliding_window=None),
            "vision_config": SQUARE,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 3,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            **IMAGE_ID,
        },
        "nested",
    ),
    "idefics3": Family(
        {"text_config": _of_text("llama"), "vision_config": SQUARE, **IMAGE_ID}, "nested"
    ),
    "smolvlm": Family(
        {"text_config": _of_text("llama"), "vision_config": SQUARE, **IMAGE_ID}, "nested"
    ),
    "janus": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": {
                **SQUARE,
                "mlp_ratio": 2.0,
                "projection_dim": 32,
                "num_image_tokens": 16,
            },
            "vq_config": {
                **VQ,
                "num_patches": 4,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
            **IMAGE_ID,
        },
        "square",
    ),
    "kimi_k25": Family(
        {
            "text_config": _of_text(
                "deepseek_v3",
                **LATENT,
                num_key_value_heads=4,
                moe_intermediate_size=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
            ),
            "vision_config": {
                **LAYERS,
                **HEADS,
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 32,
            **QWEN_IDS,
        },
        "pixel_grid",
        "pixel_still",
    ),
    "lfm2_vl": Family(
        {
            "text_config": _of_text("lfm2", layer_types=["conv", "full_attention"]),
            "vision_config": {
                "model_type": "siglip2_vision_model",
                **LAYERS,
                **HEADS,
                "patch_size": 4,
                "num_patches": 16,
                "vision_use_head": False,
            },
            "projector_hidden_size": 32,
            **IMAGE_ID,
        },
        "shaped",
    ),
    "lfm3_vl": Family(
        {
            "text_config": {**TEXT, "layer_types": ["conv", "full_attention"]},
            "vision_config": {
                **LAYERS,
                **HEADS,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "layer_types": ["conv", "full_attention"],
            },
            "projector_hidden_size": 32,
            **QWEN_IDS,
        },
        "grid",
        "grid_video",
    ),
    "lighton_ocr": Family(
        {"text_config": _of_text("qwen3"), "vision_config": PIXTRAL, **IMAGE_ID}, "sizes"
    ),
    "llama4": Family(
        {
            "text_config": {
                **TEXT,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "attention_chunk_size": 8,
                "floor_scale": 8,
                "no_rope_layers": [1, 0],
                "layer_types": ["chunked_attention", "full_attention"],
                "moe_layers": [1],
            },
            "vision_config": {
                **SQUARE,
                "intermediate_size": 128,
                "vision_output_dim": 48,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
            },
            **IMAGE_INDEX,
        },
        "tiles",
    ),
    "llava_next": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": CLIP,
            "image_grid_pinpoints": PINPOINTS,
            **IMAGE_INDEX,
        },
        "any_size",
    ),
    "llava_next_video": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": CLIP,
            "image_grid_pinpoints": PINPOINTS,
            **VIDEO_INDICES,
        },
        "any_size",
        "clip",
    ),
    "llava_onevision": Family(
        {
            "text_config": _of_text("qwen2"),
            "vision_config": SIGLIP,
            "image_grid_pinpoints": PINPOINTS,
            **VIDEO_INDICES,
        },
        "any_size",
        "clip",
    ),
    "minimax_m3_vl": Family(
        {
            "text_config": {
                **TEXT,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "dense_intermediate_size": 48,
                "shared_intermediate_size": 16,
                "rotary_dim": 8,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "full_attention"],
            },
            "vision_config": {**SQUARE, "image_size": 32},
            "projector_hidden_size": 32,
            **VIDEO_INDICES,
        },
        "grid",
        "grid_video",
    ),
    "muse_glimmer": Family(
        {
            "text_config": {**TEXT, **SLIDING, "layer_rope_theta": [10000.0, 0]},
            "vision_config": MUSE_TOWER,
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
            **VIDEO_IDS,
        },
        "grid",
        "grid_video",
    ),
    "muse_spark": Family(
        {
            "text_config": {
                **TEXT,
                **SLIDING,
                "layer_rope_theta": [10000.0, 0],
                "moe_intermediate_size": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 32,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": MUSE_TOWER,
            "audio_config": {
                "patch_sizes": [4, 2, 2, 2],
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1],
                "out_hidden_size": 32,
            },
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
            **VIDEO_IDS,
            "audio_token_id": AUDIO,
        },
        "grid",
        "grid_video",
    ),
    "paddleocr_vl": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": SQUARE,
            **QWEN_IDS,
        },
        "pixel_grid",
    ),
    "qianfan_ocr": Family(
        {
            "text_config": _of_text("qwen3"),
            "vision_config": {
                **SQUARE,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                "drop_path_rate": 0.0,
            },
            **IMAGE_ID,
        },
        "tiles",
    ),
    "qwen2_5_omni_thinker": Family(
        {
            "text_config": _MROPE_TEXT,
            "vision_config": WINDOWS,
            "audio_config": AUDIO_TOWER,
            **VIDEO_INDICES,
            "audio_token_index": AUDIO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "audio_start_token_id": ENDS[0],
            "audio_end_token_id": ENDS[1],
        },
        "grid",
    ),
    "qwen3_omni_moe_thinker": Family(
        {
            "text_config": {**_MROPE_TEXT, **EXPERTS},
            "vision_config": DEEPSTACK,
            "audio_config": {**AUDIO_TOWER, "downsample_hidden_size": 8},
            **QWEN_IDS,
            "audio_token_id": AUDIO,
            "audio_start_token_id": ENDS[0],
            "audio_end_token_id": ENDS[1],
        },
        "grid",
    ),
    "qwen3_5_moe": Family(
        {
            "text_config": {
                **TEXT,
                **RECURRENT,
                **EXPERTS,
                "shared_expert_intermediate_size": 16,
            },
            "vision_config": QWEN3_TOWER,
            **QWEN_IDS,
        },
        "grid",
        "frames",
    ),
    "qwen3_vl_moe": Family(
        {
            "text_config": {**_MROPE_TEXT, **EXPERTS},
            "vision_config": DEEPSTACK,
            **QWEN_IDS,
        },
        "grid",
        "frames",
    ),
    "video_llama_3": Family(
        {
            "text_config": _of_text("qwen2"),
            "vision_config": {**LAYERS, **HEADS, "patch_size": 4},
            **VIDEO_IDS,
        },
        "merged",
        "merged_video",
    ),
    "video_llava": Family(
        {"text_config": _of_text("llama"), "vision_config": CLIP, **VIDEO_INDICES},
        "square",
        "clip",
    ),
    "vipllava": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": CLIP,
            "vision_feature_layer": [-2, -1],
            **IMAGE_INDEX,
        },
        "square",
    ),
    "glm46v": Family(
        {
            "text_config": {"model_type": "glm4v_text", **_GLM_TEXT},
            "vision_config": {"model_type": "glm4v_vision", **_GLM_TOWER},
            **GLM_IDS,
        },
        "grid",
    ),
    "glm4v_moe": Family(
        {
            "text_config": {
                **_MROPE_TEXT,
                "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
                "moe_intermediate_size": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
            },
            "vision_config": _GLM_TOWER,
            **GLM_IDS,
        },
        "grid",
    ),
    "glm_ocr": Family({"text_config": _GLM_TEXT, "vision_config": _GLM_TOWER, **GLM_IDS}, "grid"),
    "chameleon": Family(
        {
            **TEXT,
            "vq_config": {**VQ, "resolution": 16},
            "vocabulary_map": {
                "<image>": IMAGE,
                **{f"IMGIMG{letter}Z": 40 + i for i, letter in enumerate("ABCDEFGH")},
            },
        },
        "square",
    ),
    "cohere_compass": Family(
        {
            "text_config": {
                **TEXT,
                **SLIDING,
                "rope_parameters": {"full_attention": MROPE, "sliding_attention": MROPE},
            },
            "vision_config": DEEPSTACK,
            **QWEN_IDS,
        },
        "grid",
        "frames",
    ),
    "hunyuan_vl": Family(
        {
            "text_config": {
                **TEXT,
                "rope_parameters": {**ROPE, "mrope_section": [1, 1, 1, 1]},
            },
            "vision_config": {
                **LAYERS,
                **HEADS,
                "num_key_value_heads": 4,
                "out_hidden_size": 32,
                "text_hidden_size": 32,
                "patch_size": 4,
                "img_max_token_num": 64,
                "max_image_size": 32,
            },
            **IMAGE_ID,
            "im_start_id": ENDS[0],
            "im_end_id": ENDS[1],
            "im_newline_id": ENDS[2],
        },
        "flat_grid",
    ),
    "minicpm_ocr": Family(
        {"text_config": {**TEXT, **RECURRENT}, "vision_config": MINICPM_TOWER, **VIDEO_IDS},
        "packed",
    ),
    "minicpmv4_6": Family(
        {"text_config": {**TEXT, **RECURRENT}, "vision_config": MINICPM_TOWER, **VIDEO_IDS},
        "packed",
    ),
    "minicpmv4_7": Family(
        {
            "text_config": {**TEXT, **RECURRENT},
            "vision_config": MINICPM_TOWER,
            **VIDEO_IDS,
            "image_start_id": START,
            "image_end_id": END,
            "slice_start_id": ENDS[0],
            "slice_end_id": ENDS[1],
            "newline_id": ENDS[2],
        },
        "packed",
    ),
    "step3p7": Family(
        {
            "text_config": {
                **TEXT,
                **SLIDING,
                "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
                "num_sliding_attention_heads": 4,
                "num_experts_per_tok": 2,
                "n_routed_experts": 4,
                "moe_intermediate_size": 16,
                "share_expert_dim": 16,
                "mlp_layer_types": ["dense", "sparse"],
                "query_pre_attn_scalar": 8,
            },
            "vision_config": {**SQUARE, "image_size": 32, "max_position_embeddings": 64},
            **IMAGE_ID,
        },
        "wide",
    ),
    "deepseek_vl_hybrid": Family(
        {
            "text_config": _of_text("llama"),
            "vision_config": SIGLIP,
            "high_res_vision_config": {**SAM, "num_pos_feats": 16},
            **IMAGE_ID,
        },
        "two_sizes",
    ),
    "deepseek_ocr2": Family(
        {
            "text_config": {
                **TEXT,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "mlp_layer_types": ["dense", "sparse"],
            },
            "vision_config": {
                "sam_config": {**SAM, "downsample_channels": [16, 32]},
                "encoder_config": {**TEXT},
            },
            **IMAGE_ID,
        },
        "wide",
    ),
    "nemotron_h_omni": Family(
        {
            "text_config": {
                **TEXT,
                "layers_block_type": ["mlp", "full_attention"],
                "intermediate_size": 48,
            },
            "vision_config": {
                **LAYERS,
                **HEADS,
                "patch_size": 4,
                "image_size": 16,
                "max_img_size": 32,
                "patch_dim": 48,
                "video_patch_dim": 96,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": 32,
            "projector_hidden_size": 32,
            **VIDEO_IDS,
            "audio_token_id": AUDIO,
        },
        "flat_hw",
    ),
    "gemma3": Family(
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 5,
                "query_pre_attn_scalar": 8,
            },
            "vision_config": SQUARE,
            **IMAGE_ID,
            "mm_tokens_per_image": 4,
        },
        "square",
        types="token_type_ids",
    ),
    "paligemma": Family(
        {
            "text_config": _of_text("gemma"),
            "vision_config": {
                "model_type": "siglip_vision_model",
                **SQUARE,
                "projection_dim": 32,
            },
            **IMAGE_ID,
            **IMAGE_INDEX,
            "projection_dim": 32,
        },
        "square",
        types="token_type_ids",
        is_prefix=True,
    ),
}
