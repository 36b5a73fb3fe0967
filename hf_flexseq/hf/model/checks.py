"""Check that training a model with `flexseq` would be exact, and say what to change when it would
not.

1. kind          a decoder-only model that predicts the next token
2. layers        attention over all of a sequence, a window or chunks (`layer_kinds.py`)
3. options       nothing in the configuration that attention or loss would have to compute
4. positions     counted from 0 in every sequence, and by no module itself (`positions.py`)
5. modules       nothing on the model itself: compilation, reentrant checkpointing
6. a trial       one forward of an empty twin (`trial.py`), which sees what the layers really ask
                 for, and that it is what the configuration says

The configuration comes first, since it gives reasons in words that a user can act on.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_flexseq.hf.model.facts import is_reentrant_layer, is_tensor_parallel
from hf_flexseq.hf.model.layer_kinds import LayerKind, UnknownLayers, layer_kinds
from hf_flexseq.hf.model.positions import unsuitable_positions
from hf_flexseq.hf.model.trial import PROBED_FAMILIES, Call, try_model

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
    "alibi": "biases of attention by distance are not available",
}


def check_model(model: PreTrainedModel) -> None:
    """Raise NotImplementedError, naming what to change, when training with `flexseq` could not be
    exact, and ValueError for a configuration that has no meaning."""
    config = model.config.get_text_config()
    name = type(model).__name__
    reason = _unsuitable_kind(model)
    kinds: Sequence[LayerKind] = ()
    if reason is None:
        try:
            kinds = layer_kinds(config)
        except UnknownLayers as unknown:
            reason = str(unknown)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    reason = (
        reason
        or _unsuitable_options(config)
        or unsuitable_positions(model, config)
        or _unsuitable_modules(model)
        or _unsuitable_attention(model, kinds)
    )
    if reason is not None:
        raise NotImplementedError(f"{name}: {reason}")


def check_deterministic(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a model whose attention `deterministic=True` cannot compute:
    it computes blocks of full attention."""
    for layer, kind in enumerate(layer_kinds(model.config.get_text_config())):
        if not kind.reach.is_full:
            raise NotImplementedError(
                f"{type(model).__name__}: deterministic=True computes full attention, but layer "
                f"{layer} has a {kind.reach}; set deterministic=False"
            )


def _unsuitable_kind(model: PreTrainedModel) -> str | None:
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
    if _has_own_loss(model):
        return (
            "its forward computes a cross entropy of its own, a mean over its batch, and not the "
            "model's loss_function, which divides by num_items_in_batch"
        )
    return None


def _has_own_loss(model: PreTrainedModel) -> bool:
    """Tell whether the forward of `model` computes a loss without transformers' loss function."""
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):  # made without a file
        return False
    computes = "CrossEntropyLoss(" in source or "cross_entropy(" in source
    return computes and "loss_function" not in source


def _unsuitable_options(config: Any) -> str | None:
    for option, why in _REFUSED_OPTIONS.items():
        value = getattr(config, option, None)
        if value:
            return f"{option}={value}: {why}"
    # Gemma 4's "vision" is for tokens of images, which are refused when they come.
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "use_bidirectional_attention is set: attention in both directions is not available"
    return None


def _unsuitable_modules(model: PreTrainedModel) -> str | None:
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "it is compiled, but every step has new shapes; leave out model.compile()"
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and is_reentrant_layer(module):
            return (
                "its checkpointing is reentrant, which runs attention outside of autograd's "
                "order; enable it with use_reentrant=False"
            )
    return None


# ---- the trial


def _unsuitable_attention(model: PreTrainedModel, kinds: Sequence[LayerKind]) -> str | None:
    """Return the reason why the attention layers of a model are not ours to compute, from one
    forward of an empty twin.

    kinds: what the configuration says of the layers.
    """
    trial = try_model(model)
    if trial.refusal is not None:
        return trial.refusal
    for call in trial.calls:
        contradiction = _contradiction(call, trial.calls, kinds)
        if contradiction is not None:
            return contradiction
    if trial.fault is not None:
        model_type = model.config.get_text_config().model_type
        if model_type in PROBED_FAMILIES:
            return None
        return (
            f"its layers could not be tried to the end ({trial.fault}), and {model_type!r} is no "
            "family that is known to be exact; a model whose modules were patched with kernels "
            "can be tried before that: make the trainer first"
        )
    if not trial.calls:
        return (
            "it does not call transformers' attention interface, so its attention cannot be "
            "replaced"
        )
    return _silent_layer(model, trial.calls, kinds)


def _silent_layer(
    model: PreTrainedModel, calls: Sequence[Call], kinds: Sequence[LayerKind]
) -> str | None:
    """Return that some layer has not called attention in a whole forward: it mixes tokens in a way
    of its own, or not at all.

    kinds: what the configuration says of each layer.
    """
    called = {call.asked.layer for call in calls}
    if None in called:  # layers that do not know their number
        if len(calls) >= len(kinds):
            return None
        return f"it has {len(kinds)} layers, and {len(calls)} of them call attention"
    # Layers that read images are left out where there are none.
    called |= set(getattr(model.config.get_text_config(), "cross_attention_layers", None) or ())
    silent = sorted(set(range(len(kinds))) - called)
    if not silent:
        return None
    return (
        f"its layer {silent[0]} does not call transformers' attention interface, so how it mixes "
        "tokens is not known"
    )


def _contradiction(call: Call, calls: Sequence[Call], kinds: Sequence[LayerKind]) -> str | None:
    """Return what a layer's call says otherwise than the configuration.

    calls: all calls of the trial. kinds: what the configuration says of each layer.
    """
    layer = call.asked.layer
    if layer is None and len(set(kinds)) == 1:
        layer = 0
    if layer is None or layer >= len(kinds):
        return (
            f"{call.module} calls attention as layer {layer}, but its configuration has layers 0 "
            f"to {len(kinds) - 1}"
        )
    source = calls[call.keys_of].asked.layer
    called = {
        "reach": call.asked.reach,
        "softcap": call.asked.softcap,
        "sinks": call.asked.sinks is not None,
        "keys_of": layer if source is None else source,
        # Kernels are chosen by the larger one of queries and values.
        "width": max(call.head_dim, call.value_dim),
    }
    for name, of_call in called.items():
        configured = getattr(kinds[layer], name)
        if of_call != configured:
            return (
                f"{call.module} of layer {layer} asks for {name}={of_call}, but its configuration "
                f"says {name}={configured}"
            )
    return None
