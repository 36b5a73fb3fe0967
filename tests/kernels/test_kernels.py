"""The reference and the CPU flash kernel against autograd through a dense masked softmax, and
against each other."""

import random

import pytest
import torch

from hf_flexseq.kernels import KernelCall, cpu_pieces
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments

torch.set_num_threads(1)
CPU = torch.device("cpu")
KERNELS = [Reference(), CpuFlash()]
HEADS = [(4, 4), (4, 2), (4, 1), (1, 1), (6, 2)]
SCALE = 0.31  # deliberately not 1/sqrt(head_dim)

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
every_head_count = pytest.mark.parametrize(
    "heads", HEADS, ids=lambda heads: f"{heads[0]}q{heads[1]}kv"
)


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
    """q, k, v and dout."""
    make = torch.Generator().manual_seed(seed)
    like_q, like_k = (segments.total_q, heads[0], head_dim), (segments.total_k, heads[1], head_dim)
    return [
        torch.randn(s, generator=make, dtype=torch.float64).to(dtype)
        for s in (like_q, like_k, like_k, like_q)
    ]


def may_read(segments):
    """[Tq, Tk] bool: which query reads which key."""
    mask = torch.zeros(segments.total_q, segments.total_k, dtype=torch.bool)
    q, k = 0, 0
    for q_len, k_len in zip(segments.q_lens, segments.k_lens, strict=True):
        block = torch.ones(q_len, k_len, dtype=torch.bool)
        mask[q : q + q_len, k : k + k_len] = (
            block.tril(k_len - q_len) if segments.causal else block
        )
        q, k = q + q_len, k + k_len
    return mask


def dense(q, k, v, segments, scale=SCALE):
    """Attention over all tokens at once with a mask, in the inputs' dtype: out [Tq, H, D] and lse
    [H, Tq]."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    mask = may_read(segments)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    # A finite floor instead of -inf, so that autograd has no 0 * nan for queries without keys.
    p = scores.masked_fill(~mask, torch.finfo(q.dtype).min / 2).softmax(-1) * mask
    return torch.einsum("hnm,mhd->nhd", p, v), scores.masked_fill(~mask, -torch.inf).logsumexp(-1)


def dense_gradients(q, k, v, dout, segments, scale=SCALE):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dense(*leaves, segments, scale)[0].backward(dout)
    return [x.grad for x in leaves]


def run(kernel, q, k, v, dout, segments, softcap=None):
    """out, lse, dq, dk, dv"""
    call = KernelCall(q, k, v, segments, SCALE, softcap)
    out, lse = kernel.forward(call)
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


@every_kernel
@every_head_count
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_dense_autograd(kernel, heads, causal, seed):
    segments = random_segments(seed, causal)
    q, k, v, dout = random_inputs(segments, heads, seed=seed)
    got = run(kernel, q, k, v, dout, segments)
    want = *dense(q, k, v, segments), *dense_gradients(q, k, v, dout, segments)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


@every_head_count
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])
def test_cpu_flash_agrees_with_the_reference_on_longer_sequences(heads, causal):
    """Longer than the CPU kernel's tiles, and a head size that is no multiple of anything."""
    q_lens = [257, 0, 601, 1, 64]
    k_lens = [257, 19, 769, 1, 65] if causal else [383, 19, 769, 0, 1]
    segments = Segments(q_lens, k_lens, causal=causal, device=CPU)
    inputs = random_inputs(segments, heads, head_dim=13)
    for x, y in zip(
        run(CpuFlash(), *inputs, segments), run(Reference(), *inputs, segments), strict=True
    ):
        assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("earlier", [0, 24], ids="{} earlier keys".format)
def test_a_sequence_alone_has_the_results_it_has_among_others(dtype, earlier):
    """Alone its results are the kernel's own memory, among others they are copied."""
    both = Segments([40, 9], [40 + earlier, 9], causal=True, device=CPU)
    alone = Segments([40], [40 + earlier], causal=True, device=CPU)
    q, k, v, dout = random_inputs(both, (4, 2), dtype=dtype)
    among = run(CpuFlash(), q, k, v, dout, both)
    tokens = 40 + earlier
    single = run(CpuFlash(), q[:40], k[:tokens], v[:tokens], dout[:40], alone)
    out, lse, dq, dk, dv = among
    expected = out[:40], lse[:, :40], dq[:40], dk[:tokens], dv[:tokens]
    for x, y in zip(single, expected, strict=True):
        assert x.is_contiguous()
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_the_results_of_a_sequence_alone_are_not_copied(monkeypatch):
    left = []
    kernel = cpu_pieces.BACKWARD

    def remembered(*inputs, **options):
        gradients = kernel(*inputs, **options)
        left.extend(gradient.data_ptr() for gradient in gradients)
        return gradients

    monkeypatch.setattr(cpu_pieces, "BACKWARD", remembered)
    segments = Segments([40], [40], causal=True, device=CPU)
    gradients = run(CpuFlash(), *random_inputs(segments, (4, 2)), segments)[2:]
    assert [gradient.data_ptr() for gradient in gradients] == left


