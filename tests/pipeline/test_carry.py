"""Attention chunk by chunk against attention over whole sequences. Wrong orders are in
`test_executor.py`."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.attention.recurrent.carry import Carry
from hf_flexseq.base.layers import Reach
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.pipeline.context import ChunkContext
from tests.attention.dense import dense_attention
from tests.kernels.reference import Reference
from tests.pipelines import chunk_of

CPU = torch.device("cpu")
LENGTHS = (11, 3, 7, 1)
# A long sequence in three uneven chunks, the tail of it with short ones, and another one in two.
CHUNKS = (
    ((0, 0, 6),),
    ((0, 6, 7),),
    ((0, 7, 11), (1, 0, 3), (3, 0, 1)),
    ((2, 0, 2),),
    ((2, 2, 7),),
)
# layers: the kernel, heads of queries and of keys, and what else they compute
LAYERS = [
    *((kernel, heads, {}) for kernel in (CpuFlash(), Reference()) for heads in ((4, 2), (3, 3))),
    (CpuFlash(), (4, 1), {"reach": Reach(window=1)}),
    (CpuFlash(), (4, 2), {"reach": Reach(window=4), "softcap": 1.5}),
    (CpuFlash(), (4, 2), {"reach": Reach(window=9)}),
    (CpuFlash(), (4, 2), {"reach": Reach(chunk=1)}),
    (CpuFlash(), (4, 2), {"reach": Reach(chunk=4)}),
    (CpuFlash(), (4, 2), {"reach": Reach(chunk=8), "softcap": 1.5}),
]


def qkv(heads=4, kv_heads=2, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(sum(LENGTHS), n, 8, dtype=dtype, requires_grad=True) for n in sizes]


def rows_of(slices):
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return torch.cat([torch.arange(offsets[i] + a, offsets[i] + b) for i, a, b in slices])


def run_chunk(carry, slices, tensors, *, kernel=None, replayed=False, keeps_grad=True, **kind):
    context = ChunkContext(chunk_of(*slices), LENGTHS, carry, CPU, kernel=kernel or CpuFlash())

    def attend(q, k, v):
        seq_ctx = context.of_layer(0, keeps_grad=keeps_grad)
        return sequence_parallel_attention(q, k, v, seq_ctx, **kind)

    parts = [x[rows_of(slices)] for x in tensors]
    return checkpoint(attend, *parts, use_reentrant=False) if replayed else attend(*parts)


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("kernel", "heads", "kind"), LAYERS)
def test_chunks_equal_whole_sequences(kernel, heads, kind, sinks, replayed):
    tensors = qkv(*heads)
    dout = torch.randn(sum(LENGTHS), heads[0], 8, dtype=torch.float64)
    own = None
    if sinks:
        own = torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_()

    by_sequence = zip(*(x.split(LENGTHS) for x in tensors), strict=True)
    wanted_out = torch.cat([dense_attention(*rows, sinks=own, **kind) for rows in by_sequence])
    leaves = [*tensors, own] if sinks else tensors
    wanted = torch.autograd.grad(wanted_out, leaves, dout)

    carry = Carry()
    outs = []
    for i, slices in enumerate(CHUNKS):
        options = {"kernel": kernel, "replayed": replayed and i % 2 == 0, "sinks": own}
        outs.append(run_chunk(carry, slices, tensors, **options, **kind))
    for slices, out in reversed(list(zip(CHUNKS, outs, strict=True))):
        rows = rows_of(slices)
        torch.testing.assert_close(out, wanted_out[rows], rtol=1e-12, atol=1e-12)
        out.backward(dout[rows])
    assert not carry._carried, "no buffer is left"
    carry.check_empty()
    for x, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


def test_without_gradients_a_sequence_is_over_with_its_last_chunk():
    carry = Carry()
    with torch.no_grad():
        for slices in CHUNKS[:3]:
            run_chunk(carry, slices, qkv(), keeps_grad=False)
    assert not carry._carried, "no buffer is left"
    carry.check_empty()


def test_bfloat16_gradients_accumulate_in_float32():
    tensors = qkv(dtype=torch.bfloat16)
    carry = Carry()
    outs = [run_chunk(carry, slices, tensors) for slices in CHUNKS[:3]]
    outs[2].backward(torch.ones_like(outs[2]))
    (carried,) = carry._carried.values()
    assert carried._dk.dtype == carried._dv.dtype == torch.float32
    for out in outs[1::-1]:
        out.backward(torch.ones_like(out))
    carry.check_empty()
