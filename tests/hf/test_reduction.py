"""Reducing DDP's gradients once, after the last micro-batch of the plan, equals one process and
what DDP does by itself."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.reduction import instead_of_ddp
from tests.hf.ordered import ordered_gloo
from tests.hf.test_checks import make_trainer
from tests.hf.test_exactness import LENGTHS, own_batches
from tests.hf.test_precision import bf16_run
from tests.hf.test_trainer import (
    OPTIONS,
    flexseq_run,
    float64_loss,
    logged,
    plain_run,
    update_error,
)
from tests.hf.tiny import (
    RandomPlanEngine,
    documents,
    reference_gradients,
    relative_errors,
    tiny_llama,
)
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


# ---- a loop of one's own


def ends_apart(plan):
    """Whether a rank has nothing to do in the last of several micro-batches."""
    last = plan.micro_batches[-1]
    busy = set().union(*(group.ranks for group in last.groups))
    everyone = set().union(*(group.ranks for part in plan.micro_batches for group in part.groups))
    return busy < everyone


def gradients_by_step(rank, world_size, is_ordered, plans, frozen=(), **ddp):
    """Gradients by name, and the micro-batches that this rank has run, of each step."""
    examples = documents(LENGTHS)
    model = tiny_llama(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    found = []
    with ordered_gloo(is_ordered):
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=world_size, accepts=ends_apart)
        engine.attach(model)
        wrapped = DistributedDataParallel(model, **ddp)
        groups = set(distributed_c10d._world.pg_map)
        for _ in range(plans):
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                step.backward(wrapped)
                indices = list(step.step.indices)
                gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
                found.append(({n: g.numpy() for n, g in gradients.items()}, indices))
                model.zero_grad()
        assert set(distributed_c10d._world.pg_map) == groups, "a group was made in a step"
        engine.detach()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_one_process_whatever_micro_batches_ranks_run(world_size):
    _, wanted = reference_gradients(tiny_llama(torch.float64), documents(LENGTHS))
    cases = [({},), ({"find_unused_parameters": True},), ({"gradient_as_bucket_view": True},)]
    for by_rank in run_cases(_gradients_with, world_size, cases):
        for steps in zip(*by_rank, strict=True):
            assert len({indices[-1] for _, indices in steps}) > 1, "all ranks end together"
            for gradients, _ in steps:
                found = {name: torch.as_tensor(g) for name, g in gradients.items()}
                assert max(relative_errors(found, wanted).values()) < 1e-10


def _gradients_with(rank, world_size, ddp):
    return gradients_by_step(rank, world_size, True, 3, **ddp)


def both_ways(rank, world_size, options):
    ordered = gradients_by_step(rank, world_size, True, 3, **options)
    return ordered, gradients_by_step(rank, world_size, False, 3, **options)


FROZEN_OR_SMALL = (
    {"frozen": ("mlp", "embed_tokens")},
    {"frozen": ("layers.0",), "find_unused_parameters": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
)


def test_gradients_equal_ddps_own():
    cases = [(options,) for options in FROZEN_OR_SMALL]
    for by_rank in run_cases(both_ways, 3, cases):
        for ours, ddps in by_rank:
            for (found, indices), (wanted, same_indices) in zip(ours, ddps, strict=True):
                assert indices == same_indices
                assert found.keys() == wanted.keys()
                for name, gradient in wanted.items():
                    assert found[name] == pytest.approx(gradient, rel=1e-10, abs=1e-13), name


# ---- DDP alone


class Branches(nn.Module):
    """One parameter that every rank uses, one that only rank 0 uses, one that none uses; a buffer
    that every rank sets to its own rank."""

    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
        self.never = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(-1.0))

    def forward(self, x, rank):
        y = self.always * x
        return y * self.sometimes if rank == 0 else y


def branches(rank, world_size, is_ours, find_unused):
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    communicator = Communicator()
    gradients = []
    for step in range(2):
        model.zero_grad()
        if is_ours:
            with instead_of_ddp(ddp, communicator):
                for x in range(rank + 1):  # rank 1 has one micro-batch more
                    ddp(torch.tensor(1.0 + x + step), rank).backward()
        else:
            with ddp.no_sync():
                for x in range(rank):
                    ddp(torch.tensor(1.0 + x + step), rank).backward()
            ddp(torch.tensor(1.0 + rank + step), rank).backward()
        gradients.append({n: _number(p.grad) for n, p in model.named_parameters()})
    return gradients


def _number(gradient):
    return None if gradient is None else float(gradient)


def test_a_parameter_that_no_rank_has_used_keeps_no_gradient():
    cases = [(True, True), (False, True), (True, False)]
    ours, ddps, without_finding = run_cases(branches, 2, cases)
    assert ours == ddps
    first = ours[0][0]
    assert first == {"always": (3 + 1 + 2) / 2, "sometimes": 2 / 2, "never": None}
    # without find_unused_parameters it counts as zero
    for gradients in without_finding:
        assert gradients[0] == {"always": 3.0, "sometimes": 1.0, "never": 0.0}


# ---- refused, or in lockstep


def hooked(**options):
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    engine = RandomPlanEngine(Accelerator(cpu=True, kwargs_handlers=[hook]), seed=0, **options)
    engine.attach(tiny_llama())
    return engine.executor.lockstep


def hooks_of_accelerate(rank, world_size):
    with ordered_gloo():
        with pytest.raises(ValueError, match="sync='free' needs one place.*use sync='auto'"):
            hooked(sync="free")
        in_order = hooked()
    return in_order, hooked(sync="free")


def test_a_communication_hook_takes_lockstep_where_transfers_are_in_order():
    assert run_ranks(hooks_of_accelerate, 2) == [(True, False)] * 2


def late_hook(rank, world_size, sync):
    with ordered_gloo():
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=0, sync=sync)
        model = tiny_llama()
        engine.attach(model)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, allreduce_hook)
        for step in engine.steps(own_batches(documents(LENGTHS), rank, world_size), 2):
            step.backward(wrapped)
    return {n: p.grad.numpy() for n, p in model.named_parameters()}


def test_a_hook_of_ones_own_is_refused_in_free_and_called_in_lockstep():
    with pytest.raises(AssertionError, match="ValueError: a communication hook.*sync='lockstep'"):
        run_ranks(late_hook, 2, "auto")
    _, wanted = reference_gradients(tiny_llama(torch.float64), documents(LENGTHS))
    for gradients in run_ranks(late_hook, 2, "lockstep"):
        found = {name: torch.as_tensor(g) for name, g in gradients.items()}
        assert max(relative_errors(found, wanted).values()) < 1e-10


def zero_1(rank, world_size, folder):
    import deepspeed

    deepspeed.init_distributed("gloo")
    zero = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}
    with ordered_gloo():
        with pytest.raises(ValueError, match="sync='free' needs one place.*DeepSpeed"):
            make_trainer(folder, sync="free", deepspeed=zero)
        trainer = make_trainer(folder, deepspeed=zero, **OPTIONS)
        with trainer.flexseq.attached(trainer.model):
            return trainer.flexseq.executor.lockstep


def test_zero_1_takes_lockstep_where_transfers_are_in_order(tmp_path):
    pytest.importorskip("deepspeed")
    assert run_ranks(zero_1, 2, tmp_path) == [True, True]


# ---- the Trainer


def trainer_in_order(rank, world_size, *args):
    with ordered_gloo():
        return flexseq_run(rank, world_size, "subclass", *args)


def test_ten_steps_equal_the_plain_trainer(tmp_path):
    before, wanted, history = plain_run(tmp_path, batch=12, optim="sgd", loss=float64_loss)
    for found, log in run_ranks(trainer_in_order, 2, tmp_path, 2, 3, "sgd", seconds=120):
        assert update_error(before, wanted, found) < 1e-8
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-8)


def bf16_both_ways(rank, world_size, folder):
    logs = []
    for is_ordered in (True, False):
        with ordered_gloo(is_ordered):
            logs.append(bf16_run(rank, world_size, folder))
    return logs


def test_bf16_steps_equal_those_under_ddps_own_reduction(tmp_path):
    for ours, ddps in run_ranks(bf16_both_ways, 2, tmp_path, seconds=120):
        assert logged(ours, "loss") == pytest.approx(logged(ddps, "loss"), rel=1e-6)
        assert logged(ours, "grad_norm") == pytest.approx(logged(ddps, "grad_norm"), rel=1e-5)


def lora_both_ways(rank, world_size):
    gradients = []
    for is_ordered in (True, False):
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = get_peft_model(tiny_llama(), config).double()
        with ordered_gloo(is_ordered):
            engine = RandomPlanEngine(Accelerator(cpu=True), seed=5)
            engine.attach(model)
            wrapped = DistributedDataParallel(model)
            for step in engine.steps(own_batches(documents(LENGTHS), rank, world_size), 2):
                step.backward(wrapped)
            engine.detach()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all("lora" in name for name in trained)
        gradients.append({name: gradient.numpy() for name, gradient in trained.items()})
    return gradients


def test_adapters_get_the_gradients_that_ddp_gives_them():
    for ours, ddps in run_ranks(lora_both_ways, 3):
        for name, gradient in ddps.items():
            assert ours[name] == pytest.approx(gradient, rel=1e-10, abs=1e-13), name
