"""What a step's end does, in which order."""

from types import SimpleNamespace

import pytest

from hf_flexseq.distributed.transport import Capabilities
from hf_flexseq.steps import trace as tracing
from hf_flexseq.steps.trace import PlanTrace


@pytest.mark.parametrize("waits_on_stream", [True, False])
def test_ranks_meet_before_they_wait_for_devices(monkeypatch, waits_on_stream):
    """A device whose peer is lost never ends its work, and only the host can say who is lost."""
    done = []
    host = SimpleNamespace(
        barrier=lambda: done.append("meet"),
        gather_values=lambda own: done.append("gather") or [own],
    )
    capabilities = Capabilities(ordered=waits_on_stream, waits_on_stream=waits_on_stream)
    transport = SimpleNamespace(capabilities=capabilities)
    communicator = SimpleNamespace(rank=1, world_size=2, host=host, transport=transport)
    step = SimpleNamespace(
        number=3,
        plan=None,
        remark=None,
        measured_s=lambda: done.append("wait for the device") or [0.5],
    )
    monkeypatch.setattr(tracing, "step_figures", lambda *figures: {})
    trace = PlanTrace(None, communicator)
    monkeypatch.setattr(trace, "_digest", lambda cost: "")
    trace.record(step, None)
    assert done == [*["meet"] * waits_on_stream, "wait for the device", "gather"]
