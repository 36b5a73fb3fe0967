"""The operations that a rank launches for a recurrent layer whose sequence goes on on others, as a
cost model counts them (`cost/launches.py`), against those that torch runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost.launches import segments_work
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.layers import RecurrentShape
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.profiler.recurrent_runs import ScanRun
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


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = str(operation).removeprefix("aten.")
        self.launches += not name.startswith(VIEWS)
        return operation(*args, **(kwargs or {}))


def launched(rank: int, world: int, kind: str, strategy: str) -> int:
    """The operations of one layer, forward and backward, on slices of one chunk."""
    tokens = 128 if strategy == "zigzag" else 64
    group = Group(
        ranks=tuple(range(world)), sequences=(0,), strategy=strategy if world > 1 else "local"
    )
    shard = make_shard(MicroBatch(groups=(group,)), (tokens * world,), rank)
    cpu = torch.device("cpu")
    context = SequenceContext(shard, join(), Reference(), cpu)
    run = ScanRun(SIZES[kind], context, tokens, replays=False, dtype=torch.float64, device=cpu)
    run()  # which compiles the programs
    with torch.autograd.set_multithreading_enabled(False), Counting() as counting:
        run()
    return counting.launches


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("strategy", ["ulysses", "zigzag"])
@pytest.mark.parametrize("degree", [3, 4, 6])
def test_the_busiest_rank_launches_about_what_is_priced(
    degree: int, strategy: str, kind: str
) -> None:
    (alone,) = run_threads(launched, 1, kind, strategy)
    most = max(run_threads(launched, degree, kind, strategy))
    priced = segments_work(kind, strategy, degree).launches
    assert most - alone == pytest.approx(priced, rel=0.15)
