"""Trainers whose loss is computed on whole samples, the wide matrix (`-m nightly`): weights and
figures are those of the same trainers without hf_flexseq, on as many ranks, with the same data,
seeds and batches per rank.

Sequences have 1 to 60 tokens; a rank may hold 60 in a micro-batch, so that steps have several and
most sequences can be shared. One step is enough where a loss alone is in question; others take
ten, with GRPO and RLOO generating in each.

Where trainers are not in float64, or ours is beyond a bound, twice the distance of the plain
trainer to itself is allowed: of its weights when its batches are cut into halves, and of its
figures, of which many are means over batches, when their rows are padded to multiples of 16. Both
change nothing but rounding. Runs under bfloat16 are held against the plain trainer in float32,
since autocast rounds more than the bounds: 1.5 times as far as the plain trainer under bfloat16 is
allowed. Figures may be as far apart as weights may: the norm of gradients, for one, comes near by
chance.
"""

import contextlib
import io
from dataclasses import replace

import datasets
import pytest
import torch

from tests.hf.objectives import (
    BOUNDS,
    METRICS_BOUND,
    Case,
    assert_alike,
    compare,
    difference,
    run_case,
    save_inputs,
)
from tests.ranks import run_ranks

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(1500)]

SECONDS = 600  # for the ranks of a run

# ---- the cases

DPO_LOSSES = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "robust": {"label_smoothing": 0.1},
    "bco_pair": {},
    "sppo_hard": {},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.1},
    "sft": {},
    "sigmoid_norm": {},
}
DPO_SETTINGS = {
    "sigmoid, bco_pair and sft": {
        "loss_type": ["sigmoid", "bco_pair", "sft"],
        "loss_weights": [0.8, 0.2, 1.0],
    },
    "ipo and sigmoid_norm": {"loss_type": ["ipo", "sigmoid_norm"]},
    "ld_alpha": {"ld_alpha": 0.5},
    "use_weighting": {"use_weighting": True},
    "use_weighting, ipo and nca_pair": {"use_weighting": True, "loss_type": ["ipo", "nca_pair"]},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    "max_length": {"max_length": 16, "truncation_mode": "keep_end"},
    "pad_to_multiple_of": {"pad_to_multiple_of": 16},
    "padding_free": {"padding_free": True},
}
SAMPLING = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
LOGGED = {"log_completions": True, "num_completions_to_print": 1, "log_unique_prompts": True}
VESPO = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}
GRPO_SETTINGS = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "reward_weights": [0.5]},
    "sapo": {"loss_type": "sapo", "sapo_temperature_neg": 1.2, "sapo_temperature_pos": 0.8},
    "vespo": {"loss_type": "vespo", **VESPO},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "beta 0": {"beta": 0.0},
    "sequence-level ratios": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "num_iterations 2": {"num_iterations": 2},
    "steps_per_generation 2": {"steps_per_generation": 2},
    "top_entropy_quantile": {"top_entropy_quantile": 0.3},
    "entropy_coef": {"entropy_coef": 0.1},
    "adaptive entropy": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.05,
        "entropy_coef_min": 0.05,
        "entropy_coef_max": 0.11,
    },
    "temperature": {"temperature": 0.7},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2, "epsilon": 0.1},
    "bias-corrected KL": {"use_bias_correction_kl": True, "num_iterations": 2},
    "truncated masked": {"mask_truncated_completions": True, "max_completion_length": 24},
    "unscaled rewards": {"scale_rewards": "none", "disable_dropout": True},
    "reference synchronised": {
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "ref_model_mixup_alpha": 0.3,
    },
    "head in float32": {"cast_lm_head_to_fp32": True, "pad_to_multiple_of": 8},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "sampling": {**SAMPLING, "generation_kwargs": {"length_penalty": 1.0}},
    "several objectives": {"multi_objective_aggregation": "normalize_then_sum", **LOGGED},
}
RLOO_SETTINGS = {
    "plain": {},
    "beta 0": {"beta": 0.0},
    "num_iterations 2": {"num_iterations": 2},
    "steps_per_generation 2": {"steps_per_generation": 2},
    "normalized advantages": {"normalize_advantages": True},
}
CHECKPOINTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def of(kind, **settings):
    return {"kind": kind, "settings": settings}


