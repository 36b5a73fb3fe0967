"""The evaluation loss is the mean over the target tokens of the whole set: for any batch size,
world size, loader."""

import pytest
import torch
from torch.utils.data import IterableDataset

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.tiny import documents, reference_loss, tiny_llama
from tests.ranks import run_cases

pytestmark = pytest.mark.processes


LENGTHS = [3, 50, 1, 17, 8, 30, 2, 61, 5, 12, 44]


class Stream(IterableDataset):
    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


def config(folder, batch, **options):
    return FlexSeqConfig(
        output_dir=str(folder),
        per_device_eval_batch_size=batch,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        **{"max_tokens_per_rank": 40, "cost_model": "estimate", **options},
    )


def evaluate(rank, world_size, folder, batch, options, stream):
    examples = documents(LENGTHS)
    trainer = FlexSeqTrainer(
        model=tiny_llama(),
        args=config(folder, batch, **options),
        train_dataset=examples,
        eval_dataset=Stream(examples) if stream else examples,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.model.set_attn_implementation("sdpa")
    assert torch.nn.Module.state_dict(trainer.model)  # the model is whole, and still a plain one
    with torch.no_grad():
        return before, after, float(reference_loss(trainer.model, examples))


# By number of ranks: batch size, options, whether the data are a stream.
CASES = {
    1: [(2, {"max_tokens_per_rank": 61}, False)],
    2: [(1, {}, False), (4, {}, False), (2, {}, True)],
    3: [
        (2, {"accelerator_config": {"even_batches": False}}, False),
        (3, {"dataloader_num_workers": 1}, False),
        (4, {}, True),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_evaluation_loss_is_the_token_mean(tmp_path, world_size):
    with torch.no_grad():
        wanted = float(reference_loss(tiny_llama(), documents(LENGTHS)))
    cases = [(tmp_path, *case) for case in CASES[world_size]]
    for by_rank in run_cases(evaluate, world_size, cases, seconds=120):
        for before, after, reference in by_rank:
            assert before == pytest.approx(wanted, rel=1e-10)
            assert after == pytest.approx(reference, rel=1e-10)
            assert after != pytest.approx(before, rel=1e-4)


def evaluate_then_train(rank, world_size, folder, first, bf16):
    model = tiny_llama(torch.float32 if bf16 else torch.float64)
    trainer = FlexSeqTrainer(
        model=model,
        args=config(folder, 2, bf16=bf16),
        train_dataset=documents(LENGTHS),
        eval_dataset=documents(LENGTHS),
    )
    if first:
        trainer.evaluate()
    trainer.train()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_evaluating_first_does_not_change_training(tmp_path):
    cases = [(tmp_path, first, bf16) for bf16 in (False, True) for first in (True, False)]
    results = run_cases(evaluate_then_train, 2, cases, seconds=120)
    for with_evaluation, without in (results[:2], results[2:]):
        for name, wanted in without[0].items():
            for found in (*with_evaluation, without[1]):
                assert (found[name] == wanted).all(), name
