"""Which of PEFT's methods are exact on planned steps.

A row has parts of several sequences, and ranks run different micro-batches. So a method is exact
if it treats every token alone, adds nothing to the loss, draws no numbers for weights, and leaves
attention alone. The tables hold for the tested versions of PEFT. Another method is tried: a small
model in float64 with such adapters, none of which is zero, is probed on ranks that are threads.
"""

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_flexseq.base.versions import untested
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.hf.model.mlp_trial import small_like
from hf_flexseq.hf.model.probe import SHARED, lively_copy, probe_model
from hf_flexseq.hf.model.prompts import kind_of, unsuitable_prompt
from hf_flexseq.steps.forward_hooks import around_forward

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
    """Return what a small model like `model` computes wrongly with an adapter; None if nothing."""
    from peft import get_peft_model

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
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


def term_of_step(model: Any) -> Callable[[], None]:
    """Let AdaLoRA add its term, which is none of tokens, once to a step: to every planned call by
    its part of the step's targets. Returns what undoes this."""
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
    return hooks.close
