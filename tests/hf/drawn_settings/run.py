"""Trains the two trainers of cases, on two forked ranks.

A job runs case after case, until one raises: what other ranks wait for is not known then, and
another job goes on. Ranks write what became of a case into files, which outlive a hang.
"""

import contextlib
import copy
import io
import json
import logging
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, disable_progress_bars, load_from_disk
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqMixin
from tests.hf.drawn_settings.case import CHANGES, Case
from tests.hf.drawn_settings.options import ON_SAMPLES
from tests.hf.drawn_settings.sources import (
    COLLATORS,
    DATASETS,
    MODELS,
    ROWS_ON_SAMPLES,
    STREAMS,
    evaluation_rows,
    prompts_and_completions,
    rows_of_objectives,
    training_rows,
    watch_training,
    wide_loss,
)
from tests.hf.drawn_settings.verdicts import Judged, Outcome, Verdict, of_both, of_refusal
from tests.hf.objectives import classes_metrics, classifier, weights_of, word_tokenizer
from tests.hf.tiny import tiny_llama
from tests.ranks import run_ranks

RANKS = 2
GROUP_SECONDS = 30  # that a rank waits for the other one
CASE_SECONDS = 60

TRAINERS = {
    "trainer": (Trainer, TrainingArguments),
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "sequences": (Trainer, TrainingArguments),
    "tokens": (Trainer, TrainingArguments),
}


# ---- the trainers of a case


def make_trainer(case: Case, is_ours: bool, folder: Path) -> Any:
    """Return the trainer of a case, stock or with hf_flexseq."""
    changes = [CHANGES[name] for name in case.changes]
    stock, config = TRAINERS[case.trainer]
    arguments = _arguments(case, folder)
    if not is_ours and case.trainer == "trainer":
        _widen_loss(arguments["model"])
    for change in changes:
        if change.model is not None:
            change.model(arguments["model"])
        arguments |= change.arguments or {}
    bases = [change.methods for change in changes if change.methods is not None]
    if is_ours and case.way == "mixin":
        bases.insert(0, FlexSeqMixin)
    if is_ours and case.way == "subclass":
        bases.append(FlexSeqMixin)
    options = FlexSeqArguments(cost_model="estimate", **dict(case.ours))
    if is_ours and case.way != "callback":
        arguments["flexseq_args"] = options
    cls = type("DrawnTrainer", (*bases, stock), {})
    trainer = cls(args=_configuration(case, config, folder), **arguments)
    watch_training(arguments["train_dataset"], trainer)
    for change in changes:
        if change.trainer is not None:
            change.trainer(trainer)
    if is_ours and case.way == "callback":
        trainer.add_callback(FlexSeqCallback(trainer, options))
    return trainer


