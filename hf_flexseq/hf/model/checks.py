"""Check that training a model with `flexseq` would be exact, and say what to change when it would
not.

1. kind          a decoder-only model that predicts the next token, or classes
2. layers        attention over all of a sequence, a window or chunks (`layer_kinds.py`), and
                 recurrent layers whose functions are known (`recurrent.py`)
3. options       nothing in the configuration that attention or loss would have to compute
4. positions     counted from 0 in every sequence (`positions.py`)
5. modules       nothing on the model itself: compilation, reentrant checkpointing, mixers of
                 others, and nothing in the way that transformers has sharded it (`experts.py`,
                 `sharding.py`)
6. a trial       one forward of an empty copy (`trial.py`) shows the attention and recurrence that
                 the layers really ask for; the configuration must name the same, and no module may
                 count positions

The configuration comes first, since it gives reasons in words that a user can act on.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_flexseq.base.refusals import raise_all
from hf_flexseq.base.values import listed
from hf_flexseq.distributed.reduction import local
from hf_flexseq.hf.model.attention import number_of
from hf_flexseq.hf.model.call_count import replaced_attention, replaced_forward
from hf_flexseq.hf.model.checkpointing import unsuitable_checkpointing
from hf_flexseq.hf.model.experts import adapted_experts, unsuitable_experts
from hf_flexseq.hf.model.facts import is_classifier, is_sharded_by_fsdp
from hf_flexseq.hf.model.head_trial import try_head
from hf_flexseq.hf.model.layer_kinds import (
    CONVOLUTIONS,
    Layer,
    LayerKind,
    UnknownLayers,
    layers_of,
    unknown_kinds,
)
from hf_flexseq.hf.model.layer_memory import decoder_of
from hf_flexseq.hf.model.positions import unsuitable_count, unsuitable_positions
from hf_flexseq.hf.model.recurrent import CONVOLUTION, mixers
from hf_flexseq.hf.model.router import (
    NO_ROUTER_LOSS,
    OPTION,
    UnknownRouterLoss,
    asks_for_router_loss,
    router_facts,
)
from hf_flexseq.hf.model.sharding import (
    divided_ties,
    is_tensor_parallel,
    misplaced_parts,
    stages,
    unknown_sharding,
    unsharded_class,
    unwritten_buffers,
)
from hf_flexseq.hf.model.trial import PROBED_FAMILIES, Call, MixerRun, Trial, try_model
from hf_flexseq.steps.users_code import (
    is_known,
    nonlinear_gradient_hooks,
    users_accumulation_hooks,
)

# Options of randomness that is refused, by their names in different models.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_LAYERDROP = ("layerdrop", "decoder_layerdrop")

# Other options of the configuration that must not be set, and the reason.
_REFUSED_OPTIONS = {
    "alibi": "biases of attention by distance are not available",
    "z_loss_coefficient": (
        "a loss on the size of logits is a mean over a rank's tokens; set "
        "config.z_loss_coefficient=0.0"
    ),
}


def check_model(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for an inexact model, ValueError for a wrong configuration, with
    all reasons that do not follow from each other."""
    check_kind(model)
    name = unsharded_class(model).__name__
    config = model.config.get_text_config()
    layers: Sequence[Layer] = ()
    errors: list[Exception] = []
    try:
        layers = layers_of(config)
    except UnknownLayers as unknown:
        errors.append(NotImplementedError(f"{name}: {unknown}"))
    except ValueError as error:
        errors.append(ValueError(f"{name}: {error}"))
    found_again = [
        _misnumbered_layer(model),
        _unsuitable_options(config, has_masks_of_images=config is not model.config),
        unsuitable_positions(model, config),
        _replaced_forward(model),
        _unknown_mixers(model, layers),
        _own_attention(config),
    ]
    # What is wrong with one of these a trial would find again, in other words.
    is_sound = not errors and not any(found_again)
    dropout = [call.dropout for call in try_model(model).calls]
    if not dropout:  # the trial has ended before any attention
        dropout = [getattr(config, name, 0) for name in _ATTENTION_DROPOUT]
    layerdrop = [getattr(module, "layerdrop", 0) for module in model.modules()]
    reasons = [
        *found_again,
        _random(config, _ATTENTION_DROPOUT, dropout, "dropout in attention is not available"),
        _random(config, _LAYERDROP, layerdrop, "ranks of a sequence would skip other layers"),
        _unsuitable_router_loss(model),
        _unsuitable_modules(model),
        unsuitable_checkpointing(model),
        unknown_sharding(model) or unsuitable_experts(model),
        _unsuitable_adapters(model),
        misplaced_parts(model),
        unwritten_buffers(model),
        divided_ties(model),
        _unsuitable_layers(model, layers) if is_sound else None,
        unsuitable_hooks(model),
    ]
    errors += [NotImplementedError(f"{name}: {reason}") for reason in reasons if reason]
    raise_all(errors)


