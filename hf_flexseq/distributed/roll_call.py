"""A roll call: who is still there after a collective has failed.

All ranks of a collective see it fail, and none is told which rank caused it. All ranks
that are left then send each other a message over a CPU group, and those that do not answer are
missing.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.program.tags import ROLL_CALL

ROLL_CALL_S = 2  # seconds that a rank has to answer
LEAST_WAIT_S = 0.1  # seconds to wait for an answer when the time of the roll call is over


def roll_call(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Return the global ranks that do not answer within `ROLL_CALL_S` on a gloo group of all."""
    deadline = time.monotonic() + ROLL_CALL_S
    calls = {rank: _call(group, rank) for rank in ranks}
    return [rank for rank, works in calls.items() if not _answered(works, deadline)]


def _call(group: dist.ProcessGroup, rank: int) -> list[dist.Work]:
    """Post a message [1] to a rank and one from it; none when the rank is known to be gone."""
    try:
        return [
            dist.irecv(torch.zeros(1), rank, group=group, tag=ROLL_CALL),
            dist.isend(torch.zeros(1), rank, group=group, tag=ROLL_CALL),
        ]
    except RuntimeError:
        return []


def _answered(works: Sequence[dist.Work], deadline: float) -> bool:
    """Return whether a call has come through by `deadline`, a time of `time.monotonic`."""
    if not works:
        return False
    try:
        for work in works:
            left_s = max(deadline - time.monotonic(), LEAST_WAIT_S)
            if not work.wait(timedelta(seconds=left_s)):
                return False
    except RuntimeError:
        return False
    return True
