"""Write docs/arguments.md: what becomes of each option of transformers' TrainingArguments and of
TRL's SFTConfig, DPOConfig and GRPOConfig.

    python scripts/arguments_page.py

A test holds that all options of these classes are here, that a file named as proof has the option,
and that settings said to be refused are. Reasons of refusals are those of the tables that raise.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hf_flexseq.base.refusals import Refusal
from hf_flexseq.hf.refusals.accelerator import ACCELERATOR
from hf_flexseq.hf.refusals.predictions import PREDICTIONS
from hf_flexseq.hf.refusals.trainer import MODEL, ON_SAMPLES, TRAINER

PAGE = Path(__file__).parents[1] / "docs/arguments.md"

INTRODUCTION = """\
# Options of transformers and TRL

What becomes of each option of `TrainingArguments` (transformers 5.24), `SFTConfig`, `DPOConfig`
and `GRPOConfig` (TRL 1.16) under hf_flexseq. `KTOConfig`, `RewardConfig` and `RLOOConfig` share
most of them. The words of the second column:

* **works**: weights and figures are those of the trainer without hf_flexseq, to rounding.
* **differs**: it works, and not all numbers are those without hf_flexseq. The link says which.
* **refused**: to use it ends in an error before training; **partly refused**: so do some of its
  values, or some trainers and models with it. All others work.
* **no effect**: it changes nothing here, for the reason that is given.
* **untested**: hf_flexseq does not refuse it, and no test runs it.

The third column names what compares the option with the trainer without hf_flexseq, or holds what
the last column says. *Draws* are random combinations of options
(`tests/hf/test_drawn_settings.py`), *losses* are runs of TRL's losses and of its generation
(`tests/hf/test_trl_options.py`), and others are files of tests. Where it is empty, transformers or
TRL read the option outside of everything that hf_flexseq replaces. What to set instead of a
refused value is in [refused settings](refusals.md).
"""

WORKS, DIFFERS, PARTLY, REFUSED, NO_EFFECT, UNTESTED = (
    "works",
    "differs",
    "partly refused",
    "refused",
    "no effect",
    "untested",
)
DRAWS, LOSSES = "tests/hf/drawn_settings/options.py", "tests/hf/test_trl_options.py"
_SHORT = {DRAWS: "draws", LOSSES: "losses"}


class Row(NamedTuple):
    """What becomes of an option."""

    verdict: str
    note: str = ""
    shown: str = ""
    """The file of tests that has the option; "" for one that others' code alone reads."""
    refusals: tuple[str, ...] = ()
    """`setting` of the refusals of the tables that it may meet."""


def works(*names: str, shown: str = "", note: str = "") -> dict[str, Row]:
    """Return the rows of options that work alike."""
    return {name: Row(WORKS, note, shown) for name in names}


def untested(*names: str, note: str) -> dict[str, Row]:
    """Return the rows of options that no test runs."""
    return {name: Row(UNTESTED, note) for name in names}


_FIGURES = "[figures](differences.md#loss-and-figures)"
_DATA = "[data and steps](differences.md#data-and-steps)"
_MODEL = "[model and gradients](differences.md#model-and-gradients)"
_REENTRANT = "use_reentrant=True runs as False, which has the same results"
_COMPILED = "tests/hf/test_compiled_regions.py"
_LOADERS = (
    "dispatch_batches=True",
    "split_batches=True",
    "use_stateful_dataloader=True with a lookahead",
)
_OFFLOADING = "activation_offloading=True of TRL with offload=True of activation checkpointing"
_IN_BACKWARD = "optimizers that update weights in the backward (lomo, adalomo, layerwise)"
_LOST_MASKS = "padding is cut off before tokens are planned"
_VLLM_ALONE = "TRL gives it to vLLM; see [GRPO](objectives/grpo.md#vllm)"
_VLLM = "TRL calls vLLM, here a stand-in for it; see [GRPO](objectives/grpo.md#vllm)"

