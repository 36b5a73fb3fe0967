"""What the comparison of two trainings comes to."""

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from hf_flexseq.steps.trace import PREFIX
from tests.hf.drawn_settings.case import Case
from tests.hf.trainers import CLOCKS, Array, distance, size_of


class Verdict(Enum):
    """The outcomes of a case, from good to bad."""

    EQUAL = "the weights and all figures are equal"
    REFUSED = "hf_flexseq refused it in one line before its second step"
    LOGGED = "they differ, and hf_flexseq has logged that they do"
    STOCK_FAILS = "the stock trainer raises"
    SILENT = "they differ and nothing was said"
    CRASHED = "hf_flexseq raised something else than a refusal"
    HANGS = "a rank did not come to an end"


FAILURES = (Verdict.SILENT, Verdict.CRASHED, Verdict.HANGS)

# The warnings of hf_flexseq that announce a difference.
KNOWN_WARNINGS = (
    "targets beside padding",
    "rows otherwise of a whole batch",
    "divides the loss by all labels",
    "on_substep_end is called before the work of a step",
    "a hook on the backward of a module sees",
    "sees no gradients",
    "differs from call to call",
    "each forward changes",
    "compares the prediction of each token with that token itself",
    "documents of a packed row see each other",
    "has no target token",
    "averages the mean losses",
)

# Means over batches under stock, and over the target tokens of a step or a set under hf_flexseq.
_MEANS = ("entropy", "mean_token_accuracy")

# A refusal: one line, or several reasons, each a numbered line.
_LISTED = re.compile(r"[^\n]+|\d+ reasons to refuse this:(\n\d+\. [^\n]+)+")
_REFUSALS = ("ValueError", "NotImplementedError", "PlanInfeasible", "FloatingPointError")


@dataclass(kw_only=True)
class Outcome:
    """What became of one training on one rank."""

    error: str = ""
    """The type of what was raised, empty if nothing was."""
    message: str = ""
    where: str = ""
    """The innermost lines of its traceback."""
    step: int = 0
    """Optimizer steps that were made."""
    start: dict[str, Array] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """Further figures, such as which checkpoints there are."""
    warnings: list[str] = field(default_factory=list)
    """Of hf_flexseq."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A verdict and its reason."""

    verdict: Verdict
    detail: str = ""


def of_refusal(ours: Outcome) -> Judged:
    """Judge a training with hf_flexseq that raised."""
    detail = f"{ours.error}: {ours.message}"
    is_listed = _LISTED.fullmatch(ours.message.strip()) is not None
    if ours.error in _REFUSALS and is_listed and ours.step <= 1:
        return Judged(verdict=Verdict.REFUSED, detail=detail)
    detail = f"in step {ours.step + 1}: {detail} [{ours.where}]"
    return Judged(verdict=Verdict.CRASHED, detail=detail)


def of_both(case: Case, stock: Outcome, ours: Outcome) -> Judged:
    """Judge two trainings that came to their ends."""
    if not all(np.isfinite(value).all() for value in stock.weights.values()):
        return Judged(verdict=Verdict.STOCK_FAILS, detail="its weights are not finite")
    found = differences(case, stock, ours)
    if not found:
        return Judged(verdict=Verdict.EQUAL)
    for warning in ours.warnings:
        if any(re.search(known, warning) for known in KNOWN_WARNINGS):
            return Judged(verdict=Verdict.LOGGED, detail=warning)
    others = [text for text in ours.warnings if not text.startswith("a step takes")]
    said = f" (logged: {'; '.join(others)})" if others else ""
    return Judged(verdict=Verdict.SILENT, detail="; ".join(found[:6]) + said)


def bounds(case: Case) -> tuple[float, float]:
    """Return what rounding may do to weights, relative to the update, and to figures."""
    is_adaptive = case.settings["optim"] != "sgd"  # gradients near zero count as much as others
    if case.settings.get("bf16") or case.settings.get("bf16_full_eval"):
        return 0.1, 0.05
    if case.dtype == "float32":
        return (0.05, 0.01) if is_adaptive else (2e-3, 1e-3)
    if case.model in ("gemma2", "mistral", "qwen3", "gpt_oss"):
        return 1e-4, 1e-5  # their norms compute in float32
    is_rounded = case.trainer in ("sft", "dpo", "reward")  # TRL computes losses in float32
    if sum((is_rounded, is_adaptive, case.sharding != "")) > 1:
        return 1e-4, 1e-5
    return 2e-6, 2e-6


def differences(case: Case, stock: Outcome, ours: Outcome) -> list[str]:
    """Return what differs, each as a few words."""
    weights_bound, figures_bound = bounds(case)
    found = []
    apart = distance(stock.weights, ours.weights)
    update = max(distance(stock.weights, stock.start), 1e-9)
    if apart > weights_bound * update:
        found.append(f"weights by {apart / update:.2g} of the update")
    losses = [line for line in ours.log if "loss" in line]
    if losses and not any(name.startswith(PREFIX) for line in losses for name in line):
        found.append("no step was planned")
    if len(stock.log) != len(ours.log):
        pairs = zip(stock.log, ours.log, strict=False)
        missing = [sorted(set(wanted) - set(given)) for wanted, given in pairs]
        lacks = next((names for names in missing if names), "others at the end")
        found.append(f"{len(ours.log)} log lines, not {len(stock.log)}: lacks {lacks}")
    for name, value in stock.state.items():
        if ours.state.get(name) != value:
            found.append(f"{name} is {ours.state.get(name)}, not {value}")
    last_loss = max((line.get("step", 0) for line in stock.log if "loss" in line), default=-1)
    for number, (wanted, given) in enumerate(zip(stock.log, ours.log, strict=False)):
        for name, value in wanted.items():
            if name == "train_loss" and wanted.get("step", 0) > last_loss:
                continue  # stock counts rank 0's share of the steps after the last log line
            if _is_compared(case, name) and not _is_near(name, wanted, given, figures_bound):
                found.append(f"{name} of line {number} is {given.get(name)}, not {value}")
    return found


def _is_compared(case, name):
    """Tell if a figure is one that has to be the same."""
    if any(clock in name for clock in CLOCKS) or "_mem_" in name:
        return False
    if name == "rows":  # of micro-batches, which a customisation counts itself
        return False
    if name == "num_input_tokens_seen":  # differs on purpose (docs/guarantees.md)
        return case.settings.get("include_num_input_tokens_seen") not in ("all", True)
    if name.startswith("eval_") and (
        case.settings.get("packing") or case.settings.get("eval_packing")
    ):
        return False  # rows have different numbers of sequences: means of means differ
    if name.endswith(_MEANS) and case.trainer == "sft":
        accumulates = case.settings.get("gradient_accumulation_steps", 1) > 1
        return not (name.startswith("eval_") or accumulates)
    return True


def _is_near(name, wanted, given, bound):
    """Tell if a figure of a log line is the same but for rounding."""
    if name not in given:
        return False
    value, found = wanted[name], given[name]
    if not isinstance(value, int | float) or not isinstance(found, int | float):
        return value == found
    if math.isnan(value) or math.isnan(found):
        return math.isnan(value) and math.isnan(found)
    if math.isinf(value) or math.isinf(found):
        return value == found
    return abs(value - found) <= bound * size_of(name, wanted)
