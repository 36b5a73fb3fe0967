"""Sequences that fit on no single rank are split; one that fits nowhere stops the run before any
compute."""

import pytest
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_flexseq import (
    DataCollatorForFlexSeq,
    FlexSeqArguments,
    FlexSeqConfig,
    FlexSeqEngine,
    FlexSeqTrainer,
    PlanInfeasible,
)
from tests.hf.test_trainer import training_arguments
from tests.hf.tiny import documents, noting_figures, tiny_llama
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


class CountForwards(TrainerCallback):
    def __init__(self, model):
        self.calls = 0
        model.register_forward_pre_hook(lambda *_: setattr(self, "calls", self.calls + 1))


class Stream(IterableDataset):
    """Examples whose lengths nobody knows before they are drawn."""

    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


def train_on_outlier(rank, world_size, folder, longest, cap, streamed=False):
    """What was raised, and how often the model had run by then."""
    examples = documents([longest, 3] * 10)
    model = tiny_llama()
    counter = CountForwards(model)
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=1,
        accumulation=1,
        max_tokens_per_rank=cap,
        max_steps=5,
        cost_model="estimate",
        train_sampling_strategy="sequential",
    )
    data = Stream(examples) if streamed else examples
    trainer = FlexSeqTrainer(model=model, args=args, train_dataset=data)
    steps = noting_figures(trainer)
    try:
        trainer.train()
    except PlanInfeasible as error:
        return str(error), counter.calls
    return steps[0], counter.calls


def test_an_outlier_is_split_and_one_that_fits_nowhere_is_refused_before_any_compute(tmp_path):
    """Refused before training, or of a stream at its step."""
    cases = [(tmp_path, 101, 51), (tmp_path, 103, 51), (tmp_path, 103, 51, True)]
    split, *refused = run_cases(train_on_outlier, 2, cases)
    for first, calls in split:
        assert first["groups_of_2"] >= 1
        assert calls >= 5
    for message, calls in [of_rank for by_rank in refused for of_rank in by_rank]:
        assert calls == 0
        for part in ("103 tokens", "max_tokens_per_rank=51", "raise max_tokens_per_rank to 52"):
            assert part in message.lower()


def kill_the_planner(rank, world_size):
    engine = FlexSeqEngine(
        Accelerator(cpu=True),
        FlexSeqArguments(lookahead=1, max_tokens_per_rank=64, cost_model="flexsp-gpt-7b-a100"),
    )
    engine.attach(tiny_llama())
    batches = iter([DataCollatorForFlexSeq()(documents([5, 9])) for _ in range(20)])
    engine.next_step(batches, 1)
    if rank == 0:
        engine._training._planner._process.kill()
        engine._training._planner._process.wait()
    with pytest.raises(RuntimeError, match="planning process ended with code") as raised:
        list(iter(lambda: engine.next_step(batches, 1), None))
    engine.detach()
    return str(raised.value)


def test_a_dead_planner_raises_on_all_ranks():
    messages = run_ranks(kill_the_planner, 3)
    assert messages[0] == messages[1] == messages[2]
