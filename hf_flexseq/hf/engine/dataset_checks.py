"""Checks of datasets: every example needs tokens and labels and must fit on the ranks.

`check_labels` runs when a trainer is made, `check_examples` before it trains; both skip datasets
that they would have to read completely and random ones. `check_first_step` checks the first drawn
step. All ranks have the same datasets and draw the same steps, so they raise together.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sized
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.utils import is_datasets_available

from hf_flexseq.base.refusals import together
from hf_flexseq.base.values import listed
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.engine.sum_trial import users_code_of
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.loss_kinds import is_objective
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.steps.calls import READ, ModelCall
from hf_flexseq.steps.collator import LENGTHS, DataCollatorForFlexSeq
from hf_flexseq.steps.known_columns import dropped_columns
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.users_code import is_known, package
from hf_flexseq.steps.virtual_tokens import NUMBERS as VIRTUAL_NUMBERS
from hf_flexseq.steps.whole_batches import random_numbers_kept

logger = logging.getLogger(__name__)

# Most over-long examples to collate: padding or a collator may shorten each.
COLLATED = 8

# Most examples to read of an evaluation dataset that is no table; its evaluation reads them, too.
MOST_READ = 2000

# Most table rows to read per example of a dataset with an index selection.
MOST_OF_TABLE = 10


def check_labels(trainer: Trainer, collator: DataCollatorForFlexSeq) -> None:
    """Raise ValueError if examples have no labels and `collator` does not make them."""
    if collator.example_collator is not None:
        return
    for name, dataset in _datasets(trainer):
        columns = _columns(dataset)
        if columns is not None and "labels" not in columns:
            raise ValueError(
                f"{name} has the columns {sorted(columns)} but no labels: give `labels` (for "
                "plain language modelling a copy of input_ids), or a data_collator that makes them"
            )


def check_examples(trainer: Trainer, args: FlexSeqArguments, *, resumes: bool) -> None:
    """Raise ValueError for datasets without examples or tokens, and PlanInfeasible for an example,
    or a side of a pair, that does not fit, if known before training. resumes: True if the run
    draws only the rest."""
    training = trainer.train_dataset
    draws_from_it = _is_stock(trainer, "get_train_dataloader")
    if draws_from_it and _is_map_style(training) and len(training) == 0:
        raise ValueError("train_dataset is empty (0 examples): check the filters of the dataset")
    # A run without evaluations is followed by one.
    (_, training), *evaluated = _datasets(trainer)
    checks = [partial(check_rows, *named, trainer, args, reads=True) for named in evaluated]
    if _longest_sides(training) is not None or (not resumes and _draws_all(trainer)):
        checks.append(partial(check_rows, "train_dataset", training, trainer, args))
    together(*checks)


def check_rows(
    name: str, dataset: Any, trainer: Trainer, args: FlexSeqArguments, *, reads: bool = False
) -> None:
    """Raise for examples or pairs of one dataset as `check_examples` does. reads: True if examples
    may be read for their lengths."""
    lengths = _longest_sides(dataset) if is_objective(trainer) else None
    if lengths is None:
        lengths = _token_counts(dataset)
    reads = reads and lengths is None and _is_map_style(dataset) and len(dataset) <= MOST_READ
    if reads and "input_ids" in (_columns(dataset) or ()):
        with random_numbers_kept(dataset):
            rows = [{"input_ids": dataset[at]["input_ids"]} for at in range(len(dataset))]
        lengths = _token_counts(rows)
    if lengths is None or not len(lengths):
        return
    own = getattr(trainer.data_collator, "example_collator", trainer.data_collator)
    if not is_objective(trainer) and own is None:  # one may add tokens
        _check_tokens(name, lengths)
    _check_room(name, dataset, lengths, trainer, args)


def check_first_step(step: RankStep[Any] | None, trainer: Trainer) -> None:
    """Raise ValueError without a first step; warn of columns that nothing reads. step: the same on
    all ranks; None if no rank has drawn an example."""
    if step is None:
        raise ValueError(
            "no rank drew an example: train_dataset is empty, or all of it was filtered out"
        )
    model = base_model(trainer.model)
    names = step.row.columns.keys() - {"input_ids", "labels", "position_ids", VIRTUAL_NUMBERS}
    unread = sorted(names - inspect.signature(type(model).forward).parameters.keys())
    is_library = is_known(getattr(model, "loss_function", model))
    if unread and is_library and not users_code_of(trainer.model):
        logger.warning(
            "nothing reads %s of the examples: %s.forward has no such argument; drop it, or read "
            "it in a compute_loss",
            listed(unread),
            type(model).__name__,
        )


def dropped_in(trainer: Trainer) -> Iterator[str]:
    """Yield a line for each dataset whose first example has columns that say something of its
    tokens and that the Trainer, or a library's collator, drops."""
    own = getattr(trainer.data_collator, "example_collator", None)
    for name, dataset in _datasets(trainer):
        if not _is_map_style(dataset) or not len(dataset):
            continue
        dropped: list[str] = []
        # An error is raised again when the example is drawn.
        with suppress(Exception), random_numbers_kept(dataset):
            example = dict(dataset[0])
            made = _read_columns(example, trainer)
            if own is not None and is_known(own):
                made = own([dict(made)])
            dropped = dropped_columns(example, made)
        if dropped:
            yield (
                f"{listed(dropped)} of {name} is dropped before the model, as without hf_flexseq: "
                f"by remove_unused_columns={trainer.args.remove_unused_columns}, or by the "
                "data_collator"
            )


