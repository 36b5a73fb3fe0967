"""There is one order of launches, and gradient reduction is in it: any plan ends under DDP and
FSDP2, even where a rank carries out one post after the other, of all lanes and collectives
together. Gradients equal one process. A reduction in another place is caught.

ORDER_PLANS=1000 runs so many plans of each kind.
"""

import functools
import os
import random
from collections import Counter

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from hf_flexseq.hf.reduction import average_gradients, instead_of_ddp
from hf_flexseq.hf.sharding import FsdpPolicies
from tests.hf.by_hand import attach, planned_inputs, target_count
from tests.hf.test_exactness import sharded, whole
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.matching import Launches
from tests.plans import ends_apart, group, plan_of_groups, random_plan
from tests.process_group import needs_new_names, run_threads_with_groups
from tests.published.zeppelin.always import Always
from tests.ranks import join

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


def test_the_plans_are_of_all_kinds():
    counts = Counter()
    for world_size, nodes in CASES:
        for seed in SEEDS:
            for plan in drawn_plans(world_size, nodes, seed):
                counts["several micro-batches"] += len(plan.micro_batches) > 1
                counts["ends apart"] += ends_apart(plan)
                groups = [group for part in plan.micro_batches for group in part.groups]
                counts["several strategies"] += len({group.strategy for group in groups}) > 2
    assert min(counts.values()) >= 3, counts


# ---- a step of one rank, without Trainer and accelerate


class ByHand:
    """A rank's model, which runs on planned steps, and its communicator."""

    def __init__(self, world_size, nodes=1, *, checkpointing=False, use_blocks=False):
        topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
        self.communicator = join(topology, use_blocks=use_blocks)
        self.model = tiny_llama().train()
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
def of_one_process():
    return reference_gradients(tiny_llama(), EXAMPLES)[1]


def check_gradients(by_rank):
    wanted = of_one_process()
    for steps in by_rank:
        for found in steps:
            assert max(relative_errors(found, wanted).values()) < 1e-10


def check_plans(function, launches, seed, world_size, nodes, *args):
    """Run random plans by `function(rank, world_size, plans, nodes, *args)`."""
    plans = drawn_plans(world_size, nodes, seed)
    options = {"launches": launches, "seed": seed, "seconds": 60 + PLANS}
    check_gradients(run_threads_with_groups(function, world_size, plans, nodes, *args, **options))


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


def reduced_by_ddp(rank, world_size, plans, nodes, lockstep, has_hook):
    """Every rank reduces in its own last micro-batch, as DDP does by itself."""
    own = ByHand(world_size, nodes)
    ddp = DistributedDataParallel(own.model, **SMALL_BUCKETS)
    if has_hook:
        ddp.register_comm_hook(None, allreduce_hook)
    gradients = []
    for plan in plans:
        *earlier, last = own.micro_batches(plan, lockstep=lockstep, has_passes=lockstep)
        with ddp.no_sync():
            for inputs in earlier:
                own.backward(inputs, ddp)
        own.backward(last, ddp)
        gradients.append(own.gradients())
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("has_hook", [False, True])
def test_plans_end_in_lockstep_when_ddp_reduces_by_itself(has_hook):
    check_plans(reduced_by_ddp, ONE_QUEUE, SEEDS[has_hook], 4, 2, True, has_hook)


# ---- FSDP2


def under_fsdp2(rank, world_size, plans, nodes, checkpointing, policy):
    own = ByHand(world_size, nodes, checkpointing=checkpointing, use_blocks=True)
    layers = list(own.model.model.layers)
    sharded(own.model)
    layers[0].set_modules_to_forward_prefetch(layers[1:2])
    for unit in [*layers, own.model]:
        unit._set_unshard_async_op(True)  # gathered ahead, and waited for where it is used
    policies = FsdpPolicies(None, own.communicator, None, over_replicas=False)
    policies.find_units(own.model)
    gradients = []
    for plan in plans:
        *earlier, last = own.micro_batches(plan, lockstep=True)
        with policies.whole_step(policy):
            for inputs in earlier:
                with policies.before_last(policy):
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
@pytest.mark.parametrize(("world_size", "nodes"), CASES[1:])
def test_plans_end_under_fsdp2_in_lockstep(launches, world_size, nodes, checkpointing, policy):
    seed = SEEDS[checkpointing]
    check_plans(under_fsdp2, launches, seed, world_size, nodes, checkpointing, policy)


# ---- planted faults


def plan_that_ends_apart():
    """A plan whose first micro-batch is the last one of rank 0 and not of rank 1."""
    wide, narrow = group(0, 2, 0, 1, 2, 3), group(1, 3, 4, 5, strategy="zigzag")
    return plan_of_groups(LENGTHS, [wide], [narrow])


APART = ([plan_that_ends_apart()], 1, False, False)


def test_ddps_own_reduction_hangs_where_one_transfer_runs_at_a_time():
    hangs = "no rank can go on: rank 0 is in allreduce .*behind it stands"
    with pytest.raises(RuntimeError, match=hangs):
        run_threads_with_groups(reduced_by_ddp, 3, *APART, launches=ONE_QUEUE, seed=1)


@pytest.mark.parametrize("seed", [1, 2])
def test_ddps_own_reduction_ends_where_posts_are_independent(seed):
    by_rank = run_threads_with_groups(
        reduced_by_ddp, 3, *APART, launches=Launches.BY_TAG, seed=seed
    )
    check_gradients(by_rank)


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
