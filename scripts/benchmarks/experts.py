"""Experts over ranks: steps under planned groups against those of one process.

    python scripts/benchmarks/experts.py --json experts.json
    python scripts/benchmarks/experts.py --only Mixtral grpo

transformers spreads the experts of tiny models over gloo ranks (`DistributedConfig(ep_size=...)`).
Every row compares loss and gradients, or trained weights, with those of one process:

gradients  of eight families in float64, with `experts_implementation="eager"`: on two ranks, on
           four that hold the experts once, twice, and in two replicas. Steps have groups of 1, 2
           and 4 ranks and a rank without tokens, and gather and reduce in each micro-batch or
           once. Plain, with checkpointed layers, with choices for activations, and with a router
           loss and checkpointed layers where the family has one. 1e-10 is the bound
adapter    the same of LoRA on all matrices of experts, whose base is frozen: plain, and with
           checkpointed layers
family     gradients of a small model of every family of transformers that is taken and has a
           plan for experts, on two ranks, in evaluation mode, where routers draw no noise; and of
           LoRA on its experts
trainer    weights after ten steps in float32 over the update: the Trainer on a language model, on
           heads of classification and with a loss of a user's own, and TRL's trainers; the
           Trainer, SFT, DPO and GRPO with and without LoRA, on attention and on experts. The plain
           trainer runs in one process with the step as one batch; on as many ranks where these
           draw completions, or the loss depends on a rank's own batch. SFT and DPO have TRL's
           router loss, the Trainer and SFT an evaluation. 2e-6 is the bound; so it is for the
           logged figures, losses of evaluation among them. Families with recurrent layers round
           more, whether or not their experts are spread, and so does distillation, where the plain
           trainer is 4e-6 from itself with halved batches: 1e-5. PEFT cannot put adapters on the
           attention of a model in replicas
kernel     gradients with each `experts_implementation` that runs on a CPU in float32, bfloat16
           and float16: the largest error against float64, and that of one process with the same
           kernel. Three times as much and 1e-6 are allowed

Deviations are the largest over ranks, steps and parameters. Exits with 1 where a bound is broken.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; ranks share the cores
os.environ["TQDM_DISABLE"] = "1"

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from common import ROOT, argument_parser, machine, table_head, table_row, write_record
from reach_models import NEEDED, Family, default_config, expert_rules, families

sys.path.append(str(ROOT))
import tests.hf.conftest  # noqa: F401  (lets DeepSpeed compile nothing)
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.small import small_model
from tests.hf.experts import (
    EXPERTS,
    LAYOUTS,
    ROUTED,
    OneProcess,
    Training,
    errors_of_kernel,
    errors_of_steps,
    in_float64,
    matrices_of_experts,
    one_process,
    one_process_of,
    save,
    train,
)
from tests.hf.hybrids import HYBRIDS
from tests.hf.trainers import difference
from tests.ranks import run_cases, run_ranks

BOUND = 1e-10
STEPS_BOUND = 2e-6
WIDE_STEPS_BOUND = 1e-5
SECONDS = 900  # for the ranks of a row

KERNELS = ("eager", "grouped_mm", "batched_mm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_FACTOR = 3.0  # so many times the error of one process
KERNEL_FLOOR = 1e-6

# What transformers raises for a plan that cuts dense layers beside FSDP, as Gemma 4's.
NOT_LOADED = "RuntimeError: Cannot concatenate overlapping meshes"

Figures = dict[str, Any]
"""Deviations by name, `bound`, and `worst`, the largest one as it is printed."""


# ---- gradients


def of_steps(rank: int, world_size: int, *case: Any) -> dict[str, float]:
    """Return `errors_of_steps` on this rank, with its options given as a mapping."""
    *given, options = case
    return errors_of_steps(rank, world_size, *given, **options)


def largest(by_case: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the largest error of each name, over cases and ranks."""
    found: dict[str, float] = {}
    for errors in (errors for by_rank in by_case for errors in by_rank):
        for name, error in errors.items():
            found[name] = max(found.get(name, 0.0), error)
    return found


