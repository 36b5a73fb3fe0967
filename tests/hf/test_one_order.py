"""There is one order of launches, and gradient reduction and experts are in it: any plan ends
under DDP and FSDP2, and with experts over ranks, even where a rank carries out one post after the
other, of all lanes and collectives together. Gradients equal one process. A reduction in another
place is caught. What forked ranks launch over gloo is recorded, and stands in the order that
docs/architecture.md states.

ORDER_PLANS=1000 runs so many plans of each kind.
"""

import functools
import os
import random
import re

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import initialize_distributed_mesh

from hf_flexseq import FlexSeqArguments
from hf_flexseq.attention import remat
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from hf_flexseq.hf.engine.reduction import average_gradients, instead_of_ddp
from hf_flexseq.hf.engine.sharding import FsdpPolicies, units_of
from hf_flexseq.hf.model.sharding import resolve_sync
from tests.hf.by_hand import attach, planned_inputs, target_count
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import (
    documents,
    reference_gradients,
    refused,
    relative_errors,
    sharded,
    tiny_llama,
    whole,
)
from tests.matching import Launches
from tests.operators import Noted
from tests.plans import group, plan_of_groups, random_plan
from tests.process_group import needs_new_names, run_threads_with_groups
from tests.published.zeppelin.gainful_passes import Always
from tests.ranks import join, run_cases

pytestmark = needs_new_names

PLANS = int(os.environ.get("ORDER_PLANS", "4"))
ONE_QUEUE, BY_LANE = Launches.ONE_QUEUE, Launches.BY_LANE
LENGTHS = (23, 1, 8, 40, 5, 13)
EXAMPLES = documents(LENGTHS)
SMALL_BUCKETS = {"bucket_cap_mb": 0.005, "find_unused_parameters": True}  # from the first step on
SEEDS = [1, 2]
CASES = [(2, 1), (3, 1), (4, 2)]  # ranks, nodes


def drawn_plans(world_size, nodes, seed):
    rng = random.Random(seed)
    return [random_plan(LENGTHS, world_size, rng, nodes=nodes) for _ in range(PLANS)]


# ---- a step of one rank, without Trainer and accelerate


class ByHand:
    """A rank's model, which runs on planned steps, and its communicator."""

    def __init__(
        self, world_size, nodes=1, *, make=tiny_llama, checkpointing=False, use_blocks=False
    ):
        topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
        self.communicator = join(topology, use_blocks=use_blocks)
        self.model = make().train()
        attach(self.model)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def micro_batches(self, plan, *, lockstep, has_passes=True):
        """Inputs of the model for every micro-batch that this rank runs.

        has_passes: True if every micro-batch is remapped, which gives every rank tokens of it.
        """
        passes = Always(self.communicator.topology) if has_passes else None
        return planned_inputs(
            self.model, plan, EXAMPLES, self.communicator, passes=passes, lockstep=lockstep
        )

    def backward(self, inputs, wrapped=None):
        """Forward and backward of one micro-batch; gradients are averaged over ranks, so the loss
        is multiplied by their number. wrapped: what stands around the model, if anything."""
        run = wrapped or self.model
        outputs = run(**inputs, use_cache=False, num_items_in_batch=target_count(EXAMPLES))
        (outputs.loss * self.communicator.world_size).backward()

    def gradients(self):
        found = {name: whole(p.grad).clone() for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return found


@functools.cache
def of_one_process(make):
    return reference_gradients(make(), EXAMPLES)[1]


def check_gradients(by_rank, make=tiny_llama):
    wanted = of_one_process(make)
    for steps in by_rank:
        for found in steps:
            assert max(relative_errors(found, wanted).values()) < 1e-10


def check_plans(function, launches, seed, world_size, nodes, *args, make=tiny_llama):
    """Run random plans by `function(rank, world_size, plans, nodes, *args)`. make: returns the
    model of one process."""
    plans = drawn_plans(world_size, nodes, seed)
    options = {"launches": launches, "seed": seed, "seconds": 60 + PLANS}
    by_rank = run_threads_with_groups(function, world_size, plans, nodes, *args, **options)
    check_gradients(by_rank, make)


# ---- DDP


def under_ddp(rank, world_size, plans, nodes, options):
    own = ByHand(world_size, nodes, use_blocks=True)
    ddp = DistributedDataParallel(own.model, **options)
    gradients = []
    for plan in plans:
        with instead_of_ddp(ddp, own.communicator):
            for inputs in own.micro_batches(plan, lockstep=False):
                own.backward(inputs, ddp)
        gradients.append(own.gradients())
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "seed"), [(ONE_QUEUE, 1), (ONE_QUEUE, 2), (BY_LANE, 2)])
@pytest.mark.parametrize(("world_size", "nodes"), CASES)
def test_plans_end_under_ddp_instead_of_ddp(launches, world_size, nodes, seed):
    check_plans(under_ddp, launches, seed, world_size, nodes, SMALL_BUCKETS if seed == 1 else {})


