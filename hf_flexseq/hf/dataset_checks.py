"""What a dataset must hold: examples, each with tokens and labels and with room on the ranks.

`check_labels` is called when a trainer is made, `check_examples` before it trains: both leave
alone what would have to be read as a whole, or is made at random. `check_first_step` looks at the
first step that is drawn. All ranks have the same datasets and draw the same steps, so they raise
together.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.utils import is_datasets_available

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.steps.collator import LENGTHS, DataCollatorForFlexSeq
from hf_flexseq.steps.rank_step import RankStep
from hf_flexseq.steps.whole_batches import random_numbers_kept

logger = logging.getLogger(__name__)

# Over-long examples that are collated, at most: padding or a collator may make each one shorter.
COLLATED = 8

# Rows of a table that are looked at for each example of a dataset that selects some of them.
MOST_OF_TABLE = 10


def check_labels(trainer: Trainer, collator: DataCollatorForFlexSeq) -> None:
    """Raise ValueError when examples have no labels and no collator is there to make them.

    collator: the one that the trainer will have.
    """
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
    """Raise ValueError for datasets without examples or tokens, and PlanInfeasible for an example
    that fits nowhere, where this can be known before training.

    resumes: whether the run goes on from a checkpoint, and draws what was left.
    """
    training = trainer.train_dataset
    draws_from_it = type(trainer).get_train_dataloader is Trainer.get_train_dataloader
    if draws_from_it and _is_map_style(training) and len(training) == 0:
        raise ValueError(
            "train_dataset is empty: it has 0 examples; look at what filtered them out"
        )
    for name, dataset in _datasets(trainer):
        if dataset is training:
            is_read = not resumes and _draws_all(trainer)
        else:
            is_read = trainer.args.eval_strategy != "no"
        if not is_read:
            continue
        lengths = _token_counts(dataset)
        if lengths is not None and len(lengths):
            if trainer.data_collator.example_collator is None:  # one may add tokens
                _check_tokens(name, lengths)
            _check_room(name, dataset, lengths, trainer, args, _collated_tokens)


def check_sides(trainer: Trainer, args: FlexSeqArguments) -> None:
    """Raise PlanInfeasible for an example of which a sequence fits nowhere, where a loss compares
    sequences, and where this can be known before training."""
    for name, dataset in _datasets(trainer):
        longest = _longest_sides(dataset)
        if longest is not None and len(longest):
            _check_room(name, dataset, longest, trainer, args, _longest_row)


def check_first_step(step: RankStep[Any] | None) -> None:
    """Raise ValueError when a training run has no first step; warn when that step holds nothing to
    learn, which in a run of small steps may be as it should.

    step: the same one on all ranks; None when no rank has drawn an example.
    """
    if step is None:
        raise ValueError(
            "train_dataset gave no example to any rank: it is empty, or all of it was filtered out"
        )
    if step.targets == 0:
        logger.warning(
            "the first step has nothing to learn: all labels of its %d sequences are -100 (a "
            "sequence's first token is never predicted); if that is so in all steps, look at how "
            "labels are masked",
            len(step.plan.lengths),
        )


# ---- the datasets of a trainer


def _datasets(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the trainer's datasets with their names in messages."""
    yield "train_dataset", trainer.train_dataset
    evaluation = trainer.eval_dataset
    if not isinstance(evaluation, dict):
        yield "eval_dataset", evaluation
        return
    for name, dataset in evaluation.items():
        yield f"eval_dataset[{name!r}]", dataset


def _draws_all(trainer: Trainer) -> bool:
    """Tell if a run surely draws every example of its training dataset."""
    args = trainer.args
    cls = type(trainer)
    # A sampler of the user may leave examples out.
    if cls.get_train_dataloader is not Trainer.get_train_dataloader:
        return False
    if cls._get_train_sampler is not Trainer._get_train_sampler:
        return False
    if args.max_steps <= 0:
        return bool(args.num_train_epochs >= 1)
    if not _is_map_style(trainer.train_dataset):
        return False
    drawn = args.max_steps * trainer.get_total_train_batch_size(args)
    return bool(drawn >= len(trainer.train_dataset))


def _is_map_style(dataset: Any) -> bool:
    """Tell if examples have indices, and are counted."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _columns(dataset: Any) -> set[str] | None:
    """Return the columns of a dataset, from its first example; of a stream, which is left alone,
    only if it knows them. None where they are not known."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        names = getattr(dataset, "column_names", None)
        return set(names) if names else None
    if not _is_map_style(dataset) or not len(dataset):
        return None
    first = _example(dataset, 0)
    return set(first) if isinstance(first, Mapping) else None


def _example(dataset: Any, index: int) -> Any:
    """Return an example. It may be made at random: the run does not notice."""
    with random_numbers_kept():
        return dataset[index]


def draws_random_numbers(trainer: Trainer, dataloader: Any) -> str | None:
    """Return which of the dataset and the collator draws from random numbers that training draws
    from, too; None for neither, and where the dataset cannot be looked at.

    dataloader: what the trainer draws from. Its workers have random numbers of their own.
    """
    dataset = trainer.train_dataset
    if getattr(dataloader, "num_workers", 0) or not _is_map_style(dataset) or not len(dataset):
        return None
    with Attempt(), random_numbers_kept():  # an error comes again when examples are drawn
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
    """Return [examples] the length of each example's `column`, padding included; None where
    finding them would read every example."""
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
    # With indices of its own a dataset is a selection of its table, which can be far larger.
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


# Columns that stand one behind the other in a sequence, as TRL's trainers leave a dataset.
_SIDES = (
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
    ("prompt_ids", "completion_ids"),
    ("chosen_ids",),
    ("rejected_ids",),
)


def _longest_sides(dataset: Any) -> np.ndarray | None:
    """Return [examples] the tokens of the longest sequence of each example that has several; None
    where finding them would read every example."""
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
    name: str,
    dataset: Any,
    lengths: np.ndarray,
    trainer: Trainer,
    args: FlexSeqArguments,
    tokens_of: Callable[[Mapping[str, Any], Trainer], int],
) -> None:
    """Raise PlanInfeasible for an example that does not fit on the ranks that may share it.

    lengths: [examples]. tokens_of: those of an example, after the collator.
    """
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
        tokens = tokens_of(_example(dataset, index), trainer)
        if tokens > cap * ranks:
            raise PlanInfeasible(
                f"{name}[{index}] has {tokens:,} tokens, above the {ranks} x {cap:,} of "
                f"max_tokens_per_rank={cap} on {ranks} rank(s): raise max_tokens_per_rank to "
                f"{-(-tokens // ranks)}, use more ranks, or shorten or split the example"
            )


def _collated_tokens(example: Mapping[str, Any], trainer: Trainer) -> int:
    """Return the tokens of an example without its padding, and as a collator may have cut it."""
    columns = _read_columns(example, trainer)
    with random_numbers_kept():
        tokens: int = trainer.data_collator([columns])[LENGTHS][0]
    return tokens


def _read_columns(example: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the columns of an example that the Trainer gives to its collator."""
    columns = dict(example)
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        columns = {name: columns[name] for name in columns if name in trainer._signature_columns}
    return columns


def _longest_row(example: Mapping[str, Any], trainer: Trainer) -> int:
    """Return the tokens of the longest sequence that the trainer's collator makes of an
    example."""
    with random_numbers_kept():
        batch = trainer.data_collator([dict(example)])
    masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
    return max(int(mask.sum(dim=1).max()) for mask in masks)
