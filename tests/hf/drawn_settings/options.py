"""The options that are drawn, as data: for each the settings of which one is drawn, and the
trainers that have it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

CAUSAL = ("trainer", "sft")
ON_SAMPLES = ("dpo", "reward", "sequences", "tokens")
ALL = (*CAUSAL, *ON_SAMPLES)


class Option(NamedTuple):
    """An option, or several that make sense together."""

    values: tuple[Mapping[str, Any], ...]
    """Settings of a trainer's configuration, of which one is drawn."""
    of: tuple[str, ...] = ALL
    """The trainers that have it."""
    weight: float = 1.0
    """How likely it is drawn: more than 1 for what few trainers have. 0 is for what is refused,
    which ends a case: every tenth case has one of these."""


def _one_of(*values: Mapping[str, Any], of=ALL, weight=1.0) -> Option:
    return Option(values, of, weight)


def _each(*on: str, of=ALL, weight=1.0, **values: tuple[Any, ...]) -> list[Option]:
    """Return one option for each name, with its values; those of `on` are True."""
    values = dict.fromkeys(on, (True,)) | values
    return [
        Option(tuple({name: value} for value in given), of, weight)
        for name, given in values.items()
    ]


# Drawn in every case.
ALWAYS = (
    *_each(per_device_train_batch_size=(1, 2, 3, 4), gradient_accumulation_steps=(1, 1, 2, 3)),
    _one_of(
        *({"max_steps": steps} for steps in (2, 3, 4)), {"max_steps": -1, "num_train_epochs": 1}
    ),
    _one_of(
        {"eval_strategy": "no"},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"eval_strategy": "epoch"},
    ),
    *_each(optim=("sgd", "sgd", "sgd", "adamw_torch", "adafactor")),
)

_PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": None}
_KEPT_WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
_BEST = {"load_best_model_at_end": True}
_EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
_CHECKPOINTING = {"gradient_checkpointing": True}
_SCHEDULES = ("constant", "cosine", "polynomial", "inverse_sqrt", "constant_with_warmup")

SOMETIMES: tuple[Option, ...] = (
    # optimization
    *_each(learning_rate=(1e-3, 0.1), lr_scheduler_type=(*_SCHEDULES, "cosine_with_restarts")),
    *_each(warmup_steps=(1, 0.3), weight_decay=(0.01, 0.5), max_grad_norm=(0.0, 0.05, 1e9)),
    *_each(adam_beta1=(0.5,), adam_beta2=(0.9,), adam_epsilon=(1e-3,)),
    _one_of(_PLATEAU | {"eval_strategy": "steps", "eval_steps": 1}),
    _one_of({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}),
    # data
    *_each(train_sampling_strategy=("sequential", "group_by_length")),
    *_each("dataloader_drop_last", dataloader_num_workers=(1,), dataloader_pin_memory=(False,)),
    *_each(seed=(7,), data_seed=(11,)),
    *_each("full_determinism", label_names=(["labels"],)),
    *_each("ignore_data_skip"),
    *_each(of=("trainer",), remove_unused_columns=(False,)),
    _one_of(_KEPT_WORKERS | {"dataloader_prefetch_factor": 3}, weight=0.5),
    *_each(
        accelerator_config=(
            {"even_batches": False},
            {"use_seedable_sampler": False},
            {"non_blocking": True},
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        )
    ),
    # refused: batches of all ranks
    *_each(weight=0.0, accelerator_config=({"dispatch_batches": True}, {"split_batches": True})),
    # logging
    *_each(logging_steps=(2, 0.5)),
    *_each("logging_first_step", logging_strategy=("epoch",), logging_nan_inf_filter=(False,)),
    *_each(log_level=("error", "warning"), log_on_each_node=(False,), disable_tqdm=(False,)),
    *_each(include_num_input_tokens_seen=("non_padding", "all", True)),
    *_each(skip_memory_metrics=(False,)),
    # evaluation
    *_each(per_device_eval_batch_size=(1, 4), eval_accumulation_steps=(1,)),
    *_each("prediction_loss_only", include_for_metrics=(["inputs"], ["loss"])),
    *_each("batch_eval_metrics", "eval_on_start", eval_delay=(1,)),
    *_each(eval_do_concat_batches=(False,)),
    *_each("eval_use_gather_object", "bf16_full_eval"),
    # checkpoints
    _one_of(_BEST | {"metric_for_best_model": "eval_loss"}, _BEST | {"greater_is_better": True}),
    _one_of(
        _EACH_STEP,
        _EACH_STEP | {"save_total_limit": 1},
        {"save_strategy": "epoch", "save_only_model": True},
        {"save_strategy": "best", "metric_for_best_model": "eval_loss"},
    ),
    *_each("save_on_each_node", "restore_callback_states_from_checkpoint"),
    # memory and speed
    _one_of(
        _CHECKPOINTING | {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        _CHECKPOINTING | {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        _CHECKPOINTING,
    ),
    *_each("use_cache", torch_empty_cache_steps=(1,)),
    *_each("bf16", weight=0.5),
    # ranks
    *_each("ddp_find_unused_parameters", ddp_bucket_cap_mb=(1,)),
    *_each("ddp_broadcast_buffers", ddp_timeout=(25,)),
    # the loss
    *_each(label_smoothing_factor=(0.1,)),
    # refused
    *_each(weight=0.0, average_tokens_across_devices=(False,)),
    *_each(weight=0.0, torch_compile_mode=("reduce-overhead",)),
    *_each("ddp_static_graph", weight=0.0),
    # SFT
    *_each(of=("sft", "dpo", "reward"), max_length=(9, 20), pad_to_multiple_of=(8,)),
    *_each("padding_free", of=("sft",), completion_only_loss=(True, False)),
    *_each(of=("sft",), loss_type=("nll", "dft"), shuffle_dataset=(True,)),
    *_each("eval_packing", "assistant_only_loss", of=("sft",), weight=0.5),
    *_each("activation_offloading", of=("sft",), weight=0.5),
    _one_of({"packing": True, "max_length": 20}, of=("sft",), weight=0.5),
    # DPO and Reward
    *_each(of=("dpo",), weight=8, beta=(0.1, 2.0)),
    *_each(of=("dpo",), weight=8, loss_type=(["ipo"], ["hinge"], ["sigmoid", "sft"])),
    *_each("precompute_ref_log_probs", of=("dpo",), weight=8, label_smoothing=(0.2,)),
    *_each("use_weighting", of=("dpo",), weight=8, ld_alpha=(0.5,)),
    *_each(of=("dpo",), weight=8, f_divergence_type=("js_divergence",), sync_ref_model=(True,)),
    *_each(of=("reward",), weight=8, center_rewards_coefficient=(0.1,)),
)

# Of FlexSeqArguments.
OURS: tuple[Option, ...] = (
    *_each(lookahead=(0, 1, 4), strategy=("ulysses", "zigzag", "balanced")),
    *_each(sync=("lockstep", "free"), max_tokens_per_rank=(64, 150)),
    *_each(save_attention_output=(False,), on_nonfinite=("warn",)),
    _one_of(
        {"planner": "static", "sp_degree": 2},
        {"planner": "static", "sp_degree": 1, "max_tokens_per_rank": 64},
        {"strategy": "local", "max_tokens_per_rank": 64},
    ),
)
