"""Run a function on several ranks, under a watchdog.

    run_threads    ranks are threads of this process, on the transport that holds them to all rules
    run_ranks      ranks are forked processes, one thread each, over gloo
    run_cases      the same for several cases, as most of a short job is its start

The function gets its rank and the number of ranks, and connects to the others by `join`. Forking
costs a fifth of a second where spawning costs ten. The parent must not have touched CUDA. What a
forked rank has counted of a model (`hf/engine/layer_trial.py`) goes to the parent with its
results, so that ranks forked later know it, as one process would.
"""

import contextlib
import faulthandler
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_flexseq.distributed.communicator import Communicator
from tests.device import DEVICE
from tests.matching import Launches
from tests.threads import ThreadHub

DIED = "the process died"

_this_rank = threading.local()  # .transport, where this rank is a thread


def join(topology=None, *, use_blocks=False):
    """This rank's communicator, whatever kind of rank it is. use_blocks: with a group for every
    aligned block."""
    transport = getattr(_this_rank, "transport", None)
    communicator = Communicator(topology, transport=transport)
    if use_blocks:
        communicator.open_blocks(range(2, communicator.world_size + 1))
    return communicator


def host_exchanges(communicator):
    """How many exchanges of the CPU group this rank has had, where it is a thread."""
    return communicator.transport.hub.meetings._next[communicator.rank]


def run_threads(function, world_size, *args, launches=Launches.BY_LANE, seed=None, seconds=60):
    """`function(rank, world_size, *args)` on every rank; the results by rank. seconds: for which a
    rank may compute before it posts or waits again."""

    def run_rank(transport):
        _this_rank.transport = transport
        return function(transport.rank, world_size, *args)

    hub = ThreadHub(world_size, launches=launches, seed=seed, device=DEVICE)
    return hub.run(run_rank, seconds=seconds)


def run_ranks(
    function, world_size, *args, seconds=60, group_seconds=120, may_die=(), ranks_per_node=None
):
    """`function(rank, world_size, *args)` on every rank; the results by rank, None of those that
    `may_die` and did.

    ranks_per_node: as a launcher would report them; None is one node for all. group_seconds: the
    timeout of the process group. Raises AssertionError with the traceback of the first rank that
    failed, or naming the ranks that were still running after `seconds`.
    """
    # a forked child of a multi-threaded parent hangs in its first parallel region
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            limits = (seconds, group_seconds)
            sizes = (world_size, ranks_per_node or world_size)
            process = context.Process(
                target=_main, args=(there, folder, limits, function, rank, sizes, args, may_die)
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + seconds, may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_cases(function, world_size, cases, **options):
    """`function(rank, world_size, *case)` for each of `cases` on the same forked ranks; the
    results by case, then by rank. options: those of `run_ranks`."""
    by_rank = run_ranks(_each_case, world_size, function, list(cases), **options)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _each_case(rank, world_size, function, cases):
    environment = dict(os.environ)
    results = []
    for case in cases:
        torch.manual_seed(0)
        results.append(function(rank, world_size, *case))
        # the next case finds the process as the first one did
        os.environ.clear()
        os.environ.update(environment)
        state = sys.modules.get("accelerate.state")
        if state is not None:
            state.AcceleratorState._reset_state(True)
    return results


def leave_out_of_collections():
    """Leave all that a fork has of its parent out of garbage collection. accelerate asks for a
    full one after every training, which would walk and so copy the parent's memory."""
    gc.freeze()


def be_silent():
    """Answer to no rank until all others have called `give_up`."""
    while _given_up(0) < dist.get_world_size() - 1:
        time.sleep(0.02)


def give_up():
    """Say that this rank no longer waits for the one that is silent."""
    _given_up(1)


def _given_up(count):
    """Add to the number of ranks that have given up, and return it."""
    return dist.distributed_c10d._get_default_store().add("given up", count)


def _collect(pipes, deadline, may_die):
    results = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=max(deadline - time.monotonic(), 0)
        )
        assert ready, f"ranks {sorted(waiting.values())} did not finish in time"
        failed = {}
        for pipe in ready:
            rank = waiting.pop(pipe)
            ok, value = _answer(pipe)
            if not ok and not (value == DIED and rank in may_die):
                failed[rank] = value
            results[rank] = value if ok else None
        if failed:
            failed |= _died(waiting)
            # What another rank raised may come of a death, and never the other way round.
            cause = min(failed, key=lambda rank: (failed[rank] != DIED, rank))
            raise AssertionError(f"rank {cause} failed:\n{failed[cause]}")
    return [results[rank] for rank in range(len(pipes))]


def _answer(pipe):
    """Whether a rank has returned, and what: its result, its traceback, or DIED."""
    try:
        ok, value = pipe.recv()
    except EOFError:
        return False, DIED
    if ok:
        value, learned = value
        _counted().update(map(pickle.loads, learned))
    return ok, value


def _counted():
    """What this process has counted of models; nothing before it has imported the module."""
    module = sys.modules.get("hf_flexseq.hf.engine.layer_trial")
    return {} if module is None else inspect.getclosurevars(module._count).nonlocals["kept"]


def _learned(known):
    """Pickles of what this process has counted that is not in `known`. What has a class that is
    defined in a function has none."""
    pickles = []
    for key, kept in _counted().items():
        if key not in known:
            with contextlib.suppress(pickle.PicklingError, AttributeError):
                pickles.append(pickle.dumps((key, kept._replace(code=()))))
    return pickles


def _died(waiting):
    """The ranks of these pipes that die within a second: others may know of it before the pipe."""
    died = {}
    for pipe in multiprocessing.connection.wait(list(waiting), timeout=1):
        ok, value = _answer(pipe)
        if not ok and value == DIED:
            died[waiting[pipe]] = DIED
    return died


def _main(pipe, folder, limits, function, rank, sizes, args, may_die):
    leave_out_of_collections()
    seconds, group_seconds = limits
    world_size, ranks_per_node = sizes
    # where a rank hangs
    faulthandler.dump_traceback_later(max(seconds - 2, 1), file=sys.__stderr__)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(
        LOCAL_WORLD_SIZE=str(ranks_per_node), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    # torch's thread pool did not survive the fork, and is made anew by the first thread that sets
    # its number of threads. Two at once, as where transformers loads a model, would find none.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_seconds),
        )
        known = set(_counted())
        result = function(rank, world_size, *args)
        pipe.send((True, (result, _learned(known))))
        # where a rank may die the others end without waiting for each other, as a script that
        # raised does: who still waits for one of them has to see its connections close
        if not may_die:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no interpreter exit: gloo's threads sometimes abort it
