"""Trains the two trainers of a case, on two forked ranks."""

import contextlib
import copy
import io
import logging
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars, load_from_disk
from transformers import Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqMixin
from tests.differential.case import base_of
from tests.differential.runs import begin_anew
from tests.hf import objectives
from tests.hf.drawn_settings import sources
from tests.hf.drawn_settings.case import CHANGES
from tests.hf.drawn_settings.options import ON_SAMPLES
from tests.hf.drawn_settings.verdicts import Judged, Outcome, Verdict, of_both, of_refusal
from tests.hf.plain import float64_loss
from tests.hf.trainers import trainer_of, weights_of, word_tokenizer, zero
from tests.ranks import run_ranks

RANKS = 2
GROUP_SECONDS = 30  # that a rank waits for the other one
CASE_SECONDS = 120
OTHER_RANK = "OtherRank"
UNSHARDED = ("renamed", "biased", "lora")  # which from_pretrained of a class does not make

TRAINERS = {
    "trainer": (Trainer, TrainingArguments),
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "sequences": (Trainer, TrainingArguments),
    "tokens": (Trainer, TrainingArguments),
}


# ---- the trainers of a case


def make_trainer(case, is_ours, folder):
    """Return the trainer of a case, stock or with hf_flexseq."""
    changes = [CHANGES[name] for name in case.changes]
    stock, config = TRAINERS[case.trainer]
    arguments = {"data_collator": None, **_arguments(case, folder)}
    if not is_ours and case.trainer == "trainer":
        # stock computes its loss in the model's dtype, as hf_flexseq does
        base_of(arguments["model"]).loss_function = float64_loss
    for change in changes:
        if change.model is not None:
            change.model(arguments["model"])
        arguments |= change.arguments or {}
    bases = [change.methods for change in changes if change.methods is not None]
    if is_ours and case.way == "subclass":
        bases.append(FlexSeqMixin)
    settings = copy.deepcopy(case.settings)
    settings["batch"] = settings.pop("per_device_train_batch_size")
    settings["accumulation"] = settings.pop("gradient_accumulation_steps")
    if config is not TrainingArguments:
        defaults = {"gradient_checkpointing": False, "bf16": False, "max_length": None}
        settings = {**defaults, **settings}
    if case.trainer == "sft" and case.data == "table":
        settings["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if case.sharding == "zero3":
        settings["deepspeed"] = zero(3)
    trainer = trainer_of(
        type("DrawnTrainer", (*bases, stock), {}),
        folder,
        config=config,
        flexseq=case.ours if is_ours and case.way != "callback" else None,
        **settings,
        **arguments,
    )
    for change in changes:
        if change.trainer is not None:
            change.trainer(trainer)
    if is_ours and case.way == "callback":
        options = FlexSeqArguments(cost_model="estimate", **case.ours)
        trainer.add_callback(FlexSeqCallback(trainer, options))
    return trainer


def _arguments(case, folder):
    """Return the arguments of a case's trainer: model, datasets, collator or tokenizer."""
    dtype = getattr(torch, case.dtype)
    if case.trainer in ON_SAMPLES:
        return _of_objective(case, dtype, folder)
    arguments = {"model": sources.MODELS[case.model][0](dtype)}
    if case.sharding == "fsdp2" and case.model not in UNSHARDED:
        arguments["model"] = _sharded_at_load(arguments["model"], folder / "whole_model")
    if case.trainer == "trainer":
        # The rest of a stream is trained on in another way, so that none ends.
        rows = sources.training_rows(104 if case.data in sources.STREAMS else 26)
        collator = sources.COLLATORS[case.collator][0]
        return arguments | {
            "train_dataset": sources.DATASETS[case.data][0](rows),
            "eval_dataset": sources.evaluation_rows(case.collator),
            "data_collator": collator,
        }
    if case.data == "texts":
        train, evaluated = (sources.prompts_and_completions(n, even=n == 8) for n in (26, 8))
    else:
        train, evaluated = map(
            Dataset.from_list, (sources.training_rows(26), sources.evaluation_rows())
        )
    data = {"train_dataset": train, "eval_dataset": evaluated}
    return arguments | data | {"processing_class": word_tokenizer()}


def _sharded_at_load(model, folder):
    """Return a model as transformers shards it. Collective over the world."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=RANKS)
    return type(model).from_pretrained(folder, distributed_config=config, dtype=model.dtype)


def _of_objective(case, dtype, folder):
    """Return the arguments of a trainer whose loss is computed on samples. Collective."""
    like = objectives.Case(kind=case.trainer, dtype=dtype, rows=20)
    _, _, arguments = objectives.ARGUMENTS[case.trainer](like, folder, None)
    arguments["eval_dataset"] = arguments["eval_dataset"].select(range(6))
    if case.settings.get("precompute_ref_log_probs"):
        # on disk, for ranks to find what one of them computes of these
        for name in ("train_dataset", "eval_dataset"):
            if dist.get_rank() == 0:
                arguments[name].save_to_disk(folder / name)
            dist.barrier()
            arguments[name] = load_from_disk(folder / name)
    in_parts = {"eval_use_gather_object", "batch_eval_metrics", "eval_do_concat_batches"}
    if in_parts & case.settings.keys():
        arguments.pop("compute_metrics", None)  # of classes, which takes whole arrays
    return arguments


# ---- one training on one rank


def outcome_of(case, is_ours, folder):
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
    state = trainer.state
    outcome.step = state.global_step
    if outcome.error:
        return outcome
    try:
        outcome.weights = weights_of(trainer.model)
    except RuntimeError as error:  # the other rank has raised, and does not gather its shards
        outcome.error, outcome.message = OTHER_RANK, str(error)
    outcome.log = state.log_history
    if not trainer.is_world_process_zero():  # with even_batches=False ranks count epochs alone
        outcome.log = [{**line, "epoch": 0} for line in outcome.log]
    outcome.state = {name: getattr(state, name) for name in ("global_step", "best_global_step")}
    outcome.state["checkpoints"] = sorted(path.name for path in folder.glob("checkpoint-*"))
    outcome.state["tokens seen by floating_point_ops"] = getattr(state, "seen", None)
    return outcome


@contextlib.contextmanager
def _as_a_process_of_its_own():
    """Hide from a training what the one before has left in the process."""
    begin_anew(5)
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _warnings_of_ours(found):
    """Collect the warnings of hf_flexseq."""
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("hf_flexseq")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# ---- both on two ranks


def _judge_here(rank, world_size, case, folder, stock_only):
    """Return this rank's verdict. stock_only: whether stock comes to its end."""
    disable_progress_bars()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ours = Outcome() if stock_only else _run_one(case, True, folder, rank)
        if ours.error:
            return of_refusal(ours)
        stock = _run_one(case, False, folder, rank)
        if stock.error:
            detail = f"{stock.error}: {stock.message} [{stock.where}]"
            return Judged(verdict=Verdict.STOCK_FAILS, detail=detail)
        return Judged(verdict=Verdict.EQUAL) if stock_only else of_both(case, stock, ours)


def _run_one(case, is_ours, folder, rank):
    """Train, and wait for the other rank; raise TimeoutError if it does not come. An error of any
    rank is one of this rank, too."""
    outcome = outcome_of(case, is_ours, folder / str(is_ours))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{is_ours}-{rank}", outcome.error or "fine")
    both = [f"{is_ours}-{other}" for other in range(RANKS)]
    store.wait(both, timedelta(seconds=2 * GROUP_SECONDS))
    if not outcome.error and any(store.get(other) != b"fine" for other in both):
        outcome.error = OTHER_RANK
        outcome.message = "this rank came to the end, the other one raised"
    return outcome


def judge(case, *, stock_only=False):
    """Return the verdict of a case, the worse one of both ranks."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_ranks(
                _judge_here,
                RANKS,
                *(case, Path(folder), stock_only),
                seconds=CASE_SECONDS,
                group_seconds=GROUP_SECONDS,
            )
        except AssertionError as died:
            found = [Judged(verdict=Verdict.HANGS, detail=str(died)[-2000:])]
    # An error of one rank alone counts by what it is, not by what the other made of it.
    told = [one for one in found if OTHER_RANK not in one.detail] or found
    # A rank that waits inside the user's loss meanwhile is ended by what has launched both.
    if any(one.verdict is Verdict.REFUSED for one in told):
        told = [one for one in told if "LostRank: " not in one.detail]
    # Rank 0 alone logs what all ranks differ by.
    if any(one.verdict is Verdict.LOGGED for one in found):
        told = [one for one in told if one.verdict is not Verdict.SILENT]
    judged = max(told, key=lambda one: list(Verdict).index(one.verdict))
    if judged.verdict in (Verdict.CRASHED, Verdict.HANGS) and not stock_only:
        # ours may fail where the stock trainer does
        stock = judge(case, stock_only=True)
        if stock.verdict is not Verdict.EQUAL:
            return Judged(verdict=Verdict.STOCK_FAILS, detail=stock.detail)
    return judged
