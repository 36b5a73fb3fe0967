"""A rank that dies or falls silent in the middle of a step: the others raise, and say who and what
is missing."""

import os
import re
import signal
import time

import pytest
import torch

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from tests.attention.group import context_of
from tests.published.zeppelin.gainful_passes import Always
from tests.ranks import be_silent, give_up, join, run_ranks

pytestmark = pytest.mark.processes

LOST, GROUP_SECONDS = 2, 2
LENGTHS = (16, 9, 23)
TWO_NODES = Topology(nodes=2, ranks_per_node=2)
MESSAGE = (
    r"rank (\d) could not (send to|receive from|exchange with) ranks? \[?2\b.* sequences? .*, "
    r"of the {strategy} group of ranks 0-3"
)
CHUNKS = r"chunks \[\d.*\] of sequence \d"
ROUTED = (
    r"could not (send to|receive from) rank 2 (pieces of what rank \d sends to rank \d.*|.* "
    r"sequence \d.*), of the zigzag group of ranks 0-3"
)


def run_until_one_is_lost(rank, world_size, strategy, dies, passes):
    """How long this rank was left waiting, and with which words it gave up."""
    seq_ctx = context_of(join(TWO_NODES), strategy, LENGTHS, dtype=torch.float32, passes=passes)
    x = torch.randn(seq_ctx.tokens, 4, 8, requires_grad=True)
    out = sequence_parallel_attention(x, x, x, seq_ctx)
    if rank == LOST:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        be_silent()
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        out.sum().backward()
    seconds = time.monotonic() - start
    give_up()
    return seconds, str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "dies", "passes", "words"),
    [
        ("ulysses", False, None, [MESSAGE]),
        ("ulysses", True, None, [MESSAGE]),
        ("zigzag", False, None, [MESSAGE, CHUNKS]),
        ("balanced", True, None, [MESSAGE, CHUNKS]),
        ("hybrid", True, None, [MESSAGE, CHUNKS]),
        ("zigzag", True, Always(TWO_NODES, remap=False), [ROUTED]),
    ],
)
def test_the_others_raise_and_name_it(strategy, dies, passes, words):
    found = run_ranks(
        run_until_one_is_lost,
        4,
        strategy,
        dies,
        passes,
        group_seconds=30 if dies else GROUP_SECONDS,
        may_die=(LOST,) if dies else (),
    )
    assert found.pop(LOST) is None
    assert all(seconds < (15 if dies else 5 * GROUP_SECONDS) for seconds, _ in found), found
    patterns = [one.format(strategy=strategy) for one in words]
    assert any(all(re.search(one, said) for one in patterns) for _, said in found), found