# ---- FSDP2


def under_fsdp2(rank, world_size, plans, nodes, checkpointing, policy):
    own = ByHand(world_size, nodes, checkpointing=checkpointing, use_blocks=True)
    layers = list(own.model.model.layers)
    sharded(own.model)
    layers[0].set_modules_to_forward_prefetch(layers[1:2])
    for unit in [*layers, own.model]:
        unit._set_unshard_async_op(True)  # gathered ahead, and waited for where it is used
    policies = FsdpPolicies(None, own.communicator, over_replicas=False)
    units = units_of(own.model)
    gradients = []
    for plan in plans:
        *earlier, last = own.micro_batches(plan, lockstep=True)
        with policies.whole_step(policy, units):
            for inputs in earlier:
                with policies.before_last(policy, units):
                    own.backward(inputs)
            own.backward(last)
        gradients.append(own.gradients())
    return gradients


@pytest.mark.parametrize(
    ("launches", "checkpointing", "policy"),
    [
        (ONE_QUEUE, False, PLAIN),
        (ONE_QUEUE, True, PLAIN),
        (BY_LANE, True, FsdpPolicy(reduces_each=False, regathers=False)),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "nodes"), [CASES[2], pytest.param(*CASES[1], marks=pytest.mark.nightly)]
)
def test_plans_end_under_fsdp2_in_lockstep(launches, world_size, nodes, checkpointing, policy):
    seed = SEEDS[checkpointing]
    check_plans(under_fsdp2, launches, seed, world_size, nodes, checkpointing, policy)


# ---- experts over ranks


@pytest.fixture
def experts_in_float64(monkeypatch):
    keep_float64(monkeypatch)


EXPERTS = 6


def with_experts():
    return make_model("Qwen3Moe", num_experts=EXPERTS)


def with_one_busy_rank():
    """Return a model whose routers send every token to the last two experts."""
    model = with_experts()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.1
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.arange(EXPERTS) / 4
    return model


def spread(make, config):
    """Return a model with experts as transformers spreads it over ranks when it is loaded."""
    model = make()
    _, mesh = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, mesh)


def under_experts(rank, world_size, plans, nodes, checkpointing, make, ep_size):
    config = DistributedConfig(fsdp_size=world_size, ep_size=ep_size)
    own_part = functools.partial(spread, make, config)
    own = ByHand(world_size, nodes, make=own_part, checkpointing=checkpointing)
    gradients = []
    for plan in plans:
        for inputs in own.micro_batches(plan, lockstep=True, has_passes=False):
            own.backward(inputs)
        gradients.append(own.gradients())
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launches", "checkpointing", "world_size", "ep_size", "make"),
    [
        (ONE_QUEUE, True, 4, 2, with_experts),
        (BY_LANE, False, 4, 2, with_experts),
        (ONE_QUEUE, False, 6, 3, with_experts),
        (BY_LANE, True, 6, 2, with_one_busy_rank),
    ],
)
def test_plans_end_with_experts_over_ranks(
    experts_in_float64, launches, checkpointing, world_size, ep_size, make
):
    args = (launches, SEEDS[checkpointing], world_size, 2, checkpointing, make, ep_size)
    check_plans(under_experts, *args, make=make)


def test_routers_that_prefer_some_experts_send_others_nothing(experts_in_float64):
    gradients = of_one_process(with_one_busy_rank)
    of_experts = [one for name, one in gradients.items() if ".experts." in name]
    assert len(of_experts) == 4
    for one in of_experts:
        assert [bool(of_expert.any()) for of_expert in one] == [False] * 4 + [True] * 2


# ---- what is launched


LAUNCHES = {
    "c10d.send": "A",  # attention, a message
    "c10d.recv_": "A",
    "c10d.alltoall_base_": "C",  # experts, counts
    "_c10d_functional.all_to_all_single": "T",  # experts, tokens or results
    "c10d._allgather_base_": "G",  # FSDP2
    "c10d._reduce_scatter_base_": "R",
    "c10d.allreduce_": "S",  # between replicas
}


def letter_of(operator, args, result):
    """What this rank launches, a letter of `LAUNCHES`."""
    name = str(operator).removesuffix(".default")
    is_transfer = name.startswith(("c10d.", "_c10d_functional."))
    if is_transfer and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
        return LAUNCHES[name]
    return None


