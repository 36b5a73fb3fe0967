"""Ranks that read their data for longer than the timeout of an exchange do not end the job."""

import logging
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_flexseq.distributed import own_work
from hf_flexseq.distributed.gloo_cpu_group import GlooCpuGroup
from hf_flexseq.distributed.own_work import OwnWork
from hf_flexseq.distributed.transport import LostRank
from tests.ranks import give_up, run_ranks

pytestmark = pytest.mark.processes


def slow_rank(rank, world_size, slow_s, silent):
    """What a rank with a timeout of 1 s gathers after rank 1 was busy for so long, and the log.
    silent: True if rank 1 gives no sign of life meanwhile."""
    own_work.BEAT_S, own_work.SILENT_S, own_work.SLOW_S = 0.1, 0.6, 1.2
    if silent:
        OwnWork._beat = lambda self, done: None
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(own_work.__name__).addHandler(handler)
    group = GlooCpuGroup(timedelta(seconds=1))
    began = time.monotonic()
    with group.own_work("step 3"):
        if rank == 1:
            time.sleep(slow_s)
    try:
        found = group.gather_values(rank)
    except LostRank as error:
        give_up()
        return str(error), time.monotonic() - began, said
    for _ in range(3):
        with group.own_work("step 4"):
            pass
    keys = dist.distributed_c10d._get_default_store().num_keys()
    return found, keys, said


def test_data_that_takes_longer_than_the_timeout_is_waited_for_and_named():
    (found, _, said), *others = run_ranks(slow_rank, 3, 2.5, False)
    assert found == [0, 1, 2]
    assert all(result[0] == found for result in others)
    assert said
    assert all(line.startswith("step 3: rank 1 is still at its data, ") for line in said)
    assert not others[0][2]
    assert not others[1][2], "one rank says it"


def test_a_silent_rank_is_waited_for_by_the_exchange_alone():
    results = run_ranks(slow_rank, 2, 4.0, True, may_die=(1,))
    error, waited_s, _ = results[0]
    assert "rank 1" in error
    assert waited_s < 3.5, "the silence and the timeout"


def test_the_store_does_not_grow_with_the_steps():
    store = dist.HashStore()
    works = [OwnWork(store, 0, 1) for _ in range(1)]
    sizes = []
    for _ in range(5):
        with works[0].of_rank("a step"):
            pass
        sizes.append(store.num_keys())
    assert sizes[1:] == [sizes[1]] * 4
