"""Attention chunk by chunk against attention over whole sequences, and every wrong order."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.base.layers import Reach
from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.pipeline.carry import KVCarry, WrongOrder
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.plan.pipeline import Chunk
from hf_flexseq.plan.shard import Slice
from tests.attention.dense import dense_attention

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


def chunk(*slices, index=0):
    return Chunk(
        unit=0, index=index, slices=tuple(Slice(sequence=i, start=a, stop=b) for i, a, b in slices)
    )


def qkv(heads=4, kv_heads=2, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(sum(LENGTHS), n, 8, dtype=dtype, requires_grad=True) for n in sizes]


def rows_of(slices):
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return torch.cat([torch.arange(offsets[i] + a, offsets[i] + b) for i, a, b in slices])


def run_chunk(carry, slices, tensors, *, replayed=False, layer=0, **kind):
    context = ChunkContext(chunk(*slices), LENGTHS, carry, CPU)
    rows = rows_of(slices)

    def attend(q, k, v):
        layer_ctx = context.of_layer(layer, keeps_grad=True)
        return sequence_parallel_attention(q, k, v, layer_ctx, **kind)

    parts = [x[rows] for x in tensors]
    return checkpoint(attend, *parts, use_reentrant=False) if replayed else attend(*parts)


def whole_attention(tensors, dout):
    q, k, v = (x.detach() for x in tensors)
    segments = Segments(LENGTHS, LENGTHS, causal=True, device=CPU)
    call = KernelCall(q, k, v, segments, 8**-0.5)
    out, lse = Reference().forward(call)
    return out, Reference().backward(call, dout, out, lse)


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda k: k.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("replayed", [False, True])
def test_chunks_equal_whole_sequences(kernel, heads, kv_heads, replayed):
    tensors = qkv(heads, kv_heads)
    dout = torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64)
    carry = KVCarry(kernel)
    outs = [
        run_chunk(carry, slices, tensors, replayed=replayed and i % 2 == 0)
        for i, slices in enumerate(CHUNKS)
    ]
    wanted_out, wanted = whole_attention(tensors, dout)
    for slices, out in zip(CHUNKS, outs, strict=True):
        torch.testing.assert_close(out, wanted_out[rows_of(slices)], rtol=1e-12, atol=1e-12)
    for slices, out in reversed(list(zip(CHUNKS, outs, strict=True))):
        out.backward(dout[rows_of(slices)])
    carry.check_empty()
    assert carry.bytes() == 0
    for x, gradient in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        {"reach": Reach(window=1)},
        {"reach": Reach(window=4), "softcap": 1.5},
        {"reach": Reach(window=9)},
        {"reach": Reach(chunk=1)},
        {"reach": Reach(chunk=4)},
        {"reach": Reach(chunk=8), "softcap": 1.5},
    ],
    ids=lambda kind: str(kind["reach"]),
)
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_chunks_of_a_layer_with_a_window_or_a_chunk_equal_whole_sequences(kind, replayed, sinks):
    tensors = qkv()
    dout = torch.randn(sum(LENGTHS), 4, 8, dtype=torch.float64)
    own = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if sinks else None

    wanted_out = []
    start = 0
    for length in LENGTHS:
        rows = [x[start : start + length] for x in tensors]
        wanted_out.append(dense_attention(*rows, sinks=own, **kind))
        start += length
    leaves = [*tensors, own] if sinks else tensors
    wanted = torch.autograd.grad(torch.cat(wanted_out), leaves, dout)

    carry = KVCarry(CpuFlash())
    outs = []
    for i, slices in enumerate(CHUNKS):
        replays = replayed and i % 2 == 0
        outs.append(run_chunk(carry, slices, tensors, replayed=replays, sinks=own, **kind))
    for slices, out in reversed(list(zip(CHUNKS, outs, strict=True))):
        rows = rows_of(slices)
        torch.testing.assert_close(out, torch.cat(wanted_out)[rows], rtol=1e-12, atol=1e-12)
        out.backward(dout[rows])
    carry.check_empty()
    for x, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


def test_saves_queries_output_and_lse_alone_and_writes_keys_once():
    tensors = qkv()
    carry = KVCarry(CpuFlash())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        for slices in CHUNKS[:2]:
            parts = [x[rows_of(slices)] for x in tensors]
            context = ChunkContext(chunk(*slices), LENGTHS, carry, CPU)
            saved.clear()
            sequence_parallel_attention(*parts, context.of_layer(0, keeps_grad=True))
            tokens = len(rows_of(slices))
            assert sorted(saved) == sorted([tokens * 4 * 8, tokens * 4 * 8, tokens * 4])
    assert carry.bytes() == 2 * LENGTHS[0] * 2 * 8 * 8


def test_without_gradients_a_sequence_is_over_with_its_last_chunk():
    carry = KVCarry(CpuFlash())
    with torch.no_grad():
        for slices in CHUNKS[:3]:
            context = ChunkContext(chunk(*slices), LENGTHS, carry, CPU)
            sequence_parallel_attention(
                *(x[rows_of(slices)] for x in qkv()), context.of_layer(0, keeps_grad=False)
            )
    carry.check_empty()


def test_segments_are_made_once_per_chunk_for_all_layers_and_both_directions(monkeypatch):
    made = []

    def counted(*lengths, **options):
        made.append(lengths)
        return Segments(*lengths, **options)

    monkeypatch.setattr("hf_flexseq.pipeline.carry.Segments", counted)
    carry = KVCarry(CpuFlash())
    tensors = qkv()
    outs = []
    for slices in CHUNKS[:3]:
        context = ChunkContext(chunk(*slices), LENGTHS, carry, CPU)
        parts = [x[rows_of(slices)] for x in tensors]
        for layer in range(4):
            outs.append(
                sequence_parallel_attention(*parts, context.of_layer(layer, keeps_grad=True))
            )
    for out in reversed(outs):
        out.sum().backward(retain_graph=True)
    carry.check_empty()
    assert made == [([6], [6]), ([1], [7]), ([4], [11])]


def test_bfloat16_gradients_accumulate_in_float32():
    tensors = qkv(dtype=torch.bfloat16)
    carry = KVCarry(CpuFlash())
    outs = [run_chunk(carry, slices, tensors) for slices in CHUNKS[:3]]
    outs[2].backward(torch.ones_like(outs[2]))
    (carried,) = carry._carried.values()
    assert carried._dk.dtype == carried._dv.dtype == torch.float32
    for out in outs[1::-1]:
        out.backward(torch.ones_like(out))
    carry.check_empty()


# ---- wrong orders


def test_a_sequence_that_does_not_begin_at_its_beginning_raises():
    with pytest.raises(WrongOrder, match="sequence 0 begins at 6 instead of 0"):
        run_chunk(KVCarry(CpuFlash()), CHUNKS[1], qkv())


def test_a_missing_chunk_raises():
    carry = KVCarry(CpuFlash())
    run_chunk(carry, CHUNKS[0], qkv())
    with pytest.raises(
        WrongOrder,
        match=r"stored 6 of 11.*the forward of \[7, 11\) is not the "
        r"next one",
    ):
        run_chunk(carry, CHUNKS[2], qkv())


def test_a_chunk_that_comes_twice_raises():
    carry = KVCarry(CpuFlash())
    run_chunk(carry, CHUNKS[0], qkv())
    with pytest.raises(WrongOrder, match=r"the forward of \[0, 6\) is not the next one"):
        run_chunk(carry, CHUNKS[0], qkv())


def test_backward_in_the_order_of_the_forward_raises():
    carry = KVCarry(CpuFlash())
    outs = [run_chunk(carry, slices, qkv()) for slices in CHUNKS[:3]]
    with pytest.raises(WrongOrder, match=r"the backward of \[0, 6\) is not the next one"):
        outs[0].sum().backward()


def test_backward_before_the_last_chunk_raises():
    carry = KVCarry(CpuFlash())
    outs = [run_chunk(carry, slices, qkv()) for slices in CHUNKS[:2]]
    with pytest.raises(WrongOrder, match=r"the backward of \[6, 7\) is not the next one"):
        outs[1].sum().backward()


def test_what_is_not_drained_raises_at_the_end():
    carry = KVCarry(CpuFlash())
    outs = [run_chunk(carry, slices, qkv()) for slices in CHUNKS[:3]]
    outs[2].sum().backward()
    with pytest.raises(
        WrongOrder,
        match=r"not drained: layer 0, sequence 0 \(stored 11 of 11 "
        r"positions, 4 drained\)",
    ):
        carry.check_empty()
    carry.check_empty()  # nothing is left for the next step
