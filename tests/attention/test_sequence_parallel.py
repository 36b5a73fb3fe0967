"""Every strategy, on every degree up to 8, against dense softmax attention of one process, in
float64: full attention, windows, chunks, sinks, softcaps and values of another size."""

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.kernels import cudnn_long
from tests.attention import exact
from tests.attention.exact import KINDS, SHARED, Case, assert_exact, run_cases
from tests.budget import others_slow
from tests.kernels import cudnn
from tests.ranks import run_threads

MIXED = (31, 1, 2, 17, 13, 29)
FULL_CASES = [
    *(Case("full", (4, 2), lengths) for lengths in ((1,), (2,), (17,), (41,))),
    *(Case("full", heads, MIXED) for heads in ((4, 4), (8, 2), (8, 1), (3, 1), (2, 1))),
]
CASES = FULL_CASES + [Case(kind, (3, 1), (*MIXED, 5)) for kind in KINDS if kind != "full"]


@pytest.mark.on_device
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, CASES),
        (2, CASES[::2]),
        (3, CASES[1::2]),
        pytest.param(4, CASES, marks=pytest.mark.slow),
        pytest.param(8, CASES[::4], marks=pytest.mark.slow),
        pytest.param(16, [Case("full", (2, 1), (70,))], marks=pytest.mark.slow),
        *(pytest.param(n, CASES, marks=pytest.mark.nightly) for n in (5, 6, 7, 8)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_every_strategy_is_exact(world_size, cases):
    strategies = SHARED if world_size > 1 else ["local"]
    assert_exact(run_threads(run_cases, world_size, strategies, cases, seconds=100))


@pytest.mark.on_device
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (2, 3), (2, 4)])
def test_hybrid_is_exact_on_wider_nodes(nodes, per_node):
    assert_exact(run_threads(run_cases, nodes * per_node, ["hybrid"], FULL_CASES[4:], per_node))


@pytest.mark.parametrize("long", others_slow([1, 4, 9, 30], tried=[4]))
def test_long_sequences_in_calls_of_their_own_are_exact(long, monkeypatch):
    """Windows, chunks shorter than a sequence and softcaps stay in the other kernel's call."""
    kernel = cudnn.Split()
    monkeypatch.setattr(cudnn_long, "LONG", long)
    monkeypatch.setattr(exact, "own_kernel", lambda *given: kernel)
    left = []
    forward = cudnn_long.forward
    monkeypatch.setattr(cudnn_long, "forward", lambda call: left.append(call) or forward(call))
    with cudnn.operators(by_token=long % 2 == 0):
        cases = [Case("full", (8, 2), tuple(sorted(MIXED, reverse=True))), *CASES[-8::2]]
        assert_exact(run_threads(run_cases, 4, SHARED, cases))
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
