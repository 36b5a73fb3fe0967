"""The model: a trained one by hub id or path, or a new one from a config, perhaps spread over the
ranks by transformers, and perhaps with LoRA."""

import math
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

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
        model = _loaded(args, args.model_name_or_path, revision=args.model_revision or "main")
        _check_vocabulary(args, model, tokenizer)
        return model
    model = _new_model(args, tokenizer)
    if args.distributed_config is None:
        return model
    # transformers spreads a model over the ranks when it loads one, and the first rank alone saves
    # one. So each process writes its own copy: the same weights, since all have the same seed.
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return _loaded(args, folder)


def _loaded(args: ModelArguments, name: str, **options: Any) -> PreTrainedModel:
    """Return a trained model, with this rank's part of it where it is spread over the ranks."""
    if args.distributed_config is not None:
        distributed = DistributedConfig(**args.distributed_config)
        _check_ranks(distributed.dp_size)
        options["distributed_config"] = distributed
    return AutoModelForCausalLM.from_pretrained(
        name,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        **options,
        **(args.config_overrides or {}),
    )


def _check_vocabulary(
    args: ModelArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for a tokenizer with more tokens than the model embeds. Tokens that were
    added to the vocabulary are not counted: some models never see theirs."""
    embedded = model.config.get_text_config().vocab_size
    if tokenizer.vocab_size > embedded:
        raise ValueError(
            f"the tokenizer of {args.tokenizer_name_or_path or args.model_name_or_path} has "
            f"{tokenizer.vocab_size:,} tokens, and {args.model_name_or_path} embeds {embedded:,}: "
            "name the tokenizer of that model as tokenizer_name_or_path"
        )


def _check_ranks(spread: int) -> None:
    """Raise ValueError unless the model is spread over all ranks."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if spread != launched:
        raise ValueError(
            f"distributed_config spreads the model over {spread} ranks (fsdp_size x "
            f"dp_replicate_size), but {launched} were launched: make the two equal"
        )


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


def _embedding_rows(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a row for each token, and as many unused ones as make the ranks' shares equal."""
    spread = 1
    if args.distributed_config is not None:
        spread = DistributedConfig(**args.distributed_config).dp_size
    return spread * math.ceil(len(tokenizer) / spread)


def _new_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    special["vocab_size"] = _embedding_rows(args, tokenizer)
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