def gradients(family: str, layout: str, folder: Path) -> Figures:
    """Compare a family in all ways."""
    ranks, config = LAYOUTS[layout]
    plain = one_process_of(family, folder)
    cases: list[tuple[OneProcess, Mapping[str, int], Mapping[str, Any]]] = [
        (plain, config, {}),
        (plain, config, {"checkpointing": True}),
        (plain, config, {"choices": True}),
    ]
    if family in ROUTED:
        routed = one_process_of(family, folder, router_loss=True)
        cases.append((routed, config, {"checkpointing": True}))
    return judged(largest(run_cases(of_steps, ranks, cases, seconds=SECONDS)), BOUND)


def adapter(family: str, layout: str, folder: Path) -> Figures:
    """Compare the gradients of LoRA on experts."""
    ranks, config = LAYOUTS[layout]
    plain = one_process_of(family, folder, adapted=())
    cases: list[tuple[OneProcess, Mapping[str, int], Mapping[str, Any]]] = [
        (plain, config, {}),
        (plain, config, {"checkpointing": True}),
    ]
    return judged(largest(run_cases(of_steps, ranks, cases, seconds=SECONDS)), BOUND)


def one_family(family: Family, folder: Path, *, adapted: bool = False) -> Figures:
    """Compare a small model of a family; adapted: with LoRA on its experts. Raises
    NotImplementedError for one that is refused whether or not its experts are spread, and what
    transformers raises where it cannot be built."""
    with torch.device("meta"):
        check_model(family.kind(default_config(family)))
    options = NEEDED.get(family.name, {}) | WITH_EXPERTS.get(family.name, {})
    torch.manual_seed(0)
    model = small_model(family.kind, options).double().eval()
    if adapted and not matrices_of_experts(model):
        raise NotImplementedError("a small model of it has no matrices of experts")
    model.set_experts_implementation("eager")
    ranks, config = LAYOUTS["2 ranks"]
    with in_float64():
        wanted = one_process(model, folder / family.name, adapted=() if adapted else None)
    found = run_cases(of_steps, ranks, [(wanted, config, {})], seconds=SECONDS)
    return judged(largest(found), BOUND)


# What makes a family have experts that has none by default.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
}


# ---- trainers

TRAININGS = {
    "Trainer": Training(kind="plain"),
    "sft": Training(kind="sft"),
    "dpo": Training(kind="dpo"),
    "grpo": Training(kind="grpo"),
    "sft with LoRA on attention": Training(kind="sft", adapter="attention"),
    "sft with LoRA on experts": Training(kind="sft", adapter="experts"),
}
BOTH = "attention and experts"
for _kind in ("kto", "reward", "rloo", "distillation", "sequences", "tokens", "own"):
    TRAININGS[_kind] = Training(kind=_kind)
for _kind in ("sft", "dpo", "grpo"):
    TRAININGS[f"{_kind} with LoRA on {BOTH}"] = Training(kind=_kind, adapter=BOTH)

# Families whose adapters are compared in all layouts; those of others on two ranks.
ADAPTED = ("Qwen3Moe", "GptOss", "Mixtral")


def trainer(training: Training, layout: str, folder: Path) -> Figures:
    """Compare a trainer's ten steps with those of the plain one."""
    ranks, config = LAYOUTS[layout]
    save(training, folder)
    alone = ranks if training.is_of_ranks else 1
    wanted = run_ranks(train, alone, folder, training, None, seconds=SECONDS)[0]
    found = run_ranks(train, ranks, folder, training, config, seconds=SECONDS)[0]
    apart = difference(wanted, found)
    if apart.missing:
        raise AssertionError(f"not logged: {', '.join(apart.missing)}")
    rounds_more = training.family in HYBRIDS or training.kind == "distillation"
    bound = WIDE_STEPS_BOUND if rounds_more else STEPS_BOUND
    return judged({"weights": apart.weights, apart.metric: apart.metrics}, bound)