def refuse_free_ranks(model):
    """Check that ranks cannot run different numbers of micro-batches of this model."""
    others = {"lockstep": False, "is_ordered": False}
    with refused("sync='free' needs ranks .*experts over ranks", ValueError):
        resolve_sync(FlexSeqArguments(sync="free"), model, Accelerator(cpu=True), **others)
    assert resolve_sync(FlexSeqArguments(), model, Accelerator(cpu=True), **others)


def launches_of(rank, world_size, plans, config, checkpointing):
    """By plan and micro-batch, what this rank launches in forward and backward."""
    make = functools.partial(spread, with_experts, DistributedConfig(**config))
    letters = []
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        # attention is kept for the replay although a mode watches it
        patch.setattr(remat, "_in_dispatch_mode", lambda: False)
        own = ByHand(world_size, make=make, checkpointing=checkpointing)
        refuse_free_ranks(own.model)
        for plan in plans:
            of_plan = []
            for inputs in own.micro_batches(plan, lockstep=True, has_passes=False):
                with Noted(letter_of) as launched:
                    own.backward(inputs)
                of_plan.append("".join(launched.found))
            letters.append(of_plan)
    return letters


def stated_order(micro_batch, rank, layers, checkpointing):
    """A pattern of what a rank launches, without FSDP2's part: docs/architecture.md."""
    is_shared = any(group.degree > 1 for group in micro_batch.groups_of(rank))
    attention = "A*" if is_shared else ""
    forward = f"{attention}CTT"
    replay = "CTT" if checkpointing else ""  # what attention gave is kept
    backward = f"{replay}TT{attention}"
    return forward * layers + backward * layers


def check_order(plan, of_plan, layers, checkpointing):
    """of_plan: what every rank launches in each micro-batch, by rank."""
    for number, micro_batch in enumerate(plan.micro_batches):
        without_attention = set()
        for rank, of_rank in enumerate(of_plan):
            letters = of_rank[number]
            wanted = stated_order(micro_batch, rank, layers, checkpointing)
            assert re.fullmatch(wanted, re.sub("[GRS]", "", letters)), (rank, letters)
            without_attention.add(letters.replace("A", ""))
        assert len(without_attention) == 1, "all ranks launch the same but for attention"


def plans_of_launches():
    """Two times two plans of four ranks, half of those that are drawn. In each two of them every
    rank shares a sequence."""
    return drawn_plans(4, 1, 1)[1::2], drawn_plans(4, 1, 2)[1::2]


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_launch_attention_then_experts_in_one_order():
    sharded_once, replicated = {"fsdp_size": 4}, {"fsdp_size": 2, "dp_replicate_size": 2}
    first, second = plans_of_launches()
    settings = [
        (first, {**sharded_once, "ep_size": 2}, True),
        (second, {**replicated, "ep_size": 2}, False),
    ]
    layers = with_experts().config.num_hidden_layers
    by_case = run_cases(launches_of, 4, settings)
    for (plans, _, checkpointing), by_rank in zip(settings, by_case, strict=True):
        assert all("A" in str(of_rank) for of_rank in by_rank)
        for plan, of_plan in zip(plans, zip(*by_rank, strict=True), strict=True):
            check_order(plan, of_plan, layers, checkpointing)


# ---- planted faults


def plan_that_ends_apart():
    """A plan whose first micro-batch is the last one of rank 0 and not of rank 1."""
    wide, narrow = group(0, 2, 0, 1, 2, 3), group(1, 3, 4, 5, strategy="zigzag")
    return plan_of_groups(LENGTHS, [wide], [narrow])


def reduced_by_us(rank, world_size, early):
    """Reduced after the last micro-batch of the plan; by the ranks that are `early` before it."""
    own = ByHand(world_size)
    ddp = DistributedDataParallel(own.model)
    *earlier, last = own.micro_batches(plan_that_ends_apart(), lockstep=True, has_passes=False)
    with ddp.no_sync():
        for inputs in earlier:
            own.backward(inputs, ddp)
        if rank in early:
            average_gradients(ddp, own.communicator)
        own.backward(last, ddp)
    if rank not in early:
        average_gradients(ddp, own.communicator)
    return [own.gradients()]


@pytest.mark.parametrize("launches", Launches)
def test_a_reduction_moved_by_one_micro_batch_is_caught(launches):
    check_gradients(run_threads_with_groups(reduced_by_us, 3, (), launches=launches))
    with pytest.raises(RuntimeError, match="no rank can go on.*rank 1 is in all_reduce"):
        run_threads_with_groups(reduced_by_us, 3, (1,), launches=launches)