def dealt_otherwise(trainer: Trainer) -> Iterator[str]:
    """Yield a line on a stream in shards, of which steps have other samples than under the plain
    Trainer unless it is told to let every rank draw."""
    stream = trainer.train_dataset
    ranks = trainer.args.world_size
    dispatches = trainer.args.accelerator_config.dispatch_batches
    if package(stream) != "datasets" or ranks == 1 or dispatches is not None:
        return
    shards = getattr(stream, "n_shards", 0)  # of streams alone
    if shards >= ranks:
        yield (
            f"train_dataset is a stream of {shards} shards, of which each rank reads its own, as "
            "under the plain Trainer with dispatch_batches=False in accelerator_config; without "
            "it the plain Trainer's rank 0 reads all shards in their order, and steps have other "
            "samples"
        )


# ---- the datasets of a trainer


def _datasets(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the trainer's datasets with their names for messages."""
    yield "train_dataset", trainer.train_dataset
    evaluation = trainer.eval_dataset
    if not isinstance(evaluation, dict):
        yield "eval_dataset", evaluation
        return
    for name, dataset in evaluation.items():
        yield f"eval_dataset[{name!r}]", dataset


def _draws_all(trainer: Trainer) -> bool:
    """Return True if a run is known to draw every example of its training dataset."""
    args = trainer.args
    # A user's sampler may skip examples.
    methods = ("get_train_dataloader", "_get_train_sampler")
    if not all(_is_stock(trainer, name) for name in methods):
        return False
    if args.max_steps <= 0:
        return bool(args.num_train_epochs >= 1)
    if not _is_map_style(trainer.train_dataset):
        return False
    drawn = args.max_steps * trainer.get_total_train_batch_size(args)
    return bool(drawn >= len(trainer.train_dataset))


def _is_stock(trainer: Trainer, name: str) -> bool:
    """Tell if no class but hf_flexseq's overrides a method of `Trainer`."""
    classes = (cls for cls in type(trainer).__mro__ if package(cls) != "hf_flexseq")
    return next(cls for cls in classes if name in vars(cls)) is Trainer


def _is_map_style(dataset: Any) -> bool:
    """Return True if the dataset has indices and a length."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _columns(dataset: Any) -> set[str] | None:
    """Return the columns of a dataset, declared or from its first example; None if unknown."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        names = getattr(dataset, "column_names", None)
        return set(names) if names else None
    if not _is_map_style(dataset) or not len(dataset):
        return None
    first = _example(dataset, 0)
    return set(first) if isinstance(first, Mapping) else None


def _example(dataset: Any, index: int) -> Any:
    """Return an example without advancing the run's random number generators."""
    with random_numbers_kept(dataset):
        return dataset[index]


def draws_random_numbers(trainer: Trainer, dataloader: Any) -> str | None:
    """Return whether the dataset or the collator uses training's random number generators; None
    for neither, and if unknown. dataloader: the trainer's; its workers have their own
    generators."""
    dataset = trainer.train_dataset
    if getattr(dataloader, "num_workers", 0) or not _is_map_style(dataset) or not len(dataset):
        return None
    # An error is raised again when examples are drawn.
    with suppress(Exception), random_numbers_kept((dataset, trainer.data_collator)):
        before = torch.get_rng_state()
        example = dataset[0]
        if not torch.equal(before, torch.get_rng_state()):
            return "train_dataset"
        trainer.data_collator([_read_columns(example, trainer)])
        if not torch.equal(before, torch.get_rng_state()):
            return "data_collator"
    return None


# ---- lengths


def _token_counts(dataset: Any, column: str = "input_ids") -> np.ndarray | None:
    """Return the padded lengths [examples] of `column`; None if this would read every example."""
    if isinstance(dataset, list | tuple):
        if not all(isinstance(example, Mapping) and column in example for example in dataset):
            return None
        if not all(isinstance(example[column], Sized) for example in dataset):
            return None
        return np.array([len(example[column]) for example in dataset])
    if not is_datasets_available():
        return None
    from datasets import Dataset

    is_table = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    if not is_table or column not in dataset.column_names:
        return None
    # A dataset with indices is a selection from its table, which can be far larger.
    if len(dataset.data) > MOST_OF_TABLE * len(dataset):
        return None
    import pyarrow.compute
    import pyarrow.types as kinds

    values = dataset.data.column(column)
    if not (kinds.is_list(values.type) or kinds.is_large_list(values.type)) or values.null_count:
        return None
    lengths: np.ndarray = pyarrow.compute.list_value_length(values).to_numpy()
    if dataset._indices is not None:
        lengths = lengths[dataset._indices.column(0).to_numpy()]
    return lengths


# Columns that are concatenated to a sequence, in the datasets of TRL's trainers.
_SIDES = (
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
    ("prompt_ids", "completion_ids"),
    ("chosen_ids",),
    ("rejected_ids",),
)


def _longest_sides(dataset: Any) -> np.ndarray | None:
    """Return [examples] the longest sequence of each example; None if this would read all."""
    longest = None
    for columns in _SIDES:
        counts = []
        for column in columns:
            count = _token_counts(dataset, column)
            if count is not None:
                counts.append(count)
        if len(counts) < len(columns):
            continue
        side = np.sum(counts, axis=0)  # [examples]
        longest = side if longest is None else np.maximum(longest, side)
    return longest


def _check_tokens(name: str, lengths: np.ndarray) -> None:
    """Raise ValueError for an example without tokens. lengths: [examples]."""
    empty = np.flatnonzero(lengths == 0)  # indices
    if len(empty):
        raise ValueError(
            f"{name}[{empty[0]}] has no tokens ({len(empty):,} of {len(lengths):,} examples have "
            "none): filter empty examples out of the dataset"
        )


def _check_room(
    name: str, dataset: Any, lengths: np.ndarray, trainer: Trainer, args: FlexSeqArguments
) -> None:
    """Raise PlanInfeasible for an example that does not fit on the ranks that may share it.
    lengths: [examples]."""
    cap = args.max_tokens_per_rank
    if cap is None or args.pipeline_parallel_size > 1:
        return  # only the cost model knows
    ranks = trainer.args.world_size
    if args.strategy == "local":
        ranks = 1
    elif args.sp_degree is not None:
        ranks = args.sp_degree
    longest_first = np.argsort(-lengths, kind="stable")[:COLLATED]
    for index in longest_first.tolist():
        if lengths[index] <= cap * ranks:
            return
        tokens = _collated_tokens(_example(dataset, index), trainer)
        if tokens > cap * ranks:
            raise PlanInfeasible(
                f"{name}[{index}] has {tokens:,} tokens, above the {ranks} x {cap:,} of "
                f"max_tokens_per_rank={cap} on {ranks} rank(s): raise max_tokens_per_rank to "
                f"{-(-tokens // ranks)}, use more ranks, or shorten or split the example"
            )


def _collated_tokens(example: Mapping[str, Any], trainer: Trainer) -> int:
    """Return the tokens of an example's longest sequence after collation, without padding."""
    columns = _read_columns(example, trainer)
    is_planned = isinstance(trainer.data_collator, DataCollatorForFlexSeq)
    if is_planned and trainer.data_collator.example_collator is None:
        columns.setdefault("labels", columns["input_ids"])  # which predict() needs none of
    with random_numbers_kept(trainer.data_collator):
        batch = trainer.data_collator([columns])
    if is_planned:
        return max(batch[LENGTHS])
    if "position_ids" in batch:
        return max(
            ModelCall.read({name: batch.get(name) for name in READ}, of_tokens=False).lengths
        )
    masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
    return max((int(mask.sum(dim=1).max()) for mask in masks), default=0)  # 0 where none is known


def _read_columns(example: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the columns of an example that the Trainer passes to its collator."""
    columns = dict(example)
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = {name: columns[name] for name in columns if name in trainer._signature_columns}
    return columns
