"""The bits of deterministic attention, at every degree and under every strategy."""

import pytest
import torch

from hf_flexseq.attention import (
    SequenceContext,
    block_pairs,
    deterministic,
    pair_attention,
    sequence_parallel_attention,
)
from hf_flexseq.attention.block_pairs import OwnResults
from hf_flexseq.attention.deterministic import slowdown
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.merge import merge_into
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.plan import STRATEGIES, Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.profiler.runs import CountingKernel
from hf_flexseq.program.blocks import BLOCK
from tests.attention.dense import dense_attention
from tests.attention.test_sequence_parallel import CPU
from tests.ranks import join, run_ranks, run_threads

LENGTHS = (3 * BLOCK + 41, 2 * BLOCK, 1, 17, BLOCK + 1)
HEAD_DIM = 16
HEADS = [(4, 2), (2, 2), (3, 1)]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NAMES = ("out", "dq", "dk", "dv")


def tensors_of(sequence, heads, kv_heads, dtype):
    """q, k, v and dout of one sequence."""
    generator = torch.Generator().manual_seed(sequence)
    shapes = [(LENGTHS[sequence], h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def attend(communicator, groups, heads, dtype, deterministic=True, kernel=None):
    """out, dq, dk, dv of this rank's rows, and which rows they are."""
    shard = make_shard(MicroBatch(groups=groups), LENGTHS, communicator.rank)
    kernel = kernel or choose_kernel(CPU, dtype, HEAD_DIM)
    seq_ctx = SequenceContext(shard, communicator, kernel, CPU, deterministic=deterministic)
    whole = [tensors_of(i, *heads, dtype) for i in range(len(LENGTHS))]
    q, k, v, dout = (
        torch.cat(
            [whole[0][x][:0], *(whole[s.sequence][x][s.start : s.stop] for s in shard.slices)]
        )
        for x in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, seq_ctx)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad], [
        (s.sequence, s.start, s.stop) for s in shard.slices
    ]


def placements(world_size):
    """Everything on all ranks by every strategy, and in nested groups."""
    everything, ranks = tuple(range(len(LENGTHS))), tuple(range(world_size))
    if world_size == 1:
        return {"local": (Group(ranks=ranks, sequences=everything, strategy="local"),)}
    found = {
        name: (Group(ranks=ranks, sequences=everything, strategy=name),)
        for name in STRATEGIES
        if name != "local"
    }
    return found | {
        "zones": (
            Group(ranks=ranks, sequences=(0, 2), strategy="zigzag"),
            Group(ranks=ranks[:2], sequences=(1, 3), strategy="ulysses"),
            Group(ranks=ranks[-1:], sequences=(4,), strategy="local"),
        )
    }


def run_placements(rank, world_size):
    communicator = join()
    found = {}
    for name, groups in placements(world_size).items():
        for heads in HEADS:
            for dtype in DTYPES:
                tensors, slices = attend(communicator, groups, heads, dtype)
                found[name, heads, str(dtype)] = [x.double().numpy() for x in tensors], slices
    return found


def whole_sequences(by_rank, case):
    """{(tensor, sequence): all its rows}"""
    found = {}
    for rank in by_rank:
        tensors, slices = rank[case]
        row = 0
        for sequence, start, stop in slices:
            for name, x in zip(NAMES, tensors, strict=True):
                whole = found.setdefault(
                    (name, sequence), torch.full((LENGTHS[sequence], *x.shape[1:]), torch.nan)
                )
                whole[start:stop] = torch.from_numpy(x[row : row + stop - start])
            row += stop - start
    return found


@pytest.fixture(scope="module")
def alone():
    return run_threads(run_placements, 1)


@pytest.mark.parametrize(
    ("start", "world_size"),
    [
        (run_threads, 2),
        *(pytest.param(run_threads, n, marks=pytest.mark.slow) for n in (3, 4, 8)),
        pytest.param(run_ranks, 2, marks=pytest.mark.processes),
    ],
)
def test_every_degree_and_strategy_has_the_same_bits(alone, start, world_size):
    torch.set_default_dtype(torch.float64)
    try:
        by_rank = start(run_placements, world_size, seconds=150)
        for case in by_rank[0]:
            found, wanted = (
                whole_sequences(by_rank, case),
                whole_sequences(alone, ("local", *case[1:])),
            )
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], case
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_exact(alone, heads):
    tensors, slices = alone[0]["local", heads, "torch.float64"]
    assert [s[0] for s in slices] == list(range(len(LENGTHS)))
    expected = []
    for i in range(len(LENGTHS)):
        q, k, v, dout = tensors_of(i, *heads, torch.float64)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = dense_attention(q, k, v)
        out.backward(dout)
        expected.append([out.detach(), q.grad, k.grad, v.grad])
    for x, parts in zip(tensors, zip(*expected, strict=True), strict=True):
        y = torch.cat(parts)
        assert (torch.from_numpy(x) - y).norm() <= 1e-12 * y.norm()


