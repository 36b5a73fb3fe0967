"""What the CUDA kernels are called with, held against stand-ins that obey FlashAttention-2's
contract on the CPU.

The numbers of the real kernels are checked by `scripts/gpu_check.py` on a GPU. Here the arguments
go through torch's own op schema, or a signature copied from flash-attn 2.8, and end in the
reference. The stand-ins refuse what the kernels refuse and report +inf for queries without keys.
"""

import sys
import types

import pytest
import torch

from hf_flexseq.kernels import flash_attn
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.kernels.test_kernels import CPU, HEADS, random_inputs, random_segments, run


def launched(q, k, cu_q, cu_k, max_q, max_k, causal):
    """The segments that a launch describes, after the checks of FlashAttention-2."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    assert q.stride(-1) == k.stride(-1) == 1
    assert q.shape[2] % 8 == 0
    assert cu_q.numel() > 1
    q_lens, k_lens = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert max_q >= max(q_lens), "the bound on queries is too low"
    assert max_k == max(k_lens) > 0, "the bound on keys is wrong, or the launch empty"
    if max_q == 1 and q.shape[1] > k.shape[1]:
        assert q.shape[0] == len(q_lens), (
            "the path for decoding needs exactly one query per sequence"
        )
    return Segments(q_lens, k_lens, causal=causal, device=q.device)


def flash2_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale):
    segments = launched(q, k, cu_q, cu_k, max_q, max_k, causal)
    out, lse = Reference().forward(q, k, v, segments, scale=scale)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def flash2_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
    assert dout.dtype == out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    segments = launched(q, k, cu_q, cu_k, max_q, max_k, causal)
    return Reference().backward(dout, q, k, v, out, lse, segments, scale=scale)


@pytest.fixture
def torch_varlen():
    """The kernel on aten ops whose CPU implementation is the stand-in."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, **unset):
        assert dropout == 0.0
        assert not debug
        assert not any(x is not None for x in unset.values())
        out, lse = flash2_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout,
        causal,
        rng_state,
        unused,
        *,
        scale=None,
        **unset,
    ):
        assert dropout == 0.0
        assert rng_state.dtype == torch.uint64
        assert not unused.numel()
        assert not any(x is not None for x in unset.values())
        return flash2_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield TorchVarlen()


@pytest.fixture
def flash_attn_package(monkeypatch):
    """A flash-attn 2.8 whose low-level functions are the stand-in."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == softcap == 0.0
        assert window_size_left == window_size_right == -1
        assert not return_softmax
        launch = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        return *flash2_forward(q, k, v, *launch), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == softcap == 0.0
        assert window_size_left == window_size_right == -1
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        launch = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        grads = flash2_backward(dout, q, k, v, out, softmax_lse, *launch)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    package, interface = (
        types.ModuleType("flash_attn"),
        types.ModuleType("flash_attn.flash_attn_interface"),
    )
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    package.__version__, package.flash_attn_interface = "2.8.3", interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    flash_attn.package_problem.cache_clear()
    yield package
    flash_attn.package_problem.cache_clear()


@pytest.fixture(params=["torch_varlen", "flash_attn"])
def kernel(request):
    if request.param == "torch_varlen":
        return request.getfixturevalue("torch_varlen")
    request.getfixturevalue("flash_attn_package")
    return FlashAttn()


def assert_like_the_reference(kernel, inputs, segments):
    got, want = run(kernel, *inputs, segments), run(Reference(), *inputs, segments)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])
def test_every_argument_arrives(kernel, heads, causal):
    segments = random_segments(1, causal)
    assert_like_the_reference(
        kernel, random_inputs(segments, heads, dtype=torch.bfloat16), segments
    )


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(([], []), id="no sequence"),
        pytest.param(([0, 3], [0, 0]), id="no keys at all"),
        pytest.param(([0, 0], [2, 5]), id="no queries at all"),
        pytest.param(([3, 0], [0, 5]), id="queries and keys in different sequences"),
        pytest.param(([1, 0, 1], [4, 2, 7]), id="one query at most, and an empty sequence"),
        pytest.param(([2, 5], [0, 3]), id="a query without keys"),
    ],
)
def test_edges_of_flash_attention_2(kernel, lengths):
    segments = Segments(*lengths, causal=False, device=CPU)
    assert_like_the_reference(
        kernel, random_inputs(segments, (4, 2), dtype=torch.bfloat16), segments
    )


def test_strides_that_the_kernels_refuse_are_copied_away(kernel):
    segments = Segments([5, 12], [5, 12], causal=True, device=CPU)
    fused = torch.randn(17, 2, 8, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    dout = torch.ones((), dtype=torch.bfloat16).expand(17, 2, 8)
    assert_like_the_reference(kernel, (*fused.unbind(-1), dout), segments)


def test_flash_attn_follows_torchs_determinism_switch(flash_attn_package):
    segments = Segments([5], [5], causal=True, device=CPU)
    inputs = random_inputs(segments, (2, 2), dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert_like_the_reference(FlashAttn(), inputs, segments)
    finally:
        torch.use_deterministic_algorithms(False)


def test_shapes_of_torchs_own_meta_kernels():
    """torch describes its CUDA op on the meta device: the call binds, and the results have the
    promised shapes."""
    meta = torch.device("meta")
    segments = Segments([3, 4], [3, 4], causal=True, device=meta)
    q, k, _, _ = (x.to(meta) for x in random_inputs(segments, (4, 2), dtype=torch.bfloat16))
    out, lse, dq, dk, dv = run(TorchVarlen(), q, k, k, q, segments)
    assert out.shape == dq.shape == q.shape
    assert dk.shape == dv.shape == k.shape
    assert lse.shape == (4, 7)
    assert lse.dtype == torch.float32
