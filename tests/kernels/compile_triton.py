"""Compile the Triton kernels for a GPU that need not be there, and print what was found as JSON.

    python tests/kernels/compile_triton.py      {"bytes": {...}, "variants": {...}}

bytes: of each kernel, for some launches. variants: as how many kernels Triton would compile each
for launches that differ in their numbers of rows and tokens only.

Arguments are those of real launches: `triton_fused.py` is called with launches taken over, on the
cases of `fused_cases.py`.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

sys.path.insert(0, str(Path(__file__).parents[2]))

from hf_flexseq.kernels import triton_fused
from tests.kernels.fused_cases import added, gathered, merged, packed

TARGET = GPUTarget("cuda", 80, 32)  # an A100; what compiles for it does for newer ones
KERNELS = ("merge_kernel", "rows_kernel", "pack_kernel", "unpack_kernel")
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}


def type_of(value):
    """The type of an argument, in Triton's words."""
    if isinstance(value, tuple):
        return tuple(type_of(one) for one in value)
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"


def compiled(kernel, arguments):
    """The bytes of a kernel for these arguments of a launch."""
    signature = {}
    constants = {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else type_of(value)
        if parameter.is_constexpr:
            constants[parameter.name] = value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=TARGET).asm["cubin"])


def variant(kernel, arguments):
    """What Triton tells launches of a kernel apart by."""
    seen = []
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            seen.append(value)
        else:
            specialize = not parameter.do_not_specialize
            seen.append(native_specialize_impl(CUDABackend, value, False, specialize, True))
    return tuple(seen)


class Launches:
    """Stands where a kernel does, and notes what its launches give."""

    def __init__(self, kernel, look):
        self.kernel = kernel
        self.look = look
        self.found = []

    def __getitem__(self, grid):
        def launch(*arguments):
            self.found.append(self.look(self.kernel, arguments))

        return launch


def each_launch(look, calls):
    """By kernel, look(kernel, arguments) of each launch by some calls; nothing is launched."""
    launches = {name: Launches(getattr(triton_fused, name), look) for name in KERNELS}
    with mock.patch.multiple(triton_fused, **launches):
        calls()
    return {name: one.found for name, one in launches.items()}


def some_launches():
    """Call every operation."""
    fused = triton_fused.TritonFused()
    merged(fused, "an index", dtype=torch.bfloat16, head_dim=128)
    merged(fused, "a slice", dtype=torch.float64, head_dim=80)
    added(fused, "an index", dtype=torch.bfloat16)
    gathered(fused, "an index", dtype=torch.bfloat16)
    packed(fused, "overlapping heads", dtype=torch.bfloat16, head_dim=96)


def launches_of_other_sizes():
    """Call every operation on many numbers of rows and tokens."""
    fused = triton_fused.TritonFused()
    for rows in (2, 15, 16, 17, 32):  # of one row the strides look otherwise
        merged(fused, rows, dtype=torch.float32)
        gathered(fused, rows, dtype=torch.float32)
        packed(fused, "heads that divide", dtype=torch.float32, tokens=rows)


def main():
    sizes = each_launch(compiled, some_launches)
    variants = each_launch(variant, launches_of_other_sizes)
    counts = {name: len(set(found)) for name, found in variants.items()}
    print(json.dumps({"bytes": sizes, "variants": counts}))


if __name__ == "__main__":
    main()
