"""The model: a trained one by hub id or path, or a new one from a config, perhaps with LoRA."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from arguments import ModelArguments


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase | None:
    """Return the named tokenizer, or the named model's; None where one is to be trained."""
    name = args.tokenizer_name_or_path or args.model_name_or_path
    if name is None:
        return None
    revision = None if args.tokenizer_name_or_path else args.model_revision
    options = {"revision": revision} if revision else {}
    return AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code, **options)


def load_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the named model or a new one, with adapters where they were asked for."""
    model = load_base(args, tokenizer)
    if not args.lora_r:
        return model
    from peft import get_peft_model

    return get_peft_model(model, lora_config(args))


def load_base(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the named model or a new one, without adapters."""
    if args.model_name_or_path:
        return AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision or "main",
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
            **(args.config_overrides or {}),
        )
    return _new_model(args, tokenizer)


def lora_config(args: ModelArguments) -> Any:
    """Return what PEFT needs to make adapters, a LoraConfig; None where none were asked for."""
    if not args.lora_r:
        return None
    from peft import LoraConfig

    all_linear = args.lora_target_modules == ["all-linear"]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear" if all_linear else args.lora_target_modules,
    )


def _new_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    special["vocab_size"] = len(tokenizer)
    if isinstance(args.model_config, dict):
        config = AutoConfig.for_model(**(special | args.model_config))
    else:
        config = AutoConfig.from_pretrained(
            args.model_config, trust_remote_code=args.trust_remote_code, **special
        )
    dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
    return AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=args.trust_remote_code
    )
