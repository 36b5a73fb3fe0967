"""Whole runs of the recipes on two ranks, which are forks; once a week by the documented
command."""

import json
import os
import re
import subprocess
import sys

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_flexseq.cli import main
from tests.programs import ROOT, run_program_on_ranks

pytestmark = pytest.mark.processes
STEPS = 2
LOADED = "held-out loss: 5."
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def words_of_run(config, folder, *more, **options):
    """The options of a run of two steps that writes to folder / "out"."""
    options = {
        "config": f"recipes/{config}.yaml",
        "output_dir": folder / "out",
        "tokenizer_vocab_size": 300,
        "tokenizer_cache": folder / "bpe",
        "held_out_fraction": 0.3,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
    } | options
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, *more]


def run(recipe, folder, words):
    """What the first rank prints, and the entries that training has logged."""
    printed, _ = run_program_on_ranks(2, ROOT / f"recipes/{recipe}.py", *words)
    assert len((folder / "out/plan_trace.jsonl").read_text().splitlines()) == STEPS
    return printed, json.loads((folder / "out/trainer_state.json").read_text())["log_history"]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(24):
        text = f"line {i} of a file\n" * (1 + 60 * (i % 8 == 0))
        (tmp_path / f"corpus/{i}.txt").write_text(text)
    return {"dataset": tmp_path / "corpus", "max_length": 256}


def launch(folder, words, recipe="sft"):
    """What `accelerate launch recipes/sft.py` prints, on two processes."""
    config = ["--config_file", "recipes/accelerate_configs/cpu.yaml", "--main_process_port", "0"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *config]
    environment = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"recipes/{recipe}.py", *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "launched", [False, pytest.param(True, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])]
)
def test_supervised(tmp_path, corpus, launched):
    words = words_of_run("quickstart/small_llama", tmp_path, **corpus, max_tokens_per_rank=200)
    printed = launch(tmp_path, words) if launched else run("sft", tmp_path, words)[0]
    assert LOADED in printed
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= 300


def test_supervised_in_two_stages(tmp_path, corpus, capsys):
    words = words_of_run("quickstart/pipeline", tmp_path, **corpus, max_tokens_per_rank=100)
    printed, _ = run("sft", tmp_path, words)
    assert LOADED in printed
    assert printed.count("chunk(s) through 2 stages, predicted") == STEPS
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert len(model.model.layers) == 3
    trace, picture = str(tmp_path / "out/plan_trace.jsonl"), tmp_path / "step.png"
    assert main(["view", trace, "--step", "1"]) == 0
    assert "chunks through 2 stages by auto, predicted" in capsys.readouterr().out
    assert main(["view", trace, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_supervised_with_experts_on_both_ranks(tmp_path, corpus):
    words = words_of_run("quickstart/experts", tmp_path, **corpus, max_tokens_per_rank=200)
    printed, _ = run("sft", tmp_path, words)
    assert LOADED in printed
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 8


def test_preferences(tmp_path, tokenizer):
    config = LlamaConfig(**SIZES, vocab_size=300, max_position_embeddings=128)
    for saved in (tokenizer, LlamaForCausalLM(config)):
        saved.save_pretrained(tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    with pairs.open("w") as file:
        for i in range(32):
            row = {"prompt": f"say {i}: ", "chosen": f"{i} " * (2 + 30 * (i % 8 == 0))}
            file.write(json.dumps(row | {"rejected": "no " * (1 + i % 5)}) + "\n")
    options = {"model_name_or_path": tmp_path / "model", "dataset": pairs}
    options |= {"max_length": 128, "max_tokens_per_rank": 100}
    words = words_of_run("smollm2-135m/dpo", tmp_path, **options)
    printed, logs = run("dpo", tmp_path, words)
    assert re.search(r"held out:      loss \d\.\d\d, \d+% of the pairs in their order", printed)
    assert sum("rewards/accuracies" in entry for entry in logs) == STEPS
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_rewards_of_ones_own(tmp_path):
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text(
        "def long(completions, **columns):\n    return [len(c) for c in completions]\n"
    )
    sizes = {"max_train_documents": 8, "max_held_out_documents": 2, "max_tokens_per_rank": 500}
    sizes |= {"num_generations": 4, "max_completion_length": 4}
    batches = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    own = ("--reward_functions", "counts_on", f"{rewards}:long")
    printed, logs = run(
        "grpo", tmp_path, words_of_run("quickstart/grpo", tmp_path, *own, **sizes, **batches)
    )
    assert re.search(r"held out:      \d\.\d\d -> \d\.\d\d", printed)
    steps = [entry for entry in logs if "reward" in entry]
    assert len(steps) == STEPS
    for entry in steps:
        parts = entry["rewards/counts_on/mean"] + entry["rewards/long/mean"]
        assert entry["reward"] == pytest.approx(parts)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 13


def words_of_pictures(folder, *more, **options):
    """The options of a run on drawn pictures, in which some are cut by two ranks."""
    options = {
        "config": "recipes/quickstart/vlm.yaml",
        "output_dir": folder / "out",
        "held_out_albums": 4,
        "max_steps": STEPS,
        "max_tokens_per_rank": 270,
    } | options
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def logged_losses(folder):
    logs = json.loads((folder / "out/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in logs if "loss" in entry]


def test_pictures(tmp_path):
    printed, _ = run("vlm", tmp_path, words_of_pictures(tmp_path))
    assert re.search(r"right answers: \d+% -> \d+% \(held out\)", printed)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


@pytest.mark.nightly
def test_pictures_give_the_plain_trainers_losses(tmp_path):
    run("vlm", tmp_path / "ours", words_of_pictures(tmp_path / "ours"))
    words = words_of_pictures(tmp_path / "plain", plain_trainer=True)
    run_program_on_ranks(2, ROOT / "recipes/vlm.py", *words)
    stock = logged_losses(tmp_path / "plain")
    assert len(stock) == STEPS
    assert logged_losses(tmp_path / "ours") == pytest.approx(stock, rel=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_pictures_are_looked_at_and_trained_on_further(tmp_path):
    """The run of the page on images as it is, and those that go on from it."""
    sizes = {"max_steps": 600, "max_tokens_per_rank": 512, "held_out_albums": 64}
    words = words_of_pictures(tmp_path / "new", **sizes)
    printed = launch(tmp_path, words, "vlm")
    before, after = re.search(r"right answers: (\d+)% -> (\d+)%", printed).groups()
    assert int(before) < 30
    assert int(after) > 90
    named = {"model_name_or_path": tmp_path / "new/out", "learning_rate": 1e-4}
    for name, options in {"lora": {"lora_r": 4}, "frozen": {"freeze": "tower"}}.items():
        words = words_of_pictures(tmp_path / name, **named, **options)
        printed, _ = run("vlm", tmp_path / name, words)
        before, _ = re.search(r"right answers: (\d+)% -> (\d+)%", printed).groups()
        assert int(before) > 90


@pytest.mark.nightly
def test_the_hand_written_loop_learns():
    """The loop of the README as it is."""
    printed, nothing = run_program_on_ranks(2, ROOT / "recipes/accelerate_loop.py")
    *losses, held_out = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 20
    assert max(losses[-1], held_out) < losses[0] - 2
    assert nothing == ""
