"""Prompt tuning and P-tuning of PEFT on planned steps.

PEFT's own forward embeds a batch and puts n trained embeddings, the *virtual tokens*, in front of
each row. In a planned call

1. placeholders stand for virtual tokens already (`steps/virtual_tokens.py`), so PEFT's model is to
   call the model inside with the tokens that it is given, as it does for LoRA. It asks the active
   adapter's configuration, which says so during the call.
2. PEFT's prompt encoder makes the embeddings of all n virtual tokens, and they replace those of
   the placeholders as soon as these are embedded.

Every rank runs the encoder in every micro-batch, so that DDP, FSDP and ZeRO find the gradients
that they reduce: those of a rank without virtual tokens are 0.

Rejected: another forward of PEFT's model, which accelerate replaces as well, and which would run
the model inside without its hooks.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.versions import is_sharded_at_load
from hf_flexseq.hf.model.noise import noise_of_module
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.steps.forward_hooks import around_forward
from hf_flexseq.steps.virtual_tokens import VirtualTokens

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


class TrainedPrompt:
    """Lets a model of PEFT take placeholders for its virtual tokens, until it is detached."""

    def __init__(self, model: Any, base: PreTrainedModel) -> None:
        """model: of PEFT, with `base` inside."""
        self._model = model
        self._tokens: VirtualTokens | None = None  # of the planned call that runs
        self._former: tuple[str, Any] | None = None  # adapter and its configuration, meanwhile
        self._hooks = around_forward(model, self._begin, self._end)
        self._hooks.callback(base.get_input_embeddings().register_forward_hook(self._embed).remove)

    def detach(self) -> None:
        """Take the hooks back."""
        self._restore()
        self._hooks.close()

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._restore()
        context = kwargs.get("seq_ctx")
        if context is None:
            return
        assert context.virtual_tokens is not None, "rows of this model have virtual tokens"
        self._tokens = context.virtual_tokens
        adapter = self._model.active_adapter
        config = self._model.peft_config[adapter]
        self._former = (adapter, config)
        given = {**vars(config), "is_prompt_learning": False}
        self._model.peft_config[adapter] = SimpleNamespace(**given)

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        """Give the adapter its configuration back. A call that an interrupt has ended runs no
        hook."""
        former, self._former = self._former, None
        self._tokens = None
        if former is not None:
            adapter, config = former
            self._model.peft_config[adapter] = config

    def _embed(self, module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, [1, tokens, width], with the embeddings of virtual ones."""
        if self._tokens is None:
            return embedded
        prompt = self._model.get_prompt(batch_size=1)[0]  # [n, width]
        return self._tokens.embedded(embedded, prompt)
