"""What the CUDA kernels are called with, held against stand-ins that obey the contracts of
FlashAttention-2 and -3 on the CPU.

The numbers of the real kernels are checked by `scripts/gpu_check.py` on a GPU. Here the arguments
go through torch's own op schema, the signature of flash-attn 2.8, or the names and the order of
FlashAttention-3's operators, and end in the reference. The stand-ins refuse what the kernels
refuse, and report for queries without keys what they report: +inf in FlashAttention-2.
"""

import contextlib
import sys
import types

import pytest
import torch
from torch.nn import attention

from hf_flexseq.kernels import KernelCall, flash_attn
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.flash_attn3 import FlashAttn3
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.kernels.test_kernels import CPU, HEADS, random_inputs, random_segments, run


def launched(q, k, cu_q, cu_k, max_q, max_k, causal, before=-1, after=-1):
    """The segments that a launch describes, after the checks that both have."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.is_contiguous()
    assert cu_k.is_contiguous()
    assert q.stride(-1) == k.stride(-1) == 1
    assert q.shape[2] % 8 == 0
    assert cu_q.numel() > 1
    q_lens, k_lens = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert max_q >= max(q_lens), "the bound on queries is too low"
    assert max_k == max(k_lens) > 0, "the bound on keys is wrong, or the launch empty"
    # A window reaches back from a query, and not beyond it.
    assert (before, after) == (-1, -1) or (causal and before >= 0 == after)
    window = None if before == -1 else before + 1
    return Segments(q_lens, k_lens, causal=causal, device=q.device, window=window)


def flash2_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, before=-1, after=-1, softcap=0.0
):
    segments = launched(q, k, cu_q, cu_k, max_q, max_k, causal, before, after)
    if max_q == 1 and q.shape[1] > k.shape[1]:
        assert q.shape[0] == len(segments.q_lens), (
            "the path for decoding needs exactly one query per sequence"
        )
    out, lse = Reference().forward(KernelCall(q, k, v, segments, scale, softcap or None))
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def flash3_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, before=-1, after=-1, softcap=0.0
):
    segments = launched(q, k, cu_q, cu_k, max_q, max_k, causal, before, after)
    return Reference().forward(KernelCall(q, k, v, segments, scale, softcap or None))


def flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale, before=-1, after=-1,
    softcap=0.0,
):  # fmt: skip
    assert dout.dtype == out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    segments = launched(q, k, cu_q, cu_k, max_q, max_k, causal, before, after)
    call = KernelCall(q, k, v, segments, scale, softcap or None)
    return Reference().backward(call, dout, out, lse)


@contextlib.contextmanager
def aten_stand_in(stand_in):
    """torch's ops on the CPU, whose forward is a stand-in."""

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
        window_size_left=None, window_size_right=None, **unset,
    ):  # fmt: skip
        assert dropout == 0.0
        assert not debug
        assert not any(x is not None for x in unset.values())
        launch = (cu_q, cu_k, max_q, max_k, causal, scale, window_size_left, window_size_right)
        out, lse = stand_in(q, k, v, *launch)
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
        window_size_left=None,
        window_size_right=None,
        **unset,
    ):
        assert dropout == 0.0
        assert rng_state.dtype == torch.uint64
        assert not unused.numel()
        assert not any(x is not None for x in unset.values())
        launch = (cu_q, cu_k, max_q, max_k, causal, scale, window_size_left, window_size_right)
        return flash_backward(dout, q, k, v, out, lse, *launch)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.fixture
def torch_varlen():
    """The kernel on aten ops whose CPU implementation is the stand-in."""
    with aten_stand_in(flash2_forward):
        yield TorchVarlen()


@pytest.fixture
def torch_varlen_fa3(monkeypatch):
    """The same with FlashAttention-3 active in torch."""
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    with aten_stand_in(flash3_forward):
        yield TorchVarlen()


