"""`FlashAttn` through the Python interface of the flash-attn package itself, unchanged, on a CPU.

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
        pip install flash-attn einops --no-build-isolation --no-deps
    pytest -m kernels tests/kernels/test_flash_attn_interpreted.py

The interface calls the functions of a CUDA library by position. Under the name of that library
stand the package's own Triton kernels (2.8, written for AMD), which have functions of the same
arguments, under Triton's interpreter. What they give otherwise than the library is turned into
what it gives: log-sum-exps [heads, tokens], and +inf without keys.

Left to `scripts/gpu_check.py`: windows and softcaps, which these kernels ignore; the deterministic
backward; and what only the library refuses. Two of their mistakes are gone round. Of a causal
sequence without queries and keys they write zeros over the log-sum-exps behind it, so there is
none. Gradients of keys are written with the strides of the keys, so keys lie close together there.
"""

import importlib
import sys
import types

import pytest
import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.flash_attn import FlashAttn, package_problem
from hf_flexseq.kernels.segments import Segments
from tests.kernels.interpreter import error, first_configurations, real_bfloat16
from tests.kernels.reference import Reference
from tests.kernels.test_kernels import CPU, SCALE, dense, random_inputs, run

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]

FLOAT32 = 2e-6  # relative error of any result, against float64
BFLOAT16 = 1.3  # times the error of a plain softmax in bfloat16

HEAD_DIM = 40  # no power of two
CASES = {
    "causal": ((40, 1, 89), (40, 1, 89), True),
    "causal, with earlier keys": ((40, 1, 65), (130, 4, 65), True),
    "causal, without queries": ((0, 7, 0), (3, 9, 2), True),
    "rectangles, some without queries or keys": ((70, 0, 5, 0, 7), (40, 3, 0, 0, 9), False),
    "one query at most": ((1, 0, 1), (66, 7, 4), False),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Library:
    """The functions of the CUDA library that are called. kernels: the module with the same ones.

    Notes the bounds on queries and keys of each call.
    """

    def __init__(self, kernels):
        self.kernels = kernels
        self.bounds = []

    def varlen_fwd(self, *given):
        *_, left, right, softcap, return_softmax, generator = given
        assert (left, right, softcap, generator) == (-1, -1, 0.0, None), "not computed here"
        assert not return_softmax, "the library returns it with dropout only"
        self.bounds.append(given[10:12])
        out, lse, *_ = self.kernels.varlen_fwd(*given)
        lse = lse.t().masked_fill(lse.t() == -torch.inf, torch.inf)
        return out, lse.contiguous(), out.new_empty(0), torch.empty(2, dtype=torch.int64)

    def varlen_bwd(self, dout, q, k, v, out, lse, *given):
        assert given[-6:] == (-1, -1, 0.0, False, None, None), "not computed here"
        assert dout.dtype == out.dtype == q.dtype
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        self.bounds.append(given[6:8])
        k, v = k.contiguous(), v.contiguous()
        return self.kernels.varlen_bwd(dout, q, k, v, out, lse.t().contiguous(), *given)


custom_op = torch.library.custom_op


def custom_op_everywhere(name, **options):
    """torch's `custom_op`, for every device: the package registers its own for CUDA alone."""
    return custom_op(name, **options | {"device_types": None})


@pytest.fixture(scope="module")
def library():
    """The package's interface on the CPU, on a `Library`."""
    pytest.importorskip("einops")
    module = types.ModuleType("flash_attn_2_cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(torch.library, "custom_op", custom_op_everywhere)
        pytest.importorskip("flash_attn", reason="needs the flash-attn package, see the docstring")
        kernels = importlib.import_module("flash_attn.flash_attn_triton_amd.interface_fa")
        library = Library(kernels)
        module.varlen_fwd, module.varlen_bwd = library.varlen_fwd, library.varlen_bwd
        first_configurations(patch)
        real_bfloat16(patch)
        package_problem.cache_clear()
        yield library
    package_problem.cache_clear()


def segments_of(case):
    q_lens, k_lens, causal = case
    return Segments(q_lens, k_lens, causal=causal, device=CPU)


def test_the_package_can_be_used_unless_it_runs_its_kernels_for_amd(library, monkeypatch):
    assert package_problem() is None
    package_problem.cache_clear()
    monkeypatch.setattr("flash_attn.flash_attn_interface.USE_TRITON_ROCM", True)
    assert "for AMD" in package_problem()
    package_problem.cache_clear()


@every_case
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=str)
def test_float32_is_attention_and_takes_merged_results(library, case, heads):
    segments = segments_of(case)
    inputs = random_inputs(segments, heads, HEAD_DIM)
    want = run(Reference(), *inputs, segments, merged=True)
    got = run(FlashAttn(), *(x.float() for x in inputs), segments, merged=True)
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, exact) < FLOAT32


@every_case
def test_bfloat16_is_as_close_as_a_plain_softmax(library, case):
    segments = segments_of(case)
    inputs = random_inputs(segments, (4, 2), HEAD_DIM, dtype=torch.bfloat16)
    want = run(Reference(), *(x.double() for x in inputs), segments)
    plain = dense(*inputs, segments)
    got = run(FlashAttn(), *inputs, segments)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 3
    assert error(got[1], want[1]) < FLOAT32
    for at in (0, 2, 3, 4):
        assert error(got[at], want[at]) <= BFLOAT16 * error(plain[at], want[at])


def test_the_bounds_cover_every_sequence_and_are_never_one_query(library):
    for case in CASES.values():
        segments = segments_of(case)
        library.bounds.clear()
        run(FlashAttn(), *random_inputs(segments, (1, 1), 16, dtype=torch.bfloat16), segments)
        assert library.bounds == [(max(2, *segments.q_lens), max(segments.k_lens))] * 2


def test_rows_that_lie_apart_are_taken(library):
    segments = Segments((5, 12), (5, 12), causal=True, device=CPU)
    fused = torch.randn(17, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = fused.unbind(2)  # of one linear layer
    dout = torch.ones(()).expand(17, 2, 16)
    got = run(FlashAttn(), q, k, v, dout, segments)
    want = run(Reference(), *(x.double() for x in (q, k, v, dout)), segments)
    for mine, exact in zip(got, want, strict=True):
        assert error(mine, exact) < FLOAT32


def test_an_empty_launch_is_not_made(library):
    segments = Segments((3, 0), (0, 5), causal=False, device=CPU)
    library.bounds.clear()
    run(FlashAttn(), *random_inputs(segments, (2, 1), 16, dtype=torch.bfloat16), segments)
    assert library.bounds == []


def test_the_interface_describes_results_of_the_promised_shapes(library):
    """What the package tells torch of its own results, on the meta device."""
    meta = torch.device("meta")
    segments = Segments((3, 4), (5, 4), causal=True, device=meta)
    q, k, v, dout = (x.to(meta) for x in random_inputs(segments, (4, 2), 8, torch.bfloat16))
    call = KernelCall(q, k, v, segments, SCALE, 2.5)
    out, lse = FlashAttn().forward(call)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((4, 7), torch.float32)
    grads = FlashAttn().backward(call, dout, out, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
