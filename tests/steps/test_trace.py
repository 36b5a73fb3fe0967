"""What a step's end does, in which order, and who refuses a trace."""

from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.distributed.transport import Capabilities
from hf_flexseq.steps import trace as tracing
from hf_flexseq.steps.trace import PlanTrace
from tests.ranks import join, run_threads


def step_of(remark, measured_s):
    return SimpleNamespace(number=3, plan=None, remark=remark, measured_s=measured_s)


@pytest.mark.parametrize("waits_on_stream", [True, False])
def test_ranks_meet_before_they_wait_for_devices(monkeypatch, waits_on_stream):
    """A device whose peer is lost never ends its work, and only the host can say who is lost."""
    done = []
    cpu_group = SimpleNamespace(
        barrier=lambda: done.append("meet"),
        gather_values=lambda own: [own],
        gather_floats=lambda own: done.append("gather") or torch.tensor([own, own]),
    )
    capabilities = Capabilities(ordered=waits_on_stream, waits_on_stream=waits_on_stream)
    transport = SimpleNamespace(capabilities=capabilities)
    communicator = SimpleNamespace(rank=1, world_size=2, cpu_group=cpu_group, transport=transport)
    step = step_of(None, lambda: done.append("wait for the device") or [0.5])
    monkeypatch.setattr(tracing, "step_figures", lambda *figures: {})
    trace = PlanTrace(None, communicator)
    done.clear()
    trace.record(step, None)
    assert done == [*["meet"] * waits_on_stream, "wait for the device", "gather"]


def opened(rank, world_size, paths):
    with pytest.raises(ValueError) as raised:
        PlanTrace(paths[rank], join())
    return str(raised.value)


def test_a_folder_that_is_not_there_on_rank_0_is_an_error_on_all_ranks(tmp_path):
    missing = str(tmp_path / "not-there" / "trace.jsonl")
    messages = run_threads(opened, 3, [missing] * 3)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank 0, opening the plan trace: plan_trace='{missing}' is in")


def test_only_rank_0_needs_the_folder(tmp_path):
    paths = [str(tmp_path / "trace.jsonl"), str(tmp_path / "not-there" / "trace.jsonl"), None]
    run_threads(lambda rank, world_size: PlanTrace(paths[rank], join()), 3)


def measured_and_remarked(rank, world_size, remarks):
    """What a rank finds at a step's end: the seconds of the slowest rank, all remarks, and how
    many exchanges of the host that took."""
    communicator = join()
    trace = PlanTrace(None, communicator)
    step = step_of(remarks[rank], lambda: [1.0 + rank, 0.5 * rank])
    meetings = communicator.transport.hub.meetings
    before = meetings._next[rank]
    slowest = trace.record(step, None)["slowest"]
    return slowest, step.remarks, meetings._next[rank] - before


@pytest.mark.parametrize(
    ("remarks", "exchanges"), [([None, None, None], 1), ([None, {"names": ["a"]}, None], 2)]
)
def test_remarks_reach_all_ranks_and_cost_nothing_where_there_are_none(
    monkeypatch, remarks, exchanges
):
    monkeypatch.setattr(tracing, "step_figures", lambda step, slowest: {"slowest": slowest})
    found = run_threads(measured_and_remarked, 3, remarks)
    assert found == [(4.0, remarks, exchanges)] * 3
