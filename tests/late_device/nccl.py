"""A process group that calls itself nccl, over gloo: ranks are processes, each with the device.

Tensors of the device travel on a stream of the process group, behind what the current stream has
when they are posted; a wait makes the current stream wait for it. Messages between two ranks match
by their order, as on NCCL, whatever their tags are. Tensors of the CPU go to gloo as they are.

A sum or another collective is waited for at once, by the stream; of a message the wait is the
caller's. The host waits inside, where NCCL's would not.
"""

from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from tests.distributed.stub import nccl_options
from tests.late_device.install import ops

NAME = "late_nccl"  # under which torch knows it
_library = torch.library.Library("_c10d_functional", "IMPL")


def register():
    """Make torch use it wherever somebody asks for nccl."""
    dist.Backend.register_backend(NAME, _make, devices=["cuda", "cpu"])
    dist.ProcessGroupNCCL = SimpleNamespace(Options=nccl_options)  # a CPU build lacks it
    _library.impl("all_gather_into_tensor", _all_gather, "CUDA")
    for name in ("init_process_group", "new_group"):
        original = getattr(dist.distributed_c10d, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, _renamed(original))


def _all_gather(given, size, name):
    """What DTensor asks for: given [n, ...] -> [size * n, ...]."""
    group = dist.distributed_c10d._resolve_process_group(name)
    output = given.new_empty(given.shape[0] * size, *given.shape[1:])
    group.all_gather_single(output, given.contiguous())
    return output


def _renamed(function):
    def call(*args, **options):
        for of_nccl in ("device_id", "pg_options"):
            options.pop(of_nccl, None)
        given = str(options.get("backend", args[0] if args else None) or "")
        if "nccl" in given:
            options["backend"] = NAME
        return function(*args, **options)

    return call


def _make(store, rank, size, timeout):
    return LateNccl(store, rank, size, timeout)


class LateNccl(dist.ProcessGroup):
    """The process group of one rank."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._size = size
        self._stream = torch.cuda.Stream()
        self._messages = Counter()  # by (sender, receiver)
        self.options = SimpleNamespace(_timeout=timeout)
        self.supports_splitting = False

    def size(self):
        return self._size

    def name(self):
        return "nccl"

    def getBackendName(self):
        return "nccl"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _get_backend(self, device):
        return self if torch.device(device).type == "cuda" else self._gloo

    @property
    def _device_types(self):
        return [torch.device("cuda"), torch.device("cpu")]

    # ---- messages

    def _number(self, sender, receiver):
        self._messages[sender, receiver] += 1
        return self._messages[sender, receiver]

    def send(self, tensors, peer, tag=0):
        (tensor,) = tensors
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            ops.touch("ncclSend", [tensor], [])
        copy = ops.cpu(tensor).clone()
        work = self._gloo.send([copy], peer, self._number(self.rank(), peer))
        return Message(work, self._stream.record_event(), kept=(tensor, copy))

    def recv(self, tensors, peer, tag=0):
        (tensor,) = tensors
        posted = torch.cuda.current_stream().record_event()
        arrived = torch.empty_like(ops.cpu(tensor))
        work = self._gloo.recv([arrived], peer, self._number(peer, self.rank()))

        def arrive():
            self._stream.wait_event(posted)
            with torch.cuda.stream(self._stream):
                ops.touch("ncclRecv", [], [tensor])
            ops.cpu(tensor).copy_(arrived)
            return self._stream.record_event()

        return Message(work, arrive, kept=(arrived,))

    # ---- collectives

    def _collective(self, name, reads, writes, run):
        """Run a collective of gloo on the host's views, as a launch on this group's stream."""
        reads, writes = list(reads), list(writes)
        if any(x.is_cuda for x in (*reads, *writes)):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                ops.touch(name, reads, writes)
            run().wait()
            torch.cuda.current_stream().wait_stream(self._stream)
        else:
            run().wait()
        done = Future()
        done.set_result(writes)
        return _create_work_from_future(done)

    def allreduce(self, tensors, options=None):
        options = options or dist.AllreduceOptions()
        views = [ops.cpu(x) for x in tensors]
        is_mean = options.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            options.reduceOp = dist.ReduceOp.SUM

        def run():
            work = self._gloo.allreduce(views, options)
            if is_mean:
                work.wait()
                for view in views:
                    view.div_(self._size)
            return work

        return self._collective("ncclAllReduce", tensors, tensors, run)

    def broadcast(self, tensors, options):
        views = [ops.cpu(x) for x in tensors]
        return self._collective(
            "ncclBroadcast", tensors, tensors, lambda: self._gloo.broadcast(views, options)
        )

    def scatter(self, outputs, inputs, options):
        own = [ops.cpu(x) for x in outputs]
        of_ranks = [[ops.cpu(x) for x in of_input] for of_input in inputs]
        return self._collective(
            "ncclScatter",
            [x for of_input in inputs for x in of_input],
            outputs,
            lambda: self._gloo.scatter(own, of_ranks, options),
        )

    def allgather(self, outputs, inputs, options=None):
        own = [ops.cpu(x) for x in inputs]
        all_of = [[ops.cpu(x) for x in of_input] for of_input in outputs]
        return self._collective(
            "ncclAllGather",
            inputs,
            [x for of_input in outputs for x in of_input],
            lambda: self._gloo.allgather(all_of, own),
        )

    def all_gather_single(self, output, given, options=None):
        return self.allgather([list(output.chunk(self._size))], [given])

    def reduce_scatter_single(self, output, given, options=None):
        options = options or dist.ReduceScatterOptions()
        sums = ops.cpu(given).clone()  # gloo has no such collective of its own
        reducing = dist.AllreduceOptions()
        is_mean = options.reduceOp == dist.ReduceOp.AVG
        reducing.reduceOp = dist.ReduceOp.SUM if is_mean else options.reduceOp

        def run():
            work = self._gloo.allreduce([sums], reducing)
            work.wait()
            own = sums.chunk(self._size)[self.rank()].view(output.shape)
            ops.cpu(output).copy_(own / self._size if is_mean else own)
            return work

        return self._collective("ncclReduceScatter", [given], [output], run)

    def all_to_all_single(self, received, sent, received_counts, sent_counts, options=None):
        views = (ops.cpu(received), ops.cpu(sent))
        return self._collective(
            "ncclAllToAll",
            [sent],
            [received],
            lambda: self._gloo.alltoall_base(*views, received_counts, sent_counts),
        )

    def barrier(self, opts=None):
        return self._collective("barrier", [], [], lambda: self._gloo.barrier())


class Message:
    """A send or a receive that is under way."""

    def __init__(self, work, event, *, kept):
        self._work = work
        self._event = event  # or a function that makes it, once the data is here
        self._kept = kept

    def wait(self):
        self._work.wait()
        event = self._event() if callable(self._event) else self._event
        torch.cuda.current_stream().wait_event(event)
        self._kept = ()
