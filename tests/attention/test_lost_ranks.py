"""A rank that dies or falls silent in the middle of a step: the others raise, and say who and what
is missing."""

import os
import re
import signal
import time

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.published.zeppelin.always import Always
from tests.ranks import be_silent, give_up, run_ranks

pytestmark = pytest.mark.processes


LOST, GROUP_SECONDS = 2, 3
LENGTHS = (16, 9, 23)
MESSAGE = (
    r"rank (\d) could not (send to|receive from|exchange with) ranks? \[?2\b.* sequences? .*, "
    r"of the {strategy} group of ranks 0-3"
)
CHUNKS = r"chunks \[\d.*\] of sequence \d"


TWO_NODES = Topology(nodes=2, ranks_per_node=2)
ROUTED = (
    r"could not (send to|receive from) rank 2 (pieces of what rank \d sends to rank \d.*|.* "
    r"sequence \d.*), "
    "of the zigzag group of ranks 0-3"
)


def run_until_one_is_lost(rank, world_size, strategy, dies, passes=None):
    """How long this rank was left waiting, and with which words it gave up."""
    communicator = Communicator(TWO_NODES)
    group = Group(
        ranks=tuple(range(world_size)), sequences=tuple(range(len(LENGTHS))), strategy=strategy
    )
    shard = make_shard(MicroBatch(groups=(group,)), LENGTHS, rank)
    seq_ctx = SequenceContext(
        shard,
        communicator,
        choose_kernel(torch.device("cpu"), torch.float32, 4),
        torch.device("cpu"),
        passes=passes,
    )
    x = torch.randn(shard.tokens, 4, 4, requires_grad=True)
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


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "silent"])
@pytest.mark.parametrize("strategy", ["ulysses", "zigzag", "balanced", "hybrid"])
def test_the_others_raise_and_name_it(strategy, dies):
    found = run_ranks(
        run_until_one_is_lost,
        4,
        strategy,
        dies,
        group_seconds=30 if dies else GROUP_SECONDS,
        may_die=(LOST,) if dies else (),
    )
    assert found.pop(LOST) is None
    assert all(seconds < (15 if dies else 5 * GROUP_SECONDS) for seconds, _ in found), found
    named = [
        message for _, message in found if re.search(MESSAGE.format(strategy=strategy), message)
    ]
    assert named, found
    if strategy != "ulysses":
        assert any(re.search(CHUNKS, message) for message in named), named


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "silent"])
def test_who_waits_for_pieces_of_other_ranks_names_it_too(dies):
    options = {"group_seconds": 30 if dies else GROUP_SECONDS, "may_die": (LOST,) if dies else ()}
    found = run_ranks(
        run_until_one_is_lost, 4, "zigzag", dies, Always(TWO_NODES, remap=False), **options
    )
    assert found.pop(LOST) is None
    assert all(seconds < (15 if dies else 5 * GROUP_SECONDS) for seconds, _ in found), found
    assert any(re.search(ROUTED, message) for _, message in found), found
