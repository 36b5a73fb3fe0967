"""The Triton kernels, under Triton's interpreter, against torch's version; and compiled for GPUs.

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

from hf_flexseq.kernels.fused import TorchFused
from hf_flexseq.plan.head_layout import HeadLayout
from tests.kernels.fused_cases import HEAD_RANGES, ROWS, added, gathered, merged, normal, packed

pytest.importorskip("triton", reason="Triton has wheels for Linux only")
triton_fused = pytest.importorskip("hf_flexseq.kernels.triton_fused")

TWIN = TorchFused()
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ACCURACY = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6}  # sums are float32
COMPILE = Path(__file__).with_name("compile_triton.py")


@pytest.fixture
def fused(monkeypatch):
    """The kernels, with tiles so small that a tensor has several."""
    monkeypatch.setattr(triton_fused, "TILE", 64)
    monkeypatch.setattr(triton_fused, "MOST_COLUMNS", 32)
    return triton_fused.TritonFused()


def same(got, wanted):
    for mine, twins in zip(got, wanted, strict=True):
        assert torch.equal(mine, twins)


def same_heads(got, wanted):
    """The same, but for bfloat16 sums: the interpreter cuts them off where a GPU rounds."""
    for mine, twins in zip(got, wanted, strict=True):
        last_place = 2**-7 if mine.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(mine, twins, rtol=last_place, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ROWS)
def test_merging_equals_torch(fused, selection, dtype):
    got = merged(fused, selection, dtype=dtype)
    wanted = merged(TWIN, selection, dtype=dtype)
    for mine, twins in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, twins, rtol=ACCURACY[dtype], atol=ACCURACY[dtype])


@pytest.mark.parametrize("head_dim", [1, 64, 80, 96])
def test_merging_takes_any_head_size(head_dim):
    got = merged(triton_fused.TritonFused(), "an index", dtype=torch.bfloat16, head_dim=head_dim)
    wanted = merged(TWIN, "an index", dtype=torch.bfloat16, head_dim=head_dim)
    for mine, twins in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, twins, rtol=2e-6, atol=2e-6)


def test_a_nan_is_not_hidden_by_a_merge(fused):
    for one in (fused, TWIN):
        out, lse = normal(0, (1, 1, 4), torch.float32), normal(1, (1, 1), torch.float32)
        one.merge(out, lse, slice(None), torch.full_like(out, torch.nan), lse * torch.nan)
        assert out.isnan().all()
        assert lse.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ROWS)
def test_adding_equals_torch(fused, selection, dtype):
    same(added(fused, selection, dtype=dtype), added(TWIN, selection, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selection", ROWS)
def test_gathering_equals_torch(fused, selection, dtype):
    same(gathered(fused, selection, dtype=dtype), gathered(TWIN, selection, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", HEAD_RANGES)
def test_packing_and_unpacking_equal_torch(fused, case, dtype):
    same_heads(packed(fused, case, dtype=dtype), packed(TWIN, case, dtype=dtype))


@pytest.mark.parametrize("head_dim", [80, 96])
def test_packing_takes_any_head_size(head_dim):
    options = {"dtype": torch.bfloat16, "head_dim": head_dim, "tokens": 1}
    got = packed(triton_fused.TritonFused(), "overlapping heads", **options)
    same_heads(got, packed(TWIN, "overlapping heads", **options))


def test_parts_of_16_bits_are_packed_for_float32_and_sums_of_float32_rounded(fused):
    layout = HeadLayout(HEAD_RANGES["overlapping heads"], 3)
    table = torch.from_numpy(layout.numbers)
    results = []
    for one in (fused, TWIN):
        tensors = [normal(i, (3, n, 8), torch.bfloat16) for i, n in enumerate(layout.heads)]
        flat = torch.empty(sum(layout.slots) * 8)
        one.pack(tensors, layout, table, flat)
        one.unpack(flat / 3, layout, table, tensors)
        results.append([flat, *tensors])
    same_heads(*results)


def test_every_operation_is_one_launch(fused, monkeypatch):
    launches = []
    for name in ("merge_kernel", "rows_kernel", "pack_kernel", "unpack_kernel"):
        monkeypatch.setattr(triton_fused, name, Counted(getattr(triton_fused, name), launches))
    merged(fused, "an index", dtype=torch.float32)
    assert len(launches) == 1
    added(fused, "an index", dtype=torch.float32)
    assert len(launches) == 2
    gathered(fused, "an index", dtype=torch.float32)
    assert len(launches) == 3
    packed(fused, "overlapping heads", dtype=torch.float32)
    assert len(launches) == 5


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*args):
            self.launches.append(grid)
            self.kernel[grid](*args)

        return launch


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What compile_triton.py has found, without the interpreter."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.processes
def test_the_kernels_compile_for_a_gpu(compiled):
    assert len(compiled["bytes"]) == 4
    assert all(compiled["bytes"].values())


@pytest.mark.processes
def test_other_numbers_of_rows_and_tokens_compile_nothing_anew(compiled):
    assert compiled["variants"] == dict.fromkeys(compiled["bytes"], 1)
