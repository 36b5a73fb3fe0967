"""What dpo.py does around the training; the last test is a whole run on forked ranks."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from arguments import ModelArguments
from dpo import load_reference, summary
from model import load_base
from tests.programs import ROOT, run_program_on_ranks

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_the_reference_of_a_new_model_has_the_same_weights(tokenizer):
    model_args = ModelArguments(model_config=TINY)
    training = SimpleNamespace(seed=3, precompute_ref_log_probs=False)
    set_seed(training.seed)
    model = load_base(model_args, tokenizer)
    reference = load_reference(model_args, training, tokenizer)
    assert reference is not model
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_there_is_no_second_model_where_none_is_needed(tokenizer):
    training = SimpleNamespace(seed=3, precompute_ref_log_probs=False)
    adapters = ModelArguments(model_name_or_path="some/model", lora_r=8)
    assert load_reference(adapters, training, tokenizer) is None
    training.precompute_ref_log_probs = True
    assert load_reference(ModelArguments(model_config=TINY), training, tokenizer) is None


def test_the_summary_says_how_many_pairs_are_in_order():
    logs = [{"eval_loss": 0.6, "eval_rewards/accuracies": 0.5}]
    logs.append({"eval_loss": 0.31, "eval_rewards/accuracies": 0.825})
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir="runs/x", plan_trace=None),
        state=SimpleNamespace(log_history=logs),
    )
    first, second = summary(trainer).splitlines()
    assert first == "held out:      loss 0.31, 82% of the pairs in their order"
    assert "runs/x" in second


@pytest.mark.processes
def test_a_whole_run_on_two_ranks(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    with pairs.open("w") as file:
        for i in range(32):
            row = {"prompt": f"say {i}: ", "chosen": f"{i} " * (2 + 30 * (i % 8 == 0))}
            file.write(json.dumps(row | {"rejected": "no " * (1 + i % 5)}) + "\n")
    options = {
        "config": "recipes/quickstart/dpo.yaml",
        "output_dir": tmp_path / "out",
        "dataset": pairs,
        "tokenizer_vocab_size": 300,
        "tokenizer_cache": tmp_path / "bpe",
        "held_out_fraction": 0.3,
        "max_length": 128,
        "max_tokens_per_rank": 100,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    printed, _ = run_program_on_ranks(2, ROOT / "recipes/dpo.py", *words)
    assert re.search(r"held out:      loss \d\.\d\d, \d+% of the pairs in their order", printed)
    assert len((tmp_path / "out" / "plan_trace.jsonl").read_text().splitlines()) == 2
    logs = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert sum("rewards/accuracies" in entry for entry in logs) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
