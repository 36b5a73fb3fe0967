"""Whatever draws the samples, an optimizer step holds those that the plain Trainer would have
used."""

import multiprocessing

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf.loaders import LongestLoader
from tests.hf.test_mixin import tokenizer
from tests.hf.test_trainer import (
    OPTIONS,
    float64_loss,
    logged,
    padded,
    training_arguments,
    update_error,
)
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import join, run_ranks, run_threads

pytestmark = pytest.mark.processes


LENGTHS = [1 + (i * i * 7) % 60 for i in range(26)]

CASES = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "sequential": {"train_sampling_strategy": "sequential"},
    "workers": {"dataloader_num_workers": 2},
    "drop_last": {"dataloader_drop_last": True},
    "reduced in every micro-batch": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    },
    "stream": {},
}


class Stream(IterableDataset):
    """24 samples are whole steps; what is left at the end of a stream the plain Trainer adds to
    the next step."""

    def __iter__(self):
        return iter(documents(LENGTHS[:24]))


class Examples(list):
    """A dataset that also answers for a column, as the length-aware samplers ask."""

    def __getitem__(self, key):
        return LENGTHS if key == "length" else super().__getitem__(key)


def train(rank, world_size, folder, case, planned):
    model = tiny_llama()
    before = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    common = {
        "batch": 2,
        "accumulation": 3,
        "optim": "sgd",
        "max_steps": 4,  # into the second epoch
        "include_num_input_tokens_seen": "non_padding",
        **CASES[case],
    }
    data = Stream() if case == "stream" else Examples(documents(LENGTHS))
    if planned:
        args = training_arguments(FlexSeqConfig, folder, **common, **OPTIONS)
        # "non_padding" counts tokens with the tokenizer's id of padding, 0, in the documents
        trainer = FlexSeqTrainer(
            model=model, args=args, train_dataset=data, processing_class=tokenizer()
        )
    else:
        if case == "stream":
            common["accelerator_config"] = {"dispatch_batches": False}  # ours does so by itself
        model.loss_function = float64_loss
        args = training_arguments(TrainingArguments, folder, **common)
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=padded)
    trainer.train()
    assert not multiprocessing.active_children(), "workers of a loader outlive the training"
    after = {n: p.detach().numpy() for n, p in model.named_parameters()}
    return before, after, trainer.state.log_history


def train_cases(rank, world_size, folder, planned):
    """What `train` returns, by case."""
    return {case: train(rank, world_size, folder, case, planned) for case in CASES}


def test_same_weights_as_the_plain_trainer_on_two_ranks(tmp_path):
    plain = run_ranks(train_cases, 2, tmp_path, False, seconds=150)[0]
    ours = run_ranks(train_cases, 2, tmp_path, True, seconds=150)
    for case, (before, wanted, history) in plain.items():
        before, wanted = ({n: torch.as_tensor(p) for n, p in x.items()} for x in (before, wanted))
        for by_case in ours:
            _, found, log = by_case[case]
            assert update_error(before, wanted, found) < 1e-8, case
            seen = "num_input_tokens_seen"
            assert logged(log, seen) == logged(history, seen), case


def drawn_lengths(rank, world_size, folder):
    """Lengths of all sequences of one epoch when no sample is repeated, and the steps that the run
    took."""
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=1,
        accelerator_config={"even_batches": False},
        num_train_epochs=1,
        **OPTIONS,
    )
    args.max_steps = -1
    trainer = FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=documents(LENGTHS[:21]))
    seen = []
    finish = trainer.flexseq.finish
    trainer.flexseq.finish = lambda step: (seen.extend(step.plan.lengths), finish(step))[1]
    trainer.train()
    return sorted(seen), trainer.state.global_step


def test_without_even_batches_every_sample_is_used_once(tmp_path):
    """21 samples in batches of 2 on 3 ranks: in the last step one rank draws one sample and one
    draws nothing."""
    for seen, steps in run_ranks(drawn_lengths, 3, tmp_path, seconds=120):
        assert seen == sorted(LENGTHS[:21])
        assert steps == 4


def reported_length(rank, world_size, loaders):
    loader = LongestLoader.over(loaders[rank], join())
    return len(loader) if hasattr(loader, "__len__") else None


def test_a_stream_on_one_rank_leaves_no_rank_waiting():
    assert run_threads(reported_length, 2, [[1, 2], [1, 2, 3]]) == [3, 3]
    assert run_threads(reported_length, 2, [[1, 2], iter([1, 2, 3])]) == [2, None]


# ---- a chain of loaders


class Chain:
    """Two loaders, one after the other, as users write it: without `set_epoch`."""

    def __init__(self, loaders):
        self.loaders = loaders

    def __len__(self):
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self):
        for loader in self.loaders:
            yield from loader


class Chained:
    """A trainer that draws from a chain."""

    def get_train_dataloader(self):
        return Chain([super().get_train_dataloader(), super().get_train_dataloader()])


class ChainedTrainer(Chained, Trainer):
    pass


class ChainedFlexSeqTrainer(Chained, FlexSeqTrainer):
    pass


def drawn_from_a_chain(rank, world_size, folder, cls, config, options):
    """The samples, by their numbers, in the order in which a trainer drew them: 3 epochs of 2 x 6
    batches."""
    drawn = []

    def noted(examples):
        drawn.extend(example["number"] for example in examples)
        return padded(examples)

    noted.__module__ = "transformers"  # a collator of one's own is tried on batches
    args = training_arguments(
        config, folder, batch=2, accumulation=2, remove_unused_columns=False, **options
    )
    args.max_steps, args.num_train_epochs = -1, 3
    examples = documents([3 + i % 4 for i in range(12)])
    data = [example | {"number": number} for number, example in enumerate(examples)]
    cls(model=tiny_llama(), args=args, train_dataset=data, data_collator=noted).train()
    return drawn


def test_a_chain_of_loaders_draws_the_plain_trainers_order_with_lookahead(tmp_path):
    plain = (ChainedTrainer, TrainingArguments, {})
    planned = (ChainedFlexSeqTrainer, FlexSeqConfig, OPTIONS | {"lookahead": 4})
    (wanted,) = run_ranks(drawn_from_a_chain, 1, tmp_path, *plain, seconds=120)
    (found,) = run_ranks(drawn_from_a_chain, 1, tmp_path, *planned, seconds=120)
    assert len(wanted) == 3 * 2 * 12
    assert found[1:] == wanted, "the first call tried if the collator is random"
