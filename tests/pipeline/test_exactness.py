"""Pipelined steps give the loss and gradients of one process: float64, random cuts, packing,
checkpointing, split weight gradients, on 2, 3 and 4 stages, and on 2 stages of 2 ranks that share
every chunk."""

import copy
import functools
import random

import pytest
import torch

from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.ulysses import Sharing
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.ranks import join, run_ranks, run_threads

LENGTHS = [1, 2, 17, 5, 31, 3, 40, 11]
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
            "input_ids": column(
                chunk, lambda p: examples[p.sequence]["input_ids"][p.start : p.stop]
            ),
            "labels": column(chunk, lambda p: shifted[p.sequence][p.start : p.stop]),
            "position_ids": column(chunk, lambda p: range(p.start, p.stop)),
        }
        for chunk in plan.chunks
    ]


def make_executor(model, stages, degree, communicator, virtual=1):
    """`degree` ranks share the chunks of each stage, of which each has `virtual`."""
    model.set_attn_implementation(NAME)
    model.train()
    index, place = divmod(communicator.rank, degree)
    stage = cut(model, index, stages, virtual=virtual)
    if stage.is_last:
        attach_chunked_loss(model)
    pipelines = [[s * degree + i for s in range(stages)] for i in range(degree)]
    neighbours = Neighbours(communicator, pipelines, ring=virtual > 1)
    ranks = tuple(range(index * degree, (index + 1) * degree))
    sharing = Sharing(communicator, ranks, place) if degree > 1 else None
    return PipelineExecutor(stage, neighbours, CpuFlash(), sharing=sharing)


@functools.cache
def model_and_gradients(layers, tied, uneven_heads=False):
    """A model, which nobody may change, and its loss and gradients on one process."""
    heads = {}
    if uneven_heads:
        heads = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = tiny_llama(num_hidden_layers=layers, tie_word_embeddings=tied, **heads)
    return model, *reference_gradients(copy.deepcopy(model), documents(LENGTHS))


def errors_by_case(rank, world_size, degree):
    """For each kind of model and case: the largest error of this stage's gradients, and that of
    the loss."""
    stages = world_size // degree
    examples = documents(LENGTHS)
    communicator = join()
    errors = {}
    for tied in (False, True):
        # With a degree of 2 a rank's heads do not fall evenly on key heads.
        model, wanted_loss, wanted = model_and_gradients(LAYERS, tied, uneven_heads=degree > 1)
        model = copy.deepcopy(model)
        executor = make_executor(model, stages, degree, communicator)
        for name, options in CASES.items():
            rng = random.Random(f"{stages} {tied} {name}")
            plan = random_pipeline_plan(LENGTHS, stages, rng, layers=LAYERS, **options)
            columns = columns_of(plan, examples)
            losses = [executor.train(plan, columns, TARGETS)]
            reduce_gradients(executor.stage, executor.neighbours)
            found = {name: p.grad.clone() for name, p in executor.stage.global_parameters()}
            model.zero_grad()
            if not options:  # they say how a backward is done
                losses.append(executor.evaluate(plan, columns, TARGETS))
            here = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
            errors[tied, name] = (
                max(here.values()),
                max(loss_error(loss, wanted_loss, communicator) for loss in losses),
            )
    return errors


def loss_error(loss, wanted, communicator):
    communicator.all_reduce(loss)
    return abs(float(loss) - wanted)


@pytest.mark.parametrize(
    ("start", "world_size", "degree"),
    [
        (run_threads, 2, 1),
        pytest.param(run_threads, 3, 1, marks=pytest.mark.slow),
        pytest.param(run_threads, 4, 1, marks=pytest.mark.slow),
        pytest.param(run_threads, 4, 2, marks=pytest.mark.slow),
        pytest.param(run_ranks, 4, 2, marks=[pytest.mark.processes, pytest.mark.nightly]),
    ],
)
def test_gradients_equal_one_process(start, world_size, degree):
    for errors in start(errors_by_case, world_size, degree):
        assert len(errors) == 2 * len(CASES)
        for case, (of_gradients, of_loss) in errors.items():
            assert of_gradients < 1e-10, case
            assert of_loss < 1e-12, case
