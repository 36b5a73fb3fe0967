"""Reducing DDP's gradients once, after the last micro-batch of the plan, equals one process and
what DDP does by itself."""

import math

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq import FlexSeqArguments, FlexSeqEngine
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.reduction import instead_of_ddp
from tests.hf.plain import ordered_gloo
from tests.hf.test_exactness import LENGTHS
from tests.hf.tiny import (
    RandomPlanEngine,
    documents,
    own_batches,
    reference_gradients,
    relative_errors,
    sharded,
    tiny_llama,
    whole,
)
from tests.plans import ends_apart
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


# ---- a loop of one's own


def gradients_by_step(rank, world_size, is_ordered, frozen, ddp):
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
        for _ in range(2):
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                step.backward(wrapped)
                gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
                indices = list(step.step.indices)
                found.append(({n: g.numpy() for n, g in gradients.items()}, indices))
                model.zero_grad()
        assert set(distributed_c10d._world.pg_map) == groups, "a group was made in a step"
        engine.detach()
    return found


FROZEN_OR_SMALL = (
    (("mlp", "embed_tokens"), {}),
    (("layers.0",), {"find_unused_parameters": True}),
    ((), {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
)


def test_gradients_equal_ddps_own():
    cases = [(is_ordered, *case) for case in FROZEN_OR_SMALL for is_ordered in (True, False)]
    by_case = run_cases(gradients_by_step, 3, cases, seconds=150)
    for ours, ddps in zip(by_case[::2], by_case[1::2], strict=True):
        for steps in zip(*ours, strict=True):
            assert len({indices[-1] for _, indices in steps}) > 1, "all ranks end together"
        for our_steps, ddps_steps in zip(ours, ddps, strict=True):
            for (found, indices), (wanted, same_indices) in zip(
                our_steps, ddps_steps, strict=True
            ):
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
        for name, value in (("always", 2.0), ("sometimes", 3.0), ("never", 5.0)):
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float64)))
        self.register_buffer("last", torch.tensor(-1.0))
        self.seen = []

    def forward(self, x, rank):
        self.seen.append(float(self.last))
        self.last.fill_(rank)
        y = self.always * x
        return y * self.sometimes if rank == 0 else y


def branches(rank, world_size, is_ours, find_unused):
    """Gradients of two steps, and what each forward has seen in the buffer."""
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
    return gradients, model.seen


def _number(gradient):
    return None if gradient is None else float(gradient)


def test_a_parameter_that_no_rank_has_used_keeps_no_gradient():
    cases = [(True, True), (False, True), (True, False)]
    ours, ddps, without_finding = run_cases(branches, 2, cases)
    assert ours == ddps
    assert [seen for _, seen in ours] == [[-1.0, 0.0], [-1.0, 1.0, 0.0, 1.0]]
    first = ours[0][0][0]
    assert first == {"always": (3 + 1 + 2) / 2, "sometimes": 2 / 2, "never": None}
    # without find_unused_parameters it counts as zero
    for gradients, _ in without_finding:
        assert gradients[0] == {"always": 3.0, "sometimes": 1.0, "never": 0.0}


# ---- parameters that are frozen and unfrozen in training

FROZEN_BY_STEP = (
    ("layers.0",),  # as when the model was wrapped
    (),
    ("mlp", "embed_tokens"),
    ("layers.1",),  # as many as at first
    ("layers.0",),
)


def freeze(model, parts):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))


def errors_of_changes(rank, world_size, wrap, is_ordered, steps, sync):
    """The largest relative error of a gradient in steps with these parts frozen; inf where one of
    a frozen parameter is found. The model is attached twice."""
    examples = documents(LENGTHS)
    _, wanted = reference_gradients(tiny_llama(torch.float64), examples)
    model = tiny_llama(torch.float64)
    freeze(model, FROZEN_BY_STEP[0])
    worst = 0.0
    with ordered_gloo(is_ordered):
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=world_size, sync=sync)
        engine.attach(model)
        wrapped = wrap(model)
        for number, frozen in enumerate(steps):
            freeze(model, frozen)
            if number == 2:
                engine.detach()
                engine.attach(model)
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                step.backward(wrapped)
            found, expected = {}, {}
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    worst = worst if parameter.grad is None else math.inf
                    continue
                found[name], expected[name] = whole(parameter.grad), wanted[name]
            worst = max(worst, *relative_errors(found, expected, floor_of=wanted).values())
            model.zero_grad()
        engine.detach()
    return worst


CHANGES = (
    (DistributedDataParallel, False, FROZEN_BY_STEP, "free"),
    (DistributedDataParallel, True, FROZEN_BY_STEP, "lockstep"),
    (DistributedDataParallel, True, FROZEN_BY_STEP[1:], "free"),
    (DistributedDataParallel, False, FROZEN_BY_STEP[3:], "lockstep"),
    (sharded, False, FROZEN_BY_STEP, "lockstep"),
)


def test_frozen_and_unfrozen_parameters_have_the_gradients_of_one_process():
    for case, errors in zip(CHANGES, run_cases(errors_of_changes, 2, CHANGES), strict=True):
        assert max(errors) < 1e-10, case


# ---- refused, or in lockstep


def late_hook(rank, world_size):
    """The gradients in lockstep, where a hook of one's own is not refused."""
    for sync in ("auto", "lockstep"):
        with ordered_gloo():
            engine = RandomPlanEngine(Accelerator(cpu=True), seed=0, sync=sync)
            model = tiny_llama()
            engine.attach(model)
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(None, allreduce_hook)
            steps = engine.steps(own_batches(documents(LENGTHS), rank, world_size), 2)
            if sync == "auto":
                with pytest.raises(ValueError, match="a communication hook.*sync='lockstep'"):
                    next(steps).backward(wrapped)
            else:
                for step in steps:
                    step.backward(wrapped)
                freeze(model, ["layers.0"])
                frozen = "were frozen or unfrozen.*a hook.*leave requires_grad as it was"
                with pytest.raises(NotImplementedError, match=frozen):
                    next(engine.steps(own_batches(documents(LENGTHS), 0, 1))).backward(wrapped)
            engine.detach()
    return {n: p.grad.numpy() for n, p in model.named_parameters()}


def test_a_hook_of_ones_own_is_refused_in_free_and_called_in_lockstep():
    _, wanted = reference_gradients(tiny_llama(torch.float64), documents(LENGTHS))
    for gradients in run_ranks(late_hook, 2):
        found = {name: torch.as_tensor(g) for name, g in gradients.items()}
        assert max(relative_errors(found, wanted).values()) < 1e-10


# ---- buckets of small models


MIB = 2**20


def bucket_mib(rank, world_size, chosen):
    """Of a model of 16 MiB and some as accelerate wraps it, and of the handler afterwards."""
    handlers = [] if chosen is None else [DistributedDataParallelKwargs(bucket_cap_mb=chosen)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = tiny_llama(torch.float32, vocab_size=2**16)
    assert round(sum(p.numel() * 4 for p in model.parameters()) / MIB) == 16
    engine = FlexSeqEngine(accelerator, FlexSeqArguments(cost_model="estimate"))
    engine.attach(model)
    found = accelerator.prepare(model).bucket_bytes_cap / MIB
    engine.detach()
    return found, accelerator.ddp_handler and accelerator.ddp_handler.bucket_cap_mb


@pytest.mark.processes
def test_a_small_model_has_several_buckets_unless_the_user_chose():
    chosen = (None, 25, 7)
    by_case = run_cases(bucket_mib, 2, [(size,) for size in chosen])
    assert by_case == [[(3, None)] * 2, [(3, 25)] * 2, [(7, 7)] * 2]
