"""What grpo.py does around the training; the last test is a whole run on forked ranks."""

import json
import re
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from arguments import ModelArguments
from grpo import ENDS, find_reference, main, summary
from tests.programs import ROOT, run_program_on_ranks


def test_a_divergence_from_a_model_without_a_name_is_refused():
    new = ModelArguments(model_config={"model_type": "llama"})
    find_reference(SimpleNamespace(beta=0.0), new)
    with pytest.raises(ValueError, match="beta=0.1: .* give model_name_or_path, or set beta to 0"):
        find_reference(SimpleNamespace(beta=0.1), new)


def test_options_that_do_not_go_together_are_one_line(capsys):
    config = str(ROOT / "recipes/quickstart/grpo.yaml")
    with pytest.raises(SystemExit) as ended:
        main(["--config", config, "--beta", "0.1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: beta=0.1: TRL loads the reference by name")


def test_the_reference_is_the_revision_that_was_named():
    training = SimpleNamespace(beta=0.1, model_init_kwargs=None)
    find_reference(training, ModelArguments(model_name_or_path="some/model"))
    assert training.model_init_kwargs is None
    find_reference(
        training, ModelArguments(model_name_or_path="some/model", model_revision="v2", lora_r=8)
    )
    assert training.model_init_kwargs is None
    find_reference(training, ModelArguments(model_name_or_path="some/model", model_revision="v2"))
    assert training.model_init_kwargs == {"revision": "v2"}


def test_the_summary_compares_the_rewards_of_both_ends():
    logs = [{"reward": 0.25}] * ENDS + [{"reward": 0.75}] * ENDS
    logs += [{"eval_reward": 0.2}, {"eval_reward": 0.8}]
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir="runs/x", plan_trace=None),
        state=SimpleNamespace(log_history=logs),
    )
    first, second, third = summary(trainer).splitlines()
    assert first == "mean reward:   0.25 -> 0.75 (10 logs each)"
    assert second == "held out:      0.20 -> 0.80"
    assert "runs/x" in third


@pytest.mark.processes
def test_a_whole_run_on_two_ranks_with_a_reward_of_ones_own(tmp_path):
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(
        "def long(completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    options = {
        "config": "recipes/quickstart/grpo.yaml",
        "output_dir": tmp_path / "out",
        "max_train_documents": 8,
        "max_held_out_documents": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_tokens_per_rank": 500,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--reward_functions", "counts_on", f"{rewards}:long"]
    printed, _ = run_program_on_ranks(2, ROOT / "recipes/grpo.py", *words)
    assert re.search(r"held out:      \d\.\d\d -> \d\.\d\d", printed)
    assert len((tmp_path / "out" / "plan_trace.jsonl").read_text().splitlines()) == 2
    logs = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in logs if "reward" in entry]
    assert len(steps) == 2
    for entry in steps:
        parts = entry["rewards/counts_on/mean"] + entry["rewards/long/mean"]
        assert entry["reward"] == pytest.approx(parts)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 13
