"""scripts/benchmarks/learning.py: what it makes of the logs of runs."""

import importlib
import sys

import pytest

from tests.programs import ROOT


@pytest.fixture(scope="module")
def learning():
    """The benchmark as a module, which imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts/benchmarks"))
        yield importlib.import_module("learning")
        sys.modules.pop("learning")


def rewards_from(first: float, last: float) -> list[dict[str, float]]:
    steps = [{"reward": first}] * 10 + [{"reward": 9.0}] + [{"reward": last}] * 10
    return [{"eval_reward": 0.0}, *steps, {"eval_reward": 0.5}]


def test_rewards_are_compared_at_both_ends(learning):
    found = learning.of_rewards(rewards_from(0.25, 0.75))
    assert (found["first"], found["last"], found["held_out"]) == (0.25, 0.75, 0.5)
    assert (found["steps"], found["learned"]) == (21, True)
    assert not learning.of_rewards(rewards_from(0.5, 0.75))["learned"]


@pytest.mark.parametrize(("accuracy", "learned"), [(0.75, True), (0.74, False)])
def test_what_counts_of_preferences_is_the_last_held_out_accuracy(learning, accuracy, learned):
    logs = [{"rewards/accuracies": 0.5}] * 20
    logs += [{"eval_rewards/accuracies": 1.0}, {"eval_rewards/accuracies": accuracy}]
    found = learning.of_preferences(logs)
    assert (found["held_out"], found["learned"]) == (accuracy, learned)
    assert (found["steps"], found["last"]) == (20, 0.5)


def test_a_run_that_has_not_learned_is_called_so(learning):
    figures = []
    for seed, last in enumerate((0.75, 0.3)):
        run = {"recipe": "grpo", "seed": seed, "seconds": 61.4}
        figures.append(run | learning.of_rewards(rewards_from(0.25, last)))
    *_, first, second = learning.page(figures).splitlines()
    assert first == "| grpo | 0 | 21 | 61 | 0.250 | 0.750 | 0.500 | learned |"
    assert second == "| grpo | 1 | 21 | 61 | 0.250 | 0.300 | 0.500 | NOT LEARNED |"
