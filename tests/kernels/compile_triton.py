"""Compile the Triton kernels for a GPU that need not be there, and print what was found as JSON.

    python tests/kernels/compile_triton.py      {"bytes": {...}, "variants": {...}}

bytes: of each kernel, for some launches. variants: as how many kernels Triton would compile each
for launches that differ in their numbers of rows and tokens only.

Arguments are those of real launches: `triton_fused.py` is called with launches taken over, on the
cases of `fused_cases.py`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

sys.path.insert(0, str(Path(__file__).parents[2]))

from hf_flexseq.kernels import triton_fused
from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES, added, gathered, merged, packed

TARGET = GPUTarget("cuda", 80, 32)  # an A100; what compiles for it does for newer ones
KERNELS = ("merge_kernel", "rows_kernel", "pack_kernel", "unpack_kernel")
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}


def type_of(value: object) -> object:
    """The type of an argument, in Triton's words."""
    if isinstance(value, tuple):
        return tuple(type_of(one) for one in value)
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    assert isinstance(value, int)
    return "i32"


def compiled(kernel: object, arguments: tuple[object, ...]) -> int:
    """The bytes of a kernel for these arguments of a launch."""
    signature = {}
    constants = {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = type_of(value)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=TARGET).asm["cubin"])


def variant(kernel: object, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """What Triton tells launches of a kernel apart by."""
    seen = []
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            seen.append(value)
        else:
            specialize = not parameter.do_not_specialize
            seen.append(native_specialize_impl(CUDABackend, value, False, specialize, True))
    return tuple(seen)


def launches(calls: Callable[[], None]) -> list[tuple[str, object, tuple[object, ...]]]:
    """Return (name, kernel, arguments) of what is launched by some calls, which launch nothing."""
    taken = []
    kernels = {name: getattr(triton_fused, name) for name in KERNELS}
    for name, kernel in kernels.items():

        def take(*arguments: object, name: str = name, kernel: object = kernel) -> None:
            taken.append((name, kernel, arguments))

        setattr(triton_fused, name, Launches(take))
    calls()
    for name, kernel in kernels.items():
        setattr(triton_fused, name, kernel)
    return taken


def some_launches() -> None:
    """Call every operation."""
    fused = triton_fused.TritonFused()
    merged(fused, "an index", dtype=torch.bfloat16, head_dim=128)
    merged(fused, "a slice", dtype=torch.float64, head_dim=80)
    added(fused, "an index", dtype=torch.bfloat16)
    gathered(fused, "an index", dtype=torch.bfloat16)
    packed(fused, "overlapping heads", dtype=torch.bfloat16, head_dim=96)


def launches_of_other_sizes() -> None:
    """Call every operation on many numbers of rows and tokens."""
    fused = triton_fused.TritonFused()
    out, total = torch.zeros(64, 4, 8), torch.zeros(64, 16)
    for rows in (2, 15, 16, 17, 32):  # of one row the strides look otherwise
        lse, part_lse = torch.zeros(4, 64 + rows).t(), torch.zeros(4, rows).t()
        index = torch.zeros(rows, dtype=torch.int64)
        fused.merge(out, lse, index, torch.zeros(rows, 4, 8), part_lse)
        lse_rows = torch.empty(4, rows).t()
        fused.gather((total, lse), (index, index), (torch.empty(rows, 16), lse_rows))
        layout = HeadLayout(HEAD_RANGES["heads that divide"], rows)
        table = torch.from_numpy(layout.numbers)
        tensors = [torch.zeros(rows, heads, 16) for heads in layout.heads]
        flat = torch.zeros(sum(layout.slots) * 16)
        fused.pack(tensors, layout, table, flat)
        fused.unpack(flat, layout, table, tensors)


def main() -> None:
    sizes: dict[str, list[int]] = {name: [] for name in KERNELS}
    for name, kernel, arguments in launches(some_launches):
        sizes[name].append(compiled(kernel, arguments))
    variants: dict[str, set[object]] = {name: set() for name in KERNELS}
    for name, kernel, arguments in launches(launches_of_other_sizes):
        variants[name].add(variant(kernel, arguments))
    counts = {name: len(found) for name, found in variants.items()}
    print(json.dumps({"bytes": sizes, "variants": counts}))


class Launches:
    """Stands where a kernel does, and takes over its launches."""

    def __init__(self, launch: object) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return self.launch


if __name__ == "__main__":
    main()