TRAINING: dict[str, dict[str, Row]] = {
    "Steps and optimizer": {
        **works(
            *("per_device_train_batch_size", "gradient_accumulation_steps"),
            *("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type"),
            *("lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1"),
            *("adam_beta2", "adam_epsilon", "max_grad_norm"),
            shown=DRAWS,
        ),
        "optim": Row(
            PARTLY,
            shown=DRAWS,
            refusals=(_IN_BACKWARD,),
        ),
        **works("optim_args", "optim_target_modules"),
        "average_tokens_across_devices": Row(
            REFUSED, shown=DRAWS, refusals=("average_tokens_across_devices=False",)
        ),
        "label_smoothing_factor": Row(
            PARTLY,
            shown="tests/hf/test_label_smoothing.py",
            refusals=(
                "label_smoothing_factor of SFTTrainer",
                "label_smoothing_factor with a model that keeps its own loss",
            ),
        ),
        "neftune_noise_alpha": Row(DIFFERS, _MODEL, "tests/hf/test_neftune.py"),
    },
    "Precision": {
        **works("bf16", shown="tests/hf/test_precision.py"),
        **works("bf16_full_eval", shown=DRAWS),
        **untested("fp16", note="needs a GPU; its scaling of losses is tested alone"),
        **untested("fp16_full_eval", "tf32", note="needs a GPU"),
    },
    "Memory and speed": {
        "activation_checkpointing": Row(
            WORKS, "plans may choose more ([memory](memory.md))", "tests/hf/test_checks.py"
        ),
        "activation_checkpointing_kwargs": Row(WORKS, _REENTRANT, shown="tests/hf/test_checks.py"),
        "gradient_checkpointing": Row(WORKS, "the old name", DRAWS),
        "gradient_checkpointing_kwargs": Row(WORKS, f"the old name; {_REENTRANT}", DRAWS),
        "torch_compile": Row(DIFFERS, f"MLPs and norms are compiled: {_MODEL}", _COMPILED),
        "torch_compile_backend": Row(WORKS, "switches torch_compile on", _COMPILED),
        "torch_compile_mode": Row(
            PARTLY,
            "switches torch_compile on",
            "",
            ("torch.compile with CUDA graphs (reduce-overhead, max-autotune)",),
        ),
        "use_liger_kernel": Row(
            DIFFERS,
            f"head and loss stay ours: {_MODEL}",
            "tests/hf/test_liger.py",
        ),
        "liger_kernel_config": Row(
            PARTLY,
            shown="tests/hf/test_liger.py",
            refusals=("fused_linear_cross_entropy and cross_entropy in liger_kernel_config",),
        ),
        **works("use_cache", "torch_empty_cache_steps", "skip_memory_metrics", shown=DRAWS),
        "auto_find_batch_size": Row(
            DIFFERS,
            "lowers max_tokens_per_rank, and leaves the batch as it is: "
            "[out of memory](out_of_memory.md)",
            "tests/hf/test_step_memory.py",
        ),
    },
    "Logging": {
        **works(
            *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"),
            *("log_level", "disable_tqdm"),
            shown=DRAWS,
        ),
        **works(
            *("log_level_replica", "report_to", "run_name", "project", "trackio_space_id"),
            *("trackio_bucket_id", "trackio_static_space_id"),
        ),
        "logging_nan_inf_filter": Row(DIFFERS, _FIGURES, DRAWS),
        "include_num_input_tokens_seen": Row(DIFFERS, _FIGURES, DRAWS),
    },
    "Evaluation": {
        **works(
            *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
            *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"),
            *("eval_accumulation_steps", "batch_eval_metrics"),
            shown=DRAWS,
        ),
        "per_device_eval_batch_size": Row(DIFFERS, f"`eval_loss`: {_FIGURES}", DRAWS),
        "include_for_metrics": Row(
            PARTLY,
            shown=DRAWS,
            refusals=(
                "include_for_metrics=['loss'] with a model's own loss_function or router loss",
            ),
        ),
    },
    "Saving and the Hub": {
        **works(
            *("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
            *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
            *("ignore_data_skip", "restore_callback_states_from_checkpoint"),
            shown=DRAWS,
        ),
        "save_on_each_node": Row(
            PARTLY,
            shown=DRAWS,
            refusals=("save_on_each_node=True with a model that DistributedConfig has sharded",),
        ),
        "enable_jit_checkpoint": Row(
            PARTLY, refusals=("enable_jit_checkpoint=True on several ranks",)
        ),
        **works(
            *("output_dir", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id"),
            *("hub_strategy", "hub_always_push", "hub_revision"),
        ),
    },
    "Data": {
        **works(
            *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
            *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("remove_unused_columns", "label_names", "seed", "data_seed", "full_determinism"),
            shown=DRAWS,
        ),
        **works("dataloader_multiprocessing_context", "dataloader_in_order"),
        "train_sampling_strategy": Row(
            WORKS,
            "a plan does not need lengths to be grouped or balanced",
            DRAWS,
        ),
        **works("length_column_name", note="read by the samplers of that strategy"),
    },
    "Ranks": {
        "accelerator_config": Row(PARTLY, shown=DRAWS, refusals=_LOADERS),
        "parallelism_config": Row(
            PARTLY, refusals=("cp_size, sp_size and tp_size of parallelism_config",)
        ),
        "ddp_find_unused_parameters": Row(WORKS, "", DRAWS),
        "ddp_bucket_cap_mb": Row(DIFFERS, f"its default: {_MODEL}", DRAWS),
        **works("ddp_broadcast_buffers", shown=DRAWS),
        "ddp_timeout": Row(PARTLY, shown=DRAWS, refusals=("ddp_timeout of 0 and less",)),
        "ddp_static_graph": Row(REFUSED, shown=DRAWS, refusals=("ddp_static_graph=True",)),
        **works("ddp_backend", note="gloo is tested; NCCL is [untested](limits.md)"),
        **untested(
            *("fsdp", "fsdp_config"),
            note="accelerate shards whole models on GPUs alone; FSDP2 by "
            "[DistributedConfig](options.md#fsdp2-and-hsdp), and of stages of "
            "[pipelines](pipelines.md), is tested",
        ),
        **works("deepspeed", note="ZeRO-1, 2 and 3", shown="tests/hf/test_sharding.py"),
        **works("use_cpu"),
        "local_rank": Row(NO_EFFECT, "transformers does not read it any more"),
    },
    "Others": {
        **works("debug", note="`underflow_overflow` looks at each micro-batch"),
        "do_train": Row(NO_EFFECT, "the Trainer does not read it; scripts do"),
        "do_eval": Row(NO_EFFECT, "the Trainer does not read it; scripts do"),
        "do_predict": Row(NO_EFFECT, "the Trainer does not read it; scripts do"),
        "resume_from_checkpoint": Row(
            NO_EFFECT, "the Trainer does not read it; scripts give it to `train()`"
        ),
    },
}

_OF_TRL = {
    "model_init_kwargs": Row(PARTLY, refusals=("a model on several devices (device_map)",)),
    **works("trust_remote_code"),
    "router_aux_loss_coef": Row(
        DIFFERS, "[router losses](objectives/router.md)", "tests/hf/test_router.py"
    ),
}
_OF_DATA = {
    "max_length": Row(WORKS, "cuts at 1,024 tokens unless set", DRAWS),
    **works("truncation_mode", shown=LOSSES),
    **works("dataset_num_proc", "pad_token"),
    "pad_to_multiple_of": Row(NO_EFFECT, _LOST_MASKS, DRAWS),
}

SFT: dict[str, Row] = {
    **_OF_TRL,
    **_OF_DATA,
    "truncation_mode": Row(WORKS),
    "pad_to_multiple_of": Row(
        DIFFERS,
        "no effect but on padding-free rows, each of which is padded alone, so that `num_tokens` "
        "counts more",
        DRAWS,
    ),
    **works("chat_template_path", "dataset_text_field", "dataset_kwargs", "eos_token"),
    **works("shuffle_dataset", "completion_only_loss", "loss_type", shown=DRAWS),
    **works("assistant_only_loss", note="TRL makes labels of it before training"),
    "packing": Row(DIFFERS, f"rows are taken apart: {_DATA}", "tests/hf/test_packing.py"),
    **works("packing_strategy", shown="tests/hf/test_packing.py"),
    "eval_packing": Row(DIFFERS, f"`eval_loss`: {_FIGURES}", DRAWS),
    **works("padding_free", note="nothing is ever padded", shown="tests/hf/test_packing.py"),
    "activation_offloading": Row(
        PARTLY, "TRL's offloading needs a GPU, and is untested", "", (_OFFLOADING,)
    ),
}

DPO: dict[str, Row] = {
    **_OF_TRL,
    **_OF_DATA,
    **works("disable_dropout"),
    "padding_free": Row(NO_EFFECT, "nothing is ever padded", LOSSES),
    **works("precompute_ref_log_probs", note="by TRL, [padded](objectives/dpo.md)", shown=DRAWS),
    **works("precompute_ref_batch_size", shown=LOSSES),
    **works(
        *("beta", "loss_type", "ld_alpha", "f_divergence_type", "label_smoothing"),
        *("use_weighting", "sync_ref_model"),
        shown=DRAWS,
    ),
    **works(
        *("loss_weights", "f_alpha_divergence_coef", "discopop_tau", "ref_model_sync_steps"),
        "ref_model_mixup_alpha",
        shown=LOSSES,
    ),
    "activation_offloading": Row(
        REFUSED, "", "", ("activation_offloading=True with an objective or a loss of your own",)
    ),
}

GRPO: dict[str, Row] = {
    **_OF_TRL,
    **works("pad_to_multiple_of", "disable_dropout", "cast_lm_head_to_fp32", shown=LOSSES),
    "pad_to_multiple_of": Row(NO_EFFECT, _LOST_MASKS, LOSSES),
    **works(
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
        "steps_per_generation",
        shown=LOSSES,
    ),
    **works("num_generations", "max_completion_length", shown="tests/hf/objectives.py"),
    **works(
        *("num_generations_eval", "shuffle_dataset", "generation_batch_size"),
        *("chat_template_kwargs", "cache_implementation", "ds3_gather_for_generation"),
        "max_tool_calling_iterations",
    ),
    **works("use_transformers_continuous_batching", shown=LOSSES),
    **untested("transformers_continuous_batching_config", note="read by transformers' generation"),
    "use_transformers_paged": Row(WORKS, "the old name"),
    **works(
        *("beta", "num_iterations", "delta", "epsilon_high", "importance_sampling_level"),
        *("multi_objective_aggregation", "scale_rewards", "loss_type", "sync_ref_model"),
        *("mask_truncated_completions", "ref_model_sync_steps", "ref_model_mixup_alpha"),
        *("epsilon", "reward_weights", "off_policy_mask_threshold"),
        *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos"),
        *("vespo_k_neg", "vespo_lambda_neg"),
        shown=LOSSES,
    ),
    **works(
        *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"),
        *("entropy_coef_delta", "entropy_target"),
        shown="tests/hf/test_objectives.py",
    ),
    **works("entropy_coef_min", "entropy_coef_max", "use_bias_correction_kl", shown=LOSSES),
    **works("log_completions", "log_unique_prompts", "num_completions_to_print", shown=LOSSES),
    **works("log_multimodal", "log_completions_hub_repo"),
    **works(
        *("use_vllm", "vllm_mode", "vllm_importance_sampling_correction"),
        *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"),
        note=_VLLM,
        shown="tests/hf/test_vllm.py",
    ),
    **untested(
        *("vllm_model_impl", "vllm_enable_sleep_mode"),
        *("vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host"),
        *("vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
        *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap"),
        note=_VLLM_ALONE,
    ),
}

# By class of arguments: what it has besides TrainingArguments.
OF_TRL: dict[str, dict[str, Row]] = {"SFTConfig": SFT, "DPOConfig": DPO, "GRPOConfig": GRPO}


def refusals_of(row: Row) -> list[Refusal]:
    """Return the refusals that an option may meet. Raises KeyError for one that no table has."""
    tables = (*TRAINER, *ON_SAMPLES, *MODEL, *PREDICTIONS, *ACCELERATOR)
    by_setting = {one.setting: one for one in tables}
    return [by_setting[setting] for setting in row.refusals]


def page_text() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION, "## TrainingArguments", ""]
    for title, rows in TRAINING.items():
        lines += [f"### {title}", "", *table(rows), ""]
    for name, rows in OF_TRL.items():
        lines += [f"## {name}", "", *table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| option | | compared in | what is refused or differs |"
    yield "|---|---|---|---|"
    for name, row in rows.items():
        notes = [f"{one.setting}: {one.why}" for one in refusals_of(row)]
        if row.note:
            notes.append(row.note)
        shown = _SHORT.get(row.shown) or (row.shown and f"`{row.shown}`")
        yield f"| `{name}` | {row.verdict} | {shown} | {'; '.join(notes)} |"


def main() -> None:
    PAGE.write_text(page_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