@pytest.fixture
def flash_attn_package(monkeypatch):
    """A flash-attn 2.8 whose low-level functions are the stand-in."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert not return_softmax
        launch = (
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
            window_size_left, window_size_right, softcap,
        )  # fmt: skip
        return *flash2_forward(q, k, v, *launch), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        launch = (
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
            window_size_left, window_size_right, softcap,
        )  # fmt: skip
        grads = flash_backward(dout, q, k, v, out, softmax_lse, *launch)
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


# Names and order of the arguments of FlashAttention-3's operators.
FLASH3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new = None, Tensor? v_new = None, "
    "Tensor? q_v = None, Tensor? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!)? dq = None, Tensor(b!)? dk = None, Tensor(c!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> Tensor[]"
)


LAUNCH = {  # the operators' names -> those of the stand-in
    "cu_seqlens_q": "cu_q",
    "cu_seqlens_k": "cu_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "softmax_scale": "scale",
    "is_causal": "causal",
    "window_size_left": "before",
    "window_size_right": "after",
    "softcap": "softcap",
}
TENSORS = ("dout", "q", "k", "v", "out")


def arguments_of(name, given):
    """The arguments of a call by their names, those that were left out included."""
    arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments}
    return named | dict(zip(named, given, strict=False))


def launch_of(named):
    """What describes the launch, by the stand-in's names; all else must be at its default."""
    launch = {mine: named.pop(theirs) for theirs, mine in LAUNCH.items()}
    launch |= {tensor: named.pop(tensor) for tensor in TENSORS if named.get(tensor) is not None}
    assert not any(named.values()), named
    return launch


@contextlib.contextmanager
def flash3_operators(backward_lacks=""):
    """The operators of FlashAttention-3 on the CPU, whose code is the stand-in."""

    def forward(*given):
        named = arguments_of("fwd", given)
        assert named.pop("num_splits") == 1
        return *flash3_forward(**launch_of(named)), torch.empty(0), torch.empty(0)

    def backward(*given):
        named = arguments_of("bwd", given)
        assert named.pop("deterministic") == torch.are_deterministic_algorithms_enabled()
        lse = named.pop("softmax_lse")
        targets = [named.pop(name) for name in ("dq", "dk", "dv")]
        grads = flash_backward(lse=lse, **launch_of(named))
        for target, grad in zip(targets, grads, strict=True):
            target.copy_(grad)
        return []

    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define(FLASH3_FORWARD)
        library.define(FLASH3_BACKWARD.replace(backward_lacks, ""))
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        yield library
    for name in ("fwd", "bwd"):  # torch.ops remembers what it has found
        torch.ops.flash_attn_3.__dict__.pop(name, None)


@pytest.fixture
def flash_attn3():
    with flash3_operators():
        yield FlashAttn3()


@pytest.fixture
def flash_attn2(flash_attn_package):
    return FlashAttn()


@pytest.fixture(params=["torch_varlen", "torch_varlen_fa3", "flash_attn2", "flash_attn3"])
def kernel(request):
    return request.getfixturevalue(request.param)


def assert_like_the_reference(kernel, inputs, segments, softcap=None):
    got = run(kernel, *inputs, segments, softcap)
    want = run(Reference(), *inputs, segments, softcap)
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


@pytest.mark.parametrize("window", [1, 2, 16, 100])
def test_windows_arrive(kernel, window):
    q_lens = [53, 1, 0, 17, 2]
    k_lens = [53 + window - 1, 4, 3, 17, 40]
    segments = Segments(q_lens, k_lens, causal=True, device=CPU, window=window)
    inputs = random_inputs(segments, (4, 2), dtype=torch.bfloat16)
    assert_like_the_reference(kernel, inputs, segments)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("package", ["flash_attn2", "flash_attn3"])
def test_softcaps_arrive_in_the_packages(package, window, request):
    kernel = request.getfixturevalue(package)
    segments = Segments([53, 1, 17], [60, 4, 17], causal=True, device=CPU, window=window)
    inputs = random_inputs(segments, (4, 2), dtype=torch.bfloat16)
    assert_like_the_reference(kernel, inputs, segments, softcap=2.5)


def test_torch_is_never_called_with_a_softcap_which_it_would_lose(torch_varlen):
    segments = Segments([5], [5], causal=True, device=CPU)
    inputs = random_inputs(segments, (2, 2), dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"a softcap of 2\.5, which it does not have"):
        run(torch_varlen, *inputs, segments, softcap=2.5)


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


@pytest.mark.parametrize("package", ["flash_attn2", "flash_attn3"])
def test_the_packages_follow_torchs_determinism_switch(package, request):
    kernel = request.getfixturevalue(package)
    segments = Segments([5], [5], causal=True, device=CPU)
    inputs = random_inputs(segments, (2, 2), dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert_like_the_reference(kernel, inputs, segments)
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
