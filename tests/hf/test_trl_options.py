"""Options of TRL's DPO and GRPO trainers that random draws do not have (`drawn_settings`), each
against the trainer without hf_flexseq."""

import pytest

from tests.hf.objectives import BOUNDS, Case, assert_alike, compare, save_inputs

SYNCHRONISED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
SAPO = {"sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.8, "beta": 0.1}
SAPO |= {"loss_type": "sapo", "use_bias_correction_kl": False, **SYNCHRONISED}
VESPO = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}
MASKED = {"mask_truncated_completions": True, "scale_rewards": "batch"}
CLIPPED = {"num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.3}
SAMPLED = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
LOGGED = {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True}
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0}
ENTROPY |= {"entropy_coef_min": 0.05, "entropy_coef_max": 0.11}
OPTIONS = [
    ("dpo", {"padding_free": True}),
    ("dpo", {"pad_to_multiple_of": 8, "max_length": 12, "truncation_mode": "keep_end"}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 0.3]}),
    ("dpo", {"loss_type": "discopop", "discopop_tau": 0.1}),
    ("dpo", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}),
    ("dpo", SYNCHRONISED),
    ("dpo", {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 2}),
    ("grpo", {"cast_lm_head_to_fp32": True, "pad_to_multiple_of": 8}),
    ("grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 2.0}),
    ("grpo", {"loss_type": "dr_grpo", **MASKED}),
    ("grpo", SAPO),
    ("grpo", {"loss_type": "vespo", **VESPO}),
    ("grpo", {"off_policy_mask_threshold": 0.5, **CLIPPED}),
    ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0, "reward_weights": [0.5]}),
    ("grpo", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    (
        "grpo",
        {"steps_per_generation": 2, "generation_kwargs": {"length_penalty": 1.0}, **SAMPLED},
    ),
    (
        "grpo",
        {
            "multi_objective_aggregation": "normalize_then_sum",
            "disable_dropout": True,
            **LOGGED,
        },
    ),
    ("grpo", {"use_transformers_continuous_batching": True}),
    ("grpo", ENTROPY),
]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "settings"), OPTIONS)
def test_an_option_gives_the_plain_trainer_s_weights_and_figures(tmp_path, kind, settings):
    save_inputs(tmp_path)
    apart = compare(0, 1, tmp_path, Case(kind=kind, steps=2, accumulation=2, settings=settings))
    assert apart.figures > 15
    assert_alike(apart, weights=BOUNDS[kind])