def check_kind(model: PreTrainedModel) -> None:
    """Raise NotImplementedError for a model of a kind that no other check is made for, ValueError
    for layers that its configuration does not describe."""
    name = unsharded_class(model).__name__
    config = model.config.get_text_config()
    try:
        type(config).validate_layer_type(config)  # that of Nemotron-H is a static method
    except ValueError as error:
        raise ValueError(
            f"{name}: {error}: where layers were removed or added, set both in model.config to "
            "what is there, as in config.layer_types = [config.layer_types[i] for i in kept]"
        ) from error
    kind = _unsuitable_kind(model)
    if kind is not None:
        raise NotImplementedError(f"{name}: {kind}")


def _unsuitable_kind(model: PreTrainedModel) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; hf_flexseq trains decoder-only models"
    if is_tensor_parallel(model):
        return (
            f"tp_size={model.tp_size}: its layers are cut over ranks that hf_flexseq gives "
            "different sequences"
        )
    if stages(model) > 1:
        return (
            f"pp_size={stages(model)}: transformers has cut it into stages; leave out pp_size, "
            "and set pipeline_parallel_size of hf_flexseq"
        )
    if is_classifier(model):
        return None
    # Labels are shifted before sequences are cut, for a loss that predicts the next token.
    if LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is not ForCausalLMLoss:
        return (
            f"its loss is {model.loss_type}; hf_flexseq trains models that predict the next token "
            "(...ForCausalLM), and classes of sequences or tokens"
        )
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    trial = try_head(model) if takes_any else None
    # Some classes tell the Trainer not to count items, and would divide by them all the same.
    is_told = getattr(model, "accepts_loss_kwargs", True) or (trial and trial.gives_items)
    if trial is None or not is_told:
        return (
            "its forward does not take num_items_in_batch (**kwargs), so its loss would be a "
            "mean of its own"
        )
    if trial.has_own_loss:
        return (
            "its forward computes a loss of its own, a mean over its batch, and does not call the "
            "model's loss_function, which divides by num_items_in_batch"
        )
    return None


def unsuitable_hooks(model: nn.Module) -> str | None:
    """Return which hooks of the user's change gradients of micro-batches; None without any."""
    hooks = list(users_accumulation_hooks(model))
    own = model.named_parameters()
    # FSDP2 calls no hook on a gradient of its shards
    hooks += nonlinear_gradient_hooks(one for one in own if not is_sharded_by_fsdp(one[1].data))
    if not hooks:
        return None
    return (
        f"{listed(hooks)} changes gradients of each micro-batch, before those of the step are "
        "complete; remove the hook, and change gradients in the callback event "
        "on_pre_optimizer_step, or behind step.backward(model) in a loop of your own"
    )


def _unsuitable_options(config: Any, *, has_masks_of_images: bool) -> str | None:
    """Return the option of a text configuration that cannot be computed, or None.
    has_masks_of_images: True for a model with towers, whose masks the trial looks at."""
    for option, why in _REFUSED_OPTIONS.items():
        value = getattr(config, option, None)
        if value:
            return f"{option}={value}: {why}"
    # Gemma 4's "vision" is for tokens of images, PaliGemma's True for its masks.
    of_layers = ("all",) if has_masks_of_images else ("all", True)
    if getattr(config, "use_bidirectional_attention", None) in of_layers:
        return "use_bidirectional_attention is set: attention in both directions is not available"
    return None


def _misnumbered_layer(model: PreTrainedModel) -> str | None:
    """Return that a layer is not numbered by its place: it would be taken for another one."""
    for place, layer in enumerate(getattr(decoder_of(model), "layers", ())):
        numbers = {number_of(module) for module in layer.modules()} - {None}
        if numbers and place not in numbers:
            return (
                f"its layer {place} has layer_idx={numbers.pop()}: where layers were removed, "
                "moved or copied, set layer_idx in each of them to its place, from 0 on"
            )
    return None


