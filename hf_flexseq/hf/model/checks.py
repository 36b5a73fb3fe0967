"""Check that training a model with `flexseq` would be exact, and say what to change when it would
not.

1. kind          a decoder-only model that predicts the next token, with transformers' attention
2. layers        full attention in all of them
3. options       nothing in the configuration that attention or loss would have to compute
4. positions     counted from 0 in every sequence, and by no module itself (`positions.py`)
5. modules       nothing on the model itself: compilation, reentrant checkpointing, sinks
6. a trial       one forward of an empty twin, which sees what the layers really ask for

The configuration comes first, since it gives reasons in words that a user can act on.
"""

import copy
import inspect
import logging
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_flexseq.hf.attention import UnsupportedAttention, check_call
from hf_flexseq.hf.model.facts import is_reentrant_layer, is_tensor_parallel
from hf_flexseq.hf.model.positions import unsuitable_positions

logger = logging.getLogger(__name__)

_TRIAL = "flexseq-trial"  # name of the attention implementation of the empty twin

# Options of the configuration that must not be set, and the reason.
_REFUSED_OPTIONS = {
    "output_router_logits": (
        "a router loss is no sum over tokens; set config.output_router_logits=False, or for TRL's "
        "SFTTrainer, which sets that itself, SFTConfig(router_aux_loss_coef=0.0)"
    ),
    "attention_dropout": "dropout in attention is not available; set config.attention_dropout=0",
    "attn_pdrop": "dropout in attention is not available; set config.attn_pdrop=0",
    "attention_probs_dropout_prob": (
        "dropout in attention is not available; set config.attention_probs_dropout_prob=0"
    ),
    "attn_logit_softcapping": "softcapped attention scores are not available",
    "attention_chunk_size": "chunked attention is not available",
    "use_bidirectional_attention": "attention in both directions is not available",
}


def check_model(model: PreTrainedModel) -> None:
    """Raise NotImplementedError, naming what to change, when training with `flexseq` could not be
    exact."""
    config = model.config.get_text_config()
    reason = (
        _unsuitable_kind(model)
        or _unsuitable_layers(config)
        or _unsuitable_options(config)
        or unsuitable_positions(model, config)
        or _unsuitable_modules(model)
        or _try_attention(model)
    )
    if reason is not None:
        raise NotImplementedError(f"{type(model).__name__}: {reason}")


def _unsuitable_kind(model: PreTrainedModel) -> str | None:
    if not getattr(model, "_supports_attention_backend", False):
        return (
            "it does not use transformers' attention interface, so its attention cannot be "
            "replaced"
        )
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; hf_flexseq trains decoder-only models"
    # Labels are shifted before sequences are cut, for a loss that predicts the next token.
    if LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is not ForCausalLMLoss:
        return (
            f"its loss is {model.loss_type}; hf_flexseq trains models that predict the next token "
            "(...ForCausalLM)"
        )
    if is_tensor_parallel(model):
        return (
            f"tp_size={model.tp_size}: its layers are cut over ranks that hf_flexseq gives "
            "different sequences"
        )
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any or not getattr(model, "accepts_loss_kwargs", True):
        return (
            "its forward does not take num_items_in_batch (**kwargs), so its loss would be a "
            "mean of its own"
        )
    return None


def _unsuitable_layers(config: Any) -> str | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention"})
        if others:
            return (
                f"it has layers of the kinds {', '.join(others)}; hf_flexseq needs full attention"
            )
        return None
    # Without kinds of layers one window is for all of them.
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return (
            f"sliding_window={window} is not available; set config.sliding_window=None if no "
            "sequence is longer than that, or if the model may attend to all of it"
        )
    return None


def _unsuitable_options(config: Any) -> str | None:
    for option, why in _REFUSED_OPTIONS.items():
        value = getattr(config, option, None)
        if value:
            return f"{option}={value}: {why}"
    return None


def _unsuitable_modules(model: PreTrainedModel) -> str | None:
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "it is compiled, but every step has new shapes; leave out model.compile()"
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) and is_reentrant_layer(module):
            return (
                "its checkpointing is reentrant, which runs attention outside of autograd's "
                "order; enable it with use_reentrant=False"
            )
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            return f"{name} has attention sinks, which are not available"
    return None


# ---- the trial


def _try_attention(model: PreTrainedModel) -> str | None:
    """Run one forward of an empty twin of the model, and return the reason why the attention
    layers are not ours to compute.

    The twin lives on the meta device, in training mode: it takes a tenth of a second and no
    memory. Where it cannot go on without data, as in the routing of some experts, the layers
    before have been seen.
    """
    seen: list[str] = []  # classes of the attention layers that were called
    config = copy.deepcopy(model.config)
    config._attn_implementation = _TRIAL
    try:
        with torch.device("meta"), torch.no_grad():
            twin = type(model)(config).to(torch.bfloat16).train()
            tokens = torch.zeros(1, 2, dtype=torch.int64)  # [rows, tokens]
            twin(input_ids=tokens, use_cache=False, seq_ctx=seen)
    except UnsupportedAttention as reason:
        return str(reason)
    # The twin itself may be at fault, while the model is fine.
    except (RuntimeError, TypeError, ValueError) as error:
        logger.debug("the trial of %s ended early: %s", type(model).__name__, error)
        return None
    if not seen:
        return (
            "it does not call transformers' attention interface, so its attention cannot be "
            "replaced"
        )
    return None


def _trial_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: list[str] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stand where `flexseq_attention` would, and note in `seq_ctx` that the layer was called.

    query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads, D],
    without numbers.
    """
    if seq_ctx is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} is not given the keyword arguments of the model"
        )
    if query.shape[-1] != value.shape[-1]:
        raise UnsupportedAttention(
            f"{type(module).__name__} has queries of {query.shape[-1]} and values of "
            f"{value.shape[-1]} dimensions per head; hf_flexseq needs the same number"
        )
    check_call(module, attention_mask, kwargs)
    seq_ctx.append(type(module).__name__)
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1]), None


AttentionInterface.register(_TRIAL, _trial_attention)
