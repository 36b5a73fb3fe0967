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
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.topology import Topology
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.cost.sharding import PLAIN, FsdpPolicy
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.reduction import average_gradients, instead_of_ddp
from hf_flexseq.hf.sharding import FsdpPolicies
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch, Plan
from hf_flexseq.plan.layout import PlanLayout
from tests.hf.by_hand import inputs_by_micro_batch, rows_of
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.matching import Launches
from tests.plans import random_plan
from tests.process_group import needs_new_names, run_threads_with_groups
from tests.published.zeppelin.always import Always
from tests.ranks import join

pytestmark = needs_new_names

PLANS = int(os.environ.get("ORDER_PLANS", "4"))
ONE_QUEUE, BY_LANE = Launches.ONE_QUEUE, Launches.BY_LANE
CPU = torch.device("cpu")
LENGTHS = (23, 1, 8, 40, 5, 13)
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
                counts["ends apart"] += ends_apart(plan, world_size)
                counts["several strategies"] += len(strategies(plan)) > 2
    assert min(counts.values()) >= 3, counts


def ends_apart(plan, world_size):
    """Whether a rank has nothing to do in the last micro-batch, and did before."""
    busy = {rank for group in plan.micro_batches[-1].groups for rank in group.ranks}
    return len(plan.micro_batches) > 1 and len(busy) < world_size


def strategies(plan):
    return {group.strategy for m in plan.micro_batches for group in m.groups}


# ---- a step of one rank, without Trainer and accelerate


