"""Sequences that fit on no single rank are split; one that fits nowhere stops the run before any
compute."""

import pytest
from accelerate import Accelerator
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine, PlanInfeasible
from tests.hf.tiny import documents, noting_figures, tiny_llama
from tests.hf.trainers import trainer_of
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


class Stream(IterableDataset):
    """Examples whose lengths are unknown until they are drawn."""

    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


def train_on_outlier(rank, world_size, folder, longest, streamed=False):
    """The figures of the first step, and how often the model had run by then."""
    data, calls, model = documents([longest, 3] * 10), [], tiny_llama()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    settings = {"batch": 1, "max_steps": 3, "train_sampling_strategy": "sequential"}
    settings["train_dataset"] = Stream(data) if streamed else data
    options = {"max_tokens_per_rank": 51}
    trainer = trainer_of(Trainer, folder, flexseq=options, model=model, **settings)
    steps = noting_figures(trainer)
    if longest <= 2 * 51:
        trainer.train()
        return steps[0], len(calls)
    said = "103 tokens.*max_tokens_per_rank=51.*raise max_tokens_per_rank to 52"
    with pytest.raises(PlanInfeasible, match=f"(?i){said}"):
        trainer.train()
    return None, len(calls)


def test_an_outlier_is_split_and_one_that_fits_nowhere_is_refused_before_any_compute(tmp_path):
    """Refused before training, or of a stream at its step."""
    cases = [(tmp_path, 101), (tmp_path, 103), (tmp_path, 103, True)]
    split, *refused = run_cases(train_on_outlier, 2, cases)
    for first, calls in split:
        assert first["groups_of_2"] >= 1
        assert calls >= 3
    assert refused == [[(None, 0)] * 2] * 2


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
