"""A planted fault in a program with routes. That such programs end with the right results is shown
by random runs, in tests/attention/test_never_hangs.py."""

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.program.compile import BACKWARD
from hf_flexseq.program.instructions import LayerShape
from tests.plans import one_group
from tests.program.check import ProgramError, check
from tests.program.rank_programs import programs_of
from tests.published.zeppelin.gainful_passes import Always

SHAPE = LayerShape(query_heads=4, kv_heads=2, head_dim=8, dtype="float64")


def test_a_packet_that_is_sent_across_is_not_read_before_it_arrives():
    """Its rows come too late, and are read by another view of the same memory."""
    topology = Topology(nodes=2, ranks_per_node=2)
    passes = Always(topology, remap=False)
    given = (one_group(range(4), 2, "zigzag"), (64, 5), topology, SHAPE)
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
