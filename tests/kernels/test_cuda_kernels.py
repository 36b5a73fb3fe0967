"""What the CUDA kernels are called with, held against stand-ins that obey the contracts of
FlashAttention-2 and -3 on the CPU.

The numbers of the real kernels are checked by `scripts/gpu_check.py` on a GPU. Here the arguments
go through torch's own op schema or the packages' names, and end in the reference. The stand-ins
refuse what the kernels refuse, and report for queries without keys what they report: +inf in
FlashAttention-2.
"""

import contextlib
import sys
import types
from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn import attention

from hf_flexseq.kernels import KernelCall, flash_attn3
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.flash_attn3 import FlashAttn3
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.kernels.launch import Launch, flash2_forward
from tests.kernels.reference import Reference
from tests.kernels.test_kernels import CPU, HEADS, random_inputs, random_segments, run


def flash3_forward(q, k, v, launch):
    return Reference().forward(launch.call(q, k, v))


def flash_backward(dout, q, k, v, out, lse, launch):
    assert dout.dtype == out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    return Reference().backward(launch.call(q, k, v), dout, out, lse)


# ---- torch's operators


@contextlib.contextmanager
def torch_varlen(stand_in=flash2_forward, active=None):
    """The kernel on torch's ops on the CPU, whose forward is a stand-in. active: implementation
    in torch."""

    def launch_of(
        cu_q, cu_k, max_q, max_k, dropout, causal, *, scale=None, window_size_left=None,
        window_size_right=None, **unset,
    ):  # fmt: skip
        assert dropout == 0.0
        assert not any(x is not None for x in unset.values())
        window = window_size_left, window_size_right
        return Launch(cu_q, cu_k, max_q, max_k, causal, scale, *window)

    def forward(q, k, v, *lengths_and_debug, **options):
        *lengths, debug = lengths_and_debug
        assert not debug
        out, lse = stand_in(q, k, v, launch_of(*lengths, **options))
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(dout, q, k, v, out, lse, *lengths_and_random, **options):
        *lengths, random_state, unused = lengths_and_random
        assert random_state.dtype == torch.uint64
        assert not unused.numel()
        return flash_backward(dout, q, k, v, out, lse, launch_of(*lengths, **options))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        with mock.patch.object(attention, "current_flash_attention_impl", return_value=active):
            yield TorchVarlen()


# ---- the packages


def package_forward(stand_in, q, k, v, launch):
    return *stand_in(q, k, v, launch), torch.empty(0), torch.empty(0)


def package_backward(dout, q, k, v, out, lse, targets, launch, deterministic):
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    grads = flash_backward(dout, q, k, v, out, lse, launch)
    for target, grad in zip(targets, grads, strict=True):
        target.copy_(grad)
    return []


FLASH2 = (
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "softmax_scale"),
    *("window_size_left", "window_size_right", "softcap"),
)


@contextlib.contextmanager
def flash_attn2():
    """The kernel on a flash-attn 2.8 whose low-level functions are the stand-in."""

    def launch_of(named, **off):
        launch = Launch(*(named.pop(name) for name in FLASH2))
        assert named == {"dropout_p": 0.0, "alibi_slopes": None, **off}
        return launch

    def forward(q, k, v, **named):
        return package_forward(flash2_forward, q, k, v, launch_of(named, return_softmax=False))

    def backward(*tensors, dq, dk, dv, deterministic, **named):
        package_backward(*tensors, (dq, dk, dv), launch_of(named), deterministic)

    interface = types.SimpleNamespace(
        _flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward
    )
    package = types.SimpleNamespace(__version__="2.8.3", flash_attn_interface=interface)
    with mock.patch.dict(sys.modules, flash_attn=package):
        yield FlashAttn()


# Names of the arguments of FlashAttention-3's operators that are passed.
FLASH3 = (
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, bool is_causal = False, float? softmax_scale = None, "
    "int window_size_left = -1, int window_size_right = -1, float softcap = 0.0"
)
LAUNCHED = len(Launch._fields) + 1  # and the splits, or whether it is deterministic
FLASH3_FORWARD = (
    f"fwd(Tensor q, Tensor k, Tensor v, {FLASH3}, int num_splits = 0, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
FLASH3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{FLASH3}, bool deterministic = False, Tensor(a!)? dq = None, Tensor(b!)? dk = None, "
    "Tensor(c!)? dv = None, int sm_margin = 0) -> Tensor[]"
)


