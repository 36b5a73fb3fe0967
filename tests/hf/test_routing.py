"""`routing` under the engine and the Trainer: bytes take other NICs, no bit changes, results are
those of one process, and a log line says why, or why not."""

import logging
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_flexseq import (
    DataCollatorForFlexSeq,
    FlexSeqArguments,
    FlexSeqConfig,
    FlexSeqEngine,
    FlexSeqTrainer,
)
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.topology import Topology
from tests.hf.test_trainer import (
    dataset,
    float64_loss,
    logged,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.ranks import run_ranks
from tests.routed import routed_exchanges

pytestmark = pytest.mark.processes


TWO_NODES = Topology(nodes=2, ranks_per_node=2)
# Tensors are small here: only a slow and prompt network makes routing them pay.
SLOW = replace(PRESETS["llama-3.1-8b-a800"], bandwidths=((2, 1e12), (16, 1e3)), transfer_s=0.0)


LENGTHS = [61, 40, 9, 1]  # of the documents of a batch, and each rank has one


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run_step(rank, world_size, folder, routing, cost, strategy):
    """Gradients of one step, exchanges that were routed, and what was logged about it."""
    logger, handler = logging.getLogger("hf_flexseq"), Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    path = folder / f"{rank}.json"
    # On other ranks than 0 another model: it is rank 0's that counts.
    (cost if rank == 0 else replace(cost, nics_per_node=1)).save(path)
    args = FlexSeqArguments(
        planner="static",
        sp_degree=4,
        strategy=strategy,
        routing=routing,
        cost_model=str(path),
        max_tokens_per_rank=200,
    )
    accelerator = Accelerator(cpu=True)
    engine = FlexSeqEngine(accelerator, args, communicator=Communicator(TWO_NODES))
    model = tiny_llama()
    with routed_exchanges() as routed, engine.attached(model):
        loader = DataLoader(
            documents(LENGTHS * world_size),
            batch_size=4,
            collate_fn=DataCollatorForFlexSeq(),
        )
        step = next(engine.steps(accelerator.prepare(loader)))
        step.backward(model)
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return gradients, len(routed), [line for line in handler.lines if line.startswith("routing")]


def same_bits(a, b):
    return all(
        (of_a[0][name] == of_b[0][name]).all()
        for of_a, of_b in zip(a, b, strict=True)
        for name in of_a[0]
    )


def mean_gradients(by_rank):
    """What DDP would make of the ranks' gradients."""
    return {
        name: sum(torch.from_numpy(gradients[name]) for gradients, _, _ in by_rank) / len(by_rank)
        for name in by_rank[0][0]
    }


@pytest.mark.parametrize("strategy", ["zigzag", "balanced"])
def test_it_is_used_logged_and_changes_no_bit(tmp_path, strategy):
    on, off = (
        run_ranks(run_step, 4, tmp_path, routing, SLOW, strategy) for routing in ("auto", "off")
    )
    assert same_bits(on, off)
    _, wanted = reference_gradients(tiny_llama(), documents(LENGTHS * 4))
    assert max(relative_errors(mean_gradients(on), wanted).values()) < 1e-10
    assert len({count for _, count, _ in on}) == 1
    assert on[0][1] > 0
    assert [(count, lines) for _, count, lines in off] == [(0, [])] * 4
    for _, _, (line,) in on:
        assert line.startswith("routing ")
        assert "exchanges between nodes: they take" in line


@pytest.mark.parametrize(
    "change, strategy, reason",
    [
        ({"nics_per_node": 1}, "zigzag", "routing off: the ranks of a node share one NIC"),
        ({"bandwidths": ((2, 1e3), (16, 1e3))}, "zigzag", "not more than twice"),
        ({"bandwidths": ((2, 1e12), (16, 1e9)), "transfer_s": 1.0}, "zigzag", "routing 0 of"),
        ({}, "ulysses", "routing nothing: no ring and no remapping crosses nodes"),
    ],
)
def test_it_says_why_not(tmp_path, change, strategy, reason):
    found = run_ranks(run_step, 4, tmp_path, "auto", replace(SLOW, **change), strategy)
    for _, count, (line,) in found:
        assert count == 0
        assert reason in line


def train(rank, world_size, folder):
    """Weights, log, and exchanges that were routed, of three steps of the trainer."""
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=2,
        accumulation=1,
        optim="sgd",
        max_steps=3,
        planner="static",
        sp_degree=world_size,
        strategy="zigzag",
        cost_model=str(folder / "cost.json"),
        max_tokens_per_rank=200,
        lookahead=0,
    )
    model = tiny_llama()
    with routed_exchanges() as routed:
        trainer = FlexSeqTrainer(model=model, args=args, train_dataset=dataset())
        trainer.train()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return weights, trainer.state.log_history, len(routed)


def test_a_trainer_whose_rings_are_routed_equals_the_plain_one(tmp_path):
    SLOW.save(tmp_path / "cost.json")
    before, wanted, history = plain_run(tmp_path, batch=8, loss=float64_loss, max_steps=3)
    for found, log, routed in run_ranks(train, 4, tmp_path, ranks_per_node=2, seconds=120):
        assert routed > 0
        assert update_error(before, wanted, found) < 1e-8
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-8)
