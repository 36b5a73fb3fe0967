"""The reference and the CPU flash kernel against autograd through a dense masked softmax, and
against each other; windows and softcaps of the CPU kernel, and what it holds at a time."""

import random

import pytest
import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.segments import Segments
from tests.kernels.reference import Reference
from tests.operators import Noted

torch.set_num_threads(1)
CPU = torch.device("cpu")
KERNELS = [Reference(), CpuFlash()]
HEADS = [(4, 4), (4, 2), (4, 1), (1, 1), (6, 2)]
SCALE = 0.31  # deliberately not 1/sqrt(head_dim)

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
is_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])


def random_segments(seed, causal):
    """Lengths 0, 1, 17 and primes, in random order; rectangles may lack queries, keys or both, and
    some causal sequences have keys before the first query's own."""
    rng = random.Random(seed)
    q_lens = rng.sample([0, 1, 2, 17, 31, 53, 0], k=7)
    k_lens = rng.sample([0, 1, 3, 17, 0, 43, 11], k=7)
    if causal:
        k_lens = [q + rng.choice([0, earlier]) for q, earlier in zip(q_lens, k_lens, strict=True)]
    return Segments(q_lens, k_lens, causal=causal, device=CPU)


def random_inputs(segments, heads, head_dim=8, dtype=torch.float64, seed=0):
    """q, k, v and dout, on the device of the segments."""
    make = torch.Generator().manual_seed(seed)
    like_q, like_k = (segments.total_q, heads[0], head_dim), (segments.total_k, heads[1], head_dim)
    return [
        torch.randn(s, generator=make, dtype=torch.float64).to(segments.device, dtype)
        for s in (like_q, like_k, like_k, like_q)
    ]


def dense(q, k, v, dout, segments, softcap=None):
    """By autograd through attention over all tokens at once with a mask, in the inputs' dtype: out
    [Tq, H, D], lse [H, Tq], dq, dk and dv."""
    blocks = [torch.ones(n) for n in zip(segments.q_lens, segments.k_lens, strict=True)]
    if segments.causal:
        blocks = [x.tril(x.shape[1] - x.shape[0]) for x in blocks]
    if segments.window is not None:
        blocks = [x.triu(x.shape[1] - x.shape[0] - segments.window + 1) for x in blocks]
    mask = torch.block_diag(*blocks).bool().to(q.device)  # [Tq, Tk]: which query reads which key
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in leaves[1:])
    scores = torch.einsum("nhd,mhd->hnm", leaves[0], k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # A finite floor instead of -inf, so that autograd has no 0 * nan for queries without keys.
    p = scores.masked_fill(~mask, torch.finfo(q.dtype).min / 2).softmax(-1) * mask
    out = torch.einsum("hnm,mhd->nhd", p, v)
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def run(kernel, q, k, v, dout, segments, softcap=None, *, merged=False):
    """out, lse, dq, dk, dv. merged: as if other keys, of another rank, had added to out and lse
    before the backward."""
    call = KernelCall(q, k, v, segments, SCALE, softcap)
    out, lse = kernel.forward(call)
    if merged:
        return out, lse, *kernel.backward(call, dout, out.to(dout.dtype) * 0.7, lse + 0.4)
    return out, lse, *kernel.backward(call, dout, out, lse)


def assert_close(got, want, tolerance=1e-12):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[~finite], want[~finite])
    got, want = got[finite], want[finite]
    error = (got - want).norm() / want.norm().clamp_min(1e-3)
    assert error <= tolerance, f"relative error {error:.2e}"


def assert_like_the_reference(inputs, segments, softcap=None):
    got = run(CpuFlash(), *inputs, segments, softcap, merged=True)
    want = run(Reference(), *inputs, segments, softcap, merged=True)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


@every_kernel
@is_causal
def test_agrees_with_dense_autograd(kernel, causal):
    for seed in range(2):
        segments = random_segments(seed, causal)
        for heads in HEADS:
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
                inputs = random_inputs(segments, heads, seed=seed, dtype=dtype)
                want = dense(*(x.double() for x in inputs), segments)
                for x, y in zip(run(kernel, *inputs, segments), want, strict=True):
                    assert_close(x, y.to(dtype), tolerance)


@pytest.mark.slow
@is_causal
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
def test_cpu_flash_agrees_with_the_reference_on_longer_sequences(heads, causal):
    """Longer than the CPU kernel's tiles, and a head size that is no multiple of anything."""
    q_lens = [257, 0, 601, 1, 64]
    k_lens = [257, 19, 769, 1, 65] if causal else [383, 19, 769, 0, 1]
    segments = Segments(q_lens, k_lens, causal=causal, device=CPU)
    assert_like_the_reference(random_inputs(segments, heads, head_dim=13), segments)


