"""Long sequences by cuDNN: what its operator is called with, held against a stand-in on the CPU
with its shapes and layouts, and where it is left alone. `scripts/gpu_check.py` runs the operator
itself."""

import os

import pytest
import torch

from hf_flexseq.cost.kernels import WITH_CUDNN
from hf_flexseq.kernels import KernelCall, cudnn_long, kinds
from hf_flexseq.kernels.kinds import LayerCalls, choose_kernels
from hf_flexseq.kernels.segments import Segments
from tests.kernels import cudnn
from tests.kernels.cudnn import CPU, NAME, Split, attend, gradients, rows
from tests.kernels.reference import Reference

HEADS = cudnn_long.Heads(4, 2, 64, torch.bfloat16)
HOPPER, AMPERE = (9, 0), (8, 0)
CUDA = torch.device("cuda")


def call_of(q_lens, k_lens=None, *, causal=True, window=None, softcap=None, strided=False):
    segments = Segments(q_lens, k_lens or q_lens, causal=causal, window=window, device=CPU)
    generator = torch.Generator().manual_seed(1)
    options = {"generator": generator, "dtype": torch.float64}
    q = torch.randn(segments.total_q, 4, 8, **options)
    kv = torch.randn(segments.total_k, 4, 8, **options)
    k, v = kv.split(2, dim=1)  # as an exchange of heads leaves them
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    return KernelCall(q, k, v, segments, 0.3, softcap)


