"""PEFT's methods on planned steps: which of them are exact, and what AdaLoRA, prompt tuning and
P-tuning need.

A row has parts of several sequences, and ranks run different micro-batches. So a method is exact
if it treats every token alone, adds nothing to the loss, draws no numbers for weights, and leaves
attention alone. The tables hold for the tested versions of PEFT. Another method is tried: a small
model in float64 with such adapters, none of which is zero, is probed on ranks that are threads.

For prompt tuning and P-tuning PEFT's own forward embeds a batch and puts n trained embeddings, the
*virtual tokens*, in front of each row. In a planned call

1. placeholders stand for virtual tokens already (`steps/virtual_tokens.py`), so PEFT's model is to
   call the model inside with the tokens that it is given, as it does for LoRA. It asks the active
   adapter's configuration, which says so during the call.
2. PEFT's prompt encoder makes the embeddings of all n virtual tokens, and they replace the
   placeholders' embeddings as soon as the model has made these.

Every rank runs the encoder in every micro-batch, so that DDP, FSDP and ZeRO find the gradients
that they reduce; a rank without virtual tokens has gradients of 0.

Rejected: another forward of PEFT's model, which accelerate replaces as well, and which would run
the model inside without its hooks.
"""

import copy
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.versions import is_sharded_at_load, untested
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.model.facts import without_adapters
from hf_flexseq.hf.model.mlp_trial import small_like
from hf_flexseq.hf.model.noise import noise_of_module
from hf_flexseq.hf.model.probe import SHARED, lively_copy, probe_model
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.steps.forward_hooks import around_forward
from hf_flexseq.steps.virtual_tokens import VirtualTokens

EXACT = frozenset(
    {
        *("ADALORA", "ADAMSS", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD"),
        *("GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS"),
        *("OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING"),
        *("TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
    }
)
"""Exact methods, but for some options."""
REFUSED = {
    "PREFIX_TUNING": "its keys are in no sequence, and every query would attend to them apart",
    "CARTRIDGE": "its keys are in no sequence, and every query would attend to them apart",
    "MULTITASK_PROMPT_TUNING": "its virtual tokens depend on the task of each example",
    "CPT": "it weights the loss of tokens by the logits of its own call",
    "ADAPTION_PROMPT": "it changes the layers' attention",
    "LILY": "it mixes experts by a mean over all tokens of a call",
    "POLY": "it takes one task for each row",
    "SHADOW": "its second network attends over whole rows, and adds a loss of its own",
    "XLORA": "it runs the model twice in a call",
}
_ONCE = "its random numbers hold for all tokens of a call"
REFUSED_OPTIONS = {
    "alora_invocation_tokens": "it looks for one invocation in a whole row",
    "velora_config": "it takes a mean over all tokens of a call; set its init_type='random'",
    "layer_replication": "copied layers have configurations, and so attention, of their own",
    "generator_seed": "a recomputed layer would draw other numbers, and ranks the same ones",
    **dict.fromkeys(
        ("monteclora_config", "boft_dropout", "rank_dropout", "module_dropout"), _ONCE
    ),
}


_tried: WeakKeyDictionary[nn.Module, dict[str, str | None]] = WeakKeyDictionary()
"""By model and configuration of an adapter: what `_try` has found."""


def unsuitable_adapter(model: nn.Module) -> str | None:
    """Return which method of PEFT, or which option, of a model is not exact, with the reason; None
    if there is none."""
    for name, config in getattr(model, "peft_config", {}).items():
        kind = kind_of(config)
        if kind in REFUSED:
            return f"{kind} of PEFT ({REFUSED[kind]})"
        for option, why in REFUSED_OPTIONS.items():
            value = getattr(config, option, None)
            is_set = value is not None if option == "generator_seed" else bool(value)
            is_of_tokens = getattr(value, "init_type", "") == "random" or kind == "DELORA"
            if is_set and not is_of_tokens:
                return f"{option}={value!r} of PEFT's {kind} ({why})"
        if not config.is_prompt_learning and (kind not in EXACT or untested("peft")):
            tried = _tried.setdefault(model, {})
            if str(config) not in tried:  # for every attaching, it would take seconds
                tried[str(config)] = _try(model, name, config)
            reason = tried[str(config)]
            if reason is not None:
                return f"{kind} of PEFT, which is in no table ({reason})"
    return unsuitable_prompt(model)


def _try(model: Any, name: str, config: Any) -> str | None:
    """Try an adapter on a small model like `model`. Return why it is not exact; None if it is."""
    from peft import get_peft_model

    base = without_adapters(model)
    ids, labels = torch.arange(8).expand(2, -1), torch.full((2, 8), IGNORE_INDEX)
    with ErrorCapture() as trying, torch.random.fork_rng(devices=[]):
        small = get_peft_model(small_like(base).float(), copy.deepcopy(config), adapter_name=name)
        wrong = probe_model(small, strategies=SHARED[:1], changes=())
        small = lively_copy(small, torch.float64).train()
        added = small(input_ids=ids, labels=labels, num_items_in_batch=1).loss.item()
        rows, again = small(input_ids=ids).logits, small(input_ids=ids).logits
    if trying.error is not None:
        return f"it could not be tried on a small model: {trying.error}".splitlines()[0]
    if added:
        return f"it adds {added:.4g} to the loss of every call"
    if torch.allclose(rows[0], rows[1]) and not torch.allclose(rows, again):
        return _ONCE
    return wrong[0] if wrong else None


def term_of_step(model: Any) -> ExitStack:
    """Let AdaLoRA add its term, which is none of tokens, once to a step: to every planned call by
    its part of the step's targets, until the returned stack is closed."""
    tuner = model.base_model
    whole = tuner.peft_config[tuner.trainable_adapter_name].orth_reg_weight

    def weigh(module: Any, part: float = 1.0) -> None:  # `module` may be a copy of the tuner
        module.peft_config[module.trainable_adapter_name].orth_reg_weight = whole * part

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        context, items = kwargs.get("seq_ctx"), kwargs.get("num_items_in_batch")
        if context is not None and items is not None and kwargs.get("labels") is not None:
            counts = 1 if context.target_counts is None else context.target_counts
            targets = ((kwargs["labels"] != IGNORE_INDEX) * counts).sum()
            weigh(module, float(targets) / float(items))

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        weigh(module)

    hooks = around_forward(tuner, begin, end)
    hooks.callback(weigh, tuner)
    return hooks


# ---- prompt tuning and P-tuning


_TRAINED = ("PROMPT_TUNING", "P_TUNING")


def virtual_tokens_of(model: nn.Module) -> int:
    """Return the number of virtual tokens that a model puts in front of a sequence; 0 for one
    without, and for one that `unsuitable_prompt` refuses."""
    adapters = getattr(model, "peft_config", {})
    learns = any(getattr(config, "is_prompt_learning", False) for config in adapters.values())
    if not learns or unsuitable_prompt(model) is not None:
        return 0
    return len(model.prompt_tokens[model.active_adapter])


def unsuitable_prompt(model: nn.Module) -> str | None:
    """Return which prompt learning of PEFT a model asks for that is not computed, with the reason;
    None if there is none."""
    adapters = getattr(model, "peft_config", {})
    for config in adapters.values():
        kind = kind_of(config)
        if not getattr(config, "is_prompt_learning", False):
            continue
        if kind not in _TRAINED:
            return f"{kind} of PEFT (it is not known how it changes sequences)"
        if len(adapters) > 1:
            return f"{kind} of PEFT beside other adapters ({', '.join(adapters)})"
        reason = _unsuitable(model)
        if reason is not None:
            return f"{kind} of PEFT here ({reason})"
    return None


def kind_of(config: Any) -> str:
    """Return the name of the method of a configuration of PEFT, such as `LORA`."""
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind))


