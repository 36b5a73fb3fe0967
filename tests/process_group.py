"""A process group of torch.distributed between ranks that are threads: DDP and FSDP2 run on it.

    run_threads_with_groups    `run_threads`, with torch's default group on every rank

Each collective is one post in the launch queue of its rank, between the posts of attention. It
is held to the same rules: what it writes is NaN until it is waited for, and a wait that can never
end names both sides.

torch keeps its groups in one record per process. Here each thread has a record of its own, and the
registry in C++ is told to keep one for each thread, too.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.autograd import Variable

from tests.ranks import join, run_threads
from tests.threads import ThreadPending, ThreadTransport

BACKEND = "flexseq_threads"

needs_new_names = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "all_gather_single"),
    reason="before torch 2.13 collectives of process groups have other names",
)


def run_threads_with_groups(function: Any, world_size: int, *args: Any, **options: Any) -> Any:
    """Return the results of `function(rank, world_size, *args)` by rank; see `run_threads`."""

    def run_rank(rank: int, world_size: int, *args: Any) -> Any:
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store)
        return function(rank, world_size, *args)

    store = dist.HashStore()
    with _records_of_threads():
        return run_threads(run_rank, world_size, *args, **options)


# ---- torch's record of its groups


class ThreadRecord(threading.local):
    """What torch keeps about process groups; every thread sees one of its own."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []


@contextmanager
def _records_of_threads() -> Iterator[None]:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])
    of_process = dist.distributed_c10d._world
    excepthook = sys.excepthook  # which torch changes with every group
    dist.distributed_c10d._world = ThreadRecord()
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        dist.distributed_c10d._world = of_process
        sys.excepthook = excepthook


def _make_group(store: Any, rank: int, world_size: int, timeout: Any) -> "ThreadProcessGroup":
    transport = join().transport
    assert isinstance(transport, ThreadTransport)
    assert (rank, world_size) == (transport.rank, transport.world_size), "of all ranks only"
    return ThreadProcessGroup(transport)


# ---- collectives

Parts = list[list[torch.Tensor]]  # the inputs of all ranks, by rank


class ThreadWork(dist.Work):
    """A collective that was posted."""

    def __init__(self, pending: ThreadPending, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._pending: ThreadPending | None = pending
        self._outputs = list(outputs)
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is over. torch may wait several times."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.wait()
            self._future.set_result(self._outputs)
        return True

    def get_future(self) -> Any:
        """Return a future of the outputs.

        C++ waits for futures without giving up this rank's turn. DDP does so at the end of a
        backward, so the work is waited for just before.
        """
        if self._pending is not None:
            Variable._execution_engine.queue_callback(self.wait)
        return self._future


class ThreadProcessGroup(dist.ProcessGroup):
    """Collectives of all ranks, by the names that torch 2.13 calls them."""

    def __init__(self, transport: ThreadTransport) -> None:
        super().__init__(transport.rank, transport.world_size)
        self._transport = transport
        self._ranks = tuple(range(transport.world_size))

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def _post(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        combine: Callable[[Parts], list[torch.Tensor]],
    ) -> ThreadWork:
        shapes = [f"{x.dtype} {list(x.shape)}" for x in inputs]
        pending = self._transport.post_collective(
            self._ranks,
            f"{name} of {', '.join(shapes)}",
            inputs=[x.detach() for x in inputs],
            outputs=[x.detach() for x in outputs],
            combine=combine,
        )
        return ThreadWork(pending, outputs)

    # ---- the same result on all ranks

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ThreadWork:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
        return self._post("allreduce", tensors, tensors, lambda parts: _reduced(parts, operation))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> ThreadWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> ThreadWork:
        root = opts.rootRank
        return self._post(f"broadcast from {root}", tensors, tensors, lambda parts: parts[root])

    def barrier(self, opts: Any = None) -> ThreadWork:
        return self._post("barrier", [], [], lambda parts: [])

    # ---- gathered

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> ThreadWork:
        """outputs: for each input one tensor of its shape per rank."""
        flat = [output for of_input in outputs for output in of_input]

        def combine(parts: Parts) -> list[torch.Tensor]:
            return [of_rank[index] for index in range(len(inputs)) for of_rank in parts]

        return self._post("allgather", inputs, flat, combine)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> ThreadWork:
        """input: [n, ...]. output: [ranks * n, ...]"""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> ThreadWork:
        def combine(parts: Parts) -> list[torch.Tensor]:
            return [
                torch.cat([of_rank[index].reshape(-1) for of_rank in parts])
                for index in range(len(inputs))
            ]

        return self._post("all_gather_single", inputs, outputs, combine)

    # ---- scattered

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> ThreadWork:
        """inputs: for each output one tensor of its shape per rank."""
        flat = [x for of_output in inputs for x in of_output]
        own = range(self._transport.rank, len(flat), len(self._ranks))
        operation = opts.reduceOp.op

        def combine(parts: Parts) -> list[torch.Tensor]:
            return _reduced([[of_rank[i] for i in own] for of_rank in parts], operation)

        return self._post("reduce_scatter", flat, outputs, combine)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> ThreadWork:
        """input: [ranks * n, ...]. output: [n, ...]"""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> ThreadWork:
        pieces = [list(x.reshape(-1).chunk(len(self._ranks))) for x in inputs]
        return self.reduce_scatter(outputs, pieces, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> ThreadWork:
        """input, output: [rows of all ranks, ...], by rank; without rows they are cut evenly."""
        evenly = len(self._ranks)
        sent = input.split(input_rows) if input_rows else input.chunk(evenly)
        received = output.split(output_rows) if output_rows else output.chunk(evenly)

        def combine(parts: Parts) -> list[torch.Tensor]:
            return [of_rank[self._transport.rank] for of_rank in parts]

        pending = self._transport.post_collective(
            self._ranks,
            f"all_to_all of {input.dtype}",
            inputs=sent,
            outputs=received,
            combine=combine,
        )
        return ThreadWork(pending, [output])


def _reduced(parts: Parts, operation: Any) -> list[torch.Tensor]:
    """The tensors of all ranks reduced, in the order of the ranks."""
    assert operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"no {operation} here"
    results = []
    for tensors in zip(*parts, strict=True):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        if operation == dist.ReduceOp.AVG:
            total /= len(tensors)
        results.append(total)
    return results