# ---- kernels


def kernel(name: str, dtype: torch.dtype, layout: str, folder: Path) -> Figures:
    """Compare an implementation of experts with float64."""
    ranks, config = LAYOUTS[layout]
    wanted = one_process_of("Qwen3Moe", folder)
    by_rank = run_ranks(errors_of_kernel, ranks, wanted, config, name, dtype, seconds=SECONDS)
    found = largest([by_rank])
    bound = max(KERNEL_FLOOR, KERNEL_FACTOR * found.pop("one process"))
    return judged(found, bound)


# ---- rows


def judged(errors: Mapping[str, float], bound: float) -> Figures:
    """Return the figures of a row."""
    worst = max(errors, key=lambda name: errors[name])
    return {**errors, "bound": bound, "worst": f"{errors[worst]:.1e} ({worst})"}


def last_line(error: BaseException) -> str:
    """Return the last line of a message, or of a rank's traceback in it."""
    return str(error).strip().splitlines()[-1][:160]


def rows() -> dict[str, Callable[[Path], Figures]]:
    """Return what gives the figures of each row, by its name."""
    found: dict[str, Callable[[Path], Figures]] = {}
    for family in EXPERTS:
        for layout in LAYOUTS:
            found[f"gradients: {family}, {layout}"] = partial(gradients, family, layout)
            if layout == "2 ranks" or family in ADAPTED:
                found[f"adapter: {family}, {layout}"] = partial(adapter, family, layout)
    for one in [family for family in families() if expert_rules(family)]:
        found[f"family: {one.name}"] = partial(one_family, one)
        found[f"family: {one.name} with LoRA"] = partial(one_family, one, adapted=True)
    for name, training in TRAININGS.items():
        for layout in LAYOUTS:
            if "attention" in (training.adapter or "") and "replicas" in layout:
                continue
            found[f"trainer: {name}, {layout}"] = partial(trainer, training, layout)
    for family in EXPERTS:
        training = Training(kind="plain", family=family)
        found[f"trainer: {family}, 2 ranks"] = partial(trainer, training, "2 ranks")
    for name in KERNELS:
        for dtype in DTYPES:
            for layout in ("2 ranks", "4 ranks in 2 groups"):
                row = f"kernel: {name} in {str(dtype).removeprefix('torch.')}, {layout}"
                found[row] = partial(kernel, name, dtype, layout)
    return found


def main() -> int:
    """Print a row for each comparison, and return 1 where a bound is broken."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="rows whose names have one of these",
    )
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # forks of a process with more hang in their first parallel region

    print(f"on {machine('torch', 'transformers', 'accelerate', 'trl', 'peft')}\n")
    columns = ("row", "largest deviation", "bound", "verdict", "seconds")
    print(table_head(columns, (2, 4)))
    figures: dict[str, Figures] = {}
    is_broken = False
    for name, measure in rows().items():
        if not any(part in name for part in asked.only):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = measure(Path(folder))
            except AssertionError as failure:
                worst = last_line(failure)
                is_refused = worst.startswith(("NotImplementedError", NOT_LOADED))
                found = {"verdict": "not taken" if is_refused else "FAILS", "worst": worst}
            except (NotImplementedError, TypeError) as reason:
                found = {"verdict": "not taken", "worst": last_line(reason)}
            else:
                errors = [found[key] for key in found.keys() - {"bound", "worst"}]
                found["verdict"] = "exact" if max(errors) <= found["bound"] else "DIFFERS"
        is_broken |= found["verdict"] in ("DIFFERS", "FAILS")
        seconds = f"{time.perf_counter() - began:.0f}"
        bound = f"{found['bound']:.0e}" if "bound" in found else ""
        print(table_row((name, found["worst"], bound, found["verdict"], seconds)), flush=True)
        figures[name] = found
        write_record(asked.json, figures)  # of what there is, should it be broken off
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