def _unsuitable(model: Any) -> str | None:
    """Return why virtual tokens of this model cannot be placeholders; None if they can."""
    cls = unsharded_class(model)
    if not any(one.__name__ == "PeftModelForCausalLM" for one in cls.__mro__):
        return f"in {cls.__name__}: give task_type='CAUSAL_LM'"
    base = model.get_base_model()
    if model.word_embeddings is not base.get_input_embeddings():
        return "PEFT embeds tokens by another module than the model does"
    if getattr(base.config.get_text_config(), "hidden_size_per_layer_input", None):
        return f"{type(base).__name__} embeds tokens in every layer"
    if is_sharded_at_load(base):
        return "DistributedConfig has sharded the model, and every rank has an encoder of its own"
    noise = noise_of_module(model.prompt_encoder)
    return None if noise is None else f"{noise} of its encoder is drawn once for a micro-batch"


def attach_prompt(model: Any, base: PreTrainedModel) -> ExitStack:
    """Let a model of PEFT, with `base` inside, take placeholders for its virtual tokens, until the
    returned stack is closed."""
    of_call = ExitStack()  # undoes what the planned call that runs has changed
    virtual: list[VirtualTokens] = []  # of that call

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        of_call.close()  # a call that an interrupt has ended runs no hook
        context = kwargs.get("seq_ctx")
        if context is None:
            return
        assert context.virtual_tokens is not None, "rows of this model have virtual tokens"
        virtual.append(context.virtual_tokens)
        of_call.callback(virtual.clear)
        adapter, configs = model.active_adapter, model.peft_config
        of_call.callback(configs.__setitem__, adapter, configs[adapter])
        given = {**vars(configs[adapter]), "is_prompt_learning": False}
        configs[adapter] = SimpleNamespace(**given)

    def end(module: nn.Module, args: Any, outputs: Any) -> None:
        of_call.close()

    def embed(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, [1, tokens, width], with the embeddings of virtual ones."""
        if not virtual:
            return embedded
        prompt = model.get_prompt(batch_size=1)[0]  # [n, width]
        return virtual[0].embedded(embedded, prompt)

    attached = around_forward(model, begin, end)
    attached.callback(base.get_input_embeddings().register_forward_hook(embed).remove)
    attached.callback(of_call.close)
    return attached
