"""Batches stay on the host until their tokens are where the plan wants them, whenever accelerate
has prepared their loader.

Loaders are told to put batches on the device `meta`, where data is lost: a run in which a batch
went there could not compute a loss.
"""

import math

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqEngine, FlexSeqTrainer
from hf_flexseq.hf.loaders import batches_on_host
from tests.hf.test_trainer import flexseq_trainer
from tests.hf.tiny import documents, tiny_arguments, tiny_llama

LENGTHS = [5, 9, 3, 7]
META = torch.device("meta")


def loader(accelerator):
    plain = DataLoader(documents(LENGTHS), batch_size=2, collate_fn=DataCollatorForFlexSeq())
    return leaving_for_meta(accelerator.prepare(plain))


def leaving_for_meta(prepared):
    assert prepared.device is not None
    prepared.device = META
    return prepared


def test_a_loader_that_is_not_told_does_lose_its_batches():
    (first, *_) = loader(Accelerator(cpu=True))
    assert first["input_ids"].device == META


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


class TrainerOfMeta(FlexSeqTrainer):
    """A Trainer whose loaders put batches on `meta`."""

    def get_train_dataloader(self):
        self.loader = leaving_for_meta(super().get_train_dataloader())
        return self.loader

    def get_eval_dataloader(self, eval_dataset=None):
        self.eval_loader = leaving_for_meta(super().get_eval_dataloader(eval_dataset))
        return self.eval_loader


def test_a_trainer_trains_resumes_and_evaluates_from_the_host(tmp_path):
    data = documents(LENGTHS * 4)

    def trainer():
        return flexseq_trainer(
            tmp_path,
            kind=TrainerOfMeta,
            data=data,
            given={"eval_dataset": data[:3]},
            lookahead=0,
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
        )

    first = trainer()
    assert math.isfinite(first.evaluate()["eval_loss"])
    assert math.isfinite(first.train().training_loss)
    assert math.isfinite(first.evaluate()["eval_loss"])
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for done in (first, again):
        assert done.loader.device == META
    assert first.eval_loader.device == META


def test_an_error_while_drawing_gives_the_loader_its_device_back():
    dataloader = loader(Accelerator(cpu=True))
    error = RuntimeError("while drawing")
    with pytest.raises(RuntimeError, match="while drawing"), batches_on_host(dataloader):
        raise error
    assert dataloader.device == META


def test_other_loaders_are_left_as_they_are():
    for other in ([1, 2], DataLoader([1, 2])):
        with batches_on_host(other):
            assert len(list(other)) == 2
        assert not hasattr(other, "device")
