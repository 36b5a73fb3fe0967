"""Compile the Triton kernels for a GPU that need not be there, and print what was found as JSON.

    python tests/kernels/compile_triton.py 90   {"resources": [...], "variants": {...}}

resources: of each kernel, for some launches: bytes that a thread spills, and bytes of shared
memory of a block. variants: as how many kernels Triton would compile an operation for launches
that differ only in their numbers of rows and tokens, and in where small tensors begin.

Arguments are those of real launches: `triton_fused.py` is called with launches taken over, on the
cases of `fused_cases.py`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

sys.path.insert(0, str(Path(__file__).parents[2]))

from hf_flexseq.kernels import triton_fused
from tests.kernels.fused_cases import added, gathered, merged, packed, unpacked

HEAD_DIMS = (64, 96, 128, 256)
KERNELS = ("merge_kernel", "rows_kernel")
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


def compiled(architecture, kernel, arguments):
    """The resources of a kernel for these arguments of a launch."""
    signature = {}
    constants = {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else type_of(value)
        if parameter.is_constexpr:
            constants[parameter.name] = value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    return {
        "spilled": spilled(made.asm["ptx"], architecture),
        "shared": made.metadata.shared,
    }


def spilled(ptx, architecture):
    """Bytes that a thread spills, as the assembler reports them."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [get_ptxas(architecture).path, "-v", "--gpu-name", target, "-o", os.devnull]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", said.stderr)))  # stores and loads


def variant(kernel, arguments):
    """What Triton tells launches of a kernel apart by."""
    seen = []
    for parameter, value in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            seen.append(value)
        else:
            specialize = not parameter.do_not_specialize
            align = not parameter.do_not_specialize_on_alignment
            seen.append(native_specialize_impl(CUDABackend, value, False, specialize, align))
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


def launches_of_head_dim(head_dim):
    """Call every operation on heads of a size, as models have them."""
    fused = triton_fused.TritonFused()
    options = {"dtype": torch.bfloat16, "head_dim": head_dim}
    for operation in (merged, added, gathered):
        operation("an index", **options).run(fused)
    for operation in (packed, unpacked):
        operation("overlapping heads", **options).run(fused)


def all_resources(architecture):
    """A record for each launch."""
    records = []
    for head_dim in HEAD_DIMS:
        look = partial(compiled, architecture)
        found = each_launch(look, partial(launches_of_head_dim, head_dim))
        for name, launches in found.items():
            records += [{"kernel": name, "head_dim": head_dim, **launch} for launch in launches]
    return records


def of_other_sizes():
    """By operation, its work on many numbers of rows and tokens, wherever row numbers and
    log-sum-exps begin in memory."""
    works = defaultdict(list)
    for rows in (2, 15, 16, 17, 32):  # of one row the strides look otherwise
        works["gather"].append(gathered(rows, dtype=torch.float32))
        for shift in (0, 1):
            works["merge"].append(merged(rows, dtype=torch.float32, shift=shift))
        for name, operation in (("pack", packed), ("unpack", unpacked)):
            works[name].append(operation("heads that divide", dtype=torch.float32, tokens=rows))
    return works


def all_variants():
    """By operation, as how many kernels Triton would compile it."""
    counts = {}
    for name, works in of_other_sizes().items():
        found = set()
        for work in works:
            launches = each_launch(variant, partial(work.run, triton_fused.TritonFused()))
            found.update(*launches.values())
        counts[name] = len(found)
    return counts


if __name__ == "__main__":
    resources = all_resources(int(sys.argv[1]))
    print(json.dumps({"resources": resources, "variants": all_variants()}))