def _random(config: Any, options: Sequence[str], held: Iterable[float], why: str) -> str | None:
    """Return a probability that is not 0. options: names that it may have in a configuration.
    held: by the modules, which later changes of the configuration do not reach."""
    most = max(held, default=0)
    option = next((name for name in options if hasattr(config, name)), options[0])
    advice = f"load the model with from_pretrained(..., {option}=0), which its modules copy"
    return f"{option}={most}: {why}; {advice}" if most else None


def _unsuitable_router_loss(model: PreTrainedModel) -> str | None:
    if not asks_for_router_loss(model):
        return None
    if is_classifier(model):
        reason = "classifiers have no router loss"
    else:
        try:
            router_facts(model)
        except UnknownRouterLoss as unknown:
            reason = str(unknown)
        else:
            return None
    return f"{OPTION}=True: {reason}; {NO_ROUTER_LOSS}"


def _unsuitable_adapters(model: PreTrainedModel) -> str | None:
    if not adapted_experts(model):
        return None
    from hf_flexseq.hf.model.expert_adapters import unsuitable_adapters  # which needs PEFT

    return unsuitable_adapters(model)


def _unsuitable_modules(model: PreTrainedModel) -> str | None:
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "it is compiled, but every step has new shapes; leave out model.compile()"
    shared = _parameters_of_one_memory(model)
    if shared:
        return (
            f"its trained parameters {' and '.join(shared)} share memory, as PEFT's "
            "ensure_weight_tying leaves adapters of tied embeddings; several ranks train them "
            "otherwise than one, also without hf_flexseq; leave the embeddings out of "
            "target_modules"
        )
    return None


def _replaced_forward(model: PreTrainedModel) -> str | None:
    """Return that attention or a recurrent mixer runs another forward than its class's."""
    attention = replaced_attention(model)
    if attention is not None:
        return attention
    for mixer in mixers(model):
        forward = replaced_forward(mixer.module)
        if forward is not None:
            return (
                f"{mixer.name} runs {forward}, as kernels from the hub leave it, so what it calls "
                "is not known; load the model without use_kernels"
            )
    return None


def _own_attention(config: PreTrainedConfig) -> str | None:
    """Return that the model attends by a function of the user's."""
    name = config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or is_known(function):
        return None
    own = getattr(function, "__qualname__", type(function).__qualname__)
    return (
        f"attn_implementation={name!r} is {own} of yours, which would not run: groups of ranks "
        "compute the layers' own attention; if this is meant, first choose one of transformers, "
        f"such as model.set_attn_implementation({'eager' if name == 'sdpa' else 'sdpa'!r})"
    )


