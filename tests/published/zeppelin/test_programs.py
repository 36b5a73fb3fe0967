"""Routed and remapped attention on ranks in two nodes: the results of what goes straight."""

import random
from dataclasses import replace

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.attention.programs import layer_shape
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import MicroBatch
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
from tests.plans import group, plan_of_groups, random_plan
from tests.program.check import ProgramError, check
from tests.published.zeppelin.always import Always
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
SHAPE = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="float64")


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
    micro_batches = [[group(0, ranks, 8, 9, strategy="zigzag")]]
    for micro_batch in plan.micro_batches:
        groups = []
        for one in micro_batch.groups:
            strategy = "local" if one.degree == 1 else rng.choice(("zigzag", "ulysses"))
            groups.append(replace(one, strategy=strategy))
        micro_batches.append(groups)
    lengths = (*lengths, 16 * ranks, rng.choice((1, 5, 50)))
    return plan_of_groups(lengths, *micro_batches)


def held_by(rank, micro_batch, lengths, passes):
    """What a rank holds of a micro-batch, remapped or not."""
    shards = passes.shards(micro_batch, lengths)
    return shards[rank] if shards else make_shard(micro_batch, lengths, rank)


def compiled(micro_batch, lengths, topology, passes):
    """The programs of all ranks, by what they do."""
    machine = Machine(topology=topology, device="cpu", wide_gradients=True)
    found = {FORWARD: {}, BACKWARD: {}, BACKWARD_OF_ROWS: {}}
    for rank in range(topology.world_size):
        shard = held_by(rank, micro_batch, lengths, passes)
        parts = MicroBatchLayout(shard, machine).parts
        rewrite = passes.of_programs(shard, machine)
        forward = None
        for what in found:
            program = compile_program(parts, what, SHAPE, forward)
            forward = forward or program
            found[what][rank] = rewrite(program, what, SHAPE)
    return found


@pytest.mark.parametrize("remap", [False, True])
@pytest.mark.parametrize(
    ("nodes", "ranks", "plans"),
    [
        (2, 4, 3),
        pytest.param(3, 6, 3, marks=pytest.mark.slow),
        pytest.param(4, 8, 12, marks=pytest.mark.nightly),
    ],
)
def test_programs_end_on_the_strictest_transport(nodes, ranks, plans, remap):
    rng = random.Random(nodes * ranks)
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    straight = Always(topology, remap=remap, route=False)
    routing = Always(topology, remap=remap)
    routed = 0
    for _ in range(plans):
        plan = zeppelin_plan(ranks, nodes, rng)
        for micro_batch in plan.micro_batches:
            plain = compiled(micro_batch, plan.lengths, topology, straight)
            for what, programs in compiled(micro_batch, plan.lengths, topology, routing).items():
                check(programs, SHAPE)
                before = sum(program.messages for program in plain[what].values())
                routed += sum(program.messages for program in programs.values()) > before
    assert routed > 0


def attention(communicator, micro_batch, lengths, dtype, passes):
    """Bytes of this rank's out, dq, dk and dv by (sequence, position), and its posts."""
    shard = held_by(communicator.rank, micro_batch, lengths, passes)
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
    of_row = [31 * sequence + 17 * position for sequence, position in rows]
    numbers = torch.tensor(of_row, dtype=torch.int64)[:, None] + 7 * torch.arange(heads * 8) + seed
    return ((numbers % 101 - 50) / 25).view(-1, heads, 8).to(dtype)


def compare(rank, world_size, topology, cases):
    """Of each (micro-batch, lengths, dtype, remap): results and messages, without and with."""
    communicator = join(topology)
    plain = Always(topology, remap=False, route=False)
    found = []
    for *case, remap in cases:
        both = (plain, Always(topology, remap=remap))
        found.append([attention(communicator, *case, passes) for passes in both])
    return found


def assert_same(by_rank):
    """Return in how many cases there were more messages than without passes."""
    more = 0
    for of_case in zip(*by_rank, strict=True):
        rows, messages = [{}, {}], [0, 0]  # without and with passes
        for of_rank in of_case:
            for passes, (found, count) in enumerate(of_rank):
                rows[passes] |= found
                messages[passes] += count
        assert rows[0] == rows[1]
        more += messages[1] > messages[0]
    return more


def test_a_ring_and_a_remapping_are_the_same_to_the_bit():
    ring = MicroBatch(groups=(group(0, 4, 0, 1, 2, strategy="zigzag"),))
    alone = MicroBatch(groups=tuple(group(rank, rank + 1, rank) for rank in range(4)))
    cases = []
    for dtype in (torch.float64, torch.bfloat16):
        cases += [(ring, (64, 3, 29), dtype, remap) for remap in (False, True)]
        cases.append((alone, (100, 30, 4, 2), dtype, True))
    by_rank = run_threads(compare, 4, Topology(nodes=2, ranks_per_node=2), cases)
    assert assert_same(by_rank) == len(cases)


@pytest.mark.slow
def test_random_plans_are_the_same_to_the_bit():
    rng = random.Random(3)
    cases = []
    while len(cases) < 10:
        plan = zeppelin_plan(6, 3, rng)
        for micro_batch in plan.micro_batches:
            cases.append((micro_batch, plan.lengths, torch.float32, rng.random() < 0.5))
    by_rank = run_threads(compare, 6, Topology(nodes=3, ranks_per_node=2), cases)
    assert assert_same(by_rank) > len(cases) // 2


def test_a_packet_that_is_sent_across_is_not_read_before_it_arrives():
    """Its rows come too late, and are read by another view of the same memory."""
    topology = Topology(nodes=2, ranks_per_node=2)
    plan = zeppelin_plan(4, 2, random.Random(0))
    passes = Always(topology, remap=False)
    programs = compiled(plan.micro_batches[0], plan.lengths, topology, passes)[BACKWARD]
    check(programs, SHAPE)
    late = programs[0]
    posts = [one.constants for one in late.instructions if one.operation == "post"]
    receiving = next(number for number, spec, _ in posts if spec.recvs)
    waits = [one for one in late.instructions if one.operation == "wait"]
    wait = next(one for one in waits if one.constants == (receiving,))
    others = [one for one in late.instructions if one is not wait]
    programs[0] = late._replace(instructions=(*others, wait))
    with pytest.raises(ProgramError, match="rank 0 reads before it waits"):
        check(programs, SHAPE)
