"""`deterministic=True` under the Trainer: attention of fixed bits in every layer, and a log line
with its price."""

import logging

import pytest
import torch

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.attention.deterministic import DeterministicZone
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
    assert "deterministic=True: attention of 1,024 tokens on one rank takes" in caplog.text
    assert torch.allclose(found, usual, rtol=1e-10)
