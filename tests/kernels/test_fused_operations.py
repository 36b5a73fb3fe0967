"""The operations between kernel calls: the Triton kernels, under Triton's interpreter, against
torch's version, on which all attention on the CPU is tested; and compiled for GPUs.

The interpreter runs what a kernel says, program after program, and takes more than the compiler
does. So the kernels are compiled, too, which needs no GPU. Neither says how fast they are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.plan.head_layout import HeadLayout
from tests.budget import others_slow
from tests.device import DEVICE
from tests.kernels import large_fused
from tests.kernels.fused_cases import (
    HEAD_RANGES,
    ROWS,
    added,
    gathered,
    merged,
    normal,
    packed,
    unpacked,
)

TORCH = TorchFused()
CASES = {merged: ROWS, added: ROWS, gathered: ROWS}  # by operation
CASES |= {packed: HEAD_RANGES, unpacked: HEAD_RANGES}
every_operation = pytest.mark.parametrize("operation", CASES, ids=lambda one: one.__name__)


def test_heads_that_ranks_share_are_summed_in_float32_and_rounded_once():
    layout = HeadLayout([[range(0, 1)] * 8], 1)
    flat = normal(0, (8 * 3,), torch.bfloat16)
    got = torch.empty(1, 1, 3, dtype=torch.bfloat16)
    TORCH.unpack(flat, layout, (got,))
    assert torch.equal(got[0, 0], flat.float().view(8, 3).sum(0).bfloat16())


@pytest.mark.parametrize("case", HEAD_RANGES)
def test_heads_stand_part_by_part_and_come_back_as_often_as_parts_have_them(case):
    """By indexing alone, which neither implementation uses."""
    ranges = HEAD_RANGES[case]
    layout = HeadLayout(ranges, 5)
    tensors = [normal(i, (5, n, 4), torch.float64) for i, n in enumerate(layout.heads)]
    wanted = []
    for of_part in zip(*ranges, strict=True):
        heads = [x[:, list(own)] for x, own in zip(tensors, of_part, strict=True)]
        wanted.append(torch.cat(heads, dim=1).flatten())
    flat = torch.empty(sum(layout.slots) * 4, dtype=torch.float64)
    TORCH.pack(tensors, layout, flat)
    assert torch.equal(flat, torch.cat(wanted))
    back = [torch.empty_like(x) for x in tensors]
    TORCH.unpack(flat, layout, back)
    for x, own, got in zip(tensors, ranges, back, strict=True):
        times = [sum(head in part for part in own) for head in range(x.shape[1])]
        torch.testing.assert_close(got, x * torch.tensor(times)[:, None], rtol=1e-14, atol=0)


# ---- Triton

KERNELS = ("merge_kernel", "rows_kernel")
COMPILE = Path(__file__).with_name("compile_triton.py")
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a block, by architecture


@pytest.fixture(scope="module")
def triton_fused():
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    return pytest.importorskip("hf_flexseq.kernels.triton_fused")


@pytest.fixture
def fused(triton_fused, monkeypatch):
    """The kernels, with tiles so small that a tensor has several."""
    monkeypatch.setattr(triton_fused, "TILE", 64)
    monkeypatch.setattr(triton_fused, "MOST_COLUMNS", 32)
    return triton_fused.TritonFused()


def assert_like_torch(fused, operation, case, **options):
    """Sums of merged results are float32. Sums of heads in bfloat16 are cut off by the interpreter
    where a GPU rounds."""
    tolerance = 0.0
    if operation is merged:
        tolerance = 1e-14 if options["dtype"] == torch.float64 else 2e-6
    got, wanted = (operation(case, **options).by(one) for one in (fused, TORCH))
    for mine, its in zip(got, wanted, strict=True):
        rtol = tolerance
        if operation is unpacked and mine.dtype == torch.bfloat16:
            rtol = 2**-7
        torch.testing.assert_close(mine, its, rtol=rtol, atol=tolerance)


@every_operation
@pytest.mark.parametrize(
    "dtype", others_slow([torch.float64, torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str
)
def test_tritons_operations_are_torchs(fused, operation, dtype):
    for case in CASES[operation]:
        assert_like_torch(fused, operation, case, dtype=dtype)


@pytest.mark.on_device
@pytest.mark.parametrize(
    "case", large_fused.CASES if DEVICE.type == "cuda" else large_fused.SMALL_CASES, ids=str
)
def test_large_sizes_are_torchs(triton_fused, case):
    for name, make in large_fused.works(case.sizes, DEVICE, case.dtype).items():
        difference = large_fused.largest_difference(triton_fused.TritonFused(), make)
        bound = large_fused.MERGE_ERROR if name.startswith("merge") else 0.0
        assert difference <= bound, name


@pytest.mark.parametrize("operation", ["merge", "add", "gather", "pack", "unpack"])
def test_an_operation_that_leaves_something_out_is_found(operation):
    wrong = type("Wrong", (TorchFused,), {operation: lambda *_: None})()
    (case,) = large_fused.SMALL_CASES
    made = large_fused.works(case.sizes, DEVICE, case.dtype).values()
    assert max(large_fused.largest_difference(wrong, make) for make in made) > 0.1


def test_any_head_size_is_merged_and_packed(triton_fused):
    fused = triton_fused.TritonFused()
    for head_dim in (1, 64, 80, 96):
        options = {"dtype": torch.bfloat16, "head_dim": head_dim}
        assert_like_torch(fused, merged, "an index", **options)
        for operation in (packed, unpacked):
            assert_like_torch(fused, operation, "overlapping heads", tokens=1, **options)


def test_a_rank_without_tokens_packs_nothing(fused):
    for operation in (packed, unpacked):
        assert_like_torch(fused, operation, "overlapping heads", dtype=torch.bfloat16, tokens=0)


def test_heads_that_lie_apart_in_memory_are_packed(fused):
    layout = HeadLayout(HEAD_RANGES["heads that divide"], 5)
    tensors = [normal(i, (n, 5, 8), torch.float32) for i, n in enumerate(layout.heads)]
    by_token = [x.transpose(0, 1) for x in tensors]
    results = []
    for one, given in ((fused, by_token), (TORCH, [x.contiguous() for x in by_token])):
        results.append(torch.empty(sum(layout.slots) * 8))
        one.pack(given, layout, results[-1])
    assert torch.equal(*results)


def test_a_nan_is_not_hidden_by_a_merge(fused):
    for one in (fused, TORCH):
        out, lse = normal(0, (1, 1, 4), torch.float32), normal(1, (1, 1), torch.float32)
        one.merge((out, lse), slice(None), (torch.full_like(out, torch.nan), lse * torch.nan))
        assert out.isnan().all()
        assert lse.isnan().all()


def test_parts_of_16_bits_are_packed_for_float32_and_sums_of_float32_rounded(fused):
    layout = HeadLayout(HEAD_RANGES["overlapping heads"], 3)
    results = []
    for one in (fused, TORCH):
        tensors = [normal(i, (3, n, 8), torch.bfloat16) for i, n in enumerate(layout.heads)]
        flat = torch.empty(sum(layout.slots) * 8)
        one.pack(tensors, layout, flat)
        one.unpack(flat / 3, layout, tensors)
        results.append([flat, *tensors])
    for mine, wanted in zip(*results, strict=True):
        last_place = 2**-7 if mine.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(mine, wanted, rtol=last_place, atol=0)


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]


def test_every_operation_is_one_launch_before_sums_of_heads(fused, triton_fused, monkeypatch):
    launches = []
    for name in KERNELS:
        monkeypatch.setattr(triton_fused, name, Counted(getattr(triton_fused, name), launches))
    counts = []
    for operation, cases in CASES.items():
        launches.clear()
        case = "an index" if cases is ROWS else "overlapping heads"
        operation(case, dtype=torch.float32).run(fused)
        counts.append(len(launches))
    assert counts == [1, 1, 1, 1, 1 + 2]  # two sums, of parts that overlap


@pytest.mark.kernels
@pytest.mark.processes
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_the_kernels_compile_once_for_all_numbers_of_rows_and_spill_nothing(
    triton_fused, tmp_path, architecture
):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, COMPILE, str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for record in found["resources"]:
        assert record["spilled"] == 0, record
        assert record["shared"] <= SHARED_BYTES[architecture], record
    assert {record["kernel"] for record in found["resources"]} == set(KERNELS)
    assert found["variants"] == dict.fromkeys(("gather", "merge", "pack", "unpack"), 1)
