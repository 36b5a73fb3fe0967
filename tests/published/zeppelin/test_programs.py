"""Routed and remapped attention on ranks in two nodes: the results of what goes straight."""

import random
from dataclasses import replace

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.programs import layer_shape
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program.compile import (
    BACKWARD,
    BACKWARD_OF_ROWS,
    FORWARD,
    Machine,
    MicroBatchLayout,
    compile_program,
)
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from hf_flexseq.published.zeppelin.routes import routed_posts
from tests.plans import random_plan
from tests.program.check import ProgramError, check
from tests.published.zeppelin.always import Always
from tests.ranks import join, run_ranks, run_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Every time of a ring is a step of its own, however few tokens there are."""
    monkeypatch.setitem(WORTHY_PAIRS, "cpu", 1)
    routed_posts.cache_clear()
    yield
    routed_posts.cache_clear()


def zeppelin_plan(ranks, nodes, rng):
    """A random plan whose groups are rings, or local, and a ring over all ranks before it."""
    lengths = [rng.choice((1, 3, 9, 40, 97)) for _ in range(8)]
    plan = random_plan(lengths, ranks, rng, nodes=nodes)
    ring = Group(ranks=tuple(range(ranks)), sequences=(8, 9), strategy="zigzag")
    plan = replace(plan, lengths=(*lengths, 16 * ranks, rng.choice((1, 5, 50))))
    micro_batches = [MicroBatch(groups=(ring,))]
    for micro_batch in plan.micro_batches:
        groups = []
        for group in micro_batch.groups:
            strategy = "local" if group.degree == 1 else rng.choice(("zigzag", "ulysses"))
            groups.append(replace(group, strategy=strategy))
        micro_batches.append(MicroBatch(groups=tuple(groups)))
    return replace(plan, micro_batches=tuple(micro_batches))


def compiled(plan, index, topology, passes, shape):
    """The programs of all ranks, by what they do."""
    machine = Machine(topology=topology, device="cpu", wide_gradients=True)
    micro_batch = plan.micro_batches[index]
    shards = passes.shards(micro_batch, plan.lengths)
    found = {FORWARD: {}, BACKWARD: {}, BACKWARD_OF_ROWS: {}}
    for rank in range(topology.world_size):
        shard = shards[rank] if shards else make_shard(micro_batch, plan.lengths, rank)
        parts = MicroBatchLayout(shard, machine).parts
        rewrite = passes.of_programs(shard, machine)
        forward = None
        for what in found:
            program = compile_program(parts, what, shape, forward)
            forward = forward or program
            found[what][rank] = rewrite(program, what, shape)
    return found


@pytest.mark.parametrize("remap", [False, True])
@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        (2, 4),
        pytest.param(3, 6, marks=pytest.mark.slow),
        pytest.param(4, 8, marks=pytest.mark.slow),
        pytest.param(2, 8, marks=pytest.mark.nightly),
    ],
)
def test_programs_end_on_the_strictest_transport(nodes, ranks, remap):
    rng = random.Random(nodes * ranks)
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    passes = Always(topology, remap=remap)
    shape = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="float64")
    routed = 0
    for _ in range(12):
        plan = zeppelin_plan(ranks, nodes, rng)
        for index in range(len(plan.micro_batches)):
            straight = Always(topology, remap=remap, route=False)
            plain = compiled(plan, index, topology, straight, shape)
            for what, programs in compiled(plan, index, topology, passes, shape).items():
                check(programs, shape)
                before = sum(program.messages for program in plain[what].values())
                routed += sum(program.messages for program in programs.values()) > before
    assert routed > 0


def attention(communicator, micro_batch, lengths, dtype, passes):
    """Bytes of this rank's out, dq, dk and dv by (sequence, position), and its posts."""
    rank = communicator.rank
    shards = passes.shards(micro_batch, lengths)
    shard = shards[rank] if shards else make_shard(micro_batch, lengths, rank)
    kernel = choose_kernel(CPU, dtype, 8)
    seq_ctx = SequenceContext(shard, communicator, kernel, CPU, passes=passes)
    rows = [(s.sequence, t) for s in shard.slices for t in range(s.start, s.stop)]
    q, k, v, dout = (of_rows(rows, heads, dtype, seed) for seed, heads in enumerate((3, 1, 1, 3)))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    results = torch.cat([x.detach().flatten(1) for x in (out, q.grad, k.grad, v.grad)], dim=1)
    found = dict(zip(rows, results.contiguous().view(torch.uint8).tolist(), strict=True))
    shape = layer_shape(q, k)
    messages = sum(
        seq_ctx.programs.find(what, shape).program.messages for what in (FORWARD, BACKWARD)
    )
    return found, messages


