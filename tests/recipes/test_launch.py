"""What a run on CPU processes is told."""

from types import SimpleNamespace

import pytest

import launch


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch.check_world(SimpleNamespace(world_size=2))
    with pytest.raises(
        ValueError, match="2 processes were launched, but this one sees 1: launch with one of"
    ):
        launch.check_world(SimpleNamespace(world_size=1))


def test_a_single_process_needs_no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch.check_world(SimpleNamespace(world_size=1))


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [(None, {"use_cpu": True}), ("mps", {"use_cpu": True}), ("cuda", {})],
)
def test_the_cpu_is_used_where_there_is_nothing_better(accelerator, options, monkeypatch):
    device = accelerator and SimpleNamespace(type=accelerator)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: device)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    assert launch.device_defaults() == options
