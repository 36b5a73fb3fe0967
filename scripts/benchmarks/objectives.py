"""Trainers whose loss is computed on whole samples, against the same trainers as they come.

    python scripts/benchmarks/objectives.py --json objectives.json
    python scripts/benchmarks/objectives.py --only grpo --ranks 2

Every row trains twice on gloo ranks, with the same data, seeds and batches per rank: DPO, KTO,
Reward, GRPO, RLOO and Distillation of TRL, the Trainer on classification heads, and the Trainer
with a loss of a user's own, without and with FlexSeqMixin in front. Sequences have 1 to 60 tokens;
a rank may hold 60 in a micro-batch, so that steps have several and most sequences can be shared.

weights    the difference of all weights over the plain trainer's update. 2e-6 is the bound where
           the trainer computes in float32, as TRL does with log-probabilities, and 1e-7 where it
           computes in float64
metrics    the largest difference of a figure that is logged, over its size where that exceeds 1:
           loss, gradient norm and all that a trainer reports, clocks excepted (1e-6). Rewards of
           DPO and KTO are differences of log-probabilities of sequences, and are measured by
           those
itself     twice this much is allowed, too: how far the plain trainer's weights are from
           themselves when its batches are cut into halves, and its figures, of which many are
           means over batches, when they are padded to multiples of 16: both change nothing but
           rounding. Found where ours is beyond a bound, and where the model is not in float64
           (ZeRO, FSDP2)

Rows named bfloat16 are held against the plain trainer in float32, since autocast rounds more than
the bounds: weights and metrics are how far ours under bfloat16 is from that run, `itself` is how
far the plain trainer under bfloat16 is. 1.5 times as far is allowed. Figures may be as far apart
as weights may: the norm of gradients, for one, comes near by chance.

One step is enough where a loss alone is in question; others train ten, with GRPO and RLOO
generating in each. A row whose plain trainer does not run on a CPU says so, with the reason. Exits
with 1 where a bound is broken.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; ranks share the cores
os.environ["TQDM_DISABLE"] = "1"

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from common import ROOT, argument_parser, machine, table_head, table_row, write_record

sys.path.append(str(ROOT))
import tests.hf.conftest  # noqa: F401  (lets DeepSpeed compile nothing)
from tests.hf.objectives import (
    BOUNDS,
    METRICS_BOUND,
    Case,
    Difference,
    Run,
    difference,
    run_case,
    save_inputs,
)
from tests.ranks import run_ranks

ITSELF = 2.0  # so many times the plain trainer's distance to itself is allowed
BFLOAT16 = 1.5  # so many times its distance to float32 under bfloat16
SECONDS = 600  # for a row's ranks

# ---- the rows

DPO_LOSSES: dict[str, dict[str, Any]] = {
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
    "discopop": {},
    "sft": {},
    "sigmoid_norm": {},
}
DPO_SETTINGS: dict[str, dict[str, Any]] = {
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
    "max_length": {"max_length": 16},
    "pad_to_multiple_of": {"pad_to_multiple_of": 16},
}
GRPO_SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
    **{name: {"loss_type": name} for name in ("cispo", "sapo", "vespo")},
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
    },
    "temperature": {"temperature": 0.7},
    "two-sided clipping": {"delta": 1.5, "num_iterations": 2},
    "bias-corrected KL": {"use_bias_correction_kl": True, "num_iterations": 2},
    "truncated masked": {"mask_truncated_completions": True, "max_completion_length": 24},
    "unscaled rewards": {"scale_rewards": "none"},
    "reference synchronised": {"sync_ref_model": True, "ref_model_sync_steps": 2},
}
RLOO_SETTINGS: dict[str, dict[str, Any]] = {
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


def rows() -> dict[str, Case]:
    """Return all cases, by the name of their row, as they run on two ranks."""
    found: dict[str, Case] = {}
    for name, settings in DPO_LOSSES.items():
        found[f"dpo: {name}"] = Case(kind="dpo", steps=1, settings={"loss_type": name, **settings})
    for name, settings in DPO_SETTINGS.items():
        found[f"dpo: {name}"] = Case(kind="dpo", steps=1, settings=settings)
    ten: dict[str, dict[str, Any]] = {
        "dpo: ten steps of sigmoid": {"kind": "dpo"},
        "dpo: ten steps of ipo": {"kind": "dpo", "settings": {"loss_type": "ipo"}},
        "dpo: ten steps, no reference given": {"kind": "dpo", "reference": False},
        "dpo: ten steps, precomputed reference": {
            "kind": "dpo",
            "settings": {"precompute_ref_log_probs": True},
        },
        "dpo: ten steps, reference synchronised": {
            "kind": "dpo",
            "settings": {"sync_ref_model": True, "ref_model_sync_steps": 3},
        },
        "dpo: ten steps, reference with more KV heads": {
            "kind": "dpo",
            "changes": {"num_key_value_heads": 4},
        },
        "dpo: ten steps, evaluated": {"kind": "dpo", "evaluates": True},
        "kto: kto": {"kind": "kto", "evaluates": True},
        "kto: apo_zero_unpaired": {
            "kind": "kto",
            "settings": {"loss_type": "apo_zero_unpaired"},
        },
        "kto: precomputed reference": {
            "kind": "kto",
            "settings": {"precompute_ref_log_probs": True},
        },
        "kto: weights": {
            "kind": "kto",
            "settings": {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        },
        "reward: plain": {"kind": "reward", "evaluates": True},
        "reward: margins": {"kind": "reward", "columns": {"margin": [0.0, 0.5, 1.25]}},
        "reward: centred": {"kind": "reward", "settings": {"center_rewards_coefficient": 0.1}},
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


def on_three_ranks(case: Case) -> Case:
    """Return a case with accumulated batches. GRPO's losses of tokens count those of the whole
    step, and draw it at once."""
    return replace(case, accumulation=2)


def halved(case: Case) -> Case:
    """Return a case that draws the same examples in twice as many batches."""
    return replace(case, batch=case.batch // 2, accumulation=2 * case.accumulation)


def padded(case: Case) -> Case:
    """Return a case whose rows are padded to multiples of 16."""
    return replace(case, multiple=16)


def is_bfloat16(case: Case) -> bool:
    """Tell if a case trains under bfloat16 autocast."""
    return bool(case.settings.get("bf16"))


def in_float32(case: Case) -> Case:
    """Return a case without autocast."""
    return replace(case, settings={**case.settings, "bf16": False})


def couples(case: Case) -> bool:
    """Tell if the loss of an example depends on the others of its batch."""
    return case.kind in ("kto", "tokens") or "aot" in str(case.settings.get("loss_type"))


# ---- running them


def run_of(rank: int, world_size: int, case: Case, is_ours: bool, folder: Path) -> Run:
    """Train on this rank."""
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stdout(io.StringIO()):  # what trainers print at each step
        return run_case(replace(case, lookahead=4), is_ours, folder)


def trained(world_size: int, case: Case, is_ours: bool, folder: Path) -> Run:
    """Return what rank 0 has trained."""
    runs = run_ranks(run_of, world_size, case, is_ours, folder, seconds=SECONDS)
    run: Run = runs[0]
    return run


def reason(failure: AssertionError) -> str:
    """Return the last line of a rank's traceback."""
    lines = [line for line in str(failure).splitlines() if line.strip()]
    return lines[-1].strip()