def of_rows(rows, heads, dtype, seed):
    """[rows, heads, 8] that depend on the sequence and the position of a row alone."""
    parts = [torch.empty(0, heads, 8)]
    for sequence, position in rows:
        generator = torch.Generator().manual_seed(seed + 10 * position + 10_000 * sequence)
        parts.append(torch.randn(1, heads, 8, generator=generator))
    return torch.cat(parts).to(dtype)


def compare(rank, world_size, topology, cases):
    """Of each (micro-batch, lengths, dtype, remap): results and messages, without and with."""
    communicator = join(topology)
    found = []
    for micro_batch, lengths, dtype, remap in cases:
        plain = Always(topology, remap=False, route=False)
        with_passes = Always(topology, remap=remap)
        found.append(
            [
                attention(communicator, micro_batch, lengths, dtype, passes)
                for passes in (plain, with_passes)
            ]
        )
    return found


def assert_same(by_rank):
    """Return in how many cases there were more messages than without passes."""
    more = 0
    for of_case in zip(*by_rank, strict=True):
        plain, passed = {}, {}
        for (of_plain, _), (of_passed, _) in of_case:
            plain |= of_plain
            passed |= of_passed
        assert plain == passed
        more += sum(messages for _, (_, messages) in of_case) > sum(
            messages for (_, messages), _ in of_case
        )
    return more


RING = MicroBatch(groups=(Group(ranks=(0, 1, 2, 3), sequences=(0, 1, 2), strategy="zigzag"),))
ALONE = MicroBatch(
    groups=tuple(Group(ranks=(rank,), sequences=(rank,), strategy="local") for rank in range(4))
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    "start", [run_threads, pytest.param(run_ranks, marks=pytest.mark.processes)]
)
def test_a_ring_and_a_remapping_are_the_same_to_the_bit(start):
    cases = [(RING, (64, 3, 29), dtype, remap) for dtype in DTYPES for remap in (False, True)]
    cases += [(ALONE, (100, 30, 4, 2), dtype, True) for dtype in DTYPES]
    by_rank = start(compare, 4, Topology(nodes=2, ranks_per_node=2), cases)
    assert assert_same(by_rank) == len(cases)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_random_plans_are_the_same_to_the_bit(nodes, ranks):
    rng = random.Random(nodes)
    cases = []
    while len(cases) < 24:
        plan = zeppelin_plan(ranks, nodes, rng)
        for micro_batch in plan.micro_batches:
            cases.append((micro_batch, plan.lengths, torch.float32, rng.random() < 0.5))
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    by_rank = run_threads(compare, ranks, topology, cases)
    assert assert_same(by_rank) > len(cases) // 2


def test_a_packet_that_is_sent_across_is_not_read_before_it_arrives():
    """Its rows come too late, and are read by another view of the same memory."""
    topology = Topology(nodes=2, ranks_per_node=2)
    shape = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="float64")
    plan = zeppelin_plan(4, 2, random.Random(0))
    programs = compiled(plan, 0, topology, Always(topology, remap=False), shape)[BACKWARD]
    check(programs, shape)
    late = programs[0]
    posts = [one.constants for one in late.instructions if one.operation == "post"]
    receiving = next(number for number, spec, _ in posts if spec.recvs)
    place = next(
        index
        for index, one in enumerate(late.instructions)
        if one.operation == "wait" and one.constants == (receiving,)
    )
    before, after = late.instructions[:place], late.instructions[place + 1 :]
    programs[0] = late._replace(instructions=(*before, *after, late.instructions[place]))
    with pytest.raises(ProgramError, match="rank 0 reads before it waits"):
        check(programs, shape)