def _configuration(case: Case, config: Any, folder: Path) -> Any:
    settings = {
        "output_dir": str(folder),
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    if config is not TrainingArguments:
        settings |= {"gradient_checkpointing": False, "bf16": False, "max_length": None}
    if case.trainer == "sft" and case.data == "table":
        settings["dataset_kwargs"] = {"skip_prepare_dataset": True}
    return config(**(settings | copy.deepcopy(dict(case.settings))))


def _widen_loss(model: Any) -> None:
    """Let stock compute its loss in the model's dtype, as hf_flexseq does."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.loss_function = wide_loss


def _arguments(case: Case, folder: Path) -> dict[str, Any]:
    """Return the arguments of a case's trainer: model, datasets, collator or tokenizer."""
    dtype = getattr(torch, case.dtype)
    if case.trainer in ON_SAMPLES:
        return _arguments_of_objective(case, dtype, folder)
    arguments: dict[str, Any] = {"model": MODELS[case.model][0](dtype)}
    if case.trainer == "trainer":
        # The rest of a stream is trained on in another way, so that none ends.
        rows = training_rows(104 if case.data in STREAMS else 26)
        arguments["train_dataset"] = DATASETS[case.data][0](rows)
        arguments["eval_dataset"] = evaluation_rows(case.collator)
        collator = COLLATORS[case.collator][0]
        arguments["data_collator"] = lambda examples: collator(examples)  # one for each trainer
        return arguments
    arguments["processing_class"] = word_tokenizer()
    if case.data == "texts":
        arguments["train_dataset"] = prompts_and_completions(26, even=False)
        arguments["eval_dataset"] = prompts_and_completions(8, even=True)
    else:
        arguments["train_dataset"] = Dataset.from_list(training_rows(26))
        arguments["eval_dataset"] = Dataset.from_list(evaluation_rows())
    return arguments


def _arguments_of_objective(case: Case, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Return the arguments of a trainer whose loss is computed on samples."""
    tokenizer = word_tokenizer()
    settings = dict(case.settings)
    arguments: dict[str, Any] = {}
    for name, count in (("train_dataset", ROWS_ON_SAMPLES), ("eval_dataset", 6)):
        rows = rows_of_objectives(case.trainer, count)
        if settings.get("precompute_ref_log_probs"):
            rows = _on_disk(rows, folder / name)
        arguments[name] = rows
    if case.trainer == "dpo":
        model = tiny_llama(dtype)
        reference = tiny_llama(dtype, seed=1)
        return arguments | {
            "model": model,
            "ref_model": reference,
            "processing_class": tokenizer,
        }
    if case.trainer == "reward":
        model = classifier(LlamaForSequenceClassification, 1, dtype)
        return arguments | {"model": model, "processing_class": tokenizer}
    is_tokens = case.trainer == "tokens"
    head = LlamaForTokenClassification if is_tokens else LlamaForSequenceClassification
    collator = DataCollatorForTokenClassification if is_tokens else DataCollatorWithPadding
    arguments |= {"model": classifier(head, 3, dtype), "data_collator": collator(tokenizer)}
    gathers_arrays = settings.get("eval_do_concat_batches", True)
    if settings.get("eval_use_gather_object") or settings.get("batch_eval_metrics"):
        gathers_arrays = False
    if gathers_arrays:
        arguments["compute_metrics"] = classes_metrics
    return arguments


def _on_disk(rows: Dataset, folder: Path) -> Dataset:
    """Save rows, for ranks to find what one of them computes of these. Collective."""
    if dist.get_rank() == 0:
        rows.save_to_disk(folder)
    dist.barrier()
    return load_from_disk(folder)


# ---- one training on one rank


def outcome_of(case: Case, is_ours: bool, folder: Path) -> Outcome:
    """Train, and return what became of it, an error too."""
    outcome = Outcome()
    trainer = None
    with _as_a_process_of_its_own(), _warnings_of_ours(outcome.warnings):
        try:
            trainer = make_trainer(case, is_ours, folder)
            outcome.start = weights_of(trainer.model)
            trainer.train()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            places = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
            outcome.error, outcome.message = type(error).__name__, str(error)
            outcome.where = " > ".join(places)
    if trainer is None:
        return outcome
    outcome.step = trainer.state.global_step
    outcome.weights = weights_of(trainer.model)
    outcome.log = trainer.state.log_history
    if not trainer.is_world_process_zero():  # with even_batches=False ranks count epochs alone
        outcome.log = [{**line, "epoch": 0} for line in outcome.log]
    outcome.state = _state_of(trainer, folder)
    return outcome


def _state_of(trainer: Any, folder: Path) -> dict[str, Any]:
    state = trainer.state
    found = {name: getattr(state, name) for name in ("global_step", "best_global_step")}
    found["checkpoints"] = sorted(path.name for path in folder.glob("checkpoint-*"))
    if hasattr(state, "seen"):
        found["tokens seen by floating_point_ops"] = state.seen
    return found


@contextlib.contextmanager
def _as_a_process_of_its_own() -> Iterator[None]:
    """Hide from a training what the one before has left in the process."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    before = dict(os.environ)
    torch.manual_seed(5)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _warnings_of_ours(found: list[str]) -> Iterator[None]:
    """Collect the warnings of hf_flexseq."""

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collecting(level=logging.WARNING)
    logger = logging.getLogger("hf_flexseq")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# ---- jobs


def _run_cases(
    rank: int, world_size: int, cases: Sequence[Case], folder: Path, stock_only: bool
) -> None:
    """Run cases until one raises, and write what became of each."""
    disable_progress_bars()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _run_muted(rank, cases, folder, stock_only)


def _run_muted(rank: int, cases: Sequence[Case], folder: Path, stock_only: bool) -> None:
    for case in cases:
        ours = Outcome() if stock_only else _run_one(case, True, folder, rank)
        if ours.error:
            _write(case, rank, folder, of_refusal(ours))
            return
        stock = _run_one(case, False, folder, rank)
        if stock.error:
            detail = f"{stock.error}: {stock.message} [{stock.where}]"
            _write(case, rank, folder, Judged(verdict=Verdict.STOCK_FAILS, detail=detail))
            return
        if not stock_only:
            _write(case, rank, folder, of_both(case, stock, ours))


def _run_one(case: Case, is_ours: bool, folder: Path, rank: int) -> Outcome:
    """Train, and wait for the other rank; raise TimeoutError if it does not come. An error of any
    rank is one of this rank, too."""
    name = f"{case.seed}-{is_ours}"
    output = folder / f"out-{name}"
    outcome = outcome_of(case, is_ours, output)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}-{rank}", outcome.error or "fine")
    others = [f"{name}-{other}" for other in range(RANKS)]
    store.wait(others, timedelta(seconds=2 * GROUP_SECONDS))
    if not outcome.error and any(store.get(other) != b"fine" for other in others):
        outcome.error = "OtherRank"
        outcome.message = "this rank came to the end, the other one raised"
    if rank == 0 and not outcome.error:
        shutil.rmtree(output, ignore_errors=True)
    return outcome


def _write(case: Case, rank: int, folder: Path, judged: Judged) -> None:
    path = folder / f"{case.seed}.{rank}"
    path.write_text(json.dumps([judged.verdict.name, judged.detail]))


def _read(case: Case, folder: Path) -> Judged | None:
    """Return the worst verdict that a rank has written; None where none has."""
    found = []
    for rank in range(RANKS):
        path = folder / f"{case.seed}.{rank}"
        if path.exists():
            name, detail = json.loads(path.read_text())
            found.append(Judged(verdict=Verdict[name], detail=detail))
    # An error of one rank alone counts by what it is, not by what the other made of it.
    told = [one for one in found if "OtherRank" not in one.detail]
    # Rank 0 alone logs what all ranks differ by.
    if any(one.verdict is Verdict.LOGGED for one in found):
        told = [one for one in told if one.verdict is not Verdict.SILENT]
    order = list(Verdict)
    return max(told or found, key=lambda one: order.index(one.verdict), default=None)


def _job(cases: Sequence[Case], folder: Path, *, stock_only: bool = False) -> str:
    """Run cases on forked ranks until one raises; return what the ranks died of, if they did."""
    seconds = CASE_SECONDS * (1 + len(cases))
    try:
        run_ranks(
            _run_cases,
            RANKS,
            cases,
            folder,
            stock_only,
            seconds=seconds,
            group_seconds=GROUP_SECONDS,
        )
    except AssertionError as died:
        return str(died)
    return ""


def judge(
    cases: Sequence[Case],
    folder: Path,
    on_verdict: Callable[[Case, Judged], None] = lambda case, judged: None,
) -> dict[int, Judged]:
    """Return the verdicts of cases by their seeds, which differ. on_verdict: gets each when it is
    known."""
    left = list(cases)
    verdicts: dict[int, Judged] = {}
    while left:
        died = _job(left, folder)
        while left:
            judged = _read(left[0], folder)
            if judged is None and not died:
                break
            case = left.pop(0)
            if judged is None:
                judged, died = Judged(verdict=Verdict.HANGS, detail=died[-2000:]), ""
            if judged.verdict in (Verdict.CRASHED, Verdict.HANGS):
                judged = _beside_stock(case, judged, folder)
            verdicts[case.seed] = judged
            on_verdict(case, judged)
    return verdicts


def _beside_stock(case: Case, judged: Judged, folder: Path) -> Judged:
    """Return the verdict of a case in which ours failed: it may, where the stock trainer does."""
    alone = folder / f"stock-{case.seed}"
    alone.mkdir()
    died = _job([case], alone, stock_only=True)
    if died:
        return Judged(verdict=Verdict.STOCK_FAILS, detail=died)
    return _read(case, alone) or judged
