"""Losses on whole samples on the device: weights and figures are those of the stock trainers."""

import pytest

from tests.hf import objectives, test_objectives, trainers
from tests.hf.plain import training_arguments

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


@pytest.mark.usefixtures("in_torch", "one_kernel")
@pytest.mark.parametrize("name", test_objectives.CASES)
def test_the_stock_trainer_s_results(monkeypatch, tmp_path, name):
    def on_device(cls, *args, **options):
        def make(**given):
            return cls(**given | {"use_cpu": False})

        return training_arguments(make, *args, **options)

    for module in (objectives, trainers):
        monkeypatch.setattr(module, "training_arguments", on_device)
    monkeypatch.setattr(trainers, "whole", lambda parameter: parameter.cpu())
    case = test_objectives.CASES[name]
    objectives.save_inputs(tmp_path)
    apart = objectives.compare(0, 1, tmp_path, case)
    assert apart.figures > 15
    objectives.assert_alike(apart, weights=objectives.BOUNDS[case.kind])
