"""Install the device in this process. Import this module before torch: torch asks once whether
there is CUDA."""

import contextlib
import ctypes
import sys
import types

from tests.late_device import build

assert "torch" not in sys.modules, "import tests.late_device.install before torch"
for _name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(build.torch_folder() / "lib" / _name), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(build.library()))

import torch  # noqa: E402

ops = torch.ops.late_device
NAME = "NVIDIA H100 80GB HBM3"  # whose figures the package knows
MEMORY = 8 << 30  # bytes; estimates of what fits are made with it


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device=None, priority=0, **ids):
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("cuda", 0), priority=priority)

    @property
    def cuda_stream(self):
        """Stands for the address of CUDA's own stream."""
        return self.stream_id

    def record_event(self, event=None):
        """Record an event, a new one by default, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream):
        """Make later work of this stream wait for the other stream's work so far."""
        self.wait_event(stream.record_event())

    def __enter__(self):
        self._context = stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error):
        self._context.__exit__(*error)


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        device = torch.device("cuda", 0)
        return super().__new__(cls, device=device, enable_timing=enable_timing, blocking=blocking)

    def record(self, stream=None):
        """Record the work that a stream, by default the current one, has so far."""
        super().record(stream or current_stream())

    def wait(self, stream=None):
        """Make later work of a stream, by default the current one, wait for this event."""
        super().wait(stream or current_stream())

    def elapsed_time(self, other):
        """Return the milliseconds from this event to another one; the host must have waited for
        both."""
        return ops.elapsed_ms(self.event_id, other.event_id)


def current_stream(device=None):
    """Return this thread's stream."""
    return Stream(stream_id=ops.current_stream(), device_index=0, device_type=1)


def default_stream(device=None):
    """Return the default stream."""
    return Stream(stream_id=0, device_index=0, device_type=1)


def set_stream(stream):
    """Make a stream this thread's."""
    if stream is not None:
        ops.set_stream(stream.stream_id)


@contextlib.contextmanager
def stream(one):
    """Make a stream this thread's for a block; None changes nothing."""
    former = ops.current_stream()
    set_stream(one)
    try:
        yield
    finally:
        ops.set_stream(former)


class _Device(contextlib.nullcontext):
    """`torch.cuda.device`: there is one."""

    def __init__(self, device=None):
        super().__init__()


_PROPERTIES = types.SimpleNamespace(
    name=NAME,
    total_memory=MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
)
_MODES = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}
_HAS = {
    # there is one, of this kind
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_compiled": lambda: True,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_arch_list": lambda: ["sm_90"],
    "is_bf16_supported": lambda *args, **options: True,
    # streams
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
    "stream": stream,
    "device": _Device,
    "synchronize": lambda device=None: ops.synchronize(),
    "set_sync_debug_mode": lambda mode: ops.set_sync_debug_mode(_MODES[mode]),
    "get_sync_debug_mode": ops.get_sync_debug_mode,
    # memory
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "memory_allocated": lambda device=None: ops.memory()[0],
    "memory_reserved": lambda device=None: ops.memory()[0],
    "max_memory_allocated": lambda device=None: ops.memory()[1],
    "max_memory_reserved": lambda device=None: ops.memory()[1],
    "reset_peak_memory_stats": lambda device=None: ops.reset_peak(),
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_stats": lambda device=None: {},
    # random numbers
    "manual_seed": ops.seed,
    "manual_seed_all": ops.seed,
    "get_rng_state": lambda device="cuda": ops.get_rng_state().clone(),
    "set_rng_state": lambda state, device="cuda": ops.set_rng_state(state),
    "get_rng_state_all": lambda: [ops.get_rng_state().clone()],
    "set_rng_state_all": lambda states: ops.set_rng_state(states[0]),
}
for _name, _value in _HAS.items():
    setattr(torch.cuda, _name, _value)
    if hasattr(torch.cuda.random, _name):
        setattr(torch.cuda.random, _name, _value)
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_isInBadFork = lambda: False
torch._C._cuda_getCurrentRawStream = lambda device: ops.current_stream()
torch.backends.cuda.is_flash_attention_available = lambda: True


# ---- storages, which torch's CPU build moves between its own devices only


def _bytes(storage):
    """Return uint8 [bytes] over a storage of either side."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_device(storage):
    return storage.device.type == "cuda"


_clone, _cpu = torch.UntypedStorage.clone, torch.UntypedStorage.cpu
_copy, _resize = torch.UntypedStorage.copy_, torch.UntypedStorage.resize_


def _storage_clone(self):
    return _bytes(self).clone().untyped_storage() if _on_device(self) else _clone(self)


def _storage_cpu(self):
    return _bytes(self).cpu().untyped_storage() if _on_device(self) else _cpu(self)


def _storage_copy(self, source, non_blocking=None):
    if _on_device(self) or _on_device(source):
        _bytes(self).copy_(_bytes(source), bool(non_blocking))
        return self
    return _copy(self, source, non_blocking)


def _storage_resize(self, size):
    if not _on_device(self):
        return _resize(self, size)
    holder = torch.empty(0, dtype=torch.uint8, device=self.device)
    ops.resize_storage(holder.set_(self, 0, (0,)), size)
    return self


torch.UntypedStorage.clone = _storage_clone
torch.UntypedStorage.cpu = _storage_cpu
torch.UntypedStorage.copy_ = _storage_copy
torch.UntypedStorage.resize_ = _storage_resize

from tests.late_device import kernels, triton_kernels  # noqa: E402

kernels.register()
triton_kernels.patch()