def rows():
    """Cases by name, as they run on two ranks."""
    found = {}
    for name, settings in DPO_LOSSES.items():
        found[f"dpo: {name}"] = Case(kind="dpo", steps=1, settings={"loss_type": name, **settings})
    for name, settings in DPO_SETTINGS.items():
        found[f"dpo: {name}"] = Case(kind="dpo", steps=1, settings=settings)
    ten = {
        "dpo: ten steps of sigmoid": {"kind": "dpo"},
        "dpo: ten steps of ipo": of("dpo", loss_type="ipo"),
        "dpo: ten steps, precomputed reference": of(
            "dpo", precompute_ref_log_probs=True, precompute_ref_batch_size=2
        ),
        "dpo: ten steps, reference synchronised": of(
            "dpo", sync_ref_model=True, ref_model_sync_steps=3
        ),
        "dpo: ten steps, reference with more KV heads": {
            "kind": "dpo",
            "changes": {"num_key_value_heads": 4},
        },
        "dpo: ten steps, evaluated": {"kind": "dpo", "evaluates": True},
        "kto: kto": {"kind": "kto", "evaluates": True},
        "kto: apo_zero_unpaired": of("kto", loss_type="apo_zero_unpaired"),
        "kto: precomputed reference": of("kto", precompute_ref_log_probs=True),
        "kto: weights": of("kto", desirable_weight=1.5, undesirable_weight=0.5),
        "reward: plain": {"kind": "reward", "evaluates": True},
        "reward: margins": {"kind": "reward", "columns": {"margin": [0.0, 0.5, 1.25]}},
        "reward: centred": of("reward", center_rewards_coefficient=0.1),
        "sequences": {"kind": "sequences", "evaluates": True},
        "tokens": {"kind": "tokens", "evaluates": True},
    }
    for name, settings in GRPO_SETTINGS.items():
        ten[f"grpo: {name}"] = {"kind": "grpo", "settings": settings}
    for name, settings in RLOO_SETTINGS.items():
        ten[f"rloo: {name}"] = {"kind": "rloo", "settings": settings}
    for kind in ("dpo", "kto", "grpo", "rloo"):
        for adapter in ("new", "retrained"):
            ten[f"{kind}: {adapter} adapter"] = {"kind": kind, "adapter": adapter}
    ten["reward: new adapter"] = {"kind": "reward", "adapter": "new"}
    for kind in ("dpo", "kto", "reward", "grpo"):
        ten[f"{kind}: checkpointed layers"] = {"kind": kind, "settings": CHECKPOINTED}
    for name, options in ten.items():
        found[name] = Case(**{"steps": 10, **options})
    for kind in BOUNDS:
        for sharding in ("zero1", "zero2", "zero3", "fsdp2"):
            found[f"{kind}: {sharding}"] = Case(
                kind=kind, sharding=sharding, steps=4, dtype=torch.float32
            )
    # Autocast does not reach the loss of TRL's DistillationTrainer.
    for kind in (one for one in BOUNDS if one != "distillation"):
        found[f"{kind}: bfloat16"] = Case(
            kind=kind, steps=1, dtype=torch.float32, settings={"bf16": True}
        )
    return found


ROWS = rows()


def halved(case):
    """A case that draws the same examples in twice as many batches."""
    return replace(case, batch=case.batch // 2, accumulation=2 * case.accumulation)


def padded(case):
    """A case whose rows are padded to multiples of 16."""
    return replace(case, multiple=16)


def couples(case):
    """Whether the loss of an example depends on the others of its batch."""
    return case.kind in ("kto", "tokens") or "aot" in str(case.settings.get("loss_type"))


# ---- running them


def run_of(rank, world_size, case, is_ours, folder):
    datasets.disable_progress_bars()
    with contextlib.redirect_stdout(io.StringIO()):  # what trainers print at each step
        return run_case(replace(case, lookahead=4), is_ours, folder)


def trained(world_size, case, is_ours, folder):
    """What rank 0 has trained, in processes of their own."""
    return run_ranks(run_of, world_size, case, is_ours, folder, seconds=SECONDS)[0]


def allowed(world_size, case, stock, apart, folder):
    """The bounds of weights and of figures. apart: how far ours is from `stock`."""
    bound, metrics_bound = BOUNDS[case.kind], METRICS_BOUND
    is_exact = apart.weights <= bound and apart.metrics <= metrics_bound
    if case.dtype == torch.float64 and is_exact:
        return bound, metrics_bound
    itself = difference(stock, trained(world_size, padded(case), False, folder))
    metrics_bound = max(metrics_bound, 2 * itself.metrics)
    if not couples(case):
        itself = difference(stock, trained(world_size, halved(case), False, folder))
    return max(bound, 2 * itself.weights), metrics_bound


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_a_trainer_equals_itself_without_hf_flexseq(tmp_path, name, ranks):
    """On three ranks with accumulated batches: GRPO's losses of tokens count those of the whole
    step, and draw it at once."""
    save_inputs(tmp_path)
    case = ROWS[name] if ranks == 2 else replace(ROWS[name], accumulation=2)
    stock, ours = (trained(ranks, case, is_ours, tmp_path) for is_ours in (False, True))
    if case.settings.get("bf16"):
        in_float32 = replace(case, settings={**case.settings, "bf16": False})
        exact = trained(ranks, in_float32, False, tmp_path)
        apart, itself = difference(exact, ours), difference(exact, stock)
        bound = 1.5 * itself.weights
        metrics_bound = 1.5 * max(itself.weights, itself.metrics)
    else:
        apart = difference(stock, ours)
        bound, metrics_bound = allowed(ranks, case, stock, apart, tmp_path)
    assert apart.weights <= bound
    assert apart.metrics <= metrics_bound, apart.metric
    assert not apart.missing


def test_continuous_batching_on_one_rank(tmp_path):
    """Its thread does not live in forked ranks."""
    save_inputs(tmp_path)
    batching = {"use_transformers_continuous_batching": True}
    apart = compare(0, 1, tmp_path, Case(kind="grpo", steps=2, accumulation=2, settings=batching))
    assert_alike(apart, weights=BOUNDS["grpo"])
