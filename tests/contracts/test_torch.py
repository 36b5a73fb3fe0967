"""Private parts of torch that hf_flexseq builds on."""

import datetime
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.reduction import instead_of_ddp
from hf_flexseq.hf.engine.sharding import parameter_groups
from tests.contracts.look import schema_arguments
from tests.ranks import run_ranks

# ---- kernels/torch_varlen.py: attention with a log-sum-exp


QKV = ["query", "key", "value"]
PACKED = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
BACKWARD = ["grad_out", *QKV, "out", "logsumexp"]


@pytest.mark.parametrize(
    ("operation", "wanted", "others"),
    [
        # the state of the random numbers is called differently over the versions
        ("_flash_attention_forward", [*QKV, *PACKED, "return_debug_mask"], 0),
        ("_flash_attention_backward", [*BACKWARD, *PACKED], 2),
    ],
)
def test_flash_attention_takes_what_it_is_given(operation, wanted, others):
    positional, keywords = schema_arguments(getattr(torch.ops.aten, operation).default)
    assert positional[: len(wanted)] == wanted
    assert len(positional) == len(wanted) + others
    assert "scale" in keywords


# ---- on two ranks, which run these functions and assert


def tells_the_timeout_of_the_default_group(rank):
    # distributed/communicator.py
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)


class HasBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("own_rank", torch.zeros(1))

    def forward(self, x):
        return self.linear(x) + 0 * self.own_rank


def ddp_broadcasts_buffers_with_the_first_forward_of_a_step(rank):
    # hf/engine/reduction.py: also a DDP that does not reduce
    for is_ours in (True, False):
        model = HasBuffer()
        ddp = DistributedDataParallel(model)
        communicator = Communicator()
        is_of_rank_0 = []

        def micro_batch(model=model, ddp=ddp, seen=is_of_rank_0):
            model.own_rank.fill_(rank)
            ddp(torch.ones(1, 1)).sum().backward()
            seen.append(float(model.own_rank) == 0)

        for _ in range(2):
            if is_ours:
                with instead_of_ddp(ddp, communicator):
                    micro_batch()
                    micro_batch()
            else:
                with ddp.no_sync():
                    micro_batch()
                micro_batch()
        assert is_of_rank_0 == [True, rank == 0] * 2


def ddp_tells_its_hooks_and_what_it_ignores(rank):
    model = HasBuffer()
    model._ddp_params_and_buffers_to_ignore = ["linear.bias"]
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    assert len(ddp._comm_hooks) == 0
    ddp.register_comm_hook(None, allreduce_hook)
    assert len(ddp._comm_hooks) == 1
    assert "linear.bias" in ddp.parameters_to_ignore
    assert ddp.find_unused_parameters


def a_unit_of_fsdp2_unshards_and_reshards_when_told_to(rank):
    # pipeline/sharding.py
    linear = nn.Linear(4, 4, bias=False)
    kind = type(linear)
    unit = fully_shard(linear, reshard_after_forward=False)
    unit.set_requires_gradient_sync(False)
    unit.set_reshard_after_backward(False)
    assert isinstance(linear.weight, DTensor)
    unit.unshard()
    assert not isinstance(linear.weight, DTensor)
    assert linear.weight.shape == (4, 4)
    linear(torch.ones(1, 4)).sum().backward()
    assert isinstance(linear.weight.grad, torch.Tensor)
    assert not isinstance(linear.weight.grad, DTensor)
    linear.weight.grad = None
    unit.reshard()
    assert isinstance(linear.weight, DTensor)
    assert kind is next(c for c in type(linear).__mro__ if not issubclass(c, FSDPModule))


def fsdp2_says_which_units_free_their_parameters_after_a_forward(rank):
    # hf/engine/sharding.py
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model[1], reshard_after_forward=False)
    fully_shard(model)

    def free_their_parameters():
        states = [fully_shard.state(unit) for unit in (model[0], model[1], model)]
        assert [state._auto_reshard_after_forward for state in states] == [False, False, True]
        groups = [group for state in states for group in parameter_groups(state)]
        return [group.post_forward_mesh_info is not None for group in groups]

    assert free_their_parameters() == [True, False, True]
    model(torch.ones(1, 4)).sum().backward()
    # the outermost unit has decided in its first forward
    assert free_their_parameters() == [True, False, False]
    model[0].set_reshard_after_forward(False, recurse=False)
    assert free_their_parameters() == [False, False, False]


CHECKS = (
    tells_the_timeout_of_the_default_group,
    ddp_broadcasts_buffers_with_the_first_forward_of_a_step,
    ddp_tells_its_hooks_and_what_it_ignores,
    a_unit_of_fsdp2_unshards_and_reshards_when_told_to,
    fsdp2_says_which_units_free_their_parameters_after_a_forward,
)


def errors_of_checks(rank, world_size):
    """The traceback of each check that fails on this rank, by its name."""
    found = {}
    for check in CHECKS:
        try:
            check(rank)
        except Exception:
            found[check.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def errors():
    """By rank."""
    return run_ranks(errors_of_checks, 2, group_seconds=77)


@pytest.mark.processes
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_two_ranks(name, errors):
    for rank, of_rank in enumerate(errors):
        assert name not in of_rank, f"rank {rank}: {of_rank[name]}"
