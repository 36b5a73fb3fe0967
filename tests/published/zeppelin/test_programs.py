"""Programs with routes and remapping end on the strictest transport.

Their results are tested by random runs, in tests/attention/test_never_hangs.py.
"""

import random
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.program.compile import BACKWARD
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from hf_flexseq.published.zeppelin.routes import routed_posts
from tests.plans import group, plan_of_groups, random_plan
from tests.program.check import ProgramError, check
from tests.program.rank_programs import programs_of
from tests.published.zeppelin.gainful_passes import Always

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


def test_a_packet_that_is_sent_across_is_not_read_before_it_arrives():
    """Its rows come too late, and are read by another view of the same memory."""
    topology = Topology(nodes=2, ranks_per_node=2)
    plan = zeppelin_plan(4, 2, random.Random(0))
    passes = Always(topology, remap=False)
    given = (plan.micro_batches[0], plan.lengths, topology, SHAPE)
    programs = programs_of(*given, device="cpu", passes=passes)[BACKWARD]
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
