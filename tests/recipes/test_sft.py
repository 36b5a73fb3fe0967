"""What sft.py does around the training; the last tests are whole runs: one by the documented
command, one on forked ranks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_flexseq.cli import main
from progress import log_line
from sft import summary
from tests.programs import ROOT, run_program_on_ranks

FIGURES = {
    "micro_batches": 2.0,
    "groups_of_1": 3.0,
    "groups_of_2": 1.0,
    "predicted_s": 1.0,
    "measured_s": 1.25,
    "tokens_per_s": 8000.0,
}


def test_a_step_is_one_line():
    line = log_line(7, {"loss": 5.4321, "learning_rate": 1e-3}, FIGURES)
    assert line.startswith("step    7  loss 5.432  3 x degree 1 + 1 x degree 2 in 2 micro-batch")
    assert "\n" not in line
    of_pipeline = log_line(7, {"loss": 5.4321}, {"chunks": 9.0, "stages": 2.0} | FIGURES)
    assert of_pipeline.startswith(
        "step    7  loss 5.432  9 chunk(s) through 2 stages, predicted 1.000 s"
    )
    assert log_line(0, {"eval_loss": 8.3}, FIGURES) == "step    0  held-out loss 8.300"
    assert log_line(9, {"train_runtime": 1.0}, FIGURES) is None


def test_a_step_says_what_its_trainer_is_after():
    logs = {"loss": 0.5, "rewards/accuracies": 0.75}
    assert log_line(3, logs, None) == "step    3  loss 0.500  accuracy 0.750"
    assert (
        log_line(3, {"loss": 0.0, "reward": 0.25}, None) == "step    3  loss 0.000  reward 0.250"
    )
    assert log_line(4, {"eval_loss": 0.5, "eval_reward": 1.0}, None) == (
        "step    4  held-out loss 0.500  reward 1.000"
    )


def test_the_summary_ends_with_what_a_user_looks_for(tmp_path):
    logs = [{"eval_loss": 8.314}, {"loss": 7.0}, {"eval_loss": 6.02}]
    args = SimpleNamespace(output_dir="runs/x", plan_trace="runs/x/plan_trace.jsonl")
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(log_history=logs))
    first, second, third = summary(trainer).splitlines()
    assert first == "held-out loss: 8.31 -> 6.02"
    assert second.endswith("runs/x/plan_trace.jsonl")
    assert 'AutoModelForCausalLM.from_pretrained("runs/x")' in third


def words_of_a_run(folder, config, **options) -> list[str]:
    """The options of a run of three steps that writes to folder / "out"."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(24):
        (corpus / f"{i}.txt").write_text(f"line {i} of a file\n" * (1 + 60 * (i % 8 == 0)))
    options |= {
        "config": f"recipes/quickstart/{config}",
        "output_dir": folder / "out",
        "dataset": corpus,
    }
    options |= {
        "tokenizer_vocab_size": 300,
        "tokenizer_cache": folder / "bpe",
        "held_out_fraction": 0.3,
    }
    options |= {"max_length": 256, "max_steps": 3, "per_device_train_batch_size": 2}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def launch_recipe(folder, words) -> str:
    """What `accelerate launch recipes/sft.py` prints, on two processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += [
        "--config_file",
        "recipes/accelerate_configs/cpu.yaml",
        "--main_process_port",
        "0",
        "recipes/sft.py",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"),
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [*command, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_whole_run_on_two_processes(tmp_path):
    words = words_of_a_run(tmp_path, "small_llama.yaml", max_tokens_per_rank=200)
    assert "held-out loss: 5." in launch_recipe(tmp_path, words)
    assert len((tmp_path / "out" / "plan_trace.jsonl").read_text().splitlines()) == 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) <= 300


@pytest.mark.processes
def test_a_whole_run_in_two_stages(tmp_path, capsys):
    words = words_of_a_run(tmp_path, "pipeline.yaml", max_tokens_per_rank=100)
    printed, _ = run_program_on_ranks(2, ROOT / "recipes/sft.py", *words)
    assert "held-out loss: 5." in printed
    assert printed.count("chunk(s) through 2 stages, predicted") == 3
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert len(model.model.layers) == 3
    trace = str(tmp_path / "out" / "plan_trace.jsonl")
    assert main(["view", trace, "--step", "2"]) == 0
    assert "chunks through 2 stages by auto, predicted" in capsys.readouterr().out
    picture = tmp_path / "step.png"
    assert main(["view", trace, "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