@contextlib.contextmanager
def flash3_operators(backward_lacks="", margins=None):
    """The operators of FlashAttention-3 on the CPU, whose code is the stand-in; margins: takes
    sm_margin of each launch, () where it is not passed."""
    margins = [] if margins is None else margins
    flash_attn3._has_margin.cache_clear()

    def forward(q, k, v, *others):
        *launch, splits = others[:LAUNCHED]
        assert splits == 1
        margins.append(others[LAUNCHED:])
        return package_forward(flash3_forward, q, k, v, Launch(*launch))

    def backward(dout, q, k, v, out, lse, *others):
        *launch, deterministic, dq, dk, dv = others[: LAUNCHED + 3]
        margins.append(others[LAUNCHED + 3 :])
        targets = (dq, dk, dv)
        return package_backward(dout, q, k, v, out, lse, targets, Launch(*launch), deterministic)

    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define(FLASH3_FORWARD)
        library.define(FLASH3_BACKWARD.replace(backward_lacks, ""))
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        yield FlashAttn3()
    for name in ("fwd", "bwd"):  # torch.ops remembers what it has found
        torch.ops.flash_attn_3.__dict__.pop(name, None)


PACKAGES = {"flash_attn2": flash_attn2, "flash_attn3": flash3_operators}
BUILDS = PACKAGES | {
    "torch_varlen": torch_varlen,
    "torch_varlen_fa3": partial(torch_varlen, flash3_forward, "FA3"),
}


@pytest.fixture(params=BUILDS)
def kernel(request):
    with BUILDS[request.param]() as kernel:
        yield kernel


def assert_like_the_reference(kernel, inputs, segments, softcap=None):
    got = run(kernel, *inputs, segments, softcap)
    want = run(Reference(), *inputs, segments, softcap)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def assert_random_inputs_are_like_the_reference(kernel, segments, heads=(4, 2), softcap=None):
    inputs = random_inputs(segments, heads, dtype=torch.bfloat16)
    assert_like_the_reference(kernel, inputs, segments, softcap)


def test_every_argument_arrives(kernel):
    for heads in HEADS:
        for causal in (True, False):
            segments = random_segments(1, causal)
            assert_random_inputs_are_like_the_reference(kernel, segments, heads)
    for window in (1, 2, 16, 100):
        q_lens, k_lens = [53, 1, 0, 17, 2], [53 + window - 1, 4, 3, 17, 40]
        segments = Segments(q_lens, k_lens, causal=True, device=CPU, window=window)
        assert_random_inputs_are_like_the_reference(kernel, segments)


@pytest.mark.parametrize("package", PACKAGES)
def test_softcaps_and_torchs_determinism_switch_arrive_in_the_packages(package, monkeypatch):
    # turning the switch imports torch's compiler, which takes seconds
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for window in (None, 5):
        segments = Segments([53, 1, 17], [60, 4, 17], causal=True, device=CPU, window=window)
        with PACKAGES[package]() as kernel:
            assert_random_inputs_are_like_the_reference(kernel, segments, softcap=2.5)


@pytest.mark.parametrize(
    ("beside_transfers", "backward_lacks", "passed"),
    [(True, "", (flash_attn3.MARGIN,)), (False, "", ()), (True, ", int sm_margin = 0", ())],
    ids=["beside transfers", "alone", "an older release"],
)
def test_flash_attn_3_leaves_room_to_transfers(beside_transfers, backward_lacks, passed):
    segments = random_segments(1, causal=True)
    q, k, v, dout = random_inputs(segments, (4, 2), dtype=torch.bfloat16)
    call = KernelCall(q, k, v, segments, 0.3, beside_transfers=beside_transfers)
    margins = []
    with flash3_operators(backward_lacks, margins) as kernel:
        out, lse = kernel.forward(call)
        kernel.backward(call, dout, out, lse)
    assert margins == [passed, passed]


def test_torch_is_never_called_with_a_softcap_which_it_would_lose():
    segments = Segments([5], [5], causal=True, device=CPU)
    inputs = random_inputs(segments, (2, 2), dtype=torch.bfloat16)
    with (
        torch_varlen() as kernel,
        pytest.raises(AssertionError, match=r"a softcap of 2\.5, which it does not have"),
    ):
        run(kernel, *inputs, segments, softcap=2.5)


def test_edges_of_flash_attention_2(kernel):
    for lengths in (
        ([], []),  # no sequence
        ([0, 3], [0, 0]),  # no keys
        ([0, 0], [2, 5]),  # no queries
        ([3, 0], [0, 5]),  # queries and keys in different sequences
        ([1, 0, 1], [4, 2, 7]),  # one query at most, and an empty sequence
        ([2, 5], [0, 3]),  # a query without keys
    ):
        segments = Segments(*lengths, causal=False, device=CPU)
        assert_random_inputs_are_like_the_reference(kernel, segments)


def test_strides_that_the_kernels_refuse_are_copied_away(kernel):
    segments = Segments([5, 12], [5, 12], causal=True, device=CPU)
    fused = torch.randn(17, 2, 8, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    dout = torch.ones((), dtype=torch.bfloat16).expand(17, 2, 8)
    assert_like_the_reference(kernel, (*fused.unbind(-1), dout), segments)


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
