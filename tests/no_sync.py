"""A run on the device `meta`, which has shapes but no data: it shows where the host would wait for
a device.

`NoHostSync` sees every operation of a run, and refuses those that on CUDA make the host wait.
`alone` makes one rank of a job whose transfers end at once and move nothing.
"""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Capabilities, Lane, own_part
from hf_flexseq.kernels.upload import to_device

META = torch.device("meta")

aten = torch.ops.aten

# The shape of the result, or a number for the host, depends on data of the device.
_READ_BY_THE_HOST = {
    aten._local_scalar_dense,  # item, tolist, float, bool, int
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
_COPIES = {aten._to_copy, aten.copy_}


class HostSync(Exception):
    """Raised by what would make the host wait."""


class NoHostSync:
    """Surrounds a run, and raises HostSync in it for

    * numbers and shapes that the host reads from the device, and copies to the host;
    * a tensor of the host with dimensions, beside tensors of the device: it would be copied;
    * a tensor on the device, or an index of one, that is made of a list;
    * a copy to the device that is not one of `to_device`, which alone pins what it copies.
    """

    def __init__(self):
        self._modes = ExitStack()
        self._operations = _Operations()

    def __enter__(self):
        self._modes.enter_context(_Calls())
        self._modes.enter_context(self._operations)
        return self

    def __exit__(self, *error):
        self._modes.close()

    @property
    def uploads(self):
        """How many tensors `to_device` has copied."""
        return self._operations.uploads


class _Calls(TorchFunctionMode):
    """Sees what is called: torch copies lists to the device where no operation shows it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.get("device")
            if device is not None and torch.device(device) == META:
                raise HostSync("a tensor on the device is made of numbers of the host")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if args[0].device == META and any(isinstance(index, list) for index in indices):
                raise HostSync("an index of a tensor on the device is a list")
        if func is torch.Tensor.new_tensor and args[0].device == META:
            raise HostSync("a tensor on the device is made of numbers of the host")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Sees what is computed and copied, in backwards too."""

    def __init__(self):
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [x for x in tensors if x.device == META]
        on_host = [x for x in tensors if x.device != META]
        operation = func.overloadpacket
        if operation in _COPIES:
            self._check_copy(func, args, kwargs)
        elif on_device:
            if operation in _READ_BY_THE_HOST or _masks(operation, args):
                raise HostSync(f"{func} reads from the device")
            if any(x.dim() for x in on_host):
                raise HostSync(f"{func} takes a tensor of the host beside those of the device")
        return func(*args, **kwargs)

    def _check_copy(self, func, args, kwargs):
        """Raise HostSync for a copy between host and device, but for those of `to_device`."""
        if func.overloadpacket is aten.copy_:
            target, source = args[0].device, args[1]
        else:
            source = args[0]
            target = kwargs.get("device") or source.device
        if source.device == target:
            return
        if source.device == META:
            raise HostSync(f"{func} copies to the host")
        if not _called_by_to_device():
            raise HostSync(f"{func} copies to the device from memory that is not pinned")
        self.uploads += 1


def _masks(operation, args):
    """Whether an index of an indexing is a mask, which the host has to count."""
    if operation not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(x is not None and x.dtype == torch.bool for x in args[1])


def _called_by_to_device():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is to_device.__code__:
            return True
        frame = frame.f_back
    return False


# ---- a rank without others


class SilentTransport:
    """The transport of one rank whose peers send at once; nothing moves."""

    capabilities = Capabilities(ordered=True, waits_on_stream=True)

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def open_lane(self, kind, parts, *, peers=()):
        return Lane(kind, own_part(parts, self.rank))

    def post(self, lane, *, sends, recvs, label):
        for message in (*sends, *recvs):
            assert message.tensor.is_contiguous()
            assert message.tensor.device == META
        return SimpleNamespace(wait=lambda: None)


def alone(rank, topology):
    """The communicator of one rank; what it receives has come when it is posted."""
    return Communicator(topology, transport=SilentTransport(rank, topology.world_size))
