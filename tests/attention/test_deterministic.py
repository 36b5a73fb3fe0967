"""The bits of deterministic attention, at every degree and under every strategy."""

import pytest
import torch

from hf_flexseq.attention import SequenceContext, deterministic, sequence_parallel_attention
from hf_flexseq.attention.deterministic import BLOCK, slowdown
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import STRATEGIES, Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from tests.attention.test_sequence_parallel import CPU, dense_attention
from tests.ranks import run_ranks

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


def attend(communicator, groups, heads, dtype, deterministic=True):
    """out, dq, dk, dv of this rank's rows, and which rows they are."""
    shard = make_shard(MicroBatch(groups=groups), LENGTHS, communicator.rank)
    kernel = choose_kernel(CPU, dtype, HEAD_DIM)
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
    communicator = Communicator()
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
    return run_ranks(run_placements, 1)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_degree_and_strategy_has_the_same_bits(alone, world_size):
    torch.set_default_dtype(torch.float64)
    try:
        by_rank = run_ranks(run_placements, world_size, seconds=150)
        for case in by_rank[0]:
            found, wanted = (
                whole_sequences(by_rank, case),
                whole_sequences(alone, ("local", *case[1:])),
            )
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], case
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_usual_way_has_other_bits_at_other_degrees(alone):
    """Otherwise the test above would show nothing."""
    groups = placements(1)["local"]
    tensors, _ = attend(Communicator(), groups, HEADS[0], torch.float32, deterministic=False)
    fixed, _ = alone[0]["local", HEADS[0], "torch.float32"]
    assert any((x.double().numpy() != y).any() for x, y in zip(tensors, fixed, strict=True))


class TicksPerCall:
    """A kernel under whose every call, forward or backward, a clock goes on by one second."""

    def __init__(self, kernel):
        self.kernel, self.seconds = kernel, 0

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def forward(self, *args, **options):
        self.seconds += 1
        return self.kernel.forward(*args, **options)

    def backward(self, *args, **options):
        self.seconds += 1
        return self.kernel.backward(*args, **options)


def test_its_cost_is_the_ratio_of_the_seconds_it_takes(monkeypatch):
    kernel = TicksPerCall(choose_kernel(CPU, torch.float32, HEAD_DIM))
    monkeypatch.setattr(deterministic.time, "perf_counter", lambda: kernel.seconds)
    q, k = torch.ones(2 * BLOCK, 4, HEAD_DIM), torch.ones(2 * BLOCK, 2, HEAD_DIM)
    # Of two blocks there are three pairs with keys to read, and one call for everything otherwise.
    assert slowdown(q, k, Communicator(), kernel) == 3
