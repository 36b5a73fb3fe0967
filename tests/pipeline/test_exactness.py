"""Pipelined steps give the loss and gradients of one process: float64, random cuts, packing,
checkpointing, split weight gradients, on 2, 3 and 4 stages, on ranks that have several stages, and
on stages of 2 ranks that share every chunk. And they never hang."""

import copy
import functools
import random

import pytest
import torch

from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.ulysses import Sharing
from hf_flexseq.steps.token_columns import INDICES
from hf_flexseq.steps.token_columns import LENGTHS as LENGTHS_OF_TOKENS
from tests.budget import others_nightly
from tests.device import DEVICE, own_kernel
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.matching import Launches
from tests.pipeline.plans import random_pipeline_plan
from tests.ranks import join, run_threads

LENGTHS = [1, 2, 17, 5, 31, 3, 40, 11]
LAYERS = 4
CASES = {
    "uneven chunks": {},
    "checkpointing": {"checkpointing": True},
    "split weight gradients": {"split_weights": True},
    "both": {"checkpointing": True, "split_weights": True},
}


def targets_of(examples):
    return sum(label != -100 for example in examples for label in example["labels"][1:])


TARGETS = targets_of(documents(LENGTHS))


def columns_of(plan, examples, further=()):
    """Each chunk's tensors, as every stage gets them. further: what `needed_columns` says."""
    shifted = [[*e["labels"][1:], -100] for e in examples]
    values = {
        "input_ids": lambda p: examples[p.sequence]["input_ids"][p.start : p.stop],
        "labels": lambda p: shifted[p.sequence][p.start : p.stop],
        "position_ids": lambda p: range(p.start, p.stop),
        LENGTHS_OF_TOKENS: lambda p: [plan.lengths[p.sequence]] * p.tokens,
        INDICES: lambda p: range(p.start, p.stop),
    }

    def column(chunk, name):
        of_parts = [x for part in chunk.slices for x in values[name](part)]
        return torch.tensor([of_parts], device=DEVICE)

    names = ("input_ids", "labels", "position_ids", *further)
    return [{name: column(chunk, name) for name in names} for chunk in plan.chunks]


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
    return PipelineExecutor(stage, neighbours, own_kernel(torch.float64, 9), sharing=sharing)


# ---- a step, and its errors


def gradients_of(executor):
    """A copy of this stage's gradients, by the names of the whole model; those that are shared
    are gathered."""
    trained = ((n, p) for n, p in executor.stage.global_parameters() if p.requires_grad)
    return {name: whole(p.grad).clone() for name, p in trained}


def largest_error(found, wanted):
    """Of the gradients `found` on a stage, against those of the whole model."""
    own = {name: wanted[name] for name in found}
    return max(relative_errors(found, own, floor_of=wanted).values())


def loss_error(loss, wanted, communicator):
    communicator.all_reduce(loss)
    return abs(float(loss) - wanted)


def step_errors(
    communicator, executor, plan, wanted_loss, wanted, *, lengths=LENGTHS, evaluates=True
):
    """The largest error of this stage's gradients after a step, and that of the losses, of which
    evaluation has one. The model has no gradients afterwards."""
    examples = documents(lengths)
    model = executor.stage.stack.model
    columns = columns_of(plan, examples, needed_columns(model))
    targets = targets_of(examples)
    losses = [executor.train(plan, columns, targets)]
    reduce_gradients(executor.stage, executor.neighbours)
    found = gradients_of(executor)
    model.zero_grad()
    if evaluates:
        losses.append(executor.evaluate(plan, columns, targets))
    of_losses = [loss_error(loss, wanted_loss, communicator) for loss in losses]
    return largest_error(found, wanted), max(of_losses)


# whether the embedding is also the head, and which case; not all combinations
COMBINED = (
    (False, "uneven chunks"),
    (False, "both"),
    (True, "checkpointing"),
    (True, "split weight gradients"),
)


# By the number of ranks that share them: query heads that do not fall evenly on the 3 key heads of
# ranks, and fewer than ranks, of which one has none.
HEADS = {2: 6, 4: 3}


@functools.cache
def model_and_gradients(layers, tied, query_heads=None):
    """A model, which nobody may change, and its loss and gradients on one process."""
    heads = {}
    if query_heads is not None:
        heads = {"num_attention_heads": query_heads, "num_key_value_heads": 3, "hidden_size": 36}
    model = tiny_llama(num_hidden_layers=layers, tie_word_embeddings=tied, **heads).to(DEVICE)
    return model, *reference_gradients(copy.deepcopy(model), documents(LENGTHS))


def errors_by_case(rank, world_size, degree, virtual):
    """`step_errors` for each kind of model and case."""
    stages = world_size // degree
    layers = LAYERS if virtual == 1 else 6
    communicator = join()
    errors = {}
    for tied, case in COMBINED:
        query_heads = HEADS.get(degree) if virtual == 1 else None
        model, *wanted = model_and_gradients(layers, tied, query_heads)
        executor = make_executor(copy.deepcopy(model), stages, degree, communicator, virtual)
        assert len(executor.stage.virtual) == virtual
        rng = random.Random(f"{stages} {virtual} {tied} {case}")
        options = {"virtual": virtual, "layers": layers, **CASES[case]}
        plan = random_pipeline_plan(LENGTHS, stages, rng, **options)
        evaluates = case == "uneven chunks"  # the others say how a backward is done
        errors[case] = step_errors(communicator, executor, plan, *wanted, evaluates=evaluates)
    return errors


@pytest.mark.on_device
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "degree", "virtual"),
    [
        (3, 1, 1),
        (4, 2, 1),
        (8, 4, 1),
        (2, 1, 3),
        (4, 2, 2),
        pytest.param(2, 1, 1, marks=pytest.mark.nightly),
        pytest.param(4, 1, 1, marks=pytest.mark.nightly),
        pytest.param(2, 1, 2, marks=pytest.mark.nightly),
        pytest.param(3, 1, 2, marks=pytest.mark.nightly),
    ],
)
def test_gradients_equal_one_process(world_size, degree, virtual):
    """On threads; on processes the plans of `test_trainer.py` run."""
    for errors in run_threads(errors_by_case, world_size, degree, virtual, seconds=120):
        assert errors.keys() == CASES.keys()
        for case, (of_gradients, of_loss) in errors.items():
            assert of_gradients < 1e-10, case
            assert of_loss < 1e-12, case


# ---- ranks of several stages never hang: gradients flow in a circle

RING = (2, 4)  # ranks, and stages of each


def steps(rank, world_size, virtual, plans):
    """Steps of random plans. Where a send waits for a receive that is posted only when it is
    needed, two ranks of four stages each hang."""
    model = tiny_llama(num_hidden_layers=8, hidden_size=16, intermediate_size=16).to(DEVICE)
    executor = make_executor(model, world_size, 1, join(), virtual)
    for seed in range(plans):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(3, 20))]
        plan = random_pipeline_plan(lengths, world_size, rng, virtual=virtual, split_weights=True)
        columns = columns_of(plan, documents(lengths))
        executor.train(plan, columns, TARGETS)
        executor.evaluate(plan, columns, TARGETS)
    return plans


@pytest.mark.on_device
@pytest.mark.slow
@pytest.mark.parametrize(
    "launches",
    # by lane the steps above are carried out, too
    others_nightly(Launches, tried=[Launches.BY_TAG, Launches.ONE_QUEUE]),
)
def test_steps_never_hang_however_posts_are_carried_out(launches):
    found = run_threads(steps, *RING, 2, launches=launches, seed=0)
    assert found == [2] * RING[0]