def measure(world_size: int, case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of a row."""
    try:
        stock = trained(world_size, case, False, folder)
    except AssertionError as failure:
        return {"verdict": "stock does not run", "reason": reason(failure)}
    try:
        ours = trained(world_size, case, True, folder)
    except AssertionError as failure:
        return {"verdict": "FAILS", "reason": reason(failure)}
    if is_bfloat16(case):
        return measured_by_float32(world_size, case, stock, ours, folder)
    apart = difference(stock, ours)
    bound, metrics_bound = BOUNDS[case.kind], METRICS_BOUND
    is_exact = apart.weights <= bound and apart.metrics <= metrics_bound
    found: dict[str, Any] = {}
    if case.dtype != torch.float64 or not is_exact:
        itself = difference(stock, trained(world_size, padded(case), False, folder))
        of_weights, of_metrics = itself.weights, itself.metrics
        if not couples(case):
            itself = difference(stock, trained(world_size, halved(case), False, folder))
            of_weights = itself.weights
        found |= {"itself": of_weights, "itself_metrics": of_metrics}
        bound = max(bound, ITSELF * of_weights)
        metrics_bound = max(metrics_bound, ITSELF * of_metrics)
    return found | figures_of(apart, bound, metrics_bound)


def measured_by_float32(
    world_size: int, case: Case, stock: Run, ours: Run, folder: Path
) -> dict[str, Any]:
    """Return the figures of a row under bfloat16.

    stock, ours: both trainers' runs under bfloat16.
    """
    exact = trained(world_size, in_float32(case), False, folder)
    itself = difference(exact, stock)
    bound = BFLOAT16 * itself.weights
    metrics_bound = BFLOAT16 * max(itself.weights, itself.metrics)
    found = figures_of(difference(exact, ours), bound, metrics_bound)
    return {"itself": itself.weights, "itself_metrics": itself.metrics, **found}


def figures_of(apart: Difference, bound: float, metrics_bound: float) -> dict[str, Any]:
    """Return how far two runs are apart, what is allowed, and the verdict."""
    is_exact = apart.weights <= bound and apart.metrics <= metrics_bound
    return {
        "weights": apart.weights,
        "bound": bound,
        "metrics": apart.metrics,
        "metrics_bound": metrics_bound,
        "metric": apart.metric,
        "compared": apart.figures,
        "missing": list(apart.missing),
        "verdict": "exact" if is_exact and not apart.missing else "DIFFERS",
    }


def cells_of(found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row's figures."""
    if "weights" not in found:
        return ["", "", "", "", f"{found['verdict']}: {found['reason'][:140]}"]
    itself = ""
    if "itself" in found:
        itself = f"{found['itself']:.0e}, {found['itself_metrics']:.0e}"
    verdict = found["verdict"]
    if found["missing"]:
        verdict += f", not logged: {', '.join(found['missing'])}"
    return [
        f"{found['weights']:.1e}",
        f"{found['metrics']:.1e}",
        found["metric"],
        itself,
        verdict,
    ]


def main() -> int:
    """Print a row for each case, and return 1 where a bound is broken."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose names have one of these"
    )
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 3), default=(2, 3))
    asked = parser.parse_args()

    libraries = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed")
    print(f"on {machine(*libraries)}\n")
    columns = ("row", "ranks", "weights", "metrics", "the worst of them", "itself", "verdict")
    print(table_head(columns, (1, 2, 3, 5)))
    began = time.perf_counter()
    figures: dict[str, Any] = {}
    is_broken = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_inputs(folder)
        for name, case in rows().items():
            if not any(part in name for part in asked.only):
                continue
            for ranks in asked.ranks:
                own = on_three_ranks(case) if ranks == 3 else case
                found = measure(ranks, own, folder)
                is_broken |= found["verdict"] not in ("exact", "stock does not run")
                print(table_row((name, ranks, *cells_of(found))), flush=True)
                figures[f"{name}, {ranks} ranks"] = found
                write_record(asked.json, figures)  # of what there is, should it be broken off
    print(f"\n{len(figures)} rows in {time.perf_counter() - began:.0f} s")
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
