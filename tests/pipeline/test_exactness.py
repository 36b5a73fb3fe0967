"""Pipelined steps give the loss and gradients of one process: float64, random cuts, packing, checkpointing, split
weight gradients, on 2, 3 and 4 stages, and on 2 stages of 2 ranks that share every chunk."""

import copy
import random

import pytest
import torch

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.neighbours import Neighbours
from hf_flexseq.hf.loss import attach_chunked_loss
from hf_flexseq.hf.pipeline_attention import NAME
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.reduction import sum_gradients
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.ulysses import Sharing
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.ranks import run_ranks

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]
LAYERS = 4
CASES = {
    "uneven chunks": {},
    "checkpointing": {"checkpointing": True},
    "split weight gradients": {"split_weights": True},
    "both": {"checkpointing": True, "split_weights": True},
}
TARGETS = sum(label != -100 for e in documents(LENGTHS) for label in e["labels"][1:])


def columns_of(plan, examples):
    """Each chunk's tensors, as every stage gets them."""

    def column(chunk, make):
        return torch.tensor([[x for part in chunk.slices for x in make(part)]])

    shifted = [[*e["labels"][1:], -100] for e in examples]
    return [
        {
            "input_ids": column(chunk, lambda p: examples[p.sequence]["input_ids"][p.start : p.stop]),
            "labels": column(chunk, lambda p: shifted[p.sequence][p.start : p.stop]),
            "position_ids": column(chunk, lambda p: range(p.start, p.stop)),
        }
        for chunk in plan.chunks
    ]


def make_executor(model, stages, degree, communicator):
    """`degree` ranks share the chunks of each stage."""
    model.set_attn_implementation(NAME)
    model.train()
    index, place = divmod(communicator.rank, degree)
    stage = cut(model, index, stages)
    if stage.is_last:
        attach_chunked_loss(model)
    neighbours = Neighbours(communicator, [[s * degree + i for s in range(stages)] for i in range(degree)])
    ranks = tuple(range(index * degree, (index + 1) * degree))
    sharing = Sharing(communicator, ranks, place) if degree > 1 else None
    return PipelineExecutor(stage, neighbours, CpuFlash(), sharing=sharing)


def worst_errors(rank, world_size, degree, plans):
    """For each kind of model and case: the largest errors of this stage's gradients, and the losses."""
    stages = world_size // degree
    examples = documents(LENGTHS)
    communicator = Communicator()
    worst = {}
    for tied in (False, True):
        # With a degree of 2 a rank's heads do not fall evenly on key heads.
        heads = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3} if degree > 1 else {}
        model = tiny_llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied, **heads)
        wanted_loss, wanted = reference_gradients(copy.deepcopy(model), examples)
        executor = make_executor(model, stages, degree, communicator)
        for name, options in CASES.items():
            for seed in range(plans):
                rng = random.Random(f"{stages} {seed}")
                plan = random_pipeline_plan(LENGTHS, stages, rng, layers=LAYERS, **options)
                columns = columns_of(plan, examples)
                loss = executor.train(plan, columns, TARGETS)
                sum_gradients(executor.stage, executor.neighbours)
                found = {name: p.grad.clone() for name, p in executor.stage.global_parameters()}
                model.zero_grad()
                here = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
                again = executor.evaluate(plan, columns, TARGETS)
                torch.distributed.all_reduce(loss)
                torch.distributed.all_reduce(again)
                off = max(abs(float(loss) - wanted_loss), abs(float(again) - wanted_loss))
                case = worst.setdefault((tied, name), {"gradients": 0.0, "loss": 0.0})
                case["gradients"] = max(case["gradients"], *here.values())
                case["loss"] = max(case["loss"], off)
    return worst


@pytest.mark.parametrize(("world_size", "degree"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_gradients_equal_one_process(world_size, degree):
    for worst in run_ranks(worst_errors, world_size, degree, 2):
        assert len(worst) == 2 * len(CASES)
        for case, errors in worst.items():
            assert errors["gradients"] < 1e-10, case
            assert errors["loss"] < 1e-12, case
