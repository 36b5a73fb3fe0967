"""Windows and softcaps of the CPU kernel against the reference, and what it holds at a time."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.cpu_pieces import PiecewiseAttention
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from tests.kernels.test_kernels import (
    CPU,
    SCALE,
    assert_close,
    every_head_count,
    may_read,
    random_inputs,
)

WINDOWS = [1, 2, 17, 64, 65, 127, 300, 1_030]


def results(kernel, q, k, v, dout, segments, softcap=None):
    """out, lse, and dq, dk, dv for an output and log-sum-exp that are merged with others."""
    call = KernelCall(q, k, v, segments, SCALE, softcap)
    out, lse = kernel.forward(call)
    # As if other keys, of another rank, had added to both.
    merged_out = out.to(dout.dtype) * 0.7
    gradients = kernel.backward(call, dout, merged_out, lse + 0.4)
    return out, lse, *gradients


def assert_like_the_reference(inputs, segments, softcap=None, tolerance=1e-12):
    got = results(CpuFlash(), *inputs, segments, softcap)
    want = results(Reference(), *inputs, segments, softcap)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, tolerance)


def windowed(window, seed=0):
    """Sequences of 0, 1, a prime and more tokens than a block has, some behind earlier keys."""
    rng = random.Random(seed)
    q_lens = rng.sample([0, 1, 2, 53, 257, 331], k=6)
    k_lens = [n + rng.choice([0, 1, window - 1, 2 * window, 67]) for n in q_lens]
    return Segments(q_lens, k_lens, causal=True, device=CPU, window=window)


@every_head_count
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_are_exact(heads, window):
    segments = windowed(window, seed=window)
    assert_like_the_reference(random_inputs(segments, heads, head_dim=13), segments)


@pytest.mark.parametrize("length", [1, 16, 17, 18, 63, 64, 65, 129])
def test_a_sequence_alone_around_its_window_and_its_blocks(length):
    segments = Segments([length], [length], causal=True, device=CPU, window=17)
    assert_like_the_reference(random_inputs(segments, (4, 2)), segments)


@pytest.mark.parametrize("softcap", [0.7, 50.0])
@pytest.mark.parametrize("window", [None, 1, 65, 600])
def test_softcaps_are_exact_with_and_without_windows(softcap, window):
    segments = Segments([1, 700, 0, 131], [1, 700, 9, 900], causal=True, device=CPU, window=window)
    assert_like_the_reference(random_inputs(segments, (6, 2)), segments, softcap)


def test_softcaps_are_exact_in_rectangles():
    segments = Segments([150, 3, 0, 7], [1_100, 0, 5, 1], causal=False, device=CPU)
    assert_like_the_reference(random_inputs(segments, (4, 2)), segments, softcap=2.5)


@pytest.mark.parametrize("softcap", [None, 3.0], ids="softcap {}".format)
def test_16_bit_inputs_are_rounded_once_and_their_gradients_stay_wide(softcap):
    segments = Segments([300], [340], causal=True, device=CPU, window=96)
    inputs = random_inputs(segments, (4, 2), dtype=torch.bfloat16)
    out, _, *gradients = results(CpuFlash(), *inputs, segments, softcap)
    wide = [x.double() for x in inputs]
    exact, _, *_ = results(Reference(), *wide, segments, softcap)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in gradients} == {torch.float32}
    rounded = exact.to(torch.bfloat16).double()
    assert (out.double() - exact).norm() < 1.6 * (rounded - exact).norm()


def test_a_window_of_all_keys_hides_nothing():
    inputs = random_inputs(Segments([70], [70], causal=True, device=CPU), (4, 2))
    wide = Segments([70], [70], causal=True, device=CPU, window=70)
    full = Segments([70], [70], causal=True, device=CPU)
    got = results(CpuFlash(), *inputs, wide)
    want = results(CpuFlash(), *inputs, full)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("softcap", [None, 5.0], ids="softcap {}".format)
@pytest.mark.parametrize("length", [20, 90])
def test_a_sequence_alone_has_the_bits_that_it_has_beside_a_longer_one(length, softcap):
    """Shorter than the window, and longer."""
    earlier = 7
    lengths = [length, 300]
    keys = [length + earlier, 300]
    both = Segments(lengths, keys, causal=True, device=CPU, window=40)
    alone = Segments(lengths[:1], keys[:1], causal=True, device=CPU, window=40)
    q, k, v, dout = random_inputs(both, (4, 2))
    out, lse, dq, dk, dv = results(CpuFlash(), q, k, v, dout, both, softcap)
    own = keys[0]
    single = results(CpuFlash(), q[:length], k[:own], v[:own], dout[:length], alone, softcap)
    among = out[:length], lse[:, :length], dq[:length], dk[:own], dv[:own]
    assert all(torch.equal(x, y) for x, y in zip(single, among, strict=True))


@pytest.mark.parametrize("softcap", [None, 2.0], ids="softcap {}".format)
@pytest.mark.parametrize("window", [None, 1, 5, 40, 600])
@pytest.mark.parametrize("lengths", [(7, 12), (1, 9), (23, 23), (300, 701)])
def test_pieces_and_their_masks_are_the_whole_mask_cut_up(lengths, window, softcap):
    queries, keys = lengths
    segments = Segments([queries], [keys], causal=True, device=CPU, window=window)
    attention = PiecewiseAttention(causal=True, window=window, scale=SCALE, softcap=softcap)
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for rows, columns, is_causal, mask in attention.pieces(
        torch.empty(1, 1, queries, 1), torch.empty(1, 1, keys, 1)
    ):
        part = torch.ones_like(seen[rows, columns])
        if is_causal:
            part = part.tril()
        if mask is not None:
            part *= mask == 0
        seen[rows, columns] += part
    visible = may_read(segments)
    if window is not None:
        visible &= ~torch.ones_like(visible).tril(keys - queries - window)
    if softcap is not None or queries < keys or (window is not None and window < keys):
        assert torch.equal(seen, visible.long())


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize(
    ("window", "softcap"),
    [(512, None), (None, 5.0), (512, 5.0)],
    ids=["window", "softcap", "both"],
)
def test_no_tensor_has_tokens_times_tokens_elements(window, softcap):
    tokens = 2_048
    segments = Segments([tokens], [tokens], causal=True, device=CPU, window=window)
    inputs = random_inputs(segments, (1, 1), dtype=torch.float32)
    with LargestTensor() as largest:
        results(CpuFlash(), *inputs, segments, softcap)
    assert largest.elements <= tokens * tokens / 32
