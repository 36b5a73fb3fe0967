"""Run a function on several gloo ranks: forked, one thread each, float64 by default, under a
watchdog.

Forking costs a fifth of a second where spawning costs ten. The parent must not have touched CUDA.
"""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    function: Any,
    world_size: int,
    *args: Any,
    seconds: float = 60,
    group_seconds: float = 120,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """`function(rank, world_size, *args)` on every rank; the results by rank, None of those that
    `may_die` and did.

    group_seconds: the timeout of the process group. Raises AssertionError with the traceback of
    the first rank that failed, or naming the ranks that were still running after `seconds`.
    """
    # a forked child of a multi-threaded parent hangs in its first parallel region
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            limits = (seconds, group_seconds)
            process = context.Process(
                target=_main, args=(there, folder, limits, function, rank, world_size, args)
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


def _collect(pipes: list[Connection], deadline: float, may_die: tuple[int, ...]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=max(deadline - time.monotonic(), 0)
        )
        assert ready, f"ranks {sorted(waiting.values())} did not finish in time"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = rank in may_die, None if rank in may_die else "the process died"
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _main(
    pipe: Connection,
    folder: str,
    limits: tuple[float, float],
    function: Any,
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
) -> None:
    seconds, group_seconds = limits
    # where a rank hangs
    faulthandler.dump_traceback_later(max(seconds - 2, 1), file=sys.__stderr__)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_seconds),
        )
        pipe.send((True, function(rank, world_size, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # no interpreter exit: gloo's threads sometimes abort it