@every_kernel
def test_query_without_keys_gets_zero_and_minus_infinity(kernel):
    segments = Segments([2, 3], [0, 4], causal=False, device=CPU)
    out, lse, dq, _, _ = run(kernel, *random_inputs(segments, (2, 1)), segments)
    assert not out[:2].any()
    assert not dq[:2].any()
    assert out[2:].all()
    assert (lse[:, :2] == -torch.inf).all()
    assert lse[:, 2:].isfinite().all()


@every_kernel
@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 0]), ([3], [0]), ([0], [3])])
def test_calls_with_nothing_to_do(kernel, lengths):
    segments = Segments(*lengths, causal=False, device=CPU)
    out, lse, dq, dk, dv = run(kernel, *random_inputs(segments, (4, 2)), segments)
    assert lse.shape == (4, segments.total_q)
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in (out, dq, dk, dv))
    assert dk.shape == (segments.total_k, 2, 8)


def merge(parts):
    """Merge (out, lse) of disjoint sets of keys: out [n, H, D], lse [H, n]."""
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    # [n, H, 1]
    weights = [(part_lse - lse).exp().nan_to_num(0.0).t().unsqueeze(-1) for _, part_lse in parts]
    return sum(out * w for (out, _), w in zip(parts, weights, strict=True)), lse


@every_kernel
@every_head_count
@pytest.mark.parametrize("early", [0, 1, 19, 38], ids=lambda early: f"{early}_early_keys")
def test_blocks_with_merged_out_and_lse_sum_to_the_dense_gradient(kernel, heads, early):
    """The later 41 tokens of a sequence read `early` tokens before them (a rectangle) and
    themselves (causal)."""
    late = 41
    whole = Segments([early + late], [early + late], causal=True, device=CPU)
    q, k, v, dout = random_inputs(whole, heads, seed=early)
    dout[:early] = 0  # only the late queries are ours
    mine = slice(early, early + late)
    blocks = [
        (slice(0, early), Segments([late], [early], causal=False, device=CPU)),
        (mine, Segments([late], [late], causal=True, device=CPU)),
    ]
    calls = [KernelCall(q[mine], k[keys], v[keys], s, SCALE) for keys, s in blocks]
    out, lse = merge([kernel.forward(call) for call in calls])
    want_out, want_lse = dense(q, k, v, whole)
    assert_close(out, want_out[mine])
    assert_close(lse, want_lse[:, mine])

    grads = [kernel.backward(call, dout[mine], out, lse) for call in calls]
    dq, dk, dv = dense_gradients(q, k, v, dout, whole)
    assert_close(grads[0][0] + grads[1][0], dq[mine])
    assert_close(torch.cat([grads[0][1], grads[1][1]]), dk)
    assert_close(torch.cat([grads[0][2], grads[1][2]]), dv)


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


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])
def test_16_bit_error_is_at_most_twice_that_of_plain_softmax(kernel, dtype, causal):
    """Against float64 on the same rounded inputs; plain is the same computation written out in
    that dtype."""
    segments = random_segments(0, causal)
    inputs = random_inputs(segments, (4, 2), head_dim=32, dtype=dtype)
    exact = [x.double() for x in inputs]
    want = [dense(*exact[:3], segments)[0], *dense_gradients(*exact, segments)]
    plain = [dense(*inputs[:3], segments)[0], *dense_gradients(*inputs, segments)]
    out, lse, *grads = run(kernel, *inputs, segments)
    # The CPU kernel takes a fast exponential for 16-bit inputs, which is far finer than their
    # rounding.
    assert_close(lse, dense(*exact[:3], segments)[1].float(), 1e-4)
    assert out.dtype == dtype
    assert {grad.dtype for grad in grads} == {torch.float32 if kernel.wide_gradients else dtype}
    for got, rough, true in zip((out, *grads), plain, want, strict=True):
        assert (got.double() - true).abs().max() <= 2 * (rough.double() - true).abs().max()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_16_bit_gradients_do_not_lose_accuracy_with_length_or_shared_heads(dtype):
    """1,409 tokens and four query heads to a key head: as good as float32 math that is rounded
    once."""
    segments = Segments([1409], [1409], causal=True, device=CPU)
    inputs = random_inputs(segments, (4, 1), head_dim=64, dtype=dtype)
    true = run(Reference(), *(x.double() for x in inputs), segments)[2:]
    rounded_once = run(Reference(), *inputs, segments)[2:]
    for got, good, want in zip(
        run(CpuFlash(), *inputs, segments)[2:], rounded_once, true, strict=True
    ):
        assert (got.to(dtype).double() - want).norm() <= 1.5 * (good.double() - want).norm()


@every_kernel
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "rectangles"])
def test_float32_stays_float32(kernel, causal):
    segments = random_segments(0, causal)
    inputs = random_inputs(segments, (4, 2), head_dim=32, dtype=torch.float32)
    exact = [x.double() for x in inputs]
    want = *dense(*exact[:3], segments), *dense_gradients(*exact, segments)
    for got, true in zip(run(kernel, *inputs, segments), want, strict=True):
        assert_close(got, true.float(), 1e-6)


def test_capped_scores_under_autocast_are_those_without():
    """Its products are torch's own, which autocast would compute in bfloat16."""
    segments = random_segments(0, causal=True)
    inputs = random_inputs(segments, (4, 2), head_dim=32, dtype=torch.float32)
    wanted = run(CpuFlash(), *inputs, segments, softcap=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(CpuFlash(), *inputs, segments, softcap=5.0)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