def _parameters_of_one_memory(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return the names of two trained parameters that begin at the same byte of this rank; None
    without any. One parameter with two names does not count."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta:
            continue
        own = local(parameter)  # a sharded one itself begins nowhere
        place = own.data_ptr() if own.numel() else 0
        if place and names.setdefault(place, name) != name:
            return names[place], name
    return None


# ---- the trial


def _unsuitable_layers(model: PreTrainedModel, layers: Sequence[Layer]) -> str | None:
    """Return why attention or recurrent layers could not be computed, from one forward of an empty
    copy. layers: as the configuration describes them."""
    trial = try_model(model)
    counting = unsuitable_count(trial.counts)
    if counting is not None:
        return counting
    if trial.refusal is not None:
        return trial.refusal
    for call in trial.calls:
        contradiction = _contradiction(call, layers)
        if contradiction is not None:
            return contradiction
    # A trial that ended early may have ended inside its last mixer.
    for run in trial.mixers if trial.fault is None else trial.mixers[:-1]:
        contradiction = _recurrent_contradiction(run, layers)
        if contradiction is not None:
            return contradiction
    if trial.fault is not None:
        model_type = model.config.get_text_config().model_type
        if model_type in PROBED_FAMILIES:
            return None
        return (
            f"its layers could not be tried to the end ({trial.fault}), and {model_type!r} is no "
            "family that is known to be exact; a model is tried before kernels are put into its "
            "modules: do so in the callback event on_train_begin"
        )
    has_attention = any(layer.attention is not None for layer in layers)
    if has_attention and not trial.calls:
        return (
            "it does not call transformers' attention interface, so its attention cannot be "
            "replaced"
        )
    return _silent_layer(model, trial, layers)


def _unknown_mixers(model: PreTrainedModel, layers: Sequence[Layer]) -> str | None:
    """Return that recurrent layers are of kinds that are not known: their code calls no scan of
    transformers that is computed here, or no convolution. layers: as the configuration describes
    them."""
    functions = try_model(model).functions
    unknown = set()
    for number, layer in enumerate(layers):
        called = functions.get(number, set())
        if layer.recurrent is not None and layer.recurrent not in CONVOLUTIONS:
            called = called - {CONVOLUTION}
        if layer.recurrent is not None and not called:
            unknown.add(layer.recurrent)
    return str(unknown_kinds(unknown)) if unknown else None


def _silent_layer(model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> str | None:
    """Return that a layer has not made the calls of its configuration in a whole forward: it mixes
    tokens in its own way, or not at all. layers: as the configuration describes them."""
    # 1. recurrent layers
    mixing = {run.layer for run in trial.mixers}
    for number, layer in enumerate(layers):
        if layer.recurrent is not None and number not in mixing:
            return (
                f"its layer {number}, {layer.recurrent}, does not call transformers' functions of "
                "a recurrent layer, so how it mixes tokens is not known"
            )

    # 2. attention
    attending = [number for number, layer in enumerate(layers) if layer.attention is not None]
    called = {call.asked.layer for call in trial.calls}
    if None in called:  # layers that do not know their number
        if len(trial.calls) >= len(attending):
            return None
        return f"it has {len(attending)} layers, and {len(trial.calls)} of them call attention"
    # Layers that read images are left out where there are none.
    called |= set(getattr(model.config.get_text_config(), "cross_attention_layers", None) or ())
    silent = sorted(set(attending) - called)
    if not silent:
        return None
    return (
        f"its layer {silent[0]} does not call transformers' attention interface, so how it mixes "
        "tokens is not known"
    )


def _contradiction(call: Call, layers: Sequence[Layer]) -> str | None:
    """Return where a layer's call contradicts the configuration of `layers`; None without one."""
    layer = call.asked.layer
    kind = _kind_of(layer, layers)
    if kind is None:
        return (
            f"{call.module} calls attention as layer {layer}, which by its configuration has none "
            f"among layers 0 to {len(layers) - 1}"
        )
    called = {
        "reach": call.asked.reach,
        "softcap": call.asked.softcap,
        "width": call.width,
    }
    for name, of_call in called.items():
        configured = getattr(kind, name)
        if of_call != configured:
            return (
                f"{call.module} of layer {layer} asks for {name}={of_call}, but its configuration "
                f"says {name}={configured}"
            )
    return None


def _kind_of(layer: int | None, layers: Sequence[Layer]) -> LayerKind | None:
    """Return a layer's attention; without a number, the attention of all layers if they are
    alike."""
    if layer is not None:
        return layers[layer].attention if layer < len(layers) else None
    kinds = [one.attention for one in layers if one.attention is not None]
    return kinds[0] if len(set(kinds)) == 1 else None


def _recurrent_contradiction(run: MixerRun, layers: Sequence[Layer]) -> str | None:
    """Return where a recurrent mixer's calls contradict the configuration of `layers`, or None."""
    where = f"{run.module} of layer {run.layer}"
    if run.layer is None or run.layer >= len(layers) or layers[run.layer].recurrent is None:
        return (
            f"{where} is recurrent, which its configuration does not say; hf_flexseq knows the "
            "kinds of layers from the configuration"
        )
    if not run.calls:
        return (
            f"{where} is not given the keyword arguments of the model, or calls no function of "
            "transformers for recurrent layers, so its state would go from one sequence to the "
            "next"
        )
    if run.shape is None:
        return f"{where} calls {', '.join(call.kind for call in run.calls)}; {_ONE_SCAN}"
    configured = layers[run.layer].recurrent
    if (run.shape.kind == "convolution") != (configured in CONVOLUTIONS):
        return f"{where} computes a {run.shape}, but its configuration says {configured}"
    return None


_ONE_SCAN = "hf_flexseq computes convolutions of one width before one scan, or convolutions alone"
