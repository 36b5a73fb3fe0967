"""Whatever draws the samples, an optimizer step holds those that the plain Trainer would have
used."""

import copy
import math
import multiprocessing
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqEngine
from hf_flexseq.hf.engine.loaders import without_repeats
from tests.budget import others_nightly
from tests.hf.plain import Stream, flexseq_trainer, float64_loss, logged
from tests.hf.test_mixin import tokenizer
from tests.hf.tiny import documents, reference_loss, tiny_arguments, tiny_llama, weights
from tests.hf.trainers import trainer_of, update_error
from tests.ranks import run_cases, run_ranks

LENGTHS = [1 + (i * i * 7) % 30 for i in range(21)]

CASES = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "workers": {"dataloader_num_workers": 1},
    "drop_last": {"dataloader_drop_last": True},
    "reduced in every micro-batch": {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    },
    "stream": {},
}


class Examples(list):
    """A dataset that also answers for a column, as the length-aware samplers ask."""

    def __getitem__(self, key):
        return LENGTHS if key == "length" else super().__getitem__(key)


def train(rank, world_size, folder, case, planned):
    model = tiny_llama()
    before = weights(model)
    common = {
        "batch": 2,
        "accumulation": 2,
        "optim": "sgd",
        "max_steps": 4,  # into the second epoch
        "include_num_input_tokens_seen": "non_padding",
        **copy.deepcopy(CASES[case]),  # transformers writes to it
    }
    common["train_dataset"] = Examples(documents(LENGTHS))
    if case == "stream":  # whole steps: the plain Trainer adds what is left to the next step
        common["train_dataset"] = Stream(documents(LENGTHS[:16]))
    if planned:
        # "non_padding" counts tokens with the tokenizer's id of padding, 0, in the documents
        trainer = flexseq_trainer(folder, model=model, processing_class=tokenizer(), **common)
    else:
        if case == "stream":
            common["accelerator_config"] = {"dispatch_batches": False}  # ours does so by itself
        model.loss_function = float64_loss
        trainer = trainer_of(Trainer, folder, model=model, **common)
    trainer.train()
    assert not multiprocessing.active_children(), "workers of a loader outlive the training"
    return before, weights(model), logged(trainer.state.log_history, "num_input_tokens_seen")


# Reductions in every micro-batch are compared in tests/hf/test_sharding.py, too.
SELDOM = ("reduced in every micro-batch",)
OFTEN = tuple(case for case in CASES if case not in SELDOM)


@pytest.mark.processes
@pytest.mark.parametrize("names", others_nightly([OFTEN, SELDOM], tried=[OFTEN]))
def test_same_weights_as_the_plain_trainer_on_two_ranks(tmp_path, names):
    cases = [(tmp_path, case, planned) for case in names for planned in (False, True)]
    results = run_cases(train, 2, cases, seconds=300)
    for case, plain, ours in zip(names, results[::2], results[1::2], strict=True):
        before, wanted, seen = plain[0]
        for _, found, found_seen in ours:
            assert update_error(before, wanted, found) < 1e-8, case
            assert found_seen == seen, case


def drawn_lengths(rank, world_size, folder):
    """Lengths of all sequences of one epoch when no sample is repeated, the steps that the run
    took, and how far the losses of a list and of a stream are from those of one process."""
    trainer = flexseq_trainer(
        folder,
        train_dataset=documents(LENGTHS[:9]),
        per_device_eval_batch_size=2,
        accelerator_config={"even_batches": False},
        num_train_epochs=1,
        max_steps=-1,
    )
    seen = []
    finish = trainer.flexseq.finish
    trainer.flexseq.finish = lambda step: (seen.extend(step.plan.lengths), finish(step))[1]
    trainer.train()
    held_out = documents(LENGTHS[:7])
    losses = [trainer.evaluate(data)["eval_loss"] for data in (held_out, Stream(held_out))]
    trainer.model.set_attn_implementation("sdpa")
    wanted = float(reference_loss(trainer.model, held_out))
    return sorted(seen), trainer.state.global_step, [abs(loss / wanted - 1) for loss in losses]


@pytest.mark.processes
def test_without_even_batches_every_sample_is_used_once(tmp_path):
    """9 samples in batches of 2 on 3 ranks: in the last step one rank draws one sample and one
    draws nothing; of 7 samples to evaluate on two draw nothing in the end."""
    for seen, steps, apart in run_ranks(drawn_lengths, 3, tmp_path, seconds=120):
        assert seen == sorted(LENGTHS[:9])
        assert steps == 2
        assert max(apart) < 1e-10


# ---- batches on the host

# Batches stay there until their tokens are where the plan wants them, whenever accelerate has
# prepared their loader. Loaders are told to put batches on the device `meta`, where data is lost:
# a run in which a batch went there could not compute a loss.
SHORT = [5, 9, 3, 7]
META = torch.device("meta")


def loader(accelerator):
    plain = DataLoader(documents(SHORT), batch_size=2, collate_fn=DataCollatorForFlexSeq())
    return leaving_for_meta(accelerator.prepare(plain))


def leaving_for_meta(prepared):
    assert prepared.device is not None
    prepared.device = META
    return prepared


@pytest.mark.parametrize("is_first", [True, False])
def test_a_loop_draws_from_the_host_whether_the_loader_or_the_model_was_first(is_first):
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    dataloader = loader(accelerator) if is_first else None
    engine = FlexSeqEngine(accelerator, tiny_arguments())
    with engine.attached(model):
        dataloader = dataloader or loader(accelerator)
        losses = [float(step.backward(model)) for step in engine.steps(dataloader)]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert dataloader.device == META


class Drawing(IterableDataset):
    """10 random numbers, by a generator that accelerate seeds in every epoch."""

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.rand(10, generator=self.generator).tolist())


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_without_repeats_is_seeded_and_dropped_as_in_accelerate(drop_last):
    drawn = {True: [], False: []}
    for repeats in drawn:
        for process in range(2):
            of_process = {"num_processes": 2, "process_index": process, "batch_size": 2}
            shard = IterableDatasetShard(Drawing(), drop_last=drop_last, **of_process)
            loader = DataLoader(shard, batch_size=2)
            shard.set_epoch(3)
            with nullcontext() if repeats else without_repeats(loader):
                list(loader)  # which advances the generator
                drawn[repeats].append([value for batch in loader for value in batch.tolist()])
    first, second = drawn[True]
    # the last round has two samples: the first process has them, the second one repeats
    assert drawn[False] == [first, second if drop_last else second[:4]]
    assert len(first) == (4 if drop_last else 6)
