"""The evaluation loss is the mean over the target tokens of the whole set: for any batch size,
world size, loader."""

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.hf.test_trainer import flexseq_trainer
from tests.hf.tiny import documents, reference_loss, tiny_llama, weights
from tests.ranks import run_cases

pytestmark = pytest.mark.processes


LENGTHS = [3, 50, 1, 17, 8, 30, 2, 61, 5, 12, 44]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(documents(LENGTHS))


def evaluating_trainer(folder, batch, held_out, model=None, **options):
    return flexseq_trainer(
        folder,
        model=model,
        data=documents(LENGTHS),
        given={"eval_dataset": held_out},
        per_device_eval_batch_size=batch,
        max_steps=2,
        **options,
    )


def evaluate(rank, world_size, folder, batch, options, stream):
    examples = documents(LENGTHS)
    trainer = evaluating_trainer(folder, batch, Stream() if stream else examples, **options)
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
    2: [(4, {}, False), (2, {}, True)],
    3: [
        (2, {"accelerator_config": {"even_batches": False}}, False),
        (1, {"dataloader_num_workers": 1}, False),
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
    trainer = evaluating_trainer(folder, 2, documents(LENGTHS), model, bf16=bf16)
    if first:
        trainer.evaluate()
    trainer.train()
    return weights(model)


def test_evaluating_first_does_not_change_training(tmp_path):
    cases = [(tmp_path, first, bf16) for bf16 in (False, True) for first in (True, False)]
    results = run_cases(evaluate_then_train, 2, cases, seconds=120)
    for with_evaluation, without in (results[:2], results[2:]):
        for name, wanted in without[0].items():
            for found in (*with_evaluation, without[1]):
                assert (found[name] == wanted).all(), name
