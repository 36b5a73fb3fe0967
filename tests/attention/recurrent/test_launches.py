"""The operations that a rank launches for a recurrent layer whose sequence goes on on others, as a
cost model counts them (`cost/launches.py`), against those that torch runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.recurrent import causal_convolution, mamba2_scan
from hf_flexseq.attention.recurrent.layers import delta_rule
from hf_flexseq.base.layers import RecurrentShape
from hf_flexseq.cost.launches import segments_work
from tests.attention.group import context_of
from tests.ranks import join, run_threads

SIZES = {
    kind: RecurrentShape(
        kind=kind, key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
    )
    for kind in ("gated_delta", "mamba2", "convolution")
}
# Operations that touch no number.
VIEWS = (
    "view", "select.int", "slice", "expand", "transpose", "permute", "unsqueeze", "squeeze",
    "detach", "alias", "as_strided", "split", "t.default", "_unsafe_view", "unbind", "empty",
    "new_empty",
)  # fmt: skip


@pytest.fixture(autouse=True)
def strict_operations():
    """Checks of operations would be counted, too."""


class Counting(TorchDispatchMode):
    """Counts operations."""

    launches = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.launches += not str(operation).removeprefix("aten.").startswith(VIEWS)
        return operation(*args, **(kwargs or {}))


def run_layer(sizes: RecurrentShape, rows: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    """The convolution and the scan of one layer, of rows [tokens, channels]."""
    weight = rows.new_full((sizes.channels, sizes.width), 1 / sizes.width, requires_grad=True)
    rows = causal_convolution(rows, weight, None, context)
    if sizes.kind == "convolution":
        return rows
    tokens, keys = rows.shape[0], sizes.key_heads * sizes.key_dim
    values = sizes.value_heads * sizes.value_dim
    q, k, v = rows[:, : 2 * keys + values].split((keys, keys, values), dim=1)
    q, k = (x.reshape(tokens, sizes.key_heads, sizes.key_dim) for x in (q, k))
    v = v.reshape(tokens, sizes.value_heads, sizes.value_dim)
    ones = rows.new_ones(tokens, sizes.value_heads)
    if sizes.kind == "mamba2":
        return mamba2_scan(
            v, -3 * ones, -ones[0], k, q, context,
            dt_bias=None, dt_softplus=True, dt_limit=(0.0, float("inf")),
        )  # fmt: skip
    return delta_rule(sizes.kind, q, k, v, -0.05 * ones, 0.5 * ones, context, l2norm=True)


def launched(rank: int, world: int, kind: str, strategy: str) -> int:
    """The operations of one layer, forward and backward, on slices of one chunk."""
    tokens = 128 if strategy == "zigzag" else 64
    context = context_of(join(), strategy if world > 1 else "local", (tokens * world,))
    sizes = SIZES[kind]
    rows = torch.ones(tokens, sizes.channels, dtype=torch.float64, requires_grad=True)

    def run() -> None:
        run_layer(sizes, rows, context).sum().backward()

    run()  # which compiles the programs
    with torch.autograd.set_multithreading_enabled(False), Counting() as counting:
        run()
    return counting.launches


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("strategy", ["ulysses", "zigzag"])
def test_the_busiest_rank_launches_about_what_is_priced(strategy: str, kind: str) -> None:
    (alone,) = run_threads(launched, 1, kind, strategy)
    for degree in (3, 6):
        most = max(run_threads(launched, degree, kind, strategy))
        priced = segments_work(kind, strategy, degree).launches
        assert most - alone == pytest.approx(priced, rel=0.15)