@pytest.mark.parametrize(
    ("length", "earlier", "window", "softcap"),
    [(40, 0, None, None), (40, 24, None, None), (20, 7, 40, None), (90, 7, 40, 5.0)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_sequence_alone_has_the_bits_that_it_has_among_others(
    dtype, length, earlier, window, softcap
):
    """Alone its results are the kernel's own memory, among others they are copied."""
    keys = length + earlier
    both = Segments([length, 300], [keys, 300], causal=True, device=CPU, window=window)
    alone = Segments([length], [keys], causal=True, device=CPU, window=window)
    q, k, v, dout = random_inputs(both, (4, 2), dtype=dtype)
    out, lse, dq, dk, dv = run(CpuFlash(), q, k, v, dout, both, softcap)
    own = q[:length], k[:keys], v[:keys], dout[:length]
    single = run(CpuFlash(), *own, alone, softcap)
    expected = out[:length], lse[:, :length], dq[:length], dk[:keys], dv[:keys]
    for x, y in zip(single, expected, strict=True):
        assert x.is_contiguous()
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@every_kernel
def test_calls_with_nothing_to_do(kernel):
    for lengths in ([], []), ([0, 0], [0, 0]), ([3], [0]), ([0], [3]):
        segments = Segments(*lengths, causal=False, device=CPU)
        out, lse, dq, dk, dv = run(kernel, *random_inputs(segments, (4, 2)), segments)
        assert lse.shape == (4, segments.total_q)
        assert (lse == -torch.inf).all()
        assert not any(x.any() for x in (out, dq, dk, dv))
        assert dk.shape == (segments.total_k, 2, 8)


@every_kernel
def test_any_strides_are_read_right(kernel):
    """Views of a fused projection, a last dimension that is not contiguous, and an expanded
    dout."""
    segments = Segments([5, 12], [5, 12], causal=True, device=CPU)
    fused = torch.randn(
        17, 2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    q, k, v = fused.unbind(-1)  # strides (48, 24, 3)
    dout = torch.ones((), dtype=torch.float64).expand(17, 2, 8)
    got = run(kernel, q, k, v, dout, segments)
    want = run(kernel, *(x.contiguous() for x in (q, k, v, dout)), segments)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


@pytest.mark.slow
def test_16_bit_gradients_do_not_lose_accuracy_with_length_or_shared_heads():
    """Four query heads to a key head: as good as float32 math that is rounded once."""
    dtype = torch.bfloat16
    segments = Segments([1000], [1000], causal=True, device=CPU)
    inputs = random_inputs(segments, (4, 1), head_dim=64, dtype=dtype)
    true = run(Reference(), *(x.double() for x in inputs), segments)[2:]
    rounded_once = run(Reference(), *inputs, segments)[2:]
    for got, good, want in zip(
        run(CpuFlash(), *inputs, segments)[2:], rounded_once, true, strict=True
    ):
        assert (got.to(dtype).double() - want).norm() <= 1.5 * (good.double() - want).norm()


def test_capped_scores_under_autocast_are_those_without():
    """Its products are torch's own, which autocast would compute in bfloat16."""
    segments = random_segments(0, causal=True)
    inputs = random_inputs(segments, (4, 2), head_dim=32, dtype=torch.float32)
    wanted = run(CpuFlash(), *inputs, segments, softcap=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(CpuFlash(), *inputs, segments, softcap=5.0)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


# ---- windows and softcaps of the CPU kernel


@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 127, 300, 1_030])
def test_windows_are_exact(window):
    """Sequences of 0, 1, a prime and more tokens than a block has, some behind earlier keys."""
    for heads in ((4, 2), (1, 1)):
        rng = random.Random(window)
        q_lens = rng.sample([0, 1, 2, 53, 257, 331], k=6)
        k_lens = [n + rng.choice([0, 1, window - 1, 2 * window, 67]) for n in q_lens]
        segments = Segments(q_lens, k_lens, causal=True, device=CPU, window=window)
        assert_like_the_reference(random_inputs(segments, heads, head_dim=13), segments)
    for length in (1, 16, 17, 18, 63, 64, 65, 129):
        alone = Segments([length], [length], causal=True, device=CPU, window=window)
        assert_like_the_reference(random_inputs(alone, (4, 2)), alone)


@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_softcaps_are_exact_with_and_without_windows_and_in_rectangles(softcap):
    for window in (None, 1, 65, 600):
        lengths = [1, 140, 0, 131], [1, 600, 9, 700]  # a block of 128 queries, a run of 512 keys
        segments = Segments(*lengths, causal=True, device=CPU, window=window)
        assert_like_the_reference(random_inputs(segments, (6, 2)), segments, softcap)
    rectangles = Segments([150, 3, 0, 7], [600, 0, 5, 1], causal=False, device=CPU)
    assert_like_the_reference(random_inputs(rectangles, (4, 2)), rectangles, softcap)


@pytest.mark.parametrize("softcap", [None, 3.0], ids="softcap {}".format)
def test_16_bit_inputs_are_rounded_once_and_their_gradients_stay_wide(softcap):
    segments = Segments([300], [340], causal=True, device=CPU, window=96)
    inputs = random_inputs(segments, (4, 2), dtype=torch.bfloat16)
    out, _, *gradients = run(CpuFlash(), *inputs, segments, softcap)
    exact, *_ = run(Reference(), *(x.double() for x in inputs), segments, softcap)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in gradients} == {torch.float32}
    rounded = exact.to(torch.bfloat16).double()
    assert (out.double() - exact).norm() < 1.6 * (rounded - exact).norm()


def elements_of(operator, args, result):
    """Of the largest tensor that an operation returns."""
    made = result if isinstance(result, (tuple, list)) else (result,)
    return max((x.numel() for x in made if isinstance(x, torch.Tensor)), default=0)


@pytest.mark.parametrize(("window", "softcap"), [(512, None), (None, 5.0), (512, 5.0)])
def test_no_tensor_has_tokens_times_tokens_elements(window, softcap):
    tokens = 2_048
    segments = Segments([tokens], [tokens], causal=True, device=CPU, window=window)
    inputs = random_inputs(segments, (1, 1), dtype=torch.float32)
    with Noted(elements_of) as noted:
        run(CpuFlash(), *inputs, segments, softcap)
    assert max(noted.found) <= tokens * tokens / 32
