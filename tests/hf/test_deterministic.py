"""`deterministic=True` under the Trainer: attention of fixed bits in every layer, and a log line
with its price."""

import dataclasses
import logging

import pytest
import torch

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.program.deterministic import DeterministicZone
from tests.hf.test_trainer import OPTIONS, dataset, training_arguments
from tests.hf.tiny import tiny_llama


def losses_of_run(folder, **options):
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=1,
        **OPTIONS | {"max_tokens_per_rank": 100} | options,
    )
    trainer = FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=dataset())
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.processes
def test_a_trainer_attends_so_and_says_what_it_costs(tmp_path, caplog, monkeypatch):
    attended, forward = [], DeterministicZone.forward

    def counted(zone, *args):
        attended.append(zone)
        return forward(zone, *args)

    monkeypatch.setattr(DeterministicZone, "forward", counted)
    usual = losses_of_run(tmp_path)
    assert not attended
    with caplog.at_level(logging.WARNING, logger="hf_flexseq"):
        found = losses_of_run(tmp_path, deterministic=True)
    assert attended
    assert "deterministic=True: attention of 53 tokens on one rank takes" in caplog.text
    assert "(the longest sequence of the first step has 53)" in caplog.text
    assert torch.allclose(found, usual, rtol=1e-10)


@pytest.mark.processes
def test_a_kernel_whose_backward_does_not_repeat_itself_is_refused(tmp_path, monkeypatch):
    class AnyOrder(CpuFlash):
        guarantees = dataclasses.replace(CpuFlash.guarantees, repeatable_keys=0)

    monkeypatch.setitem(CANDIDATES, "cpu", (AnyOrder(),))
    losses_of_run(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match=r"call torch\.use_deterministic_algorithms\(True\)"):
        losses_of_run(tmp_path, max_steps=1, deterministic=True)
