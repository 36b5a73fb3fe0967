"""Two stages of two ranks that share their stage's parameters by FSDP2 and run different numbers
of chunks."""

import copy
import random
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from hf_flexseq.cost.stages import PipelineCost, StageCost
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.reduction import equalise, gradient_norm, reduce_gradients
from hf_flexseq.pipeline.sharding import ShardedStage, whole
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.planner.pipeline import make_pipeline_plan
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import CASES, LAYERS, LENGTHS, TARGETS, columns_of, loss_error
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


STAGES = 2
MEMBERS = {
    "both work": ((0, 1, 2, 4, 5, 6), (3, 7)),
    "one has nothing": (tuple(range(len(LENGTHS))), ()),
}


def plan_of(lengths, rng, options):
    if lengths:
        return random_pipeline_plan(lengths, STAGES, rng, layers=LAYERS, **options)
    stage = StageCost(linear_ns=1.0, attention_ns=0.0, chunk_ns=0.0)
    return make_pipeline_plan(lengths, PipelineCost.even(STAGES, stage))


def errors_by_case(rank, world_size):
    """For each kind of model, case and deal: the largest error of this stage's gradients, of their
    norm, and of the loss; and whether parameters are sharded again afterwards."""
    index, replica = divmod(rank, 2)
    examples = documents(LENGTHS)
    communicator = Communicator()
    errors = {}
    for tied in (False, True):
        model = tiny_llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
        wanted_loss, wanted = reference_gradients(copy.deepcopy(model), examples)
        executor, sharded = sharded_executor(model, index, communicator)
        for deal, members in MEMBERS.items():
            for case, options in CASES.items():
                rng = random.Random(f"{tied} {deal} {case} {replica}")
                ids = members[replica]
                plan = plan_of([LENGTHS[i] for i in ids], rng, options)
                columns = columns_of(plan, [examples[i] for i in ids])
                with few_in_a_bucket() as reductions, sharded.training():
                    losses = [executor.train(plan, columns, TARGETS)]
                parameters = len(list(model.parameters()))
                assert 2 < reductions.call_count < parameters / 2
                reduce_gradients(executor.stage, executor.neighbours)
                with sharded.whole():
                    losses.append(executor.evaluate(plan, columns, TARGETS))
                found = {name: whole(p.grad) for name, p in executor.stage.global_parameters()}
                norm = float(gradient_norm(executor.stage, communicator, counts=True))
                model.zero_grad()
                here = relative_errors(
                    found, {name: wanted[name] for name in found}, floor_of=wanted
                )
                norm_wanted = torch.nn.utils.get_total_norm(wanted.values())
                errors[tied, deal, case] = (
                    max(here.values()),
                    abs(norm / float(norm_wanted) - 1),
                    max(loss_error(loss, wanted_loss, communicator) for loss in losses),
                    held(model) / sum(p.numel() for p in model.parameters()),
                )
    return errors


@contextmanager
def few_in_a_bucket():
    """Gradients are reduced several at a time, but not all at once; yields the calls."""
    reduce = torch.distributed.reduce_scatter_tensor
    counted = mock.patch.object(torch.distributed, "reduce_scatter_tensor", side_effect=reduce)
    with mock.patch("hf_flexseq.distributed.reduction.BUCKET_BYTES", 40_000), counted as calls:
        yield calls


def held(model):
    return sum(p.to_local().numel() for p in model.parameters())


def sharded_executor(model, index, communicator, **options):
    model.set_attn_implementation(NAME)
    stage = cut(model.train(), index, STAGES)
    if stage.is_last:
        attach_chunked_loss(model)
    neighbours = Neighbours(communicator, [[0, 2], [1, 3]])
    equalise(stage, neighbours)
    sharded = ShardedStage(stage, neighbours.replicas.process_group, **options)
    return PipelineExecutor(stage, neighbours, CpuFlash()), sharded


def test_gradients_equal_one_process():
    for errors in run_ranks(errors_by_case, 4, seconds=120):
        assert len(errors) == 2 * len(CASES) * len(MEMBERS)
        for case, (of_gradients, of_norm, of_loss, share) in errors.items():
            assert of_gradients < 1e-10, case
            assert of_norm < 1e-12, case
            assert of_loss < 1e-12, case
            # 61 rows of the embedding are 31 and 30
            assert share == pytest.approx(0.5, abs=0.02), case


# ---- mixed precision


def bfloat16_step(rank, world_size):
    """The largest error of this stage's gradients against float64, and the dtypes of parameters
    and gradients inside of a step, and of both and their shares afterwards."""
    index, replica = divmod(rank, 2)
    examples = documents(LENGTHS)
    model = tiny_llama(torch.float32, num_hidden_layers=LAYERS)
    _, wanted = reference_gradients(copy.deepcopy(model).double(), examples)
    executor, sharded = sharded_executor(model, index, Communicator(), param_dtype=torch.bfloat16)
    with sharded.whole():
        inside = {p.dtype for p in model.parameters()}
    ids = MEMBERS["both work"][replica]
    plan = plan_of([LENGTHS[i] for i in ids], random.Random(replica), CASES["both"])
    columns = columns_of(plan, [examples[i] for i in ids])

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    with sharded.training():
        executor.train(plan, columns, TARGETS, autocast)
        whole_gradients = {p.grad.dtype for p in model.parameters()}
    reduce_gradients(executor.stage, executor.neighbours)
    shares = {(p.dtype, p.grad.dtype, p.grad.to_local().dtype) for p in model.parameters()}
    found = {name: whole(p.grad) for name, p in executor.stage.global_parameters()}
    here = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
    return max(here.values()), (inside, whole_gradients, shares)


def test_in_mixed_precision_parameters_are_gathered_in_16_bits_and_gradients_are_in_float32():
    wide = torch.float32
    for error, dtypes in run_ranks(bfloat16_step, 4):
        assert dtypes == ({torch.bfloat16}, {wide}, {(wide, wide, wide)})
        assert error < 5e-2
