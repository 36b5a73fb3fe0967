"""One long sequence by cuDNN: what its operator is called with, held against a stand-in on the CPU
with its shapes, and where it is left alone. `scripts/gpu_check.py` runs the operator itself."""

from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.kernels import KernelCall, cudnn_long
from hf_flexseq.kernels.segments import Segments
from tests.kernels.reference import Reference
from tests.kernels.test_kernels import CPU

HEADS = cudnn_long.Heads(4, 2, 64, torch.bfloat16, CPU)


def call_of(q_len, k_len, *, causal, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, heads, 8, generator=generator, dtype=dtype)
        for n, heads in ((q_len, 4), (k_len, 2), (k_len, 2))
    )
    return KernelCall(q, k, v, Segments([q_len], [k_len], causal=causal, device=CPU), 0.3)


def rows(x):
    """[1, heads, n, D] -> [n, heads, D]"""
    assert x.shape[0] == 1
    return x[0].transpose(0, 1)


def attend(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
    assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    segments = Segments([q.shape[2]], [k.shape[2]], causal=causal, device=CPU)
    out, lse = Reference().forward(KernelCall(rows(q), rows(k), rows(v), segments, scale))
    out = out.transpose(0, 1).unsqueeze(0)
    return out, lse[None, :, :, None], None, None, 0, 0, "seed", "offset", None


def gradients(dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, n, m, dropout, causal, *, scale):  # fmt: skip  # noqa: E501
    assert (seed, offset, bias, cu_q, cu_k, dropout) == ("seed", "offset", None, None, None, 0.0)
    assert (n, m) == (q.shape[2], k.shape[2])
    assert lse.shape == (1, q.shape[1], n, 1)
    segments = Segments([n], [m], causal=causal, device=CPU)
    call = KernelCall(rows(q), rows(k), rows(v), segments, scale)
    grads = Reference().backward(call, rows(dout), rows(out), lse[0, :, :, 0])
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in grads)


@pytest.fixture
def operators(monkeypatch):
    name = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, name, attend)
    monkeypatch.setattr(torch.ops.aten, name + "_backward", gradients)
    monkeypatch.setattr(cudnn_long, "TRIED_TOKENS", 256)  # the reference is slow
    for cached in (cudnn_long._random_state, cudnn_long.is_verified):
        cached.cache_clear()
    yield
    for cached in (cudnn_long._random_state, cudnn_long.is_verified):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("q_len", "k_len", "causal"), [(9, 9, True), (9, 9, False), (5, 12, False)]
)
def test_results_are_those_of_rows(operators, q_len, k_len, causal):
    call = call_of(q_len, k_len, causal=causal)
    out, lse = cudnn_long.forward(call)
    for found, wanted in zip((out, lse), Reference().forward(call), strict=True):
        assert torch.allclose(found, wanted)
    # merged with keys of another call
    merged = (torch.randn_like(out), out / 3, lse + 1.1)
    wanted_grads = Reference().backward(call, *merged)
    for found, wanted in zip(cudnn_long.backward(call, *merged), wanted_grads, strict=True):
        assert torch.allclose(found, wanted)


def test_what_computes_the_same_is_taken(operators):
    other = (Reference().forward, Reference().backward)
    assert cudnn_long.is_verified(HEADS, other)


@pytest.mark.parametrize("wrong", ["out", "lse", "gradients", "merged", "nan", "error"])
def test_what_does_not_is_left_alone_with_one_line(operators, wrong, monkeypatch, caplog):
    def wrong_attend(*given, **options):
        out, lse, *others = attend(*given, **options)
        if wrong == "error":
            raise RuntimeError("no valid execution plans")
        out = {"out": 1.1, "nan": torch.nan}.get(wrong, 1.0) * out
        return out, lse * (2.0 if wrong == "lse" else 1.0), *others

    def wrong_gradients(dout, q, k, v, out, lse, *given, **options):
        if wrong == "merged":  # as if there were no other keys
            causal = given[-1]
            segments = Segments([q.shape[2]], [k.shape[2]], causal=causal, device=CPU)
            call = KernelCall(rows(q), rows(k), rows(v), segments, options["scale"])
            own_out, own_lse = Reference().forward(call)
            out, lse = own_out.transpose(0, 1).unsqueeze(0), own_lse[None, :, :, None]
        found = gradients(dout, q, k, v, out, lse, *given, **options)
        return tuple((0.9 if wrong == "gradients" else 1.0) * x for x in found)

    name = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, name, wrong_attend)
    monkeypatch.setattr(torch.ops.aten, name + "_backward", wrong_gradients)
    with caplog.at_level("WARNING"):
        assert not cudnn_long.is_verified(HEADS, (Reference().forward, Reference().backward))
    assert len(caplog.records) == 1


def long_call(**changes):
    """What says whether a call is left to cuDNN: 65,536 tokens of 32 heads, causal."""
    settings = {"q_lens": [65536], "k_lens": [65536], "causal": True, "window": None}
    settings |= {"softcap": None, "heads": 32, "head_dim": 128} | changes
    segments = Segments(
        settings["q_lens"],
        settings["k_lens"],
        causal=settings["causal"],
        window=settings["window"],
        device=CPU,
    )
    shape = (segments.total_q, settings["heads"], settings["head_dim"])
    q = SimpleNamespace(device=torch.device("cuda"), shape=shape)
    return SimpleNamespace(segments=segments, q=q, softcap=settings["softcap"])


@pytest.mark.parametrize(
    ("changes", "is_left"),
    [
        ({}, True),
        ({"q_lens": [8192], "causal": False}, True),
        ({"q_lens": [8192], "k_lens": [8192]}, False),  # a new shape would cost more
        ({"q_lens": [40000, 25536], "k_lens": [40000, 25536]}, False),
        ({"q_lens": [40000]}, False),  # aligned with the last key
        ({"window": 4096}, False),
        ({"softcap": 30.0}, False),
        ({"head_dim": 256}, False),
    ],
)
def test_what_is_left_to_cudnn(changes, is_left, monkeypatch):
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    call = long_call(**changes)
    assert cudnn_long.is_worth_it(call) == is_left
    capability = (8, 0)
    assert not cudnn_long.is_worth_it(call)


def test_repeatable_bits_are_not_left_to_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not cudnn_long.is_worth_it(long_call())