def on_a_gpu(monkeypatch, capability=HOPPER):
    """Let a trial believe that it runs on a GPU, on tensors of the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    original = cudnn_long._largest_error
    monkeypatch.setattr(
        cudnn_long, "_largest_error", lambda heads, device, *other: original(heads, CPU, *other)
    )


def assert_as_reference(kernel, call):
    """Forward, and a backward of what was merged with keys of another call."""
    out, lse = kernel.forward(call)
    wanted_out, wanted_lse = Reference().forward(call)
    merged = (torch.randn_like(out), wanted_out / 3, wanted_lse + 1.1)
    found = (out, lse, *kernel.backward(call, *merged))
    wanted = (wanted_out, wanted_lse, *Reference().backward(call, *merged))
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.shape == exact.shape
        assert float((mine - exact).abs().max()) < 1e-12


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("q_len", "k_len", "causal"), [(9, 9, True), (9, 9, False), (5, 12, False)]
)
def test_results_are_those_of_rows(q_len, k_len, causal, strided, by_token):
    call = call_of([q_len], [k_len], causal=causal, strided=strided)
    with cudnn.operators(by_token=by_token):
        assert_as_reference(cudnn_long, call)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(
    ("long", "launches", "left"),
    [
        (1, [], 4),
        (5, [2], 2),  # one launch for all that are short
        (9, [3], 1),
        (13, [4], 0),
    ],
)
def test_each_long_sequence_has_a_call_and_all_others_share_one(
    long, launches, left, by_token, monkeypatch
):
    monkeypatch.setattr(cudnn_long, "LONG", long)
    kernel = Split()
    forward, calls = cudnn_long.forward, []
    monkeypatch.setattr(cudnn_long, "forward", lambda call: calls.append(call) or forward(call))
    with cudnn.operators(by_token=by_token):
        assert_as_reference(kernel, call_of([12, 7, 3, 1]))
    assert (kernel.launches, len(calls)) == (launches, left)


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (call_of([9, 8]), 2),
        (call_of([8]), 1),
        (call_of([7]), 0),
        (call_of([7, 9]), 0),  # a long one behind a short one shares its call
        (call_of([9, 9], [9, 12]), 1),  # aligned with the last key
        (call_of([9], [8], causal=False), 1),
        (call_of([9], [7], causal=False), 0),
        (call_of([9], window=4), 0),
        (call_of([9], softcap=30.0), 0),
    ],
)
def test_what_is_left_to_cudnn(call, left, monkeypatch):
    monkeypatch.setattr(cudnn_long, "LONG", 8)
    assert cudnn_long.long_sequences(call) == left
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cudnn_long.long_sequences(call) == 0  # its bits may differ from run to run


def test_the_cost_model_prices_what_is_left_to_it():
    assert WITH_CUDNN.own_paces[0][0] == cudnn_long.LONG


# ---- the trial


def reference():
    return Reference().forward, Reference().backward


@pytest.mark.parametrize("by_token", [False, True])
def test_what_computes_the_same_is_taken(by_token, monkeypatch):
    on_a_gpu(monkeypatch)
    with cudnn.operators(by_token=by_token):
        assert cudnn_long.is_verified(HEADS, CUDA, reference())
        assert os.environ[cudnn_long.AVOID_RECOMPILE] == "1"


@pytest.mark.parametrize(
    ("heads", "device", "capability"),
    [
        (HEADS, CUDA, AMPERE),
        (HEADS, CPU, HOPPER),
        (HEADS._replace(head_dim=256), CUDA, HOPPER),
    ],
)
def test_nothing_is_tried_elsewhere(heads, device, capability, monkeypatch):
    on_a_gpu(monkeypatch, capability)
    with cudnn.operators():
        assert not cudnn_long.is_verified(heads, device, reference())
        assert cudnn_long.AVOID_RECOMPILE not in os.environ


@pytest.mark.parametrize("wrong", ["out", "lse", "gradients", "merged", "shorter", "nan", "error"])
def test_what_does_not_is_left_alone_with_one_line(wrong, monkeypatch, caplog):
    def wrong_attend(*given, **options):
        out, lse, *others = attend(*given, **options)
        if wrong == "error":
            raise RuntimeError("no valid execution plans")
        factor = {"out": 1.1, "nan": torch.nan}.get(wrong, 1.0)
        if wrong == "shorter" and given[0].shape[2] == cudnn_long.TRIED_TOKENS[1]:
            factor = 1.1  # where a plan for more tokens serves it
        return factor * out, lse * (2.0 if wrong == "lse" else 1.0), *others

    def wrong_gradients(dout, q, k, v, out, lse, *given, **options):
        if wrong == "merged":  # as if there were no other keys
            causal = given[-1]
            segments = Segments([q.shape[2]], [k.shape[2]], causal=causal, device=CPU)
            call = KernelCall(rows(q), rows(k), rows(v), segments, options["scale"])
            own_out, own_lse = Reference().forward(call)
            out, lse = own_out.transpose(0, 1).unsqueeze(0), own_lse[None, :, :, None]
        found = gradients(dout, q, k, v, out, lse, *given, **options)
        return tuple((0.9 if wrong == "gradients" else 1.0) * x for x in found)

    on_a_gpu(monkeypatch)
    with cudnn.operators(), caplog.at_level("WARNING"):
        monkeypatch.setattr(torch.ops.aten, NAME, wrong_attend)
        monkeypatch.setattr(torch.ops.aten, NAME + "_backward", wrong_gradients)
        assert not cudnn_long.is_verified(HEADS, CUDA, reference())
    (record,) = caplog.records
    assert f"{cudnn_long.AVOID_RECOMPILE}=1" in record.getMessage()


def test_a_kernel_is_tried_for_all_calls_of_its_layers_when_it_is_chosen(monkeypatch):
    tried = []
    kernel = Split()
    monkeypatch.setattr(kinds, "choose_kernel", lambda *calls, **of: kernel)
    monkeypatch.setattr(
        cudnn_long, "is_verified", lambda heads, device, other: tried.append(heads) or True
    )
    kernel._cudnn_heads = set()
    layers = [
        LayerCalls("layer 0", 64, heads=frozenset({(4, 2), (8, 4)})),
        LayerCalls("layer 1", 64, heads=frozenset({(8, 4)})),
        LayerCalls("layer 2", 128, window=True, heads=frozenset({(2, 2)})),
        LayerCalls("layer 3", 64, softcap=True, heads=frozenset({(6, 6)})),
    ]
    assert choose_kernels(CPU, torch.bfloat16, layers) is kernel
    # what a window holds all keys of is a whole call
    wanted = {(4, 2, 64), (8, 4, 64), (2, 2, 128)}
    assert {heads[:3] for heads in tried} == {heads[:3] for heads in kernel._cudnn_heads} == wanted
