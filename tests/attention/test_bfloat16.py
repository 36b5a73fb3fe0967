"""The error of bfloat16 attention over a group, against that of one bfloat16 kernel call, both
against float64.

Ulysses makes one call per query, so it rounds an output once, as one rank does.
The rings merge partial results, rounded to 16 bits by the kernel, in float32.

Gradients leave the CPU kernel in float32; they are rounded when complete, and where a ring sends
parts of them to another rank. Ulysses sends float32 where several ranks share a KV
head. The reference gives gradients of 16 bits, as the CUDA kernels do: then every part
of a sum is rounded before it is added, in float32, to the others.
"""

import pytest
import torch

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.kernels.cpu_flash import CpuFlash
from tests.attention.group import context_of, nodes_of, own_rows, qkv_and_dout
from tests.kernels.reference import Reference
from tests.ranks import join, run_threads

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
LENGTHS = (384, 130)
KERNELS = (CpuFlash(), Reference())  # gradients of 32 bits, and of 16
SINKS = (-1.0, 0.0, 1.0, 3.0)  # of each head

# By kernel and strategy: how many times the error of one call the errors of out, dq, dk, dv may
# be.
#
# One rounding is what a single call has, too. Measured: 1.000 at most.
ONE_ROUNDING = 1.05
# Outputs are merged of rounded ones, gradients are rounded on their way. Measured: 1.252 at most.
MERGED = 1.3
# A sum of parts that were rounded each, rounded again. The errors of parts that do not depend on
# each other add up to about that of one rounding, so that two of them are sqrt(2) = 1.41 of one;
# where parts cancel it is more. Measured: out 1.289, dq 1.324, dk 1.394, dv 1.458 at most.
TWICE_ROUNDED = 1.5

RINGS = {"cpu_flash": (MERGED,) * 4, "reference": (TWICE_ROUNDED,) * 4}
ULYSSES = {
    "cpu_flash": (ONE_ROUNDING,) * 4,
    # Heads that share a KV head are on several ranks, but all keys of a query are in one call.
    "reference": (ONE_ROUNDING, ONE_ROUNDING, TWICE_ROUNDED, TWICE_ROUNDED),
}
MOST = {"ulysses": ULYSSES, "zigzag": RINGS, "balanced": RINGS, "hybrid": RINGS}


def attend(strategy, dtype, communicator, kernel, sinks=None):
    """out, dq, dk, dv of this rank's shard, and the shard."""
    seq_ctx = context_of(communicator, strategy, LENGTHS, kernel=kernel)
    whole = [qkv_and_dout(i, n, HEADS, KV_HEADS, HEAD_DIM) for i, n in enumerate(LENGTHS)]
    q, k, v, dout = (x.bfloat16().to(dtype) for x in own_rows(whole, seq_ctx.shard))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    if sinks is not None:
        sinks = torch.tensor(sinks, dtype=dtype)
    out = sequence_parallel_attention(q, k, v, seq_ctx, sinks=sinks)
    assert out.dtype == dtype
    out.backward(dout)
    assert {x.grad.dtype for x in (q, k, v)} == {dtype}
    return (out.detach(), q.grad, k.grad, v.grad), seq_ctx.shard


def squared_norms(rank, world_size, strategies, sinks):
    """By kernel and strategy, of each tensor on this rank: the error with sinks, what is exact
    with them, the error of one call of the same kernel without, and what is exact without."""
    communicator = join(nodes_of(world_size))
    plain, _ = attend("local", torch.float64, communicator, Reference())
    exact = plain
    if sinks is not None:
        exact, _ = attend("local", torch.float64, communicator, Reference(), sinks)
    found = {}
    for kernel in KERNELS:
        single, _ = attend("local", torch.bfloat16, communicator, kernel)
        for strategy in strategies:
            shared, shard = attend(strategy, torch.bfloat16, communicator, kernel, sinks)
            by_sequence = zip(*(x.split(LENGTHS) for x in (*exact, *single, *plain)), strict=True)
            rows = own_rows(list(by_sequence), shard)
            found[kernel.name, strategy] = [
                [norm(x - y), norm(y), norm(z - p), norm(p)]
                for x, y, z, p in zip(shared, rows[:4], rows[4:8], rows[8:], strict=True)
            ]
    return found


def norm(x):
    return float(x.double().square().sum())


def ratios(world_size, strategies, sinks=None):
    """By kernel and strategy how many times the relative error of one call that of each tensor
    is."""
    by_rank = run_threads(squared_norms, world_size, strategies, sinks)
    found = {}
    for case in by_rank[0]:
        error, size, single, plain = (
            torch.tensor([rank[case] for rank in by_rank]).sum(0).unbind(1)
        )
        found[case] = ((error / size) / (single / plain)).sqrt().tolist()
    return found


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.nightly)],
)
def test_bfloat16_stays_close_to_one_kernel(world_size):
    for (kernel, strategy), found in ratios(world_size, MOST).items():
        for ratio, bound in zip(found, MOST[strategy][kernel], strict=True):
            assert ratio <= bound, (kernel, strategy, found)


def test_sinks_round_a_result_once_more():
    """Kernels return 16 bits, to which a sink's factor is applied. Measured: out 1.477 at most,
    gradients 1.436."""
    for case, found in ratios(2, ["local", *MOST], SINKS).items():
        assert max(found) < TWICE_ROUNDED, (case, found)
