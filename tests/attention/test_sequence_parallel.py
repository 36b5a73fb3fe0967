"""Every strategy, on every degree up to 8, against dense softmax attention of one process, in
float64: full attention, windows, chunks, sinks, softcaps and values of another size."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.kernels import cudnn_long
from hf_flexseq.plan import attention_schedule as schedule
from hf_flexseq.program import ring_steps
from tests.attention import group
from tests.attention.dense import dense_attention
from tests.attention.group import context_of, nodes_of, own_rows, qkv_and_dout
from tests.budget import others_slow
from tests.device import DEVICE
from tests.kernels import cudnn
from tests.ranks import join, run_ranks, run_threads

SIZE = 8  # of a query head
SCALE = 0.3
SHARED = [name for name in STRATEGIES if name != "local"]
MIXED = (31, 1, 2, 17, 13, 29)

KINDS = {  # (reach, has sinks, softcap, size of a value head)
    "full": (FULL, False, None, SIZE),
    "window of one": (Reach(window=1), False, None, SIZE),
    "window with sinks": (Reach(window=13), True, None, SIZE),
    "wide window with a softcap": (Reach(window=30), False, 2.0, SIZE),
    "chunk of one": (Reach(chunk=1), False, None, SIZE),
    "large chunk with sinks": (Reach(chunk=29), True, None, SIZE),
    "sinks with a softcap": (FULL, True, 1.5, SIZE),
    "small values": (FULL, False, None, 5),
    "large values in a window": (Reach(window=4), True, None, 11),
}
# (kind, lengths, heads of queries, and of keys and values)
FULL_CASES = [
    *(("full", lengths, (4, 2)) for lengths in ((1,), (2,), (17,), (41,))),
    *(("full", MIXED, heads) for heads in ((4, 4), (8, 2), (8, 1), (3, 1), (2, 1))),
]
CASES = FULL_CASES + [(kind, (*MIXED, 5), (3, 1)) for kind in KINDS if kind != "full"]


def options_of(kind, heads):
    """What attention is called with beside q, k and v."""
    reach, has_sinks, softcap, _ = KINDS[kind]
    sinks = None
    if has_sinks:
        sinks = torch.linspace(-1.0, 2.0, heads, dtype=torch.float64, device=DEVICE)
        sinks.requires_grad_()
    scale = None if kind == "full" else SCALE
    return {"reach": reach, "sinks": sinks, "softcap": softcap, "scale": scale}


def gradient_of(sinks):
    return None if sinks is None else sinks.grad.tolist()


@functools.cache
def wanted(kind, lengths, heads):
    """By sequence out, dq, dk, dv; and the gradient of all sinks."""
    options = options_of(kind, heads[0])
    found = []
    for sequence, length in enumerate(lengths):
        *qkv, dout = qkv_and_dout(sequence, length, *heads, SIZE, KINDS[kind][3])
        qkv = [x.clone().requires_grad_() for x in qkv]
        out = dense_attention(*qkv, **options)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in qkv)])
    return found, gradient_of(options["sinks"])


def attend(communicator, strategy, case, checkpointed):
    """Of out, dq, dk and dv: squared norms of this rank's error and of what it should have; and
    its part of the gradient of the sinks."""
    kind, lengths, heads = case
    value_size = KINDS[kind][3]
    seq_ctx = context_of(communicator, strategy, lengths, head_dim=max(SIZE, value_size))
    given = [qkv_and_dout(i, n, *heads, SIZE, value_size) for i, n in enumerate(lengths)]
    *qkv, dout = own_rows(given, seq_ctx.shard)
    qkv = [x.requires_grad_() for x in qkv]
    options = options_of(kind, heads[0])

    def run(q, k, v):
        # the layer is no identity, so that a replay has something to compute
        return sequence_parallel_attention(q * 1, k * 1, v * 1, seq_ctx, **options)

    out = checkpoint(run, *qkv, use_reentrant=False) if checkpointed else run(*qkv)
    out.backward(dout)
    by_sequence, _ = wanted(*case)
    found = [out.detach(), *(x.grad for x in qkv)]
    norms = [
        [float((x - y).square().sum()), float(y.square().sum())]
        for x, y in zip(found, own_rows(by_sequence, seq_ctx.shard), strict=True)
    ]
    return norms, gradient_of(options["sinks"])


def run_cases(rank, world_size, per_node, strategies, cases):
    communicator = join(nodes_of(world_size, per_node), use_blocks=world_size % 3 != 0)
    found = {}
    for strategy in strategies:
        for number, case in enumerate(cases):
            # on another number of ranks it is the other way round
            checkpointed = (number + world_size) % 2 == 0
            found[strategy, case] = attend(communicator, strategy, case, checkpointed)
    return found


def worst_error(results, case):
    """The relative error of the worst tensor, sinks included. The gradient of a query that reads
    one key is zero, so the norms of all four tensors together are the floor."""
    squares = torch.tensor([norms for norms, _ in results], dtype=torch.float64).sum(0)
    floor = 1e-3 * squares[:, 1].max()
    error = float((squares[:, 0] / squares[:, 1].clamp_min(floor)).sqrt().max())
    _, sink_grad = wanted(*case)
    if sink_grad is not None:
        grads = torch.tensor([sink_grad, *(grad for _, grad in results)], dtype=torch.float64)
        exact, found = grads[0], grads[1:].sum(0)
        error = max(error, float((found - exact).norm() / exact.norm()))
    return error


def assert_exact(by_rank):
    errors = {
        (strategy, case): worst_error([found[strategy, case] for found in by_rank], case)
        for strategy, case in by_rank[0]
    }
    assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.on_device
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, CASES),
        (2, CASES[::2]),
        (3, CASES[1::2]),
        pytest.param(4, CASES, marks=pytest.mark.slow),
        pytest.param(8, CASES[::4], marks=pytest.mark.slow),
        *(pytest.param(n, CASES, marks=pytest.mark.nightly) for n in (5, 6, 7, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_every_strategy_is_exact(world_size, cases):
    strategies = SHARED if world_size > 1 else ["local"]
    assert_exact(run_threads(run_cases, world_size, 2, strategies, cases, seconds=100))


@pytest.mark.processes
def test_every_strategy_is_exact_on_processes():
    assert_exact(run_ranks(run_cases, 4, 2, SHARED, FULL_CASES, seconds=100))


@pytest.mark.on_device
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 3), (2, 4)])
def test_hybrid_is_exact_on_wider_nodes(nodes, per_node):
    ranks = nodes * per_node
    assert_exact(run_threads(run_cases, ranks, per_node, ["hybrid"], FULL_CASES[4:]))


@pytest.mark.parametrize(
    ("large", "worthy_pairs"),
    [(1, 1), (1024, 30), (1024, 10**9)],
    ids=["chunk by chunk", "some steps joined", "all steps joined"],
)
def test_rings_are_exact_however_chunks_travel(large, worthy_pairs, monkeypatch):
    # of these short sequences chunks travel together otherwise
    monkeypatch.setitem(schedule.LARGE, "cpu", large)
    monkeypatch.setitem(ring_steps.WORTHY_PAIRS, "cpu", worthy_pairs)
    strategies = ["zigzag", "balanced"]
    assert_exact(run_threads(run_cases, 4, 2, strategies, FULL_CASES[3:6]))


@pytest.mark.parametrize("long", others_slow([1, 4, 9, 30], tried=[4]))
def test_long_sequences_in_calls_of_their_own_are_exact(long, monkeypatch):
    """Windows, chunks shorter than a sequence and softcaps stay in the other kernel's call."""
    kernel = cudnn.Split()
    monkeypatch.setattr(cudnn_long, "LONG", long)
    monkeypatch.setattr(group, "own_kernel", lambda *given: kernel)
    left = []
    forward = cudnn_long.forward
    monkeypatch.setattr(cudnn_long, "forward", lambda call: left.append(call) or forward(call))
    with cudnn.operators(by_token=long % 2 == 0):
        cases = [("full", tuple(sorted(MIXED, reverse=True)), (8, 2)), *CASES[-8::2]]
        assert_exact(run_threads(run_cases, 4, 2, SHARED, cases))
    assert left
    assert all(call.softcap is None and call.segments.window is None for call in left)
    assert all(len(call.segments.q_lens) == 1 for call in left)
    assert min(call.segments.max_q for call in left) >= long


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"window": 0}, "window of 0"),
        ({"chunk": -3}, "chunk of -3"),
        ({"window": 2, "chunk": 3}, "window of 2 and a chunk of 3"),
    ],
)
def test_a_reach_that_reads_nothing_or_two_things_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        Reach(**asked)