def llama(*, checkpointing=False):
    """A model that runs on planned steps."""
    model = tiny_llama()
    model.set_attn_implementation(NAME)
    attach_chunked_loss(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def columns_of(parts, examples):
    """The tokens of parts (sequence, start, stop), one behind the other: columns [tokens]."""
    columns = {"input_ids": [], "labels": [], "position_ids": []}
    for sequence, start, stop in parts:
        example = examples[sequence]
        rows = range(start, stop)
        shifted = [*example["labels"][1:], IGNORE_INDEX]
        columns["input_ids"] += [example["input_ids"][row] for row in rows]
        columns["labels"] += [shifted[row] for row in rows]
        columns["position_ids"] += rows
    return {name: torch.tensor(value, dtype=torch.int64) for name, value in columns.items()}


def micro_batches(communicator, plan, examples, *, lockstep, has_passes=True):
    """Inputs of the model for every micro-batch that this rank runs.

    has_passes: True if every micro-batch is remapped, which gives every rank tokens of it.
    """
    passes = Always(communicator.topology) if has_passes else None
    all_shards = None if passes is None else passes.shards
    shards = PlanLayout(plan, communicator.rank, all_shards).shards
    columns = [columns_of(parts, examples) for parts in rows_of(shards)]
    kernel = choose_kernel(CPU, torch.float64, 8)
    return inputs_by_micro_batch(
        shards,
        columns,
        lockstep=lockstep,
        make_context=lambda shard: SequenceContext(
            shard, communicator, kernel, CPU, passes=passes
        ),
    )


def backward(model, inputs, examples, world_size):
    """Forward and backward of one micro-batch; gradients are averaged over ranks, so the loss is
    multiplied by their number."""
    targets = sum(label != IGNORE_INDEX for e in examples for label in e["labels"][1:])
    outputs = model(**inputs, use_cache=False, num_items_in_batch=targets)
    (outputs.loss * world_size).backward()


def whole(parameter):
    gradient = parameter.grad
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    return gradient.clone()


@functools.cache
def of_one_process():
    return reference_gradients(tiny_llama(), documents(LENGTHS))[1]


def check_gradients(by_rank):
    wanted = of_one_process()
    for steps in by_rank:
        for found in steps:
            assert max(relative_errors(found, wanted).values()) < 1e-10


# ---- DDP


def under_ddp(rank, world_size, nodes, seed, options):
    examples = documents(LENGTHS)
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    communicator = join(topology, use_blocks=True)
    model = llama()
    ddp = DistributedDataParallel(model, **options)
    gradients = []
    for plan in drawn_plans(world_size, nodes, seed):
        with instead_of_ddp(ddp, communicator):
            for inputs in micro_batches(communicator, plan, examples, lockstep=False):
                backward(ddp, inputs, examples, world_size)
        gradients.append({name: whole(p) for name, p in model.named_parameters()})
        model.zero_grad()
    return gradients


@pytest.mark.parametrize(("launches", "seed"), [(ONE_QUEUE, 1), (ONE_QUEUE, 2), (BY_LANE, 2)])
@pytest.mark.parametrize(("world_size", "nodes"), CASES)
def test_plans_end_under_ddp_instead_of_ddp(launches, world_size, nodes, seed):
    options = SMALL_BUCKETS if seed == 1 else {}
    by_rank = run_threads_with_groups(
        under_ddp,
        world_size,
        nodes,
        seed,
        options,
        launches=launches,
        seed=seed,
        seconds=60 + PLANS,
    )
    check_gradients(by_rank)


def under_ddp_in_lockstep(rank, world_size, nodes, seed, has_hook):
    examples = documents(LENGTHS)
    communicator = join(Topology(nodes=nodes, ranks_per_node=world_size // nodes))
    model = llama()
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    if has_hook:
        ddp.register_comm_hook(None, allreduce_hook)
    gradients = []
    for plan in drawn_plans(world_size, nodes, seed):
        *earlier, last = micro_batches(communicator, plan, examples, lockstep=True)
        with ddp.no_sync():
            for inputs in earlier:
                backward(ddp, inputs, examples, world_size)
        backward(ddp, last, examples, world_size)
        gradients.append({name: whole(p) for name, p in model.named_parameters()})
        model.zero_grad()
    return gradients


@pytest.mark.parametrize("has_hook", [False, True])
def test_plans_end_in_lockstep_when_ddp_reduces_by_itself(has_hook):
    seed = SEEDS[has_hook]
    by_rank = run_threads_with_groups(
        under_ddp_in_lockstep, 4, 2, seed, has_hook, launches=ONE_QUEUE, seed=seed
    )
    check_gradients(by_rank)


# ---- FSDP2


def under_fsdp2(rank, world_size, nodes, seed, checkpointing, policy):
    examples = documents(LENGTHS)
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    communicator = join(topology, use_blocks=True)
    model = llama(checkpointing=checkpointing)
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    layers[0].set_modules_to_forward_prefetch(layers[1:2])
    for unit in [*layers, model]:
        unit._set_unshard_async_op(True)  # gathered ahead, and waited for where it is used
    policies = FsdpPolicies(None, communicator, over_replicas=False)
    policies.find_units(model)
    gradients = []
    for plan in drawn_plans(world_size, nodes, seed):
        *earlier, last = micro_batches(communicator, plan, examples, lockstep=True)
        with policies.whole_step(policy):
            for inputs in earlier:
                with policies.before_last(policy):
                    backward(model, inputs, examples, world_size)
            backward(model, last, examples, world_size)
        gradients.append({name: whole(p) for name, p in model.named_parameters()})
        model.zero_grad()
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
@pytest.mark.parametrize(("world_size", "nodes"), CASES)
def test_plans_end_under_fsdp2_in_lockstep(launches, world_size, nodes, checkpointing, policy):
    seed = SEEDS[checkpointing]
    by_rank = run_threads_with_groups(
        under_fsdp2,
        world_size,
        nodes,
        seed,
        checkpointing,
        policy,
        launches=launches,
        seed=seed,
        seconds=60 + PLANS,
    )
    check_gradients(by_rank)


# ---- planted faults


def plan_that_ends_apart():
    """A plan whose first micro-batch is the last one of rank 0 and not of rank 1."""
    wide = Group(ranks=(0, 1), sequences=(0, 1, 2, 3), strategy="ulysses")
    narrow = Group(ranks=(1, 2), sequences=(4, 5), strategy="zigzag")
    return Plan(
        lengths=LENGTHS,
        micro_batches=(MicroBatch(groups=(wide,)), MicroBatch(groups=(narrow,))),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="by hand",
        planning_s=0.0,
    )


def reduced_by_ddp(rank, world_size):
    """Every rank reduces in its own last micro-batch, as DDP does by itself."""
    examples = documents(LENGTHS)
    communicator = join(Topology(nodes=1, ranks_per_node=world_size))
    model = llama()
    ddp = DistributedDataParallel(model, **SMALL_BUCKETS)
    *earlier, last = micro_batches(
        communicator, plan_that_ends_apart(), examples, lockstep=False, has_passes=False
    )
    for inputs in earlier:
        with ddp.no_sync():
            backward(ddp, inputs, examples, world_size)
    backward(ddp, last, examples, world_size)
    return [{name: whole(p) for name, p in model.named_parameters()}]


def test_ddps_own_reduction_hangs_where_one_transfer_runs_at_a_time():
    hangs = "no rank can go on: rank 0 is in allreduce .*behind it stands"
    with pytest.raises(RuntimeError, match=hangs):
        run_threads_with_groups(reduced_by_ddp, 3, launches=ONE_QUEUE, seed=1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ddps_own_reduction_ends_where_posts_are_independent(seed):
    by_rank = run_threads_with_groups(reduced_by_ddp, 3, launches=Launches.BY_TAG, seed=seed)
    check_gradients(by_rank)


def reduced_by_us(rank, world_size, early):
    """Reduced after the last micro-batch of the plan; by the ranks that are `early` before it."""
    examples = documents(LENGTHS)
    communicator = join(Topology(nodes=1, ranks_per_node=world_size))
    model = llama()
    ddp = DistributedDataParallel(model)
    *earlier, last = micro_batches(
        communicator, plan_that_ends_apart(), examples, lockstep=True, has_passes=False
    )
    with ddp.no_sync():
        for inputs in earlier:
            backward(ddp, inputs, examples, world_size)
        if rank in early:
            average_gradients(ddp, communicator)
        backward(ddp, last, examples, world_size)
    if rank not in early:
        average_gradients(ddp, communicator)
    return [{name: whole(p) for name, p in model.named_parameters()}]


@pytest.mark.parametrize("launches", Launches)
def test_a_reduction_moved_by_one_micro_batch_is_caught(launches):
    check_gradients(run_threads_with_groups(reduced_by_us, 3, (), launches=launches))
    with pytest.raises(RuntimeError, match="no rank can go on.*rank 1 is in all_reduce"):
        run_threads_with_groups(reduced_by_us, 3, (1,), launches=launches)