def test_the_usual_way_has_other_bits_at_other_degrees(alone):
    """Otherwise the test above would show nothing."""
    groups = placements(1)["local"]
    tensors, _ = attend(Communicator(), groups, HEADS[0], torch.float32, deterministic=False)
    fixed, _ = alone[0]["local", HEADS[0], "torch.float32"]
    assert any((x.double().numpy() != y).any() for x, y in zip(tensors, fixed, strict=True))


def bits_of(monkeypatch, call_bytes, dtype):
    """out, dq, dk, dv on one rank, with kernel calls of so many bytes; and how many calls."""
    monkeypatch.setattr(block_pairs, "CALL_BYTES", {"cpu": call_bytes})
    counting = CountingKernel(choose_kernel(CPU, dtype, HEAD_DIM))
    groups = placements(1)["local"]
    tensors, _ = attend(Communicator(), groups, HEADS[0], dtype, kernel=counting)
    return tensors, counting.forwards + counting.backwards


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_pairs_a_call_takes_changes_no_bit(monkeypatch, dtype):
    wanted, fewest_calls = bits_of(monkeypatch, 2**40, dtype)
    found, most_calls = bits_of(monkeypatch, 1, dtype)
    # The longest sequence has four blocks: a call for each distance, or one for 0 and one for
    # all others.
    assert (fewest_calls, most_calls) == (4, 8)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_a_pair_has_the_bits_of_a_call_of_its_own():
    """A rank with one block computes pairs alone that another rank computes among many."""
    kernel = choose_kernel(CPU, torch.bfloat16, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    shape = (5 * BLOCK, 3, HEAD_DIM)
    dout, q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))
    many = Segments((BLOCK,) * 5, (BLOCK,) * 5, causal=True, device=CPU)
    one = Segments((BLOCK,), (BLOCK,), causal=True, device=CPU)
    out, lse = kernel.forward(q, k, v, many, scale=0.3)
    gradients = kernel.backward(dout, q, k, v, out, lse, many, scale=0.3)
    for i in range(5):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        qkv = [x[rows].clone() for x in (q, k, v)]
        block_out, block_lse = kernel.forward(*qkv, one, scale=0.3)
        assert torch.equal(block_out, out[rows])
        assert torch.equal(block_lse, lse[:, rows])
        of_block = kernel.backward(dout[rows].clone(), *qkv, block_out, block_lse, one, scale=0.3)
        assert all(torch.equal(x, y[rows]) for x, y in zip(of_block, gradients, strict=True))


def test_how_many_blocks_and_threads_merge_at_once_changes_no_bit():
    blocks, heads = 61, 32  # of more elements than torch leaves to one thread
    generator = torch.Generator().manual_seed(0)
    out, pair_out = torch.randn(2, blocks, BLOCK, heads, 2, generator=generator)
    lse, pair_lse = 3 * torch.randn(2, blocks, BLOCK, heads, generator=generator)
    wanted_out, wanted_lse = out.clone(), lse.clone()
    for i in range(blocks):
        one = slice(i, i + 1)
        merge_into(wanted_out[one], wanted_lse[one], pair_out[one], pair_lse[one])
    threads = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        every = OwnResults(blocks, torch.arange(blocks))
        pair_attention._merge_round(out, lse, every, pair_out, pair_lse)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(out, wanted_out)
    assert torch.equal(lse, wanted_lse)


class TicksPerCall:
    """A kernel under whose every call, forward or backward, a clock goes on by a millisecond for
    every sequence of the call."""

    def __init__(self, kernel):
        self.kernel, self.seconds = kernel, 0.0

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def forward(self, q, k, v, segments, **options):
        self.seconds += 0.001 * len(segments.q_lens)
        return self.kernel.forward(q, k, v, segments, **options)

    def backward(self, dout, q, k, v, out, lse, segments, **options):
        self.seconds += 0.001 * len(segments.q_lens)
        return self.kernel.backward(dout, q, k, v, out, lse, segments, **options)


@pytest.mark.parametrize(
    ("longest", "seconds", "tokens", "pairs"),
    [
        (200, 1.0, 200, 3),  # the whole sequence, where it is short
        (4 * BLOCK, 0.0, 2 * BLOCK, 3),  # the first length, however long that takes
        # 4 lengths x 3 runs x (2 + 6) ms are too long for twice the first one, or are not
        (4 * BLOCK, 0.09, 2 * BLOCK, 3),
        (4 * BLOCK, 0.1, 4 * BLOCK, 10),
        (3 * BLOCK, 0.1, 3 * BLOCK, 6),
    ],
)
def test_its_cost_is_measured_at_the_longest_length_that_is_affordable(
    monkeypatch, longest, seconds, tokens, pairs
):
    kernel = TicksPerCall(choose_kernel(CPU, torch.float32, HEAD_DIM))
    monkeypatch.setattr(deterministic.time, "perf_counter", lambda: kernel.seconds)
    monkeypatch.setattr(deterministic, "SLOWDOWN_FIRST_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(deterministic, "SLOWDOWN_SECONDS", seconds)
    q, k = torch.ones(1, 4, HEAD_DIM), torch.ones(1, 2, HEAD_DIM)
    with torch.no_grad():  # as where a run begins with an evaluation
        found = slowdown(longest, q, k, Communicator(), kernel)
    assert found.tokens == tokens
    assert found.factor == pytest.approx(pairs)
