"""Two stages of two ranks that share their stage's parameters by FSDP2 and run different numbers
of chunks; and what of FSDP2's settings stages cannot follow."""

import copy
import random
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.executor import PipelineExecutor
from hf_flexseq.pipeline.planning import make_pipeline_plan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost, StageCost
from hf_flexseq.pipeline.reduction import equalise, gradient_norm, reduce_gradients
from hf_flexseq.pipeline.sharding import ShardedStage
from hf_flexseq.pipeline.stages import cut
from hf_flexseq.pipeline.trainer.fsdp import take_over_fsdp
from tests.hf.tiny import documents, reference_gradients, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import (
    CASES,
    COMBINED,
    LAYERS,
    LENGTHS,
    TARGETS,
    columns_of,
    gradients_of,
    largest_error,
    loss_error,
)
from tests.ranks import run_ranks

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


def plan_and_columns(members, seed, options):
    plan = plan_of([LENGTHS[i] for i in members], random.Random(seed), options)
    examples = documents(LENGTHS)
    return plan, columns_of(plan, [examples[i] for i in members])


def errors_by_case(rank, world_size):
    """For each division of the work and case: the largest error of this stage's gradients, of
    their norm, and of the losses; and the share of the parameters that a rank holds afterwards."""
    index, replica = divmod(rank, 2)
    communicator = Communicator()
    errors = {}
    for tied, case in COMBINED:
        model = tiny_llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
        wanted_loss, wanted = reference_gradients(copy.deepcopy(model), documents(LENGTHS))
        executor, sharded = sharded_executor(model, index, communicator)
        for division, members in MEMBERS.items():
            seed = f"{tied} {division} {case} {replica}"
            plan, columns = plan_and_columns(members[replica], seed, CASES[case])
            with few_in_a_bucket() as reductions, sharded.training():
                losses = [executor.train(plan, columns, TARGETS)]
            parameters = len(list(model.parameters()))
            assert 2 < reductions.call_count < parameters / 2
            reduce_gradients(executor.stage, executor.neighbours)
            with sharded.whole():
                losses.append(executor.evaluate(plan, columns, TARGETS))
            norm = float(gradient_norm(executor.stage, communicator, counts=True))
            found = gradients_of(executor)
            model.zero_grad()
            norm_wanted = float(torch.nn.utils.get_total_norm(wanted.values()))
            held = sum(p.to_local().numel() for p in model.parameters())
            errors[division, case] = (
                largest_error(found, wanted),
                abs(norm / norm_wanted - 1),
                max(loss_error(loss, wanted_loss, communicator) for loss in losses),
                held / sum(p.numel() for p in model.parameters()),
            )
    return errors, bfloat16_step(rank, communicator)


@contextmanager
def few_in_a_bucket():
    """Gradients are reduced several at a time, but not all at once; yields the calls."""
    reduce = torch.distributed.reduce_scatter_tensor
    counted = mock.patch.object(torch.distributed, "reduce_scatter_tensor", side_effect=reduce)
    with mock.patch("hf_flexseq.distributed.reduction.BUCKET_BYTES", 40_000), counted as calls:
        yield calls


def sharded_executor(model, index, communicator, **options):
    model.set_attn_implementation(NAME)
    stage = cut(model.train(), index, STAGES)
    if stage.is_last:
        attach_chunked_loss(model)
    neighbours = Neighbours(communicator, [[0, 2], [1, 3]])
    if communicator.rank % 2:  # a replica that has begun with other values
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor += 1
    equalise(stage, neighbours)
    sharded = ShardedStage(stage, neighbours.replicas.process_group, **options)
    return PipelineExecutor(stage, neighbours, CpuFlash()), sharded


def bfloat16_step(rank, communicator):
    """With mixed precision: the largest error of this stage's gradients against float64, and the
    dtypes of parameters and gradients inside of a step, and of both and their shares
    afterwards."""
    index, replica = divmod(rank, 2)
    model = tiny_llama(torch.float32, num_hidden_layers=LAYERS)
    _, wanted = reference_gradients(copy.deepcopy(model).double(), documents(LENGTHS))
    executor, sharded = sharded_executor(model, index, communicator, param_dtype=torch.bfloat16)
    with sharded.whole():
        inside = {p.dtype for p in model.parameters()}
    plan, columns = plan_and_columns(MEMBERS["both work"][replica], replica, CASES["both"])

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    with sharded.training():
        executor.train(plan, columns, TARGETS, autocast)
        whole_gradients = {p.grad.dtype for p in model.parameters()}
    reduce_gradients(executor.stage, executor.neighbours)
    shares = {(p.dtype, p.grad.dtype, p.grad.to_local().dtype) for p in model.parameters()}
    return largest_error(gradients_of(executor), wanted), (inside, whole_gradients, shares)


@pytest.mark.processes
def test_gradients_equal_one_process_and_mixed_precision_gathers_in_16_bits():
    wide = torch.float32
    for errors, (error_of_bfloat16, dtypes) in run_ranks(errors_by_case, 4, seconds=120):
        assert len(errors) == len(COMBINED) * len(MEMBERS)
        for case, (of_gradients, of_norm, of_loss, share) in errors.items():
            assert of_gradients < 1e-10, case
            assert of_norm < 1e-12, case
            assert of_loss < 1e-12, case
            # 61 rows of the embedding are 31 and 30
            assert share == pytest.approx(0.5, abs=0.02), case
        assert dtypes == ({torch.bfloat16}, {wide}, {(wide, wide, wide)})
        assert error_of_bfloat16 < 5e-2


# ---- what is refused


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("fsdp_version", 1, "fsdp_version=1 .*set version=2"),
        ("cpu_offload", CPUOffloadPolicy(), "cpu_offload of FSDP"),
        ("activation_checkpointing", True, "activation_checkp.* of FSDP .*in the training argum"),
        ("cpu_ram_efficient_loading", True, "cpu_ram_effi.* of FSDP .*leaves stages without val"),
        ("ignored_modules", "lm_head", "ignored_modules of FSDP"),
        (
            "mixed_precision_policy",
            MixedPrecisionPolicy(param_dtype=torch.float16),
            "param_dtype=torch.float16 of FSDP beside a mixed precision in torch.bfloat16 .*leave",
        ),
    ],
)
def test_what_stages_cannot_follow_is_refused(setting, value, message):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    setattr(plugin, setting, value)
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(state=state, mixed_precision="bf16")
    with pytest.raises(NotImplementedError, match=message):
        take_over_fsdp(SimpleNamespace(accelerator=accelerator, args=None))
