"""Models by their configurations; weights are not read."""

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.hf.engine.layer_trial import CountedBytes, count_bytes
from hf_flexseq.hf.model.facts import model_shape

DTYPES = ("float32", "bfloat16", "float16", "float64")


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a hub id or a folder of a model, or of a config.json. Raises
    OSError if it cannot be read."""
    # None would prompt on the terminal before running a model's own code
    return AutoConfig.from_pretrained(model, trust_remote_code=False)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name; auto: bfloat16 on a GPU, float32 on a CPU. Raises ValueError
    for another name."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {name!r}")
    return getattr(torch, name)


def read_model(model: str, dtype: str) -> tuple[ModelShape, CountedBytes | None]:
    """Return the sizes of the model that a hub id or a folder names, or a config.json, and the
    bytes that its layers are counted to hold of a token in `dtype`; None where that cannot be
    tried. Raises OSError and ValueError if `model` names none."""
    numbers = dtype_of(dtype, torch.device("cpu"))
    config = config_of(model)
    with torch.device("meta"):
        made = class_of(config)(config).to(numbers)
    return model_shape(made), count_bytes(made, dtype=numbers)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that a configuration names, if that predicts tokens, or else the one of its
    kind that does. Raises ValueError for another model."""
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING]
    if not config.is_encoder_decoder:
        mappings.append(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kinds: list[type[PreTrainedModel]] = []
    for mapping in mappings:
        if type(config) in mapping:
            kinds.append(mapping[type(config)])
    if not kinds:
        raise ValueError(
            f"model_type={config.model_type!r} is not a causal language model of transformers"
        )
    own = [kind for kind in kinds if kind.__name__ in (config.architectures or ())]
    return (own or kinds)[0]
