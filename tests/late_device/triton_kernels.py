"""Triton's interpreter on the device: kernels work on the device's own memory, and every address
that they load or store is checked.

The interpreter itself would copy all arguments to the host and back. It computes with bfloat16 as
`tests/kernels/interpreter.py` makes it.
"""

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import real_bfloat16

ops = torch.ops.late_device


def patch():
    """Change Triton's interpreter, where it is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.InterpreterBuilder
    run = interpreter.GridExecutor.__call__
    load, store = builder.create_masked_load, builder.create_masked_store

    def run_on_host(self, *args, **kwargs):
        devices = {x.device.type for x in _tensors((args, tuple(kwargs.values())))}
        if "cuda" not in devices:
            return run(self, *args, **kwargs)
        if len(devices) > 1:
            raise RuntimeError(
                f"late_device: wrong device: {self.fn.__name__} is given tensors on "
                f"{' and '.join(sorted(devices))}"
            )
        builder.launch_number = ops.launch(self.fn.__name__)
        try:
            host = {name: _on_host(x) for name, x in kwargs.items()}
            return run(self, *(_on_host(x) for x in args), **host)
        finally:
            builder.launch_number = None

    def masked_load(self, ptrs, mask, *others):
        _touch(self, ptrs, mask, writes=False)
        return load(self, ptrs, mask, *others)

    def masked_store(self, ptrs, value, mask, *others):
        _touch(self, ptrs, mask, writes=True)
        return store(self, ptrs, value, mask, *others)

    builder.launch_number = None
    builder.create_masked_load = masked_load
    builder.create_masked_store = masked_store
    interpreter.GridExecutor.__call__ = run_on_host
    real_bfloat16(pytest.MonkeyPatch())


def _tensors(x):
    """Return the tensors in nested tuples."""
    if isinstance(x, tuple):
        return [tensor for one in x for tensor in _tensors(one)]
    return [x] if isinstance(x, torch.Tensor) else []


def _on_host(x):
    """Return nested tuples with the host's views of the device's tensors."""
    if isinstance(x, tuple):
        return tuple(_on_host(one) for one in x)
    return ops.cpu(x) if isinstance(x, torch.Tensor) else x


def _touch(builder, ptrs, mask, *, writes):
    if builder.launch_number is None:
        return
    addresses = np.ascontiguousarray(ptrs.data).reshape(-1).view(np.int64)
    is_on = np.broadcast_to(mask.data, ptrs.data.shape).reshape(-1).astype(bool)
    itemsize = ptrs.get_element_ty().primitive_bitwidth // 8
    ops.touch_addresses(
        builder.launch_number,
        torch.from_numpy(addresses),
        torch.from_numpy(is_on),
        itemsize,
        writes,
    )
