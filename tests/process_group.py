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
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.autograd import Variable

from tests.ranks import join, run_threads
from tests.threads import ThreadTransport, sum_of

BACKEND = "flexseq_threads"

needs_new_names = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "all_gather_single"),
    reason="before torch 2.13 collectives of process groups have other names",
)


def run_threads_with_groups(function, world_size, *args, **options):
    """Return the results of `function(rank, world_size, *args)` by rank; see `run_threads`."""

    def run_rank(rank, world_size, *args):
        dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=store)
        return function(rank, world_size, *args)

    store = dist.HashStore()
    with _records_of_threads():
        return run_threads(run_rank, world_size, *args, **options)


# ---- torch's record of its groups


class ThreadRecord(threading.local):
    """What torch keeps about process groups; every thread sees one of its own."""

    def __init__(self):
        self.default_pg = None
        self.group_count = 0
        self.comms = []
        for name in ("map", "names", "group_ranks", "backend_config", "to_tag", "coalesce_state"):
            setattr(self, f"pg_{name}", {})
        self.tags_to_pg = {}


@contextmanager
def _records_of_threads():
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
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


def _make_group(options, backend_options):
    transport = join().transport
    assert isinstance(transport, ThreadTransport)
    # torch gives no ranks for the default group, of all ranks
    ranks = tuple(options.global_ranks_in_group) or tuple(range(transport.world_size))
    assert ranks.index(transport.rank) == options.group_rank
    return ThreadProcessGroup(transport, ranks)


# ---- collectives


class ThreadWork(dist.Work):
    """A collective that was posted."""

    def __init__(self, pending, outputs):
        super().__init__()
        self._pending = pending
        self._outputs = list(outputs)
        self._future = torch.futures.Future()

    def wait(self, timeout=None):
        """Wait until it is over. torch may wait several times."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.wait()
            self._future.set_result(self._outputs)
        return True

    def get_future(self):
        """Return a future of the outputs.

        C++ waits for futures without giving up this rank's turn. DDP does so at the end of a
        backward, so the work is waited for just before.
        """
        if self._pending is not None:
            Variable._execution_engine.queue_callback(self.wait)
        return self._future


class ThreadProcessGroup(dist.ProcessGroup):
    """Collectives of some ranks, by the names that torch 2.13 calls them.

    `combine` functions get the inputs of all ranks of the group, by index in it. Tensors called
    `input` and `output` are [ranks * n, ...] where they are of all of them.
    """

    def __init__(self, transport, ranks):
        self._index = ranks.index(transport.rank)
        super().__init__(self._index, len(ranks))
        self._transport = transport
        self._ranks = ranks

    def getBackendName(self):
        return BACKEND

    @property
    def group_name(self):
        """The name under which torch has registered the group."""
        return dist.distributed_c10d._world.pg_names[self]

    def _post(self, what, inputs, outputs, combine):
        pending = self._transport.post_collective(
            self._ranks,
            what,
            inputs=[x.detach() for x in inputs],
            outputs=[x.detach() for x in outputs],
            combine=combine,
        )
        return ThreadWork(pending, outputs)

    # ---- the same result on all ranks

    def allreduce(self, tensors, opts=None):
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
        what = _named("allreduce", tensors)
        return self._post(what, tensors, tensors, lambda parts: _reduced(parts, operation))

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors, opts):
        root = opts.rootRank
        what = _named(f"broadcast from {root}", tensors)
        return self._post(what, tensors, tensors, lambda parts: parts[root])

    def barrier(self, opts=None):
        return self._post("barrier", [], [], lambda parts: [])

    # ---- gathered

    def allgather(self, outputs, inputs, opts=None):
        """outputs: for each input one tensor of its shape per rank."""
        flat = [output for of_input in outputs for output in of_input]

        def combine(parts):
            return [of_rank[index] for index in range(len(inputs)) for of_rank in parts]

        return self._post(_named("allgather", inputs), inputs, flat, combine)

    def all_gather_single(self, output, input, opts=None):
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        def combine(parts):
            by_input = zip(*parts, strict=True)
            return [torch.cat([x.reshape(-1) for x in of_ranks]) for of_ranks in by_input]

        return self._post(_named("all_gather_single", inputs), inputs, outputs, combine)

    # ---- scattered

    def reduce_scatter(self, outputs, inputs, opts):
        """inputs: for each output one tensor of its shape per rank."""
        flat = [x for of_output in inputs for x in of_output]
        own = range(self._index, len(flat), len(self._ranks))
        operation = opts.reduceOp.op

        def combine(parts):
            return _reduced([[of_rank[i] for i in own] for of_rank in parts], operation)

        return self._post(_named("reduce_scatter", flat), flat, outputs, combine)

    def reduce_scatter_single(self, output, input, opts):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        pieces = [list(x.reshape(-1).chunk(len(self._ranks))) for x in inputs]
        return self.reduce_scatter(outputs, pieces, opts)

    def all_to_all_single(self, output, input, output_rows, input_rows, opts=None):
        """Without rows they are cut evenly."""
        evenly = len(self._ranks)
        sent = input.split(input_rows) if input_rows else input.chunk(evenly)
        received = output.split(output_rows) if output_rows else output.chunk(evenly)

        def combine(parts):
            return [of_rank[self._index] for of_rank in parts]

        # ranks may send different numbers of rows
        return self._post(f"all_to_all of {input.dtype}", sent, received, combine)


def _named(name, tensors):
    """What must be equal on all ranks of a collective."""
    return f"{name} of {', '.join(f'{x.dtype} {list(x.shape)}' for x in tensors)}"


def _reduced(parts, operation):
    """The tensors of all ranks reduced, in the order of the ranks."""
    assert operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"no {operation} here"
    results = [sum_of(of_ranks) for of_ranks in zip(*parts, strict=True)]
    if operation == dist.ReduceOp.AVG:
        for total in results:
            total /= len(parts)
    return results
